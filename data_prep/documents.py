"""What sources contain: texts, conversations, and documents that cannot be used, with the reasons."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ROLES = ("system", "user", "assistant")
# What data sets call the three roles, in lower case: the names of OpenAI, ShareGPT and OpenAssistant.
SPEAKERS = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
}
# Fields in which chat data keeps what the assistant wrote besides `content`. It would be lost.
BESIDE_CONTENT = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
# Unicode reserves the first range for a program's internal use: chat_template.py marks places in a text with these. The
# second range is halves of surrogate pairs, which JSON can express and UTF-8 cannot.
NONCHARACTERS = re.compile("[\ufdd0-\ufdef\ud800-\udfff]")


@dataclass(frozen=True)
class Document:
    """A plain text. name: the file's name, with `:number` of the record if the file holds records. digest: the sha256
    of the text in UTF-8."""

    name: str
    digest: bytes
    text: str


@dataclass(frozen=True)
class Conversation:
    """A conversation. name: like a document's. messages: (role, content) in order; at least one is the assistant's if
    answers are to be learned. digest: a sha256 that decides whether it is held out. unfinished: the last answer was cut
    off, so its end must not be learned."""

    name: str
    digest: bytes
    messages: tuple[tuple[str, str], ...]
    unfinished: bool = False


@dataclass(frozen=True)
class BadDocument:
    """A document that cannot be used. digest: a sha256 that decides in which split it is counted. why: the reason, as
    the manifest counts it. detail: the cause and the fix, printed after the name; "" if `why` says everything.

    Reasons that need an explanation: too_short, a text to continue that is no longer than the prompt made of it;
    prompt_not_kept, a rendered answer that does not follow the prompt (which opens a thought that the answer lacks);
    answer_not_found, the template omitted the answer or repeated it; unfinished, an answer that did not end within the
    allowed tokens, so that a wrong end would be learned.
    """

    name: str
    digest: bytes
    why: str
    detail: str = ""


class Unusable(ValueError):
    """A document turns out to be unusable when it is read, answered or tokenised. why, detail: see BadDocument."""

    def __init__(self, why: str, detail: str = ""):
        super().__init__(why)
        self.why, self.detail = why, detail


def read_messages(value: Any, answered: bool = True) -> tuple[tuple[str, str], ...]:
    """Read the messages of a conversation as (role, content).

    value: a list of {"role": ..., "content": ...} or ShareGPT's {"from": "human", "value": ...}, where null fields
    count as absent; a list of texts, in which user and assistant alternate (UltraChat); or such a list as JSON text.
    answered: whether at least one answer is required; if not, answers will be replaced and may be null. Other fields of
    a message are ignored, but those of BESIDE_CONTENT are refused, except in answers to replace. Raises Unusable.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise Unusable("not_a_list") from None
    if isinstance(value, list) and all(isinstance(message, str) for message in value):
        value = [{"role": ROLES[1 + i % 2], "content": text} for i, text in enumerate(value)]
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        raise Unusable("not_a_list")
    messages = []
    for message in value:
        present = {field: found for field, found in message.items() if found is not None}
        speaker, content = present.get("role", present.get("from")), present.get("content", present.get("value"))
        role = SPEAKERS.get(str(speaker).lower())
        if role is None:
            detail = f"has a message by {ascii(speaker)[:40]}, which is neither system, user nor assistant"
            raise Unusable("unknown_role", detail)
        if role == "system" and content is None:
            continue
        is_replaced = role == "assistant" and not answered
        if any(message.get(field) for field in BESIDE_CONTENT) and not is_replaced:
            raise Unusable("answer_beside_content")
        text = "" if is_replaced and not isinstance(content, str) else _text(content)
        if role == "assistant" and answered and not text.strip():
            raise Unusable("empty_answer")
        messages.append((role, text))
    if answered and not any(role == "assistant" for role, _ in messages):
        raise Unusable("no_assistant_turn")
    return tuple(messages)


def _text(content: Any) -> str:
    """The text of a message's content: a text, or OpenAI's list of {"type": "text", "text": ...}. Raises Unusable."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    parts = parts if isinstance(parts, list) else []
    of_text = [part for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    texts = [part["text"] for part in of_text if isinstance(part.get("text"), str)]
    if not texts or len(texts) < len(parts):
        raise Unusable("content_not_text")
    text = "".join(texts)
    if NONCHARACTERS.search(text):
        raise Unusable("noncharacter")
    return text


def messages_digest(messages: Sequence[tuple[str, str]]) -> bytes:
    """The sha256 of a conversation's content, the same for all its copies."""
    return hashlib.sha256(json.dumps(messages, ensure_ascii=False).encode()).digest()
