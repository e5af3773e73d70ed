# Bare `make` lists the targets. Each one does all of its own set-up; needed: Python 3.11 or newer, and make.
PYTHON ?= python3
JOBS ?= 2

VENV := .venv
RUN := $(VENV)/bin/python
SOURCES := $(wildcard src tests benchmarks faults examples scripts)
REQUIREMENTS := build/requirements.json

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-oldest-spark check bench faults docs servers lock clean package dev spark

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## run a small shop, its relay and a processor on Spark, and kill them in the middle
	@$(PYTHON) scripts/environment.py build demo spark
	@$(RUN) examples/shop_chain.py

test: spark ## run the tests against real servers, and write build/requirements.json and docs/conformance.md
	@scripts/debian-packages pgbouncer=pgbouncer
	@$(RUN) -m pytest -n $(JOBS) --dist loadgroup --max-worker-restart 0 --requirements $(REQUIREMENTS) $(LENGTHS) $(AGAIN)
	@$(RUN) -m oncebox.testing.requirements $(REQUIREMENTS) docs/requirements.md docs/conformance.md

test-all: LENGTHS := -m ''
test-all: test ## the same, and the outage grid in every length: some ten minutes more

test-oldest-spark: spark ## run the tests of the Spark host on the oldest Spark that is supported
	@$(PYTHON) scripts/environment.py build dev spark spark-oldest
	@PYTHONPATH=$(CURDIR)/build/spark-oldest $(RUN) -m pytest tests/spark

check: spark ## ruff, strict mypy, and the rule of who may import whom
	@$(RUN) -m ruff check $(SOURCES)
	@$(RUN) -m ruff format --check $(SOURCES)
	@$(RUN) -m mypy $(SOURCES)
	@$(RUN) -m pytest -q tests/test_layers.py

bench: dev ## measure against the bare loops, as ratios in one run
	@$(RUN) -m benchmarks

faults: dev ## plant small breaks in a copy, and show which tests turn red
	@$(RUN) -m faults

docs: dev ## write docs/conformance.md and docs/reference/cli.md, and check every link
	@$(RUN) -m oncebox.testing.requirements $(REQUIREMENTS) docs/requirements.md docs/conformance.md
	@$(RUN) scripts/cli_reference.py
	@$(RUN) scripts/links.py

servers: dev ## start PostgreSQL, Valkey and, where there is Java, Kafka; print their URLs, stop them on Ctrl-C
	@exec $(RUN) -m oncebox.testing.servers --kafka

lock: package ## write requirements/*.lock anew from requirements/*.in
	@$(PYTHON) scripts/environment.py lock
	@for name in build lock dev demo spark spark-oldest; do \
		(cd requirements && ../$(VENV)/bin/uv pip compile --quiet --upgrade --universal --python-version 3.11 \
			--generate-hashes --no-emit-index-url --no-header $$name.in --output-file $$name.lock) || exit 1; \
	done
	@! grep -n '://' requirements/*.lock

clean: ## remove the virtual environment and everything built
	@rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage*
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

package:
	@$(PYTHON) scripts/environment.py build

dev:
	@$(PYTHON) scripts/environment.py build dev

spark:
	@$(PYTHON) scripts/environment.py build dev spark
