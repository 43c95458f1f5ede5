"""Answers with what each step of them brought, and the record that keeps them, question by question, through a kill.

Not here: what figures are made of them (figures.py).
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from longdraft.benchmarks.progress import Watch
from longdraft.benchmarks.timing import seconds_of
from longdraft.infer.drafters.base import Drafter
from longdraft.infer.drafters.combine import Combined
from longdraft.infer.drafters.token_recycling import TokenRecycling
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams

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


class EngineAnswers:
    """An engine that answers."""

    def __init__(self, engine: Engine):
        self.engine = engine

    def answer(self, prompt: list[int], params: SamplingParams, watch: Watch) -> Answer:
        """The answer to one prompt, watched."""
        began, lengths, arrivals, last = time.perf_counter(), [], [], None
        for piece in self.engine.stream([prompt], params):
            lengths.append(len(piece.tokens))
            arrivals.append(round(time.perf_counter() - began, 6))
            watch.advance(len(piece.tokens) + (0 if len(lengths) > 1 else prefill_cost(len(prompt))))
            last = piece.generation
        assert last is not None
        stats = last.stats
        seconds = {
            f"{part}_seconds": round(getattr(stats, f"{part}_seconds"), 6)
            for part in ("prefill", "first_token", "decode", "draft", "target", "commit")
        }
        return Answer(
            len(prompt),
            last.tokens,
            last.text,
            last.finish_reason,
            lengths,
            arrivals,
            stats.drafted,
            decisions=dict(stats.decisions),
            **seconds,
        )

    @property
    def max_depth(self) -> int:
        return self.engine.drafter.max_depth

    def tables(self) -> list[TokenRecycling]:
        """What its drafter keeps from one request to the next."""
        drafter: Drafter = self.engine.drafter
        parts = drafter.drafters if isinstance(drafter, Combined) else [drafter]
        return [part for part in parts if isinstance(part, TokenRecycling)]


class TransformersAnswers:
    """transformers' own greedy `generate`, of a model that is loaded there. A step is a token."""

    max_depth = 0

    def __init__(self, model, eos_token_ids: Sequence[int]):
        self.model, self._eos, self._device = model, list(eos_token_ids), next(model.parameters()).device

    @torch.no_grad()
    def answer(self, prompt: list[int], params: SamplingParams, watch: Watch) -> Answer:
        """The prefill's time is that of a call which generates one token."""
        prefill, _ = self._timed(prompt, replace(params, max_new_tokens=1))
        whole, tokens = self._timed(prompt, params)
        watch.advance(transformers_cost(len(prompt), params))
        count = len(tokens)
        seconds = (whole - prefill) * count / (count - 1) if count > 1 else whole  # the call of one token made it
        return Answer(len(prompt), tokens, None, "", [1] * count, [], decode_seconds=seconds, prefill_seconds=prefill)

    def generate(self, prompts: Sequence[list[int]], params: SamplingParams) -> list[list[int]]:
        """The new tokens of prompts of one length. Nothing of the checkpoint's own generation config goes into them."""
        from transformers import GenerationConfig

        end = None if params.ignore_eos else self._eos
        self.model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=end)
        ids = torch.tensor(prompts, device=self._device)
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": params.max_new_tokens}
        return self.model.generate(ids, **options)[:, ids.shape[1] :].tolist()

    def _timed(self, prompt: list[int], params: SamplingParams) -> tuple[float, list[int]]:
        out = list[list[int]]()
        return seconds_of(lambda: out.extend(self.generate([prompt], params)), self._device), out[0]


def prefill_cost(tokens: int) -> float:
    """What a prompt costs beside a step of plain decoding, about; for estimates of the time left alone."""
    return tokens / 8


def transformers_cost(prompt_tokens: int, params: SamplingParams) -> float:
    """The same of an answer of transformers."""
    return 3 * (prefill_cost(prompt_tokens) + params.max_new_tokens)


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
            self._take_all(lines, name)
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

    def _take_all(self, lines: Sequence[dict], name: str) -> None:
        """What stands behind the head. Raises: ValueError, beginning with `name`, for a line that is none of ours."""
        for number, line in enumerate(lines[1:], start=2):
            try:
                self._take(line)
            except (TypeError, KeyError, AttributeError) as error:
                raise ValueError(f"{name}, line {number} is no line of a record; give another folder") from error

    def _take(self, line: dict) -> None:
        if "proof" in line:
            self.proof = line["proof"]
        elif "machine" in line:
            self.machine = line["machine"]
        elif "left_out" in line:
            self.left_out.append(line["left_out"])
        else:
            self._keep(entry_of(line))

    def _keep(self, entry: Entry) -> None:
        self.entries[entry.id, entry.drafter, entry.temperature] = entry

    def _append(self, line: dict) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def set_proof(self, proof: dict) -> None:
        """What was proved."""
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

    def has(self, id: int | str, drafter: str, temperature: float) -> bool:
        return (id, drafter, temperature) in self.entries

    def add(self, entry: Entry, tables: Sequence[TokenRecycling] = ()) -> None:
        """An answered question, and what the drafter's tables hold behind it."""
        before = self._state(entry.drafter, entry.temperature)
        self._keep(entry)
        after = self._state(entry.drafter, entry.temperature)
        if self.folder is not None:
            for number, table in enumerate(tables):
                (self.folder / STATE).mkdir(exist_ok=True)
                table.save(f"{after}.{number}")
        self._append(asdict(entry))
        if self.folder is not None:
            for number in range(len(tables)):
                Path(f"{before}.{number}").unlink(missing_ok=True)

    def restore(self, drafter: str, temperature: float, tables: Sequence[TokenRecycling]) -> None:
        """A drafter's tables as they were behind the last recorded answer."""
        state = self._state(drafter, temperature)
        for number, table in enumerate(tables):
            if (path := Path(f"{state}.{number}")).exists():
                table.load(path)

    def _state(self, drafter: str, temperature: float) -> Path:
        count = sum(entry.drafter == drafter and entry.temperature == temperature for entry in self.entries.values())
        return (self.folder or Path()) / STATE / f"{drafter}-{temperature:g}-{count}"

    def of(self, drafter: str, temperature: float) -> list[Entry]:
        """A drafter's entries, in order."""
        return [e for e in self.entries.values() if e.drafter == drafter and e.temperature == temperature]


def entry_of(line: dict) -> Entry:
    """An entry as it was written."""
    return Entry(**{**line, "turns": [Answer(**turn) for turn in line["turns"]]})


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
    record._take_all(lines, str(path))
    return record
