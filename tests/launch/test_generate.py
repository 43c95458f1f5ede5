"""`longdraft generate` on a tiny real checkpoint: prompts, options, what goes where, Ctrl-C, pipes and errors."""

import io
import json
import os
import subprocess
import sys

import pytest
import torch

from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams, preset_for
from longdraft.launch import cli
from longdraft.launch.arguments import OF_ONE_TEXT, SAMPLING, given_sampling
from longdraft.launch.arguments import generate as parser
from longdraft.launch.console import flag
from longdraft.launch.generate import DRAFTED, OWN, PLAIN
from longdraft.launch.runtime import options_for, read_options
from longdraft.models import hf, tensor_parallel
from longdraft.models.hf import load_target

PROMPT = "the cat sat on the log and "


@pytest.fixture(scope="module")
def target(tiny):
    return load_target(tiny, torch.float32)


@pytest.fixture
def run(tiny, capsys):
    """(arguments, expected status) -> standard output and standard error."""

    def call(*arguments, status=0):
        given = ["--target", str(tiny), "--dtype", "fp32", "--max-new-tokens", "24", *map(str, arguments)]
        try:
            assert cli.run("generate", given) == status
        except SystemExit as end:  # argparse's own errors
            assert end.code == status
        return capsys.readouterr()

    return call


def generation(target, prompt=PROMPT, **values):
    (found,) = Engine(target).generate([prompt], SamplingParams(**{"max_new_tokens": 24} | values))
    return found


def test_only_the_text_is_on_standard_output(run, target):
    expected = generation(target)
    shown = run("--prompt", PROMPT)
    assert shown.out == expected.text + "\n"
    assert "Loading" in shown.err and "memory for 1 x " in shown.err and "tokens 24" in shown.err
    assert "\033" not in shown.out + shown.err


GIVEN = {
    "max_new_tokens": 7, "temperature": 0.9, "seed": -3, "top_k": 2, "top_p": 0.3, "min_p": 0.4, "eta_cutoff": 0.9,
    "min_tokens_to_keep": 2, "contextual_penalty": 3.0, "contextual_window": 2, "repetition_penalty": 2.5,
    "presence_penalty": 5.0, "frequency_penalty": 4.0, "banned_token_ids": (4, 5), "stop_strings": ("a b", "\n"),
    "stop_token_ids": (6,), "ignore_eos": True,
}  # fmt: skip


def test_every_sampling_option_is_its_field():
    fields, line = {*OF_ONE_TEXT, *SAMPLING}, []
    for name, value in GIVEN.items():
        many = value if isinstance(value, tuple) else () if value is True else (value,)
        line += [flag(name), *map(str, many)]
    assert fields == {*GIVEN} == {*vars(SamplingParams())} - {"min_new_tokens", "logit_bias", "grammar", "logprobs"}
    line += ["--banned-token-ids", "9"]  # adds to those before
    given = GIVEN | {"banned_token_ids": (4, 5, 9)}
    assert SamplingParams(**given_sampling(parser().parse_args(line), fields)) == SamplingParams(**given)
    assert given_sampling(parser().parse_args([]), fields) == {}
    # Options that are given with a preset take precedence.
    line = ["--preset", "tokenswift-qwen2.5-7b", "--min-p", "0.9"]
    published = {"temperature": 1.0, "min_tokens_to_keep": 20, "contextual_penalty": 1.15, "contextual_window": 1024}
    assert given_sampling(parser().parse_args(line), fields) == published | {"min_p": 0.9}


def test_presets_by_the_target_s_name():
    names = {
        "meta-llama/Llama-3.1-8B": "tokenswift-llama3.1-8b",
        "TokenSwift-Llama-3.1-8B": "tokenswift-llama3.1-8b",
        "NousResearch/Yarn-Llama-2-7b-128k": "tokenswift-yarn-llama2-7b-128k",
        "Qwen/Qwen2.5-1.5B": "tokenswift-qwen2.5-1.5b",
        "Qwen2.5-14B": "tokenswift-qwen2.5-14b",
        "Qwen/QwQ-32B": None,
    }
    assert {name: preset_for(name) for name in names} == names


