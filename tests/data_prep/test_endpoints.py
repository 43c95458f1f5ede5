"""Answers from OpenAI-style servers: a real server over loopback that fails in every way, and the requests it gets."""

import hashlib
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from longdraft.data_prep import endpoints as module
from longdraft.data_prep.endpoints import PROBE, EndpointClient
from longdraft.data_prep.response_generation import Completion
from longdraft.launch.regenerate import main

SAMPLING = {"max_tokens": 30, "temperature": 0.7}


class Server(ThreadingHTTPServer):
    """A model "m" whose answer is a function of prompt and seed. failing: what happens to the n-th POST, by n; `always`
    to all of them. usage: what is said of the probe, in place of its tokens."""

    daemon_threads = True

    def __init__(self, tokenizer, models=("m",), failing=None, always=None, usage=None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.tokenizer, self.models, self.failing, self.always = tokenizer, models, failing or {}, always
        self.usage, self.asked, self.lock = usage, [], threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def reply(self, status, body, headers=(), cut=0):
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in (("Content-Length", len(raw)), *headers):
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(raw[: len(raw) - cut])
        if cut:
            self.close_connection = True

    def do_GET(self):
        self.reply(200, {"data": [{"id": name} for name in self.server.models]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append((body, dict(self.headers)))
            how = self.server.failing.get(len(self.server.asked) - 1, self.server.always)
        prompt = body["prompt"]
        if isinstance(prompt, str):
            own = len(self.server.tokenizer(prompt)["input_ids"])
            usage = self.server.usage or {"prompt_tokens": own}
            self.reply(200, {"choices": [{"text": "", "finish_reason": "length"}], "usage": usage})
            return
        answer = {"choices": [{"text": text_of(prompt, body.get("seed")), "finish_reason": "stop"}]}
        if how is None:
            self.reply(200, answer)
        elif isinstance(how, int):
            self.reply(how, {"error": {"message": "not now"}})
        elif how == "half":
            self.reply(200, answer, cut=9)
        elif how == "zipped":
            self.reply(200, answer, [("Content-Encoding", "gzip")])
        elif how == "late":
            threading.Event().wait(3)
        elif how == "closed":
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
        else:
            self.reply(200, how)


def text_of(prompt, seed):
    return "said " + hashlib.sha256(f"{prompt} {seed}".encode()).hexdigest()[:8]


@pytest.fixture
def serve(tiny_tokenizer):
    servers = []

    def start(**given):
        servers.append(Server(tiny_tokenizer, **given))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    pauses = []
    monkeypatch.setattr(module.time, "sleep", pauses.append)
    return pauses


@pytest.fixture
def connect(tiny_tokenizer):
    def client(*servers, seconds=30.0, positions=1000, **settings):
        urls = [one if isinstance(one, str) else one.url for one in servers]
        return EndpointClient(urls, SAMPLING, tiny_tokenizer, positions, seconds=seconds, **settings)

    return client


def answers(client, count=12):
    found = client([[5, 6, index] for index in range(count)], [2**64 - 1 - index for index in range(count)])
    return sorted(found, key=lambda one: one.index)


def test_what_is_sent_and_what_comes_back(serve, connect, tiny_tokenizer, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "a key")
    server = serve()
    client = connect(f"{server.url}/v1/", concurrency=3)
    client.check()
    assert server.asked[0][0]["prompt"] == PROBE
    found = answers(client)
    eos = tiny_tokenizer.eos_token_id
    want = [[*tiny_tokenizer(text_of([5, 6, i], -1 - i))["input_ids"], eos] for i in range(12)]
    assert found == [Completion(i, tokens, True) for i, tokens in enumerate(want)]
    body, headers = next(one for one in server.asked if one[0]["prompt"] == [5, 6, 3])
    assert body == {"model": "m", "prompt": [5, 6, 3], "seed": -4, **SAMPLING}  # 64 bits, as servers take them: signed
    assert headers["Authorization"] == "Bearer a key"


def broken_off(why):
    return {"choices": [{"text": "sai", "finish_reason": why}]}


BODIES = [{"choices": []}, {"choices": [{"text": 1}]}, b"<html>", *map(broken_off, ("abort", "error", None))]


@pytest.mark.parametrize("how", [500, 503, 429, "half", "zipped", "closed", "late", *BODIES], ids=str)
def test_what_may_pass_is_asked_again(serve, connect, no_pauses, how):
    want = answers(connect(serve()))
    server = serve(failing={2: how, 3: how, 7: how})
    assert answers(connect(server, seconds=0.5 if how == "late" else 30.0, concurrency=4)) == want
    assert len(server.asked) == 12 + 3 and len(no_pauses) == 3
    assert set(no_pauses) <= {1.0, 2.0, 4.0}


def test_another_endpoint_takes_over(serve, connect):
    broken, sound = serve(always=500), serve()
    assert answers(connect(broken, sound)) == answers(connect(sound))
    assert len(broken.asked) >= 6


WRONG = ["http://a:b", "http://[::1:8000", "https://ex\0ample", "http://xn--", "http://", "localhost:80"]


def test_errors(serve, connect, monkeypatch, tiny_tokenizer):
    def error(call):
        with pytest.raises(ValueError) as caught:
            call()
        return str(caught.value)

    refusing = serve(always=400)
    said = error(lambda: answers(connect(refusing, concurrency=2), count=300))
    assert "refuses with 400" in said and "not now" in said and "--max-length" in said and len(refusing.asked) < 150
    monkeypatch.setattr(module, "TRIES", 3)
    always_busy = serve(always=502)
    said = error(lambda: answers(connect(always_busy, concurrency=1), count=1))
    assert "in 3 tries, the last time with 502" in said and len(always_busy.asked) == 3
    assert "ConnectError" in error(lambda: connect("http://127.0.0.1:9"))
    assert "--model: the servers have k, m;" in error(lambda: connect(serve(models=("m", "k"))))
    assert "--model: the servers have k, m;" in error(lambda: connect(serve(), serve(models=("k",))))
    assert "--model: the servers have none" in error(lambda: connect(serve(models=())))
    for url in WRONG:
        assert f"--endpoint: {url!r}" in error(lambda url=url: connect(url))
    assert "counts None tokens" in error(connect(serve(usage={"prompt_tokens": None})).check)
    other = serve()
    other.tokenizer = lambda text: {"input_ids": [0] * 7}
    own = len(tiny_tokenizer(PROBE)["input_ids"])
    said = error(connect(other).check)
    assert "counts 7 tokens" in said and f"makes {own};" in said
    # A name that is given needs no server before there is work.
    client = connect("http://127.0.0.1:9", model="m")
    assert client.model == "m" and "ConnectError" in error(client.check)


def test_no_more_is_asked_for_than_the_positions_hold(serve, connect):
    for positions, most in ((1000, 30), (33, 30), (10, 7), (4, 1)):
        server = serve()
        answers(connect(server, positions=positions))
        assert {body["max_tokens"] for body, _ in server.asked} == {most}


def test_a_text_behind_a_prompt_is_read_as_the_target_wrote_it(serve, blank_tokenizer):
    """vLLM's text begins with the first word's blank, and the tokenizer would add another one."""
    prompt = blank_tokenizer("hi")["input_ids"]
    for text, words in ((" the gate", ["▁the", "▁", "g", "ate"]), ("gate", ["g", "ate"])):
        choice = {"text": text, "finish_reason": "stop"}
        server = serve(always={"choices": [choice]})
        client = EndpointClient([server.url], SAMPLING, blank_tokenizer, 99)
        (found,) = client([prompt], [0])
        ids = blank_tokenizer.convert_tokens_to_ids(words)
        assert found == Completion(0, [*ids, blank_tokenizer.eos_token_id], True)


def test_control_tokens_are_asked_for_and_leave_an_answer_out(serve, smollm2, tmp_path, capsys):
    """If the server removed them, the rest would be a text that the target never wrote."""
    source = tmp_path / "chats.jsonl"
    source.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    server = serve(always={"choices": [{"text": "analysis<|im_start|>final", "finish_reason": "stop"}]})
    server.tokenizer = smollm2
    given = ["--source", str(source), "--target", "smollm2-135m", "--endpoint", server.url]
    assert main([*given, "--out", str(tmp_path / "out")]) == 2
    assert "special_token_in_answer: 1" in capsys.readouterr().err
    assert [body["skip_special_tokens"] for body, _ in server.asked if isinstance(body["prompt"], list)] == [False]
