"""Hashes a source's files and cuts them into segments (`scan`), and reads a segment's documents (`read_documents`).

A text file is one document. A line of JSONL that is not blank, an element of a JSON array, a row of CSV or of a table,
and a sample of MDS or of an archive are records, which are read in the format that the source names
(record_formats.py). A code file of "stdlib-chat" holds one conversation per docstring (docstrings.py). A document that
cannot be used (empty, bad UTF-8, a missing field) becomes a `BadDocument` with its name, so that it can be counted.

How records are stored is in streams.py, tables.py and archives.py.
"""

import codecs
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from longdraft.data_prep import hub
from longdraft.data_prep.archives import archive_samples
from longdraft.data_prep.docstrings import read_docstrings
from longdraft.data_prep.documents import BadDocument, Conversation, Document, Unusable
from longdraft.data_prep.record_formats import RecordFormat, TextFormat
from longdraft.data_prep.sources import SourceFile
from longdraft.data_prep.streams import STREAM_KINDS, StreamRecord, first_record, is_compressed, stream_records
from longdraft.data_prep.tables import table_fields, table_parts, table_rows

SEGMENT_BYTES = 1 << 20
# Segments are longer by this factor in files that must be read up to each segment (compressed files, Parquet's row
# groups), and in remote tables, which are fetched in blocks of megabytes.
COSTLY_SEGMENTS = 64
FIELDS_SHOWN = 20  # names of fields in a message
SURROGATES = "surrogatepass"


@dataclass(frozen=True)
class Segment:
    """A run of whole documents in one file: all of a text or code file, or some records of any other file.

    offset: in a stream, in uncompressed bytes; in a table, the first row. length: in uncompressed bytes; for a remote
    file that is one segment, the size of the stored file. first_number: of the first record (the line's number in JSONL
    and CSV), from 1 on. n_documents: bad ones included; 1 if they are not counted before they are read. mtime_ns: of
    the file when it was hashed; None for a remote file, which belongs to a fixed commit.
    """

    file: SourceFile
    offset: int
    length: int
    first_number: int
    n_documents: int
    mtime_ns: int | None

    @property
    def is_counted(self) -> bool:
        """Whether `n_documents` is the true number of documents."""
        kind = self.file.kind
        return kind in ("text", "table") or (kind in STREAM_KINDS and self.mtime_ns is not None)


def scan(files: Iterable[SourceFile], segment_bytes: int) -> tuple[dict[str, dict], list[Segment]]:
    """Hash files and cut them into segments of about `segment_bytes`: a stream after the record that reaches them, a
    table after some rows. Of a remote file, nothing but a table's index is read.

    Returns {"bytes", "sha256"} of each file, by name, and all segments in order. Raises ValueError for a damaged file.
    """
    described, segments = {}, []
    for file in files:
        n_bytes = file.size
        sha256, of_file = _scan(file, n_bytes, segment_bytes)
        described[file.name] = {"bytes": n_bytes, "sha256": sha256}
        segments += of_file
    return described, segments


def _scan(file: SourceFile, n_bytes: int, segment_bytes: int) -> tuple[str, list[Segment]]:
    """The file's sha256 and its segments."""
    coarse_bytes = segment_bytes * COSTLY_SEGMENTS
    is_remote, is_packed = file.listed is not None, is_compressed(file.path)
    if is_remote or is_packed:
        segment_bytes = coarse_bytes
    mtime_ns = None if is_remote else Path(file.path).stat().st_mtime_ns
    sha256 = hashlib.sha256()
    hashes_lines = file.kind == "jsonl" and not is_packed  # hashed while they are counted, so that they are read once
    if not is_remote and not hashes_lines:
        with Path(file.path).open("rb") as stream:
            sha256 = hashlib.file_digest(stream, "sha256")
    if file.kind == "table":
        parts = table_parts(file.path, segment_bytes, coarse_bytes)
        firsts = accumulate((n_rows for n_rows, _ in parts), initial=0)
        segments = [
            Segment(file, first, size, first + 1, n_rows, mtime_ns)
            for first, (n_rows, size) in zip(firsts, parts, strict=False)
        ]
    elif file.kind in STREAM_KINDS and not is_remote:
        start = first_record(file.path, file.kind)
        records = stream_records(file.path, file.kind, *start)
        if hashes_lines:
            records = _hashed(records, sha256)
        segments = _cut_stream(_without_blanks(records), file, start, segment_bytes, mtime_ns)
    else:
        segments = [Segment(file, 0, n_bytes, 1, 1, mtime_ns)]
    return sha256.hexdigest() if file.listed is None else file.listed[1], segments


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
        with hub.open_bytes(file.path) as stream:
            raw = stream.read()
        yield from read_docstrings(file.name, raw) if file.kind == "docstrings" else [_read_text(file.name, raw)]
    elif file.kind in STREAM_KINDS and not segment.length:
        yield _without_records(file)
    else:
        fields = cache(partial(table_fields, file.path)) if file.kind == "table" else None
        for number, record in _records(segment, record_format.fields):
            yield from _documents(f"{file.name}:{number}", record, record_format, fields)


def _hashed(lines: Iterator[StreamRecord], sha256: "hashlib._Hash") -> Iterator[StreamRecord]:
    for line in lines:
        sha256.update(line.value)
        yield line


