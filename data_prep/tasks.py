"""A folder of work: a fixed number of tasks, each with output files of its own and a completion record.

plan.json            what was asked; it is written first, and every later call is compared with it
progress/TASK.json   the completion record of a task, written after its outputs
progress/i-n.lock    held by the call that does the tasks of machine i of n
manifest.json        made of all completion records and written last: it says that the folder is finished

Tasks follow from the sources and the settings alone, and outputs from their task alone. So any number of processes and
machines make the same bytes, and a kill loses no more than the tasks that were running. `progress` is removed when the
folder is finished. Only files whose names are the folder's own are ever removed.
"""

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from longdraft.data_prep.failures import make_out
from longdraft.data_prep.shards import MANIFEST, write_json

PLAN = "plan.json"
PROGRESS = "progress"
HALF_WRITTEN = re.compile(r"(?<![^/])\.([^/]+)\.\d+\.tmp$")  # as write_atomically names it; group 1: its final name
T = TypeVar("T")


@dataclass(frozen=True)
class Machine:
    """One of several machines that share the tasks of a folder: the `number`-th, from 1 on, `of` so many."""

    number: int
    of: int

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.of:
            raise ValueError(f"shard is {self.number}/{self.of}, valid: 1/n to n/n")


def read_machine(text: str) -> Machine:
    """Of --shard's i/n."""
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal()):
        raise ValueError(f"--shard: {text!r} has not the form i/n, as 1/4 for the first of four machines")
    return Machine(int(number), int(of))


def tasks_of(machine: Machine | None, tasks: Sequence[T]) -> Sequence[T]:
    """Every `of`-th task from the `number`-th on; all of them where there is no other machine."""
    return tasks if machine is None else tasks[machine.number - 1 :: machine.of]


