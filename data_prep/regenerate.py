"""Lets the target answer conversations anew, or continue texts, so that its draft learns what the target writes.

Every assistant turn is answered anew, and so is a question at the end. A text to continue is a conversation too: its
question is the text's beginning, and its template is PLAIN of chat.py. The seed of an answer is a function of the
call's seed, the conversation's content and the turn, so no answer depends on other conversations, their order, the
batch, the drafter or a kill. launch/regenerate.py opens the target, or endpoints.py sends requests to its servers.

The output is a work folder (`WorkFolder` of models/files.py). Each task reads the next PART_SIZE conversations of the
input and writes the answered ones to `part-*.jsonl`, one per line; its record counts them and the bad ones. A task
begins when no prompt of earlier tasks is waiting. The sum of all records is manifest.json, which is written last.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from pydantic import PositiveInt
from tokenizers import Tokenizer
from tqdm import tqdm

from longdraft.data_prep.chat import ChatEncoder
from longdraft.data_prep.documents import (
    NONCHARACTERS,
    REASONING,
    BadDocument,
    Conversation,
    Document,
    Message,
    TokenDocument,
    Unusable,
    messages_digest,
    read_messages,
)
from longdraft.data_prep.formats import OPTIONS, TOOLS, ChatFormat, TextFormat
from longdraft.data_prep.recipe import Source, check_outside
from longdraft.data_prep.records import SEGMENT_BYTES, read_documents, scan
from longdraft.data_prep.shards import MANIFEST
from longdraft.data_prep.sources import list_files
from longdraft.data_prep.tasks import add_up, failures_described
from longdraft.data_prep.tokenize import rust_tokenizer
from longdraft.models.files import WorkFolder, write_json, write_text
from longdraft.models.schema import validated_dataclass

PART_SIZE = 256  # conversations per task
PART = "part-{:05d}"
FIRST, ENOUGH = PART.format(0), 20  # if all of a first task of at least this size are bad for one reason, the call ends
SHOWN_BAD = 5
NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"  # replaces bytes that are no complete character
# gpt-oss's answers: the only control tokens that one may hold are those around its thought.
CONTROLLED = re.compile(
    r"(?:<\|channel\|>analysis<\|message\|>(?P<thought>.*)<\|end\|><\|start\|>assistant)?"
    r"<\|channel\|>final<\|message\|>(?P<content>.*)",
    re.DOTALL,
)
CHARACTERS_A_TOKEN = 32  # characters of a text that are tokenised per token of its beginning: more than tokens have


@dataclass(frozen=True)
class Completion:
    """What the target wrote after the prompt of conversation `index`, counted in the input. text: without an end token,
    other special tokens spelled out. ended: whether the target ended it. refused: why a server refuses this prompt,
    although it answers others."""

    index: int
    text: str
    ended: bool
    refused: str = ""


Given = Conversation | Document | TokenDocument | BadDocument
# Waiting prompts by the index of their conversation: token ids with a seed (unsigned, 64 bits).
Due = dict[int, tuple[list[int], int]]
# Removes prompts from a Due until none is left, and yields their completions as they finish, in any order. After each
# completion the caller may add prompts. Until a prompt is worked on, it should stay in the Due.
Generate = Callable[[Due], Iterable[Completion]]


@validated_dataclass
class RegenerateConfig:
    """What to answer, and how.

    max_prompt: the most tokens of a prompt. answering: what decides an answer besides the seed (target, sampling), as
    JSON values. keep_unfinished: whether an answer without an end is kept as its conversation's last; if not, the
    conversation is bad. field: the field of a record with its messages or the text to continue. beginning: if texts are
    continued, the least and most tokens of their beginnings.
    """

    sources: tuple[str, ...]
    out: Path
    max_prompt: PositiveInt
    answering: Mapping[str, Any]
    field: str = "messages"
    seed: int = 0
    keep_unfinished: bool = False
    beginning: tuple[PositiveInt, PositiveInt] | None = None

    def __post_init__(self) -> None:
        check_outside(self.out, self.sources)


def regenerate(
    config: RegenerateConfig,
    encoder: ChatEncoder,
    tokenizer_hash: str,
    start: Callable[[], Generate],
    log: Callable[[str], object] = print,
) -> dict[str, Any]:
    """Answer the input into `config.out`, or resume doing so, and log a summary.

    encoder: for the target's tokenizer and chat template. start: prepares the target; called only if there is work to
    do. Returns the number of conversations ("input") and of answered ones ("success"), the "bad" ones by reason, and
    details of the first bad ones ("bad_named"). Raises ValueError if a source does not exist, the folder was made with
    other settings, or the disk is full; finished parts stay on disk, and the same call resumes.
    """
    is_chat = config.beginning is None
    record_format = ChatFormat(config.field, answered=False) if is_chat else TextFormat(config.field)
    with failures_described(config.out):
        chat_field = config.field if is_chat else None  # a source with a text_field has no text files
        sources = [Source(path=path, chat_field=chat_field) for path in config.sources]
        described, segments = scan(list_files(sources), SEGMENT_BYTES)
        settings = ("seed", "max_prompt", "keep_unfinished", "field", "beginning")
        plan = {
            "settings": {name: getattr(config, name) for name in settings} | dict(config.answering),
            "tokenizer": {"tokenizer_sha256": tokenizer_hash, **encoder.describe()},
            "sources": described,
        }
        folder = WorkFolder(config.out, plan, r"manifest\.json|part-\d+\.jsonl")
        documents = chain.from_iterable(read_documents(segment, record_format) for segment in segments)
        total = sum(segment.n_documents or 0 for segment in segments) or None
        with folder.opened(), tqdm(total=total, desc="answering", unit="conversation", mininterval=1) as progress:
            answering = _Answering(config, encoder, folder, progress)
            unfinished = _unfinished(documents, folder, progress)
            generate: Generate | None = None
            for number, part in unfinished:
                generate = generate or start()
                answering.begin(number, part)
                for completion in generate(answering.due):
                    answering.go_on(completion.index, completion)
                    # No prompt is waiting; add a task, so that the generator is not idle during the last long ones.
                    if not answering.due and (following := next(unfinished, None)):
                        answering.begin(*following)
            counts = add_up(folder.read_all(folder.tasks()))
        write_json(config.out / MANIFEST, counts)  # `prepare` reads no folder without it
    reasons = "".join(f", {why}: {number:,}" for why, number in counts["bad"].items())
    named = "".join(f"\n  {line}" for line in counts["bad_named"][:SHOWN_BAD])
    log(f"Answered: {counts['success']:,} of {counts['input']:,} conversations{reasons} -> {config.out}{named}")
    return counts


def _unfinished(documents: Iterator[Given], folder: WorkFolder, progress: tqdm) -> Iterator[tuple[int, list[Given]]]:
    """The numbers of the tasks without a record, each with its conversations."""
    for number, part in enumerate(iter(lambda: list(islice(documents, PART_SIZE)), [])):
        if folder.read(PART.format(number)) is None:
            yield number, part
        else:
            progress.update(len(part))


class _Answering:
    """The open conversations of all tasks that have begun, by index, and their waiting prompts. A task is written once
    all its conversations are finished.
    """

    def __init__(self, config: RegenerateConfig, encoder: ChatEncoder, folder: WorkFolder, progress: tqdm):
        self.due: Due = {}
        self._names: dict[int, dict[int, str]] = {}  # of each task's conversations
        self._answers: dict[int, Generator[tuple[list[int], int], Completion | None, dict]] = {}
        self._ends: dict[int, dict | Unusable] = {}
        self._config, self._encoder, self._folder, self._progress = config, encoder, folder, progress

    def begin(self, number: int, part: list[Given]) -> None:
        """Begin task `number` with these conversations."""
        of_task = dict(enumerate(part, start=number * PART_SIZE))
        self._names[number] = {index: document.name for index, document in of_task.items()}
        for index, document in of_task.items():
            self._answers[index] = answer(document, self._config, self._encoder)
            self.go_on(index, None)

    def go_on(self, index: int, completion: Completion | None) -> None:
        """Continue conversation `index` with its completion; None starts it."""
        try:
            self.due[index] = self._answers[index].send(completion)
            return
        except StopIteration as end:
            self._ends[index] = end.value
        except Unusable as error:
            self._ends[index] = error
        del self._answers[index]
        self._progress.update()
        number = index // PART_SIZE
        if self._ends.keys() >= self._names[number].keys():
            ends = [(name, self._ends.pop(i)) for i, name in self._names.pop(number).items()]
            _finish(PART.format(number), ends, self._folder)


def _finish(task: str, ends: Sequence[tuple[str, dict | Unusable]], folder: WorkFolder) -> None:
    """Write a task's good conversations and its record. ends: the name and the result of each conversation."""
    good = [json.dumps(end, ensure_ascii=False) + "\n" for _, end in ends if isinstance(end, dict)]
    bad = [(name, end.why, end.detail) for name, end in ends if isinstance(end, Unusable)]
    path, reasons = folder.path / f"{task}.jsonl", dict(Counter(why for _, why, _ in bad))
    named = [f"{name}: {why} {detail}".rstrip() for name, why, detail in bad[:SHOWN_BAD]]
    all_bad = len(ends) >= ENOUGH and list(reasons.values()) == [len(ends)]
    if all_bad and task == FIRST and not folder.tasks():
        folder.clear()  # nothing was done, so a call with other settings may begin here
        raise ValueError(
            f"none of the first {len(ends)} conversations can be used ({', '.join(reasons)}), so the call ends; "
            f"the first is {named[0]}"
        )
    if good:
        write_text(path, "".join(good))
    record = {"input": len(ends), "success": len(good), "bad": reasons, "bad_named": named}
    folder.write(task, record, [path] if good else [])


