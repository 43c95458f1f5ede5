"""Lets the target answer conversations anew, or continue texts, so that its draft learns what the target writes.

The folder is a work folder (work_folder.py). Each task takes `part_size` conversations, in the order of the input, and
writes `part-*.jsonl` with {"messages", "source"} in each line, and "unfinished" if the last answer was cut. In the
manifest (regenerate_manifest.py) input = success + error + skipped.

The seed of an answer is a function of the call's seed, the conversation's content and the turn. So no answer depends on
other conversations, their order, the batch, the drafter or a kill. responses.py makes the target's prompts and takes
its answers. The target itself is in launch/regenerate.py, its servers are in endpoints.py.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from longdraft.data_prep.bars import bar
from longdraft.data_prep.chat import ChatEncoder
from longdraft.data_prep.documents import BadDocument, Conversation, Document
from longdraft.data_prep.failures import check_out, check_outside, failures_described
from longdraft.data_prep.record_formats import TEXT_FIELD, ChatFormat, TextFormat
from longdraft.data_prep.regenerate_manifest import conversations_record, summary, write_manifest
from longdraft.data_prep.responses import ERRORS, ChatTokens, Generate, OpenConversation, answer_all, beginning
from longdraft.data_prep.segments import SEGMENT_BYTES, read_documents, scan
from longdraft.data_prep.settings import Source
from longdraft.data_prep.shards import MANIFEST, read_manifest
from longdraft.data_prep.sources import list_files
from longdraft.data_prep.tasks import Machine, tasks_of
from longdraft.data_prep.tokenize import rust_tokenizer
from longdraft.data_prep.work_folder import WorkFolder, with_address
from longdraft.models.files import write_atomically

COMMAND = "longdraft prepare regenerate"
OWN_FILES = r"part-\d+\.jsonl"
ENOUGH_ANSWERS = 16  # if at least this many answers of the first part all fail for one reason, the others would too


@dataclass(frozen=True)
class RegenerateConfig:
    """What to answer, and how.

    max_prompt: most tokens of a prompt. answering: what decides an answer besides the seed (target, sampling), as JSON
    values. files: patterns of file names in folders; () takes all. part_size: conversations of a task. overwrite: clear
    a folder that was answered with other settings. keep_unfinished: see ChatTokens. continued: if the sources are texts
    to continue, the least and most tokens of their beginnings. text_field: the field of a record that holds the text.
    """

    sources: tuple[str, ...]
    out: Path
    max_prompt: int
    answering: Mapping[str, Any]
    chat_field: str = "messages"
    files: tuple[str, ...] = ()
    seed: int = 0
    part_size: int = 256
    overwrite: bool = False
    keep_unfinished: bool = False
    continued: tuple[int, int] | None = None
    text_field: str | None = None

    def __post_init__(self) -> None:
        if self.part_size < 1:
            raise ValueError(f"part_size is {self.part_size}, valid: at least 1")
        if self.max_prompt < 1:
            raise ValueError(f"max_prompt is {self.max_prompt}, valid: at least 1")
        if self.continued is not None and not 1 <= self.continued[0] <= self.continued[1] <= self.max_prompt:
            raise ValueError(
                f"prompt_tokens is {self.continued[0]} to {self.continued[1]}, valid: at least 1, in order, up to "
                f"{self.max_prompt}, which leaves a position for the continuation"
            )
        check_outside(self.out, self.sources)


def open_input(
    config: RegenerateConfig, encoder: ChatEncoder
) -> tuple[dict[str, dict], int, Iterator[Conversation | BadDocument]]:
    """(Size and hash of each file, by name; number of conversations; the conversations in order).

    The sources are read nowhere else. Raises ValueError if a source does not exist, and for texts among conversations
    or conversations among texts to continue."""
    is_chat, settings = config.continued is None, {"files": config.files, "text_field": config.text_field}
    settings |= {"chat_field": config.chat_field} if is_chat else {}
    files = list_files([Source(path, **settings) for path in config.sources])
    if wrong := [file.name for file in files if file.kind == ("text" if is_chat else "docstrings")]:
        what = "plain text, not conversations" if is_chat else "conversations, not text"
        raise ValueError(f"{wrong[0]} holds {what}; leave it out, by --files '*.jsonl' for one, or see --prompt-tokens")
    described, segments = scan(files, SEGMENT_BYTES)
    chat, text = ChatFormat(config.chat_field, answered=False), TextFormat(config.text_field or TEXT_FIELD)

    def read() -> Iterator[Conversation | BadDocument]:
        for segment in segments:
            for document in read_documents(segment, chat if is_chat else text):
                if isinstance(document, Document):
                    assert config.continued is not None, document.name
                    document = beginning(document, *config.continued, rust_tokenizer(encoder.serialised))
                yield document

    is_counted = all(segment.is_counted for segment in segments)
    count = sum(segment.n_documents for segment in segments) if is_counted else sum(1 for _ in read())
    return described, count, read()


class Meter:
    """The progress bar, and the tokens and seconds of this call's answers, kept or not."""

    def __init__(self, count: int, n_done: int):
        self.bar = bar(total=count, initial=n_done, desc="answering", unit="conversation")
        self.tokens, self.seconds, self._good, self._errors = 0, 0.0, 0, 0

    def count(self, conversation: OpenConversation) -> None:
        """Count a conversation that is complete or left out."""
        self.tokens += conversation.generated
        self._good, self._errors = self._good + (conversation.why is None), self._errors + (conversation.why in ERRORS)
        self.bar.set_postfix_str(f"{self._good} good, {self._errors} errors", refresh=False)
        self.bar.update()


