"""The server with OpenAI's own client and with clients that misbehave. Its answers are those of the engine alone."""

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import openai
import pytest
import torch
import uvicorn
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.infer.server import UNREAD_SECONDS, Server, Service, Settings, create_app, serve
from longdraft.infer.server_protocol import Completion, parse, requests_of
from longdraft.models.hf import load_target

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
TEXT = "the cat sat on the mat and the dog sat on the log. "
CHAT = [{"role": "user", "content": "the cat and the dog"}]
KEY = "a key"


@pytest.fixture(scope="module")
def target(shared, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server") / "tiny"
    saved = shared("tiny_checkpoint.py").save(folder, TEXT * 40 + "naïve 世界 🙂 ", 290, seed=3, chat_template=TEMPLATE)
    return load_target(saved, torch.float32)


@contextmanager
def served(target, queue=64, slots=3, drafter="token_recycling+prompt_lookup", drain=30, **settings):
    """Run a server on a free port of this machine; yields its service."""
    engine = Engine(target, drafter, slots=slots, max_length=200, prefill_chunk=16, nodes=None)
    service = Service(engine, Settings("tiny", queue=queue, **settings))
    config = uvicorn.Config(create_app(service), log_level="warning")
    server = service.server = Server(config, service.thread, drain)
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


def test_a_chat_is_what_the_engine_gives_with_its_seed(client, target):
    want = alone(target, CHAT, temperature=0.8, seed=7, max_new_tokens=20)
    found = client.chat.completions.create(model="tiny", messages=CHAT, temperature=0.8, seed=7, max_tokens=20)
    assert found.object == "chat.completion" and found.model == "tiny"
    (choice,) = found.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", want.text, "length")
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(want.prompt), 20)


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


def test_a_streamed_chat_is_the_whole_one(client, target):
    want = alone(target, CHAT, temperature=0.8, seed=8, max_new_tokens=40)
    stream = client.chat.completions.create(
        model="tiny", messages=CHAT, temperature=0.8, seed=8, max_completion_tokens=40, stream=True,
        stream_options={"include_usage": True, "include_accepted": True},
    )  # fmt: skip
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == want.text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert last.choices == [] and last.usage.total_tokens == len(want.prompt) + 40
    told = [chunk.accepted for chunk in chunks[1:]]
    assert sum(one["tokens"] for one in told) == 40
    figures = last.metrics["speculative_decoding"]
    assert sum(one["accepted"] for one in told) == figures["num_accepted_draft_tokens"]
    for chunk, one in zip(chunks[1:], told, strict=True):
        assert one["characters"] <= len(chunk.choices[0].delta.content or "")


def test_speculative_figures_agree_with_each_other(client):
    for _ in range(2):  # the second time, the drafter knows the tokens
        found = client.completions.create(model="tiny", prompt=TEXT * 3, max_tokens=60, temperature=0)
    figures = found.metrics["speculative_decoding"]
    histogram = figures["acceptance_histogram"]
    accepted = sum(count * times for count, times in enumerate(histogram))
    assert sum(histogram) == figures["num_spec_steps"] > 0
    assert accepted == figures["num_accepted_draft_tokens"] > 0
    assert figures["mean_acceptance_length"] == pytest.approx(1 + accepted / figures["num_spec_steps"])
    assert figures["draft_acceptance_rate"] == pytest.approx(accepted / figures["num_draft_tokens"])
    assert len(histogram) == figures["num_spec_tokens"] + 1 == 25


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


