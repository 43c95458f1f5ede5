"""Signals that ask a run to stop. This imports next to nothing, so that it is in place before torch is imported."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Inside, SIGNALS are appended to the list instead of ending the process; the ranks agree on it in each step. A
    SIGHUP that is ignored, as under nohup, stays ignored."""
    received: list[int] = []
    caught = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda n, _: received.append(n)) for number in caught}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
