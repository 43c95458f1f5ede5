"""Answers with the lengths of their steps, and the record that keeps them so that a killed run can resume."""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from longdraft.data_prep.tasks import failures_described
from longdraft.models.files import WorkFolder, read_plan, write_text
from longdraft.models.schema import validate

FORMAT = "longdraft bench 3"


@dataclass(frozen=True)
class Answer:
    """The answer to one request. Seconds are those of infer/generation.py.

    Attributes:
        accept_lengths: how many tokens each step committed, including the target's own, excluding tokens after the
            answer's end. arrivals: seconds from the start of the request to each step's tokens.
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

    @property
    def steps(self) -> int:
        return len(self.accept_lengths)


@dataclass(frozen=True)
class Entry:
    """One drafter's answers to the turns of one question; turns for which the target has no positions are missing."""

    id: int | str
    task: str
    category: str
    drafter: str
    temperature: float
    turns: list[Answer]


class Record:
    """What was asked, proved and answered, in order.

    Args:
        settings: everything that the answers depend on.
        work: keeps each part (`entry`, `proof` or `machine`) before the next question is asked, numbered in order of
            arrival; None: the record is in memory only.
    """

    def __init__(self, settings: Mapping[str, Any], work: WorkFolder | None = None):
        self.settings, self.work = dict(settings), work
        self.proof: dict | None = None
        self.machine: dict = {}
        self.entries: dict[tuple, Entry] = {}
        self._count = 0
        for name in work.tasks() if work is not None else ():
            self._count = int(name) + 1
            for part, value in ((work and work.read(name)) or {}).items():  # a damaged part is measured again
                self._take(part, validate(Entry, value, "entry") if part == "entry" else value)

    def _take(self, part: str, value: Any) -> None:
        if isinstance(value, Entry):
            self.entries[value.id, value.drafter, value.temperature] = value
        else:
            setattr(self, part, value)

    def add(self, part: str, value: Any) -> None:
        """Append a part. An answer replaces an earlier one of the same drafter; a machine applies to the answers after
        it."""
        self._take(part, value)
        if self.work is not None:
            self.work.write(f"{self._count:06d}", {part: asdict(value) if isinstance(value, Entry) else value})
        self._count += 1

    def of(self, drafter: str, temperature: float) -> list[Entry]:
        return self.by_drafter().get(temperature, {}).get(drafter, [])

    def by_drafter(self) -> dict[float, dict[str, list[Entry]]]:
        """All entries by temperature and drafter."""
        found: dict[float, dict[str, list[Entry]]] = {}
        for entry in self.entries.values():
            found.setdefault(entry.temperature, {}).setdefault(entry.drafter, []).append(entry)
        return found


@contextmanager
def recorded(folder: Path | None, settings: Mapping[str, Any]) -> Iterator[Record]:
    """A record that is kept in this folder, and resumed if the folder was started with the same settings.

    Raises ValueError for a folder that was started with other settings or by another program, or cannot be written.
    """
    if folder is None:
        yield Record(settings)
        return
    work = WorkFolder(folder, {"format": FORMAT, "settings": settings})
    with failures_described(folder), work.opened():
        yield Record(settings, work)


def read_record(folder: Path) -> Record:
    """Read the record of a finished or running bench, without writing to it. Raises ValueError if there is none."""
    plan = read_plan(folder)
    if plan.get("format") != FORMAT:
        raise ValueError(f"{folder} is not a record of this version's `longdraft bench --out`; give another folder")
    record = Record(plan["settings"], WorkFolder(folder, plan))
    record.work = None
    return record


def write_spec_bench(record: Record, folder: Path) -> Path:
    """Write the answers as Spec-Bench's `evaluation/speed.py` reads them, to compare them with those of other programs.

    Each drafter and temperature has a file in `folder/spec_bench`. Returns that folder.
    """
    runs, out = record.by_drafter(), folder / "spec_bench"
    out.mkdir(exist_ok=True)
    for temperature, drafters in runs.items():
        for drafter, entries in drafters.items():
            name = f"{drafter}-temperature-{temperature:g}" if len(runs) > 1 else drafter
            model = f"{record.machine.get('target', 'target')}-{name}"
            lines = (json.dumps(_spec_bench(entry, model)) + "\n" for entry in entries)
            write_text(out / f"{name.replace('/', '_')}.jsonl", "".join(lines))  # a draft's path may be in it
    return out


def _spec_bench(entry: Entry, model: str) -> dict[str, Any]:
    """A line of a model's answers (Spec-Bench, `evaluation/eval.py`)."""
    choice = {
        "index": 0,
        "turns": [turn.text or "" for turn in entry.turns],
        "decoding_steps": [turn.steps for turn in entry.turns],
        "new_tokens": [len(turn.tokens) for turn in entry.turns],
        "wall_time": [_wall_seconds(turn) for turn in entry.turns],
        "accept_lengths": [length for turn in entry.turns for length in turn.accept_lengths],
    }
    return {
        "question_id": entry.id,
        "category": entry.category,
        "answer_id": f"{model}/{entry.id}",
        "model_id": model,
        "choices": [choice],
        "tstamp": time.time(),
    }


def _wall_seconds(turn: Answer) -> float:
    """From the start of the prefill to the last token. On a GPU `prefill_seconds` is only the time to queue it."""
    if not turn.arrivals:  # transformers'
        return turn.prefill_seconds + turn.decode_seconds
    return turn.first_token_seconds + turn.arrivals[-1] - turn.arrivals[0]


def checkpoint_digest(path: str | Path) -> str | None:
    """A digest of a local checkpoint's or draft's file names, sizes and modification times, to detect another one of
    the same name. None if `path` is not a local file or folder."""
    place = Path(path).expanduser()
    if not place.exists():
        return None
    files = sorted(file for file in ([place] if place.is_file() else place.iterdir()) if file.is_file())
    return digest([(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files])


def digest(value: object) -> str:
    """The first hexadecimal digits of the SHA-256 of the value's representation."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
