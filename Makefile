VENV ?= .venv$(if $(TORCH),-torch-$(TORCH))
PYTHON ?= python3
PEERS := $(VENV)-peers
BENCH := $(VENV)-bench
DOCS := $(VENV)-docs
FEDERATION := $(VENV)-federation
GPU_BENCH := $(VENV)-bench-gpu
INSTALLED := $(VENV)/.installed

# For a machine with a GPU and without a network: what is taken there.
CARRIED_FOR ?= 3.12
CARRIED_PEERS := benchmarks/peers
CARRIED_WHEELS := carry/wheels
CARRY := $(PYTHON) -m pip install -qq --upgrade --python-version $(CARRIED_FOR) \
	--only-binary :all: --no-compile --target

ifneq ($(wildcard $(CARRIED_PEERS)),)
GPU_PYTHON := PYTHONPATH=src:$(CARRIED_PEERS) $(PYTHON)
else
GPU_PYTHON := $(GPU_BENCH)/bin/python
GPU_INSTALLED := $(GPU_BENCH)/.installed
endif

# TORCH=2.9.0 or TORCH=newest: another torch than the pinned one, in an environment of its own.
ifeq ($(TORCH),newest)
REPIN := /^torch==/d
else ifdef TORCH
REPIN := s/^torch==.*/torch==$(TORCH)/
endif

# The page: where it is built to, what from, and a bundle to show it with.
PAGE := src/flowdup/page/index.html
NODE := web/node_modules/.installed
WEB_SOURCES := $(shell find web/src web/public -type f) web/index.html web/package.json web/vite.config.ts
SAMPLE := runs/sample/bundle
CHROMIUM ?= /usr/bin/chromium
BROWSER_RESULT ?= runs/web/browser.json

