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
    found = client({index: ([5, 6, index], 2**64 - 1 - index) for index in range(count)})
    return sorted(found, key=lambda completion: completion.index)


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


@pytest.mark.parametrize("how", [500, 429, "half", "zipped", "closed", "late", *BODIES], ids=str)
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


def test_a_prompt_that_a_server_refuses_costs_its_conversation_alone(serve, monkeypatch):
    """Also where it is answered with an error each time, while others are answered."""
    found = answers(connect(serve(failing={3: 400}), concurrency=1))
    assert [completion.index for completion in found if completion.refused] == [8]  # the fourth, as the last goes first
    assert "refuses with 400" in found[8].refused and found[7].ended
    with pytest.raises(ValueError, match="refuses with 401"):  # a key that has expired is no prompt's fault
        answers(connect(serve(failing={3: 401}), concurrency=1))
    monkeypatch.setattr(module, "TRIES", 3)
    bad, done, real = threading.Event(), threading.Event(), EndpointClient._complete

    def complete(client, index, prompt, seed):
        if index == 0:  # its third try comes after another prompt's answer
            monkeypatch.setattr(module.time, "sleep", lambda pause: (bad.set(), done.wait(5)) if pause == 2 else None)
            return real(client, index, [9], seed)
        assert bad.wait(5)
        try:
            return real(client, index, prompt, seed)
        finally:
            done.set()

    monkeypatch.setattr(EndpointClient, "_complete", complete)
    first, second = answers(connect(serve(failing=dict.fromkeys((0, 1, 3), 500)), concurrency=2), count=2)
    assert first.refused.startswith("no answer in 3 tries, the last time with HTTPStatusError") and second.ended
    bad.clear()
    done.clear()
    with pytest.raises(ValueError, match=r"did not answer in 3 tries.*'429 "):  # nor is a server that is busy
        answers(connect(serve(failing=dict.fromkeys((0, 1, 3), 429)), concurrency=2), count=2)


def test_a_turn_waits_for_no_other_conversations(serve):
    """The next prompt of one is asked for while the first prompt of another is still waited for, and before a third."""
    due, asked, asked_next = {2: ([4], 4), 0: ([1], 1), 1: ([2], 2)}, [], threading.Event()

    class Waiting(EndpointClient):
        def _complete(self, index, prompt, seed):
            asked.append(prompt)
            if prompt == [3]:
                asked_next.set()
            assert prompt != [1] or asked_next.wait(10)
            return super()._complete(index, prompt, seed)

    order = []
    for completion in Waiting([serve().url], SAMPLING, 1000, concurrency=2)(due):
        order.append(completion.index)
        if completion.index == 1:
            due[3] = [3], 3
    assert order[0] == 1 and sorted(order) == [0, 1, 2, 3]
    assert asked[2:] == [[3], [4]]


def test_errors(serve, monkeypatch):
    refusing = serve(always=400)
    with pytest.raises(ValueError, match=r"--endpoint: .* refuses with 400.*not now.* --max-length"):
        answers(connect(refusing, concurrency=2))
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
    source.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n' * 20)
    bad = {"choices": [{"text": "analysis<|im_start|>final", "finish_reason": "stop"}]}
    server, all_bad = serve(failing={1: bad}), serve(always=bad)
    given = ["--source", str(source), "--target", "smollm2-135m", "--model", "m", "--endpoint"]
    assert main([*given, server.url, "--out", str(tmp_path / "out")]) == 0
    assert "special_token_in_answer: 1" in capsys.readouterr().out
    assert main([*given, server.url, "--out", str(tmp_path / "out"), "--model", "another"]) == 2
    assert "model is m there" in capsys.readouterr().err
    # Also what is off is sent: servers may have other defaults, of the model.
    off = {"temperature": 0.0, "top_k": 49152, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    off |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "skip_special_tokens": False, "model": "m"}
    assert all(body.items() >= off.items() for body, _ in server.asked) and len(server.asked) == 20
    assert main([*given, all_bad.url, "--out", str(tmp_path / "none")]) == 2
    error = capsys.readouterr().err
    assert "none of the first 20 conversations can be used" in error and "(<|im_start|>)" in error
    assert not list((tmp_path / "none").iterdir())  # another call may begin there
