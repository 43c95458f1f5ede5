"""Strict reading of YAML files into dataclasses: an unknown or missing key, or a value of another type, is named.

Not here: what the fields mean.
"""

import difflib
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

Sections = Mapping[str, Callable[[Any], type]]


def build(kind: Any, values: Any, sections: Sections | None = None, where: str = "") -> Any:
    """Build a dataclass from a mapping, recursively, strict about keys and types.

    Args:
        sections: for fields whose dataclass depends on their own values, the function that chooses it.
        where: the key of the mapping, for messages.

    Raises ValueError where a key is unknown (the nearest known one is named) or missing, or a value has the wrong type.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{where or 'config'}: expected a section of fields, got {values!r}")
    known = {f.name: f for f in fields(kind)}
    hints = get_type_hints(kind)
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)
            raise ValueError(
                f"{_join(where, key)}: unknown key; did you mean {_join(where, near[0])}? (known: {', '.join(known)})"
            )
    built = {}
    for name, f in known.items():
        if not where and sections and name in sections:
            hints[name] = sections[name](values.get(name, {}))
        if name not in values:
            if f.default is MISSING and f.default_factory is MISSING:
                what = "section" if is_dataclass(hints[name]) else "value"
                raise ValueError(f"{_join(where, name)}: the {what} is missing and has no default; add it to the YAML")
            continue
        value = values[name]
        if is_dataclass(hints[name]):
            built[name] = build(hints[name], value, where=_join(where, name))
        elif get_origin(hints[name]) is dict:
            built[name] = _named(get_args(hints[name])[1], value, _join(where, name))
        else:
            built[name] = _convert(hints[name], value, _join(where, name))
    return kind(**built)


def _named(kind: Any, values: Any, where: str) -> dict[str, Any]:
    """Sections of one kind, by names that the file chooses."""
    if not isinstance(values, dict) or not values:
        raise ValueError(f"{where}: expected a section for each by name, got {values!r}")
    return {str(name): build(kind, value, where=_join(where, name)) for name, value in values.items()}


def _join(where: str, key: Any) -> str:
    return f"{where}.{key}" if where else str(key)


def _convert(kind: Any, value: Any, where: str) -> Any:
    """The value as the field's type. Only numbers are converted from text, since YAML takes 1e-4 for text."""
    if isinstance(kind, types.UnionType):
        if value is None:
            return None
        kind = next(k for k in get_args(kind) if k is not types.NoneType)
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        if kinds[-1] is Ellipsis:
            if not isinstance(value, (list, tuple)):
                raise ValueError(f"{where}: expected a list, got {value!r}")
            kinds = kinds[:1] * len(value)
        if not isinstance(value, (list, tuple)) or len(value) != len(kinds):
            raise ValueError(f"{where}: expected a list of {len(kinds)} values, got {value!r}")
        return tuple(_convert(k, v, where) for k, v in zip(kinds, value, strict=True))
    if kind is Path and isinstance(value, (str, Path)):
        return Path(value)
    if kind is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            return float(value)
        except (ValueError, OverflowError):
            pass
    elif type(value) is kind:
        return value
    raise ValueError(f"{where}: expected {kind.__name__}, got {value!r} ({type(value).__name__})")
