"""Messages as published data sets have them, each with the conversation they become, or the reason why they are bad."""

import json
import os
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longdraft.data_prep.documents import BadDocument, Conversation
from longdraft.data_prep.formats import ChatFormat, QuestionAnswerFormat
from longdraft.data_prep.prepare import prepare
from longdraft.data_prep.recipe import PrepareConfig, Source
from longdraft.data_prep.records import read_documents, scan
from longdraft.data_prep.regenerate import open_answers
from longdraft.data_prep.sources import list_files

SYSTEM, USER, ANSWER = ("system", "Be brief."), ("user", "Why?"), ("assistant", "So.")
MORE = (("user", "And?"), ("assistant", "No."))
ONE = (USER, ANSWER)


def openai(*messages, **fields):
    """Pairs of role and content as messages; what is one already stays as it is."""
    given = [one if isinstance(one, dict) else dict(zip(("role", "content"), one, strict=True)) for one in messages]
    return [message | fields for message in given]


def sharegpt(*messages, **fields):
    return [{"from": speaker, "value": value, **fields} for speaker, value in messages]


def part(text, **fields):
    return {"type": "text", "text": text, **fields}


def call(arguments, **fields):
    return {"type": "function", "function": {"name": "f", "arguments": arguments}, **fields}


def calling(*calls, content="", **fields):
    return {"role": "assistant", "content": content, "tool_calls": [*calls], **fields}


F, RESULT = {"name": "f", "arguments": {"a": 1}}, ("tool", "1")
CALLED = calling(call({"a": 1}))
HUMAN, GPT = ("human", "Why?"), ("gpt", "So.")
BOTH = {"role": None, "content": None, "from": None, "value": None}
WILDCHAT = {"language": "English", "redacted": False, "toxic": False, "country": None, "turn_identifier": 1}
IMAGE = {"type": "image"}