def answer(
    document: Given, config: RegenerateConfig, encoder: ChatEncoder
) -> Generator[tuple[list[int], int], Completion | None, dict]:
    """Answer a document's open turns: yields prompt and seed of each, and is sent its completion.

    Returns the record for `prepare`: {"messages", "source"}, the tools and the template's variables if there are any,
    and "unfinished" if the last answer was cut off. Raises Unusable.
    """
    if isinstance(document, Document) and config.beginning is not None:
        document = beginning(document, *config.beginning, rust_tokenizer(encoder.serialised))
    if not isinstance(document, Conversation):
        raise Unusable(*(document.why, document.detail) if isinstance(document, BadDocument) else ("not_a_list",))
    messages, turn, unfinished = list[Message](), 0, False
    for message in open_answers(document.messages):
        if message["content"] is None:
            prompt = encoder.encode_prompt(messages, document.tools, document.options)
            if len(prompt) > config.max_prompt:
                raise Unusable("prompt_too_long")
            completion = yield prompt, answer_seed(config.seed, document.messages, turn)
            assert completion is not None
            unfinished, turn = not completion.ended, turn + 1
            message = _checked(completion, config, encoder)
        messages.append(message)
        if unfinished:
            break
    record = {"messages": messages, "source": document.name}
    record |= {TOOLS: document.tools} if document.tools else {}
    record |= {OPTIONS: document.options} if document.options else {}
    return record | ({"unfinished": True} if unfinished else {})


