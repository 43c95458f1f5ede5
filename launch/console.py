"""What every command has around its work: streams that can be written, one line for an error, the exit status.

Not here: any command, and the line that moves while one works (launch/progress.py).
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from tqdm import tqdm

FAILED, NOT_WRITTEN = 2, 1  # after an error; where who read the output has left
INTERRUPTED = 130  # exit status after Ctrl-C, as shells have it
# What setup.py installs with an extra alone.
EXTRAS = {
    "train": ("deepspeed", "datasets", "wandb", "omegaconf"),
    "serve": ("fastapi", "uvicorn", "prometheus_client", "pydantic"),
}
PATIENCE = 1.5  # seconds from Ctrl-C to the end, whatever is at work


def framed(
    prog: str,
    work: Callable[[], int | None],
    on_ctrl_c: str = "interrupted",
    shows: bool = True,
    names_errors: bool = True,
) -> int:
    """Run a command's work and return its exit status: 0 or what it returns, 2 after a ValueError, which is shown as
    one line, or where a package of EXTRAS is missing, 130 after Ctrl-C.

    Args:
        on_ctrl_c: what is said then.
        shows: whether standard output is what the command is for, so that without one there is nothing to do; else the
            work goes on where nobody reads.
        names_errors: whether errors are printed; not where another process prints them too.
    """
    try:
        _mend_streams(shows)
        try:
            return work() or 0
        finally:
            flush()
    except ValueError as error:
        if names_errors:
            note(f"{prog}: error: {error}")
        return FAILED
    except ModuleNotFoundError as error:
        extra = next((extra for extra, packages in EXTRAS.items() if error.name in packages), None)
        if extra is None:
            raise
        if names_errors:
            note(f"{prog}: error: {error.name} is not installed; pip install 'longdraft[{extra}]'")
        return FAILED
    except KeyboardInterrupt:
        note(f"{prog}: {on_ctrl_c}")
        return INTERRUPTED
    except BrokenPipeError:
        return NOT_WRITTEN


def leave(status: int) -> NoReturn:
    """End the process; after Ctrl-C without taking apart what is loaded, which may take longer than who waits likes."""
    if status == INTERRUPTED:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(status)
    sys.exit(status)


def show(text: str) -> None:
    """Write text to standard output at once. Raises ValueError where it cannot be written, BrokenPipeError where who
    read it has left."""
    try:
        sys.stdout.write(text)
    except OSError as error:
        _refuse_output(error)
    flush()


def flush() -> None:
    """Write what standard output still holds; raises as `show`."""
    try:
        sys.stdout.flush()
    except OSError as error:
        _refuse_output(error)


def _refuse_output(error: OSError) -> None:
    # What is buffered has nowhere to go, and Python would say so once more at its end.
    to_nothing(1)
    if isinstance(error, BrokenPipeError):
        raise error
    raise ValueError(f"standard output cannot be written: {error.strerror}; make room or write elsewhere") from error


def note(line: str = "") -> None:
    """A line on standard error, above a bar that stands there; where nobody can read it, the work goes on without."""
    try:
        tqdm.write(line, file=sys.stderr)
        sys.stderr.flush()
    except OSError:
        to_nothing(2)


def to_nothing(number: int) -> None:
    """What is written to this descriptor from now on goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)


class _Unheard(FileIO):
    """A descriptor to write to whose failures - who read it has left, the disk is full - are nobody's concern."""

    def write(self, data: Any) -> int:
        with suppress(OSError):
            written = super().write(data)
            if written is not None:
                return written
        return len(data)


def _mend_streams(shows: bool) -> None:
    """Standard streams as the commands expect them, whatever the caller closed.

    A closed one is opened on nothing: else the next file would take its number, and what libraries print would go
    into that file. What an encoding does not have is written as escapes.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDONLY if name == "stdin" else os.O_WRONLY)  # takes the lowest number free
    if sys.stderr is None:
        sys.stderr = open(2, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115 - for the process's life
    if sys.stdout is None:
        if shows:
            raise ValueError("standard output is closed; leave it open or write it to a file")
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - for the process's life
    for number, name in () if shows else ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):  # else it is the caller's own
            raw = BufferedWriter(_Unheard(number, "w", closefd=False))
            setattr(sys, name, TextIOWrapper(raw, stream.encoding, "backslashreplace", line_buffering=True))
    if getattr(sys.stdout, "errors", None) == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def flag(name: str) -> str:
    """The option whose value argparse keeps under this name."""
    return f"--{name.replace('_', '-')}"


def read_stdin() -> str:
    """Standard input's text to its end, UTF-8 whatever the locale says. Raises: ValueError where it is none."""
    if sys.stdin is None:
        raise ValueError("standard input is closed; give the prompt by --prompt or --prompt-file")
    return _read("standard input", lambda: sys.stdin.buffer.read().decode("utf-8"))


def read_text(file: Path, option: str) -> str:
    """A UTF-8 file's text. Raises: ValueError, with the option that named it, where there is none."""
    return _read(f"{option}: {file}", lambda: file.read_text(encoding="utf-8"))


def _read(name: str, read: Callable[[], str]) -> str:
    try:
        return read()
    except UnicodeDecodeError as error:
        wrong = f"byte 0x{error.object[error.start]:02x} at position {error.start}"
        raise ValueError(f"{name} is no UTF-8 text: {wrong}; convert it, as with iconv") from error
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror or error}") from error


@contextmanager
def ends_on_ctrl_c(prog: str) -> Iterator[None]:
    """Inside, Ctrl-C raises KeyboardInterrupt as ever, and where that does not end the work in time - a library
    swallows it, or one call takes long - the process ends by itself with the same status.

    For work that leaves nothing half done.
    """
    timer = threading.Timer(PATIENCE, _give_up, [prog])
    timer.daemon = True

    def interrupt() -> None:
        timer.start()
        raise KeyboardInterrupt

    with on_ctrl_c(interrupt):
        try:
            yield
        finally:
            timer.cancel()


@contextmanager
def on_ctrl_c(do: Callable[[], None]) -> Iterator[None]:
    """Inside, the first Ctrl-C does this; a second one does what it did before."""
    before = signal.getsignal(signal.SIGINT)
    # Signals are the main thread's; and whoever started us may want no Ctrl-C to reach us.
    if threading.current_thread() is not threading.main_thread() or before is signal.SIG_IGN:
        yield
        return

    def first(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        do()

    signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _give_up(prog: str) -> None:
    os.write(2, f"\n{prog}: interrupted\n".encode())  # not through the stream, which the stuck call may hold
    os._exit(INTERRUPTED)
