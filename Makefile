# rayfed: `make` lists what can be made. Needs Python 3.11 or newer and make; everything else goes into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Passed on: make demo DEMO_ARGS="rounds=2", make test TEST_ARGS="-k placement", make bench BENCH_ARGS="..."
DEMO_ARGS ?=
TEST_ARGS ?=
TEST_WORKERS ?= 2
BENCH_ARGS ?=

.DEFAULT_GOAL := help
PYTEST = $(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) --dist loadscope --no-loadscope-reorder

.PHONY: help venv install demo test test-all record-weights lint format bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP) ## install rayfed and its tools into .venv (nothing to do when up to date)

install: venv ## the same as venv

# torch comes first and alone: a plain pin gives the build that suits the machine (with CUDA or without), and what is
# installed later finds it in place. torchvision comes without dependencies, so that it cannot ask for another torch.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "rayfed needs Python 3.11 or newer; $(PYTHON) is `$(PYTHON) --version 2>&1`. Try: make venv PYTHON=python3.12" >&2; \
	  exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(PIP) torch
	$(PIP) --no-deps torchvision
	$(PIP) --editable '.[dev]'
	@touch $@

demo: $(STAMP) ## the sweep of the README on embedded data, and its table
	$(BIN)/python -m rayfed.sweep tune_spaces/demo.yaml $(DEMO_ARGS)

test: $(STAMP) ## the tests, in two processes (TEST_WORKERS=1 for one): minutes
	$(PYTEST) $(TEST_ARGS)

test-all: $(STAMP) ## all tests, the slow ones too
	$(PYTEST) -m "" $(TEST_ARGS)

record-weights: $(STAMP) ## the final weights that tests compare, anew: only where results are meant to change
	PYTHONPATH=.:tests OMP_NUM_THREADS=1 $(BIN)/python -m helpers.final_weights

lint: $(STAMP) ## style, format and types
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

format: $(STAMP) ## put the code into the format that lint asks for
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

bench: $(STAMP) ## every script in benchmarks/
	@set -e; for script in benchmarks/[a-z]*.py; do \
	  echo "== $$script"; $(BIN)/python "$$script" $(BENCH_ARGS); done

clean: ## remove .venv and everything that tools left behind; results stay
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
