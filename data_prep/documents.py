"""What sources contain: texts, conversations, token ids, and documents that cannot be used, with the reasons."""

import ast
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ROLES = ("system", "user", "assistant")
# What data sets call the roles, in lower case: the names of OpenAI, ShareGPT, OpenAssistant and LLaMA-Factory.
SPEAKERS = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "ipython", "function-response", "tool_response"), "tool"),
}
CALLERS = ("function_call", "tool_call")  # speakers whose content is calls as a text: LLaMA-Factory's and ms-swift's
REASONING = "reasoning_content"  # what the assistant thought before its answer
WEIGHT = "weight"  # 0: the answer carries no loss
# A message as chat templates read it: `role` (system, user, assistant or tool) and `content`, a text. An answer may
# have `reasoning_content`, a text, and `tool_calls`: {"type": "function", "function": {"name", "arguments"}}, with an
# object of arguments, and a `weight` of 0; a tool's result may have `name` and `tool_call_id`.
Message = dict[str, Any]
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
    """A conversation. name: like a document's. messages: at least one is the assistant's if answers are to be learned.
    digest: a sha256 that decides whether it is held out. unfinished: the last answer was cut off, so its end must not
    be learned. tools: the functions that the assistant may call, as JSON schemas in OpenAI's form. options: further
    variables for the chat template."""

    name: str
    digest: bytes
    messages: tuple[Message, ...]
    unfinished: bool = False
    tools: tuple[dict[str, Any], ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenDocument:
    """Token ids of the target, int32 [n]. name: like a document's. digest: a sha256 that decides whether it is held
    out. spans: (start, stop) of each span of ids that the loss counts."""

    name: str
    digest: bytes
    tokens: np.ndarray
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class BadDocument:
    """A document that cannot be used. digest: a sha256 that decides in which split it is counted. why: the reason, as
    the manifest counts it. detail: the cause and the fix, printed after the name; "" if `why` says everything.

    Reasons that need an explanation: too_short, a text to continue that is no longer than the prompt made of it;
    prompt_not_kept, a rendered answer that does not follow the prompt (which opens a thought that the answer lacks);
    answer_not_found, the template omitted the answer or repeated it; answer_beside_content, it omitted reasoning, a
    tool call, or the content beside one; unfinished, an answer that did not end within the allowed tokens, so that a
    wrong end would be learned.
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


def read_messages(value: Any, answered: bool = True, system: str = "") -> tuple[Message, ...]:
    """Read the messages of a conversation.

    value: a list of OpenAI's {"role": ..., "content": ...} or ShareGPT's {"from": "human", "value": ...}, where null
    fields count as absent; a list of texts, in which user and assistant alternate (UltraChat); or such a list as JSON
    text. answered: whether at least one answer is required; if not, an answer will be replaced and may be anything,
    unless a tool's result follows. system: the system message of a list without one. Fields that `Message` does not
    have are ignored. Raises Unusable.
    """
    value = _parsed(value, list, "not_a_list")
    if all(isinstance(message, str) for message in value):
        value = [{"role": ROLES[1 + i % 2], "content": text} for i, text in enumerate(value)]
    if not value or not all(isinstance(message, dict) for message in value):
        raise Unusable("not_a_list")
    given = _with_calls([{field: found for field, found in message.items() if found is not None} for message in value])
    roles = [_role(message) for message in given]
    if system and roles[0] != "system":
        given, roles = [{"content": system}, *given], ["system", *roles]
    messages = []
    for message, role, following in zip(given, roles, [*roles[1:], ""], strict=True):
        content = message.get("content", message.get("value"))
        if role == "system" and content is None:
            continue
        if role == "assistant" and not answered and following != "tool":
            messages.append({"role": role, "content": content if isinstance(content, str) else ""})
        elif role == "assistant":
            messages.append(_answer(message, content))
        else:
            fields = ("name", "tool_call_id") if role == "tool" else ()
            kept = {field: message[field] for field in fields if isinstance(message.get(field), str)}
            messages.append({"role": role, "content": _text(content), **kept})
    if answered and "assistant" not in roles:
        raise Unusable("no_assistant_turn")
    return tuple(messages)


def _with_calls(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, in which the calls of a speaker in CALLERS belong to the answer before them, or are one."""
    joined = list[dict[str, Any]]()
    for message in given:
        if _speaker(message).lower() in CALLERS:
            answer = joined.pop() if joined and _role(joined[-1]) == "assistant" else {"role": "assistant"}
            calls = [answer.get("tool_calls") or [], message.get("content", message.get("value"))]
            message = answer | {"tool_calls": calls}
        joined.append(message)
    return joined


def _speaker(message: dict[str, Any]) -> str:
    return str(message.get("role", message.get("from")))


def _role(message: dict[str, Any]) -> str:
    role = SPEAKERS.get(_speaker(message).lower())
    if role is None:
        detail = f"has a message by {ascii(_speaker(message))[:40]}, which is neither system, user, assistant nor tool"
        raise Unusable("unknown_role", detail)
    return role


def _answer(message: dict[str, Any], content: Any) -> Message:
    """An answer with its reasoning and tool calls."""
    thought = next((message[field] for field in (REASONING, "reasoning", "thinking") if message.get(field)), None)
    calls = _calls(message.get("tool_calls")) + _calls(message.get("function_call"))
    text = "" if calls and not content else _text(content)
    if not calls and not text.strip():
        raise Unusable("empty_answer")
    answer = {"role": "assistant", "content": text} | ({} if thought is None else {REASONING: _text(thought)})
    return answer | ({"tool_calls": calls} if calls else {}) | ({WEIGHT: 0} if message.get(WEIGHT) == 0 else {})


def _calls(given: Any, nulls: bool = False) -> list[dict[str, Any]]:
    """Tool calls: one, a list, or either as a text, of which nulls are kept. Nothing is an empty list."""
    found = _literal(given) if given and isinstance(given, str) else given
    nulls = nulls or isinstance(given, str)
    if not found or isinstance(found, list):
        return [call for one in found or [] for call in _calls(one, nulls)]
    return [_call(found, nulls)]


def _literal(text: str) -> Any:
    """The value of JSON text or, as Toucan's calls are written, of a Python literal. Raises Unusable."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise Unusable("not_tool_calls") from None


def _call(call: Any, nulls: bool) -> dict[str, Any]:
    """A tool call, given in OpenAI's form or as its function alone, with its arguments (Llama: parameters) as an object
    or JSON text."""
    function = _function(call, "not_tool_calls")
    given = function.get("arguments", function.get("parameters"))
    arguments = _plain(_parsed(given, dict, "not_tool_calls"), nulls or isinstance(given, str))
    number = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**number, "type": "function", "function": {"name": _text(function["name"]), "arguments": arguments}}


def read_tools(value: Any) -> tuple[dict[str, Any], ...]:
    """Read the functions that the assistant may call: a list of JSON schemas, each in OpenAI's form or of the function
    alone, or such a list as JSON text. Raises Unusable."""
    tools = []
    for given in _parsed(value, list, "not_tools"):
        function = _function(_parsed(given, dict, "not_tools"), "not_tools")
        function = _plain(function, nulls=isinstance(value, str) or isinstance(given, str))
        tools.append({"type": "function", "function": function})
    return tuple(tools)


def read_options(value: Any) -> dict[str, Any]:
    """Read further variables for the chat template: an object, or one as JSON text. Raises Unusable."""
    return _plain(_parsed(value, dict, "not_options"), nulls=False)


def _function(given: Any, why: str) -> dict[str, Any]:
    """The function of a tool or a call. Raises Unusable(why) if it has no name."""
    function = (given.get("function") or given) if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise Unusable(why)
    return function


def _parsed(value: Any, kind: type, why: str) -> Any:
    """A list or an object (`kind`), or one as JSON text; nothing is an empty one. Raises Unusable(why)."""
    try:
        found = (json.loads(value) if value and isinstance(value, str) else value) or kind()
    except (ValueError, RecursionError):
        raise Unusable(why) from None
    if not isinstance(found, kind):
        raise Unusable(why)
    return found


def _plain(value: Any, nulls: bool) -> Any:
    """A JSON value, without the null fields of its objects unless `nulls`: in a table every object has the fields of
    all others. Raises Unusable for a text with a noncharacter, or a value that JSON does not have."""
    if isinstance(value, dict):
        return {_text(name): _plain(field, nulls) for name, field in value.items() if nulls or field is not None}
    if isinstance(value, list):
        return [_plain(element, nulls) for element in value]
    if isinstance(value, str):
        return _text(value)
    if value is not None and not isinstance(value, int | float):
        detail = f"has a {type(value).__name__}, which the table's writer made of a text"
        raise Unusable("not_json", detail)
    return value


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


def messages_digest(messages: Sequence[Message]) -> bytes:
    """The sha256 of a conversation's content, the same for all its copies."""
    fields = [[*message.values()] for message in messages]
    return hashlib.sha256(json.dumps(fields, ensure_ascii=False).encode()).digest()
