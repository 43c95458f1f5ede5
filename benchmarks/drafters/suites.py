"""Published suites of prompts: their source, the layout of their files, the questions, and the length of answers.

A suite is an entry of SUITES and a function that makes a question from a record. Suites that belong to a paper's table
use its program's literal prompts, the others the target's own chat template.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from longdraft.benchmarks.drafters.prompts import PromptLimits, Question
from longdraft.benchmarks.drafters.suite_files import Id, Message, Messages, Number, Row, Text, Texts, read_rows

# From LongSpec's program for LongBench (inference_long-bench.py): the prompt around the text of each task.
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
# From LongSpec's program for QwQ (inference_qwq.py).
AIME = (
    "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
AIME24_IDS = range(60, 90)
# TokenSwift's program (main.py) skips the front matter of each book, and takes the first ten books.
PG19_FROM, PG19_BOOKS = 5000, 10
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"


@dataclass(frozen=True)
class Suite:
    """A suite: its files and how it is asked.

    Attributes:
        title: for people. source: where the files can be found.
        files: patterns of file names. The first pattern that matches is read; with `all_files` each must match.
        read: makes a question from a record, or returns None for a record that is not part of the suite.
        new_tokens: the most tokens of an answer. ignore_eos: whether answers continue after an end token.
        sampling: further keywords for SamplingParams.
        above, spare: a prompt has more than `above` tokens, and leaves at least `spare` of the target's positions free
            (None: `new_tokens`).
        first_tokens: the number of tokens of a text that are the prompt; None: all of them.
    """

    title: str
    source: str
    files: tuple[str, ...]
    read: Callable[[Row], Question | None]
    new_tokens: int
    sampling: Mapping[str, Any] = field(default_factory=dict)
    ignore_eos: bool = False
    all_files: bool = False
    above: int = 0
    spare: int | None = None
    first_tokens: int | None = None

    def questions(self, data: str, only: Sequence[str] = ()) -> list[Question]:
        """Read the questions from a folder, a file or a data set on the hub.

        only: tasks, categories, or files' names without ending; () means all.

        Raises: ValueError for files that are missing or not in the suite's layout, and for an unknown name in `only`.
        """
        needed = tuple(file for file in self.files if file.partition(".")[0] in only) if self.all_files else ()
        found, names, ids = [], set(), set()
        for row in read_rows(data, needed or self.files, self.all_files, self.source):
            question = self.read(row)
            if question is None:
                continue
            if question.id in ids:
                raise row.wrong("id", f"{question.id!r} stands there a second time; give each once")
            ids.add(question.id)
            own_names = {question.task, question.category, row.stem}
            names |= own_names
            found += [question] if not only or own_names & set(only) else []
        if unknown := sorted(set(only) - names):
            raise ValueError(f"--only: {', '.join(unknown)} unknown; the data has {', '.join(sorted(names))}")
        if not found:
            raise ValueError(f"--data: {data} has no question of {self.title}; its files come from {self.source}")
        return found

    def room(self, positions: int, new_tokens: int) -> PromptLimits:
        """Which prompts a target with this many positions is asked."""
        spare = new_tokens if self.spare is None else max(self.spare, new_tokens)
        return PromptLimits(positions, positions - spare, self.above, self.first_tokens)


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _chat(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [message.model_dump() for message in messages]


def _longbench(row: Row) -> Question:
    filled = LONGBENCH[row.stem].replace("{context}", row.read("context", Text))
    if "{input}" in filled:
        filled = filled.replace("{input}", row.read("input", Text))
    return Question(row.fields.get("_id", f"{row.stem}-{row.number}"), row.stem, (_SYSTEM + filled,))


def _aime24(row: Row) -> Question | None:
    number = row.read("id", Number)
    return Question(number, "aime24", (AIME.format(row.read("problem", Text)),)) if number in AIME24_IDS else None


def _pg19(row: Row) -> Question | None:
    if row.number > PG19_BOOKS:
        return None
    return Question(row.number - 1, "pg19", (row.read("text", Text)[PG19_FROM:],))


def _spec_bench(row: Row) -> Question:
    category = row.read("category", Text)
    task = "mt_bench" if category in MT_BENCH else category
    return Question(row.read("question_id", Id), task, tuple(map(_user, row.read("turns", Texts))), category)


def _mt_bench(row: Row) -> Question:
    """A record in FastChat's layout, or in that of a table on the hub (HuggingFaceH4/mt_bench_prompts)."""
    turns, number = ("prompt", "prompt_id") if "turns" not in row and "prompt" in row else ("turns", "question_id")
    return Question(row.read(number, Id), row.read("category", Text), tuple(map(_user, row.read(turns, Texts))))


