"""What is read from sources: documents of plain text, conversations, and what cannot be used with the reason.

Not here: how they are read (segments.py, record_formats.py), tokens (tokenize.py, chat.py).
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
    "no_user_turn",
    "answer_unasked",  # an assistant's turn without a user's since the last one: a greeting, two answers in a row
    "too_short",  # a text to continue that is all beginning
    "noncharacter",
    "refused_by_template",  # two assistants in a row, a system message where the model has none
    "prompt_not_kept",  # the generation prompt is no beginning of the rendered answer (it opens a thought, for one)
    "answer_not_found",  # the template left the answer out, or repeated it
    "special_token_in_text",  # the tokenizer makes a control token of plain text, whatever it is told
)
BAD_ANSWER = (  # of what the target is asked, and what it writes (responses.py)
    "prompt_too_long",  # it leaves no position for an answer
    # No end within the new tokens allowed or the target's positions: a wrong end would be learned. Where answers that
    # were cut are kept, one that the template makes another text of.
    "unfinished",
    "empty_answer",  # blanks at most
    "not_text",  # tokens that are no whole characters, or Unicode's noncharacters
    "special_token_in_answer",  # a control token before the end
)
BAD_REASONS = (*BAD_DOCUMENT, *BAD_CONVERSATION, *BAD_ANSWER)


@dataclass(frozen=True)
class Document:
    """A plain text. name: the file's name, with `:number` of the record where it holds several. digest: the sha256 of
    the text in UTF-8."""

    name: str
    digest: bytes
    text: str

    @property
    def n_bytes(self) -> int:
        return len(self.text.encode())


@dataclass(frozen=True)
class Conversation:
    """A conversation. name: as a document's. messages: (role, content) in order; at least one is the assistant's where
    answers are to be learned. digest: the sha256 of what decides on which side of the held-out split it comes.
    unfinished: the last answer was cut, and what would end it is not to be learned."""

    name: str
    digest: bytes
    messages: tuple[tuple[str, str], ...]
    unfinished: bool = False

    @property
    def n_bytes(self) -> int:
        return sum(len(content.encode()) for _, content in self.messages)


@dataclass(frozen=True)
class BadDocument:
    """A document that cannot be used. digest: the sha256 of its raw bytes. why: one of BAD_REASONS. detail: a predicate
    for the name that says what is wrong and what mends it; "" where `why` says it all."""

    name: str
    digest: bytes
    why: str
    detail: str = ""


class Unusable(ValueError):
    """A document that is being read, answered or tokenised cannot be used. why, detail: as BadDocument's. field: the
    one that is missing, where `why` is "missing_field"."""

    def __init__(self, why: str, detail: str = "", field: str | None = None):
        assert why in BAD_REASONS, why
        super().__init__(why)
        self.why, self.detail, self.field = why, detail, field


def check_messages(value: Any, answered: bool = True) -> tuple[tuple[str, str], ...]:
    """The messages, as (role, content), of a list of {"role": ..., "content": ...}, or, as ShareGPT writes them, of
    {"from": "human", "value": ...}.

    answered: whether at least one answer is needed. Other fields of a message are ignored, but those of BESIDE_CONTENT
    are refused. Raises Unusable.
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
    """The sha256 of a conversation's own content, which all its copies have."""
    return hashlib.sha256(json.dumps(messages, ensure_ascii=False).encode()).digest()
