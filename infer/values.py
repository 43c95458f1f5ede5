"""Checks of numbers and texts that users give, and how an error shows a wrong value."""

import math
from numbers import Integral, Real
from typing import Any

SHOWN = 80  # characters of a wrong value


def short_repr(value: Any) -> str:
    """A value for an error message, in at most SHOWN characters."""
    try:
        text = repr(value)
    except ValueError:  # Python does not print integers of over 4300 digits
        return f"an integer of {int(value).bit_length()} bits" if is_integer(value) else type(value).__name__
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 4]} ..."


def is_integer(value: Any) -> bool:
    """Whether this is a whole number. True and False are not."""
    if type(value) is int:  # nearly always, and isinstance of an abstract class is slow
        return True
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether this is a finite number that fits into a float. True and False are not."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def check_text(name: str, text: str) -> None:
    """Raise ValueError, beginning with `name`, for a text with half a surrogate pair, which UTF-8 cannot encode.

    Python makes such halves of command line arguments that are not UTF-8.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code, place = ord(text[error.start]), f"at character {error.start}"
        if 0xDC80 <= code <= 0xDCFF:
            problem = f"byte 0x{code - 0xDC00:02x} {place} is not UTF-8; give the text in UTF-8"
        else:
            problem = f"\\u{code:04x} {place} is half a surrogate pair and not a character; leave it out"
        raise ValueError(f"{name}: {problem}") from error
