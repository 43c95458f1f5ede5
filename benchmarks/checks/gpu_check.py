"""Runs the stages of launch/gpu_check.sh, which prepares their environment, and collects them in one JSON file.

Every stage is a process of its own with a time limit, which grows by the time that earlier stages left over. A stage
that fails does not stop the others; one that lacks a package is not run, and has neither passed nor failed.
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
from importlib.util import find_spec
from pathlib import Path

from longdraft.benchmarks.checks.gpu_stages import device
from longdraft.benchmarks.drafters import provenance

ROOT = Path(__file__).resolve().parents[2]
# Seconds of each stage, in order; together less than 8 minutes.
LIMITS = {
    "wheels": 10,
    "device": 15,
    "kernel tests": 50,
    "exactness": 30,
    "benchmark": 45,
    "training": 100,
    "Triton tests": 65,
    "kernel benchmarks": 85,
    "runtime tests": 75,
}
# Which tests run if only the script is checked, on a CPU.
FEW = {
    "kernel tests": "noise or linear_and",
    "Triton tests": "keep_rows or gumbel",
    "runtime tests": "processor or rope or filled",
}
# Packages that a stage needs and an image for GPUs may lack.
NEEDS = {"training": ("deepspeed", "omegaconf", "pyarrow", "psutil"), "Triton tests": ("liger_kernel",)}
# Factor of the limits on a CPU, which may be busy with other work.
CPU_PATIENCE = 4
# A measurement begins nothing new this many seconds before its limit.
LAST_SHAPE = 30
# Test processes, if pytest-xdist is installed: compiling kernels takes the host longer than running them.
MOST_WORKERS = 8
TAIL = 4000  # characters of output that are kept
# Shapes of the kernel benchmarks if only the script is checked.
TINY = (
    "--profile", "tiny", "--contexts", "100", "--nodes", "1", "5", "--rows", "50",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status, which is 1 if a stage failed."""
    parser = argparse.ArgumentParser(prog="gpu_check", description="Tests and benchmarks on one GPU, as one JSON file.")
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu_check.json")
    parser.add_argument("--site", type=Path, help="where wheels are installed")
    parser.add_argument("--wheels", type=Path, help="folder of wheels")
    parser.add_argument("--only", nargs="+", choices=LIMITS, default=list(LIMITS), help="these stages (default: all)")
    parser.add_argument("--methods", nargs="+", help="what the training stage trains (default: every method)")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    result: dict = {
        "date": provenance.date(),
        "commit": provenance.commit() or "unknown",
        "host": {"platform": platform.platform(), "python": platform.python_version(), "cpus": os.cpu_count()},
        "passed": True,
        "not_run": [],
        "stages": [],
    }
    begin, granted = time.monotonic(), 0.0
    for name in LIMITS:
        if name not in args.only or (name == "wheels" and not args.wheels):
            continue
        granted += LIMITS[name] * (CPU_PATIENCE if device() == "cpu" else 1)
        limit = round(begin + granted - time.monotonic())
        print(f"== {name} (at most {limit} s)", flush=True)
        importlib.invalidate_caches()  # an earlier stage may have installed the wheels
        if lacking := [package for package in NEEDS.get(name, ()) if find_spec(package) is None]:
            stage = {"name": name, "passed": None, "not_run": f"not installed: {', '.join(lacking)}"}
            result["not_run"].append(name)
            print(f"== {name}: NOT RUN, {stage['not_run']}", flush=True)
        else:
            stage = {"name": name} | _run(_command(name, args, limit), limit)
            print(f"== {name}: {'passed' if stage['passed'] else 'FAILED'} in {stage['seconds']} s", flush=True)
        result["stages"].append(stage)
        figures = args.out / f"{name.replace(' ', '_')}.json"
        if figures.exists():
            result[name] = json.loads(figures.read_text())
            figures.unlink()
        result["passed"] = all(stage["passed"] is not False for stage in result["stages"])
        (args.out / "gpu_check.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"Written to {args.out / 'gpu_check.json'}")
    return 0 if result["passed"] else 1


def _command(name: str, args: argparse.Namespace, limit: int) -> list[str]:
    """The command of a stage that may take `limit` seconds and writes its figures to OUT/NAME.json, _ for spaces."""
    python, checking = sys.executable, device() == "cpu"
    options = ["--out", str(args.out), "--budget", str(max(1, limit - LAST_SHAPE))]
    if name == "wheels":
        wheels = map(str, sorted(args.wheels.glob("*.whl")))
        where = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target", str(args.site)]
        return [python, "-m", "pip", "install", "--quiet", *where, *wheels]
    if name in FEW:
        on_gpu = {"kernel tests": "test_gpu_kernels.py", "runtime tests": "test_gpu_runtime.py"}
        files = [ROOT / "tests" / "gpu" / on_gpu[name]] if name in on_gpu else triton_tests()
        workers = [f"-n{min(MOST_WORKERS, os.cpu_count() or 1)}"] if find_spec("xdist") else []
        shown = ["-q", "--maxfail=20", "-p", "no:cacheprovider", "--durations=5", *workers]
        return [python, "-m", "pytest", *shown, *(["-k", FEW[name]] if checking else []), *map(str, files)]
    if name == "kernel benchmarks":
        shapes = ["--device", device(), "--quick", *(TINY if checking else []), "--name", "kernel_benchmarks"]
        return [python, str(ROOT / "benchmarks/kernels/run.py"), *options, *shapes]
    methods = ["--methods", *args.methods] if args.methods else []
    return [python, str(ROOT / "benchmarks/checks/gpu_stages.py"), name, *options, *methods]


def triton_tests() -> list[Path]:
    """The files of tests/kernels whose tests use a GPU if there is one."""
    files = sorted((ROOT / "tests" / "kernels").glob("test_*.py"))
    return [file for file in files if "torch.cuda.is_available()" in file.read_text(encoding="utf-8")]


def _run(command: Sequence[str], limit: float) -> dict:
    """Run a command; report whether it succeeded within the limit, how long it took, and the end of its output."""
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


if __name__ == "__main__":
    sys.exit(main())
