"""Files whose records are not lines: CSV and TSV with a header, and a JSON array of records (.json).

Both are read as streams, a record at a time, so that memory does not grow with the file; and both tell how many bytes
each record took, so that a file can be cut between records and read from there. Not here: which files there are
(sources.py), what a record must hold (record_formats.py).
"""

import codecs
import csv
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from longdraft.data_prep.documents import Unusable

CSV_SUFFIXES = (".csv", ".tsv")
BLOCK_BYTES = 1 << 20
RECORD_BYTES = 1 << 28  # a longer record of CSV is a quote that was never closed
SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True)
class Header:
    """names: of the fields; n_bytes and n_lines: what it takes of the file."""

    names: tuple[str, ...]
    delimiter: str
    n_bytes: int
    n_lines: int


@dataclass(frozen=True)
class Row:
    """A record of CSV, or why it is none; line: where it begins, from 1; next_line: behind it; n_bytes: with blank
    lines before it."""

    record: dict[str, str] | Unusable
    line: int
    next_line: int
    n_bytes: int


def read_header(stream: BinaryIO, path: str) -> Header | None:
    """The first row; None of an empty file. A .tsv is separated by tabs; a .csv by commas, or, where its header has
    none, by semicolons or tabs. Raises ValueError where there are no names."""
    lines = _Lines(stream)
    first = next(iter(lines), None)
    if first is None:
        return None
    first = first.removeprefix("\ufeff")
    delimiter = "\t" if ".tsv" in path.lower().rpartition("/")[2] else next((c for c in ",;\t" if c in first), ",")
    try:
        names = next(csv.reader(_before(first, lines), delimiter=delimiter, strict=True), [])
        "".join(names).encode()
    except csv.Error as error:
        raise ValueError(f"{path}, line 1 cannot be read as a header of CSV ({error}); give a row of names") from error
    except UnicodeEncodeError as error:
        raise ValueError(f"{path}, line 1 is no UTF-8; convert the file, by iconv -t UTF-8 for one") from error
    if not any(names):
        raise ValueError(f"{path}, line 1 is blank; a file of CSV begins with the names of its fields")
    if doubled := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{path}, line 1 names the field {doubled[0]!r} twice; give each a name of its own")
    return Header(tuple(names), delimiter, lines.n_bytes, lines.n_lines)


def csv_rows(stream: BinaryIO, path: str, header: Header, first_line: int) -> Iterator[Row]:
    """The rows from here on; bytes that are no UTF-8 come as lone surrogates. Raises ValueError where a quote does not
    close."""
    csv.field_size_limit(max(RECORD_BYTES, csv.field_size_limit()))
    lines = _Lines(stream)

    def bounded() -> Iterator[str]:
        for line in lines:
            if lines.n_bytes - at > RECORD_BYTES:
                raise ValueError(f"{path}, line {first_line + begin}: a quote opens that does not close; mend it")
            yield line

    reader = csv.reader(bounded(), delimiter=header.delimiter, strict=True)
    at = begin = 0
    while True:
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "end of data" in str(error):
                raise ValueError(
                    f"{path}, line {first_line + begin}: a quote opens that does not close before the file's end; "
                    "mend it, or fetch the file again"
                ) from error
            record = Unusable("bad_csv", f"is no row of CSV ({error})")
        else:
            if not values:
                begin = lines.n_lines  # a blank line
                continue
            if len(values) == len(header.names):
                record = dict(zip(header.names, values, strict=True))
            else:
                record = Unusable("bad_csv", f"has {len(values)} values, and the header {len(header.names)} names")
        yield Row(record, first_line + begin, first_line + lines.n_lines, lines.n_bytes - at)
        at, begin = lines.n_bytes, lines.n_lines


def array_elements(stream: BinaryIO, path: str, inside: bool = False) -> Iterator[tuple[Any, int]]:
    """(Element, bytes it took with what stands around it) of a JSON array; inside: the stream is behind one of them.

    Raises ValueError where it is no array, is broken, or ends early.
    """
    buffer = _Buffer(stream, path)
    if not inside and buffer.next_sign() != "[":
        raise buffer.error("an array of records was expected")
    begins = True
    while True:
        if (begins or inside) and buffer.next_sign(take=False) == "]":
            buffer.next_sign()
            break
        element = buffer.next_value()
        sign = buffer.next_sign()
        if sign not in (",", "]"):
            raise buffer.error("',' or ']' was expected")
        yield element, buffer.taken()
        begins = False
        if sign == "]":
            break
    if buffer.next_sign():
        raise buffer.error("more stands behind the array")


class _Lines:
    """A binary stream's lines as text, counted."""

    def __init__(self, stream: BinaryIO):
        self._stream, self.n_bytes, self.n_lines = stream, 0, 0

    def __iter__(self) -> Iterator[str]:
        for raw in self._stream:
            self.n_bytes, self.n_lines = self.n_bytes + len(raw), self.n_lines + 1
            yield raw.decode("utf-8", "surrogateescape")


def _before(first: str, rest: _Lines) -> Iterator[str]:
    yield first
    yield from rest


class _Buffer:
    """The text ahead in a stream of JSON; as much as a value needs is held."""

    def __init__(self, stream: BinaryIO, path: str):
        self._stream, self._path = stream, path
        self._decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
        self._text, self._at, self._ended = "", 0, False
        self._line, self._taken = 1, 0
        self._fill()
        if self._text.startswith("\ufeff"):
            self._advance(1)

    def next_sign(self, take: bool = True) -> str:
        """The next character that is no blank, "" at the end."""
        while (found := SPACE.match(self._text, self._at)) and found.end() == len(self._text) and not self._ended:
            self._fill()
        assert found is not None
        self._advance(found.end())
        sign = self._text[self._at : self._at + 1]
        if take:
            self._advance(self._at + len(sign))
        return sign

    def next_value(self) -> Any:
        self.next_sign(take=False)
        while True:
            try:
                value, end = json.JSONDecoder().raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                open_string = error.msg.startswith("Unterminated string")
                early = open_string or error.pos >= len(self._text)
                if self._ended or not (open_string or error.pos >= len(self._text) - 16):
                    self._advance(min(error.pos, len(self._text)))
                    raise self.error("it ends early" if early else error.msg) from error
            except (ValueError, RecursionError) as error:  # a number of thousands of digits, a thousand brackets
                raise self.error(str(error)) from error
            else:
                if end < len(self._text) or self._ended:  # else a number may go on
                    self._advance(end)
                    return value
            self._fill()

    def taken(self) -> int:
        """Bytes since the last call."""
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

    def _fill(self) -> None:
        """Twice as much as is held."""
        rest = self._text[self._at :]
        raw = self._stream.read(max(BLOCK_BYTES, len(rest)))
        self._text, self._at, self._ended = rest + self._decode(raw, final=not raw), 0, not raw
