# Everything this repository can do, on a machine with Python >= 3.11, a C++ compiler and make.
# `make help` lists it. Overridable: DEVICE=cpu|cuda, PYTHON=python3.12, ARGS="loss=grpo max_steps=20".

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install train test lint bench baseline verifiers cluster op browser lock-check clean

# The first Python that is new enough; run, not just found, since a version manager's shim may answer to any name.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
    $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
ifndef DEVICE
DEVICE := $(if $(findstring GPU,$(shell nvidia-smi -L 2>/dev/null)),cuda,cpu)
endif

LOCK := requirements-$(DEVICE).lock
BIN := .venv/bin
# Newer than the lock and pyproject.toml: nothing to install. One per device, so that changing it installs afresh.
STAMP := .venv/.installed-$(DEVICE)

# pip's list of what it does, less what nobody acts on; -u, so that it is seen as it happens.
QUIET := 2>&1 | sed -u -E -e '/^WARNING: Location|^Looking in|^Processing|already satisfied|^  Using cached/d' \
    -e '/\.metadata|^  (Preparing|Getting|Installing|Building|Checking)|^  Created wheel|^  Stored in/d' -e 's/^(.{100}).+/\1.../'
PIP := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --no-deps --no-build-isolation
# What the registry's torch links to, a CPU machine included.
CUDA_LIBRARIES := ^nvidia-(cublas|cuda-(cupti|nvrtc|runtime)|cudnn-cu13|cufft|cufile|curand|cusolver|cusparse)==|$\
^nvidia-(cusparselt-cu13|nccl-cu13|nvjitlink|nvshmem-cu13|nvtx)==

help: ## this list
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/p' Makefile | expand -t 20

install: $(STAMP) ## .venv with the pinned packages for this machine (DEVICE=cpu|cuda overrides what it finds)

train: $(STAMP) ## train the built-in tiny policy; ARGS="loss=grpo env=..." composes something else
	$(BIN)/python train.py $(ARGS)

test: $(STAMP) ## everything but gpu: fast tests first, then the real vLLM; ARGS="-k cispo" selects
	@$(BIN)/python -m pytest -m "not gpu" -n 2 $(ARGS)

lint: $(STAMP) ## ruff check, ruff format --check, basedpyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

bench: $(STAMP) ## every program in benchmarks/ again, into docs/benchmarks.md; one alone: python -m benchmarks.page updating
	@$(BIN)/python -m benchmarks.page --all

# Five seeds of the default configuration, 15 minutes on two cores; STORE=store keeps them as the new baseline instead.
baseline: $(STAMP) ## does the default still learn as well as the stored curves? ARGS="seed=0,1,2 max_steps=50" is shorter
	@folder=outputs/sweeps/baseline-$$(date +%Y%m%d-%H%M%S); \
	    $(BIN)/python train.py --config-dir sweeps --config-name baseline hydra.sweep.dir=$$folder $(ARGS) && \
	    $(BIN)/python -m rl.report.baseline $$folder $(STORE)

# Its two generations exclude each other, and one wants other versions than our lock: neither may come into .venv.
verifiers: .venv/verifiers-v1 .venv/verifiers-classic ## the verifiers library for its tests, both generations beside .venv's packages
.venv/verifiers-%: tests/bridges/%.txt $(STAMP)
	@rm -rf $@ $@.part
	@$(PIP) --no-cache-dir --target $@.part -r $< $(QUIET)
	@mv $@.part $@

# All that it needs is in both locks, and nothing of it changes what is installed.
cluster: .venv/.ray ## Ray, for cluster=ray and its tests (80 MB)
.venv/.ray: pyproject.toml $(STAMP)
	@$(PIP) "$$(sed -nE 's/^cluster = \["(.*)"\]/\1/p' pyproject.toml)" $(QUIET)
	@touch $@

op: $(STAMP) ## DeepSpeed's op for CPU, compiled now instead of in the first run
	@$(BIN)/python -c 'from rl.learner.ranks import compile_cpu_op; compile_cpu_op()' >/dev/null

browser: ## Chromium for the viewer's tests, where Debian's packages can be installed and none is there
	@command -v chromium >/dev/null || { apt-get update -qq && \
	    apt-get install -y -qq --no-install-recommends chromium >/dev/null; }

# Wheels for the oldest glibc that llguidance has one for (2.31), but for the two packages that exist as source alone.
DRY_RUN := uv pip install --dry-run --quiet --no-deps --target .venv/lock-check --no-python-downloads \
    --only-binary :all: --no-binary deepspeed --no-binary antlr4-python3-runtime --python-platform x86_64-manylinux_2_31
lock-check: $(STAMP) ## can both locks still be had, for every Python we name? (installs nothing)
	@for lock in requirements-cpu.lock requirements-cuda.lock; do for python in 3.11 3.12 3.13; do \
	    $(BIN)/$(DRY_RUN) --python-version $$python -r $$lock || exit 1; \
	    echo "$$lock: ok for Python $$python"; done; done

clean: ## remove .venv and caches; never outputs/
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -not -path './outputs/*' -prune -exec rm -rf {} +

$(STAMP): requirements-cpu.lock requirements-cuda.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "No Python >= 3.11 found. Install one, or name it: make PYTHON=/path/to/python3.11"; exit 1; }
	@command -v "$${CXX:-c++}" >/dev/null || { echo "No C++ compiler found, and DeepSpeed compiles a small op at its first" \
	    "start. Install g++ or clang++, or name one: make CXX=..."; exit 1; }
	@"$(PYTHON)" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null || \
	    { echo "Python.h is missing, and DeepSpeed's op needs it: install the headers of $(PYTHON) (python3-dev)."; exit 1; }
	@# Both builds of vLLM own the folder vllm/: another device means another environment.
	@test -x $(BIN)/python -a -z "$(filter-out $(STAMP),$(wildcard .venv/.installed-*))" || "$(PYTHON)" -m venv --clear .venv
	@echo "Installing $$(grep -c '^[a-z]' $(LOCK)) packages from $(LOCK) into .venv ($(DEVICE)): some minutes, once."
	@# The pinned setuptools builds the few packages that come as source, not whatever is newest today.
	@$(PIP) $$(grep -E '^(setuptools|wheel)==' $(LOCK)) $(QUIET)
	@$(PIP) -r $(LOCK) $(QUIET)
	@test $(DEVICE) = cuda || ! ls .venv/lib/*/site-packages/torch/lib/libtorch_cuda.so >/dev/null 2>&1 || \
	    $(PIP) $$(grep -E '$(CUDA_LIBRARIES)' requirements-cuda.lock) $(QUIET)
	@$(PIP) -e . $(QUIET)
	@touch $@
