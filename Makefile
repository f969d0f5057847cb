# The whole of it: `make demo` and `make test` need only python3 and make, and set themselves up in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-long test-all check format tables notebooks bench-kernels bench-layers bench-steps bench-host bench-front bench-rows \
	bench-modes clean

help:
	@echo "make demo      set up, then run the demo"
	@echo "make test      set up, then the tests that take minutes"
	@echo "make test-slow the tests on real engines, an hour; make test-all runs both"
	@echo "make test-long what is too long for CI; by hand, before a release"
	@echo "make check     ruff, formatting, mypy --strict"
	@echo "make tables    write the tables of the pages that come from the code"
	@echo "make notebooks run the notebooks, and store them with what they print and draw"
	@echo "make bench-kernels, bench-layers, bench-steps, bench-host, bench-modes    on a GPU; PYTHON=... is its python, RESULTS=... a folder"
	@echo "make bench-front    what admitting a request costs, on a CPU"
	@echo "make bench-rows     what features of dictionaries in files cost at admission, on a CPU"

setup: $(READY)

# Once, and again when what it installs has changed.
$(READY): pyproject.toml tools/setup.py
	@$(PYTHON) tools/setup.py $(VENV)
	@touch $@

demo: $(READY)
	@$(BIN)/saesteer demo

test: $(READY)
	$(BIN)/python -m pytest -m "not slow and not network"

test-slow: $(READY)
	$(BIN)/python -m pytest -m "slow and not long and not network" $(if $(UNTIL),--until $(UNTIL))

test-long: $(READY)
	$(BIN)/python -m pytest -m "long and not network"

test-all: $(READY)
	$(BIN)/python -m pytest -m "not long and not network"

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

tables: $(READY)
	$(BIN)/python tools/tables.py

notebooks: $(READY)
	$(BIN)/python tools/notebooks.py

# All but bench-front and bench-rows measure a GPU, so they run in the python that has CUDA's torch, Triton, vLLM and matplotlib, and set nothing up.
RESULTS ?= bench/results
GIVEN := $(if $(COMMIT),--commit $(COMMIT))

bench-kernels:
	@# What is wrong is not timed, and leaves the rest to be drawn.
	$(PYTHON) -m bench.kernels --out $(RESULTS) $(GIVEN); wrong=$$?; \
	$(PYTHON) -m bench.plot --results $(RESULTS)/kernels.jsonl --out $(RESULTS)/kernels.png && exit $$wrong

bench-layers:
	$(PYTHON) -m bench.layers --out $(RESULTS) $(GIVEN)

bench-steps:
	$(PYTHON) -m bench.steps --model gemma-3-4b --stock --requests 16 1 4 64 256 --out $(RESULTS) $(GIVEN)
	$(PYTHON) -m bench.steps --model gemma-3-27b --stock --requests 16 1 4 --out $(RESULTS) $(GIVEN)
	$(PYTHON) -m bench.plot --results $(RESULTS)/steps.jsonl --out $(RESULTS)/steps.png

bench-host:
	$(PYTHON) -m bench.host --out $(RESULTS) $(GIVEN)

bench-front: $(READY)
	$(BIN)/python -m bench.front --out $(RESULTS) $(GIVEN)

bench-rows: $(READY)
	$(BIN)/python -m bench.rows

bench-modes:
	$(PYTHON) -m bench.modes --way llm --out $(RESULTS) $(GIVEN)
	$(PYTHON) -m bench.modes --way http --out $(RESULTS) $(GIVEN)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build saesteer.egg-info
