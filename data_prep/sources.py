"""Local text as documents: which files there are, where each may be cut, and what stands in them.

A text file is one document; a JSONL file holds one document or conversation a line; a code file of "stdlib-chat" one
conversation a docstring (docstrings.py). This file lists and hashes files, cuts JSONL files into segments at line ends,
and reads a segment's documents. A document that cannot be used (empty, bad UTF-8, a bad JSON line, a missing field)
comes out as a `BadDocument` with its name, so that whoever reads can count it. It knows nothing of tokens, rows or
shards.
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

TEXT_SUFFIXES = (".md", ".py", ".rst", ".txt")
JSONL_SUFFIXES = (".jsonl", ".ndjson")
CODE_SUFFIXES = (".py",)
STDLIB = "stdlib"
STDLIB_CHAT = "stdlib-chat"
# Tests hold files that are broken on purpose (bad UTF-8, bad syntax); the packages are not the library.
# Besides what is not the library's own: `encodings` is mostly tables of numbers, which teach a draft to count.
STDLIB_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings"}
)
Kind = Literal["text", "jsonl", "docstrings"]


@dataclass(frozen=True)
class SourceFile:
    """A file found by `list_files`; `name` identifies it in manifests and holds no path of this machine."""

    path: Path
    name: str
    kind: Kind


@dataclass(frozen=True)
class Segment:
    """A run of whole documents in one file: all of a text or code file, or some lines of a JSONL file."""

    file: SourceFile
    offset: int  # bytes
    length: int  # bytes
    first_line: int  # counts from 1
    n_documents: int  # bad ones included; of a code file 1, its docstrings are not counted before they are read
    mtime_ns: int  # of the file when it was hashed


@dataclass(frozen=True)
class ScannedFile:
    """A file's identity (name, size, content) and its segments in order."""

    file: SourceFile
    size: int  # bytes
    sha256: str
    segments: tuple[Segment, ...]


def list_files(sources: Sequence[str], suffixes: Sequence[str] = TEXT_SUFFIXES + JSONL_SUFFIXES) -> list[SourceFile]:
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
            kind = (
                "docstrings" if source == STDLIB_CHAT else "jsonl" if path.suffix.lower() in JSONL_SUFFIXES else "text"
            )
            found.setdefault(path.resolve(), (path, root.parent, kind))
    names = {path: path.relative_to(base).as_posix() for path, base, _ in found.values()}
    if len(set(names.values())) < len(names):
        # Two sources end in the same name: go up until they differ.
        common = os.path.commonpath(list(names))
        names = {path: path.relative_to(common).as_posix() for path in names}
    files = [SourceFile(path, names[path], kind) for path, _, kind in found.values()]
    return sorted(files, key=lambda file: file.name)


def scan(file: SourceFile, segment_bytes: int) -> ScannedFile:
    """Read a file once: its sha256, and where a JSONL file is cut (at the first line end after `segment_bytes`)."""
    status = file.path.stat()
    segments: list[Segment] = []
    with file.path.open("rb") as stream:
        if file.kind != "jsonl":
            segments.append(Segment(file, 0, status.st_size, 1, 1, status.st_mtime_ns))
            return ScannedFile(file, status.st_size, hashlib.file_digest(stream, "sha256").hexdigest(), tuple(segments))
        sha256, offset, first_line, length, number = hashlib.sha256(), 0, 1, 0, 0
        for number, line in enumerate(stream, start=1):
            sha256.update(line)
            length += len(line)
            if length >= segment_bytes:
                n_lines = number - first_line + 1
                segments.append(Segment(file, offset, length, first_line, n_lines, status.st_mtime_ns))
                offset, first_line, length = offset + length, number + 1, 0
        # An empty file keeps one empty segment, so that it is read, counted and named.
        if length or not segments:
            n_lines = max(1, number - first_line + 1)
            segments.append(Segment(file, offset, length, first_line, n_lines, status.st_mtime_ns))
    return ScannedFile(file, offset + length, sha256.hexdigest(), tuple(segments))


def read_documents(
    segment: Segment, text_field: str = "text", chat_field: str | None = None
) -> Iterator[Document | Conversation | BadDocument]:
    """The segment's documents in order, good and bad.

    text_field: of a JSONL line, its text. chat_field: of a JSONL line, its conversation; None: lines hold text.
    Raises ValueError when the file changed since it was hashed.
    """
    file = segment.file
    with file.path.open("rb") as stream:
        if os.fstat(stream.fileno()).st_mtime_ns != segment.mtime_ns:
            raise ValueError(f"{file.path} changed while it was being prepared; run again once it is complete")
        stream.seek(segment.offset)
        if file.kind == "docstrings":
            yield from read_docstrings(file.name, stream.read(segment.length))
            return
        if file.kind == "text" or not segment.length:
            yield _read_text(file.name, stream.read(segment.length))
            return
        end, number = segment.offset + segment.length, segment.first_line
        while stream.tell() < end:
            name, raw = f"{file.name}:{number}", stream.readline()
            try:
                if chat_field is None:
                    yield _text_of_line(name, _field(raw, text_field))
                else:
                    messages = check_messages(_field(raw, chat_field))
                    yield Conversation(name, messages_digest(messages), messages)
            except Unusable as error:
                yield BadDocument(name, hashlib.sha256(raw).digest(), error.why)
            number += 1


def _walk(root: Path, suffixes: Sequence[str], left_out: frozenset[str]) -> list[Path]:
    wanted = {suffix.lower() for suffix in suffixes}
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(".")]
        paths = (Path(folder, name) for name in names if not name.startswith("."))
        found += [path for path in paths if path.suffix.lower() in wanted and path.is_file()]
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


def _text_of_line(name: str, text: Any) -> Document:
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
