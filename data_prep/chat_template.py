"""Renders conversations with a chat template and tokenises them, distinguishing the template's special tokens from the
same spellings in the content.

A template is a Jinja program that comes with a model. It runs in Jinja's sandbox with the features that transformers
documents for templates: trim_blocks, lstrip_blocks, loop controls, `{% generation %}` (whose marks are not used),
`tojson`, `raise_exception`, `strftime_now`, and the tokenizer's special tokens by name. `strftime_now` gives a fixed
date, so that data does not depend on the day.

In the rendered text, a placeholder replaces each special token that the template wrote; the content of messages is
unchanged. For ChatTokenizer the placeholders are the only special tokens. Noncharacters (documents.py) mark places in
the raw rendering.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer

from longdraft.data_prep.documents import REASONING, Message, Unusable

TODAY = datetime(2024, 7, 26)  # Llama 3.1's template falls back to this date if it has no clock
GUARD, ANSWER_END, EDGE = "\ufdd0", "\ufdd1", "\ufdd4"
BORDER = "\ufdd5"  # in a text to tokenise: no token crosses it
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
        # A quick test of the first character, since there may be a thousand special tokens to try.
        begins = f"(?=[{re.escape(''.join(sorted({one[0] for one in special})))}])" if special else ""
        self._starts = re.compile(f"{begins}(?=(?:{spelled}))(.)", re.DOTALL)
        self._written = re.compile(f"{begins}(?:{spelled})(?!{GUARD})")

    def __reduce__(self) -> tuple:
        return ChatTemplate, (self.source, self.variables, self.special)

    def guarded(self, value: Any) -> Any:
        """Messages, tools or options for `render`, in which no special token in a text is taken for the template's."""
        if isinstance(value, dict):
            return {self.guarded(name): self.guarded(field) for name, field in value.items()}
        if isinstance(value, list | tuple):
            return [self.guarded(element) for element in value]
        return self._starts.sub(rf"\1{GUARD}", value) if isinstance(value, str) else value

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict] = (),
        options: Mapping[str, Any] | None = None,
        prompt: bool = False,
    ) -> str:
        """The text of the conversation, with placeholders for special tokens.

        messages, tools, options: as `guarded` returns them. prompt: whether to add the generation prompt. Raises
        Unusable if the template refuses or fails.
        """
        # gpt-oss's template has another name for the reasoning.
        named = [one | ({"thinking": one[REASONING]} if REASONING in one else {}) for one in messages]
        arguments = {"messages": named, "add_generation_prompt": prompt, "tools": tools or None, "documents": None}
        try:
            raw = self._template.render(self.variables | dict(options or {}) | arguments)
        except Exception as error:  # the template's own refusal, or any Python error in its expressions
            what = f"{type(error).__name__}: {error}"
            raise Unusable("refused_by_template", f"is refused by the chat template ({what})") from None
        return self._written.sub(lambda found: placeholder(self.special[found[0]]), raw).replace(GUARD, "")


class _Generation(Extension):
    """{% generation %}...{% endgeneration %} encloses what the model writes; its content is rendered unchanged."""

    tags = {"generation"}

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> None:
    raise TemplateError(message)


class Encoding(NamedTuple):
    """ids: ChatTokenizer's own token ids. begins, ends: the range of characters of each token. All int64 [n]."""

    ids: np.ndarray
    begins: np.ndarray
    ends: np.ndarray


class ChatTokenizer:
    """The target's tokenizer with placeholders in place of its special tokens, so that no text can spell one.

    serialised: the target's Rust tokenizer as JSON. eos_id: has a placeholder even if it is not a special token.
    """

    def __init__(self, serialised: str, eos_id: int):
        state = json.loads(serialised)
        added = state["added_tokens"]
        state |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
        self._rust = Tokenizer.from_str(json.dumps(state))
        target_ids, tokens = {BORDER: -1}, [AddedToken(BORDER, normalized=False)]
        for token in added:
            flags = {name: token[name] for name in ("lstrip", "rstrip", "normalized", "single_word")}
            spelling = token["content"]
            if token["special"]:
                spelling, flags = placeholder(token["id"]), flags | {"normalized": False, "single_word": False}
            target_ids[spelling] = token["id"]
            tokens.append(AddedToken(spelling, **flags))
        if placeholder(eos_id) not in target_ids:
            target_ids[placeholder(eos_id)] = eos_id
            tokens.append(AddedToken(placeholder(eos_id), normalized=False))
        self._rust.add_tokens(tokens)
        self._target_ids = np.arange(max(self._rust.get_vocab(with_added_tokens=True).values()) + 1)
        for spelling, target_id in target_ids.items():
            self._target_ids[self._rust.token_to_id(spelling)] = target_id

    def encode(self, text: str) -> Encoding:
        encoding = self._rust.encode(text, add_special_tokens=False)
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        return Encoding(np.array(encoding.ids, dtype=np.int64), offsets[:, 0], offsets[:, 1])

    def finish(self, encoding: Encoding) -> tuple[np.ndarray, np.ndarray]:
        """(The target's ids without borders, int32 [m]; how many of the first 0, 1, ..., n tokens remain, [n + 1])."""
        ids = self._target_ids[encoding.ids]
        kept = ids >= 0
        return ids[kept].astype(np.int32), np.concatenate([[0], np.cumsum(kept)])
