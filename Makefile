# lexshard: `make serve` starts the server, `make cluster` the same as actors of a Ray cluster on this
# machine, `make test` runs the tests; all set everything up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?= models/lexshard-demo
# The demo guesses ahead with its own draft model; another model with the one that is named.
DRAFT ?= $(if $(filter models/lexshard-demo,$(MODEL)),models/lexshard-demo-draft)
# Processes of `make cluster` that hold the vocabulary, and that decide.
SHARDS ?= 2
SAMPLERS ?= 2
OUT ?= docs/reports
# This folder by the name it is imported by, for tools that do not ask Python.
NAMES := $(VENV)/names

.PHONY: setup serve cluster observe vllm test prove lint types format bench clean

# uv installs where it can be had, else pip, which may know of an index that uv does not. A machine
# without a GPU takes torch's CPU build: a tenth of what the build for CUDA brings with it.
ifeq ($(shell uname -s),Linux)
CPU_TORCH := $(if $(shell command -v nvidia-smi),,yes)
endif
UV := $(BIN)/python -m uv pip install --python $(BIN)/python --constraint constraints.txt
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt

$(VENV)/.installed: pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("lexshard needs Python 3.11 or newer; set PYTHON=...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	-@$(PIP) --quiet uv
	$(if $(CPU_TORCH),$(UV) --torch-backend cpu torch || $(PIP) --quiet torch)
	$(UV) --editable ".[dev]" || $(PIP) --quiet --editable ".[dev]"
	@touch $@

setup: $(VENV)/.installed

SERVE = $(BIN)/lexshard serve --host $(HOST) --port $(PORT) --model $(MODEL) \
	$(if $(DRAFT),--draft $(DRAFT))

serve: setup
	$(SERVE)

cluster: setup
	$(SERVE) --backend ray --shards $(SHARDS) $(if $(filter-out 0,$(SAMPLERS)),--samplers $(SAMPLERS) --sampler-placement ray)

# Prometheus, and Grafana where there is one, look at the server that one of the two has started.
observe: setup
	$(BIN)/python -m lexshard.loadtest.observe --url http://$(HOST):$(PORT)

# An environment of its own with vLLM for CPUs and the plugin, for its tests and its bench.
vllm:
	PYTHON=$(PYTHON) bash .ci/vllm

test: setup
	$(if $(TESTS),$(BIN)/python -m pytest -m "not slow" $(TESTS),bash .ci/test)

prove: setup
	$(if $(TESTS),$(BIN)/python -m pytest $(TESTS),bash .ci/prove)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup
	@mkdir -p $(NAMES) && ln -sfn ../.. $(NAMES)/lexshard
	MYPYPATH=$(NAMES) $(BIN)/mypy

bench: setup
	$(BIN)/lexshard bench engine --model $(MODEL) --json $(OUT)/engine.json

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
