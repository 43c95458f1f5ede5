"""Thoughts and calls of tools in answers: published templates read back, and SmolLM2 calling a tool over the server."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import openai
import pytest
import torch
from pydantic import BaseModel, Field
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from longdraft.infer.choice.grammar import choice_grammar, json_grammar, matcher_of
from longdraft.infer.engine import Engine
from longdraft.infer.requests import prompt_tokens
from longdraft.infer.sampling import SamplingParams
from longdraft.infer.server.answer_format import AnswerSplitter, answer_format, typed
from longdraft.infer.server.answer_grammar import answer_grammar
from longdraft.infer.server.app import Service
from longdraft.infer.server.protocol import ApiError, Chat, parse, requests_of
from longdraft.models.hf import load_target

from .test_server import KEY, served

PUBLISHED = Path(__file__).parents[1] / "data_prep" / "published"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
ASK = {"role": "user", "content": "What is the weather in Rome?"}
# What chat templates contain, and answers as their models write them.
QWEN, CODER, SEED = (
    "<tool_call></tool_call></think>",
    "<function= <parameter= </think>",
    "<function= <parameter= </seed:think>",
)
HARMONY, LLAMA = "<|channel|> functions.", '<|start_header_id|>"parameters": '
MISTRAL, MISTRAL_LIST = "[TOOL_CALLS][ARGS][/THINK]", "[TOOL_CALLS][AVAILABLE_TOOLS]"
ROME, OSLO, CODE = {"city": "Rome"}, {"city": "Oslo", "days": 2}, {"city": "  def f():\n    return 1"}
ROME_JSON, OSLO_JSON = '{"city": "Rome"}', '{"city": "Oslo", "days": 2}'
CALL = '<tool_call>\n{{"name": "get_weather", "arguments": {}}}\n</tool_call>'
CODER_CALL = "<tool_call>\n<function=get_weather>\n{}</function>\n</tool_call>"
CITY, DAYS = "<parameter=city>\n{}\n</parameter>\n", "<parameter=days>\n2\n</parameter>\n"
ONE, AGAIN = "[TOOL_CALLS]get_weather[ARGS]", "[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]"
NEXT, OPEN = "<|end|><|start|>assistant", "assistant\n<think>\n"
ANSWERS = {  # what the template contains, the prompt's end, the answer, and the thought, the text and the calls in it
    "Qwen3": (
        QWEN, "assistant\n", f"<think>\nHm.\n</think>\n\nSo.\n{CALL.format(ROME_JSON)}\n{CALL.format(OSLO_JSON)}",
        "Hm.", "So.", [ROME, OSLO],
    ),
    "a thought that the prompt opens": (QWEN, "<think> " + OPEN, "Hm.\n</think>\n\nSo. \n", "Hm.", "So. \n", []),
    "a thought that the prompt closes": (QWEN, OPEN + "\n</think>\n\n", "  So.\n <b", "", "  So.\n <b", []),
    "a thought without an end": (QWEN, OPEN, "Hm, <tool_call>", "Hm, <tool_call>", "", []),
    "a call that is not JSON": (QWEN, "", "So.<tool_call>{'name': 1}</tool_call>", "", "So.{'name': 1}", []),
    "a call without a name": (QWEN, "", 'So.<tool_call>{"days": 1}</tool_call> No.', "", 'So.{"days": 1} No.', []),
    "Qwen3-Coder, Qwen3.5": (
        CODER, OPEN, "Hm.\n</think>\n\nSo.\n\n" + CODER_CALL.format(CITY.format("Oslo") + DAYS) + "\n"
        + CODER_CALL.format(CITY.format(CODE["city"])), "Hm.", "So.", [OSLO, CODE],
    ),
    "Seed-OSS": (
        SEED, "assistant\n", "<seed:think>Hm.</seed:think>\n<seed:tool_call>\n<function=get_weather>\n"
        "<parameter=city>Rome</parameter>\n</function>\n</seed:tool_call>", "Hm.", "", [ROME],
    ),
    "Mistral, one by one": (
        MISTRAL, "[/INST]", f"[THINK]Hm.[/THINK]So.{ONE}{ROME_JSON}{AGAIN}{OSLO_JSON}", "Hm.", "So.", [ROME, OSLO],
    ),
    "Mistral, a list": (
        MISTRAL_LIST, "[/INST]", f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ROME_JSON}, '
        f'"id": "abcdefghi"}}, {{"name": "get_weather", "arguments": {OSLO_JSON}}}]', "", "", [ROME, OSLO],
    ),
    "Llama": (LLAMA, "\n\n", f'{{"name": "get_weather", "parameters": {OSLO_JSON}}}', "", "", [OSLO]),
    "Llama, JSON that is no call": (LLAMA, "\n\n", 'As {"name": "x"}', "", 'As {"name": "x"}', []),
    "gpt-oss": (
        HARMONY, "<|start|>assistant", f"<|channel|>analysis<|message|>Hm.{NEXT}<|channel|>commentary<|message|>So."
        f"{NEXT}<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ROME_JSON}",
        "Hm.", "So.", [ROME],
    ),
    "gpt-oss without channels": (HARMONY, "<|start|>assistant", "So.", "", "So.", []),
}  # fmt: skip


@pytest.fixture(scope="module")
def target():
    return load_target("smollm2-135m", torch.float32)


@pytest.fixture
def tokenizer():
    """One token a byte."""
    rust = Tokenizer(models.BPE({one: i for i, one in enumerate(ByteLevel.alphabet())}, []))
    rust.pre_tokenizer, rust.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=rust)


def parts(tokenizer, prompt, text, step=None, is_whole=True, with_tools=True, most_calls=None):
    """(thought, content, [(name, arguments)]) of an answer that comes in texts of `step` characters, or at once."""
    tools = [typed(WEATHER)] if with_tools else []
    form = answer_format(tokenizer, with_tools)
    splitter = AnswerSplitter(form, tokenizer, tokenizer(prompt).input_ids, tools, most_calls)
    found = {"reasoning_content": "", "content": "", "tool_calls": []}
    texts = [text[i : i + step] for i in range(0, len(text), step)] if step else [text]
    for i, one in enumerate(texts, start=1):
        for part, value in splitter.push(one, i == len(texts), is_whole).items():
            found[part] += value
    assert [call["index"] for call in found["tool_calls"]] == list(range(splitter.calls))
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in found["tool_calls"]]
    return found["reasoning_content"], found["content"], calls


@pytest.mark.parametrize("step", [None, 1, 2, 7])
@pytest.mark.parametrize(("contains", "prompt", "text", "thought", "content", "calls"), ANSWERS.values(), ids=ANSWERS)
def test_answers_are_split_at_once_and_in_pieces(tokenizer, contains, prompt, text, thought, content, calls, step):
    tokenizer.chat_template = contains
    expected = thought, content, [("get_weather", arguments) for arguments in calls]
    assert parts(tokenizer, prompt, text, step) == expected


SPECIAL = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<seed:think>", "</seed:think>", "<seed:tool_call>",
    "</seed:tool_call>", "[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|message|>", "<|start|>",
    "<|end|>", "<|constrain|>",
)  # fmt: skip
OBJECT = json_grammar({"type": "object"})
WRITTEN = {  # what the template contains, the prompt's end, a forced call or a text of JSON (with its grammar)
    "Qwen3": (
        QWEN, "assistant\n", f"<think>\nHm.\n</think>\n\n{CALL.format(ROME_JSON)}\n{CALL.format(OSLO_JSON)}", None,
    ),
    "a thought that the prompt opens": (QWEN, OPEN, f"Hm.\n</think>\n\n{CALL.format(ROME_JSON)}", None),
    "a thought that the prompt closes": (QWEN, OPEN + "</think>\n\n", CALL.format(ROME_JSON), None),
    "a text after a thought": (QWEN, OPEN, "Hm.\n</think>\n\n" + ROME_JSON, OBJECT),
    "a call in place of the text": (QWEN, OPEN, f"Hm.\n</think>\n\n{CALL.format(ROME_JSON)}", OBJECT),
    "Qwen3-Coder, Qwen3.5": (
        CODER, OPEN, "Hm.\n</think>\n\n" + CODER_CALL.format(CITY.format("Oslo") + DAYS) + "\n"
        + CODER_CALL.format(CITY.format(CODE["city"])), None,
    ),
    "Seed-OSS": (
        SEED + "<seed:tool_call>", "assistant\n", "<seed:think>Hm.</seed:think>\n<seed:tool_call>\n"
        "<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</seed:tool_call>", None,
    ),
    "Mistral, one by one": (MISTRAL, "[/INST]", f"[THINK]Hm.[/THINK]{ONE}{ROME_JSON}{ONE}{OSLO_JSON}", None),
    "Mistral, a list": (
        MISTRAL_LIST, "[/INST]", f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {ROME_JSON}}}, '
        f'{{"name": "get_weather", "arguments": {OSLO_JSON}}}]', None,
    ),
    "Llama": (LLAMA, "\n\n", f'{{"name": "get_weather", "parameters": {OSLO_JSON}}}', None),
    "gpt-oss": (
        HARMONY, "<|start|>assistant", f"<|channel|>analysis<|message|>Hm.{NEXT}<|channel|>commentary "
        f"to=functions.get_weather <|constrain|>json<|message|>{ROME_JSON}", None,
    ),
    "gpt-oss, a text": (
        HARMONY, "<|start|>assistant", f"<|channel|>analysis<|message|>Hm.{NEXT}<|channel|>final<|message|>{ROME_JSON}",
        OBJECT,
    ),
}  # fmt: skip


def is_allowed(target, tokenizer, prompt, text, content, tools=(WEATHER,)) -> bool:
    """Whether the grammar of an answer to this prompt allows this whole text."""
    known = replace(target, tokenizer=tokenizer, eos_token_ids=(tokenizer.eos_token_id,))
    form = answer_format(tokenizer, with_tools=True)
    rules = answer_grammar(known, form.written, tokenizer(prompt).input_ids, content, tools, several=True)
    tokens, matcher = tokenizer(text).input_ids, matcher_of(known, rules)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("special", [(), SPECIAL], ids=["as text", "as special tokens"])
@pytest.mark.parametrize(("contains", "prompt", "text", "content"), WRITTEN.values(), ids=WRITTEN)
def test_what_a_grammar_allows_is_what_is_read(target, tokenizer, contains, prompt, text, content, special):
    """Tags of a template may be special tokens, which no text in a grammar stands for."""
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": list(special)})
    tokenizer.chat_template = contains
    assert is_allowed(target, tokenizer, prompt, text, content)
    assert not is_allowed(target, tokenizer, prompt, text[:-1], content)
    if "get_weather" in text:
        assert not is_allowed(target, tokenizer, prompt, text.replace("get_weather", "another"), content)
    _, found, calls = parts(tokenizer, prompt, text)
    assert calls or json.loads(found) == ROME


LOOP = {"anyOf": [{"$ref": "#/$defs/Loop"}] * 30 + [{"type": "integer"}]}
CITIES = {"$defs": {"City": {"enum": ["Rome", "Oslo"]}, "Loop": LOOP}}
ARGUMENTS = [  # a parameter's schema, its text in a call with tags, its value; then what the grammar does not allow
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "a b", "a b", None),
    ({"type": ["string", "null"], "maxLength": 3}, '"a"', '"a"', None),
    ({"$ref": "#/$defs/City"}, "Oslo", "Oslo", "Bonn"),
    ({"type": "string", "enum": ["a", 'b"']}, 'b"', 'b"', "c"),
    ({"type": ["integer", "null"]}, "null", None, "x"),
    ({"anyOf": [{"type": "number"}, {"type": "null"}]}, "2.5", 2.5, "x"),
    ({"type": "boolean"}, "true", True, "True"),
    ({"type": "array", "items": {"$ref": "#/$defs/City"}}, '["Rome"]', ["Rome"], '["Bonn"]'),
    ({"enum": [1, 2]}, "2", 2, "3"),
    (LOOP, "7", 7, "x"),
    ({}, "{", "{", None),
]


@pytest.mark.parametrize("name", ["city", "MAX_VALUE", "KEY"])
@pytest.mark.parametrize(("kind", "text", "value", "refused"), ARGUMENTS)
def test_arguments_with_tags_are_read_as_the_values_that_were_written(
    target, tokenizer, kind, text, value, refused, name
):
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    tokenizer.chat_template = CODER
    tool = {"type": "function", "function": {"name": "f", "parameters": CITIES | {"properties": {name: kind}}}}
    answer = f"<tool_call>\n<function=f>\n<parameter={name}>\n{{}}\n</parameter>\n</function>\n</tool_call>"
    assert is_allowed(target, tokenizer, "", answer.format(text), None, (tool,))
    assert refused is None or not is_allowed(target, tokenizer, "", answer.format(refused), None, (tool,))
    splitter = AnswerSplitter(answer_format(tokenizer, True), tokenizer, tokenizer("a").input_ids, [typed(tool)])
    (call,) = splitter.push(answer.format(text), ends=True)["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {name: value}


def test_a_form_behind_a_thought_of_a_declared_format_is_refused(target, tokenizer):
    tokenizer.chat_template = "{{ messages[0].content }}"
    fields = {"thinking": {"open": "(", "close": ")"}, "content": {}}
    tokenizer.response_template = {"start_anchor": "|", "fields": fields}
    body = parse(Chat, json.dumps({"messages": [ASK], "response_format": {"type": "json_object"}}).encode())
    with pytest.raises(ApiError, match=r"^response_format: .*not how they are written"):
        requests_of(body, replace(target, tokenizer=tokenizer), 500)


@pytest.mark.parametrize("template", ["qwen3", "gpt-oss"])
def test_what_a_published_template_writes_is_read_back_and_allowed(target, tokenizer, template):
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    source = (PUBLISHED / f"{template}.jinja").read_text(encoding="utf-8")
    tokenizer.chat_template = source.replace('strftime_now("%Y-%m-%d")', "'2024-07-26'")
    thought = {"reasoning_content": "Hm.", "thinking": "Hm."}
    call = {"type": "function", "function": {"name": "get_weather", "arguments": OSLO}}
    answers = [
        ({"role": "assistant", "content": "", "tool_calls": [call]} | thought, ("Hm.", "", [("get_weather", OSLO)])),
        ({"role": "assistant", "content": "It is cold."} | thought, ("Hm.", "It is cold.", [])),
    ]
    for message, expected in answers:
        render = [
            tokenizer.apply_chat_template(messages, tools=[WEATHER], tokenize=False, add_generation_prompt=is_open)
            for messages, is_open in (([ASK], True), ([ASK, message], False))
        ]
        text = render[1].removeprefix(render[0]).rstrip("\n")
        for end in ("<|im_end|>", "<|call|>", "<|return|>"):  # the engine omits it
            text = text.removesuffix(end)
        assert parts(tokenizer, render[0], text) == parts(tokenizer, render[0], text, step=3) == expected
        content = choice_grammar([message["content"]]) if message["content"] else None
        assert is_allowed(target, tokenizer, render[0], text, content, () if content else (WEATHER,))


def test_a_call_that_is_cut_off_is_text_and_further_calls_can_be_dropped(tokenizer):
    tokenizer.chat_template = CODER
    half = "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=da"
    for step in (None, 1):
        thought, content, calls = parts(tokenizer, "", half, step, is_whole=False)
        assert (thought, calls) == ("", []) and "Rome" in content
    assert parts(tokenizer, OPEN, ANSWERS["Qwen3-Coder, Qwen3.5"][2], most_calls=1)[2] == [("get_weather", OSLO)]


def test_without_tools_a_call_is_text_and_a_plain_template_has_no_format(tokenizer):
    text = '<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'
    tokenizer.chat_template = QWEN
    assert parts(tokenizer, "", text, with_tools=False) == ("Hm.", text.partition("</think>\n\n")[2], [])
    tokenizer.chat_template = LLAMA
    assert answer_format(tokenizer, with_tools=False) is None


def test_a_declared_format_takes_precedence(tokenizer):
    tokenizer.chat_template = QWEN
    call = {"open": "CALL", "content": "json", "transform": {"function": "{content}"}}
    fields = {"thinking": {"open": "(", "close": ")"}, "tool_calls": call, "content": {}}
    tokenizer.response_template = {"start_anchor": "|", "fields": fields}
    text = '( Hm. ) So.CALL{"name": "get_weather", "arguments": {"city": "Rome"}}'
    for step in (None, 1):
        assert parts(tokenizer, "(no|", text, step) == ("Hm. ", "So.", [("get_weather", ROME)])
    assert parts(tokenizer, "|", "So.CALL{x") == ("", "So.{x", [])


def test_a_declared_format_that_cannot_be_read_is_refused_before_anything_is_served(target, tokenizer):
    tokenizer.response_template = {"version": 9}
    with pytest.raises(ValueError, match=r"response_template: .*version"):
        Service(Engine(replace(target, tokenizer=tokenizer)), "tiny")


def test_special_tokens_are_in_the_text_only_where_they_enclose_parts(target):
    for special in ([], ["[TOOL_CALLS]", "[ARGS]"]):
        tokenizer = copy.deepcopy(target.tokenizer)
        tokenizer.chat_template = f"{{{{ messages[0].content }}}}{{# {MISTRAL} #}}"
        tokenizer.add_special_tokens({"additional_special_tokens": special})
        body = parse(Chat, json.dumps({"messages": [ASK], "tools": [WEATHER]}).encode())
        (request,) = requests_of(body, replace(target, tokenizer=tokenizer), 500)
        assert request.skip_special == (not special)


@pytest.fixture(scope="module")
def calling(target):
    """SmolLM2 with Qwen3's template, as calls in its prompt make it call."""
    tokenizer = copy.deepcopy(target.tokenizer)
    tokenizer.chat_template = (PUBLISHED / "qwen3.jinja").read_text(encoding="utf-8")
    known = replace(target, tokenizer=tokenizer)
    with served(known, drafter="prompt_lookup", api_key=KEY, max_length=500) as service:
        yield service, known


