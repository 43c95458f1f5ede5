"""A wish to stop, collected from signals. It imports next to nothing, so that it can be in place before torch is."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Inside, SIGTERM and SIGINT go into the list instead of ending the process; the ranks agree on it each step."""
    received: list[int] = []
    before = {number: signal.signal(number, lambda n, _: received.append(n)) for number in SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
