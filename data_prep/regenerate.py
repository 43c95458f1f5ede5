"""A set of conversations answered anew by the target, so that its draft learns from what the target itself writes; or
texts, which it continues.

The folder is one of tasks (tasks.py): each `part_size` conversations of the input, in its order, are a task, which
writes `part-*.jsonl` with {"messages", "source"} a line, and "unfinished" where the last answer was cut. In the
manifest input = success + error + skipped.

The seed of an answer is a function of the seed, the conversation's content and the turn. So no answer depends on other
conversations, their order, the batch, the drafter or a kill. Not here: what is asked of the target and made of what it
writes (responses.py), the target itself (launch/regenerate.py) or its servers (endpoints.py).
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
from longdraft.data_prep.manifest import NAMED_BAD, count_and_hash
from longdraft.data_prep.record_formats import TEXT_FIELD, ChatFormat, TextFormat
from longdraft.data_prep.responses import ERRORS, ChatTokens, Generate, OpenConversation, answer_all, beginning
from longdraft.data_prep.segments import SEGMENT_BYTES, read_documents, scan
from longdraft.data_prep.settings import Source
from longdraft.data_prep.shards import MANIFEST, read_manifest, write_json
from longdraft.data_prep.sources import list_files
from longdraft.data_prep.tasks import Machine, WorkFolder, add_up, tasks_of, with_address
from longdraft.data_prep.tokenize import rust_tokenizer
from longdraft.models.files import write_atomically

COMMAND = "longdraft prepare regenerate"
OWN_FILES = r"part-\d+\.jsonl"
ENOUGH_ANSWERS = 16  # of the first part that a call makes; if so many fail alike, the others would
# The fields of a task's completion record, and of the manifest, for no conversation; hints: by reason why conversations
# were left out, what is wrong with one of them.
EMPTY_RECORD = {
    **{"input": 0, "success": 0, "error": {}, "skipped": {}, "named": []},
    **{"answers": 0, "answer_tokens": 0, "reread": 0, "hints": {}, "parts": []},
}


@dataclass(frozen=True)
class RegenerateConfig:
    """What is to be answered.

    max_prompt: tokens. answering: besides the seed, all that decides an answer (target, sampling), as values for JSON.
    files: patterns of names in folders, () for all. part_size: conversations of a task. overwrite: clear a folder that
    was answered with something else. keep_unfinished: see ChatTokens. continued: tokens of the texts' beginnings, at
    least and at most, where the sources are texts; text_field: holds the text of a record.
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
    """The files' size and hash by name, how many conversations they hold, and these themselves, in order.

    All that is read of the sources goes through here. Raises ValueError: no such source, a text among conversations, or
    conversations where texts are to be continued."""
    is_chat, how = config.continued is None, {"files": config.files, "text_field": config.text_field}
    how |= {"chat_field": config.chat_field} if is_chat else {}
    files = list_files([Source(path, **how) for path in config.sources])
    if found := [file.name for file in files if file.kind == ("text" if is_chat else "docstrings")]:
        what = "plain text, not conversations" if is_chat else "conversations, not text"
        raise ValueError(f"{found[0]} holds {what}; leave it out, by --files '*.jsonl' for one, or see --prompt-tokens")
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
    """The bar: conversations seen, and what this call generated, kept or not."""

    def __init__(self, count: int, n_done: int):
        self.bar = bar(total=count, initial=n_done, desc="answering", unit="conversation")
        self.tokens, self.seconds, self._good, self._errors = 0, 0.0, 0, 0

    def count(self, conversation: OpenConversation) -> None:
        """A conversation is over."""
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
    """Answer the input into `config.out`, go on with it, or say that it is done. Returns its manifest, logs one line.

    Args:
        encoder: of the target's tokenizer and chat template.
        start: makes the target ready; it is called only if there is work.
        machine: answer this machine's tasks only. The folder is not finished (None is returned) before a call without.
    Raises:
        ValueError: no such source, a folder made with something else, a full disk, not one good answer, be it in the
            first part alone. Finished parts stay on disk, so the same call goes on.
    """
    out = config.out
    check_out(out)
    with failures_described(out):
        sources, count, conversations = open_input(config, encoder)
        numbers = {"seed": config.seed, "part_size": config.part_size, "max_prompt": config.max_prompt}
        plan = {
            "made_by": COMMAND,
            "settings": {**numbers, **config.answering, **({"unfinished": "keep"} if config.keep_unfinished else {})},
            "mix": _mix(config),
            "tokenizer": {"tokenizer_sha256": tokenizer_hash, **encoder.describe()},
            "sources": sources,
        }
        plan = with_address(plan)
        folder = WorkFolder(out, plan["address"], COMMAND, "answered", "parts", OWN_FILES)
        tasks = [f"part-{number:05d}" for number in range(-(-count // config.part_size))]
        mine, speed = tasks_of(machine, tasks), ""
        with folder.opened(plan, machine, config.overwrite):
            was_finished = folder.is_finished
            if not was_finished:
                chat = ChatTokens(encoder, config.max_prompt, config.keep_unfinished)
                speed = _answer(config, count, conversations, tasks, set(mine), folder, chat, start)
                if machine is None:
                    _write_manifest(out, plan, folder.records(tasks))
    if machine is not None and not was_finished:
        log(f"Answered {len(mine)} of {len(tasks)} parts, {machine.number}/{machine.of}{speed} -> {out}")
        return None
    manifest = read_manifest(out / MANIFEST)
    for part in manifest["parts"]:
        path = out / part["file"]
        if not path.exists() or path.stat().st_size != part["bytes"]:
            raise ValueError(f"{path} is missing or has another size; remove {out} and answer anew")
    log(f"{'Already answered' if was_finished else 'Answered'}: {_summary(manifest)}{speed} -> {out}")
    return manifest


def _mix(config: RegenerateConfig) -> dict[str, Any]:
    if config.continued is None:
        return {"chat_field": config.chat_field}
    return {"text_field": config.text_field, "prompt_tokens": list(config.continued)}


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
    """Do those of my tasks that have no completion record. Returns the speed, for a message."""
    done = {task: record["input"] for task in mine if (record := folder.record(task)) is not None}
    generate, meter = None, Meter(min(count, len(mine) * config.part_size), sum(done.values()))
    with meter.bar:
        for task in tasks:
            given = list(islice(conversations, config.part_size))
            if task not in mine or task in done:
                continue
            generate, is_first = generate or start(), not done and not meter.tokens
            opened = [OpenConversation.begin(document) for document in given]
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
    """Write what is good of a task's conversations and, last, the completion record."""
    lines = []
    for conversation in answered:
        if conversation.why is None:
            messages = [{"role": role, "content": content} for role, content in conversation.messages]
            line = {"messages": messages, "source": conversation.name}
            line |= {"unfinished": True} if conversation.unfinished else {}
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    record, path = _add_up([_record(conversation) for conversation in answered]), folder.path / f"{task}.jsonl"
    if lines:
        write_atomically(path, lambda temporary: temporary.write_text("".join(lines), encoding="utf-8"))
        record["parts"] = [{"file": path.name, "conversations": len(lines), "bytes": path.stat().st_size}]
    folder.complete(task, [path] if lines else [], record)


def _check_first(answered: Sequence[OpenConversation]) -> None:
    """Raises ValueError where all of them failed at their first answer, for one reason."""
    failures = {(conversation.turn, conversation.why) for conversation in answered}
    if len(answered) >= ENOUGH_ANSWERS and len(failures) == 1 and answered[0].turn == 0:
        first = answered[0]
        raise ValueError(
            f"none of the first {len(answered)} answers can be used ({first.why}, the first in {first.name}), so no "
            "more are asked for; give another --chat-template, or for unfinished answers more --max-new-tokens"
        )


def _record(conversation: OpenConversation) -> dict:
    """Of one conversation that is complete or left out."""
    if conversation.why is None:
        counts = {"answers": conversation.turn, "answer_tokens": conversation.generated, "reread": conversation.reread}
        return EMPTY_RECORD | {"input": 1, "success": 1, **counts}
    kind = "error" if conversation.why in ERRORS else "skipped"
    hints = {conversation.why: f"{conversation.name} {conversation.detail}"} if conversation.detail else {}
    named = [{"conversation": conversation.name, "why": conversation.why}]
    return EMPTY_RECORD | {"input": 1, kind: {conversation.why: 1}, "named": named, "hints": hints}


def _add_up(records: Sequence[dict]) -> dict:
    total = add_up([EMPTY_RECORD, *records])
    left_out = sum(total["error"].values()) + sum(total["skipped"].values())
    assert total["input"] == total["success"] + left_out, total
    return total | {"named": total["named"][:NAMED_BAD]}


def _write_manifest(out: Path, plan: dict, records: Sequence[dict]) -> None:
    """Raises ValueError where nothing was answered."""
    total = _add_up(records)
    hints = total.pop("hints")
    if not total["success"]:
        raise ValueError(
            f"none of {total['input']} conversations is answered ({_counts(total)}); the first left out: "
            f"{total['named'][0]['conversation'] if total['named'] else 'none'}. "
            + "".join(f"{hints[why]}. " for why in sorted(hints))
            + "Change the sources or the settings (for unfinished answers --max-new-tokens) and choose another folder"
        )
    described = {"made_by": COMMAND, **plan["tokenizer"], **plan["settings"], **plan["mix"]}
    write_json(out / MANIFEST, {**described, "sources": count_and_hash(plan["sources"]), **total})


def _summary(manifest: dict) -> str:
    reread = f", {manifest['reread']:,} of them read back as other tokens" if manifest["reread"] else ""
    return (
        f"{manifest['success']:,} of {manifest['input']:,} conversations with {manifest['answers']:,} answers of "
        f"{manifest['answer_tokens']:,} tokens{reread}; {_counts(manifest)}"
    )


def _counts(accounts: Mapping[str, Any]) -> str:
    """The errors and what was skipped, by reason."""
    counts = []
    for name, kind in (("error", "errors"), ("skipped", "skipped")):
        why = ", ".join(f"{reason}: {count:,}" for reason, count in accounts[name].items())
        counts.append(f"{sum(accounts[name].values()):,} {kind}" + (f" ({why})" if why else ""))
    return ", ".join(counts)
