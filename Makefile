# `make` sets up .venv, and again only when pyproject.toml has changed. `make train ARGS="debug --fake-devices 8"` passes ARGS on.

BIN := .venv/bin
ARGS ?=
# One more than the cores of a small machine: some tests wait for processes.
WORKERS ?= 3
# The extra that brings CUDA's libraries, where there is a GPU: `make train GPU=cuda13`, or `GPU=` for none.
GPU ?= $(if $(wildcard /dev/nvidiactl),cuda12)
# One worker runs all tests of a file, so that it compiles once what they share; in the order of the folders, since the
# files with few tests, which come last by themselves, are those that compile most.
PYTEST := JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Tests start hundreds of processes: where bytecode may not be kept, each compiles the same modules again.
export PYTHONDONTWRITEBYTECODE :=
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable

.PHONY: setup setup-dev train test test-fast test-all test-browser test-faults mutants soak bench docs screenshots lint clean

setup: .venv/.installed

setup-dev: .venv/.installed-dev

train: .venv/.installed
	$(if $(GPU),,JAX_PLATFORMS=cpu) $(BIN)/python -m ultrascale_jax train $(ARGS)

test: .venv/.installed-dev
	$(PYTEST) $(ARGS) --ignore=tests/nightly tests

test-fast: .venv/.installed-dev
	$(PYTEST) -m "not slow and not faults and not wide and not browser" $(ARGS) --ignore=tests/nightly tests

# With rows of tables that other rows imply, all faults, and a random search in place of hypothesis's fixed examples.
test-all: export HYPOTHESIS_PROFILE ?= random
test-all: .venv/.installed-dev
	$(PYTEST) -m "not browser" $(ARGS) tests

# The live page and the planner's in Chromium (`apt-get install chromium`).
test-browser: .venv/.installed-dev
	$(PYTEST) -m browser $(ARGS) tests/web

# Every row of the matrix of faults; `make test` has a part of them.
FAULTS := tests/faults tests/hostile tests/launch tests/health tests/data \
	$(addprefix tests/checkpoint/test_,fingerprint.py restoring.py saving.py step_dirs.py)

# They share no program, so any worker takes the next test. Two workers: jobs of four processes have bounds to keep.
test-faults: .venv/.installed-dev
	$(PYTEST) -n 2 --dist load -m "" $(ARGS) $(FAULTS)

# Bugs on purpose, each of which a test must notice; CONTRIBUTING.md. Not in CI.
mutants: .venv/.installed-dev
	JAX_PLATFORMS=cpu $(BIN)/python -m tests.mutants $(ARGS)

soak: .venv/.installed-dev
	JAX_PLATFORMS=cpu $(BIN)/python -m tests.faults.soak $(ARGS)

bench: .venv/.installed
	$(if $(GPU),,JAX_PLATFORMS=cpu) $(BIN)/python -m scripts.bench $(ARGS)

# The site, in build/site, with the course's figures drawn anew; a link that leads nowhere is an error.
docs: .venv/.installed-dev
	JAX_PLATFORMS=cpu $(BIN)/python -m scripts.course figures
	JAX_PLATFORMS=cpu $(BIN)/python -m sphinx -q -W --keep-going -b html docs build/site

# The pictures of docs/pictures, by Chromium (`apt-get install chromium`); look at them. Not in CI.
screenshots: docs
	JAX_PLATFORMS=cpu $(BIN)/python -m scripts.screenshots $(ARGS)

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check

clean:
	rm -rf .venv build dist

.venv/pyvenv.cfg:
	@python=$$(PYTHON="$(PYTHON)" .ci/find_python.sh) && echo "Making .venv with $$python" && "$$python" -m venv .venv

.venv/.installed: pyproject.toml | .venv/pyvenv.cfg
	@echo "Installing into .venv (minutes, the first time)"
	@$(INSTALL) '.$(if $(GPU),[$(GPU)])'
	@touch $@

.venv/.installed-dev: pyproject.toml | .venv/pyvenv.cfg
	@echo "Installing into .venv, with what the tests need (minutes, the first time)"
	@$(INSTALL) '.[dev]'
	@touch $@