def open_answers(messages: Sequence[Message]) -> list[Message]:
    """The messages with None as the content of every answer, except for calls with a tool's result; an answer is added
    after a last question or result. A greeting before the first question is kept. Raises Unusable if there is nothing
    to answer."""
    opened, open_answer = list[Message](), {"role": "assistant", "content": None}
    for i, message in enumerate(messages):
        has_result = messages[i + 1 : i + 2] and messages[i + 1]["role"] == "tool"
        opened.append(open_answer if message["role"] == "assistant" and i > 0 and not has_result else message)
    if messages and messages[-1]["role"] in ("user", "tool"):
        opened.append(open_answer)
    if open_answer not in opened:
        raise Unusable("no_user_turn")
    return opened


def beginning(document: Document, least: int, most: int, tokenizer: Tokenizer) -> Conversation:
    """A conversation whose question is the document's beginning of `least` to `most` tokens, a number chosen by the
    document's hash, and at least its first character. Raises Unusable if the document ends there.

    tokenizer: from `rust_tokenizer`."""
    count = least + int.from_bytes(document.digest[:8], "little") % (most - least + 1)
    text = document.text[: CHARACTERS_A_TOKEN * (count + 1)]
    following = tokenizer.encode(text, add_special_tokens=False).offsets[count:]
    end = next((start for start, _ in following if start > 0), None)
    if end is None:
        raise Unusable("too_short")
    messages = read_messages([{"role": "user", "content": text[:end]}], answered=False)
    return Conversation(document.name, messages_digest(messages), messages)


def answer_seed(seed: int, messages: Sequence[Message], turn: int) -> int:
    """The seed of an answer (unsigned, 64 bits), from the call's seed, the original conversation, and the number of
    answers before this one."""
    key = f"{seed}:{messages_digest(messages).hex()}:{turn}"
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")


def _checked(completion: Completion, config: RegenerateConfig, encoder: ChatEncoder) -> Message:
    """The answer as a message. Raises Unusable if `prepare` could not use it."""
    if completion.refused:
        raise Unusable("refused_by_server", completion.refused)
    if not completion.ended and not config.keep_unfinished:
        raise Unusable("unfinished")
    text = completion.text if completion.ended else completion.text.rstrip(NO_CHARACTER)
    if NO_CHARACTER in text or NONCHARACTERS.search(text):
        raise Unusable("not_text")
    of_channels = CONTROLLED.fullmatch(text) if completion.ended else None
    thought, text = (of_channels["thought"] or "", of_channels["content"]) if of_channels else ("", text)
    if not text.strip():
        raise Unusable("empty_answer")
    if found := [spelling for spelling in encoder.template.special if spelling in thought + text]:
        raise Unusable("special_token_in_answer", f"({found[0]})")
    # A template writes the blank before an answer itself, but the continuation of a text keeps its own.
    text = text.removeprefix(" ") if completion.ended and config.beginning is None else text
    return {"role": "assistant", "content": text} | ({REASONING: thought} if thought else {})
