# Every task is one word. `make serve` and `make test` need only Python >= 3.11, a C compiler and make.

PYTHON ?= python3
# The torch to install: CUDA and ROCm users name another build, or set TORCH= to use the installed one.
TORCH ?= torch==2.13.0
VENV ?= .venv
PORT ?= 8000
HOST ?= 127.0.0.1
ARGS ?=
GPU_PY ?= python3

BIN := $(VENV)/bin
PY := $(BIN)/python

# The build, and pip's installation for the tests, run in parallel.
MAKEFLAGS += -j2

# cython-lint looks for pycodestyle on the path.
export PATH := $(abspath $(BIN)):$(PATH)

.PHONY: serve test test-full test-ray lint format build bench gpu gpu-build gpu-test gpu-kernels gpu-offline gpu-serve gpu-summary
.PHONY: gpu-products gpu-grammar gpu-pooling gpu-wheels clean wheel wheel-check soak fuzz lock

serve: .stamp-build  ## the server at 127.0.0.1:8000 with the model in the package (HOST=, PORT=, ARGS="--model ...")
	$(PY) -m server --host $(HOST) --port $(PORT) $(ARGS)

LINT := $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(PY) -m mypy && $(BIN)/cython-lint _fast
# One worker per core runs whole files (tests/conftest.py); the slowest 20 tests are printed. Lint runs in parallel with
# the tests. These lines have no $(MAKE), because make runs a line with $(MAKE) even under -n.
TEST_JOBS ?= $(shell nproc)
# With an empty PYTHONDONTWRITEBYTECODE Python writes bytecode, so the servers that tests start need not compile each file.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PY) -m pytest -n $(TEST_JOBS) --dist loadscope --no-loadscope-reorder --durations=20
test: .stamp-build .stamp-dev  ## lint, types and the whole CPU suite
	@{ $(LINT); } > build/lint.log 2>&1 & \
	$(PYTEST) -m "not gpu and not full" $(ARGS); tests=$$?; \
	wait $$! || { cat build/lint.log; echo "make lint failed"; exit 1; }; exit $$tests

test-full: .stamp-build .stamp-dev  ## the long forms that `make test` leaves out; installs the clients of LlamaIndex and OpenAPI, and pip-audit
	$(PY) .ci/requirements.py full | $(PY) -m pip install -q --disable-pip-version-check -r /dev/stdin
	$(PYTEST) -m "full and not gpu" $(ARGS); tests=$$?; \
	$(PY) -m pip_audit --disable-pip --require-hashes -r .ci/locks/server.txt && exit $$tests

test-ray: .stamp-build .stamp-dev  ## replicas under Ray Serve; installs Ray (80 MB), which `make test` leaves out
	$(PY) .ci/requirements.py ray | $(PY) -m pip install -q --disable-pip-version-check -r /dev/stdin
	OMP_NUM_THREADS=1 $(PY) -m pytest -q tests/end_to_end/test_ray.py $(ARGS)

lint: .stamp-build .stamp-dev  ## ruff check and format, mypy, cython-lint
	$(LINT)

format: .stamp-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

build: .stamp-build

bench: .stamp-build .stamp-dev  ## serving over sockets against a bare torch loop, in one run
	$(PY) -m tests.bench.serve_cpu $(ARGS)

# Runs the images' Python in an environment of its own. A version changes only if pyproject.toml no longer allows it.
LOCK_PYTHON ?= python3.12
LOCK := --generate-hashes --allow-unsafe --strip-extras --no-annotate --no-header \
    --no-emit-index-url --no-emit-find-links --no-emit-trusted-host
lock:  ## .ci/locks/server.txt, the images' packages with hashes (ARGS=--upgrade: newer ones)
	mkdir -p build && $(LOCK_PYTHON) -m venv build/lock && build/lock/bin/pip install -q pip-tools
	{ $(LOCK_PYTHON) .ci/requirements.py; $(LOCK_PYTHON) .ci/requirements.py mistral; echo 'setuptools>=77'; \
	    echo 'cython>=3.1,!=3.3.0'; } | grep -v '^torch' > build/lock/server.in
	build/lock/bin/pip-compile -q $(LOCK) $(ARGS) -o .ci/locks/server.txt build/lock/server.in

# 20,000 requests take about ten minutes on two cores; ARGS=2000 is a short run, ARGS="--seconds 3600" an hour.
soak: .stamp-build .stamp-dev  ## mixed requests for a long time: wrong answers, resources held when idle, growth of memory
	OMP_NUM_THREADS=1 $(PY) -m tests.bench.soak $(ARGS)

FUZZ_SECONDS ?= 3600
fuzz: .stamp-build .stamp-dev  ## damaged inputs for an hour; ARGS=schemas names the inputs (tests/fuzz/targets.py)
	OMP_NUM_THREADS=1 $(PY) -m tests.fuzz $(FUZZ_SECONDS) $(ARGS)

# Each step runs even if an earlier step failed; a table of all measurements comes last.
GPU_STEPS ?= test kernels offline serve
GPU_SHAPES ?= 8b,0.6b
GPU_JOBS ?= 6
GPU_OUT := $(or $(OUT),build/gpu)
# pytest loads only the plugins that the tests need, because such a machine may have others.
GPU_PYTEST := PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(GPU_PY) -m pytest -p pytest_asyncio.plugin -p pytest_timeout \
    -p xdist.plugin -p no:cacheprovider -n $(GPU_JOBS) --tb=short -q -m gpu
