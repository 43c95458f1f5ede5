"""Reads files as a stream of records: lines of JSON, CSV and TSV (csv_rows.py), JSON arrays (json_arrays.py).

The files may be compressed. Memory does not grow with a file, and every record says how many bytes it took, so that a
file can be cut between two records and read from there.

`datasets` is not used, because its readers change what they read without a word (datasets 5.2):
- JSON: a text that is a date comes out as a time; {"text": 7} in one line makes numbers or quoted texts of others; a
  missing field and one that is null are the same. One bad line fails ten megabytes, and the error does not give its
  number in the file. An array is held in memory as a whole.
- CSV: a row that is too short is filled up, and no row knows its line.
- Text: "\\r\\n" becomes "\\n", and a byte that is not UTF-8 ends the reading.
None of them can begin in the middle of a file, as a task does, or reads zstd.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, cast, get_args

import pyarrow as pa

from longdraft.data_prep.csv_rows import CsvHeader, csv_rows, read_header
from longdraft.data_prep.hub import open_bytes
from longdraft.data_prep.json_arrays import array_elements

COMPRESSED = {".zst": "zstd", ".zstd": "zstd", ".gz": "gzip", ".bz2": "bz2"}
ENDINGS = ("", *COMPRESSED)
LINES_SUFFIXES = tuple(f"{suffix}{ending}" for suffix in (".jsonl", ".ndjson") for ending in ENDINGS)
CSV_SUFFIXES = tuple(f"{suffix}{ending}" for suffix in (".csv", ".tsv") for ending in ENDINGS)
JSON_SUFFIXES = tuple(f".json{ending}" for ending in ENDINGS)
SKIP_BYTES = 1 << 20  # read at a time to reach an offset in a compressed file

StreamKind = Literal["jsonl", "array", "csv"]
STREAM_KINDS: tuple[StreamKind, ...] = get_args(StreamKind)


class StreamRecord(NamedTuple):
    """A record as it stands in its file.

    value: a line's bytes, an array's element, a CSV row's fields as a dict, or why it cannot be used (`Unusable`).
    number: of its first line, or of the element; counts from 1. next_number: where counting goes on after it. n_bytes:
    uncompressed, with what stands between the previous record and this one."""

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
    """Open the file's uncompressed bytes at `offset`. A compressed file has no index, so it is read up to there.

    Raises ValueError inside the block if a compressed file is damaged or ends early.
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
                while offset and (skipped := len(stream.read(min(offset, SKIP_BYTES)))):
                    offset -= skipped
                yield stream
        except (OSError, pa.ArrowInvalid) as error:
            raise damaged(path, error) from error


def first_record(path: str, kind: StreamKind) -> tuple[int, int]:
    """(Uncompressed bytes before a file's first record, number of this record)."""
    header = _read_header(path) if kind == "csv" else None
    return (header.n_bytes, header.n_lines + 1) if header else (0, 1)


def stream_records(path: str, kind: StreamKind, offset: int = 0, number: int = 1) -> Iterator[StreamRecord]:
    """The file's records from `offset` on, where record `number` begins; by default all of them.

    Raises ValueError if the file is damaged, or so broken that the next record cannot be found.
    """
    header = _read_header(path) if kind == "csv" and offset else None
    with open_plain(path, offset) as stream:
        if kind == "jsonl":
            for line_number, line in enumerate(stream, start=number):
                yield StreamRecord(line, line_number, line_number + 1, len(line))
        elif kind == "array":
            elements = array_elements(stream, path, inside=offset > 0)
            for element_number, (element, n_bytes) in enumerate(elements, start=number):
                yield StreamRecord(element, element_number, element_number + 1, n_bytes)
        else:
            if not offset:  # the header is read from the same stream: opening a remote file again asks its server
                header = read_header(stream, path)
                number = header.n_lines + 1 if header else 1
            if header is not None:
                yield from map(StreamRecord._make, csv_rows(stream, path, header, number))


def _read_header(path: str) -> CsvHeader | None:
    with open_plain(path) as stream:
        return read_header(stream, path)