CASES = {
    "UltraChat 200k, no_robots, Tulu 3": (openai(USER, ANSWER, *MORE), (*ONE, *MORE)),
    "WildChat": (openai(USER, ANSWER, **WILDCHAT), ONE),
    "OpenHermes 2.5": (sharegpt(SYSTEM, HUMAN, GPT, weight=None), (SYSTEM, *ONE)),
    "OpenThoughts": (sharegpt(USER, ANSWER), ONE),
    **{
        f"ShareGPT, {speaker}": (sharegpt((human, "Why?"), (speaker, "So."), markdown=None, text=None), ONE)
        for human, speaker in (("human", "gpt"), ("user", "chatgpt"), ("human", "bing"), ("human", "bard"))
    },
    "ShareGPT, begun in the middle": (sharegpt(GPT, HUMAN, GPT), (ANSWER, *ONE)),
    "OpenAssistant's roles": (openai(("prompter", "Why?"), ANSWER), ONE),
    "OpenAI's developer": (openai(("developer", "Be brief."), USER, ANSWER), (SYSTEM, *ONE)),
    "Gemma's roles": (openai(USER, ("model", "So.")), ONE),
    "roles in capitals": (openai(("User", "Why?"), ("Assistant", "So.")), ONE),
    "UltraChat": (["Why?", "So.", "And?", "No."], (*ONE, *MORE)),
    "UltraChat, a question at the end": (["Why?", "So.", "And?"], (*ONE, MORE[0])),
    "UltraChat as JSON text": ('["Why?", "So."]', ONE),
    "Orca-AgentInstruct, JSON text": (json.dumps(openai(SYSTEM, USER, ANSWER)), (SYSTEM, *ONE)),
    "keys of two styles, OpenAI's": ([BOTH | message for message in openai(SYSTEM, USER, ANSWER)], (SYSTEM, *ONE)),
    "keys of two styles, mixed": ([BOTH | openai(USER)[0], BOTH | sharegpt(GPT)[0]], ONE),
    "API log, parts": (openai(("user", [part("Wh"), part("y?")]), ("assistant", [part("So.")])), ONE),
    "API log, null fields": (openai(*[(role, [part(text, image_url=None)]) for role, text in ONE]), ONE),
    "API log, empty fields": (openai(*ONE, tool_calls=None, refusal=None, annotations=[], reasoning_content=""), ONE),
    "OpenAI's weights": (
        openai(USER, {"role": "assistant", "content": "So.", "weight": 0}, MORE[0], dict(openai(MORE[1])[0], weight=1)),
        (USER, {"role": "assistant", "content": "So.", "weight": 0}, *MORE),
    ),
    "null system message": (openai(("system", None), USER, ANSWER), ONE),
    "null answer": (openai(USER, ("assistant", None)), "content_not_text"),
    "empty answer": (openai(USER, ("assistant", " \n"), *MORE), "empty_answer"),
    "null question": (openai(("user", None), ANSWER), "content_not_text"),
    "null messages": (None, "not_a_list"),
    "image": (openai(("user", [part("Why?"), IMAGE]), ("assistant", [part("So.")])), "content_not_text"),
    "no part": (openai(("user", []), ("assistant", [part("So.")])), "content_not_text"),
    "Hermes function calling": (
        sharegpt(HUMAN, ("gpt", "<tool_call>"), RESULT, GPT),
        (USER, ("assistant", "<tool_call>"), RESULT, ANSWER),
    ),
    "APIGen-MT": (
        sharegpt(HUMAN, ("function_call", json.dumps(F)), ("observation", "1"), GPT),
        (USER, CALLED, RESULT, ANSWER),
    ),
    "ms-swift, Toucan's SFT": (
        openai(
            USER,
            ("assistant", "Hm."),
            ("tool_call", json.dumps(F)),
            ("tool_call", str({"name": "f", "arguments": '{"a": 1}'})),
            ("tool_response", "1"),
            ("tool_response", "1"),
            ANSWER,
        ),
        (USER, calling(call({"a": 1}), call({"a": 1}), content="Hm."), RESULT, RESULT, ANSWER),
    ),
    "LLaMA-Factory, several calls": (
        sharegpt(HUMAN, ("function_call", '[{"name": "f", "arguments": {"a": null}}, {"name": "f"}]')),
        (USER, calling(call({"a": None}), call({}))),
    ),
    "SWE-Gym, no part beside a call": (
        openai(("user", [part("Why?")]), calling(call({"a": 1}), content=[]), ("tool", [part("1")])),
        (USER, CALLED, RESULT),
    ),
    "a speaker of calls that says something else": (sharegpt(HUMAN, ("Function_Call", "Hm.")), "not_tool_calls"),
    "a speaker of calls that says nothing": (sharegpt(HUMAN, ("function_call", None)), "content_not_text"),
    "function-calling ChatML": (sharegpt(HUMAN, ("function-response", "1"), GPT), (USER, RESULT, ANSWER)),
    "Llama 3.1's tool results": (openai(USER, ("ipython", "1"), ANSWER), (USER, RESULT, ANSWER)),
    "OpenAI's tool calls": (
        openai(
            USER,
            calling(call('{"a": 1, "b": null}', id="1"), content=None),
            {"role": "tool", "content": "1", "name": "f", "tool_call_id": "1"},
            calling(call("{}"), content="So."),
        ),
        (
            USER,
            calling(call({"a": 1, "b": None}, id="1")),
            {"role": "tool", "content": "1", "name": "f", "tool_call_id": "1"},
            calling(call({}), content="So."),
        ),
    ),
    "calls and arguments that are JSON's null": (
        openai(
            USER,
            calling() | {"tool_calls": json.dumps([call("null")])},
            RESULT,
            calling(content="So.") | {"tool_calls": "null"},
        ),
        (USER, calling(call({})), RESULT, ANSWER),
    ),
    "OpenAI's function call": (
        openai(USER, {"role": "assistant", "content": None, "function_call": F}, ("function", "1"), ANSWER),
        (USER, CALLED, RESULT, ANSWER),
    ),
    "calls without a type, with the fields of all": (
        openai(USER, calling({"function": {"name": "f", "arguments": {"a": 1, "b": None}}}), RESULT, ANSWER),
        (USER, CALLED, RESULT, ANSWER),
    ),
    "Llama's calls": (openai(USER, calling({"name": "f", "parameters": {"a": 1}}), ANSWER), (USER, CALLED, ANSWER)),
    "calls as JSON text": (openai(USER, calling() | {"tool_calls": json.dumps([F])}, ANSWER), (USER, CALLED, ANSWER)),
    "a call's arguments that are cut": (openai(USER, calling(call('{"a": 1'))), "not_tool_calls"),
    "a call's arguments that are a list": (openai(USER, calling(call("[1]"))), "not_tool_calls"),
    "a call without a name": (openai(USER, calling({"function": {"name": None, "arguments": "1"}})), "not_tool_calls"),
    "a call of no function": (
        openai(USER, calling() | {"function_call": {"name": "f", "function": [1]}}),
        "not_tool_calls",
    ),
    "a number for calls": (openai(USER, calling() | {"tool_calls": 3}), "not_tool_calls"),
    "a noncharacter in a call": (openai(USER, calling(call({"a": "\ufdd1"}))), "noncharacter"),
    **{
        f"{field} beside the answer": (
            openai(USER, {"role": "assistant", "content": "So.", field: "Hm."}),
            (USER, {"role": "assistant", "content": "So.", "reasoning_content": "Hm."}),
        )
        for field in ("reasoning_content", "reasoning", "thinking")
    },
    "reasoning without an answer": (openai(USER, ("assistant", ""), reasoning="Hm."), "empty_answer"),
    "Capybara, pairs": ([{"input": "Why?", "output": "So."}], "unknown_role"),
    "a text": ("Why? So.", "not_a_list"),
    "JSON text of something else": ('{"role": "user"}', "not_a_list"),
    "numbers": ([1, 2], "not_a_list"),
    "a noncharacter": (openai(USER, ("assistant", "\ufdd1")), "noncharacter"),
    "no message": ([], "not_a_list"),
    "a question alone": (openai(USER), "no_assistant_turn"),
}


