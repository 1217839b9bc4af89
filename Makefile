# make train                a language model learns the King James Bible: 500 steps, in runs/tiny
# make train STEPS=2500     runs on to the end; DATA=FILE another text, RUN=DIR another folder,
#                           FLAGS="--seed 1" any other setting (FLAGS=--help lists them)
# make sample               text from its checkpoint; PROMPT="And God said" LENGTH=400
# make test                 all tests with jaxlib 0.11.2, in .venv (made if need be)
# make test JAXLIB=0.12     a named subset with jaxlib 0.12, in .venv-0.12 (FULL=1: all tests)
# make test TESTS=tests/test_router.py PYTEST_FLAGS=-x JOBS=0   (0: in one process)
# make test-gpu SHARD=i/n    the tests that need GPUs, or a part of them; GPU_PYTHON has jax[cuda13]
# make test-gpu SHARD=sanitizers    those under compute-sanitizer, which are slow
# make lint, make format    what CI checks, and what mends most of it
# make dist                 wheel and sdist in dist/, each installed and tried in a fresh environment
# PYTHON=/path/to/python    which Python makes the environments (else tools/find_python.sh looks)

JAXLIB ?= 0.11.2
EXTRAS := test,train
# Processes of pytest; each holds 8 CPU devices, and one test 6 GiB.
JOBS ?= 2

# Whatever environment is active, the ones below are used.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV PYTHONDONTWRITEBYTECODE
export PYTHON
# Python compiles what it imports; pip would compile all.
export PIP_COMPILE := 0

OLDEST := 0.11.2
BUILD_VENV := .venv
VENV := $(if $(filter $(OLDEST),$(JAXLIB)),$(BUILD_VENV),.venv-$(JAXLIB))
TOOLS_VENV := .venv-tools
CONSTRAINTS := tests/constraints-$(JAXLIB).txt
ifeq ($(wildcard $(CONSTRAINTS)),)
$(error JAXLIB=$(JAXLIB) has no $(CONSTRAINTS); there are: $(wildcard tests/constraints-*.txt))
endif

