# The venv's interpreter once there is one, else the caller's.
VENV ?= .venv
PYTHON ?= $(if $(wildcard $(VENV)/bin/python),$(VENV)/bin/python,python3)
ENGINE = $(PYTHON) -m patches.engine

.PHONY: compose pin check-patches check-forward export

compose:  ## upstream + patches + overlay -> build/composed
	$(ENGINE) compose

pin:  ## record hashes in upstream.toml after a change of topics or overlay
	$(ENGINE) pin

check-patches:  ## resolve every anchor, verify hashes, compile what changed
	$(ENGINE) check

export:  ## git-format patches against clean upstream -> build/export, proven to apply
	$(ENGINE) export

check-forward:  ## WHEEL=path: which anchors still resolve in another upstream version
	@test -n "$(WHEEL)" || { echo "usage: make check-forward WHEEL=path/to/sglang-VERSION-...whl" >&2; exit 2; }
	$(ENGINE) forward --wheel $(WHEEL)
