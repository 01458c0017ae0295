VENV ?= .venv
PYTHON ?= python3
INSTALLED := $(VENV)/.installed
PEERS := $(VENV)-peers
PEERS_INSTALLED := $(PEERS)/.installed
BENCH := $(VENV)-bench
BENCH_INSTALLED := $(BENCH)/.installed
CARRIED := benchmarks/peers
CARRIED_FOR ?= 3.12
GPU_BENCH := $(VENV)-bench-gpu
ifneq ($(wildcard $(CARRIED)),)
GPU_PYTHON := PYTHONPATH=src:$(CARRIED) $(PYTHON)
else
GPU_PYTHON := $(GPU_BENCH)/bin/python
GPU_INSTALLED := $(GPU_BENCH)/.installed
endif

.PHONY: demo test test-peers bench bench-gpu peers lint

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

# The same on a GPU, with the torch that $(PYTHON) has.
bench-gpu: $(GPU_INSTALLED)
	$(GPU_PYTHON) benchmarks/gpu.py
	-$(GPU_PYTHON) benchmarks/chart.py benchmarks/results/gpu.json docs/bench-gpu.png

# For a machine with a GPU and without a network: pfl and what it imports, to be taken there.
peers:
	$(PYTHON) -m pip install --quiet --upgrade --target $(CARRIED) --python-version $(CARRIED_FOR) \
		--only-binary :all: --no-deps --no-compile --requirement benchmarks/peers.txt

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

$(GPU_BENCH)/.installed: pyproject.toml
	$(PYTHON) -m venv $(GPU_BENCH)
	$(PYTHON) -c 'import site; print(*site.getsitepackages(), sep="\n")' \
		> $$(echo $(GPU_BENCH)/lib/python*/site-packages)/machine.pth
	$(GPU_BENCH)/bin/pip install --quiet 'pfl==0.6.0' 'flwr[simulation]==1.41.0' --editable .
	touch $@
