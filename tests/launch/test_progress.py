"""The progress line on a terminal, in a pipe and where it cannot be written."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

from longdraft.benchmarks.drafters.progress import Phase
from longdraft.launch.progress import Progress

PROGRAM = """
import sys, time
from longdraft.benchmarks.drafters.progress import Phase
from longdraft.launch.console import note
from longdraft.launch.progress import Progress
with Progress("bench") as watch:
    watch.plan([Phase(f"part {i}", 10) for i in range(3)])
    for i in range(3):
        watch.begin(f"part {i}")
        time.sleep(0.6)
        watch.advance(5)
        note("a note")
note("the end")
"""


def test_a_pipe_gets_a_plain_line_now_and_then_and_a_terminal_a_line_that_moves():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    lines = done.stderr.splitlines()
    assert "\r" not in done.stderr and re.fullmatch(r"bench:   0%\|[^|]+\| about \? left, part 0", lines[0])
    assert [line for line in lines if not line.startswith("bench: ")] == ["a note"] * 3 + ["the end"]
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stderr=terminal, env=os.environ | {"TERM": "xterm"})
    os.close(terminal)
    shown = b""
    try:
        while piece := os.read(controller, 65536):
            shown += piece
    except OSError:  # the other end is closed
        pass
    assert process.wait(120) == 0
    text = shown.decode()
    assert [line.split("\r")[-1] for line in text.split("\r\n")] == ["a note"] * 3 + ["the end", ""]
    assert re.search(r"bench:  50%\|[^|]+\| about 00:0\d left, part 1", text)


def test_what_is_left_counts_slow_phases_as_longer():
    """What a phase has left out counts when the next one begins, and no phase counts for more than it was planned. One
    that is skipped says nothing about speed."""
    with Progress("bench") as watch:
        watch.plan([Phase("known", 60), Phase("proof", 10, slow=5.0), Phase("known, too", 30), Phase("speed", 50)])
        watch.begin("proof")
        watch.advance(4)
        assert (watch._bar.initial, watch._bar.n, watch._bar.total) == (60, 80, 190)
        watch.begin("speed")
        assert (watch._bar.initial, watch._bar.n) == (90, 140)
        watch.advance(70)
        assert (watch._bar.initial, watch._bar.n) == (90, 190)


def test_a_stream_that_cannot_be_written_stops_nothing():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", PROGRAM], stderr=full, stdout=subprocess.PIPE, timeout=120)
    assert done.returncode == 0
