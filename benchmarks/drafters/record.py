"""Answers, with what each of their steps committed, and the record that keeps them so that a killed run can resume.

Not here: who answers (turns.py), what is computed from the answers (figures.py).
"""

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT, RECORD, STATE = "longdraft bench 1", "record.jsonl", "state"
BEGINNING = json.dumps({"format": FORMAT})[:-1].encode()  # of every record's first line


@dataclass(frozen=True)
class Answer:
    """The answer to one request. Seconds are those of infer/results.py.

    Attributes:
        accept_lengths: the number of tokens that each step committed, including the target's own, without tokens after
            the answer's end. arrivals: seconds from the start of the request to each step's tokens.
        drafted: verified nodes other than roots.
    """

    prompt_tokens: int
    tokens: list[int]
    text: str | None
    finish_reason: str
    accept_lengths: list[int]
    arrivals: list[float]
    drafted: int = 0
    prefill_seconds: float = 0.0
    first_token_seconds: float = 0.0
    decode_seconds: float = 0.0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    commit_seconds: float = 0.0
    decisions: dict[str, str] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        return len(self.accept_lengths)

    @property
    def accepted(self) -> int:
        return len(self.tokens) - self.steps


@dataclass(frozen=True)
class Entry:
    """One drafter's answers to all turns of one question.

    Attributes:
        max_depth: depth of the deepest node that the drafter can propose. stopped: why turns are missing, in words.
    """

    id: int | str
    task: str
    category: str
    drafter: str
    temperature: float
    turns: list[Answer]
    max_depth: int = 0
    stopped: str = ""


class Record:
    """What was asked, proved and answered, in order.

    Given a folder, each line is appended to its record.jsonl and synced before the next question is asked, so that a
    killed run resumes after its last complete answer.

    Args:
        settings: everything the answers depend on. A folder that was begun with other settings is refused.

    Raises: ValueError for such a folder, for one that another process writes to, and for a file that is no record.
    """

    def __init__(self, folder: Path | None, settings: Mapping[str, Any]):
        self.settings, self.proof, self.entries = dict(settings), None, dict[tuple, Entry]()
        self.left_out: list[dict] = []
        self.machine: dict = {}
        self.folder, self._file = folder, None
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / RECORD).open("a+b")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"--out: another process writes to {folder}; wait for it or give another folder") from None
        except OSError as error:
            raise ValueError(f"--out: {folder} cannot be written: {error.strerror}; give another folder") from error
        self._file.seek(0)
        content, name = self._file.read(), f"--out: {self._file.name}"
        end = content.rfind(b"\n") + 1
        lines = _parse(content[:end], name)
        if lines or not BEGINNING.startswith(content[: len(BEGINNING)]):
            self._check(_settings_in(lines, name))
            self._read(lines, name)
        # The file is a record, so a last line without its end was cut off by a kill.
        self._file.truncate(end)
        if not lines:
            self._append({"format": FORMAT, "settings": self.settings})

    def _check(self, recorded: dict) -> None:
        settings = json.loads(json.dumps(self.settings))
        for name in {**settings, **recorded}:
            before, now = recorded.get(name), settings.get(name)
            if before != now:
                raise ValueError(
                    f"--out: {self.folder} was begun with {name} {before}, and this is {now}; "
                    "ask for the same, or give another folder"
                )

    def _read(self, lines: Sequence[dict], name: str) -> None:
        """Take over all lines but the first. Raises ValueError, beginning with `name`, for a line of another kind."""
        for number, line in enumerate(lines[1:], start=2):
            try:
                if "proof" in line:
                    self.proof = line["proof"]
                elif "machine" in line:
                    self.machine = line["machine"]
                elif "left_out" in line:
                    self.left_out.append(line["left_out"])
                else:
                    self._keep(Entry(**{**line, "turns": [Answer(**turn) for turn in line["turns"]]}))
            except (TypeError, KeyError, AttributeError) as error:
                raise ValueError(f"{name}, line {number} is no line of a record; give another folder") from error

    def _keep(self, entry: Entry) -> None:
        self.entries[entry.id, entry.drafter, entry.temperature] = entry

    def _append(self, line: dict) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def set_proof(self, proof: dict) -> None:
        self.proof = proof
        self._append({"proof": proof})

    def set_machine(self, machine: dict) -> None:
        """Note on which machine and with which versions the following answers are made."""
        self.machine = machine
        self._append({"machine": machine})

    def leave_out(self, questions: Sequence[Mapping[str, Any]]) -> None:
        """Note questions that are not asked, each of them once."""
        known = {one["id"] for one in self.left_out}
        for one in questions:
            if one["id"] not in known:
                self.left_out.append(dict(one))
                self._append({"left_out": dict(one)})

    def add(self, entry: Entry, tables: Sequence[Any] = ()) -> None:
        """Append an answered question, and save the drafter's tables as they are now until its next answer."""
        before = self._states(entry.drafter, entry.temperature, tables)
        self._keep(entry)
        if self.folder is not None and tables:
            (self.folder / STATE).mkdir(exist_ok=True)
            for path, table in self._states(entry.drafter, entry.temperature, tables).items():
                table.save(path)
        self._append(asdict(entry))
        for path in before:
            path.unlink(missing_ok=True)

    def restore(self, drafter: str, temperature: float, tables: Sequence[Any]) -> None:
        """Load a drafter's tables as they were after its last recorded answer."""
        for path, table in self._states(drafter, temperature, tables).items():
            if path.exists():
                table.load(path)

    def _states(self, drafter: str, temperature: float, tables: Sequence[Any]) -> dict[Path, Any]:
        """The file of each table after the last recorded answer; none without a folder."""
        if self.folder is None:
            return {}
        name = f"{drafter}-{temperature:g}-{len(self.of(drafter, temperature))}"
        return {self.folder / STATE / f"{name}.{number}": table for number, table in enumerate(tables)}

    def of(self, drafter: str, temperature: float) -> list[Entry]:
        return self.by_drafter().get(temperature, {}).get(drafter, [])

    def by_drafter(self) -> dict[float, dict[str, list[Entry]]]:
        """All entries by temperature and drafter."""
        found: dict[float, dict[str, list[Entry]]] = {}
        for entry in self.entries.values():
            found.setdefault(entry.temperature, {}).setdefault(entry.drafter, []).append(entry)
        return found


def _parse(content: bytes, name: str) -> list[dict]:
    """Parse lines of JSON objects. Raises ValueError, with the line's number, for a line that is not one."""
    lines = []
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            lines.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name}, line {number} is no JSON ({error}); give another folder") from None
        if not isinstance(lines[-1], dict):
            raise ValueError(f"{name}, line {number} is no JSON object; give another folder")
    return lines


def _settings_in(lines: Sequence[dict], name: str) -> dict[str, Any]:
    """The settings in a record's first line. Raises ValueError, beginning with `name`, if it has none."""
    head = lines[0] if lines else {}
    if head.get("format") != FORMAT or not isinstance(settings := head.get("settings"), dict):
        raise ValueError(f"{name} is no record of `longdraft bench --out`, or of another format; give another folder")
    return settings


def read_record(folder: Path) -> Record:
    """Read the record of a finished or running bench, without writing to it. Raises ValueError if there is none."""
    path = folder / RECORD if folder.is_dir() else folder
    try:
        lines = _parse(path.read_bytes().rpartition(b"\n")[0], str(path))
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read: {error.strerror}; name a folder that `longdraft bench --out` wrote"
        ) from error
    record = Record(None, _settings_in(lines, str(path)))
    record._read(lines, str(path))
    return record
