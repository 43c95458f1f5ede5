"""Local text as documents: which files there are, where each may be cut, and what stands in them.

A text file is one document; a JSONL file holds one document a line. This file lists and hashes files, cuts JSONL files
into segments at line ends, and reads a segment's documents. A document that cannot be used (empty, bad UTF-8, a bad
JSON line, a missing field) comes out as a `BadDocument` with its name, so that whoever reads can count it. It knows
nothing of tokens, rows or shards.
"""

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TEXT_SUFFIXES = (".md", ".py", ".rst", ".txt")
JSONL_SUFFIXES = (".jsonl", ".ndjson")
STDLIB = "stdlib"
# Tests hold files that are broken on purpose (bad UTF-8, bad syntax); the packages are not the library.
# Besides what is not the library's own: `encodings` is mostly tables of numbers, which teach a draft to count.
STDLIB_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings"}
)


@dataclass(frozen=True)
class SourceFile:
    """A file found by `list_files`; `name` identifies it in manifests and holds no path of this machine."""

    path: Path
    name: str
    jsonl: bool


@dataclass(frozen=True)
class Segment:
    """A run of whole documents in one file: all of a text file, or some lines of a JSONL file."""

    file: SourceFile
    offset: int  # bytes
    length: int  # bytes
    first_line: int  # counts from 1
    n_documents: int  # bad ones included
    mtime_ns: int  # of the file when it was hashed


@dataclass(frozen=True)
class ScannedFile:
    """A file's identity (name, size, content) and its segments in order."""

    file: SourceFile
    size: int  # bytes
    sha256: str
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class Document:
    """`name` is the file's name, for JSONL with `:line`; `digest` is the sha256 of the text in UTF-8."""

    name: str
    digest: bytes
    text: str


@dataclass(frozen=True)
class BadDocument:
    """A document that cannot be used; `why` is one of BAD_REASONS, `digest` the sha256 of the raw bytes."""

    name: str
    digest: bytes
    why: str


BAD_REASONS = ("empty", "bad_utf8", "bad_json", "missing_field", "field_not_text")


def list_files(sources: Sequence[str], suffixes: Sequence[str] = TEXT_SUFFIXES + JSONL_SUFFIXES) -> list[SourceFile]:
    """Files of all sources, sorted by name, each once.

    sources: "stdlib" (Python's own standard library: code and texts, without tests, tables of characters, installed
        packages and the empty files that only mark packages), files (taken whatever their suffix), folders (files in
        them, at any depth, with one of `suffixes`; names that begin with a dot are left out).
    Raises ValueError for a source that does not exist or holds no file.
    """
    if not sources:
        raise ValueError(f"sources is empty; give a file, a folder or {STDLIB!r}")
    found: dict[Path, tuple[Path, Path]] = {}  # the real file -> its path, and the folder its name is relative to
    for source in sources:
        if source == STDLIB:
            root = Path(sysconfig.get_path("stdlib")).resolve()
            paths = [p for p in _walk(root, TEXT_SUFFIXES, STDLIB_LEFT_OUT) if p.stat().st_size]
        elif Path(source).is_dir():
            root = Path(source).resolve()
            paths = _walk(root, suffixes, frozenset())
        elif Path(source).is_file():
            # Not resolve(): a link's own name and suffix count (a hub's cache links names to nameless blobs).
            root = Path(source).parent.resolve() / Path(source).name
            paths = [root]
        else:
            raise ValueError(f"source {source!r} does not exist; give a file, a folder or {STDLIB!r}")
        if not paths:
            raise ValueError(f"source {source!r} holds no file with a suffix of {', '.join(suffixes)}; see --suffixes")
        for path in paths:
            found.setdefault(path.resolve(), (path, root.parent))
    names = {path: path.relative_to(base).as_posix() for path, base in found.values()}
    if len(set(names.values())) < len(names):
        # Two sources end in the same name: go up until they differ.
        common = os.path.commonpath(list(names))
        names = {path: path.relative_to(common).as_posix() for path in names}
    files = [SourceFile(path, name, path.suffix.lower() in JSONL_SUFFIXES) for path, name in names.items()]
    return sorted(files, key=lambda file: file.name)


def scan(file: SourceFile, segment_bytes: int) -> ScannedFile:
    """Read a file once: its sha256, and where a JSONL file is cut (at the first line end after `segment_bytes`)."""
    status = file.path.stat()
    segments: list[Segment] = []
    with file.path.open("rb") as stream:
        if not file.jsonl:
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


def read_documents(segment: Segment, text_field: str = "text") -> Iterator[Document | BadDocument]:
    """The segment's documents in order, good and bad. Raises ValueError when the file changed since it was hashed."""
    file = segment.file
    with file.path.open("rb") as stream:
        if os.fstat(stream.fileno()).st_mtime_ns != segment.mtime_ns:
            raise ValueError(f"{file.path} changed while it was being prepared; run again once it is complete")
        stream.seek(segment.offset)
        if not file.jsonl or not segment.length:
            yield _read_text(file.name, stream.read(segment.length))
            return
        end, number = segment.offset + segment.length, segment.first_line
        while stream.tell() < end:
            yield _read_line(f"{file.name}:{number}", stream.readline(), text_field)
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


def _read_line(name: str, raw: bytes, text_field: str) -> Document | BadDocument:
    bad_digest = hashlib.sha256(raw).digest()
    if not raw.strip():
        return BadDocument(name, bad_digest, "empty")
    try:
        record = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError:
        return BadDocument(name, bad_digest, "bad_utf8")
    except (ValueError, RecursionError):  # a number of thousands of digits is a plain ValueError
        return BadDocument(name, bad_digest, "bad_json")
    if not isinstance(record, dict) or text_field not in record:
        return BadDocument(name, bad_digest, "missing_field")
    text = record[text_field]
    if not isinstance(text, str):
        return BadDocument(name, bad_digest, "field_not_text")
    try:
        encoded = text.encode("utf-8")
    except UnicodeEncodeError:  # JSON can spell half a surrogate pair, UTF-8 cannot
        return BadDocument(name, bad_digest, "bad_utf8")
    if not encoded:
        return BadDocument(name, bad_digest, "empty")
    return Document(name, hashlib.sha256(encoded).digest(), text)
