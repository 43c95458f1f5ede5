"""The main job on a real small model, in five commands: `make quickstart`. Called again, it goes on where it stopped.

Only the order of the commands; each of them is printed, works alone, and says what it does and where its output lies.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from longdraft.benchmarks.progress import Phase, TimeLeft, duration
from longdraft.launch.console import INTERRUPTED, framed, note

ROOT = Path(__file__).resolve().parents[1]
CONFIG, DATA, STEPS = "configs/quickstart.yaml", "data/quickstart", 120
PREPARE = f"--source stdlib --target smollm2-135m --seq-len 256 --max-tokens 1500000 --out {DATA}"


# Seconds that the parts took on 2 quiet cores: only their ratios count as soon as one was measured on this machine.
PREPARING, STARTING, STEP, EXPORTING, DECODING, VERIFYING = 20, 20, 2.1, 15, 15, 150
NOTHING_TO_DO = 5  # a step whose work is there already
EVERY = 60.0  # seconds between two lines of what is left


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status of the first command that failed, else 0."""
    parser = argparse.ArgumentParser(prog="make quickstart", description="Prepare, train, export, decode, verify.")
    parser.add_argument("--steps", type=int, help=f"training steps (default: those of {CONFIG})")
    again = "interrupted; called again, it goes on from here"
    return framed(parser.prog, lambda: _quickstart(parser.parse_args(argv).steps), again, shows=False)


def _quickstart(steps: int | None) -> int:
    begin = time.monotonic()
    if steps is not None and steps < 2:
        raise ValueError(f"--steps: {steps}; training takes at least 2 steps")
    run = f"runs/quickstart-{steps}" if steps else "runs/quickstart"
    report = ROOT / run / "report.txt"
    if report.exists() and json.loads((report.parent / "bench.json").read_text())["exact"]:
        print(f"{report.read_text()}\nDone already: {run}/report.png, {run}/draft. Remove {run} to start anew.")
        return 0
    todo = commands(run, steps)
    rest = Rest(
        ROOT / run, [what for what, _ in todo], steps or STEPS, (ROOT / DATA / "heldout/manifest.json").exists()
    )
    for number, (what, command) in enumerate(todo, start=1):
        rest.begin(what)
        print(f"\n[{number}/{len(todo)}] {what}\n{rest.describe()}\n$ {shlex.join(command)}", flush=True)
        status = call(command, rest)
        if status == INTERRUPTED:
            raise KeyboardInterrupt
        if status:
            note(f"\nStep {number} failed with status {status}; `make quickstart` goes on from here.")
            return status
    print(f"\nDone in {(time.monotonic() - begin) / 60:.1f} minutes: {run}/report.png, the draft in {run}/draft")
    return 0


def call(command: Sequence[str], rest: "Rest") -> int:
    """Run a command to its end and return its status; what is left of all is said now and then."""
    # The interpreter and the programs of its environment, whatever the caller's PATH says.
    process = subprocess.Popen([Path(sys.executable).parent / command[0], *command[1:]], cwd=ROOT)
    try:
        while True:
            try:
                return process.wait(timeout=EVERY)
            except subprocess.TimeoutExpired:
                rest.report()
    except KeyboardInterrupt:
        process.wait()  # Ctrl-C goes to the whole group: training saves, the others end
        raise


class Rest:
    """What is left of the whole, by what its parts took here: while training, step by step."""

    def __init__(self, run: Path, steps: Sequence[str], n_steps: int, prepared: bool):
        """steps: in words, the five of `commands`. n_steps: of the training. prepared: whether the data is there."""
        self._metrics, self._prepared = run / "metrics.jsonl", prepared
        self._trained = self._begun_at = self._steps_done()
        self._train = steps[1]
        training = max(0, n_steps - self._trained) * STEP
        costs = [
            NOTHING_TO_DO if prepared else PREPARING,
            STARTING + training if training else NOTHING_TO_DO,
            EXPORTING,
            DECODING,
            VERIFYING,
        ]
        self._time = TimeLeft([Phase(what, what, cost) for what, cost in zip(steps, costs, strict=True)])

    def begin(self, what: str) -> None:
        """This step begins. What one took whose work was there already says little about the others."""
        phase = self._time.phase
        self._time.begin(what, measured=phase is not None and phase.cost > NOTHING_TO_DO)

    def describe(self) -> str:
        """In one line."""
        left = self._time.seconds()
        if left is None:
            whole = sum(one.cost for one in self._time.phases[max(self._time.number, 0) :])
            return f"Time left for the whole: about {duration(whole)} on 2 quiet cores; measured here as it goes on"
        return f"Time left for the whole: about {duration(left)}"

    def report(self) -> None:
        """Where the training went on, on a line of its own, above the bar that it may have drawn on the terminal.

        The other steps are short, or say themselves what is left, as the last one.
        """
        phase, done = self._time.phase, self._steps_done()
        if phase is None or phase.name != self._train or done == self._trained:
            return
        first = self._trained == self._begun_at
        self._time.advance((done - self._trained) * STEP + (STARTING if first else 0))
        self._trained = done
        note(f"\r\033[K{self.describe()}" if sys.stderr.isatty() else self.describe())

    def _steps_done(self) -> int:
        """Of the training, by its metrics; what is not a whole line yet does not count."""
        if not self._metrics.exists():
            return 0
        found = re.findall(r'^\{.*"step": (\d+).*\}$', self._metrics.read_text(encoding="utf-8"), re.MULTILINE)
        return max(map(int, found), default=0)


def commands(run: str, steps: int | None) -> list[tuple[str, list[str]]]:
    """What each step is for, and its command."""
    ranks, overrides = ranks_here(), [f"train.run_dir={run}"]
    overrides += [f"train.steps={steps}", f"optimizer.warmup_steps={min(12, steps // 2)}"] if steps else []
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
            words(f"longdraft train --num-gpus {ranks} {CONFIG}", *overrides),
        ),
        (f"export and reload the draft -> {run}/draft", words(f"python launch/export.py {run}")),
        ("decode a held-out prompt, plainly and with the draft", words("python launch/generate.py", decode)),
        (f"verify and measure -> {run}/report.png", words("python launch/bench.py", bench)),
    ]


def words(*parts: str) -> list[str]:
    return shlex.split(" ".join(parts))


def ranks_here() -> int:
    """All GPUs that may be used, or 2 on a CPU. Raises ValueError where there is one that PyTorch cannot use."""
    from longdraft.models.device import VISIBLE, default_device, n_gpus

    device = default_device("device", f"say {VISIBLE}= make quickstart")
    return n_gpus() if device.type == "cuda" else 2


if __name__ == "__main__":
    sys.exit(main())
