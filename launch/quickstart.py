"""The main workflow on a real small model, in five commands: `make quickstart`. A second call continues a stopped one.

This file only orders the commands. Each is printed, works alone, and prints what it does and where its output is.
"""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from longdraft.launch.arguments import at_least
from longdraft.launch.console import note, run_command

ROOT = Path(__file__).resolve().parents[1]
CONFIG, DATA = "configs/quickstart.yaml", "data/quickstart"
PREPARE = f"--source stdlib --target smollm2-135m --seq-len 256 --max-tokens 1500000 --out {DATA}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the commands. Returns the exit status of the first one that failed, else 0."""
    parser = argparse.ArgumentParser(prog="make quickstart", description="Prepare, train, export, decode, verify.")
    parser.add_argument("--steps", type=at_least(2), help=f"training steps (default: those of {CONFIG})")
    again = "interrupted; call it again to continue from here"
    return run_command(parser.prog, lambda: _quickstart(parser.parse_args(argv).steps), again, needs_output=False)


def _quickstart(steps: int | None) -> int:
    run = f"runs/quickstart-{steps}" if steps else "runs/quickstart"
    if (ROOT / run / "report.html").exists():
        print(f"Done already: {run}/report.html, the draft in {run}/draft. Remove {run} to start over.")
        return 0
    todo = commands(run, steps)
    print(f"{len(todo)} steps" + ("" if steps else ", from the start about 5 minutes on 2 quiet cores"), flush=True)
    for number, (what, command) in enumerate(todo, start=1):
        print(f"\n[{number}/{len(todo)}] {what}\n$ longdraft {shlex.join(command)}", flush=True)
        if status := call(command):
            note(f"\nStep {number} failed with status {status}; `make quickstart` continues from here.")
            return status
    print(f"\nDone: {run}/report.html, the draft in {run}/draft")
    return 0


def call(command: Sequence[str]) -> int:
    """Run a command of longdraft to its end and return its status."""
    # With this interpreter, whatever the caller's PATH is.
    process = subprocess.Popen([sys.executable, "-m", "longdraft.launch.cli", *command], cwd=ROOT)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()  # Ctrl-C reaches the whole process group: training saves, the others end
        raise


def commands(run: str, steps: int | None) -> list[tuple[str, list[str]]]:
    """Each step's description and its command."""
    ranks, overrides = ranks_here(), [f"train.run_dir={run}"]
    overrides += [f"train.steps={steps}", f"optimizer.warmup_steps={min(12, steps // 2)}"] if steps else []
    overrides += [f"train.global_batch={ranks}"] if ranks > 2 else []
    decode = f"--draft {run}/draft --heldout {DATA} --prompt-tokens 64 --max-new-tokens 48 --drafter plain tokenswift"
    bench = (
        f"--draft {run}/draft --drafter tokenswift token_recycling+prompt_lookup --data {DATA} --prompts 3 "
        f"--prompt-tokens 192 --new-tokens 96 --transformers --out {run}/bench --report {run}/report.html"
    )
    return [
        (f"Python's standard library to packed rows of tokens -> {DATA}", ["prepare", *PREPARE.split()]),
        (
            f"train the heads under DeepSpeed on {ranks} ranks -> {run}",
            ["train", "--num-gpus", str(ranks), CONFIG, *overrides],
        ),
        (f"export and reload the draft -> {run}/draft", ["export", run]),
        ("decode a held-out prompt, plainly and with the draft", ["generate", *decode.split()]),
        (f"verify and measure -> {run}/report.html", ["bench", *bench.split()]),
    ]


def ranks_here() -> int:
    """The number of visible GPUs, or 2 on a CPU. Raises ValueError if there is a GPU that PyTorch cannot use."""
    from longdraft.models.device import VISIBLE, default_device, n_gpus

    device = default_device("device", f"call {VISIBLE}= make quickstart")
    return n_gpus() if device.type == "cuda" else 2


if __name__ == "__main__":
    sys.exit(main())
