"""Questions for a target, from any text or from a published suite, whose source, files and answer length are here.

A suite is an entry of SUITES and a function that makes a question from a record; fields are validated as they are read.
Suites of a paper's table use the literal prompts of its code, the others the target's own chat template.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, NamedTuple, cast

from pydantic import Field, Json, Strict
from typing_extensions import TypedDict

from longdraft.data_prep.recipe import Source
from longdraft.data_prep.records import Segment, numbered_records
from longdraft.data_prep.sources import list_files
from longdraft.infer.requests import prompt_tokens
from longdraft.models.schema import Str, validate
from longdraft.models.target import Target

# From LongSpec's code for LongBench (inference_long-bench.py): the prompt around the text of each task.
_SYSTEM = "<s>system\nYou are a helpful assistant</s>\n<s>user\n"
_CODE = "Please complete the code given below. \n{context}Now, complete the code given.</s>\n<s>assistant\n"
LONGBENCH = {
    "gov_report": (
        "You are given a report by a government agency. Write a one-page summary of the report.\n\n"
        "Report:\n{context}\n\nNow, write a one-page summary of the report.</s>\n<s>assistant\nSummary:"
    ),
    "qmsum": (
        "You are given a meeting transcript and a query containing a question or instruction. "
        "Answer the query in one or more sentences.\n\nTranscript:\n{context}\n\n"
        "Now, answer the query based on the above meeting transcript in one or more sentences.\n\n"
        "Query: {input}</s>\n<s>assistant\nAnswer:"
    ),
    "multi_news": (
        "You are given several news passages. Write a one-page summary of all news. \n\n"
        "News:\n{context}\n\nNow, write a one-page summary of all the news.</s>\n<s>assistant\nSummary:"
    ),
    "lcc": _CODE,
    "repobench-p": _CODE,
}
# From LongSpec's code for QwQ (inference_qwq.py).
AIME = (
    "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
AIME24_IDS = range(60, 90)
# TokenSwift's code (main.py) skips the front matter of each book, and takes the first ten books.
PG19_FROM, PG19_BOOKS = 5000, 10
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")

Text = Annotated[str, Strict(), Field(pattern=r"\S")]  # not blank
Texts = Annotated[list[Text], Field(min_length=1)]
Id = Annotated[int, Strict()] | Text
Turn = str | Sequence[int] | Sequence[Mapping[str, str]]


class Reader(NamedTuple):
    """The part of a target that turns a prompt into token ids; available before the weights are loaded."""

    name: str
    tokenizer: Any


@dataclass(frozen=True)
class Question:
    """One conversation with a target.

    Attributes:
        task: the group of its figures. category: the suite's own name for it; "" means the task.
        turns: what is sent before each answer: a text, token ids, or messages that follow those of earlier turns and
            their answers.
    """

    id: int | str
    task: str
    turns: tuple[Turn, ...]
    category: str = ""

    def prompt(self, target: Target | Reader, answers: Sequence[str] = ()) -> list[int]:
        """The token ids of the next turn's prompt. answers: those to the earlier turns."""
        turn, name, target = self.turns[len(answers)], f"question {self.id}", cast(Target, target)
        if isinstance(turn, str) or not isinstance(turn[0], Mapping):
            return prompt_tokens(target, turn, name)
        chat: list[Mapping[str, str]] = []
        for earlier, answer in zip(self.turns, answers, strict=False):
            chat += [*earlier, {"role": "assistant", "content": answer}]  # type: ignore[list-item]
        return prompt_tokens(target, [*chat, *turn], name)


def questions_of(texts: Sequence[list[int]]) -> list[Question]:
    """One question for each text: to continue it. texts: token ids of the target's tokenizer."""
    return [Question(number, "continue", (text,)) for number, text in enumerate(texts, start=1)]


class Message(TypedDict):
    """A message of a chat; further keys are dropped."""

    role: Literal["system", "user", "assistant"]
    content: Str


Messages = Annotated[list[Message], Field(min_length=1)]


class Row(NamedTuple):
    """A record of a suite's file.

    Attributes:
        file: the file's name. number: of the record, from 1.
    """

    file: str
    number: int
    fields: dict[str, Any]

    @property
    def stem(self) -> str:
        """The file's name without suffix; for a file called test, as specdec_bench writes them, its folder's name."""
        path = PurePosixPath(self.file)
        stem = path.name.partition(".")[0]
        return path.parent.name if stem == "test" and path.parent.name else stem

    def read(self, name: str, kind: Any) -> Any:
        """A field's value as one of the types above. Raises ValueError that names file, record and field."""
        return validate(kind, self.fields.get(name), f"--data: {self.file}, record {self.number}, {name}")