def test_no_more_positions_are_used_than_asked_for(run, target):
    free = generation(target)
    limited = json.loads(run("--prompt", PROMPT, "--json", "--max-length", 20, "--prefill-chunk", 3).out)
    assert limited["finish_reason"] == "capacity" and limited["tokens"] == free.tokens[: 20 - len(free.prompt)]


def test_a_stop_string_is_never_shown(run, target):
    text = generation(target).text
    assert text is not None
    stop = text[9:13]
    shown = run("--prompt", PROMPT, "--stop-strings", "never comes", stop, "--drafter", "plain", "token_recycling")
    parts = shown.out.split("\n--- ")
    assert [part.split(" ---\n")[1] for part in parts[1:]] == [text[: text.index(stop)] + "\n"] * 2
    assert "ended by stop" in shown.err and "Same tokens from plain, token_recycling (fp32): yes" in shown.err


def test_json(run, target):
    expected = generation(target, temperature=1.0, seed=2)
    one = json.loads(run("--prompt", PROMPT, "--temperature", 1, "--seed", 2, "--json").out)
    assert list(one) == ["drafter", "text", "tokens", "finish_reason", "statistics"]
    assert (one["text"], one["tokens"], one["finish_reason"]) == (expected.text, expected.tokens, "length")
    assert one["statistics"].keys() == expected.summary().keys() and one["statistics"]["seed"] == 2
    many = json.loads(run("--prompt", PROMPT, "--json", "--drafter", "plain", "prompt_lookup+token_recycling").out)
    assert many["same_tokens"] is True
    assert [each["drafter"] for each in many["generations"]] == ["plain", "prompt_lookup+token_recycling"]


def test_prompts(run, target, tmp_path, monkeypatch):
    expected = generation(target).text + "\n"
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    assert run("--prompt-file", file).out == expected
    for arguments in ([], ["--prompt", "-"]):
        monkeypatch.setattr("sys.stdin", file.open())
        assert run(*arguments).out == expected
    tokens = target.tokenizer(PROMPT).input_ids[:3]
    assert run("--prompt", PROMPT, "--prompt-tokens", 3).out == generation(target, tokens).text + "\n"
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello 世界"}]
    shown = run("--prompt", "hello 世界", "--system", "be brief")
    assert shown.out == generation(target, chat).text + "\n"
    assert shown.out != run("--prompt", "hello 世界", "--chat").out == generation(target, chat[1:]).text + "\n"


def test_json_of_a_schema(run, target, tmp_path):
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    found = json.loads(run("--prompt", PROMPT, "--json-schema", tmp_path / "schema.json", "--json").out)
    assert found["finish_reason"] == "stop" and json.loads(found["text"])["a"] <= 9


def test_drafters_nodes_and_options(run):
    plain = run("--prompt", PROMPT).out
    for arguments in (
        ["--drafter", "token_recycling", "--nodes", "all"],
        ["--drafter", "token_recycling", "--nodes", "5", "--option", "nodes=20"],
        ["--drafter", "prompt_lookup+token_recycling", "--option", "token_recycling.nodes=20", "--nodes", "auto"],
    ):
        assert run("--prompt", PROMPT, *arguments).out == plain


