"""Checks of drafter options: every wrong type or size raises a ValueError that names the option.

Not here: which options a drafter has (its constructor), and how the command line's text becomes values
(launch/runtime.py).
"""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from torch import Tensor

from longdraft.infer.values import is_integer, is_number, short_repr
from longdraft.models.drafts.vocabulary import DraftVocabulary
from longdraft.models.footprint import Allocations
from longdraft.models.target import Target


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


def fraction(name: str, value: Any) -> float:
    """Return `value` if it is a number of at least 0 (off) and below 1, else raise ValueError."""
    if not is_number(value) or not 0 <= float(value) < 1:
        raise ValueError(f"{name}={short_repr(value)}: must be at least 0 (off) and below 1")
    return float(value)


def boolean(name: str, value: Any) -> bool:
    """Return `value` if it is True or False, else raise ValueError."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={short_repr(value)}: must be True or False")
    return value


def one_of(name: str, value: Any, known: Sequence[str]) -> str:
    """Return `value` if it is one of the known words, else raise ValueError."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name}={short_repr(value)}: must be one of {', '.join(known)}")
    return value


def level_widths(name: str, value: Any) -> tuple[int, ...]:
    """Return `value` as a tuple: a tree's width on each level. A single number is one level. Raises ValueError."""
    levels = (value,) if isinstance(value, Integral) else value
    if not isinstance(levels, Sequence) or isinstance(levels, str | bytes) or not levels:
        raise ValueError(f"{name}={short_repr(value)}: must be a whole number for each level, such as (3, 3, 3)")
    return tuple(integer(f"{name}[{i}]", width, 1) for i, width in enumerate(levels))


def check_draft(drafter: str, target: Target, draft: Any, kind: type[DraftVocabulary], description: str) -> None:
    """Raise ValueError unless `draft` is a `kind` with valid token ids, in the target's dtype and on its device."""
    if not isinstance(draft, kind):
        raise ValueError(f"draft: this is one of {type(draft).__name__}; the {drafter} drafter needs {description}")
    weight, ours = target.model.lm_head.weight, next(draft.parameters())
    if (ours.dtype, ours.device) != (weight.dtype, weight.device):
        raise ValueError(
            f"draft: {ours.dtype} on {ours.device}, but the target is {weight.dtype} on {weight.device}; "
            f"load it with load_draft(folder, target)"
        )
    ids, vocab_size = draft.token_ids, target.model.config.vocab_size
    if ids is not None and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(ids.unique()) < len(ids)):
        raise ValueError(f"draft: its token_ids must be different and lie in 0..{vocab_size - 1}")


def copied_head(draft: DraftVocabulary, head_ED: Tensor) -> Allocations:
    """The LM head's rows that a drafter copies for a restricted draft vocabulary, for `Drafter.allocations`."""
    return {} if draft.token_ids is None else {"draft vocabulary": [(head_ED.shape, head_ED.dtype)]}
