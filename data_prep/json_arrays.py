"""Reads the elements of a JSON array from a stream, in memory that does not grow with the array."""

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

BLOCK_BYTES = 1 << 20
SPACE = re.compile(r"[ \t\r\n]*")


def array_elements(stream: BinaryIO, path: str, inside: bool = False) -> Iterator[tuple[Any, int]]:
    """(Element, bytes) for each element of the array, in order. The bytes include what stands before the element, and
    the "," or "]" after it, so the next element can be read from there.

    inside: the stream begins after an element and its ",", not with the array.
    Raises ValueError if the stream holds no array, is broken, or ends early.
    """
    text = _JsonText(stream, path)
    if not inside:
        text.expect("[", "an array of records was expected")
    sign = text.expect("]") if text.next_sign() == "]" else ","
    while sign == ",":
        element = text.next_value()
        sign = text.expect(",]", "',' or ']' was expected")
        yield element, text.bytes_taken()
    if text.next_sign():
        raise text.error("more stands behind the array")


class _JsonText:
    """A position in a stream of JSON, which holds only as much text as one value needs."""

    def __init__(self, stream: BinaryIO, path: str):
        self._stream, self._path = stream, path
        self._decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
        self._text, self._at, self._ended = "", 0, False
        self._line, self._taken = 1, 0
        self._read_on()
        if self._text.startswith("\ufeff"):
            self._advance(1)

    def next_sign(self) -> str:
        """Move to the next character that is not blank and return it; "" at the end."""
        while (blanks := SPACE.match(self._text, self._at)) and blanks.end() == len(self._text) and not self._ended:
            self._read_on()
        assert blanks is not None
        self._advance(blanks.end())
        return self._text[self._at : self._at + 1]

    def expect(self, signs: str, otherwise: str = "") -> str:
        """Consume the next character that is not blank. Raises ValueError with `otherwise` unless it is in `signs`."""
        sign = self.next_sign()
        if not sign or sign not in signs:
            raise self.error(otherwise)
        self._advance(self._at + 1)
        return sign

    def next_value(self) -> Any:
        """Consume and return the next JSON value."""
        self.next_sign()
        while True:
            try:
                value, end = json.JSONDecoder().raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                open_string = error.msg.startswith("Unterminated string")
                if self._ended or not (open_string or error.pos >= len(self._text) - 16):
                    early = open_string or error.pos >= len(self._text)
                    self._advance(min(error.pos, len(self._text)))
                    raise self.error("it ends early" if early else error.msg) from error
            except (ValueError, RecursionError) as error:  # a number of thousands of digits, a thousand brackets
                raise self.error(str(error)) from error
            else:
                if end < len(self._text) or self._ended:  # otherwise a number may continue in the next block
                    self._advance(end)
                    return value
            self._read_on()

    def bytes_taken(self) -> int:
        """Bytes consumed since the last call."""
        n_bytes, self._taken = self._taken, 0
        return n_bytes

    def error(self, what: str) -> ValueError:
        return ValueError(
            f"{self._path}, line {self._line} cannot be read as an array of JSON records ({what}); mend it"
        )

    def _advance(self, to: int) -> None:
        passed = self._text[self._at : to]
        self._taken += len(passed.encode("utf-8", "surrogateescape"))
        self._line += passed.count("\n")
        self._at = to

    def _read_on(self) -> None:
        """Read at least as much again as is held, so that a long value is parsed few times."""
        rest = self._text[self._at :]
        raw = self._stream.read(max(BLOCK_BYTES, len(rest)))
        self._text, self._at, self._ended = rest + self._decode(raw, final=not raw), 0, not raw
