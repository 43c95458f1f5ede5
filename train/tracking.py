"""Where a run's numbers go: run_dir/metrics.jsonl always, W&B when it is on. Rank 0 alone holds a tracker.

Not here: what is measured (train/loop.py), plots.
"""

import json
import os
from pathlib import Path
from typing import Any

from longdraft.train.config import Config, to_dict

METRICS = "metrics.jsonl"


class Tracker:
    """Appends one JSON line a record and forwards it to W&B.

    Args:
        config: `log` decides; the whole is shown in W&B.
        resume_step: lines of later steps, which a kill left and which will be written again, are removed.
        wandb_id: the run to go on with in W&B.
    """

    def __init__(self, config: Config, resume_step: int = 0, wandb_id: str | None = None):
        path = Path(config.train.run_dir) / METRICS
        _forget_after(path, resume_step)
        self._file = path.open("a", encoding="utf-8")
        self.mode = wandb_mode(config.log.wandb)
        self._run: Any = None
        if self.mode != "disabled":
            import wandb  # a second of import, and a service process at init

            self._run = wandb.init(
                project=config.log.wandb_project,
                dir=config.train.run_dir,
                mode=self.mode,  # pyright: ignore[reportArgumentType]
                id=wandb_id,
                resume="allow",
                config=to_dict(config),
                settings=wandb.Settings(silent=True),
            )
        self.wandb_id: str | None = self._run.id if self._run is not None else wandb_id

    def write(self, record: dict[str, Any]) -> None:
        """One record with its `step` (steps done); a line is on disk before the next step begins."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._run is not None:
            self._run.log(_flat(record), step=record["step"])

    def close(self) -> None:
        self._file.close()
        if self._run is not None:
            self._run.finish()


def wandb_mode(setting: str) -> str:
    """What `auto` comes to here: online with a key in the environment or a stored login, else offline."""
    if setting != "disabled" and os.environ.get("WANDB_MODE"):  # W&B's own override; "disabled" stays disabled
        return os.environ["WANDB_MODE"]
    if setting != "auto":
        return setting
    if os.environ.get("WANDB_API_KEY"):
        return "online"
    import wandb

    return "online" if wandb.login(prompt=False) else "offline"


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """Every whole record of a run, in order."""
    path = Path(run_dir) / METRICS
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _forget_after(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = [json.dumps(record) + "\n" for record in read_metrics(path.parent) if record["step"] <= step]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.rename(path)


def _flat(record: dict[str, Any]) -> dict[str, float]:
    """{"top1": [a, b]} to {"top1/head1": a, "top1/head2": b}; W&B plots scalars."""
    flat = {}
    for key, value in record.items():
        if isinstance(value, list):
            flat |= _flat(
                {f"{key}/head{i + 1}" if "/" not in key else f"{key}.{i + 1}": v for i, v in enumerate(value)}
            )
        elif isinstance(value, (int, float)):
            flat[key] = value
    return flat
