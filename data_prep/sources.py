"""Sources as documents: which files there are, where each may be cut, and what stands in them.

A text file is one document; a line of JSONL, an element of a JSON array, a row of CSV or of a table and a sample of MDS
are records, read as the source says (record_formats.py); a code file of "stdlib-chat" holds a conversation a docstring
(docstrings.py). This file lists and hashes files, cuts them into segments, and reads a segment's documents; how records
are stored is in records.py and streams.py, the hub in hub.py. A document that cannot be used (empty, bad UTF-8, a bad
JSON line, a missing field) comes out as a `BadDocument` with its name, so that whoever reads can count it. Nothing here
knows of tokens, rows or shards.
"""

import codecs
import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache, partial
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal

from longdraft.data_prep import hub
from longdraft.data_prep.docstrings import read_docstrings
from longdraft.data_prep.documents import BadDocument, Conversation, Document, Unusable
from longdraft.data_prep.record_formats import RecordFormat, TextFormat
from longdraft.data_prep.records import (
    COMPRESSED,
    LINES_SUFFIXES,
    TABLE_SUFFIXES,
    is_compressed,
    open_plain,
    table_fields,
    table_parts,
    table_rows,
)
from longdraft.data_prep.settings import Source
from longdraft.data_prep.shards import MANIFEST
from longdraft.data_prep.streams import CSV_SUFFIXES, array_elements, csv_rows, read_header
from longdraft.data_prep.tasks import PLAN

TEXT_SUFFIXES = (".md", ".py", ".rst", ".txt")
KNOWN_SUFFIXES = TEXT_SUFFIXES + LINES_SUFFIXES + TABLE_SUFFIXES
# Taken where they are asked for by name: .json, lines or an array of records, is as likely one large object, and CSV as
# likely a table of numbers.
JSON_SUFFIXES = (".json", *(f".json{end}" for end in COMPRESSED))
CSV_ALL_SUFFIXES = tuple(f"{suffix}{end}" for suffix in CSV_SUFFIXES for end in ("", *COMPRESSED))
CODE_SUFFIXES = (".py",)
STDLIB = "stdlib"
STDLIB_CHAT = "stdlib-chat"
# Tests hold files that are broken on purpose (bad UTF-8, bad syntax); the packages are not the library.
# `encodings` is mostly tables of numbers, which teach a draft to count.
STDLIB_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings"}
)
# So much longer are the segments of what is read up to each of them (compressed files, Parquet's row groups) and of
# remote tables, which are asked for in blocks of megabytes.
COSTLY_SEGMENTS = 64
FIELDS_SHOWN = 20
Kind = Literal["text", "jsonl", "array", "csv", "table", "docstrings"]


@dataclass(frozen=True)
class SourceFile:
    """A file found by `list_files`; `name` identifies it in manifests and holds no path of this machine.

    path: of this machine, or hf://...; source: which of the sources it belongs to; listed: of a remote file, its (size,
    digest), None: read it.
    """

    path: str
    name: str
    kind: Kind
    source: int = 0
    listed: tuple[int, str] | None = None

    @property
    def size(self) -> int:
        """In bytes, as it is now."""
        return self.listed[0] if self.listed is not None else Path(self.path).stat().st_size


@dataclass(frozen=True)
class Segment:
    """A run of whole documents in one file: all of a text or code file, some lines of a JSONL file, rows of a table."""

    file: SourceFile
    offset: int  # bytes, uncompressed, of lines; of a table, its first row
    length: int  # bytes, uncompressed (of a remote file of lines as it is there: it is one segment)
    first_line: int  # or row, counts from 1
    n_documents: int  # bad ones included; where they are not counted before they are read, 1
    mtime_ns: int | None  # of the file when it was hashed; None: remote, of one commit


@dataclass(frozen=True)
class ScannedFile:
    """A file's identity (name, size, content) and its segments in order."""

    file: SourceFile
    size: int  # bytes
    sha256: str
    segments: tuple[Segment, ...]


