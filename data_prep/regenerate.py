"""A set of conversations answered anew by the target, so that its draft learns from what the target itself writes.

plan.json      what was asked, written first: who comes back is compared with it
part-*.jsonl   {"messages", "source"} a line, one file for each `part_size` conversations of the input
progress/      what became of each part, gone at the end
manifest.json  written last; input = success + error + skipped

The seed of an answer is a function of the seed, the conversation's content and the turn, so no answer depends on other
conversations, their order, the batch, the drafter or a kill. Not here: what is asked of the target and made of what it
writes (responses.py), the target itself (launch/regenerate.py).
"""

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from longdraft.data_prep.bars import bar
from longdraft.data_prep.chat import ChatEncoder
from longdraft.data_prep.documents import BadDocument, Conversation, Document
from longdraft.data_prep.folder import (
    NAMED_BAD,
    PLAN,
    PROGRESS,
    check_out,
    check_outside,
    clean,
    differences,
    is_whole,
    locked,
    make_out,
    read_json,
    read_plan,
    remove_progress,
    said_of_room,
    sources_in_short,
)
from longdraft.data_prep.record_formats import ChatFormat
from longdraft.data_prep.responses import ERRORS, ChatTokens, Generate, OpenConversation, answer_all
from longdraft.data_prep.settings import Source
from longdraft.data_prep.shards import MANIFEST, read_manifest, write_atomically, write_json
from longdraft.data_prep.sources import list_files, read_documents, scan

MADE_BY = "longdraft prepare regenerate"
SEGMENT_BYTES = 1 << 20
OWN = re.compile(rf"{re.escape(PLAN)}|{re.escape(MANIFEST)}|part-\d+\.jsonl|{PROGRESS}/part-\d+\.json")


@dataclass(frozen=True)
class RegenerateConfig:
    """What is to be answered. max_prompt: tokens. part_size: conversations of a part. answering: besides the seed, all
    that decides an answer (target, sampling), as values for JSON; files: patterns of names in folders, () for all."""

    sources: tuple[str, ...]
    out: Path
    max_prompt: int
    answering: Mapping[str, Any]
    chat_field: str = "messages"
    files: tuple[str, ...] = ()
    seed: int = 0
    part_size: int = 256

    def __post_init__(self) -> None:
        if self.part_size < 1:
            raise ValueError(f"part_size is {self.part_size}, valid: at least 1")
        if self.max_prompt < 1:
            raise ValueError(f"max_prompt is {self.max_prompt}, valid: at least 1")
        check_outside(self.out, self.sources)


@dataclass(frozen=True)
class Given:
    """The input: its files' size and hash by name, about how many conversations, and they themselves, in order."""

    files: dict[str, dict]
    count: int
    conversations: Iterator[Conversation | BadDocument]


def open_sources(config: RegenerateConfig) -> Given:
    """All that is read of the sources goes through here. Raises ValueError: no such source, a text among them."""
    sources = [Source(path, files=config.files, chat_field=config.chat_field) for path in config.sources]
    scanned = [scan(file, SEGMENT_BYTES) for file in list_files(sources)]
    if texts := [file.file.name for file in scanned if file.file.kind == "text"]:
        raise ValueError(f"{texts[0]} holds plain text, not conversations; leave it out, by --files '*.jsonl' for one")

    def read() -> Iterator[Conversation | BadDocument]:
        for file in scanned:
            for segment in file.segments:
                for document in read_documents(segment, ChatFormat(config.chat_field, answered=False)):
                    assert not isinstance(document, Document), document.name
                    yield document

    files = {file.file.name: {"bytes": file.size, "sha256": file.sha256} for file in scanned}
    return Given(files, sum(segment.n_documents for file in scanned for segment in file.segments), read())


