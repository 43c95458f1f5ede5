"""Strict reading of YAML files into dataclasses: an unknown or missing key, or a value of another type, is named.

Not here: what the fields mean.
"""

import difflib
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

Sections = Mapping[str, Callable[[Any], type]]
UNREADABLE = (OmegaConfBaseException, YAMLError, RecursionError)


def read_yaml(path: str | Path, overrides: Sequence[str] = ()) -> DictConfig:
    """The file's mapping with the overrides laid over it in order, unchecked and with `${...}` as written.

    Raises ValueError where the file or an override cannot be read.
    """
    path, root = Path(path), Path(__file__).resolve().parents[1]
    if not path.is_file() and path.parts[:1] == ("configs",):  # the recipes that come along, from any folder
        path = root / path
    if not path.is_file():
        raise ValueError(f"config: no file {path}; give one of the YAML files in {root / 'configs'}")
    try:
        raw = OmegaConf.load(path)
    except (*UNREADABLE, OSError, UnicodeDecodeError) as error:
        where = f"{key}: " if (key := getattr(error, "full_key", None)) else ""
        raise ValueError(f"config: {path} cannot be read: {where}{_one_line(error)}{_hint(error)}") from error
    if not isinstance(raw, DictConfig):
        raise ValueError(f"config: {path} holds a list, expected sections of fields, as `train: {{steps: 100}}`")
    for layer in read_overrides(overrides):
        raw = lay_over(raw, layer)
    return raw


def read_overrides(overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Each `section.field=value` as a nested mapping; raises ValueError for an override of another form."""
    layers = []
    for override in overrides:
        name, _, value = override.partition("=")
        if "=" not in override or override.startswith("-") or not all(name.split(".")):
            raise ValueError(f"override: {override!r} has not the form section.field=value, as train.steps=100")
        if value.strip("'\" ") == "???":
            raise ValueError(f"{name}: ??? stands for a value that is still to be given; give one")
        try:
            layers.append(OmegaConf.to_container(OmegaConf.from_dotlist([override]), resolve=False))
        except UNREADABLE as error:
            raise ValueError(f"override: {override!r} cannot be read: {_one_line(error)}{_hint(error)}") from error
    return layers


def lay_over(base: DictConfig, layer: Mapping[str, Any]) -> DictConfig:
    """Lay a layer's fields over the base; raises ValueError where a list meets a section or a value is unreadable."""
    try:
        return OmegaConf.merge(base, layer)  # pyright: ignore[reportReturnType]
    except UNREADABLE as error:
        raise ValueError(f"config: {_one_line(error)}") from error
    except TypeError as error:
        where = _clash(OmegaConf.to_container(base, resolve=False), layer) or "config"
        raise ValueError(
            f"{where}: a list is laid over a section of fields, or a section over a list; give fields in both places, "
            "as `train: {steps: 100}`"
        ) from error


def _clash(base: Any, layer: Any, where: str = "") -> str | None:
    """The first key at which one of two mappings has a list and the other a mapping."""
    if isinstance(base, dict) and isinstance(layer, Mapping):
        inner = (_clash(base[name], layer[name], _join(where, name)) for name in layer if name in base)
        return next(filter(None, inner), None)
    kinds = [[isinstance(value, kind) for kind in (list, Mapping)] for value in (base, layer)]
    return where if any(kinds[0]) and any(kinds[1]) and kinds[0] != kinds[1] else None


def resolve(raw: DictConfig) -> dict[str, Any]:
    """Plain values with every `${...}` resolved by OmegaConf: `${target.path}` stands for another field,
    `${oc.env:HOME}` for an environment variable.

    Raises ValueError where a reference is unknown or circular, or a value is `???`, still to be given.
    """
    try:
        return OmegaConf.to_container(raw, resolve=True, throw_on_missing=True)  # pyright: ignore[reportReturnType]
    except MissingMandatoryValue as error:
        raise ValueError(f"{error.full_key}: ??? stands for a value that is still to be given; give one") from error
    except (OmegaConfBaseException, RecursionError) as error:
        where = getattr(error, "full_key", None) or "config"
        value = _value_at(OmegaConf.to_container(raw, resolve=False), where)
        raise ValueError(
            f"{where}: {value!r} cannot be resolved: {_one_line(error)}; name a field as ${{section.field}}, a "
            "variable of the environment that is set as ${oc.env:NAME}, or write \\${ for the characters themselves"
        ) from error


def _value_at(values: Any, key: str) -> Any:
    """The value at one of OmegaConf's keys, such as `sources.books.files[1]`."""
    for name in re.findall(r"[^.\[\]]+", key):
        if isinstance(values, list):
            values = values[int(name)]
        elif isinstance(values, dict):
            values = {str(field): value for field, value in values.items()}.get(name)
    return values


def _one_line(error: BaseException) -> str:
    """The error's message in one line, without the lines that OmegaConf appends about the key."""
    return " ".join(str(error).split("\n    full_key:")[0].split()) or type(error).__name__


def _hint(error: BaseException) -> str:
    """A remedy for `${...}` without quotes in a flow collection, whose braces YAML takes for a mapping."""
    return '; write "${...}" in quotes within { } or [ ]' if "parsing a flow" in str(error) else ""


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
