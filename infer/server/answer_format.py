"""Splits a chat's answer into its thought, its text and its calls of tools, which OpenAI's interface keeps apart.

How a model writes them is declared by `response_template` in its tokenizer's configuration or, where that is missing,
recognised by what its chat template contains. transformers' parser reads both.
"""

import json
import re
import secrets
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

from longdraft.models.special_tokens import special_tokens

THOUGHT, CONTENT, CALLS = "reasoning_content", "content", "tool_calls"
THOUGHTS = (THOUGHT, "reasoning", "thinking")  # names of a thought in declared templates
PROMPT_END = 32  # tokens of a prompt in which its answer may be opened already, as by "<think>"
MOST_REFERENCES = 8  # of a schema, that are followed one to the next
JSON_TYPES: dict[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
JSON_TYPES |= {list: "array", dict: "object"}
CALL_ID = 9  # characters of a call's id: Mistral's templates take exactly these

Field = dict[str, Any]
_FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_START = r"(?:<\|start\|>assistant)?"  # gpt-oss's, before each part but the first


def _json_call(open_pattern: str, transform: Field = _FUNCTION, **field: Any) -> Field:
    readable = {"content": "json", "content_args": {"allow_non_json": True}, "repeats": True}
    return {"open_pattern": open_pattern, "transform": transform, **readable, **field}


class WrittenCalls(NamedTuple):
    """How calls are written that a grammar asks for (infer/server/answer_grammar.py).

    Attributes:
        call: a call, with its NAME and ARGUMENTS. other: another form; may be empty.
        parameter: one of its arguments, with KEY and VALUE, if each has tags of its own; else the arguments are JSON.
        around: what is before the first call, between two, and after the last. repeats: whether there may be several.
    """

    call: str
    parameter: str = ""
    around: tuple[str, str, str] = "", "", ""
    repeats: bool = True
    other: str = ""


def _xml_call(tag: str) -> WrittenCalls:
    call = f"<{tag}>\n<function=NAME>\nARGUMENTS</function>\n</{tag}>"
    return WrittenCalls(call, "<parameter=KEY>\nVALUE\n</parameter>\n", around=("", "\n", ""))


# Qwen3-Coder's, Qwen3.5's and Seed-OSS's. An argument is the text between its tags, without a line end at either side.
_XML: Field = {
    "open_pattern": r"\s*(?:<(?:seed:)?tool_call>\s*)?<function=(?P<name>[^>\n]+)>",
    "close_pattern": r"</function>\s*</(?:seed:)?tool_call>",
    "transform": _FUNCTION,
    "content": "xml-inline",
    "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
    "repeats": True,
}
# A mark of the chat template, how a thought is read then, and how it is written. The first entry that fits counts, here
# and below.
_THOUGHTS: list[tuple[str, Field, tuple[str, str, str]]] = [
    (
        "<|channel|>",
        {"open_pattern": _START + r"<\|channel\|>analysis<\|message\|>", "close": "<|end|>"},
        ("<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant"),
    ),
    ("</think>", {"open": "<think>", "close_pattern": r"\s*</think>"}, ("<think>", "</think>", "")),
    (
        "</seed:think>",
        {"open": "<seed:think>", "close_pattern": r"\s*</seed:think>"},
        ("<seed:think>", "</seed:think>", ""),
    ),
    ("[/THINK]", {"open": "[THINK]", "close_pattern": r"\s*\[/THINK\]"}, ("[THINK]", "[/THINK]", "")),
]
# Two marks of the chat template, how a call is read then, and how it is written.
_CALLS: list[tuple[str, str, Field, WrittenCalls]] = [
    (  # gpt-oss
        "<|channel|>",
        "functions.",
        _json_call(_START + r"(?:<\|channel\|>\w+)? to=functions\.(?P<name>[\w.-]+).*?<\|message\|>", close="<|call|>"),
        WrittenCalls(
            "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS",
            other=" to=functions.NAME<|channel|>commentary json<|message|>ARGUMENTS",
            repeats=False,
        ),
    ),
    ("<seed:tool_call>", "<parameter=", _XML, _xml_call("seed:tool_call")),
    ("<function=", "<parameter=", _XML, _xml_call("tool_call")),
    (  # Qwen2.5, QwQ, Qwen3, Hermes
        "<tool_call>",
        "</tool_call>",
        _json_call(r"\s*<tool_call>", {"type": "function", "function": "{content}"}, close="</tool_call>"),
        WrittenCalls('<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>', around=("", "\n", "")),
    ),
    (  # Mistral Small 3.2, Ministral 3, Devstral 2
        "[TOOL_CALLS]",
        "[ARGS]",
        _json_call(
            r"\s*\[TOOL_CALLS\]\s*(?P<name>[^\s\[{]+)\s*(?:\[CALL_ID\][^\[]*)?\[ARGS\]",
            close_pattern=r"(?=\[TOOL_CALLS\])",
        ),
        WrittenCalls("[TOOL_CALLS]NAME[ARGS]ARGUMENTS"),
    ),
    (  # Mistral's before, whose calls are one list
        "[TOOL_CALLS]",
        "[AVAILABLE_TOOLS]",
        _json_call(
            r"\s*\[TOOL_CALLS\]",
            {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
            transform_each=True,
            repeats=False,
        ),
        WrittenCalls('{"name": "NAME", "arguments": ARGUMENTS}', around=("[TOOL_CALLS][", ", ", "]")),
    ),
    (  # Llama 3, whose whole answer is one call
        "<|start_header_id|>",
        '"parameters": ',
        _json_call(
            r'(?:<\|python_tag\|>)?\s*\{\s*"name":\s*"(?P<name>[^"]+)",\s*"parameters":', close_pattern=r"\}\s*\Z"
        ),
        WrittenCalls('{"name": "NAME", "parameters": ARGUMENTS}', repeats=False),
    ),
]
# gpt-oss's header of a text, which is a part without text.
_HEADER: Field = {
    "open_pattern": _START + r"<\|channel\|>(?:final|commentary)(?: ?<\|constrain\|>\w+)?<\|message\|>",
    "close_pattern": "",
}


class WrittenAnswer(NamedTuple):
    """How an answer is written that a grammar asks for.

    Attributes:
        thought: what opens and closes a thought, and what comes after it, at least blanks; None: there is none, or it
            is not known.
        header: what comes before the text.
        calls: None: not known.
    """

    thought: tuple[str, str, str] | None = None
    header: str = ""
    calls: WrittenCalls | None = None


class AnswerFormat(NamedTuple):
    """How a target writes an answer.

    Attributes:
        has_calls: whether calls of tools are recognised.
        has_special: whether special tokens enclose the parts, so that the text must contain these tokens.
        written: how a grammar has it written.
    """

    template: ResponseTemplate
    has_calls: bool
    has_special: bool
    written: WrittenAnswer


@lru_cache(maxsize=8)
def answer_format(tokenizer: Any, with_tools: bool) -> AnswerFormat | None:
    """How the tokenizer's target writes an answer; None if it is text alone.

    with_tools: whether the prompt names tools. Otherwise what looks like a call is text.

    Raises ValueError for a declared format that transformers cannot read.
    """
    declared, written = getattr(tokenizer, "response_template", None), WrittenAnswer()
    if declared is None and tokenizer.chat_template:
        source = tokenizer.get_chat_template(tools=[{}] if with_tools else None)
        declared, written = _recognised(source, with_tools)
    if declared is None:
        return None
    try:
        template = load_response_template(declared)
    except ValueError as error:
        raise ValueError(f"tokenizer_config.json: response_template: {error}; correct it or remove it") from error
    if template.fields.keys() <= {CONTENT}:
        return None
    spelled = str(declared).replace("\\", "")
    has_special = any(one in spelled for one in special_tokens(tokenizer).values())
    return AnswerFormat(template, CALLS in template.fields, has_special, written)


def _recognised(source: str, with_tools: bool) -> tuple[dict[str, Any], WrittenAnswer]:
    """The response template for a chat template's source, and how to write it."""
    fields, thought, header, calls = dict[str, Field](), None, "", None
    if "<|channel|>" in source:
        fields["header"], header = _HEADER, "<|channel|>final<|message|>"
    fields[CONTENT] = {"close": "<|end|>"} if fields else {}
    for mark, field, around in _THOUGHTS:
        if mark in source:
            fields[THOUGHT], thought = field, around
            break
    for one, other, field, written in _CALLS if with_tools else ():
        if one in source and other in source:
            fields[CALLS], calls = field, written
            break
    # Of the prompt only a thought that it opens at its very end belongs to the answer.
    opened = re.escape(fields.get(THOUGHT, {}).get("open", "<think>"))
    template = {"start_anchor_pattern": rf"\A(?:.*(?={opened}\s*\Z)|.*)", "fields": fields}
    return template, WrittenAnswer(thought, header, calls)


def referred(kind: Any, schema: Mapping[str, Any]) -> Any:
    """What a part of a JSON schema refers to by `$ref`; the part itself if to nothing."""
    for _ in range(MOST_REFERENCES):
        reference = kind.get("$ref") if isinstance(kind, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        kind = schema
        for name in reference[2:].split("/"):
            kind = kind.get(name) if isinstance(kind, dict) else None
    return kind


def argument_types(kind: Any, schema: Mapping[str, Any]) -> list[str]:
    """The types in JSON of an argument that a JSON schema, which is part of `schema`, allows; empty if not known."""
    parts, found, seen = deque([kind]), list[Any](), set[int]()
    while parts:
        part = referred(parts.popleft(), schema)
        if not isinstance(part, dict) or id(part) in seen:  # parts may refer to each other
            continue
        seen.add(id(part))
        declared = part.get("type")
        found += declared if isinstance(declared, list) else [declared]
        unions = [part[name] for name in ("anyOf", "oneOf", "allOf") if isinstance(part.get(name), list)]
        parts.extend(chain.from_iterable(unions))
        if declared is None and not unions:
            values = part["enum"] if isinstance(part.get("enum"), list) else [part["const"]] if "const" in part else []
            found += [JSON_TYPES[type(value)] for value in values]
    return list(dict.fromkeys(one for one in found if isinstance(one, str)))


def typed(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool with the types of its arguments alone, which transformers' parser does not find behind references."""
    function = tool["function"]
    schema = function.get("parameters") or {}
    properties = schema.get("properties") if isinstance(schema, dict) else None
    given = properties.items() if isinstance(properties, dict) else ()
    types = {name: {"type": argument_types(kind, schema)} for name, kind in given}
    return {"type": "function", "function": {"name": function["name"], "parameters": {"properties": types}}}


class AnswerSplitter:
    """Splits an answer that grows into parts of a message: `reasoning_content`, `content` and `tool_calls`.

    What cannot be read, such as a call that breaks off, is content. Blanks at the start of a thought, and between it
    and the text after it, are dropped.

    Attributes:
        calls: the number of calls so far.

    Args:
        prompt: the prompt's token ids.
        tools: those that the prompt names, each from `typed`. They say which arguments that are written as text are
            numbers.
        most_calls: how many calls are kept; None: all.
    """

    def __init__(
        self,
        form: AnswerFormat,
        tokenizer: Any,
        prompt: Sequence[int],
        tools: Iterable[dict[str, Any]] = (),
        most_calls: int | None = None,
    ):
        end = tokenizer.decode(prompt[-PROMPT_END:], clean_up_tokenization_spaces=False)
        self._parser = ResponseParser(form.template, end, tools=[*tools])
        self._most_calls, self.calls = most_calls, 0
        self._drops_blanks = False
        self._part, self._of_call = "", ""  # the open part, and the text of a call that has not ended
        self._has_failed = False
        self._take(self._parser.initial_events, {})

    def push(self, text: str, ends: bool = False, is_whole: bool = True) -> dict[str, Any]:
        """The message's parts that the next text adds, as in a stream's `delta`.

        ends: whether no text will follow. is_whole: whether the answer then ended by itself, not by its length.
        """
        delta: dict[str, Any] = {}
        try:
            if self._has_failed:
                raise ValueError
            self._take(self._parser.feed(text), delta)
            text = ""
            if ends and self._part == CALLS and not is_whole:
                raise ValueError
            if ends:
                self._take(self._parser.finalize()[1], delta)
        except (ValueError, LookupError, TypeError, AttributeError):
            self._has_failed = True
            if rest := self._of_call + text:
                delta[CONTENT] = delta.get(CONTENT, "") + rest
            self._of_call = ""
        return delta

    def _take(self, events: Iterable[Mapping[str, Any]], delta: dict[str, Any]) -> None:
        for event in events:
            part = THOUGHT if event["field"] in THOUGHTS else event["field"]
            if event["type"] == "region_chunk":
                self._add(part, event["text"], delta)
                continue
            is_opened = event["type"] == "region_open"
            self._part = part if is_opened else ""
            self._drops_blanks = self._drops_blanks or part == THOUGHT
            if part == CALLS and not is_opened:
                self._end_calls(event["value"], delta)

    def _add(self, part: str, text: str, delta: dict[str, Any]) -> None:
        if part == CALLS:
            self._of_call += text
        elif part in (THOUGHT, CONTENT):
            text = text.lstrip() if self._drops_blanks else text
            self._drops_blanks = self._drops_blanks and not text
            if text:
                delta[part] = delta.get(part, "") + text

    def _end_calls(self, value: Any, delta: dict[str, Any]) -> None:
        """Add a call, or several in a list; as content if it is not written as one."""
        functions = [call["function"] for call in (value if isinstance(value, list) else [value])]
        if not all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in functions):
            self._add(CONTENT, self._of_call, delta)
            functions = []
        self._of_call = ""
        for function in functions[: None if self._most_calls is None else self._most_calls - self.calls]:
            arguments = function.get("arguments", {})
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            call = {"index": self.calls, "id": secrets.token_hex(CALL_ID)[:CALL_ID], "type": "function"}
            delta.setdefault(CALLS, []).append(call | {"function": {"name": function["name"], "arguments": text}})
            self.calls += 1
