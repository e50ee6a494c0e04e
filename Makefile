# Every target that needs the environment makes it: Python 3.11+ and make are all you need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The CPU wheel of torch is pinned in constraints.txt; a plain `pip install torch` would pull CUDA.
STAMP := $(VENV)/.installed

export DO_NOT_TRACK := 1
# Two workers on two cores: a thread each, or they wait for one another.
ONE_THREAD := OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1

.PHONY: mutants setup run test fast test-slow test-gpu lint type imports fmt bench study-mpmtl study-mtlsvm study-pfeb check clean help

help:            ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP)  ## make .venv and install exact pins

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("coterie needs Python 3.11 or newer, found " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[report,examples,dev]'
	touch $(STAMP)

run: setup       ## auto (PFEB) beside local, FedAvg and PMTL on real data at epsilon 1, with a report
	$(BIN)/coterie demo --data districts --epsilon 1

test: lint type imports  ## lint, types and the whole test suite but the slow tables
	$(ONE_THREAD) $(BIN)/python -m pytest -q -n 2 -m 'not slow and not gpu'

fast: setup      ## the daily subset, about a minute and a half
	$(ONE_THREAD) $(BIN)/python -m pytest -q -n 2 -m 'not slow and not full and not gpu'

test-slow: setup ## full tables and long Monte-Carlo
	$(ONE_THREAD) $(BIN)/python -m pytest -q -n 2 -m slow

test-gpu: setup  ## tests that need CUDA
	$(BIN)/python -m pytest -q -m gpu

lint: setup      ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: setup      ## mypy --strict on src
	$(BIN)/mypy

imports: setup   ## one-way imports
	$(BIN)/lint-imports

fmt: setup       ## format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup     ## speed on this machine, as ratios in one run
	$(BIN)/python benchmarks/accounting.py
	$(BIN)/python benchmarks/linear.py
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/cnn.py --device cpu
	$(BIN)/python benchmarks/methods.py
	$(BIN)/python benchmarks/districts.py
	$(BIN)/python benchmarks/multitask.py
	$(BIN)/python benchmarks/moments.py
	$(BIN)/python benchmarks/svm.py
	$(BIN)/python benchmarks/svm_joint.py --clients 100
	$(BIN)/python benchmarks/pfeb_speed.py

study-mpmtl: setup ## remake the tables and plots of docs/methods/mpmtl.md
	$(BIN)/python benchmarks/mpmtl.py

study-mtlsvm: setup ## remake the tables and plots of docs/methods/mtlsvm.md
	$(ONE_THREAD) $(BIN)/python benchmarks/mtlsvm.py
	$(ONE_THREAD) $(BIN)/python benchmarks/reconstruction.py --out docs/methods/mtlsvm

study-pfeb: setup ## remake the tables and plots of docs/methods/pfeb.md
	$(ONE_THREAD) $(BIN)/python benchmarks/pfeb.py

mutants: setup   ## break the mechanism on purpose; every mutant must be caught
	$(BIN)/python tools/mutants.py

check: test      ## what CI runs

clean:           ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
