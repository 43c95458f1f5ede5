"""Validates what comes from outside: configs, folders' metadata, HTTP bodies, values of the command line and the API.

An error is one line: the field, the value, what would be valid. Every folder may import this file. It imports neither
torch nor any other file of longdraft.
"""

import difflib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import cache, wraps
from inspect import signature
from typing import Annotated, Any, ParamSpec, Self, TypeVar, dataclass_transform

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ModelWrapValidatorHandler,
    Strict,
    TypeAdapter,
    ValidationError,
    model_validator,
    validate_call,
)
from pydantic.dataclasses import dataclass
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")

CONFIG = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, arbitrary_types_allowed=True)
SHOWN = 80  # characters of an invalid value in a message
SECRET = re.compile(r"(^|_)(key|token|password|secret)$")  # fields whose values are never shown


def _number(value: Any) -> Any:
    """A float from an int or from numeric text, since YAML reads 1e-4 as text. The rest is left to pydantic."""
    try:
        return float(value) if type(value) in (int, str) else value
    except (ValueError, OverflowError):
        return value


Int = Annotated[int, Strict()]
Bool = Annotated[bool, Strict()]
Str = Annotated[str, Strict()]
Float = Annotated[float, Strict(), BeforeValidator(_number)]


class _IsInstance:
    def __get_pydantic_core_schema__(self, kind: type, handler: Any) -> CoreSchema:
        return core_schema.is_instance_schema(kind)


Instance = Annotated[T, _IsInstance()]  # an object of this class, whose own fields are not looked at


class Schema(BaseModel):
    """A frozen record of validated fields, given by keyword.

    Raises a one-line ValueError for an unknown field (with the nearest known one), a missing field or an invalid value.
    A subclass's validator raises ValueError with a sentence; the path of its field or section is put before it.
    """

    model_config = CONFIG

    def __init__(self, **values: Any) -> None:
        with _errors_in_one_line():
            super().__init__(**values)

    # pydantic's own marker: as a field of another schema, this class is validated without the method above, so that an
    # error in it carries its whole path.
    __init__.__pydantic_base_init__ = True  # pyright: ignore[reportFunctionMemberAccess]

    @model_validator(mode="wrap")
    @classmethod
    def _unknown_field_named(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(values, dict) and cls.model_config.get("extra") == "forbid":
            known = [field.alias or name for name, field in cls.model_fields.items()]
            for name in values:
                if name not in known:
                    raise _unknown(name, known)
        return handler(values)


@dataclass_transform(frozen_default=True)
def validated_dataclass(cls: type[T]) -> type[T]:
    """A frozen dataclass whose fields are validated like Schema's. They may also be given by position."""
    made: Any = dataclass(config=ConfigDict(**{**CONFIG, "frozen": None}), frozen=True)(cls)
    init, names = made.__init__, [field.name for field in fields(made)]

    @wraps(init)
    def checked(self: Any, *args: Any, **values: Any) -> None:
        with _errors_in_one_line():
            init(self, *args[len(names) :], **dict(zip(names, args, strict=False)), **values)

    made.__init__ = checked
    return made


def validated(function: Callable[P, R]) -> Callable[P, R]:
    """A function, or a constructor, whose arguments are validated by their annotations. Raises a one-line ValueError
    that begins with the argument's name."""
    parameters = signature(function)
    call: Callable[..., R] = validate_call(config=CONFIG)(function)

    @wraps(function)
    def checked(*args: P.args, **values: P.kwargs) -> R:
        given = parameters.bind(*args, **values).arguments  # by name, which is what errors show
        others = given.pop("kwargs", {})
        with _errors_in_one_line():
            return call(**given, **others)

    return checked


def validate(kind: type[T], values: Any, where: str = "") -> T:
    """Make a schema, or any other type that pydantic knows, from plain values.

    where: the path of these values, put before the field's name ("sources.books").
    Raises a one-line ValueError.
    """
    with _errors_in_one_line(where):
        return _adapter(kind).validate_python(values)


_adapter = cache(TypeAdapter)  # making one compiles the type's validation


@contextmanager
def _errors_in_one_line(where: str = "") -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        raise ValueError(one_line(error, where)) from None


def one_line(error: ValidationError, where: str = "") -> str:
    """The first error as `path.of.field: what is wrong`. Unknown fields come first: they explain what is missing."""
    unknown = ("unknown", "extra_forbidden", "unexpected_keyword_argument")
    errors = error.errors(include_url=False)
    first = min(errors, key=lambda detail: detail["type"] not in unknown)
    # A value that fits no member of a union has one error per member, whose path ends in the member's name: list[str].
    alike = [one for one in errors if one["loc"][:-1] == first["loc"][:-1] and one["input"] is first["input"]]
    is_union = any("[" in str(one["loc"][-1:]) for one in alike)
    parts = first["loc"][:-1] if is_union else first["loc"]
    path = [where] * bool(where) + [" ".join(str(part).split()) for part in parts if "[" not in str(part)]
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "unknown":
        path.append(first["ctx"]["field"])  # pyright: ignore[reportTypedDictNotRequiredAccess]
    elif first["type"] in unknown:
        message = "unknown field"
    elif first["type"] == "missing":
        message = "missing; give it a value"
    elif first["type"] != "value_error":
        message = message[:1].lower() + message[1:]
        if is_union:
            others = (one["msg"].removeprefix("Input should be ") for one in alike if one is not first)
            message = " or ".join(dict.fromkeys([message, *others]))
        if not isinstance(first["input"], dict) and not SECRET.search(path[-1] if path else ""):
            message = f"{short_repr(first['input'])} is not valid, {message}"
    return f"{'.'.join(path)}: {message}" if path else message


def short_repr(value: Any) -> str:
    """A value for an error message, in at most SHOWN characters."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python does not print integers of over 4300 digits
        return "an integer" if isinstance(value, int) else type(value).__name__
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 4]} ..."


def _unknown(name: Any, known: list[str]) -> PydanticCustomError:
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)
    hint = f"; did you mean {near[0]}?" if near else ""
    return PydanticCustomError("unknown", "unknown field{hint}", {"field": str(name), "hint": hint})  # pyright: ignore
