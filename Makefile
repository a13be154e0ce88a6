# `make` lists the targets. They need make and Python 3.11 or newer, and install everything else into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV := $(VENV)/.dev
DOCS := $(VENV)/.docs
LOWEST := build/lowest
UV := build/uv
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
EDITABLE := --config-settings editable_mode=compat --editable

# Extra arguments: make demo DEMO_ARGS="rounds=2", make test TEST_ARGS="-k placement", make bench BENCH_ARGS="...",
# make test-pythons PYTHONS="python3.12 /usr/bin/python3", make bench-peers PEERS_ARGS="--jobs many-clients --repeats 5"
DEMO_ARGS ?=
TEST_ARGS ?=
PYTHONS ?= /usr/bin/python3 python3.12 python3.13
# one process and a half per core, because tests also wait, and 2 GB of memory for each
TEST_WORKERS ?= $(shell awk -v n=$$((`nproc` * 3 / 2)) '/^MemTotal/ {m = int($$2 / 2e6); print m < 1 ? 1 : m < n ? m : n}' \
  /proc/meminfo)
BENCH_ARGS ?=
PEERS_ARGS ?=

SOAK := benchmarks/fuzz.py benchmarks/faults.py benchmarks/soak.py

.DEFAULT_GOAL := help
PYTEST = $(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) --dist loadscope --no-loadscope-reorder

.PHONY: help venv tools install demo test test-all test-lowest test-pins test-pythons record-weights lint \
        lint-all format docs site bench bench-peers references soak clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP) ## install rayfed into .venv, unless it is up to date

tools: $(DEV) $(DOCS) ## also install what the tests, lint and the site need, as each does by itself

install: venv ## same as venv

# torch is installed first: its plain pin selects the build for this machine (CUDA or CPU), which later installations
# then find in place. torchvision is installed without dependencies, so that it cannot replace that build. In the mode
# "compat", `import rayfed` finds the package also for a script beside the clone, where a folder `rayfed` is the clone.
$(STAMP): pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c '$(NEW_ENOUGH)' 2>/dev/null || { \
	  echo "rayfed needs Python 3.11 or newer; $(PYTHON) is `$(PYTHON) --version 2>&1`. Try: make venv PYTHON=python3.12" >&2; \
	  exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(PIP) torch
	$(PIP) --no-deps torchvision
	$(PIP) $(EDITABLE) .
	@touch $@

# the tools of the tests and of lint, and those of the site
$(DEV) $(DOCS): $(VENV)/.%: $(STAMP)
	$(PIP) $(EDITABLE) '.[$*]'
	@touch $@

demo: $(STAMP) ## run the sweep of the README on the embedded data
	$(BIN)/rayfed sweep demo $(DEMO_ARGS)

test: $(DEV) ## run the tests without the slow ones, in as many processes as suit the machine (TEST_WORKERS=1 for one)
	$(PYTEST) $(TEST_ARGS)

test-all: $(DEV) ## run all tests, the slow ones too
	$(PYTEST) -m "" $(TEST_ARGS)

test-lowest: ## run the demo, the tests of Ray and others with the lowest versions that pyproject.toml declares
	$(PYTHON) -m venv $(LOWEST)
	sed -nE '/^dependencies/,/^]/s/^ *"([a-zA-Z-]+)(\[.*\])?>=([0-9.]+)[",].*/\1==\3/p' pyproject.toml > $(LOWEST)/lowest.txt
	$(LOWEST)/bin/python -m pip install --quiet --constraint $(LOWEST)/lowest.txt --editable . pytest hypothesis jsonschema psutil
	$(LOWEST)/bin/rayfed sweep demo rounds=2 seeds=[0] results=$(LOWEST)/results
	$(LOWEST)/bin/python -m pytest -m "ray and not slow" tests/distributed tests/engine
	$(LOWEST)/bin/python -m pytest -m "not ray and not slow" tests/core tests/data tests/metrics tests/models tests/records tests/reports

test-pins: ## resolve the pins and all extras for each declared Python, from the metadata of a package index
	$(PYTHON) -m venv $(UV)
	$(UV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
	@set -e; for version in `sed -nE 's/.*Python :: (3\.[0-9]+)".*/\1.0/p' pyproject.toml`; do \
	  echo "== Python $$version"; \
	  UV_SYSTEM_CERTS=1 $(UV)/bin/uv pip compile --quiet --all-extras --constraint constraints.txt --only-binary :all: \
	    --python-version $$version --output-file $(UV)/$$version.txt pyproject.toml; done

test-pythons: ## run the demo with each of PYTHONS that is there, downloading up to 2.4 GB for each
	@set -e; for python in $(PYTHONS); do \
	  $$python -c '$(NEW_ENOUGH)' 2>/dev/null || { echo "== $$python: not there, or too old"; continue; }; \
	  echo "== $$python: `$$python --version`"; rm -rf build/python; \
	  $(MAKE) demo PYTHON=$$python VENV=build/python/venv DEMO_ARGS="results=build/python/results $(DEMO_ARGS)"; \
	  rm -r build/python; done

record-weights: $(DEV) ## record the final weights that tests compare, only where results are meant to change
	PYTHONPATH=.:tests OMP_NUM_THREADS=1 $(BIN)/python -m helpers.final_weights

lint: $(DEV) ## check style, format and types
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/lint-imports --no-logo

lint-all: lint ## also compare the pinned versions with known vulnerabilities, where the package index offers that
	@$(PYTHON) -m venv build/audit && build/audit/bin/pip install --quiet pip-audit && \
	  build/audit/bin/pip-audit --no-deps --disable-pip --requirement constraints.txt

format: $(DEV) ## fix style and format
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

docs: $(DEV) ## regenerate docs/algorithms.md, then check the pages' links and snippets
	PYTHONPATH=. $(BIN)/python docs/theme/algorithms_page.py
	$(BIN)/python -m pytest -k "test_pages or test_documents or test_snippets"

site: $(DOCS) ## build the documentation as a site in build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/python -m mkdocs build --quiet --strict
	@echo "The pages are in build/site: open build/site/index.html, or run python3 -m http.server -d build/site"

bench: $(DEV) ## run every script in benchmarks/, except those of `make soak`
	@set -e; for script in $(filter-out $(SOAK),$(wildcard benchmarks/[a-z]*.py)); do \
	  echo "== $$script"; $(BIN)/python "$$script" $(BENCH_ARGS); done

soak: $(DEV) ## hours of hostile files, of random faults, and of a run whose memory is watched
	@set -e; for script in $(SOAK); do \
	  echo "== $$script"; $(BIN)/python "$$script"; done

bench-peers: $(DEV) ## time a round beside a bare loop, Flower and pfl-research, which it installs into build/peers
	PYTHONPATH=benchmarks:. $(BIN)/python -m peers $(PEERS_ARGS)

references: $(DEV) ## train side by side with other projects' code; REFERENCES_ARGS names checkouts of it
	PYTHONPATH=benchmarks:. $(BIN)/python -m references $(REFERENCES_ARGS)

clean: ## remove .venv, builds and caches, but not results/
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
