"""Checks of drafter options: every wrong type or size raises a ValueError that names the option.

Not here: which options a drafter has (its constructor), and how the command line's text becomes values
(launch/runtime.py).
"""

from collections.abc import Sequence
from typing import Any

from longdraft.infer.values import is_integer, short_repr


def integer(name: str, value: Any, least: int, most: int | None = None, otherwise: str = "") -> int:
    """Return `value` if it is a whole number in least..most, else raise ValueError.

    `otherwise` is added to the error: what else the option may be.
    """
    limits = (f"at least {least}" if most is None else f"at least {least} and at most {most}") + otherwise
    if not is_integer(value):
        raise ValueError(f"{name}={short_repr(value)}: must be a whole number, {limits}")
    number = int(value)
    if number < least or (most is not None and number > most):
        raise ValueError(f"{name}={short_repr(number)}: must be {limits}")
    return number


def check_integer_or(name: str, value: Any, others: Sequence[str | None], least: int, most: int | None = None) -> None:
    """Raise ValueError unless `value` is one of `others` or a whole number in least..most."""
    if not (isinstance(value, str | None) and value in others):
        integer(name, value, least, most, "".join(f", or {other!r}" for other in others))


def boolean(name: str, value: Any) -> bool:
    """Return `value` if it is True or False, else raise ValueError."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={short_repr(value)}: must be True or False")
    return value
