# Two commands matter: `make demo` and `make test`. Both set up `.venv` first. `make test-backends` tests every
# backend (ScaNN, PostgreSQL with pgvector, LanceDB, Milvus, ...) in an environment on top of it, `.venv-backends`.
PYTHON ?= python3
VENV ?= .venv
BACKENDS_VENV ?= $(VENV)-backends
BIN := $(VENV)/bin
PIP := -m pip install --quiet --constraint constraints.txt

# Tests are shared out to as many processes as there are processors, in runs of neighbours.
PYTEST := -m pytest --numprocesses auto --dist worksteal

.PHONY: setup setup-backends test test-fast test-backends fuzz chaos soak demo lint clean

setup: $(VENV)/.ready

# torch goes in first and alone: see constraints.txt.
$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(BIN)/python $(PIP) --editable '.[dev]'
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python $(PYTEST)

test-fast: lint
	$(BIN)/python $(PYTEST) -m "not slow"

setup-backends: $(BACKENDS_VENV)/.ready

# It sees what is installed in the other by a line of a .pth file, so that pip adds only what is missing there.
$(BACKENDS_VENV)/.ready: $(VENV)/.ready
	test -x $(BACKENDS_VENV)/bin/python || $(PYTHON) -m venv $(BACKENDS_VENV)
	$(BIN)/python -c "import site; print('import site; site.addsitedir(%r)' % site.getsitepackages()[0])" \
		>$$($(BACKENDS_VENV)/bin/python -c "import site; print(site.getsitepackages()[0])")/base.pth
	$(BACKENDS_VENV)/bin/python $(PIP) 'amips[backends]'
	touch $@

test-backends: setup-backends
	AMIPS_BACKENDS=all $(BACKENDS_VENV)/bin/python $(PYTEST) -m backends -o cache_dir=$(BACKENDS_VENV)/.pytest_cache

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
	rm -rf $(VENV) $(BACKENDS_VENV) demo quickstart build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
