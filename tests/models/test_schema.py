"""models/schema.py: what is accepted, and one line for what is not."""

import pickle
from dataclasses import replace
from typing import Any, Literal

import pytest
from pydantic import Field, model_validator

from longdraft.models.schema import Bool, Float, Int, Schema, Str, validate, validated_dataclass


class Inner(Schema):
    n: Int = Field(default=1, ge=1)
    rate: Float | None = None
    sizes: tuple[Int, ...] = ()
    kind: Literal["a", "b"] = "a"
    on: Bool = False
    api_key: Str = ""

    @model_validator(mode="after")
    def _check(self) -> "Inner":
        if self.kind == "b" and not self.on:
            raise ValueError("kind b needs on = true")
        return self


class Outer(Schema):
    path: Str
    inner: Inner = Inner()
    named: dict[str, Inner] = {}


@validated_dataclass
class Network:
    width: Int = Field(ge=1)
    kind: Literal["a", "b"] = "a"


@pytest.mark.parametrize(
    ("values", "start"),
    [
        ({"inner": {"n": 0}}, "inner.n: 0 "),
        ({"inner": {"n": "3"}}, "inner.n: '3' "),
        ({"inner": {"n": True}}, "inner.n: True "),
        ({"inner": {"rate": True}}, "inner.rate: True "),
        ({"inner": {"rate": "nan"}}, "inner.rate: nan "),
        ({"inner": {"rate": "fast"}}, "inner.rate: 'fast' "),
        ({"inner": {"sizes": [1, "x"]}}, "inner.sizes.1: 'x' "),
        ({"inner": {"on": 1}}, "inner.on: 1 "),
        ({"inner": {"kind": "b"}}, "inner: kind b needs on"),
        ({"inner": {"sise": 1}}, "inner.sise: unknown field; did you mean sizes?"),
        ({"named": {"books": {"m": 1}}}, "named.books.m: unknown field; did you mean "),
        ({"inner": 3}, "inner: 3 "),
        ({"pth": "x"}, "pth: unknown field; did you mean path?"),
        ({"path": 1}, "path: 1 "),
    ],
)
def test_one_line_names_the_field_and_the_value(values: dict[str, Any], start: str):
    for make, where in ((lambda v: Outer(**v), ""), (lambda v: validate(Outer, v, "top"), "top.")):
        with pytest.raises(ValueError) as caught:
            make({"path": "x"} | values if "pth" not in values else values)
        assert str(caught.value).startswith(where + start)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "name"), [(Literal["auto", None] | Int, "integer"), (Bool | Literal["auto", None], "boolean")]
)
def test_what_fits_no_member_of_a_union_is_told_all_of_them(kind: Any, name: str):
    with pytest.raises(ValueError, match=r"^nodes: 'x' .*") as caught:
        validate(kind, "x", "nodes")
    assert all(name in str(caught.value) for name in ("'auto'", "None", name))


def test_a_missing_field_is_named_and_a_secret_is_not_shown():
    with pytest.raises(ValueError, match=r"^path: missing"):
        Outer()  # pyright: ignore[reportCallIssue]
    with pytest.raises(ValueError, match="api_key") as caught:
        Inner(api_key=12345)  # pyright: ignore[reportArgumentType]
    assert "12345" not in str(caught.value)


def test_numbers_and_lists_of_yaml():
    made = validate(Inner, {"rate": "1e-4", "sizes": [1, 2]})
    assert (made.rate, made.sizes) == (1e-4, (1, 2))
    assert isinstance(validate(Inner, {"rate": 3}).rate, float)
    assert pickle.loads(pickle.dumps(made)) == made


def test_a_dataclass_takes_positions_and_names_its_fields():
    assert Network(3, "b") == Network(width=3, kind="b") == replace(Network(1), width=3, kind="b")
    for make in (lambda: Network(0), lambda: replace(Network(1), width=0), lambda: validate(Network, {"width": 0})):
        with pytest.raises(ValueError, match=r"^width: 0 "):
            make()
    with pytest.raises(ValueError, match=r"^kind: 'c' "):
        Network(3, "c")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"^kinds: unknown"):
        Network(3, kinds="a")  # pyright: ignore[reportCallIssue]
