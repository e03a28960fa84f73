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
# Test processes side by side. Each may run a server of 3 GiB; files are dealt whole (test/conftest.py).
JOBS ?= 2

# A server imports thousands of modules; without its byte code each start takes three times as long.
unexport PYTHONDONTWRITEBYTECODE
# uv does not read pip's variables. Where the environment points pip somewhere, follow it; pip itself is the
# second try, for what a pip.conf says.
ifdef PIP_INDEX_URL
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif
ifdef PIP_EXTRA_INDEX_URL
export UV_INDEX ?= $(PIP_EXTRA_INDEX_URL)
endif
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
endif
ifdef PIP_CERT
export SSL_CERT_FILE ?= $(PIP_CERT)
endif

.PHONY: help readme-tables compose pin check-patches check-forward export wheel venv dev test test-differential test-properties demo lint format clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-17s %s\n", $$1, $$2 }'

compose:  ## upstream + patches + overlay -> build/composed
	$(ENGINE) compose

pin:  ## record hashes in upstream.toml after a change of topics or overlay
	$(ENGINE) pin

check-patches:  ## resolve every anchor, verify hashes, compile what changed
	$(ENGINE) check

export:  ## git-format patches against clean upstream -> build/export, cover letters -> build/review
	$(ENGINE) export

check-forward:  ## the recorded newer upstream (patches/forward.toml), or WHEEL=path or VERSION=x; RECORD=1 writes it
	$(ENGINE) forward $(if $(WHEEL),--wheel $(WHEEL)) $(if $(VERSION),--version $(VERSION)) $(if $(RECORD),--record)

wheel:  ## dist/sglang-0.5.17+verify.N-*.whl
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .
	@ls dist/*.whl

venv: $(READY)  ## .venv with the pinned requirements of serving on a CPU, linting and testing

# A Python that is too old or too new would end in pip's list of every version it cannot use.
CHECK_PYTHON = $(BOOTSTRAP_PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 10) <= v <= (3, 13) or sys.exit("error: Python %d.%d: the fork needs 3.10 to 3.13; name another: make BOOTSTRAP_PYTHON=python3.11" % v)'

$(READY): requirements/dev.txt
	@$(CHECK_PYTHON)
	$(BOOTSTRAP_PYTHON) -m venv $(VENV)
	$(IN_VENV) -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	$(VENV)/bin/uv pip install --quiet --python $(IN_VENV) --no-deps -r requirements/dev.txt \
		|| $(IN_VENV) -m pip install --quiet --no-deps -r requirements/dev.txt
	@touch $@

dev: $(READY)  ## the fork importable in .venv; after an edit, `make compose` is enough
	$(IN_VENV) -m patches.engine compose
	$(VENV)/bin/uv pip install --quiet --python $(IN_VENV) --no-deps --no-build-isolation --editable .

test: dev  ## all tests that need no GPU (TESTS=path for some, JOBS=n side by side)
	OMP_NUM_THREADS=1 $(IN_VENV) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not slow and not gpu" $(TESTS)

test-differential: dev  ## 320 generated requests, plain decoding against EAGLE-3 over HTTP (REQUESTS=n, SEED=n)
	DIFFERENTIAL_REQUESTS=$(or $(REQUESTS),320) $(if $(SEED),DIFFERENTIAL_SEED=$(SEED)) $(IN_VENV) -m pytest test/engine/differential

test-properties: dev  ## the property tests with examples that nobody has drawn before (TESTS=path for some)
	OMP_NUM_THREADS=1 $(IN_VENV) -m pytest -n $(JOBS) -m "hypothesis and not slow and not gpu and not server" \
		--hypothesis-profile=search $(TESTS)

# The demo needs less than the tests do: without a .venv it makes a smaller one of its own.
DEMO_VENV = $(if $(wildcard $(READY)),$(VENV),.venv-demo)
DEMO_ARGS ?=
# The committed row is written only when asked: make demo DEMO_OUT=benchmark/results/cpu_demo.json
DEMO_OUT ?= build/cpu_demo.json

.venv-demo/.ready: requirements/cpu.txt
	@echo "1/3 environment: .venv-demo, about 4.6 GB, from requirements/cpu.txt"
	@$(CHECK_PYTHON)
	$(BOOTSTRAP_PYTHON) -m venv .venv-demo
	.venv-demo/bin/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	.venv-demo/bin/uv pip install --quiet --python .venv-demo/bin/python --no-deps -r requirements/cpu.txt
	.venv-demo/bin/uv pip install --quiet --python .venv-demo/bin/python --no-deps $$(grep -E '^(libcst|wheel)==' requirements/dev.txt)
	@# PyPI's torch is the CUDA build. What it loads only on a GPU, and static archives, are 0.7 GB that a CPU never reads.
	@find .venv-demo \( -name '*.a' -o -name 'libcudnn_engines_precompiled*' -o -name 'libcudnn_adv*' \
		-o -name 'libcusolverMg*' -o -name 'libnvrtc*.alt*' \) -delete
	@touch $@

demo: $(DEMO_VENV)/.ready  ## serve the shipped model with and without EAGLE-3 on this CPU and compare
	@echo "2/3 the fork: upstream, patches and overlay"
	@$(DEMO_VENV)/bin/python -m patches.engine compose
	@$(DEMO_VENV)/bin/uv pip install --quiet --python $(DEMO_VENV)/bin/python --no-deps --no-build-isolation --editable .
	@echo "3/3 two servers, one after the other"
	@$(DEMO_VENV)/bin/python -m sglang.verify_demo --model-path models/nano --draft-path models/nano-eagle3 \
		--prompts models/prompts.jsonl --out $(DEMO_OUT) $(DEMO_ARGS)

lint: $(READY)  ## ruff and mypy
	$(IN_VENV) -m ruff check .
	$(IN_VENV) -m ruff format --check .
	$(IN_VENV) -m mypy

format: $(READY)  ## let ruff format and fix
	$(IN_VENV) -m ruff check --fix .
	$(IN_VENV) -m ruff format .

readme-tables:  ## benchmark rows -> headline.json -> the marked tables of README and docs
	PYTHONPATH=python $(PYTHON) -m sglang.bench_verify headline
	PYTHONPATH=python $(PYTHON) -m sglang.bench_verify tables $(wildcard README.md docs/*.md)

clean:  ## remove build products; the venv and the wheel cache stay
	rm -rf build dist