def list_files(sources: Sequence[Source]) -> list[SourceFile]:
    """Files of all sources, sorted by name, each once (it belongs to the first source that has it).

    "stdlib" is Python's own standard library: code and texts, without tests, tables of characters, installed packages
    and the empty files that only mark packages; "stdlib-chat" is conversations from the docstrings of the same code. Of
    a folder, at any depth, those that match a pattern of the source's, else those of a known suffix; names that begin
    with a dot are left out. A file is taken whatever its suffix. A data set of the hub is fetched, or listed.
    Raises ValueError for a source that does not exist or holds no file.
    """
    if not sources:
        raise ValueError(f"sources is empty; give a file, a folder, a data set's name, {STDLIB!r} or {STDLIB_CHAT!r}")
    found: dict[Path, tuple[Path, str, Kind, int]] = {}  # the real file -> path, name, kind, source
    remote: list[SourceFile] = []
    for number, source in enumerate(sources):
        if source.streaming:
            remote += _remote(source, number)
            continue
        local = _local(source)
        if not local:
            raise ValueError(f"source {source.path!r} holds no file {_wanted(source)}; see --files{_others(source)}")
        for path, name in local.items():
            kind = "docstrings" if source.path == STDLIB_CHAT else _kind(str(path))
            found.setdefault(path.resolve(), (path, name, kind, number))
    names = {path: name for path, name, _, _ in found.values()}
    if len(set(names.values())) < len(names):
        # Two sources end in the same name: go up until they differ.
        common = os.path.commonpath(list(names))
        names = {path: path.relative_to(common).as_posix() for path in names}
    files = [SourceFile(str(path), names[path], kind, number) for path, _, kind, number in found.values()]
    return sorted(files + remote, key=lambda file: file.name)


def scan(file: SourceFile, segment_bytes: int) -> ScannedFile:
    """Read a file once (a compressed one twice): its sha256, and where it is cut; a JSONL file at the first line end
    after `segment_bytes`, a table after some rows. Of a remote file no more is read than a table's own index. Raises
    ValueError for a damaged file."""
    coarse_bytes = segment_bytes * COSTLY_SEGMENTS
    if file.listed is not None or is_compressed(file.path):
        segment_bytes = coarse_bytes
    if file.listed is not None:
        if file.kind == "table":
            segments = _table_segments(file, table_parts(file.path, segment_bytes, coarse_bytes), None)
        else:
            segments = (Segment(file, 0, file.size, 1, 1, None),)
        return ScannedFile(file, *file.listed, segments)
    status = Path(file.path).stat()
    with Path(file.path).open("rb") as stream:
        plain_lines = file.kind == "jsonl" and not is_compressed(file.path)
        sha256 = hashlib.sha256() if plain_lines else hashlib.file_digest(stream, "sha256")
    if file.kind == "table":
        parts = table_parts(file.path, segment_bytes, coarse_bytes)
        segments = _table_segments(file, parts, status.st_mtime_ns)
        return ScannedFile(file, status.st_size, sha256.hexdigest(), segments)
    if file.kind in ("csv", "array"):
        segments = _stream_segments(file, segment_bytes, status.st_mtime_ns)
        return ScannedFile(file, status.st_size, sha256.hexdigest(), segments)
    if file.kind != "jsonl":
        segments = (Segment(file, 0, status.st_size, 1, 1, status.st_mtime_ns),)
        return ScannedFile(file, status.st_size, sha256.hexdigest(), segments)
    found: list[Segment] = []
    offset, first_line, length, number = 0, 1, 0, 0
    with open_plain(file.path) as stream:
        for number, line in enumerate(stream, start=1):
            if plain_lines:
                sha256.update(line)
            length += len(line)
            if length >= segment_bytes:
                found.append(Segment(file, offset, length, first_line, number - first_line + 1, status.st_mtime_ns))
                offset, first_line, length = offset + length, number + 1, 0
    # An empty file keeps one empty segment, so that it is read, counted and named.
    if length or not found:
        found.append(Segment(file, offset, length, first_line, max(1, number - first_line + 1), status.st_mtime_ns))
    return ScannedFile(file, status.st_size, sha256.hexdigest(), tuple(found))


