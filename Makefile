# All commands of this repository. They need Python >= 3.11 and make. `make help` lists them.
# Options: DEVICE=cpu|cuda, PYTHON=python3.12, ARGS="loss=grpo max_steps=20".

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install train test test-all lint bench baseline claims verifiers cluster browser lock-check cuda-check clean

# Take the first Python that is new enough. Run each candidate, because a version manager's shim accepts any name.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
    $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
ifndef DEVICE
DEVICE := $(if $(findstring GPU,$(shell nvidia-smi -L 2>/dev/null)),cuda,cpu)
endif

LOCK := requirements-$(DEVICE).lock
BIN := .venv/bin
# If this file is newer than the locks and pyproject.toml, nothing is installed. A new DEVICE has another file.
STAMP := .venv/.installed-$(DEVICE)

# Filter pip's output to the useful lines; sed -u prints each line at once.
QUIET := 2>&1 | sed -u -E -e '/^WARNING: Location|^Looking in|^Processing|already satisfied|^  Using cached/d' \
    -e '/\.metadata|^  (Preparing|Getting|Installing|Building|Checking)|^  Created wheel|^  Stored in/d' -e 's/^(.{100}).+/\1.../'
# Python compiles a module at its first import, which is faster than to compile all modules of all packages here. With
# PYTHONDONTWRITEBYTECODE each process would compile PyTorch and vLLM again, so pip compiles all, and recipes ignore it.
COMPILE := $(if $(PYTHONDONTWRITEBYTECODE),--compile,--no-compile)
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --no-deps --no-build-isolation $(COMPILE)
# The registry's torch links to these libraries, also on a machine without a GPU.
CUDA_LIBRARIES := ^nvidia-(cublas|cuda-(cupti|nvrtc|runtime)|cudnn-cu13|cufft|cufile|curand|cusolver|cusparse)==|$\
^nvidia-(cusparselt-cu13|nccl-cu13|nvjitlink|nvshmem-cu13|nvtx)==

help: ## print this list
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/p' Makefile | expand -t 20

install: $(STAMP) ## install the pinned packages into .venv (DEVICE=cpu|cuda overrides the detected device)

train: $(STAMP) ## train the built-in tiny policy; ARGS="loss=grpo env=..." adds overrides
	$(BIN)/python train.py $(ARGS)

test: $(STAMP) ## run the tests of CI: fast ones first, then the real vLLM; ARGS="-k cispo" selects
	@$(BIN)/python -m pytest -m "not gpu and not slow" -n 2 $(ARGS)

test-all: $(STAMP) ## run also the slow tests, as the nightly workflow does
	@$(BIN)/python -m pytest -m "not gpu" -n 2 $(ARGS)

lint: $(STAMP) ## run ruff check, ruff format --check, basedpyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

bench: $(STAMP) ## run all benchmarks and write docs/benchmarks.md; one alone: python -m benchmarks.page updating
	@$(BIN)/python -m benchmarks.page all

# Five seeds of the default configuration take 15 minutes on two cores. STORE=store stores them as the new baseline.
baseline: $(STAMP) ## compare the default's learning with the stored curves; ARGS="seed=0,1,2 max_steps=50" is shorter
	@folder=outputs/sweeps/baseline-$$(date +%Y%m%d-%H%M%S); \
	    $(BIN)/python train.py --config-dir sweeps --config-name baseline hydra.sweep.dir=$$folder $(ARGS) && \
	    $(BIN)/python -m benchmarks.baseline $$folder $(STORE)

claims: $(STAMP) ## judge the published claims in claims/ here, some hours; ARGS="clip_higher until.max_hours=1" plays one
	@$(BIN)/python -m benchmarks.claims $(ARGS)

# Its two generations exclude each other, and one needs other versions than our lock, so neither is installed in .venv.
verifiers: .venv/verifiers-v1 .venv/verifiers-classic ## install both generations of the verifiers library for its tests, outside .venv's packages
.venv/verifiers-%: tests/bridges/%.txt $(STAMP)
	@rm -rf $@ $@.part
	@$(PIP) --no-cache-dir --target $@.part -r $< $(QUIET)
	@mv $@.part $@

