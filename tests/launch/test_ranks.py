"""Commands with --tensor-parallel on two ranks: one process's text, written once; and errors. A rank that dies:
tests/train/test_launcher.py."""

import argparse
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from longdraft.launch import cli, ranks
from longdraft.models import tensor_parallel
from longdraft.train import launcher

COMMAND = [sys.executable, "-m", "longdraft.launch.cli"]
ON_TWO = ["--tensor-parallel", "2", "--device", "cpu", "--dtype", "fp32"]
TEXT = "the cat sat on the log and "


def run(*arguments, text="", status=0):
    """Run a command as a user does."""
    given = [*COMMAND, *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(given, input=text, capture_output=True, text=True, timeout=240, env=environment)
    assert ended.returncode == status, ended.stderr
    return ended


def test_two_ranks_generate_what_one_process_does(tiny, capsys):
    asked = ["generate", "--target", tiny, "--max-new-tokens", "24", "--temperature", "0.8", "--json"]
    drafters = ["--drafter", "plain", "token_recycling+prompt_lookup", "triforce"]
    ended = run(*asked, *drafters, "--seed", "3", *ON_TWO, text=TEXT * 30)  # more tokens than are added in order
    assert "Traceback" not in ended.stderr and ended.stderr.count("Loading") == 1
    found = json.loads(ended.stdout)
    alone = [*map(str, asked), "--seed", "3", "--dtype", "fp32", "--device", "cpu", "--prompt", TEXT * 30]
    assert cli.main(alone) == 0
    assert found["same_tokens"] and found["generations"][0]["tokens"] == json.loads(capsys.readouterr().out)["tokens"]


def test_a_bench_is_measured_and_written_by_the_first_rank(tiny, tmp_path):
    (tmp_path / "text").write_text(TEXT * 9)
    asked = ["bench", "--target", tiny, "--drafter", "prompt_lookup", "--text-file", tmp_path / "text"]
    asked += ["--prompt-tokens", "20", "--new-tokens", "12", "--contexts", "20", "--out", tmp_path / "out"]
    first = run(*asked, *ON_TWO, "--report", tmp_path / "page.html")
    result = json.loads(first.stdout.splitlines()[-1])
    assert "exact: yes" in first.stdout and result["ranks"] == 2 and "2 ranks" in first.stdout
    assert (tmp_path / "page.html").exists() and list((tmp_path / "out" / "spec_bench").iterdir())
    again = run(*asked, *ON_TWO)  # resumes: nothing is asked again
    assert json.loads(again.stdout.splitlines()[-1])["runs"] == result["runs"]
    assert "ranks" in run(*asked, "--dtype", "fp32", "--device", "cpu", status=2).stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["generate", "--prompt", "x", "--tensor-parallel", "3"], "tensor_parallel: 3 ranks cannot share"),
        (["serve", "--port", "99999"], "--host, --port: "),
    ],
)
def test_an_error_is_one_line_of_the_first_rank(tiny, arguments, field):
    name, *others = arguments
    ended = run(name, "--target", tiny, *ON_TWO, *others, status=2)
    errors = [line for line in ended.stderr.splitlines() if not line.startswith(("Loading", "memory"))]
    assert len(errors) == 1 and errors[0].startswith(f"longdraft {name}: error: {field}"), ended.stderr


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["--device", "cpu:0"], "--device: "),
        (["--device", "cuda"], "--device: "),
        (["--tensor-parallel", "0"], "0; give"),
    ],
)
def test_what_no_ranks_can_have_is_refused_before_they_start(tiny, capsys, monkeypatch, options, field):
    monkeypatch.setattr(launcher, "launch_ranks", lambda *_: pytest.fail("ranks were started"))
    with suppress(SystemExit):
        assert cli.main(["generate", "--target", str(tiny), "--prompt", "x", *ON_TWO, *options]) == 2
    assert field in capsys.readouterr().err.splitlines()[-1]


def test_ctrl_c_is_reported_by_the_launcher(tiny, capsys, monkeypatch):
    monkeypatch.setattr(launcher, "launch_ranks", lambda *_: 128 + signal.SIGINT)
    assert cli.main(["generate", "--target", str(tiny), "--prompt", "x", *ON_TWO]) == 130
    assert capsys.readouterr().err == "longdraft generate: interrupted\n"


@pytest.fixture
def first_rank(monkeypatch):
    """Makes this process the first rank, which must not wait for others."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(ranks.time, "sleep", lambda seconds: pytest.fail(f"it waits for {seconds} s"))
    monkeypatch.setattr(tensor_parallel, "leave", lambda: pytest.fail("it waits for the others to leave"))


def test_a_first_rank_that_fails_does_not_wait_for_ranks_that_wait_for_it(first_rank):
    """As a server whose engine has failed: the others are in the middle of a step."""
    assert ranks.run_on_ranks("serve", [], argparse.Namespace(), lambda: 1) == 1


def test_a_closed_pipe_ends_the_first_rank_at_once(first_rank):
    def write():
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        ranks.run_on_ranks("generate", [], argparse.Namespace(), write)
