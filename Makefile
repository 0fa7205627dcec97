# Every target does its own set-up, from an empty clone too; a second run starts at once.
#
#   make trial       prove it: a real vLLM server, its KV cache back from flash, one report.html
#   make test        the tests, at most 15 minutes on 2 cores
#   make test-deep   the same with full counts: an hour and more
#   make test-vm     power cuts, in virtual machines; says what it needs where that is missing
#   make check       linters, types, pages that must follow from the code
#   make bench       the storage path against its floor and its peers
#   make clean       remove all that the targets above made
#
# Settings: PYTHON=python3.12  TORCH_INDEX=https://download.pytorch.org/whl/cpu  PYTEST_ARGS="-k volume"  VENV=/elsewhere

SHELL := /bin/sh
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=
TORCH_INDEX ?=

# The first Python that fits and can make virtual environments; 3.11 first, since vLLM's CPU set is locked for it.
FITS := import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info < (3, 14))
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.10 python3; do \
	$$p -c "$(FITS)" >/dev/null 2>&1 && echo $$p && break; done)

# Servers write bytecode, so that the second start is fast; nothing outside the environment is imported.
unexport PYTHONDONTWRITEBYTECODE PYTHONPATH PYTHONHOME

SETUP = $(if $(PYTHON),,$(error no Python 3.10 to 3.13 with the venv module was found; name one: make PYTHON=...)) \
	$(PYTHON) scripts/setup_env.py --venv $(VENV) --torch-index "$(TORCH_INDEX)"

.PHONY: trial test test-deep test-vm check bench setup clean

trial:
	@$(SETUP) --need-vllm
	$(BIN)/rewarm trial run

test:
	@$(SETUP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-deep:
	@$(SETUP) --need-vllm
	$(BIN)/python -m pytest -m "not gpu and not vm" $(PYTEST_ARGS)

test-vm:
	@$(SETUP)
	$(BIN)/python -m pytest -m vm -s $(PYTEST_ARGS) tests/vm

check:
	@$(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python scripts/reference_docs.py --check
	$(BIN)/python scripts/tested_on.py --check
	$(BIN)/python scripts/grafana_dashboard.py --check
	$(BIN)/python bench/results_table.py --check
	$(BIN)/python bench/eviction_table.py --check
	$(BIN)/python bench/host_tier_table.py --check
	$(BIN)/python scripts/check_docs.py

bench:
	@$(SETUP)
	mkdir -p .cache/bench
	$(BIN)/rewarm bench kv --root .cache/bench

setup:
	@$(SETUP)

clean:
	rm -rf $(VENV) .cache build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