@dataclass
class Tally:
    """What became of a part's conversations, or of all."""

    input: int = 0
    success: int = 0
    error: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    named: list[dict[str, str]] = field(default_factory=list)
    answers: int = 0
    answer_tokens: int = 0
    reread: int = 0

    def count(self, conversation: OpenConversation) -> None:
        """A conversation is complete or left out."""
        self.input += 1
        if conversation.why is None:
            self.success, self.answers = self.success + 1, self.answers + conversation.turn
            self.answer_tokens += conversation.generated
            self.reread += conversation.reread
        else:
            (self.error if conversation.why in ERRORS else self.skipped)[conversation.why] += 1
            self.named.append({"conversation": conversation.name, "why": conversation.why})

    def as_json(self) -> dict:
        """Raises AssertionError where the accounts are not even."""
        assert self.input == self.success + self.error.total() + self.skipped.total(), vars(self)
        counts = {name: dict(sorted(getattr(self, name).items())) for name in ("error", "skipped")}
        return {**vars(self), **counts, "named": self.named[:NAMED_BAD]}


class Meter:
    """The bar: conversations seen, and what this call generated, kept or not."""

    def __init__(self, count: int):
        self.bar = bar(total=count, desc="answering", unit="conversation")
        self.tokens, self.seconds, self._good, self._errors = 0, 0.0, 0, 0

    def pass_over(self, count: int) -> None:
        """Conversations of an earlier call, which say nothing about speed."""
        self.bar.initial += count
        self.bar.n += count
        self.bar.refresh()

    def count(self, conversation: OpenConversation) -> None:
        """A conversation is over."""
        self.tokens += conversation.generated
        self._good, self._errors = self._good + (conversation.why is None), self._errors + (conversation.why in ERRORS)
        self.bar.set_postfix_str(f"{self._good} good, {self._errors} errors", refresh=False)
        self.bar.update()


def make_part(
    config: RegenerateConfig,
    number: int,
    conversations: Sequence[Conversation | BadDocument],
    chat: ChatTokens,
    generate: Generate,
    meter: Meter,
) -> None:
    """Answer one part's conversations, write what is good and, last, the record that says that the part is whole."""
    opened = [OpenConversation.begin(document) for document in conversations]
    for conversation in opened:
        if conversation.why is not None:
            meter.count(conversation)
    begin = time.perf_counter()
    answer_all(opened, chat, generate, config.seed, meter.count)
    meter.seconds += time.perf_counter() - begin
    tally, lines = Tally(), []
    for conversation in opened:
        tally.count(conversation)
        if conversation.why is None:
            messages = [{"role": role, "content": content} for role, content in conversation.messages]
            lines.append(json.dumps({"messages": messages, "source": conversation.name}, ensure_ascii=False) + "\n")
    part = None
    if lines:
        path = config.out / f"part-{number:05d}.jsonl"
        write_atomically(path, lambda temporary: temporary.write_text("".join(lines), encoding="utf-8"))
        part = {"file": path.name, "conversations": len(lines), "bytes": path.stat().st_size}
    assert tally.input == len(conversations)
    hints = {left.why: f"{left.name} {left.detail}" for left in reversed(opened) if left.why and left.detail}
    write_json(_record(config.out, number), {"part": part, "hints": hints, **tally.as_json()})


# ---- the folder


def regenerate(
    config: RegenerateConfig,
    encoder: ChatEncoder,
    tokenizer_hash: str,
    start: Callable[[], Generate],
    say: Callable[[str], object] = print,
) -> dict:
    """Answer the input into `config.out`, go on with it, or say that it is done; returns its manifest, says one line.

    encoder: of the target's tokenizer and chat template. start: makes the target ready, called only if there is work.
    Raises ValueError: no such source, a folder made with something else, a full disk, not one good answer. Finished
    parts stay on disk, so the same call goes on.
    """
    out = config.out
    check_out(out)
    with said_of_room(out):
        given = open_sources(config)
        numbers = {"seed": config.seed, "part_size": config.part_size, "max_prompt": config.max_prompt}
        plan = {
            "made_by": MADE_BY,
            "settings": {**numbers, **config.answering},
            "mix": {"chat_field": config.chat_field},
            "tokenizer": {"tokenizer_sha256": tokenizer_hash, **encoder.describe()},
            "sources": given.files,
        }
        make_out(out)
        with locked(out):
            _settle(out, plan)
            finished, speed = (out / MANIFEST).exists(), ""
            if not finished:
                speed = _make_parts(config, given, ChatTokens(encoder, config.max_prompt), start)
                _finish(out, plan)
            remove_progress(out, OWN)
    manifest = read_manifest(out / MANIFEST)
    for part in manifest["parts"]:
        if not is_whole(out, part):
            raise ValueError(f"{out / part['file']} is missing or has another size; remove {out} and answer anew")
    say(f"{'Already answered' if finished else 'Answered'}: {_summary(manifest)}{speed} -> {out}")
    return manifest


