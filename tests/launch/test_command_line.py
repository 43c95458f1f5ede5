"""The command line is what users' scripts hold: its verbs, options, defaults and exit statuses are kept in two tables.

options.json has what --help shows; `python tests/launch/test_command_line.py` writes it anew. statuses.json is written
by hand: a line with a redirection is run by bash, any other in this process.
"""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from longdraft.benchmarks.drafters.papers import PAPERS
from longdraft.benchmarks.drafters.questions import SUITES
from longdraft.infer.drafters.build import DRAFTERS
from longdraft.launch import arguments, cli
from longdraft.launch.runtime import DTYPES
from longdraft.models.hf import LOADERS

HERE = Path(__file__).parent
STATUSES = json.loads((HERE / "statuses.json").read_text())
COMMANDS = ("prepare", "prepare regenerate", "train", "export", "convert", "generate", "serve", "bench", "report")


def run_here(line: str) -> tuple[int, str]:
    """The status and the standard output of a command in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        try:
            status = cli.main(shlex.split(line)[1:])
        except SystemExit as end:
            status = int(end.code or 0)
    return status, shown.getvalue()


def run_in_shell(line: str) -> int:
    """Run a line of bash in which `longdraft` is this tree's command. It must not show a traceback."""
    command = f'longdraft() {{ "{sys.executable}" -m longdraft.launch.cli "$@"; }}; set -o pipefail; {line}'
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, timeout=250)
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    return done.returncode


def options(command: str) -> dict[str, str]:
    """Each option with its values, and with its default where the help names one word or number."""
    os.environ["COLUMNS"] = "1000"
    _, *entries = re.split(r"\n  (?=\S)", run_here(f"longdraft {command} --help")[1])
    found = {}
    for entry in entries:
        head, _, rest = entry.partition("\n" if "\n   " in entry else "  ")
        name, _, values = head.strip().partition(" ")
        text = " ".join(rest.split("\n\n")[0].split())
        default = re.search(r"default: ([^\s;),]+)(?=[;),]|$)", text)
        found[name] = values + (f" (default: {default[1]})" if default else "")
    return dict(sorted((name, values) for name, values in found.items() if name != "-h,"))


def test_verbs_and_options(monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    assert {command: options(command) for command in COMMANDS} == json.loads((HERE / "options.json").read_text())
    names = [(DRAFTERS, arguments.DRAFTERS), (LOADERS, arguments.LOADERS), (DTYPES, arguments.DTYPES)]
    for there, here in [*names, (SUITES, arguments.SUITES), (PAPERS, arguments.PAPERS)]:
        assert tuple(there) == here
    verbs = re.findall(r"^  (\w+) ", run_here("longdraft")[1], re.M)
    assert verbs == [command for command in COMMANDS if " " not in command]


@pytest.mark.parametrize("line", STATUSES)
def test_exit_status(line, tmp_path, monkeypatch):
    """0 after success, 1 if the output's reader has gone, 2 after an error."""
    monkeypatch.chdir(tmp_path)
    status = run_in_shell(line) if set(line) & set("<>|") else run_here(line)[0]
    assert status == STATUSES[line]


if __name__ == "__main__":
    (HERE / "options.json").write_text(json.dumps({name: options(name) for name in COMMANDS}, indent=1) + "\n")
