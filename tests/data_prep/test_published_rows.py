"""Rows as published data sets have them, each with the conversation that it becomes, or the reason why it is bad."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longdraft.data_prep.documents import BAD_REASONS, BadDocument, Conversation
from longdraft.data_prep.record_formats import ChatFormat, QuestionAnswerFormat
from longdraft.data_prep.response_generation import OpenConversation
from longdraft.data_prep.segments import read_documents, scan
from longdraft.data_prep.settings import Source
from longdraft.data_prep.sources import list_files

SYSTEM, USER, ANSWER = ("system", "Be brief."), ("user", "Why?"), ("assistant", "So.")
MORE = (("user", "And?"), ("assistant", "No."))


def openai(*messages, **fields):
    return [{"role": role, "content": content, **fields} for role, content in messages]


def sharegpt(*messages, **fields):
    return [{"from": speaker, "value": value, **fields} for speaker, value in messages]


def part(text, **fields):
    return {"type": "text", "text": text, **fields}


CALL = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
HUMAN, GPT = ("human", "Why?"), ("gpt", "So.")
BOTH = {"role": None, "content": None, "from": None, "value": None}
WILDCHAT = {"language": "English", "redacted": False, "toxic": False, "country": None, "turn_identifier": 1}


@dataclass(frozen=True)
class Case:
    """field: of the messages. expected: the conversation, or a reason."""

    name: str
    field: str
    row: Mapping[str, Any]
    expected: tuple[tuple[str, str], ...] | str


CASES = [
    Case("UltraChat 200k, no_robots, Tulu 3", "messages", {"prompt": "Why?", "messages": openai(USER, ANSWER, *MORE)},
         (USER, ANSWER, *MORE)),
    Case("LongAlign", "messages", {"messages": openai(USER, ANSWER), "length": 3}, (USER, ANSWER)),
    Case("LMSYS-Chat-1M", "conversation", {"conversation": openai(USER, ANSWER), "redacted": False, "turn": 1},
         (USER, ANSWER)),
    Case("WildChat", "conversation", {"conversation": openai(USER, ANSWER, **WILDCHAT)}, (USER, ANSWER)),
    Case("OpenHermes 2.5", "conversations",
         {"conversations": sharegpt(SYSTEM, HUMAN, GPT, weight=None), "system_prompt": None}, (SYSTEM, USER, ANSWER)),
    Case("Magpie, Infinity-Instruct", "conversations", {"conversations": sharegpt(HUMAN, GPT), "label": ["a"]},
         (USER, ANSWER)),
    Case("OpenThoughts", "conversations", {"conversations": sharegpt(USER, ANSWER)}, (USER, ANSWER)),
    *(
        Case(f"ShareGPT, {speaker}", "conversations",
             {"id": "a_0", "conversations": sharegpt((human, "Why?"), (speaker, "So."), markdown=None, text=None)},
             (USER, ANSWER))
        for human, speaker in (("human", "gpt"), ("user", "chatgpt"), ("human", "bing"), ("human", "bard"),
                               ("human", "assistant"))
    ),
    Case("ShareGPT, begun in the middle", "conversations", {"conversations": sharegpt(GPT, HUMAN, GPT)},
         (ANSWER, USER, ANSWER)),
    Case("OpenAssistant's roles", "messages", {"messages": openai(("prompter", "Why?"), ANSWER)}, (USER, ANSWER)),
    Case("OpenAI's developer", "messages", {"messages": openai(("developer", "Be brief."), USER, ANSWER)},
         (SYSTEM, USER, ANSWER)),
    Case("Gemma's roles", "messages", {"messages": openai(USER, ("model", "So."))}, (USER, ANSWER)),
    Case("roles in capitals", "messages", {"messages": openai(("User", "Why?"), ("Assistant", "So."))}, (USER, ANSWER)),
    Case("UltraChat", "data", {"id": "0", "data": ["Why?", "So.", "And?", "No."]}, (USER, ANSWER, *MORE)),
    Case("UltraChat, a question at the end", "data", {"data": ["Why?", "So.", "And?"]}, (USER, ANSWER, MORE[0])),
    Case("UltraChat as JSON text", "data", {"id": 1, "data": '["Why?", "So."]'}, (USER, ANSWER)),
    Case("Orca-AgentInstruct, JSON text", "messages", {"messages": json.dumps(openai(SYSTEM, USER, ANSWER))},
         (SYSTEM, USER, ANSWER)),
    Case("JSON text of ShareGPT", "conversations", {"conversations": json.dumps(sharegpt(HUMAN, GPT))}, (USER, ANSWER)),
    Case("keys of two styles, OpenAI's", "messages",
         {"messages": [BOTH | message for message in openai(SYSTEM, USER, ANSWER)]}, (SYSTEM, USER, ANSWER)),
    Case("keys of two styles, ShareGPT's", "messages",
         {"messages": [BOTH | message for message in sharegpt(HUMAN, GPT)]}, (USER, ANSWER)),
    Case("keys of two styles, mixed", "messages",
         {"messages": [BOTH | openai(USER)[0], BOTH | sharegpt(GPT)[0]]}, (USER, ANSWER)),
    Case("API log, parts", "messages",
         {"messages": openai(("user", [part("Wh"), part("y?")]), ("assistant", [part("So.")]))}, (USER, ANSWER)),
    Case("API log, parts with null fields", "messages",
         {"messages": openai(("user", [part("Why?", image_url=None)]), ("assistant", [part("So.", image_url=None)]))},
         (USER, ANSWER)),
    Case("API log, answer's empty fields", "messages",
         {"messages": openai(USER, ANSWER, tool_calls=None, refusal=None, annotations=[], reasoning_content="")},
         (USER, ANSWER)),
    Case("null system message", "messages", {"messages": openai(("system", None), USER, ANSWER)}, (USER, ANSWER)),
    Case("null answer", "messages", {"messages": openai(USER, ("assistant", None))}, "content_not_text"),
    Case("null question", "messages", {"messages": openai(("user", None), ANSWER)}, "content_not_text"),
    Case("null messages", "messages", {"messages": None}, "not_a_list"),
    Case("image", "messages",
         {"messages": openai(("user", [part("Why?"), {"type": "image"}]), ("assistant", [part("So.")]))},
         "content_not_text"),
    Case("no part", "messages", {"messages": openai(("user", []), ("assistant", [part("So.")]))},
         "content_not_text"),
    Case("Hermes function calling", "conversations",
         {"conversations": sharegpt(SYSTEM, HUMAN, ("gpt", "<tool_call>"), ("tool", "1"), GPT)}, "tool_role"),
    Case("APIGen-MT", "conversations",
         {"conversations": sharegpt(HUMAN, ("function_call", "{}"), ("observation", "1"), GPT)}, "tool_role"),
    Case("function-calling ChatML", "conversations",
         {"conversations": sharegpt(HUMAN, ("function-call", "{}"), ("function-response", "1"), GPT)}, "tool_role"),
    Case("Llama 3.1's tool results", "messages", {"messages": openai(USER, ("ipython", "1"), ANSWER)}, "tool_role"),
    Case("OpenAI's tool calls", "messages",
         {"messages": [*openai(USER), {"role": "assistant", "content": None, "tool_calls": CALL}]},
         "answer_beside_content"),
    Case("reasoning beside the answer", "messages",
         {"messages": openai(USER, ANSWER, reasoning_content="Hm.")}, "answer_beside_content"),
    Case("Capybara, pairs", "conversation", {"conversation": [{"input": "Why?", "output": "So."}]}, "unknown_role"),
    Case("a text", "messages", {"messages": "Why? So."}, "not_a_list"),
    Case("JSON text of something else", "messages", {"messages": '{"role": "user"}'}, "not_a_list"),
    Case("numbers", "messages", {"messages": [1, 2]}, "not_a_list"),
    Case("no message", "messages", {"messages": []}, "empty"),
    Case("a question alone", "messages", {"messages": openai(USER)}, "no_assistant_turn"),
]  # fmt: skip


def read(tmp_path, row, stored, record_format):
    path = tmp_path / f"rows.{stored}"
    if stored == "parquet":
        pq.write_table(pa.Table.from_pylist([dict(row)]), path)
    else:
        path.write_text(json.dumps(row) + "\n")
    _, segments = scan(list_files([Source(str(path))]), 1 << 20)
    (document,) = (one for segment in segments for one in read_documents(segment, record_format))
    return document


@pytest.mark.parametrize("stored", ["jsonl", "parquet"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_published_row_becomes_its_conversation(tmp_path, case, stored):
    document = read(tmp_path, case.row, stored, ChatFormat(case.field))
    if isinstance(case.expected, str):
        assert isinstance(document, BadDocument) and document.why == case.expected
        assert case.expected in BAD_REASONS
    else:
        assert isinstance(document, Conversation) and document.messages == case.expected


@pytest.mark.parametrize("stored", ["jsonl", "parquet"])
def test_the_columns_of_xlam_become_a_question_and_its_answer(tmp_path, stored):
    row = {"id": 0, "query": "Why?", "answers": '[{"name": "f"}]', "tools": "[]"}
    document = read(tmp_path, row, stored, QuestionAnswerFormat("{query}", "{answers}"))
    assert isinstance(document, Conversation)
    assert document.messages == (USER, ("assistant", row["answers"]))


@pytest.mark.parametrize(
    "answer",
    [
        {"content": None},
        {},
        {"content": None, "tool_calls": CALL},
        {"content": "So.", "reasoning_content": "Hm."},
        {"content": [{"type": "image"}]},
    ],
    ids=["null", "absent", "calls", "reasoning", "image"],
)
def test_an_answer_that_the_target_replaces_need_not_be_readable(tmp_path, answer):
    row = {"messages": [*openai(USER), {"role": "assistant", **answer}, *openai(MORE[0])]}
    document = read(tmp_path, row, "jsonl", ChatFormat("messages", answered=False))
    assert isinstance(document, Conversation)
    assert OpenConversation.begin(document).messages == [USER, ("assistant", None), MORE[0], ("assistant", None)]


def test_who_speaks_is_named_if_it_is_no_role(tmp_path):
    document = read(tmp_path, {"m": sharegpt(HUMAN, ("narrator", "Once."))}, "jsonl", ChatFormat("m"))
    assert isinstance(document, BadDocument) and "narrator" in document.detail
