"""The server with OpenAI's own client and with clients that misbehave. Its answers are those of the engine alone."""

import asyncio
import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import openai
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from longdraft.infer.engine import Engine
from longdraft.infer.generation import Generation, Statistics
from longdraft.infer.logprobs import TokenLogprob
from longdraft.infer.sampling import SamplingParams
from longdraft.infer.server.answers import chat_logprobs, completion_logprobs
from longdraft.infer.server.app import Server, Service, _event
from longdraft.infer.server.recorder import Recorder
from longdraft.infer.text import token_bytes, token_text
from longdraft.models.hf import load_target

TEXT = "the cat sat on the mat and the dog sat on the log. "
CHAT = [{"role": "user", "content": "the cat and the dog"}]
KEY, END = "a key", "<|end|>"


@pytest.fixture(scope="module")
def target(tiny):
    return load_target(tiny, torch.float32)


@contextmanager
def served(target, queue=64, slots=3, drafter="token_recycling+prompt_lookup", max_length=200, **settings):
    """Run a server on a free port of this machine; yields its service."""
    engine = Engine(target, drafter, slots=slots, max_length=max_length, prefill_chunk=16, nodes=None)
    service = Service(engine, "tiny", queue=queue, **settings)
    service.server = server = Server(service)
    listening = socket.create_server(("127.0.0.1", 0))
    service.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield service
    server.should_exit = True
    thread.join(30)
    assert not thread.is_alive() and not service.thread.failed


@pytest.fixture(scope="module")
def service(target):
    with served(target, api_key=KEY) as service:
        yield service


@pytest.fixture
def client(service):
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


def alone(target, prompt, **params):
    """What the engine generates without server and drafter."""
    return Engine(target).generate([prompt], SamplingParams(**params))[0]


def post(service, path="chat/completions", headers=None, **body):
    body = {"messages": CHAT, "max_tokens": 4} | body if path.startswith("chat") else body
    given = {"Authorization": f"Bearer {KEY}"} if headers is None else headers
    return httpx.post(f"{service.url}/v1/{path}", json=body, headers=given, timeout=60)


def test_the_next_turn_of_a_chat_takes_over_what_the_last_one_read(client, target):
    messages = [{"role": "user", "content": TEXT * 2}]
    first = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=8)
    messages += [{"role": "assistant", "content": first.choices[0].message.content}]
    messages += [{"role": "user", "content": "the dog"}]
    want = alone(target, messages, max_new_tokens=20)
    second = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=20)
    assert second.choices[0].message.content == want.text
    told = second.usage.prompt_tokens_details.cached_tokens
    assert told == (first.usage.prompt_tokens - 1) // 16 * 16 > 0 and second.usage.prompt_tokens == len(want.prompt)


def test_a_chat_is_what_the_engine_gives_with_its_seed_whole_and_streamed(client, target):
    want = alone(target, CHAT, temperature=0.8, seed=8, max_new_tokens=40)
    asked = dict(model="tiny", messages=CHAT, temperature=0.8, seed=8, max_completion_tokens=40)
    found = client.chat.completions.create(**asked)
    (choice,), usage = found.choices, found.usage
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", want.text, "length")
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(want.prompt), 40)
    *chunks, last = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == want.text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert last.choices == [] and last.usage.total_tokens == len(want.prompt) + 40


def test_completions_of_texts_and_tokens_with_several_choices(client, target):
    ids = target.tokenizer(TEXT).input_ids
    for prompt, plain in (([TEXT, "the dog"], [TEXT, "the dog"]), ([ids, ids[:5]], [ids, ids[:5]]), (ids, [ids])):
        found = client.completions.create(
            model="tiny", prompt=prompt, n=2, max_tokens=9, seed=3, temperature=1, presence_penalty=0.5
        )
        want = [
            alone(target, one, max_new_tokens=9, seed=3 + i, temperature=1, presence_penalty=0.5).text
            for one in plain
            for i in range(2)
        ]
        assert [choice.text for choice in found.choices] == want
        assert [choice.index for choice in found.choices] == list(range(len(want)))
        assert found.usage.prompt_tokens == sum(len(alone(target, one, max_new_tokens=1).prompt) for one in plain)


