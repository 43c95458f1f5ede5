"""`longdraft serve` as a process: it starts, serves, and ends when its answers are done."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from longdraft.launch import cli, serve

SERVE = ["serve", "--drafter", "prompt_lookup", "--dtype", "fp32", "--device", "cpu"]
COMMAND = [sys.executable, "-m", "longdraft.launch.cli", *SERVE]
ROOT = Path(__file__).parents[2]
CHAT = [{"role": "user", "content": "the cat and the dog"}]


@pytest.fixture(params=[[], ["--tensor-parallel", "2"]], ids=["alone", "on two ranks"])
def running(tiny, request, tmp_path):
    """A server of the tiny checkpoint with a key, which records: its process and a client."""
    options = ["--target", tiny, "--port", "0", "--slots", "2", "--max-length", "1200", *request.param]
    options += ["--record", tmp_path / "recorded"]
    environment = os.environ | {"LONGDRAFT_API_KEY": "secret", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*COMMAND, *options], stderr=subprocess.PIPE, text=True, env=environment)
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith("Serving "):
            break
    found = re.match(r"Serving \S+ on (http://127.0.0.1:\d+), slots: 2 of 1200 positions, with a key", lines[-1])
    assert found, lines
    with openai.OpenAI(base_url=f"{found[1]}/v1", api_key="secret", max_retries=0, timeout=60) as client:
        yield process, client
    process.kill()
    process.wait()


def test_sigterm_ends_it_when_its_answers_are_done(running, capfd, tiny, tmp_path):
    process, client = running
    (model,) = client.models.list()
    stream = client.chat.completions.create(
        model=model.id, messages=CHAT, max_tokens=500, seed=5, stream=True, extra_body={"ignore_eos": True}
    )
    text = next(stream).choices[0].delta.content
    process.send_signal(signal.SIGTERM)
    *chunks, last = list(stream)
    text += "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert last.choices[0].finish_reason == "length"
    assert process.wait(60) == 0 and "Traceback" not in process.stderr.read()
    with pytest.raises(openai.APIConnectionError):
        client.models.list()
    # The same seed gives the same text on the command line.
    options = ["--target", str(tiny), "--dtype", "fp32", "--device", "cpu", "--seed", "5", "--temperature", "1"]
    given = ["--chat", "--prompt", CHAT[0]["content"], "--max-new-tokens", "500", "--ignore-eos"]
    assert cli.run("generate", [*options, *given]) == 0
    assert capfd.readouterr().out.rstrip("\n") == (text + (last.choices[0].delta.content or "")).rstrip("\n")
    # What was recorded is data to train on: the loss counts the answer's 500 tokens.
    given = [str(ROOT / "configs/data/served.yaml"), "--target", str(tiny), "--out", str(tmp_path / "rows")]
    given += [f"sources.served.path={tmp_path / 'recorded'}", "seq_len=1200", "heldout_share=0"]
    assert cli.run("prepare", given) == 0
    assert "supervised: 500, documents: 1," in capfd.readouterr().out
    assert (tmp_path / "recorded").stat().st_mode & 0o777 == 0o700


def test_sigterm_just_after_it_says_that_it_serves_ends_it(tiny, monkeypatch):
    def unheard(*_):
        raise AssertionError("nobody listens to SIGTERM")

    monkeypatch.setattr(serve, "note", lambda text: text.startswith("Serving ") and signal.raise_signal(signal.SIGTERM))
    before = signal.signal(signal.SIGTERM, unheard)
    try:
        options = ["--target", str(tiny), "--dtype", "fp32", "--device", "cpu", "--port", "0", "--slots", "1"]
        with pytest.raises(SystemExit) as end:
            cli.run("serve", options)
        assert end.value.code == 0
    finally:
        signal.signal(signal.SIGTERM, before)


def test_too_little_memory_is_said_before_it_listens(tiny, capsys):
    options = ["--target", str(tiny), "--dtype", "fp32", "--device", "cpu", "--port", "0", "--slots", "9000000"]
    assert cli.run("serve", options) == 2
    error = capsys.readouterr().err
    assert "Serving" not in error and "memory" in error.splitlines()[-1]


TARGET = ["--target", "smollm2-135m", "--port", "0"]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["--slots", "0"], "--slots"),
        (["--queue", "-1"], "--queue"),
        (["--drafter", "nothing"], "drafter: unknown name 'nothing'"),
        ([], "--target: name a model"),
        (["--target", "smollm2-135m", "--port", "70000"], "--host, --port: 127.0.0.1, 70000"),
        (["--target", "smollm2-135m", "--host", "", "--port", "0"], "--host: "),
        ([*TARGET, "--max-length", "1"], "--max-length"),
        ([*TARGET, "--prefill-chunk", "0"], "--prefill-chunk"),
        ([*TARGET, "--drafter", "token_recycling", "--option", "wings=2"], "token_recycling does not know wings"),
        ([*TARGET, "--drafter", "small_model"], "options: small_model needs small"),
        ([*TARGET, "--drafter", "tokenswift"], "draft: tokenswift needs a trained draft"),
        ([*TARGET, "--draft", "smollm2-135m-longspec", "--drafter", "medusa"], "draft: smollm2-135m-longspec is a "),
        ([*TARGET, "--record", "/proc/here"], "--record: /proc/here cannot be written"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_loaded(options, field, capsys):
    try:
        status = cli.run("serve", options)
    except SystemExit as end:
        status = end.code
    *before, error = capsys.readouterr().err.splitlines()
    assert status == 2 and error.startswith("longdraft serve: error: ") and field in error
    assert not any(line.startswith("Loading") for line in before)