def _without_blanks(records: Iterator[StreamRecord]) -> Iterator[StreamRecord]:
    """Leave out blank lines. Their bytes are added to the next record; at the end of a file they belong to none."""
    n_blank = 0
    for record in records:
        if isinstance(record.value, bytes) and record.value.isspace():
            n_blank += record.n_bytes
            continue
        yield record._replace(n_bytes=n_blank + record.n_bytes) if n_blank else record
        n_blank = 0


def _cut_stream(
    records: Iterator[StreamRecord], file: SourceFile, start: tuple[int, int], segment_bytes: int, mtime_ns: int | None
) -> list[Segment]:
    """Segments of at least `segment_bytes`, except the last. start: the offset and the number of the first record."""
    segments: list[Segment] = []
    (offset, number), length, n_records = start, 0, 0
    for record in records:
        length, n_records = length + record.n_bytes, n_records + 1
        if length >= segment_bytes:
            segments.append(Segment(file, offset, length, number, n_records, mtime_ns))
            offset, number, length, n_records = offset + length, record.next_number, 0, 0
    # A file without a record gets an empty segment, so that it is read, counted and named.
    if n_records or not segments:
        segments.append(Segment(file, offset, length, number, max(1, n_records), mtime_ns))
    return segments


def _records(segment: Segment, fields: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """The segment's records with their numbers. Of tables and archives, only these fields are read."""
    path, kind = segment.file.path, segment.file.kind
    if kind == "archive":
        yield from enumerate(map(_decoded, archive_samples(path, fields)), start=1)
    elif kind == "table":
        numbers = range(segment.first_number, segment.first_number + segment.n_documents)
        yield from zip(numbers, table_rows(path, segment.offset, segment.n_documents, fields), strict=True)
    elif kind in STREAM_KINDS:
        records = _without_blanks(stream_records(path, kind, segment.offset, segment.first_number))
        n_records, n_read = segment.n_documents if segment.is_counted else None, 0
        for record in islice(records, n_records):
            n_read += 1
            yield record.number, record.value
        if n_records is not None and n_read < n_records:
            raise ValueError(f"{path} ends before its last record, as it was when it was hashed; run again")


def _documents(
    name: str, record: Any, record_format: RecordFormat, fields: Callable[[], Sequence[str]] | None = None
) -> Iterator[Document | Conversation | BadDocument]:
    """A record's documents. record: a line of JSON as bytes, the values of its fields, or why it cannot be used.

    fields: returns the names of all fields in the file, if the record holds only those that its format reads."""
    values: dict[str, Any] = {}
    try:
        if isinstance(record, Unusable):
            raise record
        parsed = _parse_line(record) if isinstance(record, bytes) else record
        if not isinstance(parsed, dict):
            raise Unusable("missing_field", f"is no object with fields, but {type(parsed).__name__}")
        values = parsed
        yield from record_format.documents(name, values)
    except Unusable as error:
        # A bad document's digest is that of its content. A row that lacks the field is read without any, so its name
        # must do.
        content = record if isinstance(record, bytes) else (repr(values) if values else name).encode(errors=SURROGATES)
        detail = error.detail
        if error.field is not None:
            names = list(fields() if fields else values)
            shown = ", ".join(map(repr, names[:FIELDS_SHOWN])) + (" ..." if len(names) > FIELDS_SHOWN else "")
            detail = f"has no field {error.field!r} but {shown or 'none'}; {record_format.named_by}"
        yield BadDocument(name, hashlib.sha256(content).digest(), error.why, detail)


def _without_records(file: SourceFile) -> BadDocument:
    if file.kind == "jsonl":
        return BadDocument(file.name, hashlib.sha256(b"").digest(), "empty")
    return BadDocument(file.name, hashlib.sha256(file.name.encode()).digest(), "empty", "holds no record")


def _read_text(name: str, raw: bytes) -> Document | BadDocument:
    digest = hashlib.sha256(raw).digest()
    if not raw:
        return BadDocument(name, digest, "empty")
    try:
        # Decoding bytes, unlike text mode, keeps line ends and a byte order mark as they are.
        return Document(name, digest, raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadDocument(name, digest, "bad_utf8", _not_utf8(raw, error))


def _not_utf8(raw: bytes, error: UnicodeDecodeError) -> str:
    utf16 = raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    how = "begins as UTF-16 does" if utf16 else f"is no UTF-8 (byte 0x{raw[error.start]:02x} at {error.start})"
    return f"{how}; convert the file, by iconv -t UTF-8 for one"


def _decoded(sample: dict[str, bytes | None]) -> dict[str, Any] | Unusable:
    """The values of an archive's sample. Fields named json hold JSON, all others a text."""
    values: dict[str, Any] = {}
    for field, content in sample.items():
        if content is None:
            values[field] = None
            continue
        try:
            values[field] = _parse_line(content) if field.rpartition(".")[2] == "json" else content.decode("utf-8")
        except Unusable as error:
            return error
        except UnicodeDecodeError as error:
            return Unusable("bad_utf8", f"field {field!r} {_not_utf8(error.object, error)}")
    return values


def _parse_line(raw: bytes) -> Any:
    """The value of a line of JSON. Raises Unusable."""
    if not raw.strip():
        raise Unusable("empty")
    try:
        return json.loads(raw.decode("utf-8-sig"))  # some files begin with a byte order mark
    except UnicodeDecodeError as error:
        raise Unusable("bad_utf8", _not_utf8(raw, error)) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a plain ValueError
        several = raw.strip() in (b"{", b"[", b"[{")
        why = "begins JSON over several lines: write a record a line, or an array of records into a .json file"
        raise Unusable("bad_json", why if several else f"is no JSON ({error})") from None