@dataclass(frozen=True)
class WorkFolder:
    """The folder on disk.

    Args:
        path: of the folder.
        address: identifies the plan, so that the records of another plan are told apart.
        command: who makes such folders, as messages and plans name it.
        verb, outputs: "prepared", "shards", for messages.
        own_files: regular expression of the names, within the folder, of all files besides those of this module.
        subfolders: in which some of these files lie.
    """

    path: Path
    address: str
    command: str
    verb: str
    outputs: str
    own_files: str
    subfolders: tuple[str, ...] = ()

    @property
    def is_finished(self) -> bool:
        return (self.path / MANIFEST).exists()

    @contextmanager
    def opened(self, plan: dict, machine: Machine | None = None, overwrite: bool = False) -> Iterator[None]:
        """While this is open, the folder is made by this plan and no other process does the same tasks in it.

        The folder is new, to be gone on with, or finished. What killed calls left half written is removed at the
        beginning, and `progress` at the end where the folder is finished then.
        overwrite: clear a folder that the same command made, never another one.
        Raises ValueError for a folder made by another plan (it names the differences), one that holds other things,
        and one in which another process is at work.
        """
        if overwrite and machine is not None:
            raise ValueError(
                "overwrite would take the other shards' work away; leave it out, and choose another folder"
            )
        make_out(self.path)
        with self.locked(machine):
            if overwrite and (self.path / PLAN).exists():
                self._clear()
            if machine is None:
                self._remove_half_written()
            self._settle(plan)
            yield
            if self.is_finished:
                self._remove_progress()

    def record(self, task: str) -> dict | None:
        """The task's completion record, if it is of this plan and its outputs are there with their sizes.

        Raises ValueError for a record that another version of this program wrote."""
        path = self._record_path(task)
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):  # damaged: the task is done again
            return None
        if not isinstance(record, dict) or not isinstance(record.get("outputs", {}), dict):
            return None
        if "outputs" not in record:
            raise ValueError(
                f"{path} was written by another version, whose records this one cannot read; finish {self.path} with "
                "that version, choose another folder, or --overwrite to make this one anew"
            )
        outputs = {self.path / name: size for name, size in record["outputs"].items()}
        is_done = all(path.exists() and path.stat().st_size == size for path, size in outputs.items())
        return record if is_done and record.get("address") == self.address else None

    def complete(self, task: str, outputs: Sequence[Path], record: dict) -> None:
        """Write the task's completion record, after its outputs."""
        sizes = {path.relative_to(self.path).as_posix(): path.stat().st_size for path in outputs}
        write_json(self._record_path(task), {"address": self.address, "outputs": sizes, **record})

    def records(self, tasks: Sequence[str]) -> list[dict]:
        """What `complete` was given for each of the tasks, in order. Raises ValueError where one is not done."""
        found = [(task, self.record(task)) for task in tasks]
        missing = [task for task, record in found if record is None]
        others = [task for task in missing if self._record_path(task).exists()]
        if others:
            raise ValueError(
                f"{len(others)} of {len(tasks)} {self.outputs} of {self.path} are of another plan (other settings, "
                f"tokenizer or sources) or damaged (first: {others[0]}); make them again by the call that made the "
                "others"
            )
        if missing:
            raise ValueError(
                f"{len(missing)} of {len(tasks)} {self.outputs} of {self.path} are not there (first: {missing[0]}); "
                f"put the folders of all --shard calls together, or call {self.command} without --shard to make them "
                "here"
            )
        names = ("address", "outputs")
        return [{name: record[name] for name in record if name not in names} for _, record in found if record]

    def _record_path(self, task: str) -> Path:
        return self.path / PROGRESS / f"{task}.json"

    @contextmanager
    def locked(self, machine: Machine | None) -> Iterator[None]:
        """One process at a time, or one of each machine. The locks of a killed process are free."""
        held = []

        def hold(path: Path, how: int, flags: int) -> None:
            held.append(os.open(path, flags))
            try:
                fcntl.flock(held[-1], how | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"another process is preparing {self.path}; wait for it or choose another folder"
                ) from None

        try:
            hold(self.path, fcntl.LOCK_EX if machine is None else fcntl.LOCK_SH, os.O_RDONLY)
            if machine is not None:
                (self.path / PROGRESS).mkdir(exist_ok=True)
                lock = self.path / PROGRESS / f"{machine.number}-{machine.of}.lock"
                hold(lock, fcntl.LOCK_EX, os.O_RDWR | os.O_CREAT)
            yield
        finally:
            for file in held:
                os.close(file)

    def _settle(self, plan: dict) -> None:
        """Write the plan, or compare it with the one that is there."""
        if not (self.path / PLAN).exists():
            # The plan and the folder of locks may be another machine's, of this moment.
            empty = {
                name
                for name in self.subfolders
                if (self.path / name).is_dir() and not any((self.path / name).iterdir())
            }
            names = {HALF_WRITTEN.sub(r"\1", entry.name) for entry in self.path.iterdir()}
            foreign = sorted(names - {PLAN, PROGRESS} - empty)
            if not (self.path / PLAN).exists():
                if foreign:
                    raise ValueError(
                        f"{self.path} was not made by {self.command} (it holds {foreign[0]}); choose a new or empty "
                        "folder"
                    )
                write_json(self.path / PLAN, plan)
        if found := differences(read_plan(self.path, self.command), plan):
            raise ValueError(
                f"{self.path} was {self.verb} with something else: {'; '.join(found)}. "
                f"Choose another folder, or --overwrite to make this one anew"
            )
        for folder in (self.path / name for name in (PROGRESS, *self.subfolders)):
            if folder.exists() and not folder.is_dir():
                raise ValueError(f"{folder} is no folder, and {self.command} keeps its files there; move it away")
            folder.mkdir(exist_ok=True)

    def _clear(self) -> None:
        """Remove all that the command made. Raises ValueError, before anything is removed, where other things lie
        among it."""
        read_plan(self.path, self.command)
        own, foreign = self._contents()
        if foreign:
            more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
            raise ValueError(
                f"{self.path} holds {foreign[0]}{more}, which {self.command} did not make, so --overwrite removes "
                "nothing; move that away, or choose another folder"
            )
        # The manifest first and the plan last: after a kill the folder is unfinished, and another overwrite clears it.
        for name in sorted(own, key=lambda name: (name == PLAN, name != MANIFEST)):
            (self.path / name).unlink()

    def _remove_half_written(self) -> None:
        begun = (self.path / PLAN).exists()
        for name in self._contents()[0]:
            final = HALF_WRITTEN.sub(r"\1", name)
            if final != name and (begun or final == PLAN):
                (self.path / name).unlink()

    def _remove_progress(self) -> None:
        """Remove the records and locks, and their folder if nothing else lies in it."""
        for name in self._contents()[0]:
            if name.startswith(f"{PROGRESS}/"):
                (self.path / name).unlink(missing_ok=True)  # another machine may see at this moment that all is done
        progress = self.path / PROGRESS
        with suppress(FileNotFoundError):
            if not any(progress.iterdir()) and not progress.is_symlink():
                progress.rmdir()

    def _contents(self) -> tuple[list[str], list[str]]:
        """Names within the folder and its subfolders: of files of its own, half written ones too, and of all else."""
        own = rf"{re.escape(PLAN)}|{re.escape(MANIFEST)}|{PROGRESS}/(?:[a-z]+-\d+\.json|\d+-\d+\.lock)|{self.own_files}"
        folders = [self.path / name for name in (PROGRESS, *self.subfolders) if (self.path / name).is_dir()]
        names: tuple[list[str], list[str]] = ([], [])
        for path in chain(self.path.iterdir(), *(folder.iterdir() for folder in folders)):
            if path not in folders:
                name = path.relative_to(self.path).as_posix()
                is_own = re.fullmatch(own, HALF_WRITTEN.sub(r"\1", name)) and not path.is_dir()
                names[0 if is_own else 1].append(name)
        return names[0], sorted(names[1])


