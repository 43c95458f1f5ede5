"""Local text as documents: which files there are, where each may be cut, and what stands in them.

A text file is one document; a JSONL file, plain or compressed, holds one document or conversation a line, a table
(Parquet, Arrow) one a row; a code file of "stdlib-chat" one conversation a docstring (docstrings.py). This file lists
and hashes files, cuts them into segments, and reads a segment's documents; how records are stored is in records.py.
A document that cannot be used (empty, bad UTF-8, a bad JSON line, a missing field) comes out as a `BadDocument` with
its name, so that whoever reads can count it. Nothing here knows of tokens, rows or shards.
"""

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from longdraft.data_prep.docstrings import read_docstrings
from longdraft.data_prep.documents import BadDocument, Conversation, Document, Unusable, check_messages, messages_digest
from longdraft.data_prep.records import (
    LINES_SUFFIXES,
    TABLE_SUFFIXES,
    is_compressed,
    open_lines,
    table_parts,
    table_records,
)

TEXT_SUFFIXES = (".md", ".py", ".rst", ".txt")
RECORD_SUFFIXES = LINES_SUFFIXES + TABLE_SUFFIXES
CODE_SUFFIXES = (".py",)
STDLIB = "stdlib"
STDLIB_CHAT = "stdlib-chat"
# Tests hold files that are broken on purpose (bad UTF-8, bad syntax); the packages are not the library.
# Besides what is not the library's own: `encodings` is mostly tables of numbers, which teach a draft to count.
STDLIB_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings"}
)
Kind = Literal["text", "jsonl", "table", "docstrings"]
RECORDS = ("jsonl", "table")


@dataclass(frozen=True)
class SourceFile:
    """A file found by `list_files`; `name` identifies it in manifests and holds no path of this machine."""

    path: Path
    name: str
    kind: Kind


@dataclass(frozen=True)
class Segment:
    """A run of whole documents in one file: all of a text or code file, some lines of a JSONL file, part of a table."""

    file: SourceFile
    offset: int  # bytes, uncompressed; of a table, the number of the part
    length: int  # bytes, uncompressed
    first_line: int  # or row, counts from 1
    n_documents: int  # bad ones included; of a code file 1, its docstrings are not counted before they are read
    mtime_ns: int  # of the file when it was hashed


@dataclass(frozen=True)
class ScannedFile:
    """A file's identity (name, size, content) and its segments in order."""

    file: SourceFile
    size: int  # bytes
    sha256: str
    segments: tuple[Segment, ...]


def list_files(sources: Sequence[str], suffixes: Sequence[str] = TEXT_SUFFIXES + RECORD_SUFFIXES) -> list[SourceFile]:
    """Files of all sources, sorted by name, each once.

    sources: "stdlib" (Python's own standard library: code and texts, without tests, tables of characters, installed
        packages and the empty files that only mark packages), "stdlib-chat" (conversations from the docstrings of the
        same code), files (taken whatever their suffix), folders (files in them, at any depth, with one of `suffixes`;
        names that begin with a dot are left out).
    Raises ValueError for a source that does not exist or holds no file.
    """
    if not sources:
        raise ValueError(f"sources is empty; give a file, a folder, {STDLIB!r} or {STDLIB_CHAT!r}")
    found: dict[Path, tuple[Path, Path, Kind]] = {}  # the real file -> path, folder its name is relative to, kind
    for source in sources:
        if source in (STDLIB, STDLIB_CHAT):
            root = Path(sysconfig.get_path("stdlib")).resolve()
            wanted = TEXT_SUFFIXES if source == STDLIB else CODE_SUFFIXES
            paths = [p for p in _walk(root, wanted, STDLIB_LEFT_OUT) if p.stat().st_size]
        elif Path(source).is_dir():
            root = Path(source).resolve()
            paths = _walk(root, suffixes, frozenset())
        elif Path(source).is_file():
            # Not resolve(): a link's own name and suffix count (a hub's cache links names to nameless blobs).
            root = Path(source).parent.resolve() / Path(source).name
            paths = [root]
        else:
            raise ValueError(f"source {source!r} does not exist; give a file, a folder, {STDLIB!r} or {STDLIB_CHAT!r}")
        if not paths:
            raise ValueError(f"source {source!r} holds no file with a suffix of {', '.join(suffixes)}; see --suffixes")
        for path in paths:
            kind = "docstrings" if source == STDLIB_CHAT else _kind(path)
            found.setdefault(path.resolve(), (path, root.parent, kind))
    names = {path: path.relative_to(base).as_posix() for path, base, _ in found.values()}
    if len(set(names.values())) < len(names):
        # Two sources end in the same name: go up until they differ.
        common = os.path.commonpath(list(names))
        names = {path: path.relative_to(common).as_posix() for path in names}
    files = [SourceFile(path, names[path], kind) for path, _, kind in found.values()]
    return sorted(files, key=lambda file: file.name)