def read_documents(
    segment: Segment, form: RecordFormat | None = None
) -> Iterator[Document | Conversation | BadDocument]:
    """The segment's documents in order, good and bad.

    form: how records are read; None: the field "text" is a text.
    Raises ValueError when the file changed since it was hashed, or is damaged.
    """
    file, form = segment.file, form or TextFormat()
    if segment.mtime_ns is not None and Path(file.path).stat().st_mtime_ns != segment.mtime_ns:
        raise ValueError(f"{file.path} changed while it was being prepared; run again once it is complete")
    if file.kind == "table":
        numbers = range(segment.first_line, segment.first_line + segment.n_documents)
        rows = table_rows(file.path, segment.offset, segment.n_documents, form.fields)
        fields = cache(partial(table_fields, file.path))
        for number, record in zip(numbers, rows, strict=True):
            yield from _documents(f"{file.name}:{number}", record, b"", form, fields)
    elif file.kind in ("csv", "array"):
        if not segment.length and file.listed is None:
            yield BadDocument(file.name, hashlib.sha256(file.name.encode()).digest(), "empty", "holds no record")
            return
        for number, _, record, _ in _stream_records(segment):
            yield from _documents(f"{file.name}:{number}", record, b"", form)
    elif file.kind == "jsonl" and (segment.length or file.listed):
        for number, raw in enumerate(_lines(segment), start=segment.first_line):
            yield from _documents(f"{file.name}:{number}", None, raw, form)
    else:
        with hub.open_bytes(file.path) as stream:
            raw = stream.read()
        yield from read_docstrings(file.name, raw) if file.kind == "docstrings" else [_read_text(file.name, raw)]


def _local(source: Source) -> dict[Path, str]:
    """The files of a source on this machine, or fetched to it, with their names."""
    path = source.path
    if path in (STDLIB, STDLIB_CHAT):
        root = Path(sysconfig.get_path("stdlib")).resolve()
        suffixes = TEXT_SUFFIXES if path == STDLIB else CODE_SUFFIXES
        patterns = source.files or tuple(f"*{suffix}" for suffix in suffixes)
        paths = [p for p in _walk(root, patterns, STDLIB_LEFT_OUT) if p.stat().st_size]
    elif Path(path).is_dir():
        root = Path(path).resolve()
        if (root / PLAN).exists() and not (root / MANIFEST).exists():
            raise ValueError(f"source {path!r} is begun and not finished ({PLAN} without {MANIFEST}); finish it first")
        paths = _walk(root, _patterns(source), frozenset())
    elif Path(path).is_file():
        if source.files and not _matches(Path(path).name, source.files):
            return {}
        # Not resolve(): a link's own name and suffix count (a hub's cache links names to nameless blobs).
        return {Path(path).parent.resolve() / Path(path).name: Path(path).name}
    elif Path(path).exists() or Path(path).is_symlink():
        raise ValueError(_no_file(Path(path)))
    elif hub.is_hub_name(path):
        root = hub.fetch(path, _patterns(source))
        found = _walk(root, _patterns(source), frozenset()) if root.exists() else []
        # The cache's folders are named after commits, so the set's name stands before the file's.
        return {file: f"{path}/{file.relative_to(root).as_posix()}" for file in found}
    else:
        raise ValueError(
            f"source {path!r} does not exist; give a file, a folder, a data set's name (owner/name), {STDLIB!r} or "
            f"{STDLIB_CHAT!r}"
        )
    return {file: file.relative_to(root.parent).as_posix() for file in paths}


def _remote(source: Source, number: int) -> list[SourceFile]:
    if Path(source.path).exists() or not hub.is_hub_name(source.path):
        raise ValueError(f"source {source.path!r} is no data set of the hub (owner/name), and streaming is for these")
    files = hub.list_remote(source.path, _patterns(source))
    if not files:
        raise ValueError(f"source {source.path!r} holds no file {_wanted(source)}; see its `files`")
    return [
        SourceFile(file.url, f"{source.path}/{file.name}", _kind(file.url), number, (file.size, file.digest))
        for file in files
    ]


def _patterns(source: Source) -> tuple[str, ...]:
    return source.files or tuple(f"*{suffix}" for suffix in _suffixes(source))