def read(tmp_path, row, stored, record_format):
    path = tmp_path / f"rows.{stored}"
    if stored == "parquet":
        pq.write_table(pa.Table.from_pylist([row]), path)
    else:
        path.write_text(json.dumps(row) + "\n")
    _, segments = scan(list_files([Source(path=str(path))]), 1 << 20)
    (document,) = (one for segment in segments for one in read_documents(segment, record_format))
    return document


INSTRUCTION = QuestionAnswerFormat("{instruction}\n\n{input}", "{output}")  # Alpaca's, Dolly's


@pytest.mark.parametrize("stored", ["jsonl", "parquet"])
@pytest.mark.parametrize("given", ["", None, "three"])
def test_an_instruction_may_have_no_input(tmp_path, stored, given):
    row = {"instruction": "Name primes.", "input": given, "output": "2, 3, 5"}
    found = read(tmp_path, row, stored, INSTRUCTION)
    assert [*found.messages] == openai(("user", f"Name primes.\n\n{given or ''}"), ("assistant", "2, 3, 5"))
    assert read(tmp_path, row | {"output": ""}, stored, INSTRUCTION).why == "empty_answer"
    assert read(tmp_path, row | {"instruction": "", "input": ""}, stored, INSTRUCTION).why == "empty"


def test_odd_characters_of_roles_and_names_end_nothing(tmp_path, tiny_tokenizer):
    """A half of a surrogate pair in JSON, and bytes of a file's name that are no UTF-8."""
    row = {"messages": openai(("\ud800", "Why?"))}
    assert read(tmp_path, row, "jsonl", ChatFormat("messages")).why == "unknown_role"
    (texts := tmp_path / "texts").mkdir()
    for i in range(40):
        (texts / os.fsdecode(b"caf\xe9%d.txt" % i)).write_text(f"{i} words " * 30)
    sources = {"a": Source(path=str(texts)), "b": Source(path=str(tmp_path / "rows.jsonl"), chat_field="messages")}
    settings = {"heldout_share": 0.5, "chat_template": Path("plain")}
    manifest = prepare(PrepareConfig(sources=sources, out=tmp_path / "out", seq_len=16, **settings), tiny_tokenizer, "")
    assert sum(split["documents"] for split in manifest["splits"].values()) == 40
    assert r"caf\\xe97.txt" in (tmp_path / "out" / "plan.json").read_text()