def _speed_bench(row: Row) -> Question:
    if "messages" in row:
        turns: list[list[dict[str, str]]] = [[]]
        for message in _chat(row.read("messages", Messages)):
            turns[-1].append(message)
            if message["role"] == "user":
                turns.append([])
        turns = [turn for turn in turns if turn and turn[-1]["role"] == "user"]
    else:
        turns = [_user(text) for text in row.read("turns", Texts)]
    if any(PLACEHOLDER in message["content"] for turn in turns for message in turn):
        raise row.wrong("turns", "a placeholder; specdec_bench's prepare_data.py fills in the text")
    subset, category = row.stem.partition("-")[0], row.read("category", Text)
    return Question(row.read("question_id", Id), category, tuple(turns), f"{subset}/{category}")


def _mrcr(row: Row) -> Question:
    try:
        messages = json.loads(row.read("prompt", Text))
    except json.JSONDecodeError:
        raise row.wrong("prompt", "no JSON; give a JSON list of messages") from None
    task = f"{row.read('n_needles', Number)}needle"
    return Question(f"{row.stem}-{row.number}", task, (_chat(row.checked("prompt", Messages, messages)),))


SUITES: dict[str, Suite] = {
    "longbench": Suite(
        "LongBench v1, five tasks (LongSpec, table 1)",
        "data.zip of the data set zai-org/LongBench, unpacked",
        tuple(f"{task}.jsonl" for task in LONGBENCH),
        _longbench,
        new_tokens=1024,
        all_files=True,
        above=1200,
        spare=2000,
    ),
    "aime24": Suite(
        "AIME 2024 (LongSpec)",
        "the data set AI-MO/aimo-validation-aime",
        ("*.parquet", "*.jsonl"),
        _aime24,
        new_tokens=20000,
    ),
    "pg19": Suite(
        "PG-19, long generation (TokenSwift)",
        "data/pg19/pg19-test.json of github.com/bigai-nlco/TokenSwift",
        ("pg19-test.json",),
        _pg19,
        new_tokens=102400,
        sampling={"temperature": 1.0, "min_p": 0.1, "contextual_penalty": 1.2, "contextual_window": 1024},
        ignore_eos=True,
        above=4096,
        first_tokens=4096,
    ),
    "spec-bench": Suite(
        "Spec-Bench",
        "data/spec_bench/question.jsonl of github.com/hemingkx/Spec-Bench",
        ("question.jsonl",),
        _spec_bench,
        new_tokens=1024,
    ),
    "speed-bench": Suite(
        "SPEED-Bench",
        "`prepare_data.py` of specdec_bench (github.com/NVIDIA/Model-Optimizer), which fills in nvidia/SPEED-Bench",
        ("*.jsonl", "*.parquet"),
        _speed_bench,
        new_tokens=4096,
    ),
    "mrcr": Suite(
        "MRCR, by context",
        "the data set openai/mrcr",
        ("?needle*.parquet",),
        _mrcr,
        new_tokens=1024,
    ),
    "mt-bench": Suite(
        "MT-Bench",
        "fastchat/llm_judge/data/mt_bench/question.jsonl of github.com/lm-sys/FastChat",
        ("question.jsonl", "*.parquet"),
        _mt_bench,
        new_tokens=1024,
    ),
}
