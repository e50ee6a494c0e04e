# Every target that needs the environment makes it: Python 3.11+ and make are all you need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The CPU wheel of torch is pinned in constraints.txt; a plain `pip install torch` would pull CUDA.
STAMP := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
FLOWER := $(VENV)/.installed-flower
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

export DO_NOT_TRACK := 1
# Packages are compiled when first imported, not when installed. Without written bytecode every
# process would compile them again: a round over Flower took 16 s, not 8.
unexport PYTHONDONTWRITEBYTECODE
# Two workers on two cores: a thread each, or they wait for one another.
ONE_THREAD := OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1

.PHONY: examples papers papers-gpu coverage mutants fuzz docs setup dev run demo-flower test fast test-slow test-gpu lint type imports fmt bench study-mpmtl study-mtlsvm study-pfeb check clean help

help:            ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP)  ## make .venv and install exact pins of what a user needs

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("coterie needs Python 3.11 or newer, found " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[report,examples]'
	touch $(STAMP)

$(FLOWER): $(STAMP)
	$(INSTALL) -e '.[flower,report,examples]'
	touch $(FLOWER)

dev: $(DEV)      ## the same for work on the project: tests, checks, docs

$(DEV): $(STAMP)
	$(INSTALL) -e '.[dev]'
	touch $(DEV) $(FLOWER)

run: setup       ## auto (PFEB), local, FedAvg and the four published systems at epsilon 1, with a report
	$(BIN)/coterie demo --data districts --epsilon 1

demo-flower: $(FLOWER) ## a federation on this machine: SuperLink, 4 SuperNodes, TLS, keys, a report
	$(BIN)/coterie deploy demo

test: lint type imports  ## lint, types and the whole test suite but the slow tables
	$(ONE_THREAD) $(BIN)/python -m pytest -q -n 2 -m 'not slow and not gpu'

fast: dev      ## the daily subset, about a minute and a half
	$(ONE_THREAD) $(BIN)/python -m pytest -q -n 2 -m 'not slow and not full and not gpu'

test-slow: dev ## full tables and long Monte-Carlo
	$(ONE_THREAD) $(BIN)/python -m pytest -q -n 2 -m slow

test-gpu: dev  ## tests that need CUDA
	$(BIN)/python -m pytest -q -m gpu

coverage: dev  ## branches of privacy/ that its tests reach; fails below the floor
	$(ONE_THREAD) $(BIN)/python -m pytest -q -n 2 -m 'not slow and not gpu' tests/privacy tests/planning tests/engine --cov=coterie.privacy --cov-branch --cov-report=term-missing:skip-covered --cov-fail-under=90

lint: dev      ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: dev      ## mypy --strict on src
	$(BIN)/mypy

imports: dev   ## one-way imports
	$(BIN)/lint-imports

fmt: dev       ## format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: dev     ## speed on this machine, as ratios in one run
	$(BIN)/python benchmarks/accounting.py
	$(BIN)/python benchmarks/plan.py
	$(BIN)/python benchmarks/commands.py
	$(ONE_THREAD) $(BIN)/python benchmarks/compare.py
	$(BIN)/python benchmarks/linear.py
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/tables.py --rows 300000 --clients 3000
	$(BIN)/python benchmarks/distributed.py
	$(BIN)/python benchmarks/cnn.py --device cpu
	$(BIN)/python benchmarks/methods.py
	$(BIN)/python benchmarks/districts.py
	$(BIN)/python benchmarks/multitask.py
	$(BIN)/python benchmarks/moments.py
	$(BIN)/python benchmarks/svm.py
	$(BIN)/python benchmarks/svm_joint.py --clients 100
	$(BIN)/python benchmarks/pfeb_speed.py
	$(BIN)/python benchmarks/flower.py

study-mpmtl: dev ## remake the tables and plots of docs/methods/mpmtl.md
	$(BIN)/python benchmarks/mpmtl.py

study-mtlsvm: dev ## remake the tables and plots of docs/methods/mtlsvm.md
	$(ONE_THREAD) $(BIN)/python benchmarks/mtlsvm.py
	$(ONE_THREAD) $(BIN)/python benchmarks/reconstruction.py --out docs/methods/mtlsvm

study-pfeb: dev ## remake the tables and plots of docs/methods/pfeb.md
	$(ONE_THREAD) $(BIN)/python benchmarks/pfeb.py

papers: dev    ## remake every item of the four papers that 2 CPU cores can: 15 minutes of CPU time
	$(ONE_THREAD) $(BIN)/python tools/papers.py run

papers-gpu: dev ## remake the items that need CUDA
	$(BIN)/python tools/papers.py run --machine gpu

examples: dev  ## write what commands and notebooks of the documentation print today; read the diff
	COTERIE_REWRITE=1 $(ONE_THREAD) $(BIN)/python -m pytest -q -n 2 tests/test_docs.py -k test_examples_run
	$(BIN)/python tools/notebooks.py

docs: dev      ## build the site into site/ without warnings
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

screenshots: dev ## pictures of every kind of page, into build/screenshots; needs Chromium
	$(BIN)/python tools/screenshot.py --all build/screenshots

mutants: dev   ## break the mechanism on purpose; every mutant must be caught
	$(BIN)/python tools/mutants.py

fuzz: dev      ## 1,000 damaged files to every reader, with a fixed seed
	$(ONE_THREAD) $(BIN)/python tools/fuzz.py

check: test      ## what CI runs

clean:           ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
