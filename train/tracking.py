"""Where a run's numbers go: always to run_dir/metrics.jsonl, and to W&B when it is on. Only rank 0 has a tracker.

Not here: what is measured (step_metrics.py, validation.py, evaluate.py), plots (plots.py).
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

from longdraft.models.files import write_atomically
from longdraft.train.config import Config, to_dict

METRICS, JUNK = "metrics.jsonl", "metrics.junk"
# A table: the names of its columns, and its rows.
Table = tuple[list[Any], list[Any]]
# How long to wait for W&B at the beginning and at the end; what has not arrived by then lies in the run's folder.
PATIENCE_S = 30.0
MODE, TIMEOUT = "WANDB_MODE", "WANDB_INIT_TIMEOUT"
MODES = ("online", "offline", "disabled", "shared", "dryrun", "run")  # those that W&B knows


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
        _forget_after(path, resume_step)
        self._part_names = part_names
        self._file = path.open("a", encoding="utf-8")
        self.mode = wandb_mode(config.log.wandb)
        self._run: Any = None
        if self.mode != "disabled":
            self._run = self._begin(config, wandb_id, stage)
        self.wandb_id: str | None = self._run.id if self._run is not None else wandb_id

    def _begin(self, config: Config, wandb_id: str | None, stage: str | None) -> Any:
        """Begin a run in W&B; where W&B does not answer, one that is kept in the run's folder."""
        import wandb  # takes a second to import, and starts a service process at init

        try:
            return wandb.init(
                project=config.log.wandb_project,
                dir=config.train.run_dir,
                mode=self.mode,  # pyright: ignore[reportArgumentType]
                id=wandb_id,
                resume="allow",
                config=to_dict(config),
                **wandb_names(config, stage),
                settings=wandb.Settings(silent=True, init_timeout=_patience(), finish_timeout=PATIENCE_S),
            )
        except wandb.Error as error:
            if self.mode == "offline":
                raise
            self.mode = "offline"
            print(
                f"log.wandb: W&B cannot be used ({str(error).splitlines()[0]}); training goes on, its numbers go to "
                f"{self._file.name} and, for `wandb sync`, to {config.train.run_dir}/wandb",
                flush=True,
            )
            return self._begin(config, wandb_id, stage)

    def write(self, record: dict[str, Any], tables: Mapping[str, Table] | None = None) -> None:
        """Write a record, with its `step` (steps done); its line is flushed before the next step begins. `tables`, by
        name, go to W&B alone."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._run is not None:
            shown = _flat(record, self._part_names) | _as_wandb(tables or {})
            self._try(lambda run: run.log(shown, step=record["step"]))

    def close(self) -> None:
        self._file.close()
        if self._run is not None:
            self._try(lambda run: run.finish())

    def _try(self, work: Callable[[Any], object]) -> None:
        """Do work of W&B, whose failure must not end a training. W&B's service is a process of its own, which a SIGTERM
        to a whole job also ends, while the ranks still have a checkpoint to save."""
        try:
            work(self._run)
        except Exception as error:
            if not (isinstance(error, OSError) or type(error).__module__.startswith("wandb.")):
                raise
            import wandb

            self._run = None
            with suppress(Exception):
                wandb.teardown()  # else the next stage would find the dead service
            print(
                f"log.wandb: W&B has failed ({type(error).__name__}: {error}); training goes on, its numbers go to "
                f"{self._file.name}",
                flush=True,
            )


def wandb_names(config: Config, stage: str | None) -> dict[str, Any]:
    """Name, group and tags of a run in W&B: its folder's name and its method. The stages of a config form a group named
    after the folder that holds theirs. W&B takes 128 characters of a name and 64 of a tag."""
    folder, method = Path(config.train.run_dir).resolve(), config.draft.method
    if stage is None:
        return {"name": folder.name[:128], "tags": [method]}
    group = folder.parent.name[:128]
    return {"group": group, "name": f"{group} {stage}"[:128], "tags": [stage[:64], method]}


def wandb_mode(setting: str) -> str:
    """The mode that `log.wandb` means here: `auto` is online with a key in the environment or a login, else offline."""
    if setting != "disabled" and (mode := _mode_of_environment()):  # overrides any setting but "disabled"
        return mode
    if setting != "auto":
        return setting
    if os.environ.get("WANDB_API_KEY"):
        return "online"
    import wandb

    try:
        return "online" if wandb.login(prompt=False) else "offline"
    except wandb.Error as error:  # such as a stored key of a wrong form
        print(
            f"log.wandb: W&B's login cannot be used ({str(error).splitlines()[0]}); training goes on, its numbers are "
            "kept for `wandb sync`",
            flush=True,
        )
        return "offline"


def check_environment(setting: str) -> None:
    """Raises ValueError where a setting of `log.wandb` uses W&B and one of W&B's environment variables has a value that
    it does not take. Empty variables, which W&B would refuse, are removed."""
    if setting == "disabled" or _mode_of_environment() == "disabled":
        return
    _patience()
    import wandb
    from pydantic import ValidationError  # W&B's

    settings = wandb.Settings()
    for name, value in sorted(os.environ.items()):
        if not name.startswith("WANDB_"):
            continue
        if not value:
            del os.environ[name]
            continue
        try:
            settings.update_from_env_vars({name: value})
        except (ValidationError, wandb.Error) as error:
            # Other errors may be about a key, which must not be shown.
            reason = f"{value!r}: {error.errors()[0]['msg']}" if isinstance(error, ValidationError) else error
            raise ValueError(f"{name}: W&B does not take its value ({reason}); fix it, or unset it") from error


def _mode_of_environment() -> str | None:
    mode = os.environ.get(MODE) or None
    if mode is not None and mode not in MODES:
        raise ValueError(f"{MODE}: {mode!r} is unknown to W&B; set it to one of {', '.join(MODES)}, or unset it")
    return mode


def _patience() -> float:
    """Seconds to wait for W&B at the beginning."""
    text = os.environ.get(TIMEOUT) or str(PATIENCE_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < inf:
        raise ValueError(f"{TIMEOUT}: {text!r} is not a number of seconds; set it to one above 0, as 30, or unset it")
    return seconds


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """All records of a run, in order. A line that is not one is left out, with a message."""
    path = Path(run_dir) / METRICS
    records, junk = _read(path)
    if junk:
        print(f"{path}: {_lines(junk)} no record and left out", flush=True)
    return records


def _read(path: Path) -> tuple[list[dict[str, Any]], dict[int, bytes]]:
    """The records, and the lines that are not records by number, from 1. A last line that a kill cut off is neither."""
    records, junk = [], {}
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and type(record.get("step")) is int:
            records.append(record)
        else:
            junk[number] = line
    return records, junk


def _lines(junk: Mapping[int, bytes]) -> str:
    """The words for these lines in a message, with at most three of their numbers."""
    numbers = [*map(str, list(junk)[:3]), *(["..."] if len(junk) > 3 else [])]
    return f"line{'s' if len(junk) > 1 else ''} {', '.join(numbers)} {'are' if len(junk) > 1 else 'is'}"


def _forget_after(path: Path, step: int) -> None:
    """Keep only the records up to a step; lines that are not records are moved to another file."""
    if not path.exists():
        return
    records, junk = _read(path)
    if junk:
        aside = path.with_name(JUNK)
        with aside.open("ab") as file:
            file.writelines(line + b"\n" for line in junk.values())
        print(f"{path}: {_lines(junk)} no record and set aside in {aside}", flush=True)
    if records and not step:
        print(f"{path}: {len(records):,} records removed, no checkpoint of theirs is there", flush=True)
    kept = "".join(json.dumps(record) + "\n" for record in records if record["step"] <= step)
    write_atomically(path, lambda temporary: temporary.write_text(kept, encoding="utf-8"))


def _as_wandb(tables: Mapping[str, Table]) -> dict[str, Any]:
    if not tables:
        return {}
    import wandb

    return {name: wandb.Table(columns=columns, data=rows) for name, (columns, rows) in tables.items()}


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
