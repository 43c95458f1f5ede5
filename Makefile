# Two commands for a newcomer: `make quickstart` and `make test`. Both set up what they need in .venv.
#   PYTHON=python3.12        the interpreter that makes .venv (3.11, 3.12 or 3.13)
#   TORCH_INDEX=URL          the package index for torch, for example https://download.pytorch.org/whl/cpu
#   STEPS=N                  training steps of the quickstart
#   WORKERS=N                processes that run the tests (default: 2), each with one thread
#   NIGHTLY="infer positions kernels train"  these nightly tests run with the others: drafters in all combinations, 32K
#                            positions, kernels compiled for absent GPUs, training on 8 ranks
PYTHON ?= python3
TORCH_INDEX ?=
STEPS ?=
WORKERS ?= 2
BIN := .venv/bin
SETUP := .venv/.done
TORCH := $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' constraints.txt)

# All versions in setup.py's python_requires=">=3.A,<3.B".
PYTHONS := $(shell sed -n 's/.*python_requires=">=3\.\([0-9]*\),<3\.\([0-9]*\)".*/\1 \2/p' setup.py | { read a b && seq -f 3.%g $$a $$((b - 1)); })
# Bytecode is written when a module is first imported. Compiling everything at once takes longer than installing it.
PIP := $(BIN)/pip install --quiet --no-compile
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/pytest -n $(WORKERS)
# Tests that may depend on a processor's arithmetic. Excluded are Triton's kernels, the engine's work between steps, one
# KV head per query head, and what only PyTorch computes. KEPT is a test of the memory that libraries keep.
ANYWHERE := tests/test_plain.py tests/kernels tests/infer/test_exactness.py --ignore-glob='*/test_triton_*.py' \
	-k 'not (engine_is_used_again or requests_that_come or take_over or top_ps_border or rows_are_the_references or \
	on_one_tree or test_choice and triton or test_losses_and_gradients or mha)'
# Tests of each folder that start no processes and load no real model.
QUICK := tests/test_architecture.py tests/kernels $(addprefix tests/models/test_,decoder.py longspec.py \
	heads.py draft_folder.py schema.py) $(addprefix tests/data_prep/test_,golden.py pack.py shards.py records.py) \
	$(addprefix tests/infer/test_,exactness.py sampling.py penalties.py budget.py tree.py requests.py) \
	$(addprefix tests/train/test_,config.py batches.py) --ignore-glob='*/test_triton_*.py'
# Tests that depend on transformers' configurations, models and tokenizers.
OLDEST := tests/models tests/data_prep $(addprefix tests/infer/test_,shipped.py smollm2.py transformers_api.py answer_format.py) \
	$(addprefix tests/train/test_,chat_end_to_end.py published_targets.py sharding.py)
KEPT := tests/train/test_memory.py::test_a_run_on_smollm2_takes_what_is_estimated

.PHONY: setup quickstart test quick nightly test-machines test-oldest check format clean
setup: $(SETUP)

$(SETUP): constraints.txt setup.py
	@$(PYTHON) -c 'import sys; v, wanted = sys.version_info, "$(PYTHONS)".split(); sys.exit(0 if "%d.%d" % v[:2] in wanted else "longdraft needs Python %s, and %s is %d.%d; set PYTHON=python%s" % (" or ".join(wanted), sys.executable, v[0], v[1], wanted[0]))'
	$(PYTHON) -m venv .venv
	$(PIP) -c constraints.txt --upgrade pip setuptools wheel ninja
	@# pip fetches and unpacks packages one by one, so several pips run in parallel. DeepSpeed's build needs torch first.
	@printf '%s\n' $(if $(TORCH_INDEX),"--index-url $(TORCH_INDEX)") $(TORCH) >.venv/part.torch
	@grep '^[A-Za-z]' constraints.txt | grep -v '^torch=\|^deepspeed=' | split -n r/2 - .venv/part.
	ls .venv/part.* | xargs -P 3 -n 1 $(PIP) --no-deps -r
	@# The libraries of torch's CUDA builds are not in constraints.txt; DeepSpeed's installation imports torch.
	$(PIP) -c constraints.txt $(TORCH)
	@# If PyTorch sees a GPU, DeepSpeed's installation requires nvcc, although none of it is compiled here or later. For a
	@# CPU it does not. The training device is chosen at each start.
	@# setuptools warns about every editable installation.
	DS_ACCELERATOR=cpu PYTHONWARNINGS=ignore $(PIP) -c constraints.txt --no-build-isolation -e ".[dev]"
	@$(BIN)/python -c "import datasets, longdraft.train.loop, wandb" >/dev/null
	@touch $@

quickstart: $(SETUP)
	@$(BIN)/python launch/quickstart.py $(if $(STEPS),--steps $(STEPS))

test: $(SETUP)
	OMP_NUM_THREADS=1 $(PYTEST) --dist loadgroup --no-loadscope-reorder -m "not nightly${NIGHTLY:%= or nightly(of='%')}"

# Tests of each folder that fit into two minutes. No training, no real model.
quick: $(SETUP)
	OMP_NUM_THREADS=1 $(PYTEST) --dist loadgroup $(QUICK)

# Slow tests that rarely fail: all combinations of exactness, 32K positions, kernels compiled for absent GPUs, 8 ranks.
nightly: $(SETUP) test-machines test-oldest
	OMP_NUM_THREADS=1 $(PYTEST) --dist loadgroup -m nightly

# Imitates two other machines: one without AVX2 and without a compiler, with more threads than cores, and, if this
# machine has AVX-512, one with only AVX2.
test-machines: $(SETUP)
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 LONGDRAFT_CPU_KERNELS=0 OMP_NUM_THREADS=4 \
		OMP_WAIT_POLICY=passive $(PYTEST) --dist worksteal $(ANYWHERE)
	! grep -q avx512f /proc/cpuinfo || \
		ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 LONGDRAFT_CPU_KERNELS=avx2 OMP_NUM_THREADS=2 \
		OMP_WAIT_POLICY=passive $(PYTEST) --dist worksteal $(ANYWHERE) $(KEPT)

# With the oldest transformers that setup.py allows.
test-oldest: $(SETUP)
	$(PIP) --no-deps --upgrade --target .venv/oldest $$(sed -n 's/.*"\(transformers\)>=\([0-9.]*\).*/\1==\2/p' setup.py)
	PYTHONPATH=.venv/oldest OMP_NUM_THREADS=1 $(PYTEST) --dist loadgroup $(OLDEST)

check: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/pytest -q tests/test_architecture.py

format: $(SETUP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
