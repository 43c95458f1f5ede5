"""Hashes a source's files and cuts them into segments (`scan`), and reads a segment's documents (`read_documents`).

A text file is one document. A line of JSONL that is not blank, an element of a JSON array, a row of CSV or of a table,
and a sample of MDS or of an archive are records, which are read in the format that the source names (formats.py). A
code file of "stdlib-chat" holds one conversation per docstring. A document that cannot be used (empty, bad UTF-8, a
missing field) becomes a `BadDocument` with its name, so that it can be counted.

JSONL and tables can be read from any record on. A compressed file, a JSON array, CSV and an archive are read from their
beginning, so each is one segment. `datasets` does not read them because it changes what it reads: a text that is a date
becomes a time, a missing field null, and one bad line fails ten megabytes.
"""

import csv
import hashlib
import io
import json
import tarfile
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any

from longdraft.data_prep.docstrings import read_docstrings
from longdraft.data_prep.documents import BadDocument, Conversation, Document, Unusable
from longdraft.data_prep.formats import TEXT_FIELD, RecordFormat, TextFormat, not_utf8
from longdraft.data_prep.sources import SourceFile, is_compressed, open_plain
from longdraft.data_prep.tables import table_parts, table_rows
from longdraft.models.files import file_digest

SEGMENT_BYTES = 1 << 20
# Segments are longer by this factor in Parquet's row groups, which must be read up to each segment, and in remote
# tables, which are fetched in blocks of megabytes.
COSTLY_SEGMENTS = 64
COMPRESSION = 4  # bytes of text in a byte of a compressed file, about
ARRAY_BYTES = 1 << 30  # a JSON array is parsed as a whole, into several times its bytes
CSV_FIELD_BYTES = 1 << 28  # a longer field is a quote that was never closed


@dataclass(frozen=True)
class Segment:
    """A run of whole documents in one file.

    start: the first byte in JSONL, the first row in a table, else 0. n_bytes: uncompressed; an estimate if the file is
    compressed. first_number: of the first record (the line's number in JSONL), from 1 on. n_documents: bad ones
    included; None if the file is read to its end and they are not counted before. mtime_ns: of the file when it was
    hashed; None for a remote file, which belongs to a fixed commit.
    """

    file: SourceFile
    start: int
    n_bytes: int
    first_number: int
    n_documents: int | None
    mtime_ns: int | None

    @property
    def is_counted(self) -> bool:
        """Whether `n_documents` is the true number of documents."""
        return self.n_documents is not None and self.file.kind != "docstrings"


def scan(files: Iterable[SourceFile], segment_bytes: int) -> tuple[dict[str, dict], list[Segment]]:
    """Hash files and cut them into segments of about `segment_bytes`: JSONL after the record that reaches them, a table
    after some rows. Of a remote file, nothing but a table's index is read.

    Returns {"bytes", "sha256"} of each file, by name, and all segments in order. Raises ValueError for a damaged file.
    """
    described, segments = {}, []
    for file in files:
        mtime_ns = None if file.listed is not None else Path(file.path).stat().st_mtime_ns
        if file.kind == "jsonl" and mtime_ns is not None and not is_compressed(file.path):
            sha256, of_file = _scan_lines(file, segment_bytes, mtime_ns)  # hashed on the way, so that it is read once
        else:
            sha256 = file.listed[1] if file.listed is not None else file_digest(Path(file.path))
            of_file = _cut(file, segment_bytes, mtime_ns)
        described[file.name] = {"bytes": file.size, "sha256": sha256}
        segments += of_file
    return described, segments