def test_choices_of_a_stream_keep_apart(client, target):
    stream = client.completions.create(
        model="tiny", prompt=TEXT, n=5, max_tokens=25, seed=3, temperature=1, stream=True
    )
    texts, reasons = [""] * 5, {}
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == [alone(target, TEXT, max_new_tokens=25, seed=3 + i, temperature=1).text for i in range(5)]
    assert set(reasons) == set(range(5))


def test_stops_bans_and_filters_are_the_engines(client, target):
    plain = alone(target, TEXT, temperature=1, seed=5, max_new_tokens=30)
    stop, ban = plain.text[8:11], plain.tokens[0]
    found = client.completions.create(model="tiny", prompt=TEXT, temperature=1, seed=5, max_tokens=30, stop=stop)
    assert found.choices[0].text == plain.text[: plain.text.index(stop)] and found.choices[0].finish_reason == "stop"
    # An answer that would end at once goes on, and a biased token comes.
    own = {"top_k": 9, "min_p": 0.02, "repetition_penalty": 1.1, "stop_token_ids": [*{*plain.tokens}]}
    asked = {"temperature": 1, "top_p": 0.9, "seed": 5}
    found = client.completions.create(
        model="tiny", prompt=TEXT, max_tokens=30, logit_bias={str(ban): -100, "70": 7.5}, **asked,
        extra_body={"min_tokens": 12, "ignore_eos": True, **own},
    )  # fmt: skip
    limits = {"max_new_tokens": 30, "min_new_tokens": 12, "ignore_eos": True}
    want = alone(target, TEXT, banned_token_ids=(ban,), logit_bias={70: 7.5}, **asked, **own, **limits)
    assert found.choices[0].text == want.text != plain.text
    assert found.usage.completion_tokens == len(want.tokens) >= 12 and 70 in want.tokens
    assert not {*want.tokens[:11]} & {*plain.tokens}


def test_a_completion_goes_on_from_its_prompt_with_special_tokens_where_asked(tiny_target):
    """Words begin with a blank, as in Llama 2. vLLM's field shows special tokens, except the end token."""
    words = ["<s>", "</s>", "<x>", "\u2581the", "\u2581cat", "s"]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(words[:3])
    target = tiny_target(vocab_size=6, eos_token_ids=(1,))
    target.tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    asked = {"prompt": [0, 3], "max_tokens": 5, "n": 9, "seed": 1}
    with served(target) as service:
        plain = post(service, "completions", **asked).json()["choices"]
        shown = post(service, "completions", skip_special_tokens=False, **asked).json()["choices"]
        answers = [alone(target, [0, 3], temperature=1, seed=1 + i, max_new_tokens=5).tokens for i in range(9)]
        formed = post(service, "completions", structured_outputs={"choice": ["the"]}, **asked)
        assert formed.status_code == 400 and "this target's tokenizer" in formed.text  # it does not tell its bytes
        with httpx.stream("POST", f"{service.url}/v1/completions", json=asked | {"n": 1, "stream": True}) as stream:
            events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    for one, whole, tokens in zip(plain, shown, answers, strict=True):
        assert "the" + one["text"] == target.tokenizer.decode([3, *tokens], skip_special_tokens=True)
        ended = whole["finish_reason"] == "stop"
        assert "the" + whole["text"] == target.tokenizer.decode([3, *tokens[: len(tokens) - ended]])
    assert {whole["finish_reason"] for whole in shown} == {"stop", "length"}
    assert any("<x>" in whole["text"] for whole in shown) and any(one["text"].startswith(" cat") for one in plain)
    assert "".join(event["choices"][0]["text"] for event in events) == plain[0]["text"]


def test_a_chat_without_a_limit_fills_its_positions(client, target):
    found = client.chat.completions.create(model="tiny", messages=CHAT, temperature=0, extra_body={"ignore_eos": True})
    assert found.usage.total_tokens == 200 and found.choices[0].finish_reason == "length"