@dataclass(frozen=True)
class Suite:
    """A suite: its files, and how its questions are asked.

    Attributes:
        source: where the files can be found.
        files: patterns of file names.
        read: makes a question from a record, or returns None for a record that is not part of the suite.
        new_tokens: the most tokens of an answer. ignore_eos: whether answers continue after an end token.
        sampling: further keywords for SamplingParams.
        above: texts must have more tokens than this and than `first_tokens`. spare: positions of the target that a
            prompt must leave free (None: `new_tokens`).
        first_tokens: how many of a text's first tokens are the prompt; None: all of them.
    """

    source: str
    files: tuple[str, ...]
    read: Callable[[Row], Question | None]
    new_tokens: int
    sampling: Mapping[str, Any] = field(default_factory=dict)
    ignore_eos: bool = False
    above: int = 0
    spare: int | None = None
    first_tokens: int | None = None

    def questions(self, data: str, only: Sequence[str] = ()) -> list[Question]:
        """Read the questions from a folder, a file or a data set on the hub.

        only: tasks, categories, or file names without suffix; () means all.

        Raises: ValueError for files that are missing or not in the suite's layout, and for an unknown name in `only`.
        """
        found, names = dict[int | str, Question](), set()  # a question in several files is asked once
        try:
            files = list_files([Source(path=data, files=(*self.files, *(f"*/{name}" for name in self.files)))])
        except ValueError as error:
            reason = str(error).removesuffix("; name others with --files")
            raise ValueError(f"--data: {reason}; the files come from {self.source}") from error
        for row in (Row(file.name, *numbered) for file in files for numbered in numbered_records(Segment(file))):
            if not isinstance(row.fields, dict):
                raise ValueError(f"--data: {row.file}, record {row.number} is not a JSON object")
            if (question := self.read(row)) is not None:
                own_names = {question.task, question.category or question.task, row.stem}
                names |= own_names
                if not only or own_names & set(only):
                    found[question.id] = question
        if unknown := sorted(set(only) - names):
            raise ValueError(f"--only: {', '.join(unknown)} unknown; the data has {', '.join(sorted(names))}")
        if not found:
            raise ValueError(f"--data: {data} has no question of this suite; its files come from {self.source}")
        return list(found.values())

    def fitting(
        self, target: Target | Reader, questions: Iterable[Question], positions: int, new_tokens: int
    ) -> tuple[list[Question], list[str]]:
        """The questions whose first prompt fits a target with this many positions, cut to `first_tokens`; and the names
        of the others, with the number of their prompts' tokens, which are too few or too many."""
        most = positions - max(self.spare or 0, new_tokens)
        asked, omitted = [], []
        for question in questions:
            tokens = question.prompt(target)
            cut = tokens[: self.first_tokens]
            if len(tokens) <= max(self.above, self.first_tokens or 0) or len(cut) > most:
                omitted.append(f"{question.id} ({len(tokens)} tokens)")
            else:
                asked.append(question if self.first_tokens is None else replace(question, turns=(cut,)))
        return asked, omitted


def _chats(texts: Iterable[str]) -> tuple[list[dict[str, str]], ...]:
    """One turn, of one message, for each text."""
    return tuple([{"role": "user", "content": text}] for text in texts)


def _longbench(row: Row) -> Question:
    filled = LONGBENCH[row.stem].replace("{context}", row.read("context", Text))
    if "{input}" in filled:
        filled = filled.replace("{input}", row.read("input", Text))
    return Question(row.fields.get("_id", f"{row.stem}-{row.number}"), row.stem, (_SYSTEM + filled,))


def _aime24(row: Row) -> Question | None:
    number = row.read("id", int)
    return Question(number, "aime24", (AIME.format(row.read("problem", Text)),)) if number in AIME24_IDS else None


def _pg19(row: Row) -> Question | None:
    if row.number > PG19_BOOKS:
        return None
    return Question(row.number - 1, "pg19", (row.read("text", Text)[PG19_FROM:],))


def _spec_bench(row: Row) -> Question:
    category = row.read("category", Text)
    task = "mt_bench" if category in MT_BENCH else category
    return Question(row.read("question_id", Id), task, _chats(row.read("turns", Texts)), category)


def _mt_bench(row: Row) -> Question:
    return Question(row.read("question_id", Id), row.read("category", Text), _chats(row.read("turns", Texts)))


def _speed_bench(row: Row) -> Question:
    if row.fields.get("messages") is None:
        turns = _chats(row.read("turns", Texts))
    else:  # a turn ends with a user message
        messages = row.read("messages", Messages)
        ends = [0, *(i for i, message in enumerate(messages, start=1) if message["role"] == "user")]
        turns = tuple(messages[start:end] for start, end in pairwise(ends))
    subset, category = row.stem.partition("-")[0], row.read("category", Text)
    return Question(row.read("question_id", Id), category, turns, f"{subset}/{category}")


def _mrcr(row: Row) -> Question:
    task = f"{row.read('n_needles', int)}needle"
    return Question(f"{row.stem}-{row.number}", task, (row.read("prompt", Json[Messages]),))


SUITES: dict[str, Suite] = {
    "longbench": Suite(
        "data.zip of the data set zai-org/LongBench, unpacked",
        tuple(f"{task}.jsonl" for task in LONGBENCH),
        _longbench,
        new_tokens=1024,
        above=1200,
        spare=2000,
    ),
    "aime24": Suite(
        "the data set AI-MO/aimo-validation-aime",
        ("*.parquet", "*.jsonl"),
        _aime24,
        new_tokens=20000,
    ),
    "pg19": Suite(
        "data/pg19/pg19-test.json of github.com/bigai-nlco/TokenSwift",
        ("pg19-test.json",),
        _pg19,
        new_tokens=102400,
        sampling={"temperature": 1.0, "min_p": 0.1, "contextual_penalty": 1.2, "contextual_window": 1024},
        ignore_eos=True,
        first_tokens=4096,
    ),
    "spec-bench": Suite(
        "data/spec_bench/question.jsonl of github.com/hemingkx/Spec-Bench",
        ("question.jsonl",),
        _spec_bench,
        new_tokens=1024,
    ),
    "speed-bench": Suite(
        "`prepare_data.py` of specdec_bench (github.com/NVIDIA/Model-Optimizer), which fills in nvidia/SPEED-Bench",
        ("*.jsonl", "*.parquet"),
        _speed_bench,
        new_tokens=4096,
    ),
    "mrcr": Suite(
        "the data set openai/mrcr",
        ("?needle*.parquet",),
        _mrcr,
        new_tokens=1024,
    ),
    "mt-bench": Suite(
        "fastchat/llm_judge/data/mt_bench/question.jsonl of github.com/lm-sys/FastChat",
        ("question.jsonl",),
        _mt_bench,
        new_tokens=1024,
    ),
}