@pytest.mark.parametrize("seed", [-5, 2**63 - 1, 2**64 - 1])
def test_every_choice_has_the_next_seed(target, seed):
    body = parse(Completion, json.dumps({"prompt": "the cat", "n": 3, "seed": seed}).encode())
    seeds = [one.sampling.seed for one in requests_of(body, target, 200)]
    assert seeds == [seed, *((seed + i if seed + i < 2**64 else i - 1) for i in (1, 2))]


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
    own = {"top_k": 9, "min_p": 0.02, "repetition_penalty": 1.1, "stop_token_ids": [5], "ignore_eos": True}
    found = client.completions.create(
        model="tiny", prompt=TEXT, temperature=1, top_p=0.9, seed=5, max_tokens=30, logit_bias={str(ban): -100},
        extra_body=own,
    )  # fmt: skip
    own["stop_token_ids"] = (5,)
    want = alone(
        target, TEXT, temperature=1, top_p=0.9, seed=5, max_new_tokens=30, banned_token_ids=(ban,), **own
    )  # fmt: skip
    assert found.choices[0].text == want.text != plain.text


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
        with httpx.stream("POST", f"{service.url}/v1/completions", json=asked | {"n": 1, "stream": True}) as stream:
            events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
        refused = post(service, "completions", skip_special_tokens=False, stream=True, **asked)
    for one, whole, tokens in zip(plain, shown, answers, strict=True):
        assert "the" + one["text"] == target.tokenizer.decode([3, *tokens], skip_special_tokens=True)
        ended = whole["finish_reason"] == "stop"
        assert "the" + whole["text"] == target.tokenizer.decode([3, *tokens[: len(tokens) - ended]])
    assert {whole["finish_reason"] for whole in shown} == {"stop", "length"}
    assert any("<x>" in whole["text"] for whole in shown) and any(one["text"].startswith(" cat") for one in plain)
    assert "".join(event["choices"][0]["text"] for event in events) == plain[0]["text"]
    assert "skip_special_tokens: false does not go with stream or stop" in refused.json()["error"]["message"]


def test_a_chat_without_a_limit_fills_its_positions(client, target):
    found = client.chat.completions.create(model="tiny", messages=CHAT, temperature=0, extra_body={"ignore_eos": True})
    assert found.usage.total_tokens == 200 and found.choices[0].finish_reason == "length"


