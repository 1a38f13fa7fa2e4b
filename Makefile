# make train   set up, fetch the model, train it on 6 CPU processes, and let it answer
# make test    set up, run the whole test suite
# make check   set up, run the linters, the type checker and the quick tests
# make clean   remove what the build and the tests left; models/ and output/ stay
#
# An active virtual environment is used; otherwise .venv is made (BASE_PYTHON names the Python to make it from).

BASE_PYTHON ?= python3
ifdef VIRTUAL_ENV
VENV := $(VIRTUAL_ENV)
else
VENV := .venv
endif
PYTHON := $(VENV)/bin/python
PIP := $(PYTHON) -m pip --disable-pip-version-check
MODEL := models/SmolLM2-135M-Instruct
TORCH := torch==2.13.0
# Chat templates and a tokenizer file for the tests; nothing of these packages is imported.
TEST_FILES := trl==1.16.0 dashscope==2.0.2
# Two at a time: most of them wait for imports, which use one core. Those of a file share what they start, and files
# come in the order of tests/conftest.py.
TEST := OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# A stamp lies in the environment that it speaks of, and carries the folder of this clone: another environment, or
# another clone in the same one, installs again.
CLONE := $(subst /,-,$(subst $(eval) ,_,$(CURDIR)))
stamp = $(VENV)/.shardwise-$(1)$(CLONE)
install = $(PIP) install --quiet --editable '.[$(1)]' && rm -f $(VENV)/.shardwise-$(1)-* && touch $@

.DEFAULT_GOAL := help
.PHONY: help train test check lint clean model

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

train: $(call stamp,demo) model
	$(PYTHON) -m shardwise.cli train examples/quickstart.yaml overwrite=true

test: $(call stamp,dev) model
	$(TEST)

check: lint
	$(TEST) -q -m "not slow"

lint: $(call stamp,dev)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(VENV)/bin/lint-imports

model: $(call stamp,demo)
	$(PYTHON) examples/get_smollm2.py $(MODEL)

# torch comes first and alone: a wide range in the next command must not pull another build of it.
$(call stamp,torch): | $(PYTHON)
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Shardwise needs Python 3.11 or newer')"
	$(PYTHON) -c "import torch; assert tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 13)" 2>/dev/null \
		|| $(PIP) install $(TORCH)
	touch $@

$(call stamp,dev): pyproject.toml | $(call stamp,torch)
	$(PIP) install --quiet --no-deps $(TEST_FILES)
	$(call install,dev)

$(call stamp,demo): pyproject.toml | $(call stamp,torch)
	$(call install,demo)

$(PYTHON):
	$(BASE_PYTHON) -m venv $(VENV)

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find shardwise tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
