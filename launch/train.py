"""Train a draft on prepared shards: `deepspeed launch/train.py configs/quickstart.yaml [section.field=value ...]`.

The work is in train/loop.py. `longdraft train` starts the ranks itself and, unlike DeepSpeed's launcher, forwards
SIGTERM to them, so that they save and exit with 0.
"""

import argparse
import os
import signal
from collections.abc import Sequence
from functools import partial

from longdraft.launch import arguments
from longdraft.launch.console import end_process, flag, note, run_command, show
from longdraft.models.files import STOP_SIGNALS, signals_noted


def run(args: argparse.Namespace) -> int:
    """`longdraft train`: run `main` on all GPUs of this machine, or on --num-gpus ranks. Returns the exit status."""
    options = [f"--stage={args.stage}"] if args.stage is not None else []
    options += [f"--from-draft={args.from_draft}"] if args.from_draft is not None else []
    if args.tflops is not None and not args.estimate:
        raise ValueError("--tflops: it needs --estimate; add that, or omit it")
    with signals_noted() as stop:  # already here, because looking for GPUs imports torch, which takes seconds
        from longdraft.train.config_file import load_stages
        from longdraft.train.launcher import launch_ranks, rank_devices, settle_device

        stages = load_stages(args.config, args.overrides, args.stage, args.from_draft)
        if args.estimate:  # for this machine, or for any machine with --num-gpus GPUs
            from longdraft.train.estimate import report

            show(report(stages, args.num_gpus, None if args.num_gpus is None else True, args.tflops) + "\n")
            return 0
        devices = rank_devices(args.num_gpus, settle_device(stages[0].config.train.device))
        if stop:
            print("Stopped before training began; run the same command again", flush=True)
            return 0
        return launch_ranks([__file__, args.config, *args.overrides, *options], devices)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank: one that a launcher started, or the only one. Returns the exit status."""
    # One rank of each machine reports errors, since an error may concern only that machine.
    reports_errors = os.environ.get("LOCAL_RANK", "0") == "0"
    args = arguments.train().parse_intermixed_args(argv)
    rank, name = partial(_run_rank, args, reports_errors), "launch/train.py"
    return run_command(name, rank, needs_output=False, reports_errors=reports_errors)


def _run_rank(args: argparse.Namespace, reports_errors: bool) -> int:
    for name in ("estimate", "tflops", "num_gpus"):
        if getattr(args, name):
            raise ValueError(f"{flag(name)}: only for `longdraft train`, which starts the ranks; omit it here")
    with signals_noted() as stop:
        # Imported here so that the signal handler is already in place: the imports take seconds.
        from longdraft.train.config_file import load_stages
        from longdraft.train.launcher import settle_device, stop_with_launcher

        stop_with_launcher()
        stages = load_stages(args.config, args.overrides, args.stage, args.from_draft)
        settle_device(stages[0].config.train.device)
        from longdraft.train.loop import train_stages
        from longdraft.train.ranks import RankError, TrainingError, failures_named, join_ranks, leave_ranks

        try:
            ranks = join_ranks()
            with failures_named(ranks):
                train_stages(stages, ranks, stop)
                leave_ranks(ranks)
        except TrainingError as error:
            if reports_errors or isinstance(error, RankError):
                note(f"launch/train.py: error: {error}")
            return 1
    return 0


if __name__ == "__main__":
    status = main()
    for number in STOP_SIGNALS:  # a second signal, such as a forwarded one, must not disturb the exit
        signal.signal(number, signal.SIG_IGN)
    end_process(status)
