"""Renders conversations with a chat template, and finds the places in the text that chat.py needs for the loss.

A template is a Jinja program that comes with a model. It runs in Jinja's sandbox, with what transformers documents for
templates: trim_blocks, lstrip_blocks, loop controls, `{% generation %}`, `tojson`, `raise_exception`, `strftime_now`,
and the tokenizer's special tokens by name. `strftime_now` gives a fixed date, so data does not depend on the day.

In the rendered text each special token that the template wrote is replaced by a placeholder, and the content of
messages is left as it is, so the two can be told apart. Noncharacters (documents.py) mark places in the raw rendering.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from longdraft.data_prep.documents import Unusable

TODAY = datetime(2024, 7, 26)  # Llama 3.1's template falls back to this date where it has no clock
GUARD, ANSWER_END, OPEN, CLOSE, EDGE = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3", "\ufdd4"
MARKS = re.compile(f"([{GUARD}{ANSWER_END}{OPEN}{CLOSE}])")
PLACEHOLDER = re.compile(f"{EDGE}[0-9]+{EDGE}")
# What a template raises if it does not fit a conversation: its own refusal, or a Python error in its expressions.
REFUSALS = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)


def placeholder(token: int) -> str:
    """The text that replaces the special token with this id."""
    return f"{EDGE}{token}{EDGE}"


@dataclass(frozen=True)
class Rendered:
    """A rendered conversation. Places count characters of the text.

    text: with placeholders for special tokens. marked: (start, stop) of each {% generation %} block of the template.
    answer_ends: where the place `mark_at` of the last content is, once for each time that the template wrote it.
    """

    text: str
    marked: list[tuple[int, int]]
    answer_ends: list[int]


class ChatTemplate:
    """A compiled template. It can be pickled.

    source: the template, Jinja. variables: names that it may use, such as bos_token, with their values. special: ids of
    the special tokens by their spelling. Raises ValueError if the source is not Jinja.
    """

    def __init__(self, source: str, variables: Mapping[str, str], special: Mapping[str, int]):
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise ValueError(f"the chat template cannot be read: {error}") from error
        self.source, self.variables, self.special = source, dict(variables), dict(special)
        spelled = "|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)"
        self._starts = re.compile(f"(?=(?:{spelled}))(.)", re.DOTALL)
        self._written = re.compile(f"(?:{spelled})(?!{GUARD})")
        self.marks_answers = re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None

    def __reduce__(self) -> tuple:
        return ChatTemplate, (self.source, self.variables, self.special)

    def guarded(self, messages: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """The messages for `render`, marked so that no special token in their content passes for the template's own."""
        return [(role, self._starts.sub(rf"\1{GUARD}", content)) for role, content in messages]

    def render(self, messages: Sequence[tuple[str, str]], prompt: bool = False, mark_at: int | None = None) -> Rendered:
        """Render the conversation.

        messages: as `guarded` returns them. prompt: whether to add the generation prompt. mark_at: a place in the last
        content, to be found in the text (`Rendered.answer_ends`). Raises Unusable if the template refuses or fails.
        """
        dicts = [{"role": role, "content": content} for role, content in messages]
        if mark_at is not None:
            content = dicts[-1]["content"]
            dicts[-1]["content"] = content[:mark_at] + ANSWER_END + content[mark_at:]
        arguments = {"messages": dicts, "add_generation_prompt": prompt, "tools": None, "documents": None}
        try:
            raw = self._template.render(self.variables | arguments)
        except REFUSALS as error:
            what = f"{type(error).__name__}: {error}"
            raise Unusable("refused_by_template", f"is refused by the chat template ({what})") from None
        return _read_marks(self._written.sub(lambda found: placeholder(self.special[found[0]]), raw))


def _read_marks(raw: str) -> Rendered:
    """Remove the marks from the raw rendering, and note their places."""
    parts = MARKS.split(raw)  # texts, and a mark between each two
    texts, marks = parts[::2], parts[1::2]
    places: dict[str, list[int]] = {GUARD: [], ANSWER_END: [], OPEN: [], CLOSE: []}
    for mark, place in zip(marks, accumulate(map(len, texts)), strict=False):
        places[mark].append(place)
    marked = [(start, stop) for start, stop in zip(places[OPEN], places[CLOSE], strict=True) if start < stop]
    return Rendered("".join(texts), marked, places[ANSWER_END])


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _refuse, "strftime_now": TODAY.strftime}
    return environment


class _Generation(Extension):
    """{% generation %}...{% endgeneration %} encloses what the model writes. It is rendered between OPEN and CLOSE."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_between"), [], [], body).set_lineno(line)

    def _between(self, caller: Callable[[], str]) -> str:
        return f"{OPEN}{caller()}{CLOSE}"


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    """JSON as transformers writes it, without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)