# Both locks contain all of Ray's dependencies, so installing it changes no other package.
cluster: .venv/.ray ## install Ray for cluster=ray and its tests (80 MB)
.venv/.ray: pyproject.toml $(STAMP)
	@$(PIP) "$$(sed -nE 's/^cluster = \["(.*)"\]/\1/p' pyproject.toml)" $(QUIET)
	@touch $@

browser: ## install Chromium for the viewer's tests from Debian's packages, if it is missing
	@command -v chromium >/dev/null || { apt-get update -qq && \
	    apt-get install -y -qq --no-install-recommends chromium >/dev/null; }

lock-check: $(STAMP) ## check that every supported Python can install both locks with their hashes (installs nothing)
	@$(BIN)/python -m tests.support.lock_hashes --check

# The wheel is read as an archive, because it cannot be installed beside the CPU build.
cuda-check: lock-check ## compare our code with vLLM's CUDA wheel, test placement and GPU paths (330 MB, installs nothing)
	@rm -rf .venv/cuda-wheel
	@$(BIN)/python -m pip download --disable-pip-version-check --quiet --no-deps --only-binary :all: -d .venv/cuda-wheel \
	    --platform manylinux_2_28_x86_64 -r <(grep '^vllm==' requirements-cuda.lock)
	@OFFBYONE_CUDA_WHEEL=$$(ls .venv/cuda-wheel/*.whl) $(BIN)/python -m pytest -n 0 tests/gpu/test_cuda_wheel.py tests/rl/placement \
	    tests/rl/runtime/test_devices.py tests/rl/learner/test_on_device.py tests/rl/weights/test_gloo.py

clean: ## remove .venv and caches, but never outputs/
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -not -path './outputs/*' -prune -exec rm -rf {} +

$(STAMP): requirements-cpu.lock requirements-cuda.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "No Python >= 3.11 found. Install one, or name it: make PYTHON=/path/to/python3.11"; exit 1; }
	@# Without a driver the packages can still be installed, for example into an image.
	@driver=$$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 || true); \
	    test $(DEVICE) = cpu -o -z "$$driver" || test $${driver%%.*} -ge 580 || \
	    { echo "NVIDIA's driver $$driver is older than 580, which PyTorch for CUDA 13 needs: update the driver."; exit 1; }
	@# Both builds of vLLM install the folder vllm/, so another device needs a new environment.
	@test -x $(BIN)/python -a -z "$(filter-out $(STAMP),$(wildcard .venv/.installed-*))" || "$(PYTHON)" -m venv --clear .venv
	@echo "Installing $$(grep -c '^[a-z]' $(LOCK)) packages from $(LOCK) into .venv ($(DEVICE)). This takes some minutes, once."
	@# Install the pinned setuptools first, because it builds the packages that come as source.
	@$(PIP) --require-hashes -r <(grep -E '^(setuptools|wheel)==' $(LOCK)) $(QUIET)
	@# pip prefers a file whose hash its index shows, so ask for torch's CPU wheel first: it is smaller.
	@test $(DEVICE) = cuda || ($(PIP) --require-hashes -r <(sed -n 's/^torch==[^ ]*/&+cpu/p' $(LOCK)) 2>/dev/null) $(QUIET) || \
	    echo "No CPU wheel of torch here. Installing the registry's, and the CUDA libraries that it links to."
	@$(PIP) --require-hashes -r $(LOCK) $(QUIET)
	@test $(DEVICE) = cuda || ! ls .venv/lib/*/site-packages/torch/lib/libtorch_cuda.so >/dev/null 2>&1 || \
	    $(PIP) --require-hashes -r <(grep -E '$(CUDA_LIBRARIES)' requirements-cuda.lock) $(QUIET)
	@$(PIP) -e . $(QUIET)
	@test $(DEVICE) = cpu || $(BIN)/python -c 'import torch; assert torch.version.cuda' 2>/dev/null || \
	    { echo "The installed PyTorch is not built for CUDA. Remove a CPU index from pip's configuration (pip config list)," \
	    "then run make clean install DEVICE=cuda."; exit 1; }
	@touch $@
