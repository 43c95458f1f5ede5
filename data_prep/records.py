"""Hashes a source's files and cuts them into segments (`scan`), and reads a segment's documents (`read_documents`).

A text file is one document. A non-blank line of JSONL, an element of a JSON array and a row of a table are records,
which are read in the source's format (formats.py). A code file of "stdlib-chat" holds one conversation per docstring. A
document that cannot be used (empty, bad UTF-8, a missing field) becomes a `BadDocument` with its name, so that it can
be counted.

The library `datasets` is not used because it changes what it reads: a text that is a date becomes a timestamp, a
missing field becomes null, and one bad line makes ten megabytes fail.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from longdraft.data_prep.docstrings import read_docstrings
from longdraft.data_prep.documents import BadDocument, Conversation, Document, TokenDocument, Unusable
from longdraft.data_prep.formats import TEXT_FIELD, RecordFormat, TextFormat
from longdraft.data_prep.sources import SourceFile, is_compressed, open_plain
from longdraft.data_prep.tables import TABLES, open_table, table_rows
from longdraft.models.files import file_digest

SEGMENT_BYTES = 1 << 20
COMPRESSION = 4  # bytes of text per byte of a compressed file, roughly
BOM = b"\xef\xbb\xbf"
BEFORE_JSON = BOM + b" \t\r\n"
ARRAY_BYTES = 1 << 30  # a JSON array is parsed as a whole, which takes several times its bytes


@dataclass(frozen=True)
class Segment:
    """Consecutive whole documents of one file.

    start, stop: bytes in JSONL, chunks in a table (tables.py); stop is None at the file's end. n_bytes: uncompressed;
    an estimate if the file is compressed. first_number: the number of the first record, from 1 on (the line in JSONL).
    n_documents: including bad ones; None if they are not counted before the file is read.
    """

    file: SourceFile
    start: int = 0
    stop: int | None = None
    n_bytes: int = 0
    first_number: int = 1
    n_documents: int | None = None


def scan(files: Iterable[SourceFile], segment_bytes: int) -> tuple[dict[str, str], list[Segment]]:
    """Hash files and cut them into segments of at least `segment_bytes`, each but the last of a file.

    JSONL is cut after a line, a table after a chunk. A file of another kind, or a compressed or remote file, is one
    segment; of it, at most a table's index is read.
    Returns the digest of each file, by name, and all segments in order. Raises ValueError for a damaged file.
    """
    digests, segments = {}, []
    for file in files:
        digests[file.name] = file.digest or file_digest(Path(file.path))
        least = segment_bytes if file.is_cheap_to_seek else math.inf
        if file.kind in TABLES:
            with open_table(file) as table:
                segments += _cut(file, _chunk_ends(table.chunks), least)
        elif file.kind == "jsonl" and file.is_cheap_to_seek:
            with open_plain(file.path) as stream:
                segments += _cut(file, _line_ends(stream), least)
        else:
            n_bytes = file.n_bytes * (COMPRESSION if is_compressed(file.path) else 1)
            segments.append(Segment(file, n_bytes=n_bytes, n_documents=1 if file.kind == "text" else None))
    return digests, segments


def _cut(file: SourceFile, ends: Iterable[tuple[int, int, int, int]], least: float) -> list[Segment]:
    """Segments of at least `least` bytes. ends: for each place where the file can be cut, (bytes and documents since
    the previous place, the place, number of the next record)."""
    segments, start, first_number, size, n_documents = [], 0, 1, 0, 0
    for n_bytes, n_more, place, next_number in ends:
        size, n_documents = size + n_bytes, n_documents + n_more
        if size >= least and n_documents:
            segments.append(Segment(file, start, place, size, first_number, n_documents))
            start, first_number, size, n_documents = place, next_number, 0, 0
    if n_documents or not segments:  # a file without a record gets a segment too, so that it is counted and named
        segments.append(Segment(file, start, None, size, first_number, max(1, n_documents)))
    return segments


def _line_ends(stream: BinaryIO) -> Iterator[tuple[int, int, int, int]]:
    place = 0
    for number, line in enumerate(stream, start=1):
        place += len(line)
        yield len(line), not line.isspace(), place, number + 1


def _chunk_ends(chunks: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int, int]]:
    next_number = 1
    for place, (n_rows, n_bytes) in enumerate(chunks, start=1):
        next_number += n_rows
        yield n_bytes, n_rows, place, next_number


def read_documents(
    segment: Segment, record_format: RecordFormat | None = None
) -> Iterator[Document | Conversation | TokenDocument | BadDocument]:
    """The segment's documents in order, good and bad.

    record_format: how a record is read; None: its field "text" is a text. A text file counts as a record that has only
    the format's first field.
    Raises ValueError if the file is damaged.
    """
    file, record_format, number = segment.file, record_format or TextFormat(), None
    if file.kind == "docstrings":
        with open_plain(file.path) as stream:
            yield from read_docstrings(file.name, stream.read())
        return
    for number, record in numbered_records(segment, record_format.fields):
        name = file.name if file.kind == "text" else f"{file.name}:{number}"
        try:
            if isinstance(record, Unusable):
                raise record
            if not isinstance(record, dict):
                raise Unusable("missing_field", f"is not an object with fields, but {type(record).__name__}")
            yield from record_format.documents(name, record)
        except Unusable as error:
            yield _bad(name, error.why, error.detail)
        except UnicodeError as error:
            yield _bad(name, "bad_utf8", f"({error})")
    if number is None:
        yield _bad(file.name, "empty", "holds no record")


def _bad(name: str, why: str, detail: str) -> BadDocument:
    return BadDocument(name, hashlib.sha256(name.encode()).digest(), why, detail)


def numbered_records(segment: Segment, fields: Sequence[str] | None = None) -> Iterator[tuple[int, Any]]:
    """The segment's records with their numbers. A record is a mapping of fields to values, any other JSON value, or the
    reason why it cannot be used (`Unusable`). fields: the columns to read from tables; None: all."""
    file = segment.file
    if file.kind in TABLES:
        yield from enumerate(table_rows(file, segment.start, segment.stop, fields), segment.first_number)
        return
    with open_plain(file.path) as stream:
        if file.kind == "text":
            yield 1, {fields[0] if fields else TEXT_FIELD: stream.read()}
        elif file.kind == "jsonl":
            if segment.start:
                stream.seek(segment.start)
            place = segment.start
            for number, line in enumerate(stream, segment.first_number):
                if not line.isspace():
                    yield number, _parse_json(line)
                place += len(line)
                if place == segment.stop:
                    break
        else:
            yield from enumerate(_json_records(stream), start=1)


def _json_records(stream: BinaryIO) -> Iterator[Any]:
    """The elements of a JSON array or, if the file is no array, the values of its lines. Raises ValueError for an array
    of more than ARRAY_BYTES."""
    lines = iter(lambda: stream.readline(ARRAY_BYTES + 1), b"")
    first = next((line for line in lines if line.strip(BEFORE_JSON)), b"")
    if not first.strip(BEFORE_JSON).startswith(b"["):
        yield from (_parse_json(line) for line in chain([first], lines) if line.strip())
        return
    raw = first + stream.read(max(0, ARRAY_BYTES + 1 - len(first)))
    if len(raw) > ARRAY_BYTES:
        raise ValueError(f"it is a JSON array of more than {ARRAY_BYTES >> 20} MiB: convert it to JSONL")
    yield from json.loads(raw.removeprefix(BOM).decode("utf-8", "surrogateescape"))


def _parse_json(raw: bytes) -> Any:
    """The value of a JSON text, or the reason why it has none (`Unusable`)."""
    try:
        return json.loads(raw.decode("utf-8-sig"))  # some files begin with a byte order mark
    except (ValueError, RecursionError) as error:  # a number with thousands of digits raises a plain ValueError
        return Unusable("bad_utf8" if isinstance(error, UnicodeError) else "bad_json", f"({error})")