def _suffixes(source: Source) -> tuple[str, ...]:
    """Those of records alone where a source says how they are read, and on the hub, where a README is in every set."""
    is_remote = source.streaming or not Path(source.path).exists()
    return LINES_SUFFIXES + TABLE_SUFFIXES if source.reads_records or is_remote else KNOWN_SUFFIXES


def _wanted(source: Source) -> str:
    if source.files:
        return f"that matches {' or '.join(source.files)}"
    return f"with a suffix of {', '.join(_suffixes(source))}"


def _others(source: Source) -> str:
    """Which files of a folder would be taken if they were asked for by name."""
    root = Path(source.path)
    if source.files or not root.is_dir():
        return ""
    named = [path.suffix for path in _walk(root, [f"*{end}" for end in CSV_ALL_SUFFIXES + JSON_SUFFIXES], frozenset())]
    return f" (--files '*{named[0]}' takes the {len(named)} files of {', '.join(sorted(set(named)))})" if named else ""


def _kind(path: str) -> Kind:
    name = path.lower()
    if name.endswith(TABLE_SUFFIXES):
        return "table"
    if name.endswith(CSV_ALL_SUFFIXES):
        return "csv"
    if name.endswith(JSON_SUFFIXES):
        return "array" if _begins_as_array(path) else "jsonl"
    return "jsonl" if name.endswith(LINES_SUFFIXES) else "text"


def _begins_as_array(path: str) -> bool:
    with open_plain(path) as stream:
        begin = stream.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    return begin.startswith(b"[")


def _walk(root: Path, patterns: Sequence[str], left_out: frozenset[str]) -> list[Path]:
    """Files below the folder whose path within it matches a pattern, in either case of letters; * goes over slashes."""
    found, seen = [], set()
    for folder, folders, names in os.walk(root, onerror=_unreadable, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:  # a link to where one has been
            folders[:] = []
            continue
        seen.add(real)
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(".")]
        paths = [Path(folder, name) for name in names if not name.startswith(".")]
        for path in paths:
            name = path.relative_to(root).as_posix()
            if not _matches(name, patterns):
                continue
            if not path.is_file():
                raise ValueError(_no_file(path))
            found.append(path)
    return sorted(found)


def _no_file(path: Path) -> str:
    if not path.exists():
        return (
            f"{path} is a link to {path.readlink()}, which is not there; mend or remove it, or leave it out (--files)"
        )
    return f"{path} is neither a file nor a folder (a pipe, a device, a socket); write what it gives to a file"


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name.lower(), pattern.lower()) for pattern in patterns)


def _unreadable(error: OSError) -> None:
    raise ValueError(f"{error.filename} cannot be read ({error.strerror}); mend its rights, or name the files to take")


def _table_segments(file: SourceFile, parts: Sequence[tuple[int, int]], mtime_ns: int | None) -> tuple[Segment, ...]:
    segments, first = [], 0
    for n_rows, n_bytes in parts:
        segments.append(Segment(file, first, n_bytes, first + 1, n_rows, mtime_ns))
        first += n_rows
    return tuple(segments)


def _lines(segment: Segment) -> Iterator[bytes]:
    with open_plain(segment.file.path, segment.offset) as stream:
        if segment.file.listed is not None:
            yield from stream
            return
        rest = segment.length
        while rest > 0:
            line = stream.readline()
            if not line:
                raise ValueError(f"{segment.file.path} ends before its last line, as it was when it was listed")
            rest -= len(line)
            yield line


def _stream_segments(file: SourceFile, segment_bytes: int, mtime_ns: int) -> tuple[Segment, ...]:
    """CSV or an array, cut at the first record that ends after `segment_bytes`."""
    found: list[Segment] = []
    offset, length, n_records, first = 0, 0, 0, 1
    if file.kind == "csv":
        with open_plain(file.path) as stream:
            header = read_header(stream, file.path)
        offset, first = (header.n_bytes, header.n_lines + 1) if header else (0, 1)
    for _, behind, _, n_bytes in _stream_records(Segment(file, offset, -1, first, -1, mtime_ns)):
        length, n_records = length + n_bytes, n_records + 1
        if length >= segment_bytes:
            found.append(Segment(file, offset, length, first, n_records, mtime_ns))
            offset, first, length, n_records = offset + length, behind, 0, 0
    # A file without a record keeps an empty segment, so that it is read, counted and named.
    if n_records or not found:
        found.append(Segment(file, offset, length, first, max(1, n_records), mtime_ns))
    return tuple(found)


