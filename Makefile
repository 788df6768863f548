# `make help` lists the targets. Inside a virtual environment (or conda) its Python is used; outside of one, .venv is
# made and used. A torch that is already there stays; otherwise $(TORCH) is installed.

TORCH   ?= torch
BASE_PYTHON ?= python3
VENV    ?= .venv

ifneq ($(VIRTUAL_ENV)$(CONDA_PREFIX),)
PY := python
else
PY := $(VENV)/bin/python
endif

PIP     := $(PY) -m pip --disable-pip-version-check
# The newest wheel of dist/, looked up when a recipe runs.
WHEEL    = $$(ls -t dist/kgopt-*.whl | head -n 1)
ARGS    ?=
# The package has no __main__.
CLANG_FORMAT = $(PY) -c 'from clang_format import clang_format; clang_format()'
CMAKE_PYTHON = -DPython_EXECUTABLE=$$($(PY) -c 'import sys; print(sys.executable)')
JOBS    ?= $(or $(MAX_JOBS),$(shell nproc))
# More processes would crowd a small GPU's memory.
TEST_JOBS ?= $(shell echo $$(( $(JOBS) < 4 ? $(JOBS) : 4 )))

MAKEFLAGS += --no-print-directory

.DEFAULT_GOAL := help
.PHONY: help env build build-here install develop wheel check-wheel dev-module peers test demo bench fuzz sanitize gpu-check matrix cmake-test lint \
        format docs clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20
	@echo
	@echo 'Variables: ARGS="..." (passed to pytest, the demo or the bench), TORCH=torch==2.14.1,'
	@echo 'KGOPT_CUDA=0 (CPU-only build), KGOPT_CUDA=1 (the kernels for all GPUs), KGOPT_CUDA_ARCHS="8.0+PTX;9.0a", MAX_JOBS=2, TEST_JOBS=1'

ifeq ($(PY),python)
ENV := build/.env
$(ENV):
	@mkdir -p build
else
ENV := $(VENV)/.ready
$(ENV):
	@test -x $(PY) || $(BASE_PYTHON) -m venv $(VENV)
endif
	@$(PY) -c 'import torch' 2>/dev/null || { echo "installing $(TORCH)"; $(PIP) install -q "$(TORCH)"; }
	@$(PIP) install -q --upgrade "pip>=25.1"
	@$(PIP) install -q --group build
	@touch $(ENV)

env: $(ENV) ## the environment: torch and what the build needs

# The build is incremental by itself (build/objects), so it is simply called each time.
build: $(ENV) ## a wheel in dist/ for any machine, with CUDA kernels if an nvcc is found
	@rm -f dist/kgopt-*.whl
	@$(PY) -W ignore setup.py -q bdist_wheel

build-here: $(ENV) ## a wheel in dist/ for the GPU of this machine; CPU-only where there is none
	@KGOPT_CUDA=$${KGOPT_CUDA:-native} $(MAKE) build

install: build-here ## the wheel, built for this machine and installed with what the tests need
	@$(PIP) install -q --force-reinstall --no-deps $(WHEEL)
	@$(PIP) install -q "$(WHEEL)[test,demo]"

develop: $(ENV) ## build in place, for working on the kernels: python/kgopt/_C.abi3.so and a link to python/
	@KGOPT_CUDA=$${KGOPT_CUDA:-native} $(PY) -W ignore setup.py -q build_ext --inplace
	@$(PY) -c 'import site, pathlib; pathlib.Path(site.getsitepackages()[0], "kgopt-develop.pth").write_text("$(CURDIR)/python\n")'

dev-module: $(ENV) ## the developer module kgopt_dev: host-side planning for pytest
	@$(PY) -m cmake -S . -B build/dev -DKGOPT_CUDA=OFF $(CMAKE_PYTHON)
	@$(PY) -m cmake --build build/dev -j $(JOBS)