def _scan_lines(file: SourceFile, segment_bytes: int, mtime_ns: int) -> tuple[str, list[Segment]]:
    """The sha256 of a JSONL file, and its segments of at least `segment_bytes`, except the last."""
    sha256, segments = hashlib.sha256(), []
    start = at = end = n_records = 0
    first = 1
    with open_plain(file.path) as stream:
        for number, line in enumerate(stream, start=1):
            sha256.update(line)
            at += len(line)
            if line.isspace():
                continue
            end, n_records = at, n_records + 1
            if end - start >= segment_bytes:
                segments.append(Segment(file, start, end - start, first, n_records, mtime_ns))
                start, first, n_records = end, number + 1, 0
    if n_records or not segments:  # a file without a record gets an empty segment, so that it is counted and named
        segments.append(Segment(file, start, end - start, first, max(1, n_records), mtime_ns))
    return sha256.hexdigest(), segments


def _cut(file: SourceFile, segment_bytes: int, mtime_ns: int | None) -> list[Segment]:
    if file.kind == "table":
        coarse_bytes = segment_bytes * COSTLY_SEGMENTS
        is_costly = mtime_ns is None or is_compressed(file.path)
        parts = table_parts(file.path, coarse_bytes if is_costly else segment_bytes, coarse_bytes)
        firsts = accumulate((n_rows for n_rows, _ in parts), initial=0)
        return [
            Segment(file, first, size, first + 1, n_rows, mtime_ns)
            for first, (n_rows, size) in zip(firsts, parts, strict=False)
        ]
    n_bytes = file.size * (COMPRESSION if is_compressed(file.path) else 1)
    return [Segment(file, 0, n_bytes, 1, 1 if file.kind in ("text", "docstrings") else None, mtime_ns)]


def read_documents(
    segment: Segment, record_format: RecordFormat | None = None
) -> Iterator[Document | Conversation | BadDocument]:
    """The segment's documents in order, good and bad.

    record_format: how a record is read; None: its field "text" is a text.
    Raises ValueError if the file has changed since it was hashed, or is damaged.
    """
    file, record_format = segment.file, record_format or TextFormat()
    if segment.mtime_ns is not None and Path(file.path).stat().st_mtime_ns != segment.mtime_ns:
        raise ValueError(f"{file.path} changed while it was being prepared; run again once it is complete")
    if file.kind in ("text", "docstrings"):
        with open_plain(file.path) as stream:
            raw = stream.read()
        whole = _documents(file.name, {TEXT_FIELD: raw}, TextFormat())
        yield from whole if file.kind == "text" else read_docstrings(file.name, raw)
        return
    number = None
    for number, record in numbered_records(segment, record_format.fields):
        yield from _documents(f"{file.name}:{number}", record, record_format)
    if number is None:
        yield BadDocument(file.name, hashlib.sha256(file.name.encode()).digest(), "empty", "holds no record")


def numbered_records(segment: Segment, fields: Collection[str] | None = None) -> Iterator[tuple[int, Any]]:
    """The segment's records with their numbers, each a mapping of fields to values, any other value of JSON, or why it
    cannot be used (`Unusable`). fields: the ones to read of tables and archives; None: all."""
    path, kind = segment.file.path, segment.file.kind
    if kind == "table":
        rows = table_rows(path, segment.start, segment.n_documents, fields)
        yield from enumerate(rows, start=segment.first_number)
    elif kind == "jsonl":
        with open_plain(path) as stream:
            if segment.start:
                stream.seek(segment.start)
            lines = ((number, line) for number, line in enumerate(stream, segment.first_number) if not line.isspace())
            for number, line in islice(lines, segment.n_documents):
                yield number, _parse_json(line)
    elif kind == "archive":
        yield from enumerate(_archive_samples(path, fields), start=1)
    else:
        yield from _csv_rows(path) if kind == "csv" else enumerate(_array_elements(path), start=1)


def all_records(file: SourceFile) -> Iterator[tuple[int, Any]]:
    """All records of a file of records, as `numbered_records` gives them."""
    return numbered_records(Segment(file, 0, 0, 1, None, None))


