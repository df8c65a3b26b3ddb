# `make demo` and `make test` do all their own set-up in .venv, on a machine with Python 3.10 or newer and nothing else.
# With a Python that has everything already: make gpu-test PY=python3 READY=

SHELL := /bin/bash
PYTHON := python3
PY := .venv/bin/python
READY := .venv/.ready
TRITON := 3.6.0
JOBS := 2
# op:suite:file
BENCHES := attention:headdims:attention-headdims attention:scaling:attention-scaling attention:shapes:attention-shapes \
	attention:fp8:attention-fp8 attention:seqlens:attention-seqlens attention:features:attention-features \
	attention_backward:headdims:attention-backward decode:formats:decode-formats moe:route:moe-route \
	moe:layer:moe-layer fused:rows:fused-rows
RUN = PYTHONPATH=$(CURDIR)/src $(PY) -m

# Nothing from the machine's own Python set-up may leak into .venv.
unexport PYTHONPATH PYTHONHOME PIP_TARGET PIP_USER TRITON_INTERPRET

.PHONY: help demo test lint learn gpu-test bench compile-all clean

help:  ## list the commands
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 20

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and f"Python 3.10 or newer is needed, $(PYTHON) is {sys.version}")'
	$(PYTHON) -m venv .venv

# torch first: its CUDA build brings the triton it wants, its CPU build brings none.
.venv/.ready: pyproject.toml constraints.txt | .venv/bin/python
	$(PY) -m pip install --quiet --constraint constraints.txt torch
	$(PY) -m pip show --quiet triton 2>/dev/null || [ "$$(uname)" != Linux ] || $(PY) -m pip install --quiet triton==$(TRITON)
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[dev,docs]'
	@touch $@

demo: $(READY)  ## check and time attention here, write report.html
	$(RUN) flashkernels bench attention --suite headdims --quick --json results.json --html report.html

lint: $(READY)  ## ruff, mypy, import-linter
	$(PY) -m ruff check .
	$(PY) -m mypy
	.venv/bin/lint-imports --no-logo

# One process either compiles or interprets: Triton decides when it is imported. The second has a sample of the
# Hopper kernels' GPU tests, on the machine of tests/machine.
test: lint  ## everything that needs no GPU
	$(RUN) pytest tests/compile -n $(JOBS) --dist worksteal
	$(RUN) pytest -p tests.machine.plugin -m gpu --one-in 30 -n $(JOBS) --dist worksteal tests/attention/test_hopper*.py tests/attention/test_fp8_gpu.py
	TRITON_INTERPRET=1 $(RUN) pytest --ignore=tests/compile -n $(JOBS) --dist worksteal

gpu-test: $(READY)  ## the tests that need an NVIDIA GPU
	$(RUN) pytest tests -m gpu --slow

bench: $(READY)  ## all benchmark suites on this machine's GPU, into benchmarks/results/
	@gpu=$$(PYTHONPATH=src $(PY) -c 'import flashkernels as fk; print(fk.detect().key)') && for one in $(BENCHES); do \
	  IFS=: read -r op suite file <<< "$$one" && \
	  $(RUN) flashkernels bench $$op --suite $$suite --json benchmarks/results/$$gpu/$$file.json || exit; done && \
	$(RUN) flashkernels bench launch --json benchmarks/results/$$gpu-launch.json

learn: $(READY)  ## the lessons of docs/learn as pages, into site/
	PYTHONPATH=$(CURDIR)/src $(PY) docs/learn/build.py

compile-all: $(READY)  ## compile every tile the engine can choose, for every architecture
	$(RUN) flashkernels tiles --compile --gpu all

clean:  ## remove .venv and everything made here
	rm -rf .venv .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache dist site report.html results.json