def _make_parts(config: RegenerateConfig, given: Given, chat: ChatTokens, start: Callable[[], Generate]) -> str:
    """Make the parts that are not there yet; returns the speed in words."""
    out, generate, meter, number = config.out, None, Meter(given.count), 0
    with meter.bar:
        while conversations := list(islice(given.conversations, config.part_size)):
            if _is_done(out, number):
                meter.pass_over(len(conversations))
            else:
                generate = generate or start()
                make_part(config, number, conversations, chat, generate, meter)
            number += 1
    return f", {meter.tokens / max(meter.seconds, 1e-9):,.0f} tokens/s" if meter.tokens else ""


def _settle(out: Path, plan: dict) -> None:
    """Leave `out` made by this plan: new, to be gone on with, or finished. Raises ValueError for another one."""
    if not (out / PLAN).exists():
        foreign = sorted(entry.name for entry in out.iterdir() if not entry.name.startswith(f".{PLAN}."))
        if foreign:
            raise ValueError(f"{out} was not made by {MADE_BY} (it holds {foreign[0]}); choose a new or empty folder")
        write_json(out / PLAN, plan)
    if found := differences(read_plan(out, MADE_BY), plan):
        raise ValueError(f"{out} was answered with something else: {'; '.join(found)}. Choose another folder")
    clean(out, OWN)
    (out / PROGRESS).mkdir(exist_ok=True)


def _record(out: Path, number: int) -> Path:
    return out / PROGRESS / f"part-{number:05d}.json"


def _is_done(out: Path, number: int) -> bool:
    record = _record(out, number)
    try:
        return record.exists() and is_whole(out, read_json(record)["part"])
    except ValueError:  # damaged: the part is made again
        return False


def _finish(out: Path, plan: dict) -> None:
    """Add the parts up, check the accounts, write the manifest. Raises ValueError where nothing was answered."""
    total, parts, hints = Tally(), [], {}
    for path in sorted((out / PROGRESS).glob("part-*.json")):
        record = read_json(path)
        part = record.pop("part")
        parts += [part] if part else []
        hints = record.pop("hints", {}) | hints
        for name, value in record.items():
            now = getattr(total, name)
            setattr(total, name, now + (Counter(value) if isinstance(value, dict) else value))
    accounts = total.as_json()
    if not total.success:
        said = "".join(f". {hints[why]}" for why in sorted(hints))
        raise ValueError(
            f"none of {total.input} conversations is answered ({_counts(accounts)}); the first left out: "
            f"{total.named[0]['conversation'] if total.named else 'none'}{said}. Change the sources or the settings "
            "(for unfinished answers --max-new-tokens) and choose another folder"
        )
    sources = sources_in_short(plan["sources"])
    described = {"made_by": MADE_BY, **plan["tokenizer"], **plan["settings"], **plan["mix"], "sources": sources}
    write_json(out / MANIFEST, {**described, **accounts, "parts": parts})


def _summary(manifest: dict) -> str:
    reread = f", {manifest['reread']:,} of them read back as other tokens" if manifest["reread"] else ""
    return (
        f"{manifest['success']:,} of {manifest['input']:,} conversations with {manifest['answers']:,} answers of "
        f"{manifest['answer_tokens']:,} tokens{reread}; {_counts(manifest)}"
    )


def _counts(accounts: Mapping[str, Any]) -> str:
    """The errors and what was skipped, by reason."""
    said = []
    for name, kind in (("error", "errors"), ("skipped", "skipped")):
        why = ", ".join(f"{reason}: {count:,}" for reason, count in accounts[name].items())
        said.append(f"{sum(accounts[name].values()):,} {kind}" + (f" ({why})" if why else ""))
    return ", ".join(said)