def _stream_records(segment: Segment) -> Iterator[tuple[int, int, Any, int]]:
    """(Line of CSV or number of the element, that behind it, record or what is wrong with it, bytes) in a segment, or
    from its offset on where its length is negative."""
    file, numbers = segment.file, count(segment.first_line)
    limit = None if segment.length < 0 or file.listed is not None else segment.n_documents
    if file.kind == "array":
        with open_plain(file.path, segment.offset) as stream:
            elements = array_elements(stream, file.path, inside=segment.offset > 0)
            for number, (element, n_bytes) in zip(numbers, islice(elements, limit), strict=False):
                yield number, number + 1, element, n_bytes
        return
    with open_plain(file.path) as stream:
        header = read_header(stream, file.path)
        if header is None:
            return
        if file.listed is not None:
            for row in csv_rows(stream, file.path, header, header.n_lines + 1):
                yield row.line, row.next_line, row.record, row.n_bytes
            return
    with open_plain(file.path, segment.offset) as stream:
        for row in islice(csv_rows(stream, file.path, header, segment.first_line), limit):
            yield row.line, row.next_line, row.record, row.n_bytes


def _documents(
    name: str, record: Any, raw: bytes, form: RecordFormat, fields: Callable[[], Sequence[str]] | None = None
) -> Iterator[Document | Conversation | BadDocument]:
    """Those of a record, or of a line of JSON that is one; bad ones are told apart by what the line or record holds.

    fields: names of those that there are, where the record holds only the wanted ones."""
    there: dict[str, Any] = {}
    try:
        if isinstance(record, Unusable):
            raise record
        found = _record(raw) if raw else record
        if not isinstance(found, dict):
            raise Unusable("missing_field", f"is no object with fields, but {type(found).__name__}")
        there = found
        yield from form.documents(name, there)
    except Unusable as error:
        # Of a row that lacks the field nothing is read that could tell it from others but its name.
        told_by = raw or (repr(there) if there else name).encode(errors="surrogatepass")
        detail = error.detail
        if error.field is not None:
            names = list(fields() if fields else there)
            shown = ", ".join(map(repr, names[:FIELDS_SHOWN])) + (" ..." if len(names) > FIELDS_SHOWN else "")
            detail = f"has no field {error.field!r} but {shown or 'none'}; {form.named_by}"
        yield BadDocument(name, hashlib.sha256(told_by).digest(), error.why, detail)


def _read_text(name: str, raw: bytes) -> Document | BadDocument:
    digest = hashlib.sha256(raw).digest()
    if not raw:
        return BadDocument(name, digest, "empty")
    try:
        # From bytes, not in text mode: line ends stay as they are, and so does a byte order mark.
        return Document(name, digest, raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadDocument(name, digest, "bad_utf8", _not_utf8(raw, error))


def _not_utf8(raw: bytes, error: UnicodeDecodeError) -> str:
    utf16 = raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    how = "begins as UTF-16 does" if utf16 else f"is no UTF-8 (byte 0x{raw[error.start]:02x} at {error.start})"
    return f"{how}; convert the file, by iconv -t UTF-8 for one"


def _record(raw: bytes) -> Any:
    """What a JSONL line holds. Raises Unusable."""
    if not raw.strip():
        raise Unusable("empty")
    try:
        return json.loads(raw.decode("utf-8-sig"))  # a byte order mark begins some files
    except UnicodeDecodeError as error:
        raise Unusable("bad_utf8", _not_utf8(raw, error)) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a plain ValueError
        several = raw.strip() in (b"{", b"[", b"[{")
        why = "begins JSON over several lines: write a record a line, or an array of records into a .json file"
        raise Unusable("bad_json", why if several else f"is no JSON ({error})") from None
