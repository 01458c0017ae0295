VENV ?= .venv
PYTHON ?= python3
INSTALLED := $(VENV)/.installed
PEERS := $(VENV)-peers
PEERS_INSTALLED := $(PEERS)/.installed
BENCH := $(VENV)-bench
BENCH_INSTALLED := $(BENCH)/.installed

.PHONY: demo test test-peers bench lint

demo: $(INSTALLED)
	$(VENV)/bin/flowdup compare demo --out runs/demo
	$(VENV)/bin/flowdup embed runs/demo/flowdup/seed-0 --group test --set data.classes_per_client=0

test: $(INSTALLED)
	$(VENV)/bin/pytest

# Against another project's FedAvg, in an environment apart: it pins packages of its own.
test-peers: $(PEERS_INSTALLED)
	$(PEERS)/bin/pytest tests/peers

# A round here against pfl, Flower's simulation and a plain loop; leave the machine alone meanwhile.
bench: $(BENCH_INSTALLED)
	$(BENCH)/bin/python benchmarks/cpu.py
	$(BENCH)/bin/python benchmarks/chart.py benchmarks/results/cpu.json docs/bench-cpu.png

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --constraint constraints.txt torch
	$(VENV)/bin/pip install --quiet --constraint constraints.txt --editable '.[data,dev]'
	touch $@

$(PEERS_INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --constraint constraints.txt torch
	$(PEERS)/bin/pip install --quiet --constraint constraints.txt \
		'pfl[pytorch]==0.6.0' --editable '.[dev]'
	touch $@

$(BENCH_INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/pip install --quiet --constraint constraints.txt torch
	$(BENCH)/bin/pip install --quiet --constraint constraints.txt \
		'pfl[pytorch]==0.6.0' 'flwr[simulation]==1.41.0' --editable .
	touch $@
