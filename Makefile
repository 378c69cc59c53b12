# One command each. `make help` lists them. Everything lives in .venv; nothing else on the machine is touched.
PYTHON     ?= python3
GPU_PYTHON ?= python3
GPU_TESTS  ?= tests/gpu tests/model/test_sampling_gpu.py
GPU_JOBS   ?= 4
SANITIZER  ?= compute-sanitizer
OUT        ?= build/bench-gpu
FORECASTS  ?= $(or $(wildcard $(OUT)/forecasts.safetensors),build/forecasts.safetensors)
WORKERS    ?= 2
ARGS       ?=

BIN := .venv/bin
# One torch thread per test process: two threads on two busy cores make each small operation ten times slower.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# A file's tests stay in one process: what they share (models, packs, reference answers) is made once.
IN_PARALLEL := -n $(WORKERS) --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help venv demo test check mutants test-slow test-gpu sanitize-gpu bench-gpu bench-predict lock clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: .venv/.ready  ## the environment, built when missing or out of date

# The lock holds a hash for everything but torch, whose wheel differs by machine (CPU or CUDA) and is pinned by
# constraints.txt. The package itself is built by the locked hatchling, so no other build tool is fetched.
.venv/.ready: pyproject.toml constraints.txt requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "steerpipe needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo missing)."; \
	  echo "  fix: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || { rm -rf .venv; \
	  echo "'$(PYTHON) -m venv' failed."; \
	  echo "  fix: install the venv module (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: venv  ## shows the engine at work, then ends by itself
	$(BIN)/steerpipe demo $(ARGS)

test: venv  ## tests that need neither a GPU nor patience
	$(ONE_THREAD) $(BIN)/python -m pytest $(IN_PARALLEL) $(ARGS)

check: venv  ## ruff, mypy and the import ladder
	$(BIN)/ruff check --output-format concise .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

mutants: venv  ## plants faults in a copy of src; each must be caught by its tests
	$(ONE_THREAD) $(BIN)/python tools/mutants.py --workers $(WORKERS) $(ARGS)

# lm-eval, which one test runs: 53 packages that nothing else needs, where nothing else sees them.
build/lm-eval/.ready: tests/server/lm-eval.lock .venv/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps --upgrade \
	  --target build/lm-eval -r tests/server/lm-eval.lock
	@touch $@

test-slow: venv build/lm-eval/.ready  ## the tests marked slow
	$(ONE_THREAD) $(BIN)/python -m pytest -n $(WORKERS) -m "slow and not gpu" $(ARGS)

# Only folders whose tests import nothing but torch, transformers, Triton, pytest and hypothesis: a machine with a GPU
# often has no more, and pytest imports every file that it is shown. (5: no test of a file is among those of ARGS.)
test-gpu:  ## the tests marked gpu, with GPU_PYTHON (a Python whose torch sees CUDA), GPU_JOBS files at a time
	@mkdir -p build
	find $(GPU_TESTS) -name 'test_*.py' > build/gpu-tests.txt && test -s build/gpu-tests.txt
	PYTHONPATH=src PYTEST_ADDOPTS="$(ARGS)" xargs -P $(GPU_JOBS) -I @ sh -c \
	  'said=$$($(GPU_PYTHON) -m pytest -q -m gpu @ 2>&1); status=$$?; echo "@: $$said"; test $$status = 5 || exit $$status' < build/gpu-tests.txt

sanitize-gpu:  ## the kernel tests under compute-sanitizer
	PYTHONPATH=src $(SANITIZER) --error-exitcode 9 \
	  $(GPU_PYTHON) -m pytest -m gpu $(wildcard tests/gpu/test_gpu_kernel*.py tests/gpu/test_gpu_experts.py) $(ARGS)

bench-gpu:  ## every measurement of the CUDA engine, within 570 s, into OUT
	PYTHONPATH=src:. $(GPU_PYTHON) benchmarks/cuda_run.py $(OUT) $(ARGS)

# Of nano, of prompts that come with the project; on a CPU, in a minute. A file that was named has to be there. Where OUT
# has figures it has their forecasts, too: replay takes no others.
build/forecasts.safetensors:
	PYTHONPATH=src:. $(GPU_PYTHON) benchmarks/record_forecasts.py --out $@

bench-predict: $(FORECASTS)  ## prediction on a GPU at full shape, within 570 s, into OUT; FORECASTS: those in OUT, or recorded
	PYTHONPATH=src:. $(GPU_PYTHON) benchmarks/predict_run.py $(OUT) --forecasts $(FORECASTS) $(ARGS)

lock: venv  ## writes requirements.lock anew
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/python tools/lock.py

clean:  ## removes the environment and every cache
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests tools recipes -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
