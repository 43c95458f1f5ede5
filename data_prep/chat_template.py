"""Renders conversations with a chat template, so that the template's special tokens and the content can be told apart.

A template is a Jinja program that comes with a model. It runs in Jinja's sandbox, with what transformers documents for
templates: trim_blocks, lstrip_blocks, loop controls, `{% generation %}` (whose marks are not used), `tojson`,
`raise_exception`, `strftime_now`, and the tokenizer's special tokens by name. `strftime_now` gives a fixed date, so
data does not depend on the day.

In the rendered text each special token that the template wrote is replaced by a placeholder, and the content of
messages is left as it is. Noncharacters (documents.py) mark places in the raw rendering.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from longdraft.data_prep.documents import Unusable

TODAY = datetime(2024, 7, 26)  # Llama 3.1's template falls back to this date where it has no clock
GUARD, ANSWER_END, EDGE = "\ufdd0", "\ufdd1", "\ufdd4"
PLACEHOLDER = re.compile(f"{EDGE}[0-9]+{EDGE}")


def placeholder(token: int) -> str:
    """The text that replaces the special token with this id."""
    return f"{EDGE}{token}{EDGE}"


class ChatTemplate:
    """A compiled template. It can be pickled.

    source: the template, Jinja. variables: names that it may use, such as bos_token, with their values. special: ids of
    the special tokens by their spelling. Raises ValueError if the source is not Jinja.
    """

    def __init__(self, source: str, variables: Mapping[str, str], special: Mapping[str, int]):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # Jinja's own escapes HTML
        environment.globals |= {"raise_exception": _refuse, "strftime_now": TODAY.strftime}
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"the chat template cannot be read: {error}") from error
        self.source, self.variables, self.special = source, dict(variables), dict(special)
        spelled = "|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)"
        self._starts = re.compile(f"(?=(?:{spelled}))(.)", re.DOTALL)
        self._written = re.compile(f"(?:{spelled})(?!{GUARD})")

    def __reduce__(self) -> tuple:
        return ChatTemplate, (self.source, self.variables, self.special)

    def guarded(self, messages: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """The messages for `render`, marked so that no special token in their content passes for the template's own."""
        return [(role, self._starts.sub(rf"\1{GUARD}", content)) for role, content in messages]

    def render(self, messages: Sequence[tuple[str, str]], prompt: bool = False) -> str:
        """The text of the conversation, with placeholders for special tokens.

        messages: as `guarded` returns them. prompt: whether to add the generation prompt. Raises Unusable if the
        template refuses or fails.
        """
        dicts = [{"role": role, "content": content} for role, content in messages]
        arguments = {"messages": dicts, "add_generation_prompt": prompt, "tools": None, "documents": None}
        try:
            raw = self._template.render(self.variables | arguments)
        except Exception as error:  # its own refusal, or any error of Python in its expressions
            what = f"{type(error).__name__}: {error}"
            raise Unusable("refused_by_template", f"is refused by the chat template ({what})") from None
        return self._written.sub(lambda found: placeholder(self.special[found[0]]), raw).replace(GUARD, "")


class _Generation(Extension):
    """{% generation %}...{% endgeneration %} encloses what the model writes; its content is rendered as it is."""

    tags = {"generation"}

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> None:
    raise TemplateError(message)
