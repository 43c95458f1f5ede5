"""What is left, from what was measured; and how it is shown on a terminal and in a pipe."""

import os
import pty
import subprocess
import sys

import pytest

from longdraft.infer.bench import BenchSettings, bench, plan
from longdraft.infer.drafters.build import build_drafter
from longdraft.infer.progress import Part, TimeLeft, in_words
from longdraft.infer.tasks import Task
from longdraft.launch import quickstart
from longdraft.launch.progress import CLEAR


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_what_is_left_follows_what_was_measured(clock):
    left = TimeLeft([Part("a", "x", 10), Part("b", "y", 20), Part("c", "x", 30)], clock)
    left.begin("a")
    assert left.seconds() is None and left.share == 0
    clock.now += 5
    left.advance(5)  # a second each
    assert left.seconds() == pytest.approx(5 + 20 + 30) and left.share == 0.5
    clock.now += 5
    left.begin("b")  # the rest of a counts as done
    assert left.seconds() == pytest.approx(20 + 30)
    clock.now += 30
    left.advance(10)  # b is slower: three seconds each
    assert left.seconds() == pytest.approx(30 + 30)
    clock.now += 600
    left.advance(5)  # neighbours came: the recent speed counts
    assert left.seconds() > 5 * 100 + 30
    before = left.seconds()
    clock.now += 100
    assert left.seconds() > before + 50  # as it waits, not only when it goes on
    left.begin("c")
    clock.now += 3
    left.advance(30)
    assert left.share == 1 and left.seconds() == 0


def test_a_slow_kind_tells_little_of_a_fast_one(clock):
    left = TimeLeft([Part("proof", "proof", 10, slow=5.0), Part("speed", "speed", 10)], clock)
    left.begin("proof")
    clock.now += 20
    left.advance(4)  # five seconds a unit, of which a fast one takes one
    assert left.seconds() == pytest.approx(6 * 5 + 10)


def test_a_part_that_says_nothing_about_speed(clock):
    left = TimeLeft([Part("a", "a", 20), Part("b", "b", 20)], clock)
    left.begin("a")
    clock.now += 1
    left.begin("b", measured=False)
    assert left.seconds() is None


@pytest.mark.parametrize(("seconds", "words"), [(0.1, "1 s"), (59, "59 s"), (61, "1 min 01 s"), (3780, "1 h 03 min")])
def test_durations(seconds, words):
    assert in_words(seconds) == words


class Recorder:
    """A Watch that keeps the account."""

    def plan(self, parts):
        self.left, self.begun = TimeLeft(parts), []

    def begin(self, words):
        if self.left.part is not None:
            self.begun.append((self.left.part.words, self.left.share))
        self.left.begin(words)

    def advance(self, cost):
        self.left.advance(cost)


def test_every_part_of_a_benchmark_is_planned_and_watched(tiny_target):
    settings = BenchSettings(new_tokens=12, temperatures=(0.0, 1.0), contexts=(5, 9), noise=True)
    tasks = [Task("continue", list(range(1, 20))), Task("continue", list(range(30, 50)))]
    names = ["token_recycling", "prompt_lookup"]
    builders = {name: lambda target, name=name: build_drafter(name, target) for name in names}
    bench(tiny_target(), builders, tasks, settings, watch=(watch := Recorder()))
    planned = [part.words for part in plan(names, [task.tokens for task in tasks], settings, False)]
    assert [words for words, _ in watch.begun] == planned[:-1] and len(set(planned)) == len(planned)
    unseen = [words for words, share in watch.begun if share < 0.9]
    assert unseen == []
    assert planned[1] == "proof in fp32 that token_recycling is exact, sampled, 2 prompts together"
    assert "timing at T 1: prompt_lookup, prompt 2 of 2" in planned


PROGRAM = """
import sys, time, warnings
from longdraft.infer.progress import Part
from longdraft.launch.console import note
from longdraft.launch.progress import Progress
with Progress("bench") as watch:
    watch.plan([Part(f"part {i}", "x", 10) for i in range(3)])
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


def test_the_quickstarts_estimate_follows_its_training(tmp_path, monkeypatch, clock, capsys):
    monkeypatch.setattr(quickstart, "TimeLeft", lambda parts: TimeLeft(parts, clock))
    what = ["data", "train", "export", "decode", "verify"]
    rest = quickstart.Rest(tmp_path, what, 10, prepared=False)
    rest.begin("data")
    planned = quickstart.PREPARING + quickstart.STARTING + 10 * quickstart.STEP + 15 + 15 + 150
    assert rest.words().startswith(f"Time left for the whole: about {in_words(planned)} on 2 quiet cores; measured")
    clock.now += 2 * quickstart.PREPARING  # half the speed
    rest.begin("train")
    assert rest.words() == f"Time left for the whole: about {in_words(2 * (planned - quickstart.PREPARING))}"
    clock.now += 5000  # a machine that is very busy
    (tmp_path / "metrics.jsonl").write_text('{"loss": 3.0, "step": 4}\n{"step": 5, "lo')
    rest.say()
    rest.say()  # no step later there is no news
    (said,) = capsys.readouterr().err.splitlines()
    assert said == rest.words() and int(said.split("about ")[1].split(" h")[0]) >= 5
    rest.begin("export")
    rest.say()
    assert capsys.readouterr().err == ""
    assert quickstart.Rest(tmp_path, what, 10, prepared=True)._steps_done() == 4
