"""The main job on a real small model, in five commands: `make quickstart`. Called again, it goes on where it stopped.

Only the order of the commands; each of them is printed, works alone, and says what it does and where its output lies.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIG, DATA = "configs/quickstart.yaml", "data/quickstart"
PREPARE = f"--source stdlib --target smollm2-135m --seq-len 256 --max-tokens 1500000 --out {DATA}"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status of the first command that failed, else 0."""
    parser = argparse.ArgumentParser(prog="make quickstart", description="Prepare, train, export, decode, verify.")
    parser.add_argument("--steps", type=int, help=f"training steps (default: those of {CONFIG})")
    args = parser.parse_args(argv)
    begin = time.monotonic()
    if args.steps is not None and args.steps < 2:
        parser.error(f"--steps: {args.steps}; training takes at least 2 steps")
    run = f"runs/quickstart-{args.steps}" if args.steps else "runs/quickstart"
    report = ROOT / run / "report.txt"
    if report.exists() and json.loads((report.parent / "bench.json").read_text())["exact"]:
        print(f"{report.read_text()}\nDone already: {run}/report.png, {run}/draft. Remove {run} to start anew.")
        return 0
    for number, (what, command) in enumerate(commands(run, args.steps), start=1):
        print(f"\n[{number}/5] {what}\n$ {shlex.join(command)}", flush=True)
        # The interpreter and the programs of its environment, whatever the caller's PATH says.
        program = Path(sys.executable).parent / command[0]
        status = subprocess.run([program, *command[1:]], cwd=ROOT).returncode
        if status:
            print(f"\nStep {number} failed with status {status}; `make quickstart` goes on from here.", file=sys.stderr)
            return status
    print(f"\nDone in {(time.monotonic() - begin) / 60:.1f} minutes: {run}/report.png, the draft in {run}/draft")
    return 0


def commands(run: str, steps: int | None) -> list[tuple[str, list[str]]]:
    """What each step is for, and its command."""
    ranks, overrides = ranks_here(), [f"train.run_dir={run}"]
    overrides += [f"train.steps={steps}", f"optimizer.warmup_steps={min(9, steps // 2)}"] if steps else []
    overrides += [f"train.global_batch={ranks}"] if ranks > 2 else []
    decode = f"--draft {run}/draft --heldout {DATA} --prompt-tokens 64 --max-new-tokens 48 --drafter plain tokenswift"
    bench = (
        f"--draft {run}/draft --drafter tokenswift token_recycling+prompt_lookup --data {DATA} --run {run} --prompts 3 "
        "--prompt-tokens 192 --new-tokens 96 --transformers"
    )
    return [
        (f"Python's standard library to packed rows of tokens -> {DATA}", words("python launch/prepare.py", PREPARE)),
        (
            f"train the heads under DeepSpeed on {ranks} ranks -> {run}",
            words(f"deepspeed --num_gpus {ranks} launch/train.py {CONFIG}", *overrides),
        ),
        (f"export and reload the draft -> {run}/draft", words(f"python launch/export.py {run}")),
        ("decode a held-out prompt, plainly and with the draft", words("python launch/generate.py", decode)),
        (f"verify and measure -> {run}/report.png", words("python launch/bench.py", bench)),
    ]


def words(*parts: str) -> list[str]:
    return shlex.split(" ".join(parts))


def ranks_here() -> int:
    """All GPUs, or 2 on a CPU."""
    import torch

    return torch.cuda.device_count() or 2


if __name__ == "__main__":
    sys.exit(main())
