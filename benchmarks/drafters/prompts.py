"""Questions from a suite or from any text: what is sent, turn by turn."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from longdraft.infer.requests import prompt_tokens
from longdraft.models.target import Target

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

    def prompt(self, target: Target | Reader, answers: Sequence[str] = ()) -> list[int]:
        """The token ids that the next answer follows. answers: those to the earlier turns."""
        turn, name, target = self.turns[len(answers)], f"question {self.id}", cast(Target, target)
        if isinstance(turn, str) or not isinstance(turn[0], Mapping):
            return prompt_tokens(target, turn, name)
        chat: list[Mapping[str, str]] = []
        for earlier, answer in zip(self.turns, answers, strict=False):
            chat += [*earlier, {"role": "assistant", "content": answer}]  # type: ignore[list-item]
        return prompt_tokens(target, [*chat, *turn], name)


def questions_of(texts: Sequence[list[int]]) -> list[Question]:
    """A question for each text, which asks to continue it. texts: token ids of the target's tokenizer."""
    return [Question(number, "continue", (text,)) for number, text in enumerate(texts, start=1)]


def stdlib_prompts(encode: Callable[[str], list[int]], n_tokens: int, count: int) -> list[list[int]]:
    """`count` evenly spaced stretches of `n_tokens` tokens from the source of Python's module textwrap."""
    tokens = encode(Path(textwrap.__file__).read_text(encoding="utf-8"))
    starts = [i * (len(tokens) - n_tokens) // count for i in range(count)]
    return [tokens[start : start + n_tokens] for start in starts]