# With the torch that is there, for which torchvision has one release.
peers: $(ENV) ## the libraries whose networks the tests optimize; without a package index the tests skip them
	@$(PY) scripts/peers.py --there 2>/dev/null || $(PIP) install -q --retries 1 --group peers \
	  "torch==$$($(PY) -c 'import torch; print(torch.__version__.split("+")[0])')" || \
	  echo "some libraries are not to be had: tests/test_peers.py skips their networks"

test: install peers dev-module ## build, install and run the tests (GPU tests where there is a GPU)
	@$(PY) -m pytest -n $(TEST_JOBS) --dist worksteal $(ARGS)

demo: build-here ## the three pipelines on real data, compared with PyTorch
	@$(PIP) install -q --force-reinstall --no-deps $(WHEEL)
	@$(PIP) install -q "$(WHEEL)[demo]"
	@$(PY) -m kgopt demo $(ARGS)

bench: build-here ## the benchmark, for example ARGS="--suite pipelines --json F --plot F"
	@$(PIP) install -q --force-reinstall --no-deps $(WHEEL)
	@$(PIP) install -q "$(WHEEL)[demo]"
	@$(PY) -m kgopt bench $(ARGS)

fuzz: build ## the search for faults, for example ARGS="--seconds 600 --kind all --json F"
	@$(PIP) install -q --force-reinstall --no-deps $(WHEEL)
	@$(PY) -m kgopt fuzz $(ARGS)

wheel: build check-wheel ## a wheel in dist/, built and audited

check-wheel: $(ENV)
	@$(PIP) install -q --group wheel
	@$(PY) scripts/check_wheel.py $(WHEEL)

matrix: ## the wheel of dist/ in fresh environments: Python and torch, oldest and newest, and a CPU-only torch
	@ls dist/kgopt-*.whl > /dev/null 2>&1 || $(MAKE) build
	@$(BASE_PYTHON) scripts/matrix.py $(WHEEL) $(if $(ARGS),-- $(ARGS))

sanitize: ## compute-sanitizer's four tools over a small shape of every CUDA op
	@KGOPT_LINEINFO=1 $(MAKE) install
	@$(PY) scripts/sanitize.py $(ARGS)

gpu-check: install ## tests, fuzz, soak and sanitizers side by side on a GPU, for example ARGS="fuzz soak --minutes 10"
	@$(PY) scripts/gpu_check.py $(ARGS)

cmake-test: $(ENV) ## the kernels as a plain C++ library, and its C++ test program
	@$(PY) -m cmake -S . -B build/cmake -DKGOPT_DEV_MODULE=OFF
	@$(PY) -m cmake --build build/cmake -j $(JOBS)
	@CTEST_OUTPUT_ON_FAILURE=1 $(PY) -m cmake --build build/cmake --target test

lint: $(ENV) ## ruff, mypy, clang-format and the source rules; changes nothing
	@$(PIP) install -q --group lint
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@git ls-files --cached --others --exclude-standard 'csrc/*' | grep -E '\.(cu|cuh|h|cpp)$$' | xargs $(CLANG_FORMAT) --dry-run --Werror
	@$(PY) scripts/check_sources.py
	@$(PY) scripts/import_circles.py

format: $(ENV) ## ruff and clang-format, in place
	@$(PIP) install -q --group lint
	@$(PY) -m ruff check --fix-only -q .
	@$(PY) -m ruff format -q .
	@git ls-files --cached --others --exclude-standard 'csrc/*' | grep -E '\.(cu|cuh|h|cpp)$$' | xargs $(CLANG_FORMAT) -i

docs: ## the documentation as a site in build/site; a warning is an error
	@test -x build/docs-env/bin/python || $(BASE_PYTHON) -m venv build/docs-env
	@build/docs-env/bin/python -m pip --disable-pip-version-check install -q --upgrade "pip>=25.1"
	@build/docs-env/bin/python -m pip --disable-pip-version-check install -q --group docs
	@NO_MKDOCS_2_WARNING=1 build/docs-env/bin/python -m mkdocs build --strict -q

clean: ## everything that was built; .venv stays
	@rm -rf build dist python/kgopt.egg-info python/kgopt/_C.abi3.so .matrix
