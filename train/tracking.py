"""Writes a run's metrics to run_dir/metrics.jsonl and, if enabled, to W&B. Only rank 0 has a tracker.

A failure of W&B never ends a training: metrics.jsonl holds every record.
"""

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from longdraft.models.files import write_text
from longdraft.train.config import Config, to_dict

METRICS = "metrics.jsonl"


class Tracker:
    """Appends each record as a JSON line and forwards it to W&B.

    Args:
        config: its section `log` configures W&B, which shows the whole config.
        part_names: names of the entries of a record's lists.
        resume_step: records of later steps, left by a kill, are removed; they will be written again.
        wandb_id: the run to continue in W&B.
        stage: the stage's name, if the run is a stage; the stages form a group in W&B.
    """

    def __init__(
        self,
        config: Config,
        part_names: Sequence[str],
        resume_step: int = 0,
        wandb_id: str | None = None,
        stage: str | None = None,
    ):
        path = Path(config.train.run_dir) / METRICS
        records = [record for record in read_metrics(path.parent) if record["step"] <= resume_step]
        write_text(path, "".join(json.dumps(record) + "\n" for record in records))
        self._part_names, self._file = part_names, path.open("a", encoding="utf-8")
        self._run: Any = None
        if config.log.wandb != "disabled":
            self._try(lambda: self._begin(config, wandb_id, stage))
        self.wandb_id: str | None = wandb_id if self._run is None else self._run.id

    def _begin(self, config: Config, wandb_id: str | None, stage: str | None) -> None:
        import wandb  # takes a second to import, and starts a service process at init

        folder = Path(config.train.run_dir).resolve()
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "longdraft"),
            dir=folder,
            mode=wandb_mode(config.log.wandb),  # pyright: ignore[reportArgumentType]
            id=wandb_id,
            resume="allow",
            config=to_dict(config),
            name=folder.name,
            group=folder.parent.name if stage else None,
            tags=[config.draft.method],
            settings=wandb.Settings(silent=True, finish_timeout=30),
        )

    def write(self, record: dict[str, Any]) -> None:
        """Write a record, whose `step` is the number of completed steps, and flush its line."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._run is not None:
            self._try(lambda: self._run.log(_flat(record, self._part_names), step=record["step"]))

    def close(self) -> None:
        self._file.close()
        if self._run is not None:
            self._try(lambda: self._run.finish())

    def _try(self, work: Callable[[], object]) -> None:
        """Call W&B; after an error the run continues without it. A SIGTERM to a whole job also ends W&B's service
        process, while the ranks still have a checkpoint to save."""
        try:
            work()
        except Exception as error:
            if not (isinstance(error, (OSError, ValueError)) or type(error).__module__.startswith("wandb.")):
                raise
            self._run = None
            reason = (str(error).splitlines() or [""])[0]  # other lines may show a key
            print(f"log.wandb: W&B failed ({type(error).__name__}: {reason}); the run continues without it", flush=True)


def wandb_mode(setting: str) -> str:
    """W&B's mode for the setting `log.wandb`: `auto` is online with a key in the environment or a login, else offline.
    The variable WANDB_MODE overrides the setting."""
    mode = os.environ.get("WANDB_MODE", setting)
    if mode != "auto":
        return mode
    import wandb

    return "online" if os.environ.get("WANDB_API_KEY") or wandb.login(prompt=False) else "offline"


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """All records of a run, in order, without lines that are none, such as one that a kill cut off."""
    path, records = Path(run_dir) / METRICS, []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with suppress(ValueError):
            record = json.loads(line)
            records += [record] if isinstance(record, dict) and isinstance(record.get("step"), int) else []
    return records


def _flat(record: dict[str, Any], names: Sequence[str]) -> dict[str, float]:
    """Lists as scalars, which W&B plots: {"top1": [a, b]} becomes {"top1/head1": a, "top1/head2": b}."""
    flat: dict[str, Any] = {}
    for key, value in record.items():
        for name, entry in zip(names, value, strict=True) if isinstance(value, list) else [("", value)]:
            title = f"{key}/{name}" if name else key
            flat |= {f"{title}.{i}": n for i, n in enumerate(entry, 1)} if isinstance(entry, list) else {title: entry}
    return {key: value for key, value in flat.items() if isinstance(value, (int, float))}
