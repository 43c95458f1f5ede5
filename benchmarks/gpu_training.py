"""The stage of gpu_check.py that trains: every method under DeepSpeed, stopped, gone on with, exported, decoded.

`python benchmarks/gpu_training.py training --out FOLDER --budget SECONDS` writes FOLDER/training.json anew after each
method. All methods begin together, as what a killed run leaves does not depend on its speed; they are gone on with one
at a time, as that is timed. Not here: training itself (train/).
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from longdraft.benchmarks.gpu_stages import TRAINED, arguments, device, small_target, texts

if TYPE_CHECKING:
    from longdraft.models.target import Target

ROOT = Path(__file__).resolve().parent.parent
# Several passes a step: the steps behind the first checkpoint must last longer than a signal takes to arrive.
STEPS, SAVE_EVERY, PASSES = 20, 5, {"cpu": 8, "cuda": 16}
POLL_S = 0.02
ANCHORED = {"positions": "anchor_offset", "max_position": 4096, "sinks": 4, "query_share": 0.5}
# By method: what is not the default of its sections, and the signal that ends its first run.
METHODS: dict[str, tuple[dict[str, Any], dict[str, Any], signal.Signals]] = {
    "tokenswift": ({"method": "tokenswift"}, {}, signal.SIGKILL),
    "medusa": ({"method": "medusa"}, {}, signal.SIGTERM),
    "longspec": ({"method": "longspec", "window": 64, "noise": 3}, ANCHORED, signal.SIGTERM),
}


@dataclass
class Trained:
    """A method's run, and what was found so far."""

    method: str
    config: Path
    run_dir: Path
    log: Path
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Of the newest checkpoint."""
        found = self.run_dir.glob("checkpoints/step_*/state.json")
        return max((int(path.parent.name.removeprefix("step_")) for path in found), default=0)

    def start(self) -> subprocess.Popen[bytes]:
        """`longdraft train`, on one device; its output goes to the log."""
        command = [sys.executable, "-m", "longdraft.launch.cli", "train", str(self.config), "--num-gpus", "1"]
        # Tiny shapes on a CPU: more threads would only wait for each other.
        environment = os.environ | ({"OMP_NUM_THREADS": "1"} if device() == "cpu" else {})
        with self.log.open("ab") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def fail(self, what: str) -> "StageError":
        output = self.log.read_text(encoding="utf-8", errors="replace")[-1500:]
        return StageError(f"{self.method}: {what}; its output ends:\n{output}")


class StageError(Exception):
    """Something that had to happen did not."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 where a method's training did not do what it must."""
    parser = arguments(["training"])
    parser.add_argument("--budget", type=float, required=True, help="seconds after which nothing new begins")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    args = parser.parse_args(argv)
    deadline = time.monotonic() + args.budget
    with tempfile.TemporaryDirectory() as folder, small_target(TRAINED) as path:
        runs = [_prepare(name, Path(folder), path) for name in args.methods]
        try:
            for _ in _stages(runs, path, Path(folder) / "data", deadline):
                (args.out / "training.json").write_text(json.dumps({run.method: run.found for run in runs}))
        except StageError as error:
            print(error, flush=True)
            return 1
        finally:
            _end(psutil.Process().children(recursive=True))
    print(json.dumps({run.method: run.found for run in runs}))
    return 0


def _stages(runs: Sequence[Trained], path: str, data: Path, deadline: float) -> Iterator[None]:
    """Yields whenever something was found. Raises StageError."""
    target = _write_data(path, data)
    _stop(runs, [run.start() for run in runs], deadline)
    yield
    for run in runs:
        _go_on(run, deadline)
        yield
    for run in runs:
        _decode(run, target)
        yield


def _prepare(method: str, folder: Path, target: str) -> Trained:
    """The run's config."""
    draft, data, _ = METHODS[method]
    config = {
        "target": {"path": target},
        "draft": draft,
        "data": {"path": str(folder / "data"), "seq_len": _row_tokens()} | data,
        "train": {"run_dir": str(folder / method), "steps": STEPS, "global_batch": PASSES[device()], "micro_batch": 1,
                  "precision": "fp32" if device() == "cpu" else "bf16", "save_every": SAVE_EVERY,
                  "device": "cpu" if device() == "cpu" else "cuda"},
        "optimizer": {"peak_lr": 1e-3, "warmup_steps": 2},
        "heldout": {"every": STEPS, "rows": 2, "choices": 64},
        "log": {"wandb": "disabled"},
    }  # fmt: skip
    file = folder / f"{method}.yaml"
    file.write_text(json.dumps(config))  # which is YAML, too
    return Trained(method, file, folder / method, folder / f"{method}.log")


