"""The training stage of gpu_check.py: every method is trained under DeepSpeed, stopped, resumed, exported and decoded.

`python benchmarks/checks/gpu_training.py --out FOLDER --budget SECONDS` rewrites FOLDER/training.json after each
method. All methods start together, because what a killed run leaves does not depend on its speed; they are resumed one
at a time, because that is timed. Not here: training itself (train/).
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from longdraft.benchmarks.checks.gpu_stages import TRAINED, device, small_target, texts

if TYPE_CHECKING:
    from longdraft.models.target import Target

# Several passes a step, so that the steps after the first checkpoint last longer than a signal takes to arrive.
STEPS, SAVE_EVERY, PASSES = 20, 5, {"cpu": 8, "cuda": 16}
POLL_S = 0.02
ANCHORED = {"positions": "anchor_offset", "max_position": 4096, "sinks": 4, "query_share": 0.5}
# By method: the sections draft and data where they differ from the defaults, and the signal that ends the first run.
METHODS: dict[str, tuple[dict[str, Any], dict[str, Any], signal.Signals]] = {
    "tokenswift": ({"method": "tokenswift"}, {}, signal.SIGKILL),
    "medusa": ({"method": "medusa"}, {}, signal.SIGTERM),
    "longspec": ({"method": "longspec", "window": 64, "noise": 3}, ANCHORED, signal.SIGTERM),
}


class StageError(Exception):
    """Training did not do what it must."""


class Run:
    """A method's training; `found` holds its figures so far. All methods raise StageError if something went wrong or no
    time is left."""

    def __init__(self, method: str, folder: Path, target: str, deadline: float):
        self.method, self.deadline, self.found = method, deadline, dict[str, Any]()
        self.run_dir, self.config, self.log = (folder / f"{method}{ending}" for ending in ("", ".yaml", ".log"))
        draft, data, self.ended_by = METHODS[method]
        config = {
            "target": {"path": target},
            "draft": draft,
            "data": {"path": str(folder / "data"), "seq_len": _row_tokens()} | data,
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
        child = self._start()
        while self.step < SAVE_EVERY:
            if child.poll() is not None:
                raise self._failed(f"it ended with status {child.returncode} at step {self.step}")
            if time.monotonic() > self.deadline:
                raise self._failed(f"no time was left for it, at step {self.step}")
            time.sleep(POLL_S)
        if self.ended_by == signal.SIGKILL:
            _end([psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)])
        else:
            child.send_signal(self.ended_by)
        self._wait(child, "it did not end when it was asked to")
        if not SAVE_EVERY <= self.step < STEPS - 1:  # the last steps are timed
            raise self._failed(f"{self.ended_by.name} came when its newest checkpoint was of step {self.step}")
        if self.ended_by != signal.SIGKILL and child.returncode != 0:
            raise self._failed(f"after {self.ended_by.name} it ended with status {child.returncode}")
        self.found |= {"ended_by": self.ended_by.name, "resumed_from": self.step}

    def resume(self) -> None:
        """Run the same command again, to the end, and note the time of its steps."""
        from longdraft.train.tracking import read_metrics

        child = self._start()
        self._wait(child, "no time was left to go on with it")
        records = [record for record in read_metrics(self.run_dir) if "loss" in record]
        steps = [record["step"] for record in records]
        if child.returncode != 0 or self.step != STEPS or steps != list(range(1, STEPS + 1)):
            raise self._failed(
                f"gone on with, it ended with status {child.returncode} at step {self.step}, with records of {steps}"
            )
        timed = records[self.found["resumed_from"] + 1 :]  # the first step after a start compiles
        self.found |= {
            "steps": STEPS,
            "losses": [records[0]["loss"], records[-1]["loss"]],
            **{name: round(statistics.median(one[name] for one in timed), 4) for name in ("step_s", "over_target")},
        }

    def decode(self, target: "Target") -> None:
        """Export the draft and prove in fp32 that decoding with it is exact."""
        import torch

        from longdraft.benchmarks.drafters.exactness import prove
        from longdraft.benchmarks.drafters.progress import UNWATCHED
        from longdraft.infer.drafters.build import build_drafter
        from longdraft.infer.sampling import SamplingParams
        from longdraft.train.export import export

        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        draft = export(self.run_dir)
        prompts, params = texts(target, 48, least=48), SamplingParams(seed=0, ignore_eos=True)
        builders = {self.method: lambda target: build_drafter(self.method, target, draft)}
        try:
            shown = prove(target, builders, prompts, params, "fp32", torch.float32, UNWATCHED)
        except RuntimeError as error:  # not exact, out of memory, a recording that failed
            raise StageError(f"{self.method}: {error}") from error
        self.found |= {"exact": shown["exact"], "exact_checked": shown["exact_checked"]}

    def _start(self) -> subprocess.Popen[bytes]:
        """Start `longdraft train` on one device, with its output in the log."""
        command = [sys.executable, "-m", "longdraft.launch.cli", "train", str(self.config), "--num-gpus", "1"]
        # The shapes on a CPU are tiny, so more threads would only wait for each other.
        environment = os.environ | ({"OMP_NUM_THREADS": "1"} if device() == "cpu" else {})
        with self.log.open("ab") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def _wait(self, child: subprocess.Popen[bytes], otherwise: str) -> None:
        try:
            child.wait(timeout=max(0.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise self._failed(f"{otherwise}, at step {self.step}") from None

    def _failed(self, what: str) -> StageError:
        output = self.log.read_text(encoding="utf-8", errors="replace")[-1500:]
        return StageError(f"{self.method}: {what}; its output ends:\n{output}")


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status, which is 1 if a method's training did not do what it must."""
    parser = argparse.ArgumentParser(description="The stage of gpu_check that trains.")
    parser.add_argument("--out", type=Path, required=True, help="folder for training.json")
    parser.add_argument("--budget", type=float, required=True, help="seconds after which nothing new begins")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    args = parser.parse_args(argv)
    deadline = time.monotonic() + args.budget
    with tempfile.TemporaryDirectory() as folder, small_target(TRAINED) as path:
        runs = [Run(method, Path(folder), path, deadline) for method in args.methods]

        def write() -> str:
            found = json.dumps({run.method: run.found for run in runs})
            (args.out / "training.json").write_text(found)
            return found

        try:
            target = _write_data(path, Path(folder) / "data")
            with ThreadPoolExecutor(len(runs)) as together:
                for _ in together.map(Run.stop, runs):
                    write()
            for run in runs:
                run.resume()
                write()
            for run in runs:
                run.decode(target)
                write()
        except StageError as error:
            print(error, flush=True)
            return 1
        finally:
            _end(psutil.Process().children(recursive=True))
        print(write())
    return 0


def _end(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def _row_tokens() -> int:
    return 64 if device() == "cpu" else 512


def _write_data(path: str, folder: Path) -> "Target":
    """Write a prepared folder with rows of our own files' tokens, or random ones, and return its target in fp32."""
    import numpy as np
    import torch

    from longdraft.data_prep.shards import FORMAT_VERSION, Row, write_json, write_shard
    from longdraft.models.hf import load_target

    target = load_target(path, torch.float32, device())
    length, needed = _row_tokens(), 40 * _row_tokens()
    tokens = [token for text in texts(target, needed, least=needed) for token in text]
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
    return target


if __name__ == "__main__":
    sys.exit(main())
