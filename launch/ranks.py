"""Runs a decoding command on several ranks of this machine that compute one target (--tensor-parallel).

The ranks are processes that all run the command. The first one alone reads its input, writes its output and reports
errors.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from longdraft.launch.console import INTERRUPTED
from longdraft.models.files import STOP_SIGNALS

# How long a rank that has failed waits to be ended before it reports its error itself.
GRACE_S = 20.0


def run_on_ranks(command: str, argv: Sequence[str], args: argparse.Namespace, work: Callable[[], int | None]) -> int:
    """Start the ranks, or run `work` if this process is one of them, started here or by `torchrun`. Returns the exit
    status."""
    if "RANK" in os.environ:
        return _run_rank(work)
    from longdraft.models.device import option_device
    from longdraft.train.launcher import launch_ranks, rank_devices

    device = option_device(args.device)
    if device.index is not None:
        raise ValueError(f"--device: {device} is one GPU, and --tensor-parallel needs {args.tensor_parallel}; omit it")
    devices = rank_devices(args.tensor_parallel, device.type, "--tensor-parallel")
    cli = Path(__file__).with_name("cli.py")
    status = launch_ranks([str(cli), command, *argv], devices, f"longdraft {command}", "start it again")
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    return status


def _run_rank(work: Callable[[], int | None]) -> int:
    from longdraft.models.tensor_parallel import leave
    from longdraft.train.launcher import stop_with_launcher

    stop_with_launcher()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    if not (is_first := os.environ["RANK"] == "0"):
        sys.stdout = sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    try:
        try:
            status = work()
        except SystemExit as end:  # of a server that was told to stop
            status = end.code
        if not status:  # else the others may wait for this one, and the launcher ends them
            leave()
        return int(status or 0)
    except Exception as error:
        if not is_first or isinstance(error, RuntimeError):
            # If another rank failed, perhaps for the same reason, the launcher ends this one now.
            time.sleep(GRACE_S)
            sys.stderr = sys.__stderr__
        raise