def test_models_health_and_the_page(client, service):
    (model,) = client.models.list()
    assert (model.id, model.max_model_len) == ("tiny", 200) and client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError, match="an/other"):
        client.models.retrieve("an/other")
    assert httpx.get(f"{service.url}/health").status_code == 200
    page = httpx.get(service.url)
    assert page.headers["content-type"].startswith("text/html") and "//" not in page.text


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("messages", {"messages": []}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}]}),
        ("messages", {"messages": [{"role": "user", "content": "x " * 300}]}),
        ("max_tokens", {"max_tokens": 2000}),
        ("max_tokens", {"prompt": "x " * 95}),
        ("max_completion_tokens", {"max_tokens": None, "max_completion_tokens": 999}),
        ("max_completion_tokens", {"max_tokens": None, "max_completion_tokens": 0}),
        ("temperature", {"temperature": -1}),
        ("n", {"prompt": ["the"] * 50, "n": 3}),
        ("stop", {"stop": [""]}),
        ("stop", {"stop": 5}),
        ("logprobs", {"prompt": "the", "logprobs": True}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("echo", {"prompt": "the", "echo": True}),
        ("best_of", {"prompt": "a", "best_of": 3}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"chat_template": "x"}}),
        ("min_tokens", {"min_tokens": -1}),
        ("logit_bias", {"logit_bias": {"9" * 5000: -100}}),
        ("stop_token_ids", {"stop_token_ids": [999]}),
        ("prompt", {"prompt": [1, "a"]}),
        ("prompt", {"prompt": ["the", ""]}),
        *((next(iter(body)), body) for body in (  # not served
            {"tools": [{"type": "function"}]}, {"response_format": {"type": "xml"}},
            {"response_format": {"type": "json_schema"}}, {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "objekt"}}}},
            {"structured_outputs": {"json": "{"}}, {"structured_outputs": {"regex": "("}},
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            {"min_tokens": 3, "response_format": {"type": "json_object"}},
            {"modalities": ["text", "audio"]}, {"guided_choice": ["a", "b"]},
            {"suffix": "b", "prompt": "a"}, {"allowed_token_ids": [5]}, {"bad_words": ["a"]}, {"stop": ["a"] * 65},
        )),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(service, field, body):
    answer = post(service, "completions" if "prompt" in body else "chat/completions", **body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == field and field.split("_")[0] in error["message"] and len(error["message"]) < 400, error


def test_the_wrong_one_of_several_prompts_is_named(service):
    answer = post(service, "completions", prompt=[[1], [999_999]], n=2)
    assert answer.json()["error"]["message"].startswith("prompt 1: token ids")


def test_other_refusals_are_errors_that_the_client_knows(client, service):
    with pytest.raises(openai.NotFoundError, match="gpt"):
        client.chat.completions.create(model="gpt", messages=CHAT)
    with pytest.raises(openai.AuthenticationError, match="Bearer"):
        client.with_options(api_key="another").models.list()
    assert post(service, headers={}).status_code == 401
    for method, path, status in (("GET", "/v1/chat/completions", 405), ("POST", "/v1/embeddings", 404)):
        answer = httpx.request(method, service.url + path)
        assert answer.status_code == status and answer.json()["error"]["message"]
    raw = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    url = f"{service.url}/v1/completions"
    assert httpx.post(url, content=b'{"prompt": ', headers=raw).status_code == 400
    assert httpx.post(url, content=b"[]", headers=raw).status_code == 400
    assert httpx.post(url, content=b'{"prompt": "\xff"}', headers=raw).status_code == 400
    assert httpx.post(url, content=b'{"prompt": "a"}', headers=raw | {"Content-Type": "text/plain"}).status_code == 415
    assert httpx.post(url, content=b" " * (5 << 20), headers=raw).status_code == 413


# Bodies as clients send them, each with the plain body that it must be answered like; from the clients' own code.
GIVEN_BACK = {  # what OpenAI's interface answers, as the SDK's model_dump gives it back
    "role": "assistant", "content": "the log", "refusal": None, "annotations": [], "audio": None, "function_call": None,
    "tool_calls": None,
}  # fmt: skip
TURNS = [CHAT[0], {"role": "assistant", "content": "the log"}, CHAT[0]]
PARTS = [{"role": "user", "content": [{"type": "text", "text": CHAT[0]["content"]}]}]
ASKED = {
    "openai, all that asks for nothing": (
        {
            "messages": CHAT, "max_completion_tokens": 9, "tools": [], "tool_choice": "none", "n": 1, "store": False,
            "parallel_tool_calls": True, "user": "u",
            "response_format": {"type": "text"}, "modalities": ["text"], "audio": None,
            "metadata": {"a": "b"}, "service_tier": "auto", "logprobs": False, "top_logprobs": None, "seed": None,
            "stop": None, "prediction": None, "stream_options": None, "logit_bias": None, "best_of": 1, "echo": False,
        },
        {"messages": CHAT, "max_tokens": 9},
    ),
    "openai, its own answers in the history": (
        {"messages": [CHAT[0], GIVEN_BACK, CHAT[0]], "max_tokens": 9}, {"messages": TURNS, "max_tokens": 9}
    ),
    "guidellm, chat": (
        {
            "messages": PARTS, "max_completion_tokens": 9, "stream": True, "stop": None, "ignore_eos": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
        {"messages": CHAT, "max_tokens": 9, "ignore_eos": True},
    ),
    "langchain, completions": (
        {"prompt": TEXT, "n": 2, "best_of": 2, "max_tokens": 1, "stream": True},
        {"prompt": TEXT, "n": 2, "max_tokens": 1, "stream": True},
    ),
    "vLLM's values for off": ({"prompt": TEXT, "top_k": -1, "bad_words": []}, {"prompt": TEXT}),
    "the whole vocabulary": ({"prompt": TEXT, "top_k": 290}, {"prompt": TEXT}),
    "lm-eval, generation from text": (
        {"prompt": [TEXT], "max_tokens": 9, "temperature": 0, "stop": ["\n\n", END, "Question:"], "foo": {"bar": 1}},
        {"prompt": TEXT, "max_tokens": 9},
    ),
}  # fmt: skip


FORMATS = [
    ({"regex": "[a-z]{3}"}, "[a-z]{3}"),
    ({"choice": ["the log", "a cat"]}, "the log|a cat"),
    ({"json": '{"type": "integer", "minimum": 0, "maximum": 99}'}, "[0-9]{1,2}"),
    ({"json": {"enum": ["x", "y"]}, "json_object": False}, '"(x|y)"'),
    ({"grammar": 'start: "a" | "b" start'}, "b*a"),
]


@pytest.mark.parametrize(("form", "pattern"), FORMATS)
def test_a_completion_and_a_chat_have_the_format_that_is_asked_for(service, form, pattern):
    """vLLM's field; OpenAI's is in test_answer_format.py."""
    asked = {"structured_outputs": form, "temperature": 1, "seed": 3, "max_tokens": 40}
    for body in ({"prompt": TEXT}, {"messages": CHAT}):
        found = post(service, "completions" if "prompt" in body else "chat/completions", **body, **asked)
        (choice,) = found.json()["choices"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert re.fullmatch(pattern, text) and choice["finish_reason"] == "stop"


CHAINED = {f"a{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(5000)}
HOSTILE = {
    "a chain that overflows the stack": {"$defs": CHAINED | {"a5000": {}}, "$ref": "#/$defs/a0"},
    "exponential time": {"type": "string", "allOf": [{"pattern": f"a{i}[ab]*"} for i in range(30)]},
    "deep": '{"items": ' * 5000 + "{}" + "}" * 5000,
    "no text": {"$ref": "#"},
}


@pytest.mark.parametrize("schema", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_form_is_refused_and_others_are_served(service, schema):
    answer = post(service, prompt=TEXT, path="completions", structured_outputs={"json": schema})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "structured_outputs", answer.text
    form = {"structured_outputs": {"choice": ["the log"]}, "max_tokens": 20}
    assert post(service, prompt=TEXT, path="completions", **form).json()["choices"][0]["text"] == "the log"


@pytest.mark.parametrize(("asked", "simply"), ASKED.values(), ids=ASKED)
def test_a_clients_body_is_answered_like_the_simple_one(service, asked, simply):
    def answer(body):
        path = "completions" if "prompt" in body else "chat/completions"
        found = post(service, path, **({"temperature": 0, "max_tokens": None} | body))
        assert found.status_code == 200, found.text
        if not body.get("stream"):
            (choice,) = found.json()["choices"]
            return choice["text"] if "text" in choice else choice["message"]["content"]
        events = [json.loads(line[6:]) for line in found.text.splitlines() if line.startswith("data: {")]
        choices = [choice for event in events for choice in event["choices"]]
        return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)

    assert answer(asked) == answer(simply) != ""


@pytest.mark.parametrize(
    ("path", "words", "limit"),
    [("chat/completions", 300, 4), ("chat/completions", 20, 9999), ("completions", 300, None)],
)
def test_a_prompt_that_is_too_long_is_known_by_its_code_and_words(service, path, words, limit):
    text = "x " * words
    body = {"messages": [{"role": "user", "content": text}]} if path.startswith("chat") else {"prompt": text}
    answer = post(service, path, **body | {"max_tokens": limit, "stream": True})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "context_length_exceeded"
    assert "this model's maximum context length is" in error["message"]  # how litellm knows it


def test_log_probabilities_of_a_chat_are_the_engines_whole_and_streamed(client, target):
    want = alone(target, CHAT, temperature=1, seed=9, max_new_tokens=20, logprobs=2).logprobs
    asked = dict(model="tiny", messages=CHAT, temperature=1, seed=9, max_tokens=20, logprobs=True, top_logprobs=2)
    whole = client.chat.completions.create(**asked).choices[0].logprobs.content
    chunks = list(client.chat.completions.create(**asked, stream=True))
    streamed = [one for chunk in chunks if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content]
    for found in (whole, streamed):
        assert [one.logprob for one in found] == pytest.approx([one.logprob for one in want], abs=1e-4)
        for one, entry in zip(found, want, strict=True):
            assert one.token == token_text(target.tokenizer, entry.token)
            assert bytes(one.bytes) == token_bytes(target.tokenizer, entry.token)
            assert [top.token for top in one.top_logprobs] == [
                token_text(target.tokenizer, token) for token, _ in entry.top
            ]
    assert client.chat.completions.create(**asked | {"logprobs": False, "top_logprobs": 0}).choices[0].logprobs is None


def test_log_probabilities_of_a_completion_are_the_engines(client, target):
    want = alone(target, TEXT, temperature=1, seed=9, max_new_tokens=9, logprobs=2)
    found = client.completions.create(model="tiny", prompt=TEXT, temperature=1, seed=9, max_tokens=9, logprobs=2)
    shown = found.choices[0].logprobs
    assert shown.token_logprobs == pytest.approx([one.logprob for one in want.logprobs], abs=1e-4)
    for token, logprob, top, one in zip(
        shown.tokens, shown.token_logprobs, shown.top_logprobs, want.logprobs, strict=True
    ):
        assert top[token] == logprob and max(top.values()) == pytest.approx(one.top[0][1], abs=1e-4)


def test_bytes_of_tokens_that_are_no_characters_join_to_the_text(target):
    tokenizer, text = target.tokenizer, "日本 🚀"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert len(ids) > 2 * len(text)
    entries = [TokenLogprob(token, -1.0, ((token, -1.0), (ids[0], -2.0))) for token in ids]
    content = chat_logprobs(tokenizer, entries)["content"]
    assert bytes(byte for one in content for byte in one["bytes"]).decode() == text
    found = completion_logprobs(tokenizer, entries)
    assert r"bytes:\xe6" in "".join(found["tokens"]) and [len(top) for top in found["top_logprobs"]] == [
        len({token, ids[0]}) for token in ids
    ]


def test_tool_calls_of_a_history_reach_the_template_as_objects(target, service, monkeypatch):
    each = "{% for call in m.tool_calls or [] %}{{ call.function.arguments.city }}{% endfor %}"
    template = "{% for m in messages %}{{ m.content or '' }}" + each + "{% endfor %}"
    monkeypatch.setattr(target.tokenizer, "chat_template", template)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": " the dog"}'}}
    asked = [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "9"}]
    found = post(service, messages=asked)
    expected = target.tokenizer(CHAT[0]["content"] + " the dog9").input_ids
    assert found.status_code == 200 and found.json()["usage"]["prompt_tokens"] == len(expected)
    assert post(service, messages=[{"role": "assistant", "content": None}]).status_code == 400
    assert post(service, messages=[{"role": "assistant", "tool_calls": 3}]).status_code == 400
    monkeypatch.setattr(target.tokenizer, "chat_template", "{{ messages[0].tool_calls[0].function.arguments + '9' }}")
    expected = target.tokenizer('{"city": " the dog"}9').input_ids
    assert post(service, messages=asked[1:]).json()["usage"]["prompt_tokens"] == len(expected)


def test_a_page_of_another_name_does_not_reach_a_server_of_this_machine(target):
    with served(target, host="127.0.0.1") as service:
        assert post(service, headers={}).status_code == 200
        assert post(service, headers={"Host": "localhost:8000"}).status_code == 200
        assert post(service, headers={"Host": "evil.example:8000"}).status_code == 403


def test_an_event_is_one_line_to_every_client():
    assert json.loads(_event({"text": "a\u2028b\x85"})[6:]) == {"text": "a\u2028b\x85"}
    assert len(_event({"text": "a\u2028b\x85"}).decode().splitlines()) == 2  # and the blank one that ends it


def test_a_chats_template_gets_its_variables_and_its_refusal_is_the_messages_fault(target, service, monkeypatch):
    monkeypatch.setattr(target.tokenizer, "chat_template", "{{ messages[0].content }}{{ style }}")
    found = post(service, chat_template_kwargs={"style": " the dog"}).json()
    assert found["usage"]["prompt_tokens"] == len(target.tokenizer(CHAT[0]["content"] + " the dog").input_ids)
    monkeypatch.setattr(target.tokenizer, "chat_template", "{{ raise_exception('no') }}")
    refused = post(service, messages=CHAT)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "messages"


def test_a_chats_stream_begins_with_its_first_token(target, monkeypatch):
    """`vllm bench serve` takes the first chunk, even one without text, for the first token."""
    with served(target) as service:
        go_on, step = threading.Event(), service.engine.runner.step
        monkeypatch.setattr(service.engine.runner, "step", lambda: go_on.wait(30) and step())
        body = {"messages": CHAT, "max_tokens": 4, "stream": True, "n": 2}
        with httpx.stream("POST", f"{service.url}/v1/chat/completions", json=body, timeout=60) as stream:
            threading.Timer(0.3, go_on.set).start()
            lines = [(line, go_on.is_set()) for line in stream.iter_lines() if line.startswith("data: {")]
    choices = [json.loads(line[6:])["choices"][0] for line, _ in lines]
    assert all(decoded for _, decoded in lines)
    for i in range(2):
        assert [one["delta"].get("role") for one in choices if one["index"] == i][:2] == ["assistant", None]


def test_a_full_queue_says_when_to_come_again(target, monkeypatch):
    with served(target, queue=1, slots=1) as service, httpx.Client(timeout=60) as client:
        go_on, step = threading.Event(), service.engine.runner.step
        monkeypatch.setattr(service.engine.runner, "step", lambda: go_on.wait(30) and step())
        long = {"messages": CHAT, "max_tokens": 150, "ignore_eos": True, "stream": True}
        with client.stream("POST", f"{service.url}/v1/chat/completions", json=long) as one:
            first = one.iter_lines()
            with client.stream("POST", f"{service.url}/v1/chat/completions", json=long) as two:
                assert two.status_code == 200
                refused = post(service, headers={})
                assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
                go_on.set()
                assert [line for line in first if line][-1] == "data: [DONE]"
                assert [line for line in two.iter_lines() if line][-1] == "data: [DONE]"
        assert post(service, headers={}).status_code == 200
        never = post(service, headers={}, n=3)  # more than fit into an empty queue
        assert never.status_code == 400 and never.json()["error"]["param"] == "n"


def test_clients_that_misbehave_take_nothing_from_the_others(target):
    """Many streams on few slots: some read to the end, also slowly, and some hang up in the middle, before the first
    token or within their own request. Afterwards every slot is free again."""

    async def stream(client, url, seed, kind):
        body = {"prompt": TEXT, "max_tokens": 24, "temperature": 1, "seed": seed, "stream": True, "ignore_eos": True}
        text = ""
        async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            if kind == "leaves at once":
                return None
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                text += json.loads(line[6:])["choices"][0]["text"]
                if kind == "leaves" and len(text) > 5:
                    return None
                if kind == "slow":
                    await asyncio.sleep(0.02)
        return text

    async def half(url):
        port = int(url.rsplit(":", 1)[1])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        writer.write(b'Content-Length: 100\r\n\r\n{"prompt": "the c')
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()

    async def whole_and_leaves(client, url):
        body = {"prompt": TEXT, "max_tokens": 150, "ignore_eos": True}
        with pytest.raises(httpx.ReadTimeout):
            await client.post(f"{url}/v1/completions", json=body, timeout=httpx.Timeout(60, read=0.05))

    async def all_of_them(url):
        kinds = ["reads", "leaves", "slow", "leaves at once"] * 8
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as client:
            streams = [stream(client, url, seed, kind) for seed, kind in enumerate(kinds)]
            others = [half(url) for _ in range(4)] + [whole_and_leaves(client, url) for _ in range(2)]
            found = await asyncio.gather(*streams, *others)
        return found[: len(streams)]

    with served(target) as service:
        reasons, deliver = [], service.thread._deliver
        service.thread._deliver = lambda piece: (
            reasons.append(getattr(piece.generation, "finish_reason", "")) or deliver(piece)
        )
        found = asyncio.run(all_of_them(service.url))
        params = [SamplingParams(temperature=1, seed=seed, max_new_tokens=24, ignore_eos=True) for seed in range(32)]
        want = [one.text for one in Engine(target).generate([TEXT] * 32, params)]
        for seed, text in enumerate(found):
            assert text is None if seed % 2 else text == want[seed]
        deadline = time.monotonic() + 20
        while len(service.thread._jobs) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(service.thread._jobs) == 0 and reasons.count("cancelled") > 2 + 4, (
            "streams too, not only whole answers"
        )
        assert post(service, headers={}).status_code == 200


def test_an_engine_that_fails_ends_every_answer_and_the_server(target, monkeypatch):
    with pytest.raises(AssertionError), served(target) as service, httpx.Client(timeout=60) as client:
        monkeypatch.setattr("threading.excepthook", lambda args: None)
        body = {"messages": CHAT, "max_tokens": 150, "ignore_eos": True, "stream": True}
        with client.stream("POST", f"{service.url}/v1/chat/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            monkeypatch.setattr(service.engine.runner, "step", lambda: 1 / 0)
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert events[-1]["error"]["type"] == "server_error"
        assert service.thread.failed


def test_what_is_not_done_in_time_is_cut_off_when_the_server_ends(target, monkeypatch):
    monkeypatch.setattr("longdraft.infer.server.app.DRAIN_SECONDS", 0)
    with served(target) as service, httpx.Client(timeout=60) as client, ThreadPoolExecutor(1) as pool:
        body = {"messages": CHAT, "max_tokens": 150, "ignore_eos": True}
        step = service.engine.runner.step
        monkeypatch.setattr(service.engine.runner, "step", lambda: time.sleep(0.1) or step())
        with client.stream("POST", f"{service.url}/v1/chat/completions", json=body | {"stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            whole = pool.submit(post, service, headers={}, **body)
            while len(service.thread._jobs) < 2:
                time.sleep(0.01)
            service.server.should_exit = True
            with pytest.raises(httpx.HTTPError):
                list(lines)
        assert isinstance(whole.exception(30), httpx.HTTPError) or whole.result().status_code == 500


def test_what_is_served_is_recorded_a_session_a_sequence(target, tmp_path):
    recorder, sampled = Recorder(tmp_path, "hash", print), {"temperature": 1, "seed": 3}
    first = alone(target, CHAT, max_new_tokens=12, **sampled)
    # The next turn's prompt, in ids, since this target writes tokens that its text would not be cut into.
    second = alone(target, [*first.prompt, *first.tokens, 7, 7], max_new_tokens=12, **sampled)
    others = [alone(target, TEXT, max_new_tokens=12, temperature=1, seed=3 + i) for i in range(2)]
    with served(target, on_end=recorder.add) as service:
        client = openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=60)
        asked = {"model": "tiny", "max_tokens": 12, **sampled}
        client.chat.completions.create(messages=CHAT, **asked)
        assert list(client.completions.create(prompt=second.prompt, stream=True, **asked))
        client.completions.create(prompt=TEXT, n=2, **asked)
        client.completions.create(prompt="the dog", extra_body={"store": False}, **asked)
        cut = client.completions.create(prompt=TEXT, stream=True, extra_body={"ignore_eos": True},
                                        **{**asked, "max_tokens": 150, "seed": 9})  # fmt: skip
        next(cut)
        cut.close()  # it hangs up, and what was written until then counts
        while any(service.thread.engine.pool.sequences):
            time.sleep(0.01)
    recorder.close()
    whole = alone(target, TEXT, temperature=1, seed=9, max_new_tokens=150, ignore_eos=True)
    (path,) = tmp_path.glob("*.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert {record.pop("tokenizer_sha256") for record in records} == {"hash"}
    session, *both, last = records
    n, ends = len(first.prompt), (len(first.prompt) + len(first.tokens), len(second.prompt) + len(second.tokens))
    assert session == {
        "tokens": second.prompt + second.tokens,
        "answers": [[n, ends[0]], [len(second.prompt), ends[1]]],
    }
    want = [{"tokens": one.prompt + one.tokens, "answers": [[len(one.prompt), len(one.prompt) + 12]]} for one in others]
    assert sorted(both, key=str) == sorted(want, key=str)
    assert last["answers"] == [[len(whole.prompt), len(last["tokens"])]]
    assert len(whole.prompt) < len(last["tokens"]) < len(whole.prompt) + 150
    assert (whole.prompt + whole.tokens)[: len(last["tokens"])] == last["tokens"]


def record(prompt, tokens):
    return Generation(0, prompt, tokens, None, 0, "length", Statistics())


def recorded(folder, count=0):
    """The sessions in a folder's files, once it has this many."""
    while len(files := sorted(folder.glob("*.jsonl"), key=lambda one: one.stat().st_mtime_ns)) < count:
        time.sleep(0.01)
    lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files)
    return [(line["tokens"], [tuple(span) for span in line["answers"]]) for line in lines]


def test_sessions_are_joined_and_repetitions_are_not(tmp_path):
    recorder = Recorder(tmp_path, "hash", print)
    turns = [([1, 2], [3]), ([1, 2], [3, 4]), ([1, 2, 3, 5], [6]), ([1, 2, 3, 4, 9], [8]), ([1, 2, 3, 4, 9], [7, 7])]
    for turn in [*turns, ([1, 2, 3, 5], [6]), ([1, 2], []), *turns[3:]]:
        recorder.add(record(*turn))
    recorder.close()
    want = [
        ([1, 2, 3, 5, 6], [(2, 3), (4, 5)]),
        ([1, 2, 3, 4, 9, 8], [(2, 4), (5, 6)]),
        ([1, 2, 3, 4, 9, 7, 7], [(5, 7)]),
    ]
    assert recorded(tmp_path) == want


def test_a_session_that_nobody_continues_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("longdraft.infer.server.recorder.IDLE_SECONDS", 0.2)
    lines, folder = [], tmp_path / "folder"
    recorder = Recorder(folder, "hash", lines.append)
    recorder.add(record([1, 2], [3]))
    assert recorded(folder, 1) == [([1, 2, 3], [(2, 3)])]
    recorder.add(record([1, 2, 3, 4], [5]))  # it goes on afterwards, and the first answer is context
    assert recorded(folder, 2)[1:] == [([1, 2, 3, 4, 5], [(4, 5)])]
    # What cannot be written is lost and said, and the next is written.
    moved = folder.rename(tmp_path / "moved")
    folder.write_text("no folder")
    recorder.add(record([7], [8]))
    while not lines:
        time.sleep(0.01)
    assert "1 recorded sessions are lost" in lines[0] and str(folder) in lines[0]
    folder.unlink()
    moved.rename(folder)
    recorder.add(record([9], [10]))
    recorder.close()
    assert recorded(folder)[-1] == ([9, 10], [(1, 2)])


@pytest.mark.parametrize("limit", ["MOST_TOKENS", "MOST_SESSIONS"])
def test_memory_is_bounded(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(f"longdraft.infer.server.recorder.{limit}", 100 if limit == "MOST_TOKENS" else 10)
    recorder = Recorder(tmp_path, "hash", print)
    for i in range(30):
        recorder.add(record([i] * 9, [i]))
    recorder.close()
    sizes = [len(path.read_text().splitlines()) for path in tmp_path.glob("*.jsonl")]
    assert sum(sizes) == 30 and max(sizes) <= 10


def test_a_disk_that_hangs_does_not_keep_the_server_from_ending(tmp_path, monkeypatch):
    monkeypatch.setattr("longdraft.infer.server.recorder.CLOSE_SECONDS", 0.1)
    lines, hangs = [], threading.Event()
    recorder = Recorder(tmp_path, "hash", lines.append)
    monkeypatch.setattr("longdraft.infer.server.recorder.write_atomically", lambda *_: hangs.wait())
    recorder.add(record([1], [2]))
    recorder.close()
    assert "lost" in lines[0]
    hangs.set()