GPU_TESTS ?= $(shell grep -rlE "mark\.gpu" tests --include="test_*.py") tests/invariance
gpu: SHELL := /bin/bash
gpu:  ## on a machine with an accelerator and its own torch: build, GPU tests, benchmarks; log and JSON into $$OUT
	@mkdir -p $(GPU_OUT); failed=; \
	for step in build $(GPU_STEPS) summary; do \
	    SECONDS=0; $(MAKE) --no-print-directory gpu-$$step 2>&1 | tee -a $(GPU_OUT)/gpu.log; \
	    [ $${PIPESTATUS[0]} = 0 ] || failed="$$failed $$step"; \
	    echo "[gpu-$$step: $$SECONDS s]" | tee -a $(GPU_OUT)/gpu.log; \
	done; \
	[ -z "$$failed" ] || { echo "failed:$$failed"; exit 1; }

gpu-build:
	OMNILOOP_BUILD_JOBS=$$(nproc) $(GPU_PY) setup.py -q build_ext --inplace --parallel $$(nproc) > $(GPU_OUT)/build.log 2>&1 \
	    || { tail -50 $(GPU_OUT)/build.log; exit 1; }
	rm $(GPU_OUT)/build.log

gpu-test:
	$(GPU_PYTEST) $(GPU_TESTS) $(ARGS)

gpu-kernels:
	$(GPU_PY) -m tests.bench.gpu_kernels --out $(GPU_OUT)

gpu-products:
	$(GPU_PY) -m tests.bench.gpu_products

gpu-offline:
	$(GPU_PY) -m tests.bench.gpu_offline --shape $(GPU_SHAPES) --out $(GPU_OUT) $(ARGS)

gpu-serve:
	$(GPU_PY) -m tests.bench.gpu_serve --shape $(GPU_SHAPES) --out $(GPU_OUT) $(ARGS)

gpu-grammar:
	$(GPU_PY) -m tests.bench.gpu_grammar --out $(GPU_OUT) $(ARGS)

gpu-pooling:
	$(GPU_PY) -m tests.bench.gpu_pooling --out $(GPU_OUT) $(ARGS)

gpu-summary:
	@$(GPU_PY) -m tests.bench.targets $(GPU_OUT)

# Packages for a GPU machine without a network, which has torch, Triton, transformers and their dependencies: copy .whl/
# there and install it into a folder on PYTHONPATH. Sounds and films also need .whl-media/, unpacked into that folder
# (`python3 -m tarfile -e .whl-media/av.tar.xz FOLDER`; the archive has 24 MiB, the wheel would have 33).
GPU_WHEELS := cython greenlet starlette uvicorn httptools websockets msgspec orjson python-multipart soxr llguidance pillow \
    pytest pytest-asyncio pytest-timeout pytest-xdist execnet pluggy iniconfig
GPU_DOWNLOAD := -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    $(foreach glibc,31 28 27 17 12,--platform manylinux_2_$(glibc)_x86_64) --platform manylinux2014_x86_64
gpu-wheels: .stamp-venv  ## the wheels that `make gpu` needs, into .whl/ and .whl-media/
	rm -rf .whl .whl-media
	$(PY) $(GPU_DOWNLOAD) -d .whl $(GPU_WHEELS)
	$(PY) $(GPU_DOWNLOAD) -d .whl-media av
	cd .whl-media && $(abspath $(PY)) -m zipfile -e av-*.whl av && rm av-*.whl && tar cJf av.tar.xz -C av . && rm -r av
	du -sh .whl .whl-media

wheel: .stamp-venv
	$(PY) -m pip wheel -q --no-deps -w dist .

# Builds a wheel in isolation for one Python, installs it into a new environment, starts the server from another folder
# and sends one request. TORCH is the torch that `make serve` installs; needs a package index.
wheel-check:  ## PYTHON=python3.12: whether its wheel installs, starts and answers
	$(PYTHON) -m tests.deploy.wheel_check --torch '$(TORCH)'

clean:
	rm -rf build dist .stamp-* *.egg-info
	find _fast -name '*.so' -delete

# An environment without pip is left from a failed `venv`, and is made again.
PIP := $(PY) -m pip install -q --disable-pip-version-check
NOT_INSTALLED := { echo "make: pip could not install these packages (see above). It needs a package index: without a network, \
    PIP_INDEX_URL= or PIP_FIND_LINKS= names a copy, and TORCH= leaves an installed torch as it is." >&2; exit 1; }
.stamp-venv: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; \
	    sys.exit(v < (3, 11) and f"make: $(PYTHON) is Python {v[0]}.{v[1]}; set PYTHON= to Python 3.11 or newer")'
	@$(PY) -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@echo "make: pip installs $(TORCH:%=% and )the packages of pyproject.toml into $(VENV); this takes some minutes"
	@$(if $(TORCH),$(PIP) $(TORCH) || $(NOT_INSTALLED),:)
	@$(PIP) 'setuptools>=77' 'cython>=3.1,!=3.3.0' || $(NOT_INSTALLED)
	@$(PY) .ci/requirements.py | $(PIP) -r /dev/stdin || $(NOT_INSTALLED)
	@touch $@

.stamp-dev: .stamp-venv
	@$(PY) .ci/requirements.py test lint | $(PIP) -r /dev/stdin || $(NOT_INSTALLED)
	@touch $@

SOURCES := setup.py _fast/layout.py $(wildcard _fast/*.pyx _fast/*.pxd _fast/c/*/*.c _fast/c/*/*.h)
.stamp-build: .stamp-venv $(SOURCES)
	@mkdir -p build
	@echo "make: setup.py compiles the extensions of _fast; this takes a minute or two"
	@OMNILOOP_BUILD_JOBS=$$(nproc) $(PY) setup.py -q build_ext --inplace --parallel $$(nproc) > build/build.log 2>&1 \
	    || { cat build/build.log; exit 1; }
	@touch $@
