# Targets for people and for CI: `make tune` and `make test` work from a fresh clone.
PYTHON ?= python3
VENV ?= .venv
# Another package index for a smaller build of torch, for example TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
JOBS ?= 2
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: setup tune test check test-newest-triton lint types imports format clean bench-quality bench-dispatch \
	bench-coverage referee bench-gpu bench-gpu-merge gpu-compile gpu-wheels

setup: $(STAMP)

$(STAMP): pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade "pip>=25.1"
	$(PY) -m pip install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --group dev
	$(PY) -m pip show --quiet triton 2>/dev/null || $(PY) -m pip install --quiet --group dev-triton
	$(PY) -m pip install --quiet --no-build-isolation --editable .
	touch $@

tune: setup
	$(VENV)/bin/fibc tune defs/gemm.json --out build/

test: check
	$(PY) -m pytest -n $(JOBS) -m "e2e and not gpu"

check: setup lint types imports
	$(PY) -m pytest -n $(JOBS) --dist worksteal -m "not e2e and not gpu"

# The Triton backend with the newest Triton in place of the pinned one.
test-newest-triton: setup
	$(PY) -m pip install --quiet --upgrade --target .triton-newest triton
	PYTHONPATH=.triton-newest $(PY) -m pytest -n $(JOBS) -m "not gpu" tests/test_triton*.py

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: setup
	$(VENV)/bin/mypy

imports: setup
	$(VENV)/bin/lint-imports

format: setup
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench-quality: setup
	$(PY) benchmarks/decision_quality.py

bench-dispatch: setup
	$(PY) benchmarks/dispatch_overhead.py

# After `make tune`.
bench-coverage: setup
	$(PY) benchmarks/coverage.py defs/gemm.json --out build/ --largest 512

# What other pickers' claims are worth: on the CPU about a quarter of an hour, TARGET=cuda on a GPU; goes on when run again.
TARGET ?= cpu
referee: setup
	$(PY) benchmarks/referee.py --target $(TARGET)

# One part of the GPU benchmarks: make bench-gpu PART=suite-4096x4096 OPTIONS="--budget-s 300". Without network
# benchmarks/gpu/on_machine.sh does the same with wheels that `make gpu-wheels PYTHON=3.12` downloaded.
PART ?=
OPTIONS ?=
bench-gpu: setup
	$(PY) benchmarks/gpu/run.py $(PART) $(OPTIONS)

bench-gpu-merge: setup
	$(PY) benchmarks/gpu/merge.py build/gpu/results

# Without a GPU: what the part would ask a compiler for, into build/gpu-compiled/PART.
gpu-compile: setup
	$(PY) benchmarks/gpu/run.py $(PART) --compile-only --budget-s 7200 $(OPTIONS)

gpu-wheels:
	benchmarks/gpu/wheels.sh $(PYTHON)

clean:
	rm -rf $(VENV) .triton-newest build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
