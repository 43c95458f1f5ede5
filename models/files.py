"""Atomic writes of files, locks between processes, folders of resumable work, signals that are recorded instead of
ending the process, and errors that name the file.

Every folder may import this file: it imports neither torch nor any other file of longdraft.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

if TYPE_CHECKING:
    from torch import Tensor

# Errors of locking on a file system without locks: Lustre without its option flock, NFS without lockd.
WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
# Signals that ask a process to stop.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write a temporary file beside `path`, sync it and rename it to `path`. If anything fails, `path` is unchanged."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        sync(temporary)
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a text in UTF-8 atomically."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write the content atomically, with its keys in the given order and one trailing newline."""
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def write_tensors(tensors: "Mapping[str, Tensor]", path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file with a new file's usual permissions; safetensors itself would make it 0600."""
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode  # as the umask, or the folder's default ACL, gives
    save_file(dict(tensors), path, metadata=metadata)
    path.chmod(mode & 0o7777)


@contextmanager
def damage_named(
    *files: Path | str, remedy: str = "fetch it again (a Git LFS pointer: git lfs pull)"
) -> Iterator[None]:
    """Wrap code that reads these files: an error becomes a one-sentence ValueError with their names, the original
    reason and the remedy.

    ImportError (a missing package) and MemoryError pass through unchanged. The remedy is omitted if the system refuses
    to read the file.
    """
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        is_damage = not isinstance(error, OSError) or error.errno in (None, errno.ENOENT, errno.ENOTDIR)
        advice = f"; {remedy}" if is_damage else ""
        raise ValueError(f"{', '.join(map(str, files))}: cannot be read ({reason}){advice}") from error


def sync(path: Path) -> None:
    """Wait until what was written to this file, or renamed in this folder, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_digest(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def from_home(path: str) -> str:
    """`path` with a leading `~` expanded: neither YAML nor a shell after `=` does it."""
    return str(Path(path).expanduser()) if path.startswith("~") else path


@contextmanager
def locked(path: Path, field: str, busy: str) -> Iterator[None]:
    """Hold the lock file `path` for the block; no other process can. The system releases it when the process dies.

    The file is made if needed and stays. On a file system without locks the block runs after a printed warning.

    Args:
        field: the setting that named the folder ("train.run_dir"). Messages begin with it.
        busy: what a process that holds the lock is doing, and the remedy ("another process trains in X; stop it").

    Raises:
        ValueError: another process holds the lock, or the file cannot be written.
    """
    lock = FileLock(path, timeout=0, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"{field}: {busy}") from None
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise ValueError(f"{field}: {path.parent} cannot be written: {error}; give another folder") from error
        print(f"{field}: {path.parent} has no locks ({error}), so another process could work there too", flush=True)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def signals_noted() -> Iterator[list[int]]:
    """Inside the block, STOP_SIGNALS are appended to the list instead of ending the process, including any that the
    parent process had blocked. A SIGHUP that is ignored, as under nohup, stays ignored. Only the main thread may
    enter."""
    noted: list[int] = []
    caught = [n for n in STOP_SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda n, _: noted.append(n)) for number in caught}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


PLAN, PROGRESS = "plan.json", "progress"
HALF_WRITTEN = r"(?<![^/])\.([^/]+)\.\d+\.tmp$"  # as write_atomically names it; group 1: its final name


class WorkFolder:
    """A folder of finished tasks, each with its output files and its record, tied to a plan: a killed call resumes.

    plan.json            what was asked for, with `address`, its digest; a later call with another plan is refused
    progress/TASK.json   a task's record, renamed into place after its output files
    progress/all.lock    held while a process works in the folder

    The plan decides the tasks, and a task its output. So any number of processes write the same bytes, and a kill loses
    only the tasks that were running.

        folder = WorkFolder(out, {"settings": settings}, own_files=r"part-.*")
        with folder.opened():
            for task in tasks:
                if folder.read(task) is None:
                    folder.write(task, {"rows": 5}, [path of an output file])
            records = folder.read_all(tasks)

    Args:
        path: the folder; it is made if needed.
        plan: everything that decides the tasks and their outputs, as JSON values.
        own_files: regular expression of the caller's own files, relative to the folder: only these are ever removed.
    """

    def __init__(self, path: Path, plan: Mapping[str, Any], own_files: str = "(?!)"):
        self.path, self.plan = path, dict(plan)
        self.address = hashlib.sha256(json.dumps(self.plan, sort_keys=True).encode()).hexdigest()
        self._own_files = rf"{re.escape(PLAN)}|{PROGRESS}/[^/]+\.json|{own_files}"

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Lock the folder for the block, and write the plan or compare it with the one that is there.

        Raises ValueError if the folder was made by another plan (the message names the differences), holds foreign
        files or is a file, or if another process works in it.
        """
        path, progress = self.path / PLAN, self.path / PROGRESS
        foreign = [name for name in self._files() if not re.fullmatch(rf"\.?{PLAN}.*|{PROGRESS}/.*", name)]
        if foreign and not path.exists():
            raise ValueError(f"{self.path} holds {foreign[0]} but no {PLAN}; choose a new or empty folder")
        try:
            progress.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ValueError(f"out: {self.path} is not a folder; give another") from None
        busy = f"another process works in {self.path}; wait for it or choose another"
        with locked(progress / "all.lock", "out", busy):
            before = read_plan(self.path) if path.exists() else None
            if before is None:
                self.clear()
                write_json(path, {"address": self.address, **self.plan})
            elif found := _differences(before, json.loads(json.dumps(self.plan))):
                raise ValueError(
                    f"{self.path} was started with other settings: {'; '.join(found[:4])}; choose another folder, or "
                    "remove it"
                )
            self._remove(HALF_WRITTEN)
            try:
                yield
            finally:
                if not self.tasks():
                    self.remove_progress()

    def read(self, task: str) -> dict[str, Any] | None:
        """The task's record; None unless this plan finished it and its output files have the recorded sizes."""
        try:
            record = dict(json.loads(self._record_path(task).read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError, TypeError):  # a task with a damaged record is done again
            return None
        address, outputs = record.pop("address", None), record.pop("outputs", None)
        if address != self.address or outputs is None:
            return None
        outputs = {self.path / name: size for name, size in outputs.items()}
        return record if all(path.exists() and path.stat().st_size == size for path, size in outputs.items()) else None

    def read_all(self, tasks: Sequence[str]) -> list[dict[str, Any]]:
        """The records of the tasks, in order. Raises ValueError if a task is not finished by this plan."""
        records = [record for task in tasks if (record := self.read(task)) is not None]
        if len(records) < len(tasks):
            raise ValueError(f"{self.path} lacks {len(tasks) - len(records)} of {len(tasks)} tasks; call again")
        return records

    def write(self, task: str, record: Mapping[str, Any], outputs: Sequence[Path] = ()) -> None:
        """Mark the task as finished. Its output files must already be in the folder."""
        sizes = {path.relative_to(self.path).as_posix(): path.stat().st_size for path in outputs}
        write_json(self._record_path(task), {"address": self.address, "outputs": sizes, **record})

    def clear(self) -> None:
        """Remove all that was written, so that another plan may have the folder."""
        self._remove(".*")

    def tasks(self) -> list[str]:
        """The names of all records, sorted."""
        return sorted(path.stem for path in (self.path / PROGRESS).glob("[!.]*.json"))

    def remove_progress(self) -> None:
        """Remove the records and the lock of a folder that is complete."""
        shutil.rmtree(self.path / PROGRESS, ignore_errors=True)

    def _record_path(self, task: str) -> Path:
        return self.path / PROGRESS / f"{task}.json"

    def _files(self) -> list[str]:
        """All files in the folder, relative to it."""
        found = (Path(root, name) for root, _, names in os.walk(self.path) for name in names)
        return sorted(path.relative_to(self.path).as_posix() for path in found)

    def _remove(self, pattern: str) -> None:
        """Remove the files matching `pattern` that this class or its caller wrote, also half-written ones. The plan
        goes last, so that a kill leaves a folder that can be cleared again."""
        for name in sorted(self._files(), key=lambda name: name == PLAN):
            if re.search(pattern, name) and re.fullmatch(self._own_files, re.sub(HALF_WRITTEN, r"\1", name)):
                (self.path / name).unlink()


def read_plan(folder: Path) -> dict[str, Any]:
    """The plan of a work folder, without its address. Raises ValueError if it is damaged or another program's."""
    path = folder / PLAN
    with damage_named(path, remedy="it is damaged or not longdraft's; choose another folder"):
        plan = json.loads(path.read_text(encoding="utf-8"))
        del plan["address"]
    return plan


def _differences(before: Any, now: Any, name: str = "") -> list[str]:
    """The values in which two plans differ, each as a phrase."""
    if isinstance(before, dict) and isinstance(now, dict):
        both = ((key, before.get(key), now.get(key)) for key in sorted({**before, **now}))
        return [line for key, a, b in both for line in _differences(a, b, f"{name}.{key}" if name else key)]
    return [] if before == now else [f"{name} is {before} there and {now} here"]
