# `make` lists the targets. Those that need .venv set it up first, which takes no time once it stands.
PYTHON ?= python3
BIN := .venv/bin
LAUNCH = $(shell $(PYTHON) tools/bootstrap.py launcher)

# The set-up compiles what every start imports; the rest is compiled, and kept, when it is first imported.
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup train test gpu long room quick check lab browser notebooks exercises book book-test pins clean

help:  ## list the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' Makefile

setup:  ## create .venv and install the pinned packages
	@$(PYTHON) tools/bootstrap.py setup

train: setup  ## fine-tune MiniLM on 2 CPU processes, or on every GPU; options in ARGS="--num_epochs 1"
	$(LAUNCH) course_lib/cli.py train --config configs/quickstart.yaml --overwrite_output_dir $(ARGS)

RUFF := $(BIN)/ruff check && $(BIN)/ruff format --check

# No test demands how a measured time comes out (tests/test_counted.py), so three files, which wait a lot, run at a time,
# in the order of tests/slices.py.
# Threads of OpenMP that wait for each other sleep: there are more of them than cores.
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/pytest --dist loadfile

test: setup  ## everything that needs no GPU: linters, types (tests/test_types.py), all tests
	$(RUFF)
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tests/gpu_sim/build.py
	$(PYTEST) tests -m "not long" -n 3 --no-loadscope-reorder $(ARGS)

gpu: setup  ## what runs on the GPUs here: a report to attach to an issue; everything with ARGS=--full
	$(BIN)/python benchmarks/gpu.py $(ARGS)

long: setup  ## more cases of what `make test` shows; the third of twelve parts with SLICE=3/12
	$(BIN)/python tests/gpu_sim/build.py
	$(PYTEST) tests -m long -n 2 --no-loadscope-reorder $(SLICE:%=--slice %) --times build/long-$(subst /,-of-,$(or $(SLICE),1/1)).json

room: setup  ## one room's tests, fast and long: ROOM=planning
	@test -d "tests/$(ROOM)" -a -n "$(ROOM)" || { echo "make room: ROOM=$(ROOM) is no folder of tests/, such as ROOM=planning"; exit 2; }
	$(PYTEST) tests/$(ROOM) -n 2

quick: setup  ## what to run while working: ruff and the fast tests
	$(RUFF)
	$(PYTEST) tests --quick -m "not long" -n 2

check: setup  ## ruff (lint and format), import-linter and mypy
	$(RUFF)
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

# Only in a notebook that is trusted does JupyterLab show drawings (SVG) that are stored.
# Lessons link to exercises and these to lessons, so the server's root is this folder. Jupyter refuses root, which in
# a container everybody is; it listens on this machine alone, and asks for a token, all the same.
AS_ROOT = $(if $(filter 0,$(shell id -u)),--allow-root)

lab: setup  ## open JupyterLab at lesson 0, exercises beside it; options in ARGS="--no-browser"
	@$(BIN)/jupyter trust $(wildcard notebooks/*.ipynb exercises/*.ipynb) > /dev/null
	$(BIN)/jupyter lab --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb $(AS_ROOT) $(ARGS)

browser: setup  ## lessons in JupyterLab, in a real browser: needs chromium and chromium-driver
	BROWSER_TESTS=required $(BIN)/pytest tests/notebooks/test_in_a_browser.py -m long

notebooks: setup  ## run all lessons and store their outputs, and what their ranks do
	$(BIN)/python tools/notebooks.py
	$(BIN)/python tools/recordings.py

exercises: setup  ## make exercises/ anew from solutions/
	$(BIN)/python tools/exercises.py

book: setup  ## the course as a site: build/book/index.html, read without a network
	$(BIN)/python -m book

book-test: book  ## open every page of the book in Chromium, which has to be there: links, contrast, width, search
	BROWSER_TESTS=required $(BIN)/pytest tests/book

pins:  ## take the newest versions that pyproject.toml allows into constraints.txt
	@$(PYTHON) tools/bootstrap.py pins

clean:  ## remove caches and build files; .venv and runs/ stay
	rm -rf build dist *.egg-info .cache .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -path ./.venv -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -type d -exec rm -rf {} +
