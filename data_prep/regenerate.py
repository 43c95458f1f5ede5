"""Lets the target answer conversations anew, or continue texts, so that its draft learns what the target writes.

The output is a work folder (`WorkFolder` of models/files.py). Each task takes the next PART_SIZE conversations of the
input and writes those that were answered to `part-*.jsonl`, a line each; its record counts them and the bad ones. The
sum of all records is manifest.json, which is written last.

The seed of an answer is a function of the call's seed, the conversation's content and the turn. So no answer depends on
other conversations, their order, the batch, the drafter or a kill. The target itself is opened in launch/regenerate.py,
or endpoints.py asks its servers.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from tqdm import tqdm

from longdraft.data_prep.chat import ChatEncoder
from longdraft.data_prep.documents import BadDocument, Conversation, Document, Unusable
from longdraft.data_prep.formats import ChatFormat, TextFormat
from longdraft.data_prep.recipe import Source, check_outside
from longdraft.data_prep.records import SEGMENT_BYTES, read_documents, scan
from longdraft.data_prep.response_generation import Asking, Completion, Generate, Prompt, answer
from longdraft.data_prep.shards import MANIFEST
from longdraft.data_prep.sources import list_files
from longdraft.data_prep.tasks import add_up, failures_described
from longdraft.models.files import WorkFolder, write_atomically, write_json
from longdraft.models.schema import Int, validated_dataclass

PART_SIZE = 256  # conversations of a task
SHOWN_BAD = 5


@validated_dataclass
class RegenerateConfig:
    """What to answer, and how.

    max_prompt: most tokens of a prompt. answering: what decides an answer besides the seed (target, sampling), as JSON
    values. chat_field, text_field: the field of a record that holds the messages, or the text to continue. beginning,
    keep_unfinished: see Asking.
    """

    sources: tuple[str, ...]
    out: Path
    max_prompt: Annotated[Int, Field(ge=1)]
    answering: Mapping[str, Any]
    seed: int = 0
    keep_unfinished: bool = False
    chat_field: str = "messages"
    text_field: str = "text"
    beginning: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.beginning is not None and not 1 <= self.beginning[0] <= self.beginning[1] <= self.max_prompt:
            least, most = self.beginning
            raise ValueError(f"prompt_tokens is {least} to {most}; give numbers from 1 to {self.max_prompt}, in order")
        check_outside(self.out, self.sources)


def regenerate(
    config: RegenerateConfig,
    encoder: ChatEncoder,
    tokenizer_hash: str,
    start: Callable[[], Generate],
    log: Callable[[str], object] = print,
) -> dict[str, Any]:
    """Answer the input into `config.out`, or go on with that, and log one line.

    Args:
        encoder: for the target's tokenizer and chat template.
        start: makes the target ready; called only if there is work to do.
    Returns:
        How many conversations there are ("input"), how many of them were answered ("success") with how many "answers",
        the "bad" ones by reason, and the first of them with what is wrong ("bad_named").
    Raises:
        ValueError: a source does not exist, the folder was made with other settings, or the disk is full. Finished
            parts stay on disk, and the same call resumes.
    """
    is_chat = config.beginning is None
    record_format = ChatFormat(config.chat_field, answered=False) if is_chat else TextFormat(config.text_field)
    how = {"chat_field": config.chat_field} if is_chat else {"text_field": config.text_field}
    asking = Asking(encoder, config.seed, config.max_prompt, config.keep_unfinished, config.beginning)
    with failures_described(config.out):
        files = list_files([Source(path=path, **how) for path in config.sources])
        described, segments = scan(files, SEGMENT_BYTES)
        numbers = {"seed": config.seed, "max_prompt": config.max_prompt, "keep_unfinished": config.keep_unfinished}
        plan = {
            "settings": {**numbers, **config.answering, **how, "prompt_tokens": config.beginning},
            "tokenizer": {"tokenizer_sha256": tokenizer_hash, **encoder.describe()},
            "sources": described,
        }
        folder, records = WorkFolder(config.out, plan, r"manifest\.json|part-\d+\.jsonl"), list[dict]()
        documents = chain.from_iterable(read_documents(segment, record_format) for segment in segments)
        total = sum(segment.n_documents or 0 for segment in segments) or None
        with folder.opened(), tqdm(total=total, desc="answering", unit="conversation", mininterval=1) as progress:
            generate: Generate | None = None
            while part := list(islice(documents, PART_SIZE)):
                task = f"part-{len(records):05d}"
                record = folder.read(task)
                if record is None:
                    generate = generate or start()
                    record = _answer_part(task, part, asking, generate, folder, progress)
                else:
                    progress.update(len(part))
                records.append(record)
    counts = add_up(records)
    write_json(config.out / MANIFEST, counts)  # `prepare` reads no folder without it
    reasons = "".join(f", {why}: {number:,}" for why, number in counts["bad"].items())
    named = "".join(f"\n  {line}" for line in counts["bad_named"][:SHOWN_BAD])
    log(
        f"Answered: {counts['success']:,} of {counts['input']:,} conversations, with {counts['answers']:,} answers"
        f"{reasons} -> {config.out}{named}"
    )
    return counts


def _answer_part(
    task: str,
    part: Sequence[Conversation | Document | BadDocument],
    asking: Asking,
    generate: Generate,
    folder: WorkFolder,
    progress: tqdm,
) -> dict[str, Any]:
    """Do a task, and return its record."""
    answering = [answer(document, asking) for document in part]
    due: dict[int, Prompt] = {}
    good: dict[int, dict] = {}
    bad: dict[int, Unusable] = {}

    def go_on(number: int, completion: Completion | None = None) -> None:
        try:
            due[number] = answering[number].send(completion)
            return
        except StopIteration as end:
            good[number] = end.value
        except Unusable as error:
            bad[number] = error
        progress.update()

    for number in range(len(part)):
        go_on(number)
    # First every conversation's first open turn, then the second of those that have one, and so on, so that each call
    # gets as many prompts as possible to decode together.
    while asked := list(due):
        prompts, seeds = zip(*due.values(), strict=True)
        due.clear()
        for completion in generate(prompts, seeds):
            go_on(asked[completion.index], completion)
    path = folder.path / f"{task}.jsonl"
    if good:
        lines = "".join(json.dumps(good[number], ensure_ascii=False) + "\n" for number in sorted(good))
        write_atomically(path, lambda temporary: temporary.write_text(lines, encoding="utf-8"))
    record = {
        "input": len(part),
        "success": len(good),
        "answers": sum(m["role"] == "assistant" for line in good.values() for m in line["messages"]),
        "bad": dict(Counter(bad[number].why for number in sorted(bad))),
        "bad_named": [f"{part[n].name}: {bad[n].why} {bad[n].detail}".rstrip() for n in sorted(bad)][:SHOWN_BAD],
    }
    folder.write(task, record, [path] if good else [])
    return record
