"""Questions of a suite or of any text: what is sent, turn by turn, and which of them a target has room for.

Of a text three kinds are made, for speculation lives from what the output repeats: continue it, summarise it, copy it
with edits. Not here: the suites (suites.py).
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

from longdraft.infer.requests import prompt_tokens
from longdraft.models.target import Target

KINDS = ("continue", "summarise", "edit")
Turn = str | Sequence[int] | Sequence[Mapping[str, str]]


class Reader(NamedTuple):
    """What of a target makes token ids of a prompt, before its weights are loaded."""

    name: str
    tokenizer: Any


@dataclass(frozen=True)
class Question:
    """One conversation with a target.

    Attributes:
        task: what figures are grouped by. category: as its suite calls it; "" is the task.
        turns: what is sent before each answer: a text, token ids, or messages, before which those of the turns before
            and their answers stand.
    """

    id: int | str
    task: str
    turns: tuple[Turn, ...]
    category: str = ""

    def __post_init__(self):
        object.__setattr__(self, "category", self.category or self.task)

    def said(self) -> list[str]:
        """What the user says in each turn, as text; nothing of token ids."""
        texts = []
        for turn in self.turns:
            said = turn if isinstance(turn, str) else [m["content"] for m in turn if isinstance(m, Mapping)][-1:]
            texts.append("".join(said))
        return texts

    def prompt(self, target: Target | Reader, answers: Sequence[str] = ()) -> list[int]:
        """The token ids before the next answer, behind these of the turns before."""
        turn, name, target = self.turns[len(answers)], f"question {self.id}", cast(Target, target)
        if isinstance(turn, str) or not isinstance(turn[0], Mapping):
            return prompt_tokens(target, turn, name)
        chat: list[Mapping[str, str]] = []
        for said, answer in zip(self.turns, answers, strict=False):
            chat += [*said, {"role": "assistant", "content": answer}]  # type: ignore[list-item]
        return prompt_tokens(target, [*chat, *turn], name)


class LeftOut(NamedTuple):
    """A question that is not asked, and why, in words; tokens: of its prompt."""

    id: int | str
    task: str
    tokens: int
    why: str


class Asked(NamedTuple):
    """A question that is asked; tokens: of its first prompt."""

    question: Question
    tokens: int


@dataclass(frozen=True)
class Room:
    """Which prompts are asked: those of more than `above` tokens, of which the first `first_tokens` are taken (None:
    all), and of which at most `most` then have a place among the target's `positions`."""

    positions: int
    most: int
    above: int = 0
    first_tokens: int | None = None

    def why_not(self, tokens: int) -> str:
        """Why a prompt of so many tokens is not asked; "" where it is."""
        if tokens <= self.above:
            return f"too short: more than {self.above} tokens are asked for"
        if min(tokens, self.first_tokens or tokens) > self.most:
            return f"too long: {self.most} of the target's {self.positions} positions are a prompt's"
        return ""


def fitting(target: Target | Reader, questions: Iterable[Question], room: Room) -> tuple[list[Asked], list[LeftOut]]:
    """The questions whose first prompt has room, cut to `room.first_tokens`, and those left out."""
    asked, left_out = [], []
    for question in questions:
        tokens = question.prompt(target)
        if why := room.why_not(len(tokens)):
            left_out.append(LeftOut(question.id, question.task, len(tokens), why))
            continue
        if room.first_tokens is not None:
            tokens = tokens[: room.first_tokens]
            question = replace(question, turns=(tokens,))
        asked.append(Asked(question, len(tokens)))
    return asked, left_out


def make_tasks(target: Target, texts: Sequence[list[int]], kinds: Sequence[str]) -> list[Asked]:
    """Every kind of task in turn, each on the next text, until the texts are used up.

    Args:
        texts: token ids of the target's tokenizer.
        kinds: of KINDS; all but "continue" need a tokenizer, and are chats where it has a chat template. Raises:
            ValueError where there is none.
    """
    asked = []
    for i, text in enumerate(texts):
        kind = kinds[i % len(kinds)]
        tokens = make_task(target, text, kind)
        asked.append(Asked(Question(i + 1, kind, (tokens,)), len(tokens)))
    return asked


def make_task(target: Target, text: list[int], kind: str) -> list[int]:
    """The prompt of one task on one text."""
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
    """The identifier or word of four letters and more that comes most often, the first of equals."""
    found = Counter(re.findall(r"[A-Za-z_]{4,}", text)).most_common(1)
    return found[0][0] if found else "text"
