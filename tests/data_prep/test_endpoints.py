"""Answers from OpenAI-style servers: a real server over loopback that fails in every way, and the requests it gets."""

import hashlib
import json
import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from longdraft.data_prep import endpoints as module
from longdraft.data_prep.endpoints import EndpointClient
from longdraft.data_prep.regenerate import Completion
from longdraft.launch.regenerate import main

SAMPLING = {"max_tokens": 30, "temperature": 0.7}


class Server(ThreadingHTTPServer):
    """A model whose answer is a function of prompt and seed. failing: what happens to the n-th POST, by n; `always` to
    all of them."""

    daemon_threads = True

    def __init__(self, failing=None, always=None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.failing, self.always = failing or {}, always
        self.asked, self.lock = [], threading.Lock()
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

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append((body, dict(self.headers)))
            how = self.server.failing.get(len(self.server.asked) - 1, self.server.always)
        prompt = body["prompt"]
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
def serve():
    servers = []

    def start(**given):
        servers.append(Server(**given))
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


def connect(*servers, seconds=30.0, positions=1000, **settings):
    urls = [one if isinstance(one, str) else one.url for one in servers]
    return EndpointClient(urls, SAMPLING, positions, seconds=seconds, **settings)


def answers(client, count=12):
    return list(client([[5, 6, index] for index in range(count)], [2**64 - 1 - index for index in range(count)]))


def test_what_is_sent_and_what_comes_back(serve, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "a key")
    server = serve()
    assert answers(connect(f"{server.url}/v1/", concurrency=3)) == [
        Completion(i, text_of([5, 6, i], -1 - i), True) for i in range(12)
    ]
    body, headers = next(one for one in server.asked if one[0]["prompt"] == [5, 6, 3])
    assert body == {"prompt": [5, 6, 3], "seed": -4, **SAMPLING}  # 64 bits, as servers take them: signed
    assert headers["Authorization"] == "Bearer a key"


def broken_off(why):
    return {"choices": [{"text": "sai", "finish_reason": why}]}


BODIES = [{"choices": []}, {"choices": [{"text": 1}]}, b"<html>", *map(broken_off, ("abort", None))]


@pytest.mark.parametrize("how", [500, 503, 429, "half", "zipped", "closed", "late", *BODIES], ids=str)
def test_what_may_pass_is_asked_again(serve, no_pauses, how):
    server = serve(failing={2: how, 3: how, 7: how})
    found = answers(connect(server, seconds=0.5 if how == "late" else 30.0, concurrency=4))
    assert found == [Completion(i, text_of([5, 6, i], -1 - i), True) for i in range(12)]
    pauses = [pause for pause in no_pauses if pause]
    assert len(server.asked) == 12 + 3 and len(pauses) == 3 and set(pauses) <= {1.0, 2.0, 4.0}


def test_another_endpoint_takes_over(serve):
    broken, sound = serve(always=500), serve()
    assert answers(connect(broken, sound)) == answers(connect(sound))
    assert len(broken.asked) >= 6


def test_errors(serve, monkeypatch):
    refusing = serve(always=400)
    with pytest.raises(ValueError, match=r"--endpoint: .* refuses with 400.*not now"):
        answers(connect(refusing, concurrency=2), count=300)
    assert len(refusing.asked) < 150
    monkeypatch.setattr(module, "TRIES", 3)
    busy = serve(always=502)
    with pytest.raises(ValueError, match=r"--endpoint: .*502"):
        answers(connect(busy, concurrency=1), count=1)
    assert len(busy.asked) == 3
    with pytest.raises(ValueError, match="ConnectError"):
        answers(connect("http://127.0.0.1:9"))
    for url in ("http://a:b", "http://[::1:8000", "http://xn--", "http://", "localhost:80"):
        with pytest.raises(ValueError, match=re.escape(f"--endpoint: {url!r}")):
            connect(url)


@pytest.mark.parametrize(("positions", "most"), [(1000, 30), (33, 30), (10, 7), (4, 1)])
def test_no_more_is_asked_for_than_the_positions_hold(serve, positions, most):
    server = serve()
    answers(connect(server, positions=positions), count=3)
    assert {body["max_tokens"] for body, _ in server.asked} == {most}


def test_control_tokens_are_asked_for_and_make_an_answer_bad(serve, tmp_path, capsys):
    """If the server removed them, the rest would be a text that the target never wrote."""
    source = tmp_path / "chats.jsonl"
    source.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    choice = {"text": "analysis<|im_start|>final", "finish_reason": "stop"}
    server = serve(always={"choices": [choice]})
    given = ["--source", str(source), "--target", "smollm2-135m", "--endpoint", server.url, "--model", "m"]
    assert main([*given, "--out", str(tmp_path / "out")]) == 0
    assert "special_token_in_answer: 1" in capsys.readouterr().out
    assert [body["skip_special_tokens"] for body, _ in server.asked] == [False]
    assert {body["model"] for body, _ in server.asked} == {"m"}
