"""Shards to a trained draft: `deepspeed launch/train.py configs/quickstart.yaml [section.field=value ...]`.

Argument parsing and nothing else; the work is in train/loop.py. `longdraft train` starts
DeepSpeed's launcher itself and, unlike the bare launcher, passes SIGTERM on to the ranks, which save and leave with 0.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from longdraft.launch.console import framed, note, show
from longdraft.train.stop import SIGNALS, stop_signals


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description="Train a draft against a frozen target.")
    parser.add_argument("config", help="a YAML file of configs/")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="for example train.steps=500")
    parser.add_argument("--stage", help="of a file with stages: begin with this one (default: the first not done yet)")
    parser.add_argument("--from-draft", help="draft folder whose weights the training begins with")
    parser.add_argument("--estimate", action="store_true", help="print what it needs of memory and operations, and end")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """One rank: what the launcher starts, or, called alone, the only one. Returns the exit status."""
    parser = _parser("launch/train.py")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the launcher says it; the environment too
    args = parser.parse_intermixed_args(argv)
    # Once a machine: what is wrong may be another machine's alone.
    names_errors = os.environ.get("LOCAL_RANK", "0") == "0"

    def work() -> int:
        if args.estimate:
            if os.environ.get("RANK", "0") == "0":
                _estimate(args, int(os.environ.get("WORLD_SIZE", "0")) or None)
            return 0
        with stop_signals() as stop:
            # Here, not above: a signal during the seconds of import must find its handler in place.
            from longdraft.train.launcher import settle_device

            settle_device(args.config, args.overrides)
            from longdraft.train.loop import train_stages
            from longdraft.train.ranks import TrainingError, join_ranks, leave_ranks
            from longdraft.train.stages import load_stages

            try:
                stages = load_stages(args.config, args.overrides, args.stage, args.from_draft)
                ranks = join_ranks()
                train_stages(stages, ranks, stop)
                leave_ranks(ranks)
            except TrainingError as error:
                if names_errors:
                    note(f"{parser.prog}: error: {error}")
                return 1
        return 0

    return framed(parser.prog, work, shows=args.estimate, names_errors=names_errors)


def start(argv: Sequence[str] | None = None) -> int:
    """`longdraft train`: the same arguments, on all GPUs of this machine or --num-gpus ranks. Returns the status."""
    parser = _parser("longdraft train")
    parser.add_argument(
        "--num-gpus",
        type=int,
        help="ranks of this machine (default: its GPUs, those of CUDA_VISIBLE_DEVICES where it is set; 1 on a CPU)",
    )
    args = parser.parse_intermixed_args(argv)

    def work() -> int:
        if args.num_gpus is not None and args.num_gpus < 1:
            raise ValueError(f"num_gpus: {args.num_gpus}; give at least 1")
        if args.estimate:  # for the GPUs of this machine, or for so many wherever they are
            _estimate(args, args.num_gpus, gpu=True if args.num_gpus is not None else None)
            return 0
        options = [f"--stage={args.stage}"] if args.stage is not None else []
        options += [f"--from-draft={args.from_draft}"] if args.from_draft is not None else []
        with stop_signals() as stop:  # from here on: looking for GPUs imports torch, which takes seconds
            from longdraft.train.launcher import launch_with_deepspeed, rank_devices, settle_device

            devices = rank_devices(args.num_gpus, settle_device(args.config, args.overrides))
            if stop:
                print("Stopped before it began; the same command goes on", flush=True)
                return 0
            return launch_with_deepspeed([__file__, args.config, *args.overrides, *options], devices)

    return framed(parser.prog, work, shows=args.estimate)


def _estimate(args: argparse.Namespace, n_ranks: int | None, gpu: bool | None = None) -> None:
    """Prints what the stages need."""
    from longdraft.train.estimate import report
    from longdraft.train.stages import load_stages

    show(report(load_stages(args.config, args.overrides, args.stage, args.from_draft), n_ranks, gpu) + "\n")


if __name__ == "__main__":
    status = main()
    for number in SIGNALS:  # told to stop twice, by the system and by `longdraft train`, it has done so already
        signal.signal(number, signal.SIG_IGN)
    sys.exit(status)
