VENV ?= .venv
PYTHON ?= python3
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint

demo: $(INSTALLED)
	$(VENV)/bin/flowdup compare demo --out runs/demo
	$(VENV)/bin/flowdup embed runs/demo/flowdup/seed-0 --group test --set data.classes_per_client=0

test: $(INSTALLED)
	$(VENV)/bin/pytest

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --constraint constraints.txt torch
	$(VENV)/bin/pip install --quiet --constraint constraints.txt --editable '.[data,dev]'
	touch $@
