"""benchmarks/busy.py: what is left of decoding's speed beside processes that only spin."""

import json
import subprocess
import sys
from pathlib import Path

import psutil

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "busy.py"


def test_a_short_run_on_the_real_model():
    command = "--prompt-tokens 8 --new-tokens 3 --repeats 1 --spinners 3 --no-transformers"
    done = subprocess.run([sys.executable, SCRIPT, *command.split()], capture_output=True, text=True, check=True)
    *table, last = done.stdout.splitlines()
    record = json.loads(last)["busy"]
    assert set(record["quiet"]) == {"plain", "prompt_lookup"} and set(record["busy"]) == {"3"}
    assert all(speed > 0 for speeds in (record["quiet"], *record["busy"].values()) for speed in speeds.values())
    cores = record["threads"]
    assert [line.split("%")[0].split()[-1] for line in table[2:]] == [
        f"{100 * share:.0f}" for share in (1, cores / (cores + 3))
    ]
    left = [p for p in psutil.process_iter(["cmdline"]) if SCRIPT.name in " ".join(p.info["cmdline"] or [])]
    assert not left, "the processes that spin end with the run"
