"""What a source gives: documents of plain text, conversations, and what cannot be used with the reason.

Not here: where they stand (sources.py), tokens (tokenize.py, chat.py).
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ROLES = ("system", "user", "assistant")
SPEAKERS = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
# Where chat data keeps what the assistant wrote besides `content`; a conversation with one of them would lose it.
BESIDE_CONTENT = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
# Unicode keeps these for a program's own use: chat.py marks places in a text with them.
NONCHARACTERS = re.compile("[\ufdd0-\ufdef]")

BAD_DOCUMENT = (
    "empty",
    "bad_utf8",
    "bad_json",
    "bad_csv",
    "bad_syntax",
    "missing_field",
    "field_not_text",
    "not_token_ids",
    "not_spans",
)
BAD_CONVERSATION = (
    "not_a_list",  # the field holds something else, or the list something else than messages
    "unknown_role",
    "content_not_text",
    "answer_beside_content",
    "no_assistant_turn",
    "noncharacter",
    "refused_by_template",  # two assistants in a row, a system message where the model has none
    "prompt_not_kept",  # the generation prompt is no beginning of the rendered answer (it opens a thought, for one)
    "answer_not_found",  # the template left the answer out, or repeated it
    "special_token_in_text",  # the tokenizer makes a control token of plain text, whatever it is told
)
BAD_REASONS = (*BAD_DOCUMENT, *BAD_CONVERSATION)


@dataclass(frozen=True)
class Document:
    """`name` is the file's name, for JSONL with `:line`; `digest` is the sha256 of the text in UTF-8."""

    name: str
    digest: bytes
    text: str

    @property
    def n_bytes(self) -> int:
        return len(self.text.encode())


@dataclass(frozen=True)
class Conversation:
    """`messages`: (role, content) in order, at least one of them the assistant's where answers are to be learned.

    `name` as a document's; `digest` the sha256 of what decides on which side of the held-out split it comes.
    """

    name: str
    digest: bytes
    messages: tuple[tuple[str, str], ...]

    @property
    def n_bytes(self) -> int:
        return sum(len(content.encode()) for _, content in self.messages)


@dataclass(frozen=True)
class BadDocument:
    """A document that cannot be used; `why` is one of BAD_REASONS, `digest` the sha256 of the raw bytes.

    detail: what is wrong and what mends it, in words that follow the name; "" where `why` says it all."""

    name: str
    digest: bytes
    why: str
    detail: str = ""


class Unusable(ValueError):
    """Found while a document is read or tokenised: it cannot be used; `why` is one of BAD_REASONS.

    detail: as BadDocument's. field: that is missing, with "missing_field"."""

    def __init__(self, why: str, detail: str = "", field: str | None = None):
        assert why in BAD_REASONS, why
        super().__init__(why)
        self.why, self.detail, self.field = why, detail, field


def check_messages(value: Any, answered: bool = True) -> tuple[tuple[str, str], ...]:
    """(role, content) of a conversation as JSON has it: a list of {"role": ..., "content": ...}, or, as ShareGPT has
    it, of {"from": "human", "value": ...}.

    answered: there must be an answer; without, prompts alone do. Other fields of a message are left aside, but for
    those of BESIDE_CONTENT. Raises Unusable.
    """
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise Unusable("not_a_list")
    if not value:
        raise Unusable("empty")
    messages = []
    for message in value:
        role, content = message.get("role"), message.get("content")
        if "from" in message and "role" not in message:
            role, content = SPEAKERS.get(str(message["from"])), message.get("value")
        if role not in ROLES:
            raise Unusable("unknown_role")
        if any(message.get(field) for field in BESIDE_CONTENT):
            raise Unusable("answer_beside_content")
        if not isinstance(content, str):
            raise Unusable("content_not_text")
        if NONCHARACTERS.search(content):
            raise Unusable("noncharacter")
        try:
            content.encode()
        except UnicodeEncodeError:  # JSON can spell half a surrogate pair, UTF-8 cannot
            raise Unusable("bad_utf8") from None
        messages.append((role, content))
    if answered and not any(role == "assistant" for role, _ in messages):
        raise Unusable("no_assistant_turn")
    return tuple(messages)


def messages_digest(messages: Sequence[tuple[str, str]]) -> bytes:
    """sha256 of a conversation's own content, so that its copies have the same."""
    return hashlib.sha256(json.dumps(messages, ensure_ascii=False).encode()).digest()