def test_models_health_metrics_and_the_page(client, service):
    (model,) = client.models.list()
    assert client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError, match="'huge' is not served here"):
        client.models.retrieve("huge")
    assert (model.id, model.max_model_len) == ("tiny", 200)
    assert httpx.get(f"{service.url}/health").status_code == 200
    text = httpx.get(f"{service.url}/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["longdraft_generation_tokens_total"]) > 0 and values["longdraft_requests_running"] == "0.0"
    assert values["longdraft_time_to_first_token_seconds_count"] == values["longdraft_request_seconds_count"]
    page = httpx.get(service.url)
    assert page.headers["content-type"].startswith("text/html") and "//" not in page.text.replace("// Char", "")


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "hello"}, "messages", "valid array"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]},
         "messages", "reads only text"),
        ({"messages": [{"content": "x"}]}, "messages", "role is None"),
        ({"messages": [*CHAT, CHAT[0] | {"foo": 1}]}, "messages", "messages.1.foo: unknown; a message has role, "),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": 2000}, "max_tokens", "max_tokens: 2000, but the prompt has"),
        ({"max_tokens": 10**30}, "max_tokens", "both together may have at most 200; ask for at most 1"),
        ({"max_tokens": "4"}, "max_tokens", "valid integer"),
        ({"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens", "tion_tokens: 0; give at"),
        ({"max_tokens": None, "max_completion_tokens": 999}, "max_completion_tokens", "tion_tokens: 999, but"),
        ({"max_completion_tokens": 3}, "max_completion_tokens", "max_tokens, max_completion_tokens: 4 and 3; give one"),
        ({"max_tokens": -7, "max_completion_tokens": 3}, "max_completion_tokens", "-7 and 3; give one of them"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "it is for a stream; give stream too"),
        ({"stream": True, "stream_options": {"foo": 1}}, "stream_options", "stream_options.foo: unknown; the fields "
         "served are include_accepted"),
        ({"temperature": -1}, "temperature", "temperature=-1"),
        ({"top_p": 0}, "top_p", "top_p=0"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 1000}, "n", "less than or equal to 128"),
        ({"seed": 2**70}, "seed", "64 bits"),
        ({"stop": [""]}, "stop", "not empty"),
        ({"stop": 5}, "stop", "stop: give a text or a list of texts"),
        ({"logprobs": True}, "logprobs", "not served"),
        ({"top_logprobs": 3}, "top_logprobs", "not served"),
        ({"tools": [{"type": "function"}]}, "tools", "at most 0"),
        ({"response_format": {"type": "json_object"}}, "response_format", "text"),
        ({"logit_bias": {"3": 5}}, "logit_bias", "only bans"),
        ({"logit_bias": {"9" * 5000: -100}}, "logit_bias", "only bans"),
        ({"logit_bias": {"999": -100}}, "logit_bias", "logit_bias must lie in 0..289"),
        ({"stop_token_ids": [999]}, "stop_token_ids", "stop_token_ids must lie in 0..289"),
        ({"chat_template": "/etc/passwd"}, "chat_template", "unknown; the fields served are"),
        ({"messages": [{"role": "user", "content": "x " * 300}]}, "messages", "at most 199 fit"),
        ({"prompt": [1, "a"]}, "prompt", "prompt: give a text, token ids, or a list of either"),
        ({"prompt": []}, "prompt", "prompt: []; give a text, token ids, or a list of either"),
        ({"prompt": ["the", ""]}, "prompt", "prompt 1 has no tokens"),
        ({"prompt": ["the", "x " * 300]}, "prompt", "prompt 1 has 600 tokens; at most 199 fit"),
        ({"prompt": "the", "max_tokens": 300}, "max_tokens", "max_tokens: 300, but the prompt has"),
        ({"prompt": "x " * 95}, "max_tokens", "max_tokens: 16, the default, but the prompt has 190 tokens"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(service, body, field, message):
    answer = post(service, "completions" if "prompt" in body else "chat/completions", **body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == field and message in error["message"], error


def test_other_refusals_are_errors_that_the_client_knows(client, service):
    with pytest.raises(openai.NotFoundError, match="'gpt' is not served here, 'tiny' is"):
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
    assert "the body: " in httpx.post(url, content=b"[]", headers=raw).json()["error"]["message"]
    assert httpx.post(url, content=b'{"prompt": "\xff"}', headers=raw).status_code == 400
    assert httpx.post(url, content=b'{"prompt": "a"}', headers=raw | {"Content-Type": "text/plain"}).status_code == 415
    assert httpx.post(url, content=b" " * (5 << 20), headers=raw).status_code == 413
    assert "best_of" in post(service, "completions", prompt="a", best_of=3).json()["error"]["message"]
    assert "suffix" in post(service, "completions", prompt="a", suffix="b").json()["error"]["message"]


def test_keys_without_a_value_ask_for_nothing(client):
    own = CHAT[0] | {"refusal": None, "audio": None, "name": None}
    texts = [
        client.chat.completions.create(model="tiny", messages=[one], temperature=0, max_tokens=4, **more)
        .choices[0].message.content
        for one, more in ((CHAT[0], {}), (own, {}), (CHAT[0], {"max_completion_tokens": 4, "stream_options": None}))
    ]  # fmt: skip
    assert len(set(texts)) == 1


def test_a_chat_template_that_fails_is_the_messages_fault(target, service, monkeypatch):
    """A template that reads a tool's arguments as an object gets it from OpenAI's JSON text; any other text is refused.
    A template that reads the text gets the text."""
    template = (
        "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        "{% for k, v in c.function.arguments | items %}{{ k }} is {{ v }} {% endfor %}{% endfor %}{% endfor %}"
    )
    monkeypatch.setattr(target.tokenizer, "chat_template", template)
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"cat": "mat"}'}}]
    said = {"role": "assistant", "content": None, "tool_calls": calls}
    answer = post(service, messages=[*CHAT, said]).json()
    assert answer["usage"]["prompt_tokens"] == len(target.tokenizer(CHAT[0]["content"] + "cat is mat ").input_ids)
    calls[0]["function"]["arguments"] = "no object"
    refused = post(service, messages=[*CHAT, said])
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "messages"
    assert "chat template refuses these messages" in refused.json()["error"]["message"]
    template = "{% for m in messages %}{{ m.tool_calls[0].function.arguments + '!' }}{% endfor %}"
    monkeypatch.setattr(target.tokenizer, "chat_template", template)
    calls[0]["function"]["arguments"] = '{"a": 1}'
    answer = post(service, messages=[said]).json()
    assert answer["usage"]["prompt_tokens"] == len(target.tokenizer('{"a": 1}!').input_ids)


def test_a_signal_that_came_before_the_server_ends_it(target):
    ended, found = threading.Event(), []
    ended.set()
    listening = socket.create_server(("127.0.0.1", 0))
    engine = Engine(target, slots=1, max_length=50)
    thread = threading.Thread(target=lambda: found.append(serve(engine, Settings("tiny"), listening, 5, ended)))
    thread.daemon = True
    thread.start()
    thread.join(30)
    assert found == [True]


def test_a_full_queue_says_when_to_come_again(target, monkeypatch):
    with served(target, queue=1, slots=1) as service, httpx.Client(timeout=60) as client:
        go_on, step = threading.Event(), service.engine.runner.step
        monkeypatch.setattr(service.engine.runner, "step", lambda: go_on.wait(30) and step())
        long = {"messages": CHAT, "max_tokens": 150, "ignore_eos": True, "stream": True}
        with client.stream("POST", f"{service.url}/v1/chat/completions", json=long) as one:
            first = one.iter_lines()
            next(first)
            with client.stream("POST", f"{service.url}/v1/chat/completions", json=long) as two:
                assert two.status_code == 200
                refused = post(service, headers={})
                assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
                assert 1 <= int(refused.headers["retry-after"]) <= 60
                go_on.set()
                assert [line for line in first if line][-1] == "data: [DONE]"
                assert [line for line in two.iter_lines() if line][-1] == "data: [DONE]"
        assert post(service, headers={}).status_code == 200
        never = post(service, headers={}, n=3)  # more than fit into an empty queue
        assert never.status_code == 400 and "3 answers in one request, and this server holds 2" in never.text


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
        found = asyncio.run(all_of_them(service.url))
        params = [SamplingParams(temperature=1, seed=seed, max_new_tokens=24, ignore_eos=True) for seed in range(32)]
        want = [one.text for one in Engine(target).generate([TEXT] * 32, params)]
        for seed, text in enumerate(found):
            assert text is None if seed % 2 else text == want[seed]
        deadline = time.monotonic() + 20
        while service.thread.in_flight and time.monotonic() < deadline:
            time.sleep(0.02)
        assert service.thread.in_flight == 0
        assert post(service, headers={}).status_code == 200


def test_a_body_that_does_not_come_is_given_up(target):
    with served(target, body_seconds=0.2) as service, socket.socket() as connection:
        connection.settimeout(20)
        connection.connect(("127.0.0.1", int(service.url.rsplit(":", 1)[1])))
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        connection.sendall(b'Content-Length: 100\r\n\r\n{"prompt": "the c')
        assert connection.recv(200).startswith(b"HTTP/1.1 408 ")


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
        assert service.thread.failed and service.server.should_exit


def test_what_is_not_done_when_the_server_must_end_gets_an_error(target, monkeypatch, capfd):
    with served(target, drain=0) as service, httpx.Client(timeout=60) as client, ThreadPoolExecutor(1) as pool:
        go_on, step = threading.Event(), service.engine.runner.step
        monkeypatch.setattr(service.engine.runner, "step", lambda: go_on.wait(30) and step())
        body = {"messages": CHAT, "max_tokens": 150, "ignore_eos": True}
        with client.stream("POST", f"{service.url}/v1/chat/completions", json=body | {"stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            whole = pool.submit(post, service, headers={}, **body)
            while service.thread.in_flight < 2:
                time.sleep(0.01)
            service.server.should_exit = True
            assert service.server.config.timeout_graceful_shutdown == UNREAD_SECONDS
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        errors = events[-1]["error"], whole.result().json()["error"]
        assert whole.result().status_code == 503
        assert {error["message"] for error in errors} == {"the server stopped before this was done"}
        go_on.set()
    assert capfd.readouterr().err == ""
