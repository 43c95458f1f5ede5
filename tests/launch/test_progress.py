"""The progress line on a terminal and in a pipe, and the quickstart's estimate of the remaining time."""

import os
import pty
import subprocess
import sys
from types import SimpleNamespace

from longdraft.benchmarks.progress import TimeLeft, duration
from longdraft.launch import quickstart
from longdraft.launch.progress import CLEAR

PROGRAM = """
import sys, time, warnings
from longdraft.benchmarks.progress import Phase
from longdraft.launch.console import note
from longdraft.launch.progress import Progress
with Progress("bench") as watch:
    watch.plan([Phase(f"part {i}", "x", 10) for i in range(3)])
    for i in range(3):
        watch.begin(f"part {i}")
        time.sleep(0.2)
        watch.advance(5)
        time.sleep(0.6)
        print("a message", file=sys.stderr)
        note("a note")
print("the end", file=sys.stderr)
"""


def test_a_pipe_gets_a_plain_line_now_and_then():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    lines = done.stderr.splitlines()
    assert "\r" not in done.stderr and "\033" not in done.stderr
    assert lines[0] == "bench: 1 of 3, 0% of it done, time left not known yet: part 0"
    messages = [line for line in lines if not line.startswith("bench: ")]
    assert messages == ["a message", "a note"] * 3 + ["the end"] and len(lines) < len(messages) + 4


def test_a_terminal_gets_a_line_that_moves_and_messages_above_it():
    controller, terminal = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "64"}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stderr=terminal, env=environment)
    os.close(terminal)
    shown = b""
    try:
        while piece := os.read(controller, 65536):
            shown += piece
    except OSError:  # the other end is closed
        pass
    assert process.wait(120) == 0
    text = shown.decode()
    left_standing = [line.split(CLEAR)[-1] for line in text.split("\r\n")]
    assert left_standing == ["a message", "a note"] * 3 + ["the end", ""]
    drawn = [line for line in text.replace("\r\n", CLEAR).split(CLEAR) if line.startswith("bench: ")]
    assert len(drawn) > 3 and all(len(line) < 64 for line in drawn)
    assert "bench: 2 of 3, 50% of it done, about " in text and " left: part 1" in text


def test_the_quickstarts_estimate_follows_its_training(tmp_path, monkeypatch, capsys):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(quickstart, "TimeLeft", lambda parts: TimeLeft(parts, lambda: clock.now))
    what = ["data", "train", "export", "decode", "verify"]
    rest = quickstart.RemainingTime(tmp_path, what, 10, prepared=False)
    rest.begin("data")
    planned = quickstart.PREPARING + quickstart.STARTING + 10 * quickstart.STEP + 15 + 15 + 150
    assert rest.describe().startswith(f"Time left for the whole: about {duration(planned)} on 2 quiet cores; measured")
    clock.now += 2 * quickstart.PREPARING  # half the speed
    rest.begin("train")
    assert rest.describe() == f"Time left for the whole: about {duration(2 * (planned - quickstart.PREPARING))}"
    clock.now += 5000  # a machine that is very busy
    (tmp_path / "metrics.jsonl").write_text('{"loss": 3.0, "step": 4}\n{"step": 5, "lo')
    rest.report()
    rest.report()  # without another step nothing is printed
    (said,) = capsys.readouterr().err.splitlines()
    assert said == rest.describe() and int(said.split("about ")[1].split(" h")[0]) >= 5
    rest.begin("export")
    rest.report()
    assert capsys.readouterr().err == ""
    assert quickstart.RemainingTime(tmp_path, what, 10, prepared=True)._steps_done() == 4