def _csv_rows(path: str) -> Iterator[tuple[int, dict[str, str] | Unusable]]:
    """The rows below the header, each with the number of its first line. A .tsv is separated by tabs, a .csv by commas
    or, if its header has none, by semicolons or tabs. Bytes that are not UTF-8 become lone surrogates."""
    csv.field_size_limit(CSV_FIELD_BYTES)
    with open_plain(path) as stream:
        text = io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="")
        header = text.readline()
        signs = "\t" if ".tsv" in Path(path).name.lower() else ",;\t"
        delimiter = next((sign for sign in signs if sign in header), signs[0])
        rows = csv.reader(chain([header], text), delimiter=delimiter, strict=True)
        names = next(rows)
        if (header and not any(names)) or len({*names}) < len(names):
            raise ValueError(f"it must begin with the names of its fields, each once, and not with {names}")
        while True:
            number = rows.line_num + 1
            try:
                values = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                if "end of data" in str(error) or "field limit" in str(error):  # a quote is not closed
                    raise
                yield number, Unusable("bad_csv", f"is no row of CSV ({error})")
                continue
            if values and len(values) != len(names):
                yield number, Unusable("bad_csv", f"has {len(values)} values, and the header {len(names)} names")
            elif values:
                yield number, dict(zip(names, values, strict=True))


def _array_elements(path: str) -> list:
    """The elements of a JSON array. Raises ValueError if the file is larger than ARRAY_BYTES, or is no array."""
    with open_plain(path) as stream:
        raw = stream.read(ARRAY_BYTES + 1)
        if len(raw) > ARRAY_BYTES:
            raise ValueError(f"it is a JSON array of more than {ARRAY_BYTES >> 20} MiB: convert it to JSONL")
        array = json.loads(raw.decode("utf-8-sig", "surrogateescape"))
        if not isinstance(array, list):
            raise ValueError("it is no JSON array: give an array of records, or a record a line as .jsonl")
    return array


def _archive_samples(path: str, fields: Collection[str] | None) -> Iterator[dict[str, Any] | Unusable]:
    """The samples of an archive in WebDataset's form. The files of a sample stand next to each other and share a name;
    "a/7.chat.json" is the field "chat.json" of the sample "a/7". Fields that are not in `fields` are None."""
    last, sample = None, dict[str, bytes | None]()
    with open_plain(path) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            folder, _, name = member.name.rpartition("/")
            stem, dot, field = name.partition(".")
            if not (member.isfile() and stem and dot):
                continue
            if sample and (folder, stem) != last:
                yield _parsed(sample)
                sample = {}
            content = archive.extractfile(member) if fields is None or field in fields else None
            last, sample[field] = (folder, stem), None if content is None else content.read()
    if sample:
        yield _parsed(sample)


def _parsed(sample: dict[str, bytes | None]) -> dict[str, Any] | Unusable:
    """The values of an archive's sample. Fields named json hold JSON, all others bytes."""
    values: dict[str, Any] = {}
    for field, raw in sample.items():
        values[field] = _parse_json(raw) if raw is not None and field.rpartition(".")[2] == "json" else raw
        if isinstance(values[field], Unusable):
            return values[field]
    return values


def _documents(name: str, record: Any, record_format: RecordFormat) -> Iterator[Document | Conversation | BadDocument]:
    """The documents of the record `name`, or the one bad document that it is."""
    try:
        if isinstance(record, Unusable):
            raise record
        if not isinstance(record, dict):
            raise Unusable("missing_field", f"is no object with fields, but {type(record).__name__}")
        yield from record_format.documents(name, record)
    except Unusable as error:
        yield BadDocument(name, hashlib.sha256(name.encode()).digest(), error.why, error.detail)


def _parse_json(raw: bytes) -> Any:
    """The value of a JSON text, or why it has none (`Unusable`)."""
    try:
        return json.loads(raw.decode("utf-8-sig"))  # some files begin with a byte order mark
    except UnicodeDecodeError as error:
        return Unusable("bad_utf8", not_utf8(error))
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a plain ValueError
        return Unusable("bad_json", f"is no JSON with a record in each line ({error})")
