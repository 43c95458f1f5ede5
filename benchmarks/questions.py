"""Questions of a suite or of any text: what is sent, turn by turn, and which of them a target has room for.

Not here: where they come from (suites.py, tasks.py).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

from longdraft.infer.requests import prompt_tokens
from longdraft.models.target import Target

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
