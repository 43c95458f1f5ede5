"""A folder whose content is made by a fixed number of tasks, each with its own output files and a completion record.

plan.json            what was requested; written first, and compared with every later call
progress/TASK.json   a task's completion record, written after its output files
progress/i-n.lock    held by the call that does the tasks of machine i of n
manifest.json        made from all completion records and written last: its presence means that the folder is finished

The tasks follow from sources and settings alone, and a task's output from the task alone. So any number of processes
and machines writes the same bytes, and a kill loses no more than the tasks that were running. `progress` is removed
when the folder is finished. Only files that match the names above, or the command's own names, are ever removed.
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

from longdraft.data_prep.failures import make_out
from longdraft.data_prep.shards import MANIFEST, write_json
from longdraft.data_prep.tasks import Machine

PLAN = "plan.json"
PROGRESS = "progress"
HALF_WRITTEN = re.compile(r"(?<![^/])\.([^/]+)\.\d+\.tmp$")  # as write_atomically names it; group 1: its final name


@dataclass(frozen=True)
class WorkFolder:
    """A folder of tasks on disk.

    Args:
        path: of the folder.
        address: hash of the plan, which tells completion records of another plan apart.
        command: the command that makes such folders, as messages and plans name it.
        verb, outputs: "prepared", "shards", for messages.
        own_files: regular expression that matches the command's own files, relative to the folder. This module's files
            need not be in it.
        subfolders: subfolders that hold some of these files.
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
        """Lock the folder for work on this plan: inside, no other process does the same tasks in it.

        The folder may be new, partly done, or finished. `progress` is removed on exit if the folder is finished then.
        Files that killed calls left half written are removed on entry, but not with `machine`: others may be writing.
        overwrite: first clear a folder that the same command made; a folder of any other kind is never cleared.
        Raises ValueError if the folder was made by another plan (the message names the differences), if it holds other
        files, or if another process is working in it.
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
            self._write_or_compare(plan)
            yield
            if self.is_finished:
                self._remove_progress()

    def record(self, task: str) -> dict | None:
        """The task's completion record, or None unless it belongs to this plan and its outputs exist with their sizes.

        Raises ValueError for a record that another version of this program wrote."""
        path = self._record_path(task)
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):  # if it is damaged, the task is done again
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
        """Write the task's completion record. Its output files must have been written before."""
        sizes = {path.relative_to(self.path).as_posix(): path.stat().st_size for path in outputs}
        write_json(self._record_path(task), {"address": self.address, "outputs": sizes, **record})

    def records(self, tasks: Sequence[str]) -> list[dict]:
        """What `complete` was given for each of the tasks, in order. Raises ValueError if a task is not done."""
        found = [(task, self.record(task)) for task in tasks]
        missing = [task for task, record in found if record is None]
        unusable = [task for task in missing if self._record_path(task).exists()]
        if unusable:
            raise ValueError(
                f"{len(unusable)} of {len(tasks)} {self.outputs} of {self.path} are of another plan (other settings, "
                f"tokenizer or sources) or damaged (first: {unusable[0]}); make them again by the call that made the "
                "others"
            )
        if missing:
            raise ValueError(
                f"{len(missing)} of {len(tasks)} {self.outputs} of {self.path} are not there (first: {missing[0]}); "
                f"put the folders of all --shard calls together, or call {self.command} without --shard to make them "
                "here"
            )
        added_by_us = ("address", "outputs")
        return [{name: record[name] for name in record if name not in added_by_us} for _, record in found if record]

    def _record_path(self, task: str) -> Path:
        return self.path / PROGRESS / f"{task}.json"

    @contextmanager
    def locked(self, machine: Machine | None) -> Iterator[None]:
        """Allow one process at a time in the folder, or one process of each machine. A killed process frees its locks.

        A machine shares the folder's lock and takes its own; a call for all tasks takes the folder's exclusively."""
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

    def _write_or_compare(self, plan: dict) -> None:
        """Write the plan into a new folder, or compare it with the plan that is there. Then make the subfolders."""
        if not (self.path / PLAN).exists():
            # Another machine may be writing the plan and making the folder of locks at this very moment.
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
        """Remove everything that the command made. If other files lie among it, raise ValueError and remove nothing."""
        read_plan(self.path, self.command)
        own, foreign = self._contents()
        if foreign:
            more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
            raise ValueError(
                f"{self.path} holds {foreign[0]}{more}, which {self.command} did not make, so --overwrite removes "
                "nothing; move that away, or choose another folder"
            )
        # The manifest goes first and the plan last: a kill then leaves an unfinished folder that can be cleared again.
        for name in sorted(own, key=lambda name: (name == PLAN, name != MANIFEST)):
            (self.path / name).unlink()

    def _remove_half_written(self) -> None:
        has_plan = (self.path / PLAN).exists()
        for name in self._contents()[0]:
            final = HALF_WRITTEN.sub(r"\1", name)
            if final != name and (has_plan or final == PLAN):
                (self.path / name).unlink()

    def _remove_progress(self) -> None:
        """Remove the records and locks, and then `progress` itself unless it holds something else."""
        for name in self._contents()[0]:
            if name.startswith(f"{PROGRESS}/"):
                (self.path / name).unlink(missing_ok=True)  # another machine may be removing them as well
        progress = self.path / PROGRESS
        with suppress(FileNotFoundError):
            if not any(progress.iterdir()) and not progress.is_symlink():
                progress.rmdir()

    def _contents(self) -> tuple[list[str], list[str]]:
        """Names in the folder and its subfolders: (its own files, half-written ones included; everything else)."""
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
    """The plan of a folder that `command` made. Raises ValueError if it is not readable or is another command's."""
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
    """The plan with its address, a hash of everything in it. Calls with the same address write the same bytes."""
    return {"address": hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest(), **plan}


def differences(there: dict, requested: dict) -> list[str]:
    """The differences between a folder's plan and the requested one, each as a phrase."""
    found = []
    for section in ("settings", "mix", "tokenizer"):
        before, now = there.get(section, {}), requested[section]
        for name in before.keys() | now.keys():
            if before.get(name) != now.get(name):
                found.append(f"{name} is {before.get(name)} there and {now.get(name)} here")
    old, new = there["sources"], requested["sources"]
    changes = {
        "changed": sorted(name for name in old.keys() & new.keys() if old[name] != new[name]),
        "new": sorted(new.keys() - old.keys()),
        "gone": sorted(old.keys() - new.keys()),
    }
    found += [f"source files {what}: {len(names)} (first: {names[0]})" for what, names in changes.items() if names]
    if not found and there.get("units") != requested.get("units"):
        found.append("shards hold other documents: one of the two streams its sources, or another version made it")
    return sorted(found)
