"""The frame of every command: usable standard streams, one-line errors, Ctrl-C and exit statuses."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from io import BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

# Exit statuses: after an error, after a closed pipe on standard output, and after Ctrl-C, as in shells.
FAILED, NOT_WRITTEN, INTERRUPTED = 2, 1, 130
# The packages that setup.py installs only with an extra.
EXTRAS = {"train": ("deepspeed", "datasets", "wandb", "omegaconf"), "serve": ("starlette", "uvicorn")}


def run_command(
    prog: str,
    work: Callable[[], int | None],
    on_ctrl_c: str = "interrupted",
    needs_output: bool = True,
    reports_errors: bool = True,
    by_force: bool = False,
) -> int:
    """Run a command's work and return its exit status.

    That is 0 or what `work` returns, 2 after a ValueError (shown as one line) or if a package of EXTRAS is missing, and
    130 after Ctrl-C.

    Args:
        on_ctrl_c: the message after Ctrl-C.
        needs_output: whether the command's result is its standard output: without one, running is an error. Otherwise
            the work continues even if nobody reads its output.
        reports_errors: whether errors are printed; False if another process prints the same ones.
        by_force: whether Ctrl-C ends the process at once, since a library may swallow KeyboardInterrupt. Only for work
            that leaves nothing half done.
    """
    try:
        _prepare_streams(needs_output)
        try:
            with _ended_by_ctrl_c(f"\n{prog}: {on_ctrl_c}\n") if by_force else nullcontext():
                return work() or 0
        finally:
            show("")  # write what is still buffered
    except (ValueError, ModuleNotFoundError) as error:
        message = str(error)
        if isinstance(error, ModuleNotFoundError):
            extra = next((extra for extra, packages in EXTRAS.items() if error.name in packages), None)
            if extra is None:
                raise
            message = f"{error.name} is not installed; pip install 'longdraft[{extra}]'"
        if reports_errors:
            note(f"{prog}: error: {message}")
        return FAILED
    except KeyboardInterrupt:
        note(f"{prog}: {on_ctrl_c}")
        return INTERRUPTED
    except BrokenPipeError:
        return NOT_WRITTEN


@contextmanager
def _ended_by_ctrl_c(message: str) -> Iterator[None]:
    """In this context Ctrl-C ends the process, unless it was started with Ctrl-C ignored."""

    def end(*_: object) -> None:
        os.write(2, message.encode())  # not sys.stderr, whose lock the interrupted call may hold
        os._exit(INTERRUPTED)

    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, before if before is signal.SIG_IGN else end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def end_process(status: int) -> NoReturn:
    """End this process.

    A rank that has failed ends without clean-up: the threads of a process group that it has not left abort it in one of
    30 clean-ups, and its launcher then names that in place of the reason. Only W&B needs its clean-up.
    """
    if not status or "RANK" not in os.environ or "wandb" in sys.modules:
        sys.exit(status)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(status)


def show(text: str) -> None:
    """Write text to standard output and flush it.

    Raises ValueError if it cannot be written, and BrokenPipeError if the reader has closed it.
    """
    try:
        if text:  # with PYTHONUNBUFFERED, a full disk refuses even an empty write
            sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # At exit Python would try to write the rest of its buffer once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if isinstance(error, BrokenPipeError):
            raise
        message = f"standard output cannot be written: {error.strerror}; make room or write elsewhere"
        raise ValueError(message) from error


def note(line: str) -> None:
    """Write a line to standard error, above any progress bar."""
    tqdm.write(line, file=sys.stderr)
    sys.stderr.flush()


class _IgnoringErrors(FileIO):
    """A file descriptor whose write errors are ignored, such as a closed pipe or a full disk."""

    def write(self, data: Any) -> int:
        with suppress(OSError):
            super().write(data)
        return len(data)


def _prepare_streams(needs_output: bool) -> None:
    """Make the standard streams usable, whichever of them the caller has closed.

    A closed stream is opened on the null device; otherwise the next file would get its descriptor, and libraries would
    print into that file. Characters that an encoding lacks are written as escapes. Write errors on standard error, and
    on a standard output that is not needed, are ignored.
    """
    for descriptor, mode in enumerate((os.O_RDONLY, os.O_WRONLY, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, mode)  # gets the lowest free descriptor
    no_output = sys.stdout is None
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream, needed = getattr(sys, name), descriptor == 1 and needs_output
        # A stream that the caller has replaced is not changed.
        if stream is None or (not needed and stream is getattr(sys, f"__{name}__")):
            raw, encoding = BufferedWriter(_IgnoringErrors(descriptor, "w", closefd=False)), stream and stream.encoding
            setattr(sys, name, TextIOWrapper(raw, encoding, "backslashreplace", line_buffering=True))
    if no_output and needs_output:
        raise ValueError("standard output is closed; leave it open or write it to a file")
    if getattr(sys.stdout, "errors", None) == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def flag(name: str) -> str:
    """The option for an argparse name, such as "--top-k" for "top_k"."""
    return f"--{name.replace('_', '-')}"


def read_text(file: Path | None, option: str) -> str:
    """Read a UTF-8 file, or standard input if it is None. Raises ValueError, which names the option, if that fails."""
    try:
        if file is not None:
            return file.read_text(encoding="utf-8")
        return "" if sys.stdin is None else sys.stdin.buffer.read().decode("utf-8")  # whatever the locale
    except (OSError, ValueError) as error:  # ValueError: also for a text that is not UTF-8
        raise ValueError(f"{option}: {file or 'standard input'} cannot be read: {error}") from error