PIP := bin/python -m pip --disable-pip-version-check --quiet
NATIVE_SOURCES := $(wildcard xla_ffi/* ptx/*)
PYTHON_SOURCES := $(shell find jax_moe -name '*.py' -o -name '*.pyi' -o -name py.typed)
CXX_FILES := $(wildcard ptx/*.h $(foreach d,xla_ffi tests/*,$d/*.h $d/*.cc))

# What jaxlib 0.12 could break: the custom calls, their transformations, Pallas, the router, the README.
# Of "reference" and "xla", which are plain JAX, the latter in one layout.
SUBSET := $(patsubst %,tests/test_%.py,exchange transformations pallas_matmul api router readme) \
    -k 'not reference and (not xla or nodes_2x4)'
TESTS ?= $(if $(or $(filter $(OLDEST),$(JAXLIB)),$(FULL)),tests,$(SUBSET))

.PHONY: train sample test test-gpu lint format dist install FORCE
.DELETE_ON_ERROR:

test: install
	$(VENV)/bin/python -P -m pytest -n $(JOBS) $(PYTEST_FLAGS) $(TESTS)

# In an environment of the user's, with jax[cuda13] and jax_moe; a skip for want of a GPU is a failure.
GPU_PYTHON ?= $(VENV)/bin/python
test-gpu:
	SHARD=$(SHARD) JAX_MOE_REQUIRE=gpu1 $(GPU_PYTHON) -P -m pytest $(PYTEST_FLAGS) tests/gpu

install: $(VENV)/.installed

# The trainer; TRAIN_COMMAND is what it says to type to go on.
STEPS ?= 500
DATA ?=
RUN ?= runs/tiny$(if $(DATA),-$(basename $(notdir $(DATA))))
PROMPT ?= In the beginning
LENGTH ?= 400
quoted = $(if $(word 2,$(1)),'$(1)',$(1))
train: export TRAIN_COMMAND := make train STEPS=$(STEPS)$(if $(DATA), DATA=$(call quoted,$(DATA)))$(if \
    $(filter-out file,$(origin RUN)), RUN=$(call quoted,$(RUN)))$(if $(FLAGS), FLAGS="$(FLAGS)")
train: install
	@$(VENV)/bin/python -m train tiny --steps $(STEPS) --run-dir '$(RUN)' \
	    $(if $(DATA),--data.file '$(DATA)') $(FLAGS)

sample: export PROMPT := $(PROMPT)
sample: install
	@$(VENV)/bin/python -m train.sample '$(RUN)' --prompt "$$PROMPT" --length $(LENGTH)

# Environments. One whose Python is gone is made anew; a good one that was here already is kept.
VENVS := $(sort $(BUILD_VENV) $(VENV) $(TOOLS_VENV))
BROKEN := $(shell for v in $(VENVS); do $$v/bin/python -c '' 2>/dev/null || echo $$v/.made; done)
$(BROKEN): FORCE
$(addsuffix /.made,$(VENVS)): tools/make_venv.sh tools/find_python.sh
	tools/make_venv.sh $(@D)
	@touch $@

# Builds run without isolation, so that a rebuild is quick and offline. The build's requirements
# (the oldest jaxlib among them) are pyproject.toml's.
$(BUILD_VENV)/.build-requirements: $(BUILD_VENV)/.made pyproject.toml tests/constraints.txt \
    tests/constraints-$(OLDEST).txt
	$(BUILD_VENV)/$(PIP) install -c tests/constraints-$(OLDEST).txt cmake ninja \
	    $$($(BUILD_VENV)/bin/python tools/build_requirements.py)
	@touch $@

# Finds what the editable installation has compiled.
build/wheel/.built: $(BUILD_VENV)/.build-requirements $(NATIVE_SOURCES) $(PYTHON_SOURCES) README.md LICENSE
	rm -rf build/wheel
	$(BUILD_VENV)/$(PIP) wheel --no-build-isolation --no-deps --wheel-dir build/wheel .
	@touch $@

# With the oldest jaxlib the project is installed editable; with another, from the wheel that was
# built against the oldest, because that is what users get.
ifeq ($(VENV),$(BUILD_VENV))
$(VENV)/.installed: $(BUILD_VENV)/.build-requirements $(NATIVE_SOURCES)
	$(VENV)/$(PIP) install -c $(CONSTRAINTS) --no-build-isolation --editable '.[$(EXTRAS)]'
	@touch $@
else
$(VENV)/.installed: $(VENV)/.made $(CONSTRAINTS) tests/constraints.txt build/wheel/.built
	$(VENV)/$(PIP) install -c $(CONSTRAINTS) "$$(echo build/wheel/*.whl)[$(EXTRAS)]"
	$(VENV)/$(PIP) install --force-reinstall --no-deps build/wheel/*.whl
	@touch $@
endif

$(TOOLS_VENV)/.installed: $(TOOLS_VENV)/.made tools/lint-requirements.txt
	$(TOOLS_VENV)/$(PIP) install -r tools/lint-requirements.txt
	@touch $@

lint: $(TOOLS_VENV)/.installed $(BUILD_VENV)/.installed
	$(TOOLS_VENV)/bin/ruff format --check .
	$(TOOLS_VENV)/bin/ruff check .
	$(TOOLS_VENV)/bin/clang-format --dry-run -Werror $(CXX_FILES)
	$(TOOLS_VENV)/bin/pyright --pythonpath $(BUILD_VENV)/bin/python
	$(TOOLS_VENV)/bin/kubernetes-validate --strict --quiet train/launch/kubernetes.yaml

format: $(TOOLS_VENV)/.installed
	$(TOOLS_VENV)/bin/ruff check --fix --exit-zero --quiet .
	$(TOOLS_VENV)/bin/ruff format .
	$(TOOLS_VENV)/bin/clang-format -i $(CXX_FILES)

dist: build/wheel/.built
	tools/check_dist.sh $(BUILD_VENV)/bin/python build/wheel/*.whl
