# The targets a newcomer meets; `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOB ?= examples/main.yaml
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup train test lint format bench clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

setup: $(VENV)/.installed ## make .venv and install the project with pinned versions

# The stamp is newer than what it was made from: a second call installs nothing.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

train: setup ## train a small GPT on two processes of this machine: ARGS='train.steps=50'
	$(BIN)/phalanx train $(JOB) $(ARGS)

test: setup ## run the tests: ARGS='-k checkpoint'
	$(BIN)/python -m pytest $(ARGS)

lint: setup ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

format: setup ## put the code into the common format
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format .

bench: setup ## measure this machine and write benchmarks/results
	$(BIN)/python -m benchmarks.throughput $(ARGS)
	$(BIN)/python -m benchmarks.startup $(ARGS)

clean: ## delete the virtual environment (runs and data stay)
	rm -rf $(VENV)
