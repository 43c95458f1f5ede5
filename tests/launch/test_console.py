"""What surrounds a command, in real processes: closed, full and abandoned streams, other encodings, Ctrl-C."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from longdraft.launch import bench, generate

COMMANDS = {"generate": generate.__file__, "bench": bench.__file__}
WAIT = 300  # seconds, on a busy machine


@pytest.fixture
def command(folder, tmp_path):
    """(name of a command, more arguments) -> its command line."""
    (tmp_path / "text.txt").write_text("the cat sat on the log and the dog sat on the mat. " * 9)
    given = {
        "generate": ["--prompt", "the cat sat", "--max-new-tokens", "8"],
        "bench": ["--text-file", str(tmp_path / "text.txt"), "--prompt-tokens", "16", "--new-tokens", "4"],
    }

    def call(name: str, *more: str) -> list[str]:
        return [sys.executable, COMMANDS[name], "--target", str(folder), "--dtype", "fp32", *given[name], *more]

    return call


def shell(command: list[str], redirected: str, **variables: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    line = ["bash", "-c", f'"$@" {redirected}', "bash", *command]
    return subprocess.run(line, capture_output=True, env=environment, stdin=subprocess.DEVNULL, timeout=WAIT)


def test_a_full_device_is_one_line(command):
    done = shell(command("generate", "--json"), ">/dev/full")
    last = done.stderr.decode().splitlines()[-1]
    assert done.returncode == 2 and b"Traceback" not in done.stderr and b"Exception ignored" not in done.stderr
    assert last.startswith("longdraft generate: error: standard output cannot be written: No space left on device")


@pytest.mark.parametrize(("work", "status"), [("sys.exit(0)", 0), ("signal.raise_signal(signal.SIGINT)", 130)])
def test_a_full_device_changes_nothing_if_nothing_is_written(work, status):
    """Unbuffered, even an empty write would fail."""
    program = f"import signal, sys\nfrom longdraft.launch.console import run_command\ndef work():\n    {work}\n"
    done = shell([sys.executable, "-uc", f"{program}sys.exit(run_command('x', work))"], ">/dev/full")
    assert (done.returncode, done.stderr) == (status, b"x: interrupted\n" if status else b"")


@pytest.mark.parametrize("redirected", ["2>&-", "2>/dev/full"])
def test_without_standard_error_the_text_comes(command, redirected):
    done = shell(command("generate"), redirected)
    assert done.returncode == 0 and len(done.stdout) > 8


def test_prompts_and_text_in_other_encodings(command, folder):
    """Standard input is UTF-8 whatever the locale, and characters that the locale cannot write are escaped."""
    narrow = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    wrong = shell([*command("generate")[:-4], "--max-new-tokens", "8"], "< <(printf 'a\\xff')", **narrow)
    expected = "longdraft generate: error: standard input is not UTF-8 text: byte 0xff at position 1; convert it"
    assert wrong.returncode == 2 and wrong.stderr.decode().startswith(expected)
    closed = shell([*command("generate")[:-4], "--max-new-tokens", "8"], "<&-")
    assert closed.returncode == 2 and b"--prompt" in closed.stderr
    eager = ["--ban", *map(str, range(33, 127)), "--max-new-tokens", "40", "--temperature", "30", "--seed", "1"]
    shown = shell(command("generate", *eager), "", **narrow)
    assert shown.returncode == 0 and b"\\u" in shown.stdout, shown.stderr


@pytest.mark.parametrize("moment", ["", "Loading", "proof"])
def test_ctrl_c_in_bench(command, moment):
    """It exits with 130 at once during imports, during loading and during the proof of exactness."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    arguments = command("bench", "--drafter", "token_recycling", "--new-tokens", "60")
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert process.stderr is not None
    said = b""
    if moment:
        while moment.encode() not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
    else:
        maps = Path(f"/proc/{process.pid}/maps")
        while "libtorch" not in maps.read_text():
            assert process.poll() is None, process.communicate()
            time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=WAIT)
    assert process.returncode == 130, error
    assert b"Traceback" not in error and out == b"" and b"longdraft bench: interrupted" in error


def test_a_swallowed_ctrl_c_ends_the_process_all_the_same():
    program = (
        "import os, signal, time\n"
        "from longdraft.launch.console import ends_on_ctrl_c\n"
        "with ends_on_ctrl_c('longdraft bench'):\n"
        "    try:\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "    except KeyboardInterrupt:\n"
        "        time.sleep(100)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=90)
    assert (done.returncode, done.stderr) == (130, b"\nlongdraft bench: interrupted\n")


@pytest.mark.parametrize("redirected", ["2>&1 | true", ">/dev/full 2>&1"])
def test_where_output_is_not_what_it_is_for_the_work_outlives_its_readers(tmp_path, redirected):
    """Training writes lines, a bar and a library's output, and still saves after `| tee` died of the same Ctrl-C."""
    program = (
        "import sys, time\n"
        "from tqdm import tqdm\n"
        "from longdraft.launch.console import run_command\n"
        "def work():\n"
        "    for _ in tqdm(range(3), mininterval=0):\n"
        "        time.sleep(0.2)\n"
        "        tqdm.write('above the bar')\n"
        "        print('a line', flush=True)\n"
        "        sys.stderr.write('a warning')\n"
        f"    open({str(tmp_path / 'saved')!r}, 'w').close()\n"
        f"open({str(tmp_path / 'status')!r}, 'w').write(str(run_command('x', work, needs_output=False)))\n"
    )
    shell([sys.executable, "-c", program], redirected)
    assert (tmp_path / "saved").exists() and (tmp_path / "status").read_text() == "0"


def test_files_are_not_opened_as_standard_streams(tmp_path):
    """The next file does not get the descriptor of a closed stream."""
    program = (
        "from longdraft.launch.console import run_command\n"
        "def work():\n"
        f"    print(open({str(tmp_path / 'file')!r}, 'w').fileno())\n"
        f"    open({str(tmp_path / 'number')!r}, 'w').write(str(open({str(tmp_path / 'file')!r}).fileno()))\n"
        "run_command('x', work, needs_output=False)\n"
    )
    shell([sys.executable, "-c", program], "<&- >&- 2>&-")
    assert int(Path(tmp_path / "number").read_text()) > 2