def test_options_are_read_by_their_kind():
    options = read_options(["a=1", "b=1.5", "c=true", "d=false", "e=always", "f=1e-3", "x.g=-2", "path=a=b", "h=3,2"])
    expected = {"a": 1, "b": 1.5, "c": True, "d": False, "e": "always", "f": 1e-3, "x.g": -2, "path": "a=b"}
    assert options == expected | {"h": (3, 2)}
    assert [type(value) for value in options.values()][:5] == [int, float, bool, bool, str]
    assert options_for("x+y", {"a": 1, "x.g": 2, "z.h": 3}) == {"a": 1, "x.g": 2}
    assert options_for("plain", {"a": 1}) == {}


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ("--prompt x --prompt-file y", "--prompt-file"),
        ("--prompt-file {t}/none.txt", "--prompt-file: {t}/none.txt"),
        ("--prompt-file {t}/binary", "--prompt-file: {t}/binary"),
        ("--target smollm2-135m --prompt-file {t}/empty", "--prompt-file: it is empty"),
        ("--heldout {t}", "{t}/heldout"),
        ("--prompt=", "prompt"),
        ("--prompt x --prompt-tokens 0", "--prompt-tokens"),
        ("--prompt x --json-schema {t}/binary", "--json-schema: {t}/binary"),
        ("--prompt x --json-schema {t}/empty", "--json-schema: ''"),
        ("--prompt x --drafter token_recycling --nodes none", "--nodes"),
        ("--prompt x --option nodes", "--option: 'nodes'"),
        ("--prompt x --option a=1 --option a=2 --drafter token_recycling", "--option: 'a=2'"),
        ("--prompt x --target {t}/nothing", "{t}/nothing"),
        ("--prompt x\udcff", "--prompt: "),
        ("--prompt x --system \udcc3", "--chat, message 0.content"),
        ("--prompt x --device tpu", "--device: 'tpu'"),
        ("--prompt x --target {t}/bare", "tokenizer"),
    ],
)
def test_errors_name_the_field_and_the_status_is_2(arguments, field, run, tiny, tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty").touch()
    (tmp_path / "bare").mkdir()
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        (tmp_path / "bare" / name).symlink_to(tiny / name)
    shown = run(*arguments.format(t=tmp_path).split(), status=2)
    error = [line for line in shown.err.splitlines() if not line.startswith(("Loading", "memory", "usage", " "))]
    assert shown.out == "" and len(error) == 1, shown.err
    assert error[0].startswith("longdraft generate: error: ") and field.format(t=tmp_path) in error[0]


def test_a_target_that_does_not_fit_is_refused_before_it_is_read(run, target, monkeypatch):
    weights = 4 * sum(weight.numel() for weight in target.model.parameters())
    monkeypatch.setattr(hf, "fill", lambda *_: pytest.fail("weights were read"))
    monkeypatch.setattr(tensor_parallel, "available_bytes", lambda device: weights - 1)
    shown = run("--prompt", "x", status=2)
    assert "error: device: cpu has " in shown.err.splitlines()[-1] and shown.out == ""


class Terminal(io.StringIO):
    """A standard output that claims to be a terminal."""

    def isatty(self):
        return True


def test_a_terminal_shows_whose_each_token_is(run, target, monkeypatch):
    plain = generation(target).text
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    repeating = {"repetition_penalty": 0.3, "max_new_tokens": 60}
    arguments = ["--repetition-penalty", 0.3, "--max-new-tokens", 60, "--drafter", "prompt_lookup", "--nodes", "all"]
    shown = run("--prompt", PROMPT * 3, *arguments)
    text = terminal.getvalue()
    assert DRAFTED in text and OWN in text
    expected = generation(target, PROMPT * 3, **repeating)
    for colour in (DRAFTED, OWN, PLAIN):
        text = text.replace(colour, "")
    assert text == expected.text + "\n" and f"{DRAFTED}" in shown.err
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    run("--prompt", PROMPT)
    assert terminal.getvalue() == f"{plain}\n"


def test_a_reader_that_leaves_ends_it(tiny):
    command = [sys.executable, "-m", "longdraft.launch.cli", "generate", "--target", str(tiny), "--dtype", "fp32"]
    command += ["--prompt", PROMPT, "--max-new-tokens", "2000", "--ignore-eos"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    error = process.stderr.read().decode()
    assert process.wait(60) == 1 and "Traceback" not in error and "BrokenPipe" not in error
