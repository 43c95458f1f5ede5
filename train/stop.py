"""A wish to stop, collected from signals. It imports next to nothing, so that it can be in place before torch is."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Inside, SIGNALS go into the list instead of ending the process; the ranks agree on it each step. A SIGHUP that is
    ignored, as under nohup, stays so."""
    received: list[int] = []
    heard = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda n, _: received.append(n)) for number in heard}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