def read_plan(path: Path, command: str) -> dict:
    """The plan of a folder that this command made. Raises ValueError where it is not one of its own."""
    try:
        plan = json.loads((path / PLAN).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path / PLAN} cannot be read ({error}); choose another folder, or remove this one"
        ) from error
    sections = ("settings", "mix", "tokenizer", "sources")
    if not isinstance(plan, dict) or not all(isinstance(plan.get(name), dict) for name in sections):
        raise ValueError(f"{path} was not made by {command} ({PLAN} is another's); choose a new or empty folder")
    if (other := plan.get("made_by", "prepare")) != command:
        raise ValueError(
            f"{path} was not made by {command} (its plan is that of {other}); choose a new or empty folder"
        )
    return plan


def with_address(plan: dict) -> dict:
    """The plan with the hash of all that is in it; two calls with the same address make the same bytes."""
    return {"address": hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest(), **plan}


def differences(there: dict, asked: dict) -> list[str]:
    """What the plan of a folder and the one asked for do not agree in, each in a phrase."""
    found = []
    for section in ("settings", "mix", "tokenizer"):
        before, now = there.get(section, {}), asked[section]
        for name in before.keys() | now.keys():
            if before.get(name) != now.get(name):
                found.append(f"{name} is {before.get(name)} there and {now.get(name)} here")
    old, new = there["sources"], asked["sources"]
    changes = {
        "changed": sorted(name for name in old.keys() & new.keys() if old[name] != new[name]),
        "new": sorted(new.keys() - old.keys()),
        "gone": sorted(old.keys() - new.keys()),
    }
    found += [f"source files {what}: {len(names)} (first: {names[0]})" for what, names in changes.items() if names]
    if not found and there.get("units") != asked.get("units"):
        found.append("what goes into which shard is another: one of the two streams, or another version made it")
    return sorted(found)


def add_up(records: Sequence[dict]) -> dict:
    """One record of several with the same fields: numbers are added, in dicts name by name, and lists put together; of
    texts the first is taken. Names in dicts are sorted."""

    def added(values: list[Any]) -> Any:
        if isinstance(values[0], dict):
            names = sorted(set().union(*values))
            return {name: added([value[name] for value in values if name in value]) for name in names}
        if isinstance(values[0], list):
            return [*chain.from_iterable(values)]
        return values[0] if isinstance(values[0], str) else sum(values)

    return {name: added([record[name] for record in records]) for name in records[0]}