def called(city):
    call = {"name": "get_weather", "arguments": json.dumps({"city": city})}
    return [
        {"role": "user", "content": f"What is the weather in {city}?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": call}]},
    ]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "book"}}])
def test_a_call_is_forced_whole_and_streamed(calling, choice):
    """Of one of two tools, or of the one that is named, after a question that asks for neither."""
    service, _ = calling
    parameters = {"type": "object", "properties": {"seats": {"enum": [1, 2]}}, "required": ["seats"]}
    parameters["additionalProperties"] = False
    book = {"type": "function", "function": {"name": "book", "parameters": parameters}}
    client = openai.OpenAI(base_url=f"{service.url}/v1", api_key=KEY, max_retries=0, timeout=60)
    asked = dict(model="tiny", messages=[{"role": "user", "content": "Hello!"}], tools=[WEATHER, book])
    asked |= dict(tool_choice=choice, temperature=0, max_tokens=120)
    if choice == "required":  # of the one that is named there is one call
        asked |= dict(parallel_tool_calls=False)
    asked |= dict(extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    (found,) = client.chat.completions.create(**asked).choices
    (call,) = found.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert (found.finish_reason, found.message.content) == ("tool_calls", None)
    if choice == "required":
        assert call.function.name in ("get_weather", "book")
    else:
        assert call.function.name == "book" and arguments in ({"seats": 1}, {"seats": 2})
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls[0].function
    assert (streamed.name, streamed.arguments) == (call.function.name, call.function.arguments)


class Person(BaseModel):
    name: Annotated[str, Field(max_length=30)]
    age: Annotated[int, Field(ge=0, le=150)]
    likes: Annotated[list[Literal["chess", "football", "music"]], Field(max_length=2)]


@pytest.mark.parametrize("with_tools", [False, True])
def test_openais_client_parses_an_answer_of_a_schema(calling, with_tools):
    service, _ = calling
    client = openai.OpenAI(base_url=f"{service.url}/v1", api_key=KEY, max_retries=0, timeout=60)
    asked = dict(messages=[{"role": "user", "content": "Invent a person."}], temperature=0, max_tokens=120)
    asked |= dict(extra_body={"chat_template_kwargs": {"enable_thinking": False}}, parallel_tool_calls=False)
    weather = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    found = client.chat.completions.parse(
        model="tiny", response_format=Person, **asked, **({"tools": [weather]} if with_tools else {})
    ).choices[0]
    assert isinstance(found.message.parsed, Person) or (with_tools and found.message.tool_calls)


def test_openais_client_calls_a_tool(calling):
    service, known = calling
    messages = [*called("Paris"), *called("Oslo"), ASK]
    client = openai.OpenAI(base_url=f"{service.url}/v1", api_key=KEY, max_retries=0, timeout=60)
    asked = dict(model="tiny", messages=messages, tools=[WEATHER], temperature=0, max_tokens=60)
    (choice,) = client.chat.completions.create(**asked).choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", ROME)
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert (
        streamed.finish_reason == "tool_calls"
        and streamed.message.tool_calls[0].function.arguments == call.function.arguments
    )
    # The tokens are the engine's, and its call and the tool's result go back.
    prompt = prompt_tokens(known, messages, options={"tools": [WEATHER]})
    want = Engine(known).generate([prompt], SamplingParams(max_new_tokens=60))[0].text
    plain = client.chat.completions.create(**asked, tool_choice="none").choices[0]
    assert '"Rome"' in want and plain.finish_reason == "stop" and plain.message.tool_calls is None
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    asked["messages"] = [*messages, choice.message.model_dump(exclude_none=True), result]
    assert client.chat.completions.create(**asked).choices[0].message.content


def call_of(parameters):
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("tools", {"tools": [{"type": "function"}]}),
        ("tools", {"tools": [{"type": "web_search"}]}),
        ("tools", {"tools": [call_of("x")], "tool_choice": "required"}),
        ("tools", {"tools": [{"type": "function", "function": {"name": 'a"b'}}], "tool_choice": "required"}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tools": [WEATHER], "tool_choice": "any"}),
        ("tool_choice", {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}}),
        ("tool_choice", {"tools": [call_of({"properties": 3})], "tool_choice": "required"}),
    ],
)
def test_what_is_wrong_with_tools_is_named(calling, field, body):
    client = openai.OpenAI(base_url=f"{calling[0].url}/v1", api_key=KEY, max_retries=0, timeout=60)
    with pytest.raises(openai.BadRequestError, match=field) as error:
        client.chat.completions.create(model="tiny", messages=[ASK], **body)
    assert error.value.param == field


def test_a_target_without_a_known_form_of_calls_takes_no_tools(target):
    with served(target, max_length=200) as service:
        client = openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=60)
        with pytest.raises(openai.BadRequestError, match="response_template") as error:
            client.chat.completions.create(model="tiny", messages=[ASK], tools=[WEATHER])
        assert error.value.param == "tools"
