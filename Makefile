# The venv's interpreter once there is one, else the caller's.
VENV ?= .venv
PYTHON ?= $(if $(wildcard $(VENV)/bin/python),$(VENV)/bin/python,python3)
ENGINE = $(PYTHON) -m patches.engine

.PHONY: compose pin check-patches

compose:  ## upstream + patches + overlay -> build/composed
	$(ENGINE) compose

pin:  ## record hashes in upstream.toml after a change of topics or overlay
	$(ENGINE) pin
