"""Questions from a suite or from any text: what is sent, turn by turn, and which questions a target has room for.

A text can be continued, summarised, or copied with edits, because speculation depends on how much the output repeats.
"""

import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from longdraft.infer.requests import prompt_tokens
from longdraft.models.target import Target

KINDS = ("continue", "summarise", "edit")
Turn = str | Sequence[int] | Sequence[Mapping[str, str]]


class Reader(NamedTuple):
    """The part of a target that turns a prompt into token ids; it is there before the weights are loaded."""

    name: str
    tokenizer: Any


@dataclass(frozen=True)
class Question:
    """One conversation with a target.

    Attributes:
        task: figures are grouped by it. category: the suite's own name for it; "" means the task.
        turns: what is sent before each answer: a text, token ids, or messages that follow those of earlier turns and
            their answers.
    """

    id: int | str
    task: str
    turns: tuple[Turn, ...]
    category: str = ""

    def __post_init__(self):
        object.__setattr__(self, "category", self.category or self.task)

    def prompt(self, target: Target | Reader, answers: Sequence[str] = ()) -> list[int]:
        """The token ids that the next answer follows. answers: those to the earlier turns."""
        turn, name, target = self.turns[len(answers)], f"question {self.id}", cast(Target, target)
        if isinstance(turn, str) or not isinstance(turn[0], Mapping):
            return prompt_tokens(target, turn, name)
        chat: list[Mapping[str, str]] = []
        for earlier, answer in zip(self.turns, answers, strict=False):
            chat += [*earlier, {"role": "assistant", "content": answer}]  # type: ignore[list-item]
        return prompt_tokens(target, [*chat, *turn], name)


class LeftOut(NamedTuple):
    """A question that is not asked, with the length of its prompt and the reason in words."""

    id: int | str
    task: str
    tokens: int
    why: str


class Asked(NamedTuple):
    """A question that is asked, with the length of its first prompt."""

    question: Question
    tokens: int


@dataclass(frozen=True)
class PromptLimits:
    """Which prompts a target of `positions` positions is asked: those of more than `above` tokens that have at most
    `most` tokens after being cut to their first `first_tokens` (None: not cut)."""

    positions: int
    most: int
    above: int = 0
    first_tokens: int | None = None

    def why_not(self, tokens: int) -> str:
        """The reason why a prompt of `tokens` tokens is not asked; "" if it is."""
        if tokens <= self.above:
            return f"too short: more than {self.above} tokens are asked for"
        if min(tokens, self.first_tokens or tokens) > self.most:
            return f"too long: {self.most} of the target's {self.positions} positions are a prompt's"
        return ""


def fitting(
    target: Target | Reader, questions: Iterable[Question], limits: PromptLimits
) -> tuple[list[Asked], list[LeftOut]]:
    """Split questions into those whose first prompt fits, cut to `limits.first_tokens`, and those left out."""
    asked, left_out = [], []
    for question in questions:
        tokens = question.prompt(target)
        if why := limits.why_not(len(tokens)):
            left_out.append(LeftOut(question.id, question.task, len(tokens), why))
            continue
        if limits.first_tokens is not None:
            tokens = tokens[: limits.first_tokens]
            question = replace(question, turns=(tokens,))
        asked.append(Asked(question, len(tokens)))
    return asked, left_out


def named_with_tokens(left_out: Iterable[Mapping[str, Any]]) -> str:
    """Names of questions that were left out, each with the length of its prompt."""
    return ", ".join(f"{one['id']} ({one['tokens']} tokens)" for one in left_out)


def make_tasks(target: Target, texts: Sequence[list[int]], kinds: Sequence[str]) -> list[Asked]:
    """Make a question of each text, with the kinds of task taking turns.

    Args:
        texts: token ids of the target's tokenizer.
        kinds: from KINDS. All but "continue" need a tokenizer, and become chats if it has a chat template.

    Raises: ValueError for a task that needs a tokenizer if the target has none.
    """
    asked = []
    for i, text in enumerate(texts):
        kind = kinds[i % len(kinds)]
        tokens = make_task(target, text, kind)
        asked.append(Asked(Question(i + 1, kind, (tokens,)), len(tokens)))
    return asked


def make_task(target: Target, text: list[int], kind: str) -> list[int]:
    """Return the token ids that ask for one kind of task on one text."""
    if kind == "continue":
        return list(text)
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise ValueError(f"tasks: {kind} needs a tokenizer, and this target has none; use continue")
    words = tokenizer.decode(text, skip_special_tokens=True)
    if kind == "summarise":
        ask = f"Summarise the following text in a few sentences.\n\n{words}"
    else:
        old = most_frequent_name(words)
        ask = f"Repeat the following text word for word, but write new_{old} wherever it says {old}.\n\n{words}"
    if not tokenizer.chat_template:
        return tokenizer(f"{ask}\n\n").input_ids
    chat = [{"role": "user", "content": ask}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


def most_frequent_name(text: str) -> str:
    """The most frequent identifier or word of at least four letters, or the first of several."""
    found = Counter(re.findall(r"[A-Za-z_]{4,}", text)).most_common(1)
    return found[0][0] if found else "text"


def stdlib_prompts(encode: Callable[[str], list[int]], n_tokens: int, count: int) -> list[list[int]]:
    """`count` evenly spaced stretches of `n_tokens` tokens from the source of Python's module textwrap."""
    tokens = encode(Path(textwrap.__file__).read_text(encoding="utf-8"))
    starts = [i * (len(tokens) - n_tokens) // count for i in range(count)]
    return [tokens[start : start + n_tokens] for start in starts]
