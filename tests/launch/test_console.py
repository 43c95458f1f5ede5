"""What surrounds a command, in real processes: closed, full and abandoned streams, other encodings, Ctrl-C."""

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from longdraft.launch.console import read_text

WAIT = 300  # seconds, on a busy machine


def run(work: str, redirected: str = "", options: str = "", **variables: str) -> subprocess.CompletedProcess:
    """A process, with bash's redirections, that exits with the status of a command `x` whose work is these lines."""
    lines = "\n    ".join(work.splitlines())
    program = (
        "import signal, sys, time\nfrom tqdm import tqdm\n"
        "from longdraft.launch.console import note, run_command, show\n"
        f"def work():\n    {lines}\nsys.exit(run_command('x', work{options}))\n"
    )
    command = ["bash", "-c", f'"$@" {redirected}', "bash", sys.executable, "-uc", program]
    environment = os.environ | variables
    return subprocess.run(command, capture_output=True, env=environment, stdin=subprocess.DEVNULL, timeout=WAIT)


@pytest.mark.parametrize(
    ("work", "redirected", "status", "out", "error"),
    [
        ("show('text')", ">/dev/full", 2, b"", b"x: error: standard output cannot be written: No space left on device"),
        # Unbuffered, even an empty write would fail.
        ("sys.exit(0)", ">/dev/full", 0, b"", b""),
        ("signal.raise_signal(signal.SIGINT)", ">/dev/full", 130, b"", b"x: interrupted\n"),
        ("note('a line')\nshow('text')", "2>&-", 0, b"text", b""),
        ("note('a line')\nshow('text')", "2>/dev/full", 0, b"text", b""),
        ("show('text')", ">&-", 2, b"", b"x: error: standard output is closed"),
        ("raise ValueError('field: wrong')", "", 2, b"", b"x: error: field: wrong\n"),
    ],
)
def test_streams_that_are_closed_or_full(work, redirected, status, out, error):
    done = run(work, redirected)
    assert (done.returncode, done.stdout) == (status, out) and done.stderr.startswith(error)
    assert b"Traceback" not in done.stderr and b"Exception ignored" not in done.stderr


def test_text_in_other_encodings(monkeypatch):
    """Standard input is UTF-8 whatever the locale, and characters that the locale cannot write are escaped."""
    narrow = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    shown = run(r"show('na\u00efve \u4e16\u754c')", **narrow)
    assert (shown.returncode, shown.stdout) == (0, b"na\\xefve \\u4e16\\u754c")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), "latin-1"))
    with pytest.raises(ValueError, match=r"^--prompt: "):
        read_text(None, "--prompt")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("世".encode()), "latin-1"))
    assert read_text(None, "--prompt") == "世"


def test_ctrl_c_while_a_command_imports_what_it_needs():
    """It exits with 130 at once."""
    command = [sys.executable, "-m", "longdraft.launch.cli", "bench", "--target", "smollm2-135m", "--text-file", "none"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=WAIT)
    assert process.returncode == 130, error
    assert b"Traceback" not in error and out == b"" and b"longdraft bench: interrupted" in error


def test_a_library_cannot_swallow_ctrl_c():
    work = "try:\n    signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt:\n    time.sleep(100)"
    done = run(work, options=", by_force=True")
    assert (done.returncode, done.stderr) == (130, b"\nx: interrupted\n")


@pytest.mark.parametrize("redirected", ["2>&1 | true", ">/dev/full 2>&1"])
def test_where_output_is_not_what_it_is_for_the_work_outlives_its_readers(tmp_path, redirected):
    """Training writes lines, a bar and a library's output, and still saves after `| tee` died of the same Ctrl-C."""
    work = (
        "for _ in tqdm(range(3), mininterval=0):\n"
        "    time.sleep(0.2)\n"
        "    tqdm.write('above the bar')\n"
        "    print('a line', flush=True)\n"
        "    sys.stderr.write('a warning')\n"
        f"open({str(tmp_path / 'saved')!r}, 'w').close()"
    )
    run(work, f"{redirected}; echo ${{PIPESTATUS[0]}} > {tmp_path}/status", ", needs_output=False")
    assert (tmp_path / "saved").exists() and (tmp_path / "status").read_text() == "0\n"


def test_files_are_not_opened_as_standard_streams(tmp_path):
    """The next file does not get the descriptor of a closed stream."""
    file = str(tmp_path / "file")
    run(f"open({file!r}, 'w').write(str(open({file!r}, 'w').fileno()))", "<&- >&- 2>&-", ", needs_output=False")
    assert int(Path(file).read_text()) > 2
