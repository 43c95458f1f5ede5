"""Files that are read as a stream of records: lines of JSON, CSV and TSV with a header, a JSON array of records.

Each may be compressed. Memory does not grow with the file, and every record says how many bytes it took, so that a file
can be cut between two records and read from there. Not here: which files there are (sources.py), what a record must
hold (record_formats.py).

These are not read through `datasets`, because its readers change what they read and say nothing of it (datasets 5.2):
- JSON: a text that is a date comes out as a time; {"text": 7} in one line makes numbers or quoted texts of others; a
  field that is missing and one that is null are the same. One bad line fails ten megabytes and is named by no number
  of the file's. An array is held whole.
- CSV: a row that is too short is filled up, and no row knows its line.
- Text: "\\r\\n" becomes "\\n", and a byte that is no UTF-8 ends the reading.
None of them can begin in the middle of a file, as a task does, or reads zstd.
"""

import codecs
import csv
import io
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, cast, get_args

import pyarrow as pa

from longdraft.data_prep.documents import Unusable
from longdraft.data_prep.hub import open_bytes

COMPRESSED = {".zst": "zstd", ".zstd": "zstd", ".gz": "gzip", ".bz2": "bz2"}
ENDINGS = ("", *COMPRESSED)
LINES_SUFFIXES = tuple(f"{suffix}{ending}" for suffix in (".jsonl", ".ndjson") for ending in ENDINGS)
CSV_SUFFIXES = tuple(f"{suffix}{ending}" for suffix in (".csv", ".tsv") for ending in ENDINGS)
JSON_SUFFIXES = tuple(f".json{ending}" for ending in ENDINGS)
BLOCK_BYTES = 1 << 20
RECORD_BYTES = 1 << 28  # a longer record of CSV is a quote that was never closed
SPACE = re.compile(r"[ \t\r\n]*")

StreamKind = Literal["jsonl", "array", "csv"]
STREAM_KINDS: tuple[StreamKind, ...] = get_args(StreamKind)


class StreamRecord(NamedTuple):
    """value: a line's bytes, an element of an array, a dict of a CSV row's fields, or why it is none (`Unusable`).
    number: of the line where it begins, or of the element; counts from 1. next_number: of the record behind it.
    n_bytes: uncompressed, with what stands between it and the one before."""

    value: Any
    number: int
    next_number: int
    n_bytes: int


def is_compressed(path: str) -> bool:
    return Path(path).suffix.lower() in COMPRESSED


def damaged(path: str, error: Exception) -> ValueError:
    return ValueError(f"{path} cannot be read ({error}); it is damaged or was not fetched whole: fetch it again")


@contextmanager
def open_plain(path: str, offset: int = 0) -> Iterator[BinaryIO]:
    """The file's bytes from `offset` on, uncompressed. A compressed file is read up to there: it has no other way.

    Raises:
        ValueError: inside, where the compressed file ends early or is damaged.
    """
    with open_bytes(path) as raw:
        if not is_compressed(path):
            raw.seek(offset)
            yield raw
            return
        try:
            codec = COMPRESSED[Path(path).suffix.lower()]
            with pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), codec) as native:
                stream = cast(BinaryIO, io.BufferedReader(cast(io.RawIOBase, native)))
                while offset and (skipped := len(stream.read(min(offset, BLOCK_BYTES)))):
                    offset -= skipped
                yield stream
        except (OSError, pa.ArrowInvalid) as error:
            raise damaged(path, error) from error


def first_record(path: str, kind: StreamKind) -> tuple[int, int]:
    """(Uncompressed bytes before the first record of a file, its number)."""
    header = _read_header(path) if kind == "csv" else None
    return (header.n_bytes, header.n_lines + 1) if header else (0, 1)


def stream_records(path: str, kind: StreamKind, offset: int = 0, number: int = 1) -> Iterator[StreamRecord]:
    """The records from `offset` on, the first of which is `number`; by default all of the file.

    Raises ValueError where the file is damaged, or so broken that no further record can be told.
    """
    header = _read_header(path) if kind == "csv" and offset else None
    with open_plain(path, offset) as stream:
        if kind == "jsonl":
            for line_number, line in enumerate(stream, start=number):
                yield StreamRecord(line, line_number, line_number + 1, len(line))
        elif kind == "array":
            yield from array_elements(stream, path, number, inside=offset > 0)
        elif header is not None:
            yield from _csv_rows(stream, path, header, number)
        elif (header := _header_of(stream, path)) is not None:  # of the stream at hand: a remote file is opened once
            yield from _csv_rows(stream, path, header, header.n_lines + 1)


# ---- CSV


@dataclass(frozen=True)
class _Header:
    """names: of the fields. n_bytes, n_lines: of the header in the file."""

    names: list[str]
    delimiter: str
    n_bytes: int
    n_lines: int


class _Lines:
    """A binary stream's lines as text, counted; bytes that are no UTF-8 come as lone surrogates."""

    def __init__(self, stream: BinaryIO):
        self._stream, self.n_bytes, self.n_lines = stream, 0, 0

    def __iter__(self) -> Iterator[str]:
        for raw in self._stream:
            self.n_bytes, self.n_lines = self.n_bytes + len(raw), self.n_lines + 1
            yield raw.decode("utf-8", "surrogateescape")


