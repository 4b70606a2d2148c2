# Two commands on a fresh machine: `make up` trains the quickstart, `make test` runs the tests. Both set up first.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
ROOMS := pipeline actors learner tests benchmarks tools

# Compiled files halve the start of everything that imports torch; threads that wait for each other slow small tests.
export PYTHONDONTWRITEBYTECODE :=
export OMP_NUM_THREADS ?= 1

.PHONY: setup up test test-deep test-harness test-sandbox test-chaos check format bench bench-data-path bench-quickstart bench-proxy clean

setup: .setup/done

.setup/done: pyproject.toml tools/setup.py
	$(PYTHON) tools/setup.py

up: setup
	$(BIN)/clawpipe up configs/quickstart.toml $(ARGS)

test: setup
	$(BIN)/python -m pytest $(ARGS)

test-deep: setup
	CLAWPIPE_HYPOTHESIS=deep $(BIN)/python -m pytest -m "slow or not slow" $(ARGS)

# All five real harnesses, installed from npm first; `make test` runs the short form on OpenClaw and Claude Code.
test-harness: setup
	$(BIN)/clawpipe harness install
	$(BIN)/python -m pytest tests/harness_live -m "slow or not slow" $(ARGS)

test-sandbox: setup
	$(BIN)/python -m pytest tests/sandbox -m "slow or not slow" $(ARGS)

# Kills every part of a run at random moments, 50 runs; `make test` has 6 of them.
test-chaos: setup
	$(BIN)/python -m pytest tests/chaos -m "slow or not slow" $(ARGS)

check: setup
	$(BIN)/ruff check $(ROOMS)
	$(BIN)/ruff format --check $(ROOMS)
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix $(ROOMS)
	$(BIN)/ruff format $(ROOMS)

bench: setup
	$(BIN)/python benchmarks/data_path.py
	$(BIN)/python benchmarks/quickstart.py

bench-data-path: setup
	$(BIN)/python benchmarks/data_path.py $(ARGS)

bench-quickstart: setup
	$(BIN)/python benchmarks/quickstart.py $(ARGS)

bench-proxy: setup
	$(BIN)/python benchmarks/proxy.py $(ARGS)

clean:
	rm -rf $(VENV) .setup
