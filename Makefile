# `make` sets up .venv, and again only when pyproject.toml has changed. `make train ARGS="debug --fake-devices 8"` passes ARGS on.

BIN := .venv/bin
ARGS ?=
# As many as a small machine has cores: a third took 8% more CPU seconds, and the suite no less time.
WORKERS ?= 2
# The extra that brings CUDA's libraries, where there is a GPU: `make train GPU=cuda13`, or `GPU=` for none.
GPU ?= $(if $(wildcard /dev/nvidiactl),cuda12)
# One worker runs all tests of a file, so that it compiles once what they share; in the order of `testpaths`, in which the
# folders that compile most come first.
PYTEST := JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Tests start hundreds of processes: where bytecode may not be kept, each compiles the same modules again.
export PYTHONDONTWRITEBYTECODE :=
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable

.PHONY: setup setup-dev train test test-fast test-nightly mutants soak bench docs lint clean

setup: .venv/.installed

setup-dev: .venv/.installed-dev

train: .venv/.installed
	$(if $(GPU),,JAX_PLATFORMS=cpu) $(BIN)/python -m ultrascale_jax train $(ARGS)

# The folders of every day (`testpaths` of pyproject.toml), or those of ARGS: `make test ARGS="-x tests/unit/data"`.
test: .venv/.installed-dev
	$(PYTEST) $(ARGS)

test-fast: .venv/.installed-dev
	$(PYTEST) $(ARGS) tests/unit

# All faults, whole tables, and a random search in place of hypothesis's fixed examples. Two workers, each with the next
# test: jobs of four processes have bounds to keep.
test-nightly: export HYPOTHESIS_PROFILE ?= random
test-nightly: .venv/.installed-dev
	$(PYTEST) -n 2 --dist load $(ARGS) tests/nightly

# Bugs on purpose, each of which a test must notice; CONTRIBUTING.md. Not in CI.
mutants: .venv/.installed-dev
	JAX_PLATFORMS=cpu $(BIN)/python -m tests.mutants $(ARGS)

soak: .venv/.installed-dev
	JAX_PLATFORMS=cpu $(BIN)/python -m tests.faults.soak $(ARGS)

bench: .venv/.installed
	$(if $(GPU),,JAX_PLATFORMS=cpu) $(BIN)/python -m scripts.bench $(or $(ARGS),peer)

# The site, in build/site; a link that leads nowhere is an error.
docs: .venv/.installed-dev
	JAX_PLATFORMS=cpu $(BIN)/python -m sphinx -q -W --keep-going -b html docs build/site

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
