"""Where a run's numbers go: always to run_dir/metrics.jsonl, and to W&B when it is on. Only rank 0 has a tracker.

No trouble with W&B ends a training: what does not reach it stands in metrics.jsonl.
"""

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from longdraft.models.files import write_atomically
from longdraft.train.config import Config, to_dict

METRICS = "metrics.jsonl"
# How long to wait for W&B at the beginning and at the end; what has not arrived by then lies in the run's folder.
PATIENCE_S = 30.0


class Tracker:
    """Appends each record as a JSON line and forwards it to W&B.

    Args:
        config: its section `log` decides where to; the whole config is shown in W&B.
        part_names: names of the numbers in a record's lists.
        resume_step: lines of later steps, which a kill left and which will be written again, are removed. A message
            says so where all lines are.
        wandb_id: the run to continue in W&B.
        stage: its name, where the run is one of several stages, which form a group in W&B.
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
        records = read_metrics(config.train.run_dir)
        if records and not resume_step:
            print(f"{path}: {len(records):,} records removed, no checkpoint of theirs is there", flush=True)
        kept = "".join(json.dumps(record) + "\n" for record in records if record["step"] <= resume_step)
        write_atomically(path, lambda partial: partial.write_text(kept, encoding="utf-8"))
        self._part_names, self._file = part_names, path.open("a", encoding="utf-8")
        self._run: Any = None
        self.mode = wandb_mode(config.log.wandb)
        for mode in dict.fromkeys((self.mode, "offline")) if self.mode != "disabled" else ():
            if self._run is None:  # where W&B does not answer, the run is kept in its folder
                self.mode = mode
                self._try(lambda mode=mode: self._begin(config, wandb_id, stage, mode))
        self.wandb_id: str | None = self._run.id if self._run is not None else wandb_id

    def _begin(self, config: Config, wandb_id: str | None, stage: str | None, mode: str) -> None:
        import wandb  # takes a second to import, and starts a service process at init

        patience = float(os.environ.get("WANDB_INIT_TIMEOUT") or PATIENCE_S)
        self._run = wandb.init(
            project=config.log.wandb_project,
            dir=config.train.run_dir,
            mode=mode,  # pyright: ignore[reportArgumentType]
            id=wandb_id,
            resume="allow",
            config=to_dict(config),
            **wandb_names(config.train.run_dir, config.draft.method, stage),
            settings=wandb.Settings(silent=True, init_timeout=patience, finish_timeout=PATIENCE_S),
        )

    def write(self, record: dict[str, Any]) -> None:
        """Write a record, with its `step` (steps done); its line is flushed before the next step begins."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._run is not None:
            shown = _flat(record, self._part_names)
            self._try(lambda: self._run.log(shown, step=record["step"]))

    def close(self) -> None:
        self._file.close()
        if self._run is not None:
            self._try(lambda: self._run.finish())

    def _try(self, work: Callable[[], object]) -> None:
        """Do work of W&B. Its service is a process of its own, which a SIGTERM to a whole job also ends, while the
        ranks still have a checkpoint to save."""
        try:
            work()
        except Exception as error:
            if not (isinstance(error, (OSError, ValueError)) or type(error).__module__.startswith("wandb.")):
                raise
            import wandb

            self._run = None
            with suppress(Exception):
                wandb.teardown()  # else the next stage would find the dead service
            reason = (str(error).splitlines() or [""])[0]  # other lines may show a key
            print(
                f"log.wandb: W&B does not work ({self.mode}, {type(error).__name__}: {reason}); training goes on, its "
                f"numbers go to {self._file.name}",
                flush=True,
            )


def wandb_names(run_dir: str, method: str, stage: str | None) -> dict[str, Any]:
    """Name, group and tags of a run in W&B: its folder's name and its method. The stages of a config form a group named
    after the folder that holds theirs. W&B takes 128 characters of a name and 64 of a tag."""
    folder = Path(run_dir).resolve()
    if stage is None:
        return {"name": folder.name[:128], "tags": [method]}
    group = folder.parent.name[:128]
    return {"group": group, "name": f"{group} {stage}"[:128], "tags": [stage[:64], method]}


def wandb_mode(setting: str) -> str:
    """The mode that `log.wandb` means here: `auto` is online with a key in the environment or a login, else offline.
    W&B's own variable overrides any setting but "disabled"."""
    mode = setting if setting == "disabled" else os.environ.get("WANDB_MODE") or setting
    if mode != "auto":
        return mode
    import wandb

    with suppress(wandb.Error, ValueError):  # such as a stored key of a wrong form
        if os.environ.get("WANDB_API_KEY") or wandb.login(prompt=False):
            return "online"
    return "offline"


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """All records of a run, in order, without a line that a kill cut off."""
    path, records = Path(run_dir) / METRICS, []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with suppress(ValueError):
            records.append(json.loads(line))
    return records


def _flat(record: dict[str, Any], names: Sequence[str]) -> dict[str, float]:
    """Lists as scalars, which W&B plots: {"top1": [a, b]} becomes {"top1/head1": a, "top1/head2": b}."""
    flat: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, list):
            for name, entry in zip(names, value, strict=True):
                if isinstance(entry, list):
                    flat |= {f"{key}/{name}.{rank + 1}": number for rank, number in enumerate(entry)}
                elif entry is not None:
                    flat[f"{key}/{name}"] = entry
        elif isinstance(value, (int, float)):
            flat[key] = value
    return flat
