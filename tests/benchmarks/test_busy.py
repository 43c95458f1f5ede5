"""benchmarks/busy.py: what is left of decoding's speed beside processes that only spin."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "busy.py"


def test_a_short_run_on_the_real_model():
    command = "--prompt-tokens 8 --new-tokens 3 --repeats 1 --spinners 3 --no-transformers"
    started = subprocess.Popen(
        [sys.executable, SCRIPT, *command.split()], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    shown, _ = started.communicate()
    assert started.returncode == 0
    *table, last = shown.splitlines()
    record = json.loads(last)["busy"]
    assert set(record["quiet"]) == {"plain", "prompt_lookup"} and set(record["busy"]) == {"3"}
    assert all(speed > 0 for speeds in (record["quiet"], *record["busy"].values()) for speed in speeds.values())
    cores = record["threads"]
    assert [line.split("%")[0].split()[-1] for line in table[2:]] == [
        f"{100 * share:.0f}" for share in (1, cores / (cores + 3))
    ]
    with pytest.raises(ProcessLookupError):  # all that it started ends with it, the servers of its processes at last
        while True:
            os.killpg(started.pid, 0)
            time.sleep(0.1)