def _row_tokens() -> int:
    return 64 if device() == "cpu" else 512


def _write_data(path: str, folder: Path) -> "Target":
    """Rows of our own files' tokens, or of random ones; returns the target that they are for, in fp32."""
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
    for split, part in (("train", rows[2:]), ("heldout", rows[:2])):
        (folder / split).mkdir(parents=True)
        shard = write_shard(folder / split / "shard-00000.arrow", part, length, fill_id=0)
        tokenizer = target.fingerprint["tokenizer"]
        manifest = {"format_version": FORMAT_VERSION, "seq_len": length, "tokenizer_sha256": tokenizer}
        write_json(folder / split / "manifest.json", manifest | {"shards": [shard]})
    return target


def _stop(runs: Sequence[Trained], children: Sequence[subprocess.Popen[bytes]], deadline: float) -> None:
    """End each run as soon as its first checkpoint is there: killed with everything under it, or asked to leave."""
    told: set[str] = set()
    while any(child.poll() is None for child in children):
        for run, child in zip(runs, children, strict=True):
            if run.method not in told:
                _still(run, child, deadline)
                if run.step >= SAVE_EVERY:
                    told.add(run.method)
                    _send(METHODS[run.method][2], child)
            elif child.poll() is None and time.monotonic() > deadline:
                raise run.fail("it did not end when it was asked to")
        time.sleep(POLL_S)
    for run, child in zip(runs, children, strict=True):
        number = METHODS[run.method][2]
        if not SAVE_EVERY <= run.step < STEPS - 1:  # the last steps are timed
            raise run.fail(f"{number.name} came when its newest checkpoint was of step {run.step}")
        if number != signal.SIGKILL and child.returncode != 0:
            raise run.fail(f"after {number.name} it ended with status {child.returncode}")
        run.found |= {"ended_by": number.name, "resumed_from": run.step}


def _send(number: signal.Signals, child: subprocess.Popen[bytes]) -> None:
    if number == signal.SIGKILL:
        _end([psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)])
    else:
        child.send_signal(number)


def _still(run: Trained, child: subprocess.Popen[bytes], deadline: float) -> None:
    """Raises StageError where the run has ended, or no time is left."""
    if child.poll() is not None:
        raise run.fail(f"it ended with status {child.returncode} at step {run.step}")
    if time.monotonic() > deadline:
        raise run.fail(f"no time was left for it, at step {run.step}")


def _end(processes: Iterable[psutil.Process]) -> None:
    """Kill these."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def _go_on(run: Trained, deadline: float) -> None:
    """The same command again, to the end; what its steps took."""
    from longdraft.train.tracking import read_metrics

    child = run.start()
    try:
        child.wait(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise run.fail(f"no time was left to go on with it, at step {run.step}") from None
    records = [record for record in read_metrics(run.run_dir) if "loss" in record]
    steps = [record["step"] for record in records]
    if child.returncode != 0 or run.step != STEPS or steps != list(range(1, STEPS + 1)):
        raise run.fail(
            f"gone on with, it ended with status {child.returncode} at step {run.step}, with records of {steps}"
        )
    behind = records[run.found["resumed_from"] + 1 :]  # the first step after a start compiles
    run.found |= {
        "steps": STEPS,
        "losses": [records[0]["loss"], records[-1]["loss"]],
        **{name: round(statistics.median(one[name] for one in behind), 4) for name in ("step_s", "over_target")},
    }


def _decode(run: Trained, target: "Target") -> None:
    """Export, and decode with the draft: exactly, in fp32."""
    import torch

    from longdraft.benchmarks.progress import UNWATCHED
    from longdraft.benchmarks.proof import prove
    from longdraft.infer.drafters.build import build_drafter
    from longdraft.infer.sampling import SamplingParams
    from longdraft.train.export import export

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    draft = export(run.run_dir)
    prompts, params = texts(target, 48, least=48), SamplingParams(seed=0, ignore_eos=True)
    builders = {run.method: lambda target: build_drafter(run.method, target, draft)}
    try:
        shown = prove(target, builders, prompts, params, "fp32", torch.float32, UNWATCHED)
    except RuntimeError as error:
        raise StageError(f"{run.method}: {error}") from error
    run.found |= {"exact": shown["exact"], "exact_checked": shown["exact_checked"]}


if __name__ == "__main__":
    sys.exit(main())
