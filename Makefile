# Each target does all its set-up from nothing: an environment in $(VENV).
PYTHON ?= python3
VENV ?= .venv
# Pins for a whole environment, e.g. CONSTRAINTS=constraints/floor.txt.
CONSTRAINTS ?=
# A checkout of Tunix to test against instead of the installed release:
#   make test TUNIX=/path/to/tunix ARGS=tests/trainers
TUNIX ?=
# Arguments of pytest, the demonstration or a benchmark, e.g. ARGS="-k laws".
ARGS ?=
# The benchmarks to run, e.g. BENCH="linear_speed linear_memory".
BENCH ?= hook_overhead accumulation
RUN := $(VENV)/bin/python -m

.PHONY: test demo lint types bench clean

$(VENV)/installed: pyproject.toml
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), sys.version'
	$(PYTHON) -m venv $(VENV)
	$(RUN) pip install --quiet --upgrade pip
	$(RUN) pip install --quiet --editable '.[dev]' \
	  $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS))
	touch $@

test: $(VENV)/installed
	$(if $(TUNIX),PYTHONPATH=$(abspath $(TUNIX))) \
	  $(RUN) pytest --numprocesses 2 --dist worksteal $(ARGS)

demo: $(VENV)/installed
	$(RUN) diffusion_objectives.demo $(ARGS)

lint: $(VENV)/installed
	$(RUN) ruff check .
	$(RUN) ruff format --check .

types: $(VENV)/installed
	$(RUN) mypy

$(VENV)/installed-benchmarks: $(VENV)/installed
	$(RUN) pip install --quiet --editable '.[benchmarks]' \
	  $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS))
	touch $@

bench: $(VENV)/installed-benchmarks
	$(foreach script,$(BENCH),$(RUN) benchmarks.$(script) $(ARGS) &&) true

clean:
	rm -rf .venv* .pytest_cache .mypy_cache .ruff_cache .hypothesis
