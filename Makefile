# `make test` and `make lint` need nothing but Python 3.10 to 3.13, a C compiler and git: the rest goes into .venv.
VENV ?= .venv
BOOTSTRAP_PYTHON ?= python3
UV_VERSION = 0.13.9
READY = $(VENV)/.ready
IN_VENV = $(VENV)/bin/python

# What only reads or composes runs on any Python that has libcst; the venv's if there is one.
PYTHON ?= $(if $(wildcard $(IN_VENV)),$(IN_VENV),python3)
ENGINE = $(PYTHON) -m patches.engine
SOURCES = patches python sgl-kernel benchmark models test setup.py
TESTS ?= test

# A server imports thousands of modules; without its byte code each start takes three times as long.
unexport PYTHONDONTWRITEBYTECODE
# uv does not read pip's variables. Where the environment points pip somewhere, follow it.
ifdef PIP_INDEX_URL
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
endif
ifdef PIP_CERT
export SSL_CERT_FILE ?= $(PIP_CERT)
endif

.PHONY: help compose pin check-patches check-forward export wheel venv dev test lint format clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1: /p' $(MAKEFILE_LIST) | awk -F': ' '{ printf "%-14s %s\n", $$1, $$2 }'

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

wheel:  ## dist/sglang-0.5.17+verify.N-*.whl
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .
	@ls dist/*.whl

venv: $(READY)  ## .venv with the pinned requirements of serving on a CPU, linting and testing

$(READY): requirements/dev.txt
	$(BOOTSTRAP_PYTHON) -m venv $(VENV)
	$(IN_VENV) -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	$(VENV)/bin/uv pip install --quiet --python $(IN_VENV) --no-deps -r requirements/dev.txt
	@touch $@

dev: $(READY)  ## the fork importable in .venv; after an edit, `make compose` is enough
	$(IN_VENV) -m patches.engine compose
	$(VENV)/bin/uv pip install --quiet --python $(IN_VENV) --no-deps --no-build-isolation --editable .

test: dev  ## all tests that need no GPU (TESTS=path for some)
	OMP_NUM_THREADS=1 $(IN_VENV) -m pytest -m "not slow and not gpu" $(TESTS)

lint: $(READY)  ## ruff and mypy
	$(IN_VENV) -m ruff check .
	$(IN_VENV) -m ruff format --check .
	$(IN_VENV) -m mypy

format: $(READY)  ## let ruff format and fix
	$(IN_VENV) -m ruff check --fix .
	$(IN_VENV) -m ruff format .

clean:  ## remove build products; the venv and the wheel cache stay
	rm -rf build dist
