"""Train a draft on prepared shards: `deepspeed launch/train.py configs/quickstart.yaml [section.field=value ...]`.

Only argument parsing is here; the work is in train/loop.py. `longdraft train` starts the ranks itself and, unlike
DeepSpeed's launcher, passes SIGTERM on to them, so that they save and exit with 0.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from longdraft.launch.console import note, run_command, show
from longdraft.models.files import STOP_SIGNALS, signals_noted


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description="Train a draft against a frozen target.")
    parser.add_argument("config", help="a YAML file, such as those in configs/")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="for example train.steps=500")
    parser.add_argument("--stage", help="of a config with stages: start with this one (default: the first unfinished)")
    parser.add_argument("--from-draft", help="draft folder whose weights the training starts from")
    parser.add_argument("--estimate", action="store_true", help="print the memory, operations and hours it takes")
    parser.add_argument(
        "--tflops",
        type=float,
        help="10^12 operations a second of a rank, for the hours (default: those of the run so far)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank: one that the launcher starts, or the only one. Returns the exit status."""
    parser = _parser("launch/train.py")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # given by the launcher, as LOCAL_RANK is
    args = parser.parse_intermixed_args(argv)
    # One rank of each machine reports errors, since an error may concern only that machine.
    reports_errors = os.environ.get("LOCAL_RANK", "0") == "0"

    def work() -> int:
        if args.estimate:
            if os.environ.get("RANK", "0") == "0":
                _estimate(args, int(os.environ.get("WORLD_SIZE", "0")) or None)
            return 0
        with signals_noted() as stop:
            # Imported here so that the signal handler is in place during the seconds that this takes.
            from longdraft.train.config_file import load_stages
            from longdraft.train.launcher import settle_device, stop_with_launcher

            stop_with_launcher()
            stages = load_stages(args.config, args.overrides, args.stage, args.from_draft)
            settle_device(stages[0].config.train.device)
            from longdraft.train.loop import train_stages
            from longdraft.train.ranks import TrainingError, join_ranks, leave_ranks

            try:
                ranks = join_ranks()
                train_stages(stages, ranks, stop)
                leave_ranks(ranks)
            except TrainingError as error:
                if reports_errors:
                    note(f"{parser.prog}: error: {error}")
                return 1
        return 0

    return run_command(parser.prog, work, needs_output=args.estimate, reports_errors=reports_errors)


def start(argv: Sequence[str] | None = None) -> int:
    """Run `longdraft train`: `main` on all GPUs of this machine, or on --num-gpus ranks. Returns the exit status."""
    parser = _parser("longdraft train")
    parser.add_argument(
        "--num-gpus",
        type=int,
        help="ranks on this machine (default: one for each GPU, or for each in CUDA_VISIBLE_DEVICES; 1 on a CPU)",
    )
    args = parser.parse_intermixed_args(argv)

    def work() -> int:
        if args.num_gpus is not None and args.num_gpus < 1:
            raise ValueError(f"num_gpus: {args.num_gpus}; give at least 1")
        if args.estimate:  # for this machine, or for any machine with --num-gpus GPUs
            _estimate(args, args.num_gpus, gpu=True if args.num_gpus is not None else None)
            return 0
        options = [f"--stage={args.stage}"] if args.stage is not None else []
        options += [f"--from-draft={args.from_draft}"] if args.from_draft is not None else []
        with signals_noted() as stop:  # already here: looking for GPUs imports torch, which takes seconds
            from longdraft.train.config_file import load_stages
            from longdraft.train.launcher import launch_ranks, rank_devices, settle_device

            stages = load_stages(args.config, args.overrides, args.stage, args.from_draft)
            devices = rank_devices(args.num_gpus, settle_device(stages[0].config.train.device))
            if stop:
                print("Stopped before it began; run the same command again", flush=True)
                return 0
            return launch_ranks([__file__, args.config, *args.overrides, *options], devices)

    return run_command(parser.prog, work, needs_output=args.estimate)


def _estimate(args: argparse.Namespace, n_ranks: int | None, gpu: bool | None = None) -> None:
    """Print what the stages need."""
    from longdraft.train.config_file import load_stages
    from longdraft.train.estimate import report

    stages = load_stages(args.config, args.overrides, args.stage, args.from_draft)
    show(report(stages, n_ranks, gpu, args.tflops) + "\n")


if __name__ == "__main__":
    status = main()
    for number in STOP_SIGNALS:  # a second signal, from `longdraft train` after the system's, must not disturb the exit
        signal.signal(number, signal.SIG_IGN)
    sys.exit(status)
