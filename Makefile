# Two commands matter: `make demo` and `make test`. Both set up `.venv` first. `make test-backends` adds
# every backend to it (ScaNN, PostgreSQL with pgvector, LanceDB, Milvus, ...) and tests those;
# `make VENV=elsewhere test-backends` leaves `.venv` alone.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt

# Tests are shared out to as many processes as there are processors, in runs of neighbours.
PYTEST := $(BIN)/python -m pytest --numprocesses auto --dist worksteal

.PHONY: setup setup-backends test test-fast test-backends fuzz chaos soak demo lint clean

setup: $(VENV)/.ready

# torch goes in first and alone: see constraints.txt.
$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(PIP) --editable '.[dev]'
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(PYTEST)

test-fast: lint
	$(PYTEST) -m "not slow"

setup-backends: setup
	$(PIP) --editable '.[dev,backends]'

test-backends: setup-backends
	AMIPS_BACKENDS=all $(PYTEST) -m backends -o cache_dir=$(VENV)/.pytest_cache

# `make test` has a small form of both; these take half an hour or so.
TRIES ?= 20000
SEED ?= $(shell date +%s)
fuzz: setup
	AMIPS_FUZZ=$(TRIES) AMIPS_FUZZ_SEED=$(SEED) $(BIN)/python -m pytest -s tests/chaos/test_fuzz.py

chaos: setup
	AMIPS_CHAOS=300 AMIPS_KILLS=200 $(BIN)/python -m pytest -s tests/chaos tests/cluster --ignore tests/chaos/test_fuzz.py

# Ten minutes of a service with reloads and bad clients.
soak: setup
	AMIPS_SOAK=600 $(BIN)/python -m pytest -s --timeout 900 tests/serving/test_soak.py

demo: setup
	$(BIN)/python examples/demo.py --out demo

clean:
	rm -rf $(VENV) demo quickstart build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