def regenerate(
    config: RegenerateConfig,
    encoder: ChatEncoder,
    tokenizer_hash: str,
    start: Callable[[], Generate],
    machine: Machine | None = None,
    log: Callable[[str], object] = print,
) -> dict | None:
    """Answer the input into `config.out`, resume it, or find it finished. Returns its manifest and logs one line.

    Args:
        encoder: for the target's tokenizer and chat template.
        start: makes the target ready; called only if there is work to do.
        machine: do this machine's tasks only. The folder then stays unfinished, and None is returned, until a call
            without `machine` finishes it.
    Raises:
        ValueError: a source does not exist, the folder was made with other settings, the disk is full, or no answer can
            be used, in the first part or at all. Finished parts stay on disk, and the same call resumes.
    """
    out = config.out
    check_out(out)
    with failures_described(out):
        sources, count, conversations = open_input(config, encoder)
        plan = _make_plan(config, encoder, tokenizer_hash, sources)
        folder = WorkFolder(out, plan["address"], COMMAND, "answered", "parts", OWN_FILES)
        tasks = [f"part-{number:05d}" for number in range(-(-count // config.part_size))]
        mine, speed = tasks_of(machine, tasks), ""
        with folder.opened(plan, machine, config.overwrite):
            was_finished = folder.is_finished
            if not was_finished:
                chat = ChatTokens(encoder, config.max_prompt, config.keep_unfinished)
                speed = _answer(config, count, conversations, tasks, set(mine), folder, chat, start)
                if machine is None:
                    write_manifest(out, plan, folder.records(tasks))
    if machine is not None and not was_finished:
        log(f"Answered {len(mine)} of {len(tasks)} parts, {machine.number}/{machine.of}{speed} -> {out}")
        return None
    manifest = read_manifest(out / MANIFEST)
    for part in manifest["parts"]:
        path = out / part["file"]
        if not path.exists() or path.stat().st_size != part["bytes"]:
            raise ValueError(f"{path} is missing or has another size; remove {out} and answer anew")
    log(f"{'Already answered' if was_finished else 'Answered'}: {summary(manifest)}{speed} -> {out}")
    return manifest


def _make_plan(config: RegenerateConfig, encoder: ChatEncoder, tokenizer_hash: str, sources: dict[str, dict]) -> dict:
    if config.continued is None:
        mix = {"chat_field": config.chat_field}
    else:
        mix = {"text_field": config.text_field, "prompt_tokens": list(config.continued)}
    numbers = {"seed": config.seed, "part_size": config.part_size, "max_prompt": config.max_prompt}
    plan = {
        "made_by": COMMAND,
        "settings": {**numbers, **config.answering, **({"unfinished": "keep"} if config.keep_unfinished else {})},
        "mix": mix,
        "tokenizer": {"tokenizer_sha256": tokenizer_hash, **encoder.describe()},
        "sources": sources,
    }
    return with_address(plan)


def _answer(
    config: RegenerateConfig,
    count: int,
    conversations: Iterator[Conversation | BadDocument],
    tasks: Sequence[str],
    mine: set[str],
    folder: WorkFolder,
    chat: ChatTokens,
    start: Callable[[], Generate],
) -> str:
    """Do the tasks of `mine` that have no completion record. Returns the speed, for a message."""
    done = {task: record["input"] for task in mine if (record := folder.record(task)) is not None}
    generate, meter = None, Meter(min(count, len(mine) * config.part_size), sum(done.values()))
    with meter.bar:
        for task in tasks:
            of_task = list(islice(conversations, config.part_size))
            if task not in mine or task in done:
                continue
            generate, is_first = generate or start(), not done and not meter.tokens
            opened = [OpenConversation.begin(document) for document in of_task]
            for conversation in opened:
                if conversation.why is not None:
                    meter.count(conversation)
            begin = time.perf_counter()
            answer_all(opened, chat, generate, config.seed, meter.count)
            meter.seconds += time.perf_counter() - begin
            if is_first:
                _check_first([conversation for conversation in opened if conversation.generated])
            _write_part(task, opened, folder)
    assert next(conversations, None) is None, "the input holds more conversations than were counted"
    return f", {meter.tokens / max(meter.seconds, 1e-9):,.0f} tokens/s" if meter.tokens else ""


def _write_part(task: str, answered: Sequence[OpenConversation], folder: WorkFolder) -> None:
    """Write a task's good conversations and, last, its completion record."""
    lines = []
    for conversation in answered:
        if conversation.why is None:
            messages = [{"role": role, "content": content} for role, content in conversation.messages]
            line = {"messages": messages, "source": conversation.name}
            line |= {"unfinished": True} if conversation.unfinished else {}
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    record, path = conversations_record(answered), folder.path / f"{task}.jsonl"
    if lines:
        write_atomically(path, lambda temporary: temporary.write_text("".join(lines), encoding="utf-8"))
        record["parts"] = [{"file": path.name, "conversations": len(lines), "bytes": path.stat().st_size}]
    folder.complete(task, [path] if lines else [], record)


def _check_first(answered: Sequence[OpenConversation]) -> None:
    """Raises ValueError if all of them failed at their first answer, for the same reason."""
    failures = {(conversation.turn, conversation.why) for conversation in answered}
    if len(answered) >= ENOUGH_ANSWERS and len(failures) == 1 and answered[0].turn == 0:
        first = answered[0]
        raise ValueError(
            f"none of the first {len(answered)} answers can be used ({first.why}, the first in {first.name}), so no "
            "more are asked for; give another --chat-template, or for unfinished answers more --max-new-tokens"
        )
