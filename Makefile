# One command per task; everything works in .venv and build/, both of which may be deleted at any time.
# Used as in CI: `make test`.

PYTHON  ?= python3
VENV    := .venv
PY      := $(VENV)/bin/python
STAMP   := $(VENV)/.installed
PYTEST  := $(PY) -m pytest
# an installation of the wheel, which holds more than one CPU variant
VARIANTS := build/variants
# spinning threads stall two test processes on two cores
OMP     := OMP_WAIT_POLICY=passive
# the tests of test-full; CI leaves out those that `make test` has just run
FULL    ?= not gpu
# what test-full runs behind them
THEN    ?= server-suite exact

# what `make bench` runs (F16, Q8_0 or Q4_K_M), and where it adds its row; ROWS=bench/results/tiny-moe-f16.json keeps it
KIND    ?= F16
ROWS    ?= build/bench-rows.json

# what a new build depends on
SOURCES := pyproject.toml CMakeLists.txt vendor/llama.lock patches/series \
           $(wildcard cmake/* patches/*.patch _build/*.py) $(shell find src -type f)

.PHONY: help dev wheel demo test examples test-full test-variants test-gpu exact compat-table server-suite bench lint format asan corpus-check \
        patch-import patch-export patch-check clean off-speed

help:                ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | column -t -s '|'

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --upgrade pip

$(VENV)/.tools: pyproject.toml | $(VENV)/bin/python
	$(PY) -m pip install -q "scikit-build-core>=0.10" "cmake>=3.24" "ninja>=1.11" "tomli>=2; python_version<'3.11'"
	@touch $@

# where nobody watches, pip shows what the build prints: how far it is, once a minute
VERBOSE := $(shell test -t 2 || echo -v)

# an editable install knows the modules that were there: a new one needs another
MODULES := $(shell mkdir -p build; find python -name '*.py' | sort > build/.modules.new; \
             cmp -s build/.modules.new build/.modules || cp build/.modules.new build/.modules; echo build/.modules)

$(STAMP): $(SOURCES) $(MODULES) | $(VENV)/.tools
	$(PY) -m pip install $(VERBOSE) --no-build-isolation -e ".[dev]"
	@touch $@

dev: $(STAMP)        ## editable install with a persistent build folder (first time 6 minutes on 2 cores)
	@if [ -d .git ] && [ ! -e .git/hooks/pre-commit ]; then $(VENV)/bin/pre-commit install; fi

wheel: $(STAMP)      ## a wheel for any CPU of this architecture, into build/dist; it is installed without a compiler
	rm -rf build/wheel build/dist
	$(PY) -m pip wheel $(VERBOSE) --no-build-isolation --no-deps -w build/wheel -C cmake.define.DRAFTWOOD_PORTABLE=ON .
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" tools/repair_wheel.sh build/wheel/draftwood-*.whl build/dist

$(VARIANTS)/.installed: wheel
	$(PYTHON) -m venv --clear $(VARIANTS)
	$(VARIANTS)/bin/pip install -q "$$(ls -t build/dist/draftwood-*.whl | head -1)[test]"
	@touch $@

test-variants: $(VARIANTS)/.installed ## that wheel on lesser CPUs: ops and engine with AVX2, ops with SSE4.2
	DRAFTWOOD_CPU=haswell $(OMP) $(VARIANTS)/bin/python -m pytest -m "not slow and not gpu" -n 2 --dist loadfile \
	  tests/ops tests/model/engine tests/model/generate tests/model/test_row_exact.py tests/model/test_cpu_variants.py \
	  tests/model/test_forks.py --ignore-glob '*/test_cuda_*.py'
	DRAFTWOOD_CPU=sse42 $(OMP) $(VARIANTS)/bin/python -m pytest -m "not slow and not gpu" -n 2 \
	  tests/ops tests/model/test_cpu_variants.py --ignore-glob '*/test_cuda_*.py'
	$(PYTEST) tests/compat/test_lesser_cpu.py # in QEMU, if qemu-user is installed

demo: $(STAMP)       ## text from the trained tiny model with and without drafting; writes build/demo.json
	$(PY) bench/demo.py

test: $(STAMP) wheel ## unit, patches, ops, model, fast compat: minutes, no torch, no stock build
	$(OMP) $(PYTEST) -m "not slow and not gpu" -n 2 --dist loadfile

examples: $(STAMP) wheel ## examples with the real clients, and the wheel in a clean environment without a compiler; 4 minutes
	$(PYTEST) tests/compat/test_examples.py tests/compat/test_wheel.py -k "not beside and (test_examples or clean_environment or its_tag)"

test-full: $(STAMP) wheel lint asan ## everything that needs no GPU: stock build, coexistence, parity, ASAN, exact
	$(PY) -m pip install -q -r tools/tiny_moe/requirements.txt
	$(PYTEST) -m "$(FULL)" --timeout 1800 --durations 20
	$(MAKE) $(THEN)

test-gpu: $(STAMP)   ## what needs a CUDA device, with CUDA graphs and without; rows in build/test-gpu
	$(PY) bench/run.py test build/test-gpu --minutes 60

exact: $(STAMP)      ## text with drafting = text without, chains and trees, token for token; 10 minutes, the last line is JSON
	$(PY) bench/exact.py
	$(PY) bench/exact_experts.py
	$(PY) bench/exact_trees.py --results build/exact-trees.json

compat-table: $(STAMP) ## the compatibility table: runs every row's tests, prints row, test, result
	$(PY) tests/compat/test_table.py

server-suite: $(STAMP) ## llama-server's own tests on tiny-moe, drafting off and on, replies compared; 4 minutes
	$(PY) -m pip install -q -r tests/server/suite/requirements.txt
	$(PY) tests/server/suite/run.py

# a claim about speed that fails (exit status 3) is printed and fails nothing here
bench: $(STAMP)      ## plain decode and every way of drafting on held-out text; adds a row to ROWS; 5 to 10 minutes
	model=$$($(PY) -c "import sys; sys.path.insert(0, 'bench'); from models import tiny_moe; print(tiny_moe('$(KIND)'))") && \
	$(VENV)/bin/draftwood bench $$model --drafter models/tiny-moe/dflash-f16.gguf \
	  --prompts models/tiny-moe/heldout --per-category 6 --threads $$(nproc) --floor auto:0.97 --best auto:1.15 --rivals auto:0.99 \
	  --json build/bench.json --plot build/bench.png --results $(ROWS) || test $$? -eq 3

lint: $(STAMP)       ## ruff, mypy, which room uses which, clang-format, the patch queue
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(PY) tools/lint_rooms.py
	find src bench/chain -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' | xargs $(VENV)/bin/clang-format --dry-run --Werror
	$(PY) tools/patches.py check

format: $(STAMP)     ## let the formatters write
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	find src bench/chain -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' | xargs $(VENV)/bin/clang-format -i

asan: $(STAMP)       ## the engine's tests on a library with address and undefined-behaviour sanitizers
	$(PY) _build/source.py
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" cmake --preset cpu-asan
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" cmake --build --preset cpu-asan
	$(PY) tests/run_asan.py build/cpu-asan/bin

corpus-check: $(STAMP) ## no 13-gram of tiny-moe's held-out text is in its training text; downloads 500 MB once
	$(PY) -m tools.tiny_moe.corpus fetch build/tiny-moe
	$(PY) -m tools.tiny_moe.corpus check build/tiny-moe
	@echo "no 13-gram is shared"

patch-import: $(STAMP) ## the patch queue as git commits under build/patches
	$(PY) tools/patches.py import
patch-export: $(STAMP) ## and back into patches/
	$(PY) tools/patches.py export
patch-check: $(STAMP)  ## lint, budget, strict application, round trip
	$(PY) tools/patches.py check

clean:               ## remove builds, keep the environment
	rm -rf build

off-speed: $(STAMP)    ## speed of plain decode with draftwood off against a pristine build; the last line is JSON
	$(PY) bench/off_speed.py
