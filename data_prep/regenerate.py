"""Lets the target answer conversations anew, or continue texts, so that its draft learns what the target writes.

The output is a work folder (`WorkFolder` of models/files.py). Each task takes `part_size` conversations, in the order
of the input, and writes `part-*.jsonl` with {"messages", "source"} in each line, and "unfinished" if the last answer
was cut. In manifest.json, which is written last, input = success + error + skipped.

The seed of an answer is a function of the call's seed, the conversation's content and the turn. So no answer depends on
other conversations, their order, the batch, the drafter or a kill. response_generation.py makes prompts and reads
answers. The target itself is opened in launch/regenerate.py, or endpoints.py asks its servers.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from tqdm import tqdm

from longdraft.data_prep.chat import ChatEncoder
from longdraft.data_prep.documents import BadDocument, Conversation, Document
from longdraft.data_prep.failures import failures_described
from longdraft.data_prep.formats import TEXT_FIELD, ChatFormat, TextFormat
from longdraft.data_prep.recipe import Source, check_outside
from longdraft.data_prep.records import SEGMENT_BYTES, read_documents, scan
from longdraft.data_prep.response_generation import ERRORS, Answering, Generate, beginning
from longdraft.data_prep.shards import MANIFEST, read_manifest
from longdraft.data_prep.sources import list_files
from longdraft.data_prep.tasks import NAMED_BAD, Machine, add_up, count_and_hash, tasks_of
from longdraft.data_prep.tokenize import rust_tokenizer
from longdraft.models.files import WorkFolder, write_atomically, write_json
from longdraft.models.schema import Int, validated_dataclass

COMMAND = "longdraft prepare regenerate"
OWN_FILES = r"manifest\.json|part-\d+\.jsonl"
ENOUGH_ANSWERS = 16  # if at least this many answers of the first part all fail for one reason, the others would too


@validated_dataclass
class RegenerateConfig:
    """What to answer, and how.

    max_prompt: most tokens of a prompt. answering: what decides an answer besides the seed (target, sampling), as JSON
    values. files: patterns of file names in folders; () takes all. part_size: conversations of a task. overwrite: clear
    a folder that was answered with other settings. keep_unfinished: see Answering. continued: if the sources are texts
    to continue, the least and most tokens of their beginnings. text_field: the field of a record that holds the text.
    """

    sources: tuple[str, ...]
    out: Path
    max_prompt: Annotated[Int, Field(ge=1)]
    answering: Mapping[str, Any]
    chat_field: str = "messages"
    files: tuple[str, ...] = ()
    seed: int = 0
    part_size: Annotated[Int, Field(ge=1)] = 256
    overwrite: bool = False
    keep_unfinished: bool = False
    continued: tuple[int, int] | None = None
    text_field: str | None = None

    def __post_init__(self) -> None:
        if self.continued is not None and not 1 <= self.continued[0] <= self.continued[1] <= self.max_prompt:
            raise ValueError(
                f"prompt_tokens is {self.continued[0]} to {self.continued[1]}; give numbers from 1 to "
                f"{self.max_prompt}, in order, which leave a position for the continuation"
            )
        check_outside(self.out, self.sources)


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
    out, share = config.out, "" if machine is None else f"{machine.number}-of-{machine.of}"
    with failures_described(out):
        sources, count, conversations = open_input(config, encoder)
        if not count:
            raise ValueError(f"sources: {', '.join(config.sources)} have no record to answer; name other files")
        plan = _make_plan(config, encoder, tokenizer_hash, sources)
        folder = WorkFolder(out, plan, OWN_FILES)
        tasks = [f"part-{number:05d}" for number in range(-(-count // config.part_size))]
        mine, speed = tasks_of(machine, tasks), ""
        with folder.opened(share, config.overwrite):
            if not (was_finished := (out / MANIFEST).exists()):
                if due := {task for task in mine if folder.read(task) is None}:
                    parts = ((task, list(islice(conversations, config.part_size))) for task in tasks)
                    to_answer = ((task, documents) for task, documents in parts if task in due)
                    total = min(count, len(due) * config.part_size)
                    with tqdm(total=total, desc="answering", unit="conversation", mininterval=1) as progress:
                        speed = _answer(config, encoder, to_answer, folder, start(), progress)
                if machine is None:
                    _write_manifest(out, plan, folder.read_all(tasks))
            if machine is None:
                folder.remove_progress()
    if machine is not None and not was_finished:
        log(f"Answered {len(mine)} of {len(tasks)} parts, {machine.number}/{machine.of}{speed} -> {out}")
        return None
    manifest = read_manifest(out / MANIFEST)
    for part in manifest["parts"]:
        path = out / part["file"]
        if not path.exists() or path.stat().st_size != part["bytes"]:
            raise ValueError(f"{path} is missing or has another size; remove {out} and answer anew")
    reread = f", {manifest['reread']:,} of them read back as other tokens" if manifest["reread"] else ""
    log(
        f"{'Already answered' if was_finished else 'Answered'}: {manifest['success']:,} of {manifest['input']:,} "
        f"conversations with {manifest['answers']:,} answers of {manifest['answer_tokens']:,} tokens{reread}; "
        f"{_counts(manifest)}{speed} -> {out}"
    )
    return manifest


def open_input(
    config: RegenerateConfig, encoder: ChatEncoder
) -> tuple[dict[str, dict], int, Iterator[Conversation | BadDocument]]:
    """(Size and hash of each file, by name; number of conversations; the conversations in order).

    The sources are read nowhere else. Raises ValueError if a source does not exist, and for texts among conversations
    or conversations among texts to continue."""
    is_chat, read_as = config.continued is None, {"files": config.files, "text_field": config.text_field}
    read_as |= {"chat_field": config.chat_field} if is_chat else {}
    files = list_files([Source(path=path, **read_as) for path in config.sources])
    if wrong := [file.name for file in files if file.kind == ("text" if is_chat else "docstrings")]:
        what = "plain text, not conversations" if is_chat else "conversations, not text"
        raise ValueError(f"{wrong[0]} holds {what}; leave it out, by --files '*.jsonl' for one, or see --prompt-tokens")
    described, segments = scan(files, SEGMENT_BYTES)
    form = ChatFormat(config.chat_field, answered=False) if is_chat else TextFormat(config.text_field or TEXT_FIELD)

    def read() -> Iterator[Conversation | BadDocument]:
        for document in (document for segment in segments for document in read_documents(segment, form)):
            if isinstance(document, Document):
                assert config.continued is not None, document.name
                document = beginning(document, *config.continued, rust_tokenizer(encoder.serialised))
            yield document

    is_counted = all(segment.is_counted for segment in segments)
    count = sum(segment.n_documents or 0 for segment in segments) if is_counted else sum(1 for _ in read())
    return described, count, read()


def _make_plan(config: RegenerateConfig, encoder: ChatEncoder, tokenizer_hash: str, sources: dict[str, dict]) -> dict:
    if config.continued is None:
        mix = {"chat_field": config.chat_field}
    else:
        mix = {"text_field": config.text_field, "prompt_tokens": list(config.continued)}
    numbers = {"seed": config.seed, "part_size": config.part_size, "max_prompt": config.max_prompt}
    return {
        "made_by": COMMAND,
        "settings": {**numbers, **config.answering, **({"unfinished": "keep"} if config.keep_unfinished else {})},
        "mix": mix,
        "tokenizer": {"tokenizer_sha256": tokenizer_hash, **encoder.describe()},
        "sources": sources,
    }


def _answer(
    config: RegenerateConfig,
    encoder: ChatEncoder,
    parts: Iterator[tuple[str, list[Conversation | BadDocument]]],
    folder: WorkFolder,
    generate: Generate,
    progress: tqdm,
) -> str:
    """Do the tasks in `parts`, each with its conversations. Returns the speed, for a message."""
    counts, seconds = Counter(), 0.0

    def count(conversation: Answering) -> None:
        if conversation.prompt is None:  # complete, or left out
            counts.update(tokens=conversation.generated)
            counts.update(good=conversation.why is None, errors=conversation.why in ERRORS)
            progress.set_postfix_str(f"{counts['good']} good, {counts['errors']} errors", refresh=False)
            progress.update()

    for task, documents in parts:
        begun = [Answering(one, encoder, config.max_prompt, config.keep_unfinished) for one in documents]
        for conversation in begun:
            count(conversation)
        begin = time.perf_counter()
        # First every conversation's first open turn, then the second of those that have one, and so on, so that each
        # call gets as many prompts as possible to decode together.
        while asked := [conversation for conversation in begun if conversation.prompt is not None]:
            prompts = [one.prompt for one in asked if one.prompt is not None]
            for completion in generate(prompts, [one.seed(config.seed) for one in asked]):
                asked[completion.index].take(completion)
                count(asked[completion.index])
        seconds += time.perf_counter() - begin
        if not folder.tasks():
            _check_first([conversation for conversation in begun if conversation.generated])
        _write_part(task, begun, folder)
    return f", {counts['tokens'] / max(seconds, 1e-9):,.0f} tokens/s" if counts["tokens"] else ""


def _check_first(answered: Sequence[Answering]) -> None:
    """Raises ValueError if all of them failed at their first answer, for the same reason."""
    failures = {(conversation.turn, conversation.why) for conversation in answered}
    if len(answered) >= ENOUGH_ANSWERS and len(failures) == 1 and answered[0].turn == 0:
        first = answered[0]
        raise ValueError(
            f"none of the first {len(answered)} answers can be used ({first.why}, the first in {first.name}), so no "
            "more are asked for; give another --chat-template, or for unfinished answers more --max-new-tokens"
        )


def _write_part(task: str, conversations: Sequence[Answering], folder: WorkFolder) -> None:
    """Write a task's good conversations and, last, its record.

    The manifest has the record's fields, summed, but `hints`: for each reason why conversations were left out, what is
    wrong with one of them.
    """
    good = [one for one in conversations if one.why is None]
    bad = [(one.name, one.why, one.detail) for one in conversations if one.why is not None]
    lines, path = [], folder.path / f"{task}.jsonl"
    for one in good:
        messages = [{"role": role, "content": content} for role, content in one.messages]
        line = {"messages": messages, "source": one.name, **({"unfinished": True} if one.unfinished else {})}
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    if lines:
        write_atomically(path, lambda temporary: temporary.write_text("".join(lines), encoding="utf-8"))
    record = {
        "input": len(conversations),
        "success": len(good),
        "error": dict(Counter(why for _, why, _ in bad if why in ERRORS)),
        "skipped": dict(Counter(why for _, why, _ in bad if why not in ERRORS)),
        "named": [{"conversation": name, "why": why} for name, why, _ in bad][:NAMED_BAD],
        "answers": sum(one.turn for one in good),
        "answer_tokens": sum(one.generated for one in good),
        "reread": sum(one.reread for one in good),
        "hints": {why: f"{name} {detail}" for name, why, detail in reversed(bad) if detail},
        "parts": [{"file": path.name, "conversations": len(good), "bytes": path.stat().st_size}] if good else [],
    }
    folder.write(task, record, [path] if good else [])


def _write_manifest(out: Path, plan: dict, records: Sequence[dict]) -> None:
    """Write the folder's manifest. records: of all tasks. Raises ValueError if no conversation was answered."""
    total = add_up(records)
    total["named"], hints = total["named"][:NAMED_BAD], total.pop("hints")
    if not total["success"]:
        raise ValueError(
            f"none of {total['input']} conversations is answered ({_counts(total)}); the first left out: "
            f"{total['named'][0]['conversation']}. {''.join(f'{hint}. ' for hint in hints.values())}"
            "Change the sources or the settings (for unfinished answers --max-new-tokens) and choose another folder"
        )
    described = {"made_by": plan["made_by"], **plan["tokenizer"], **plan["settings"], **plan["mix"]}
    write_json(out / MANIFEST, {**described, "sources": count_and_hash(plan["sources"]), **total})


def _counts(record: Mapping[str, Any]) -> str:
    """How many conversations were errors, and how many were skipped, with the reasons."""
    counts = []
    for field, noun in (("error", "errors"), ("skipped", "skipped")):
        reasons = ", ".join(f"{reason}: {count:,}" for reason, count in record[field].items())
        counts.append(f"{sum(record[field].values()):,} {noun}" + (f" ({reasons})" if reasons else ""))
    return ", ".join(counts)
