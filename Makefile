# lexshard: `make serve` starts the server, `make test` runs the tests; both set everything up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?= models/lexshard-demo
OUT ?= docs/reports

.PHONY: setup serve test prove lint types format bench clean

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("lexshard needs Python 3.11 or newer; set PYTHON=...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@

setup: $(VENV)/.installed

serve: setup
	$(BIN)/lexshard serve --host $(HOST) --port $(PORT) --model $(MODEL)

test: setup
	$(BIN)/python -m pytest -m "not slow" $(TESTS)

prove: setup
	$(BIN)/python -m pytest $(TESTS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup
	$(BIN)/mypy

bench: setup
	$(BIN)/lexshard bench engine --model $(MODEL) --json $(OUT)/engine.json

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
