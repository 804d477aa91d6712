# Every target sets up what it needs: a clone with Python 3.11 and a C++ compiler is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: rollout test test-slow lint setup clean

rollout: $(STAMP)
	$(BIN)/python scripts/rollout.py ring_frames=32

# The suite is bit-exact per process, so it is split over two processes of one thread each.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow"

test-slow: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --timeout 3600 -m "slow"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,peers,report,probes,joblib]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