def _read_header(path: str) -> _Header | None:
    with open_plain(path) as stream:
        return _header_of(stream, path)


def _header_of(stream: BinaryIO, path: str) -> _Header | None:
    """The first row; None of an empty file. A .tsv is separated by tabs; a .csv by commas, or, where its header has
    none, by semicolons or tabs. Raises ValueError where there are no names."""
    lines = _Lines(stream)
    first = next(iter(lines), "").removeprefix("\ufeff")
    if not lines.n_bytes:
        return None
    is_tsv = ".tsv" in path.lower().rpartition("/")[2]
    delimiter = "\t" if is_tsv else next((c for c in ",;\t" if c in first), ",")
    try:
        names = next(csv.reader(chain([first], lines), delimiter=delimiter, strict=True), [])
        "".join(names).encode()
    except csv.Error as error:
        raise ValueError(f"{path}, line 1 cannot be read as a header of CSV ({error}); give a row of names") from error
    except UnicodeEncodeError as error:
        raise ValueError(f"{path}, line 1 is no UTF-8; convert the file, by iconv -t UTF-8 for one") from error
    if not any(names):
        raise ValueError(f"{path}, line 1 is blank; a file of CSV begins with the names of its fields")
    if doubled := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{path}, line 1 names the field {doubled[0]!r} twice; give each a name of its own")
    return _Header(names, delimiter, lines.n_bytes, lines.n_lines)


def _csv_rows(stream: BinaryIO, path: str, header: _Header, number: int) -> Iterator[StreamRecord]:
    """The rows from here on. Raises ValueError where a quote does not close."""
    csv.field_size_limit(max(RECORD_BYTES, csv.field_size_limit()))
    lines = _Lines(stream)
    start = 0  # bytes before the row
    never_closes = "a quote opens that does not close"

    def bounded() -> Iterator[str]:
        for line in lines:
            if lines.n_bytes - start > RECORD_BYTES:
                raise ValueError(f"{path}, line {number}: {never_closes}; mend it")
            yield line

    first_line = number
    rows = csv.reader(bounded(), delimiter=header.delimiter, strict=True)
    while True:
        try:
            values = next(rows, None)
        except csv.Error as error:
            if "end of data" in str(error):
                raise ValueError(
                    f"{path}, line {number}: {never_closes} before the file's end; mend it, or fetch the file again"
                ) from error
            value = Unusable("bad_csv", f"is no row of CSV ({error})")
        else:
            if values is None:
                return
            if not values:  # a blank line
                number = first_line + lines.n_lines
                continue
            if len(values) == len(header.names):
                value = dict(zip(header.names, values, strict=True))
            else:
                value = Unusable("bad_csv", f"has {len(values)} values, and the header {len(header.names)} names")
        next_number = first_line + lines.n_lines
        yield StreamRecord(value, number, next_number, lines.n_bytes - start)
        start, number = lines.n_bytes, next_number


# ---- arrays


def array_elements(stream: BinaryIO, path: str, number: int = 1, inside: bool = False) -> Iterator[StreamRecord]:
    """The elements of a JSON array. inside: the stream begins behind one of them, and the next one is `number`.

    Raises ValueError where it is no array, is broken, or ends early.
    """
    text = _JsonText(stream, path)
    if not inside:
        text.expect("[", "an array of records was expected")
    sign = text.expect("]") if text.next_sign() == "]" else ","
    while sign == ",":
        element = text.next_value()
        sign = text.expect(",]", "',' or ']' was expected")
        yield StreamRecord(element, number, number + 1, text.bytes_taken())
        number += 1
    if text.next_sign():
        raise text.error("more stands behind the array")


class _JsonText:
    """The text ahead in a stream of JSON, of which as much is held as one value needs."""

    def __init__(self, stream: BinaryIO, path: str):
        self._stream, self._path = stream, path
        self._decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
        self._text, self._at, self._ended = "", 0, False
        self._line, self._taken = 1, 0
        self._read_on()
        if self._text.startswith("\ufeff"):
            self._advance(1)

    def next_sign(self) -> str:
        """The next character that is no blank, which is not taken; "" at the end."""
        while (blanks := SPACE.match(self._text, self._at)) and blanks.end() == len(self._text) and not self._ended:
            self._read_on()
        assert blanks is not None
        self._advance(blanks.end())
        return self._text[self._at : self._at + 1]

    def expect(self, signs: str, otherwise: str = "") -> str:
        """Take the next character, which must be one of `signs`. Raises ValueError, which says `otherwise`."""
        sign = self.next_sign()
        if not sign or sign not in signs:
            raise self.error(otherwise)
        self._advance(self._at + 1)
        return sign

    def next_value(self) -> Any:
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
                if end < len(self._text) or self._ended:  # else a number may go on
                    self._advance(end)
                    return value
            self._read_on()

    def bytes_taken(self) -> int:
        """Since the last call."""
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
        """Until twice as much is held."""
        rest = self._text[self._at :]
        raw = self._stream.read(max(BLOCK_BYTES, len(rest)))
        self._text, self._at, self._ended = rest + self._decode(raw, final=not raw), 0, not raw