@pytest.mark.parametrize(
    "answer",
    [
        {"content": None},
        {},
        {"content": None, "tool_calls": 3},
        {"content": "So.", "reasoning_content": "Hm."},
        {"content": [IMAGE]},
    ],
    ids=["null", "absent", "calls", "reasoning", "image"],
)
def test_an_answer_that_the_target_replaces_need_not_be_readable(tmp_path, answer):
    row = {"messages": [*openai(USER), {"role": "assistant", **answer}, *openai(MORE[0])]}
    document = read(tmp_path, row, "jsonl", ChatFormat("messages", answered=False))
    assert isinstance(document, Conversation)
    answers = ("assistant", None), ("assistant", None)
    assert open_answers(document.messages) == openai(USER, answers[0], MORE[0], answers[1])


def test_the_calls_before_a_result_are_kept_with_what_was_said_before_them(tmp_path):
    said = openai(USER, ("assistant", "Hm."), *[("tool_call", json.dumps(F))] * 2, ("tool_response", "1"), ANSWER)
    document = read(tmp_path, {"messages": said}, "jsonl", ChatFormat("messages", answered=False))
    assert isinstance(document, Conversation)
    calls = calling(call({"a": 1}), call({"a": 1}), content="Hm.")
    assert open_answers(document.messages) == openai(USER, calls, RESULT, ("assistant", None))


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"a": {"type": "string", "default": None}}}}
BARE = {"name": "f", "parameters": {"a": {"type": "string"}}}
SMOLTALK2 = {"custom_instructions": None, "enable_thinking": False, "xml_tools": ["{}"]}
# A record's other fields, and what of the conversation they become, or the reason why they are bad.
FIELDS = [
    *(({"tools": [tool]}, "tools", [{"type": "function", "function": BARE}]) for tool in (TOOL, BARE)),
    *(({"tools": tools}, "tools", [TOOL]) for tools in (json.dumps([TOOL]), [json.dumps(TOOL)])),
    *(({"tools": none}, "tools", []) for none in (None, "", "[]", "null")),
    *(({"tools": wrong}, "tools", "not_tools") for wrong in (["f"], "f", [{"type": "function", "function": None}], 3)),
    # ToolACE, APIGen-MT, OpenThoughts
    ({"system": "Be brief.", "messages": sharegpt(HUMAN, GPT)}, "messages", openai(SYSTEM, *ONE)),
    ({"system": "Be long.", "messages": openai(SYSTEM, *ONE)}, "messages", openai(SYSTEM, *ONE)),
    *(({"system": none}, "messages", openai(*ONE)) for none in ("", None, 3)),
    ({"chat_template_kwargs": SMOLTALK2}, "options", {"enable_thinking": False, "xml_tools": ["{}"]}),
    ({"chat_template_kwargs": '{"enable_thinking": false}'}, "options", {"enable_thinking": False}),
    *(({"chat_template_kwargs": none}, "options", {}) for none in (None, "null")),
    *(({"chat_template_kwargs": wrong}, "options", "not_options") for wrong in ("x", ["x"])),
]
RECORDS = [
    ({"messages": given}, "messages", expected if isinstance(expected, str) else openai(*expected))
    for given, expected in CASES.values()
]


@pytest.mark.parametrize("stored", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("fields", "name", "expected"), [*RECORDS, *FIELDS], ids=[*CASES, *(str(fields) for fields, *_ in FIELDS)]
)
def test_a_published_row_becomes_its_conversation(tmp_path, fields, name, expected, stored):
    document = read(tmp_path, {"id": 0, "messages": openai(*ONE)} | fields, stored, ChatFormat("messages"))
    if isinstance(expected, str):
        assert isinstance(document, BadDocument) and document.why == expected
    else:
        assert isinstance(document, Conversation)
        found = getattr(document, name)
        assert (found if name == "options" else [*found]) == expected


def test_a_date_that_a_table_made_of_an_argument_is_bad(tmp_path):
    """pyarrow and pandas turn a text such as 2024-05-01 into one when they read JSON."""
    messages = openai(USER, calling(call({"a": datetime(2024, 5, 1)})), RESULT, ANSWER)
    document = read(tmp_path, {"messages": messages}, "parquet", ChatFormat("messages"))
    assert isinstance(document, BadDocument) and document.why == "not_json"


def test_who_speaks_is_named_if_it_is_no_role(tmp_path):
    document = read(tmp_path, {"m": sharegpt(HUMAN, ("narrator", "Once."))}, "jsonl", ChatFormat("m"))
    assert isinstance(document, BadDocument) and "narrator" in document.detail