def scan(file: SourceFile, segment_bytes: int) -> ScannedFile:
    """Read a file once (a compressed one twice): its sha256, and where it is cut; a JSONL file at the first line end
    after `segment_bytes`, a table where it already is. Raises ValueError for a damaged file."""
    status = file.path.stat()
    with file.path.open("rb") as stream:
        plain_lines = file.kind == "jsonl" and not is_compressed(file.path)
        sha256 = hashlib.sha256() if plain_lines else hashlib.file_digest(stream, "sha256")
    segments: list[Segment] = []

    def cut(offset: int, length: int, first_line: int, n_documents: int) -> None:
        segments.append(Segment(file, offset, length, first_line, n_documents, status.st_mtime_ns))

    if file.kind == "table":
        first_line = 1
        for number, (n_rows, n_bytes) in enumerate(table_parts(file.path)):
            cut(number, n_bytes, first_line, n_rows)
            first_line += n_rows
    elif file.kind == "jsonl":
        offset, first_line, length, number = 0, 1, 0, 0
        with open_lines(file.path) as stream:
            for number, line in enumerate(stream, start=1):
                if plain_lines:
                    sha256.update(line)
                length += len(line)
                if length >= segment_bytes:
                    cut(offset, length, first_line, number - first_line + 1)
                    offset, first_line, length = offset + length, number + 1, 0
        # An empty file keeps one empty segment, so that it is read, counted and named.
        if length or not segments:
            cut(offset, length, first_line, max(1, number - first_line + 1))
    else:
        cut(0, status.st_size, 1, 1)
    return ScannedFile(file, status.st_size, sha256.hexdigest(), tuple(segments))


def read_documents(
    segment: Segment, text_field: str = "text", chat_field: str | None = None
) -> Iterator[Document | Conversation | BadDocument]:
    """The segment's documents in order, good and bad.

    text_field: of a record, its text. chat_field: of a record, its conversation; None: records hold text.
    Raises ValueError when the file changed since it was hashed, or is damaged.
    """
    file = segment.file
    if file.path.stat().st_mtime_ns != segment.mtime_ns:
        raise ValueError(f"{file.path} changed while it was being prepared; run again once it is complete")
    field = text_field if chat_field is None else chat_field
    if file.kind == "table":
        yield from _read_table(segment, field, chat_field is not None)
        return
    if file.kind == "docstrings":
        yield from read_docstrings(file.name, file.path.read_bytes())
        return
    if file.kind == "text" or not segment.length:
        yield _read_text(file.name, file.path.read_bytes())
        return
    with open_lines(file.path, segment.offset) as stream:
        rest, number = segment.length, segment.first_line
        while rest > 0:
            name, raw = f"{file.name}:{number}", stream.readline()
            try:
                yield _usable(name, _field(raw, field), chat_field is not None)
            except Unusable as error:
                yield BadDocument(name, hashlib.sha256(raw).digest(), error.why)
            rest, number = rest - len(raw), number + 1


def _kind(path: Path) -> Kind:
    name = path.name.lower()
    return "jsonl" if name.endswith(LINES_SUFFIXES) else "table" if name.endswith(TABLE_SUFFIXES) else "text"


def _walk(root: Path, suffixes: Sequence[str], left_out: frozenset[str]) -> list[Path]:
    wanted = tuple(suffix.lower() for suffix in suffixes)
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(".")]
        paths = (Path(folder, name) for name in names if not name.startswith("."))
        found += [path for path in paths if path.name.lower().endswith(wanted) and path.is_file()]
    return sorted(found)


def _read_text(name: str, raw: bytes) -> Document | BadDocument:
    digest = hashlib.sha256(raw).digest()
    if not raw:
        return BadDocument(name, digest, "empty")
    try:
        # From bytes, not in text mode: line ends stay as they are, and so does a byte order mark.
        return Document(name, digest, raw.decode("utf-8"))
    except UnicodeDecodeError:
        return BadDocument(name, digest, "bad_utf8")


def _field(raw: bytes, field: str) -> Any:
    """What a JSONL line holds under `field`. Raises Unusable."""
    if not raw.strip():
        raise Unusable("empty")
    try:
        record = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError:
        raise Unusable("bad_utf8") from None
    except (ValueError, RecursionError):  # a number of thousands of digits is a plain ValueError
        raise Unusable("bad_json") from None
    if not isinstance(record, dict) or field not in record:
        raise Unusable("missing_field")
    return record[field]


def _read_table(segment: Segment, field: str, is_chat: bool) -> Iterator[Document | Conversation | BadDocument]:
    file = segment.file
    rows = range(segment.first_line, segment.first_line + segment.n_documents)
    try:
        for number, value in zip(rows, table_records(file.path, segment.offset, field), strict=True):
            name = f"{file.name}:{number}"
            try:
                if isinstance(value, bytes):
                    raise Unusable("bad_utf8")
                yield _usable(name, value, is_chat)
            except Unusable as error:
                yield BadDocument(name, hashlib.sha256(repr(value).encode()).digest(), error.why)
    except KeyError:
        for number in rows:
            name = f"{file.name}:{number}"
            yield BadDocument(name, hashlib.sha256(name.encode()).digest(), "missing_field")


def _usable(name: str, value: Any, is_chat: bool) -> Document | Conversation:
    """Raises Unusable."""
    if not is_chat:
        return _text_document(name, value)
    messages = check_messages(value)
    return Conversation(name, messages_digest(messages), messages)


def _text_document(name: str, text: Any) -> Document:
    """Raises Unusable."""
    if not isinstance(text, str):
        raise Unusable("field_not_text")
    try:
        encoded = text.encode("utf-8")
    except UnicodeEncodeError:  # JSON can spell half a surrogate pair, UTF-8 cannot
        raise Unusable("bad_utf8") from None
    if not encoded:
        raise Unusable("empty")
    return Document(name, hashlib.sha256(encoded).digest(), text)