# Files that a machine without a GPU cannot run.
SPEED := src/flowdup/accelerate
GPU_ONLY := $(SPEED)/kernels/*,$(SPEED)/cuda_graphs.py,$(SPEED)/compiling.py

.PHONY: help demo test test-docs test-tools test-processes test-peers test-federation federation-demo web web-page web-test web-unit \
	web-browser test-gpu mutants torture fuzz \
	lint coverage tables docs bench bench-gpu peers wheels wheel-check

help:  ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1|\2/p' Makefile | awk -F'|' '{ printf "%-12s %s\n", $$1, $$2 }'

demo: $(INSTALLED)  ## five methods on digits, three seeds: a table and a figure, 2 minutes
	$(VENV)/bin/flowdup demo

test: $(INSTALLED)  ## the tests; TESTS=tests/test_client.py for some
	$(VENV)/bin/pytest $(TESTS)

test-docs: $(INSTALLED)  ## that every block of every page runs, 1 minute
	$(VENV)/bin/pytest tests/docs

test-tools: $(INSTALLED)  ## that benchmarks and the fuzzer do what they say, 1 minute
	$(VENV)/bin/pytest tests/tools

test-processes: $(INSTALLED)  ## runs of several processes, stopped and killed, 2 minutes
	$(VENV)/bin/pytest tests/several_processes

mutants: $(INSTALLED)  ## planted bugs, each caught by the test that must; MUTANTS=word for some
	PYTHONPATH=src:tests $(VENV)/bin/python -m mutants $(MUTANTS)

# NVIDIA FLARE has 40 dependencies, so it has an environment of its own.
test-federation: $(FEDERATION)/.installed  ## a federation of real processes over loopback, 9 minutes
	$(FEDERATION)/bin/pytest --override-ini "addopts=-q" tests/federation

federation-demo: $(FEDERATION)/.installed  ## seven processes, one is killed: runs/federation-demo
	$(FEDERATION)/bin/python -m flowdup.federation.demo

web: web-page $(SAMPLE)  ## the page and a sample for it; then: flowdup serve runs/sample/bundle
	@echo "see it by: $(VENV)/bin/flowdup serve $(SAMPLE)"

web-page: $(PAGE)  ## the page of `flowdup serve`, into the package; needs npm

$(PAGE): $(NODE) $(WEB_SOURCES)
	cd web && npm run --silent build && touch ../$(PAGE)

$(NODE): web/package-lock.json
	cd web && npm install --no-save --no-audit --no-fund --loglevel=error && touch ../$(NODE)

# Rotated digits that come with scikit-learn: a minute.
runs/sample/run: | $(INSTALLED)
	rm -rf runs/sample
	$(VENV)/bin/python -m flowdup train digits-plus --out runs/sample/unfinished
	mv runs/sample/unfinished $@

$(SAMPLE): runs/sample/run
	$(VENV)/bin/python -m flowdup export $< --out $@ --samples 8

web-test: web-unit web-browser  ## the TypeScript against Python, and the page in Chromium; 3 minutes

web-unit: $(INSTALLED) $(NODE)
	rm -rf runs/bundles
	$(VENV)/bin/python tests/export/bundles.py runs/bundles
	cd web && npx tsc --noEmit && FLOWDUP_BUNDLES=../runs/bundles npm test --silent

# What it measures goes to BROWSER_RESULT, screenshots to runs/web/shots.
web-browser: $(INSTALLED) $(PAGE) $(SAMPLE)
	@test -x $(CHROMIUM) || { echo "no Chromium at $(CHROMIUM): apt-get install chromium, or CHROMIUM=PATH"; false; }
	rm -rf runs/web && mkdir -p runs/web/shots
	$(VENV)/bin/python tests/web/fixtures.py runs/web runs/sample/run $(SAMPLE)
	cd web && CHROMIUM=$(CHROMIUM) FLOWDUP="$(abspath $(VENV))/bin/python -m flowdup" \
		FLOWDUP_BUNDLE=../$(SAMPLE) FLOWDUP_KNOWN=../runs/web FLOWDUP_SHOTS=../runs/web/shots \
		FLOWDUP_RESULT=../$(BROWSER_RESULT) npm run --silent test:browser

# In an environment apart: pfl pins packages of its own.
test-peers: $(PEERS)/.installed  ## FedAvg against Apple's pfl
	$(PEERS)/bin/pytest tests/peers

# With the torch that $(PYTHON) has, and pytest from `make wheels` where nothing can be installed.
test-gpu:  ## tests on a GPU, written to benchmarks/results/gpu-tests.json
	PYTHONPATH=src$(if $(wildcard $(CARRIED_WHEELS)),:$(CARRIED_WHEELS)) $(PYTHON) -m pytest \
		--override-ini "addopts=-q -n 8" tests/gpu --results benchmarks/results/gpu-tests.json

torture: $(INSTALLED)  ## runs killed, crowded and starved must end in the same bits: 5 minutes
	PYTHONPATH=src:tests $(VENV)/bin/python -m torture --out benchmarks/results/torture.json

LOOSER := --no-warn-return-any --allow-untyped-calls  # than in src: much of torch answers Any
lint: $(INSTALLED)  ## ruff, and mypy on everything
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	MYPYPATH=src:tests:tests/accelerate:tests/docs:tests/export:tests/federation:tests/tools:tests/web $(VENV)/bin/mypy $(LOOSER) tests
	MYPYPATH=src:benchmarks:docs/tables:docs/site $(VENV)/bin/mypy $(LOOSER) benchmarks docs $(wildcard examples)

coverage: $(INSTALLED)  ## the tests, and which lines they ran
	$(VENV)/bin/pytest --cov --cov-report= $(or $(TESTS),tests tests/docs tests/several_processes)
	@$(VENV)/bin/coverage report --omit '$(GPU_ONLY)'
	@$(VENV)/bin/coverage report --include '$(GPU_ONLY)' | sed -n 's/^TOTAL/\nFiles that only a GPU runs:/p'

fuzz: $(INSTALLED)  ## 10,000 changed files and settings, written to benchmarks/results/fuzz.json
	PYTHONPATH=src:tests $(VENV)/bin/python -m fuzz --out benchmarks/results/fuzz.json $(FUZZ_ARGS)

# In a folder of its own, with nothing of the repository in reach.
wheel-check:  ## the built wheel in a fresh environment: version, commit and demo, 10 minutes
	PYTHONPATH=tests $(PYTHON) -m wheel $(WHEEL_ARGS)

tables:  ## write the tables of README.md and docs/ from results/ and benchmarks/results/
	$(PYTHON) docs/tables

docs: $(DOCS)/.installed  ## the documentation as a site, in site/index.html; reading it needs no network
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --clean --quiet
	@echo "site/index.html is written"

bench: $(BENCH)/.installed  ## a round against pfl, Flower and a plain loop; leave the machine alone
	$(BENCH)/bin/python benchmarks/cpu.py $(BENCH_ARGS)
	$(BENCH)/bin/python benchmarks/chart.py benchmarks/results/cpu.json docs/bench-cpu.png
	$(PYTHON) docs/tables

# With the torch that $(PYTHON) has.
bench-gpu: $(GPU_INSTALLED)  ## the same on a GPU
	$(GPU_PYTHON) benchmarks/gpu.py $(BENCH_ARGS)
	-$(GPU_PYTHON) benchmarks/chart.py benchmarks/results/gpu.json docs/bench-gpu.png
	$(PYTHON) docs/tables

peers:  ## pfl for bench-gpu on a machine without a network, in benchmarks/peers
	$(CARRY) $(CARRIED_PEERS) --no-deps --requirement benchmarks/peers.txt

wheels:  ## pytest for test-gpu on a machine without a network, in carry/wheels
	$(CARRY) $(CARRIED_WHEELS) pytest pytest-xdist hypothesis

# $(call install,ENVIRONMENT,NAME,REQUIREMENTS): a line of progress; all that pip says if it fails.
install = @echo "installing $(2) ..." && $(1)/bin/pip install --constraint $(1)/constraints.txt $(3) \
	> $(1)/install.log 2>&1 || { cat $(1)/install.log; false; }

define environment
@$(PYTHON) -m venv $(1) && sed '$(REPIN)' constraints.txt > $(1)/constraints.txt
$(call install,$(1),torch,torch)
$(call install,$(1),$(2),$(3))
@touch $(1)/.installed
endef

PFL := 'pfl[pytorch]==0.6.0'
FLOWER := 'flwr[simulation]==1.41.0'
FEDERATED := --editable '.[data,dev,federation]'
DEVELOPED := --editable '.[data,dev]'

$(INSTALLED): pyproject.toml constraints.txt
	$(call environment,$(VENV),flowdup,$(DEVELOPED))

$(PEERS)/.installed: pyproject.toml constraints.txt
	$(call environment,$(PEERS),flowdup and pfl,$(PFL) $(DEVELOPED))

$(FEDERATION)/.installed: pyproject.toml constraints.txt
	$(call environment,$(FEDERATION),flowdup and NVIDIA FLARE,$(FEDERATED))

$(BENCH)/.installed: pyproject.toml constraints.txt
	$(call environment,$(BENCH),flowdup and pfl and Flower,$(PFL) $(FLOWER) --editable .)

$(DOCS)/.installed: pyproject.toml constraints.txt requirements-docs.txt
	$(call environment,$(DOCS),flowdup and MkDocs,--requirement requirements-docs.txt --editable .)

$(GPU_BENCH)/.installed: pyproject.toml
	@$(PYTHON) -m venv $(GPU_BENCH) && touch $(GPU_BENCH)/constraints.txt
	@$(PYTHON) -c 'import site; print(*site.getsitepackages(), sep="\n")' \
		> $$(echo $(GPU_BENCH)/lib/python*/site-packages)/machine.pth
	$(call install,$(GPU_BENCH),flowdup and pfl and Flower,'pfl==0.6.0' $(FLOWER) --editable .)
	@touch $@
