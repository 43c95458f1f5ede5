"""What users give as values: numbers and texts that are what they seem, and how a wrong one is shown in an error.

Not here: which field wants what (infer/sampling.py, infer/requests.py, infer/options.py).
"""

import math
from numbers import Integral, Real
from typing import Any

SHOWN = 80  # characters of a wrong value


def short_repr(value: Any) -> str:
    """A wrong value for an error, in at most SHOWN characters."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of over 4300 digits
        return f"an integer of {int(value).bit_length()} bits" if is_integer(value) else type(value).__name__
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 4]} ..."


def is_integer(value: Any) -> bool:
    """Whether this is a whole number; True and False are none."""
    if type(value) is int:  # nearly always, and the question below takes long
        return True
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether this is a finite number that a float can hold; True and False are none."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def check_text(name: str, text: str) -> None:
    """Raise ValueError, beginning with `name`, for a text that holds half a surrogate pair, which no UTF-8 has.

    Python makes some of bytes that were no UTF-8 where they were read as a command's argument.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code, place = ord(text[error.start]), f"at character {error.start}"
        if 0xDC80 <= code <= 0xDCFF:
            what = f"byte 0x{code - 0xDC00:02x} {place} is no UTF-8; give the text in UTF-8"
        else:
            what = f"\\u{code:04x} {place} is half a surrogate pair and no character; leave it out"
        raise ValueError(f"{name}: {what}") from error
