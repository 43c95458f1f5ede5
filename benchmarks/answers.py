"""Answers with what each step of them brought, and the record that keeps them, question by question, through a kill.

Not here: who answers (turns.py), what figures are made of them (figures.py).
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT, RECORD, STATE = "longdraft bench 1", "record.jsonl", "state"
BEGINNING = json.dumps({"format": FORMAT})[:-1].encode()


@dataclass(frozen=True)
class Answer:
    """One request's end. Seconds as in infer/results.py.

    Attributes:
        accept_lengths: tokens that each step committed, the target's own one among them; those behind the end are not
            counted. arrivals: seconds from the request's beginning to each step's tokens.
        drafted: nodes verified below the roots.
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
    """All turns' answers of one drafter to one question. max_depth: the deepest node it ever proposes. stopped: why
    turns are missing, in words."""

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

    With a folder each line is appended to its record.jsonl and synced before the next question is asked, so that a
    killed run goes on behind the last whole answer.

    Args:
        settings: whatever the answers depend on; a folder that was begun with others is refused.

    Raises: ValueError for such a folder, one that another process writes, and a record that is none.
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
        whole = content.rfind(b"\n") + 1
        lines = list(parsed(content[:whole], name))
        if lines or not BEGINNING.startswith(content[: len(BEGINNING)]):
            self._check(settings_in(lines, name), json.loads(json.dumps(self.settings)))
            self._take(lines, name)
        # It is ours: a last line that a kill cut off is taken away.
        self._file.truncate(whole)
        if not lines:
            self._append({"format": FORMAT, "settings": self.settings})

    def _check(self, given: dict, wanted: dict) -> None:
        for name in {**wanted, **given}:
            if wanted.get(name) != given.get(name):
                raise ValueError(
                    f"--out: {self.folder} was begun with {name} {given.get(name)}, and this is {wanted.get(name)}; "
                    "ask for the same, or give another folder"
                )

    def _take(self, lines: Sequence[dict], name: str) -> None:
        """What stands behind the head. Raises: ValueError, beginning with `name`, for a line that is none of ours."""
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
        """Where and with what answers are made from here on."""
        self.machine = machine
        self._append({"machine": machine})

    def leave_out(self, questions: Sequence[Mapping[str, Any]]) -> None:
        """Questions that are not asked, once."""
        known = {one["id"] for one in self.left_out}
        for one in questions:
            if one["id"] not in known:
                self.left_out.append(dict(one))
                self._append({"left_out": dict(one)})

    def add(self, entry: Entry, tables: Sequence[Any] = ()) -> None:
        """An answered question, and what the drafter's tables hold behind it, kept until its next answer."""
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
        """A drafter's tables as they were behind the last recorded answer."""
        for path, table in self._states(drafter, temperature, tables).items():
            if path.exists():
                table.load(path)

    def _states(self, drafter: str, temperature: float, tables: Sequence[Any]) -> dict[Path, Any]:
        """Where each table is kept behind the last recorded answer; nowhere without a folder."""
        if self.folder is None:
            return {}
        name = f"{drafter}-{temperature:g}-{len(self.of(drafter, temperature))}"
        return {self.folder / STATE / f"{name}.{number}": table for number, table in enumerate(tables)}

    def of(self, drafter: str, temperature: float) -> list[Entry]:
        return self.by_drafter().get(temperature, {}).get(drafter, [])

    def by_drafter(self) -> dict[float, dict[str, list[Entry]]]:
        found: dict[float, dict[str, list[Entry]]] = {}
        for entry in self.entries.values():
            found.setdefault(entry.temperature, {}).setdefault(entry.drafter, []).append(entry)
        return found


def parsed(content: bytes, name: str) -> Iterator[dict]:
    """Lines of JSON objects. Raises: ValueError, with the line's number, for one that is none."""
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name}, line {number} is no JSON ({error}); give another folder") from None
        if not isinstance(found, dict):
            raise ValueError(f"{name}, line {number} is no JSON object; give another folder")
        yield found


def settings_in(lines: Sequence[dict], name: str) -> dict[str, Any]:
    """The settings in a record's first line. Raises: ValueError, beginning with `name`, where it has none."""
    head = lines[0] if lines else {}
    if head.get("format") != FORMAT or not isinstance(settings := head.get("settings"), dict):
        raise ValueError(f"{name} is no record of `longdraft bench --out`, or of another format; give another folder")
    return settings


def read_record(folder: Path) -> Record:
    """The record of a finished or running bench, to be read alone. Raises: ValueError where there is none."""
    path = folder / RECORD if folder.is_dir() else folder
    try:
        lines = list(parsed(path.read_bytes().rpartition(b"\n")[0], str(path)))
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read: {error.strerror}; name a folder that `longdraft bench --out` wrote"
        ) from error
    record = Record(None, settings_in(lines, str(path)))
    record._take(lines, str(path))
    return record
