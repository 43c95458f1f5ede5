"""Lists the sources' files: on this machine, in Python's own library, or on the Hugging Face hub; and opens a file."""

import io
import os
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import BinaryIO, cast

import pyarrow as pa

from longdraft.data_prep.recipe import STDLIB, STDLIB_CHAT, Source
from longdraft.data_prep.shards import MANIFEST
from longdraft.models.files import PLAN, PROGRESS, damage_named

# How a file is read, by its suffix. A suffix of COMPRESSED may follow.
KINDS = {
    **dict.fromkeys((".md", ".py", ".rst", ".txt"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    **{".json": "json", ".parquet": "parquet", ".arrow": "arrow", ".mds": "mds"},
}
COMPRESSED = {".zst": "zstd", ".zstd": "zstd", ".gz": "gzip", ".bz2": "bz2"}
# Tests contain files that are broken on purpose (bad UTF-8, bad syntax), and installed packages are not the library.
# `encodings` is mostly tables of numbers, which would teach a draft to count.
STDLIB_SKIPPED = ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings")
CACHES = "cache-*.arrow"  # left beside a saved data set by `map` and `filter` of `datasets`
REMOTE = "hf://"
BUFFER_BYTES = 1 << 20
REMEDY = "if it is incomplete, fetch it again"


@dataclass(frozen=True)
class SourceFile:
    """A file found by `list_files`.

    path: on this machine, or hf://... for a remote file. name: identifies the file in manifests, without this machine's
    path. kind: a value of KINDS, or "docstrings". source: the number of the source that it belongs to. digest: the
    hub's digest of a remote file; None for a local file.
    """

    path: str
    name: str
    kind: str
    n_bytes: int
    source: int = 0
    digest: str | None = None

    @property
    def is_cheap_to_seek(self) -> bool:
        """Whether the file can be read from the middle: it is neither compressed nor remote."""
        return self.digest is None and not is_compressed(self.path)


def list_files(sources: Sequence[Source]) -> list[SourceFile]:
    """The files of all sources, sorted by name.

    "stdlib" is Python's own standard library: code and texts, without tests, tables of characters, installed packages
    and the empty files that only mark packages. "stdlib-chat" is conversations made of that code's docstrings. In a
    folder, files at any depth are listed that match one of the source's patterns or, without patterns, have a known
    suffix other than .json; names that begin with a dot are skipped. A hub data set is fetched, or only listed if it
    streams. Raises ValueError for a source that does not exist or holds no file, and for a file of an unknown suffix.
    """
    files = [file for number, source in enumerate(sources) for file in _files_of(source, number)]
    folders = [Path(file.path).parent for file in files if file.digest is None]
    if len({file.name for file in files}) < len(files) and folders:
        # Two sources end in the same folder name: prepend parent folders until the names of different files differ.
        common = os.path.commonpath(folders)
        files = [
            replace(file, name=Path(file.path).relative_to(common).as_posix()) if file.digest is None else file
            for file in files
        ]
    return sorted(files, key=lambda file: file.name)


def is_compressed(path: str) -> bool:
    return Path(path).suffix.lower() in COMPRESSED


@contextmanager
def open_plain(path: str) -> Iterator[BinaryIO]:
    """Open a file's uncompressed bytes. A remote file is fetched only as far as it is read.

    An uncompressed file is seekable. Raises ValueError if the file cannot be opened or, inside the block, if it is
    damaged or ends early.
    """
    with damage_named(path, remedy=REMEDY), _open(path) as raw:
        if not is_compressed(path):
            yield raw
            return
        codec = COMPRESSED[Path(path).suffix.lower()]
        with pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), codec) as stream:
            yield cast(BinaryIO, io.BufferedReader(cast(io.RawIOBase, stream)))


def _open(path: str) -> BinaryIO:
    if not path.startswith(REMOTE):
        return Path(path).open("rb")
    from huggingface_hub import HfFileSystem

    # Buffered, because the remote file would read a block of megabytes for every line.
    return io.BufferedReader(cast(io.RawIOBase, HfFileSystem().open(path, "rb")), BUFFER_BYTES)


def _files_of(source: Source, number: int) -> list[SourceFile]:
    """A source's files, after fetching them if needed."""
    path, patterns = Path(source.path), _patterns(source)
    if source.path in (STDLIB, STDLIB_CHAT):
        root = Path(sysconfig.get_path("stdlib")).resolve()
        prefix, paths = f"{root.name}/", [one for one in _walk(root, patterns, STDLIB_SKIPPED) if one.stat().st_size]
    elif path.is_dir():
        if (path / PLAN).exists() and (path / PROGRESS).exists() and not (path / MANIFEST).exists():
            raise ValueError(f"source {source.path!r} is not finished; call again the command that makes it")
        root = path.resolve()
        prefix, paths = f"{root.name}/", _walk(root, patterns)
    elif path.is_file():
        # The file itself is not resolved: a link's own name and suffix count (the hub's cache links to nameless blobs).
        root = path.parent.resolve()
        prefix, paths = "", [root / path.name] if not source.files or _matches(path.name, patterns) else []
    else:
        root, remote = _of_hub(source, number, patterns)
        if remote:
            return remote
        # The cache has no folder if no file matches.
        prefix, paths = f"{source.path}/", _walk(root, patterns) if root.exists() and not source.streaming else []
    if not paths:
        raise ValueError(f"source {source.path!r} holds no file {' or '.join(patterns)}; name others with --files")
    return [
        SourceFile(str(one), _name(prefix, one.relative_to(root)), _kind(one, source), one.stat().st_size, number)
        for one in paths
    ]


def _name(prefix: str, path: Path) -> str:
    """The file's name; bytes that are not UTF-8 are escaped."""
    return os.fsencode(prefix + path.as_posix()).decode("utf-8", "backslashreplace")


def _patterns(source: Source) -> tuple[str, ...]:
    """The source's own patterns, or else those of the known suffixes, without .json, which is mostly metadata. Text
    files are skipped if the source says how its records are read, and on the hub, where every data set has a README."""
    if source.files or source.path == STDLIB_CHAT:
        return source.files or ("*.py",)
    has_texts = source.path == STDLIB or (not source.field_named and Path(source.path).exists())
    suffixes = [suffix for suffix, kind in KINDS.items() if kind != "json" and (has_texts or kind != "text")]
    return tuple(f"*{suffix}{end}" for suffix in suffixes for end in ("", *COMPRESSED))


def _kind(path: Path, source: Source) -> str:
    suffix = Path(path.stem if is_compressed(path.name) else path.name).suffix.lower()
    if suffix not in KINDS:
        raise ValueError(f"{path}: the suffix {suffix!r} is not supported; convert it to JSONL or Parquet, or to .txt")
    return "docstrings" if source.path == STDLIB_CHAT else KINDS[suffix]


def _walk(root: Path, patterns: Sequence[str], skipped: Sequence[str] = ()) -> list[Path]:
    """The files below a folder whose relative path matches a pattern, ignoring case; * matches slashes too."""
    found = []
    for folder, folders, names in os.walk(root, onerror=_raise, followlinks=True):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        paths = [Path(folder, name) for name in names if not name.startswith(".") and not fnmatch(name, CACHES)]
        found += [path for path in paths if _matches(path.relative_to(root).as_posix(), patterns)]
    return sorted(found)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name.lower(), pattern.lower()) for pattern in patterns)


def _raise(error: OSError) -> None:
    raise error


def _of_hub(source: Source, number: int, patterns: Sequence[str]) -> tuple[Path, list[SourceFile]]:
    """A hub data set. Returns the folder in the hub's cache with the files that match a pattern (without network, those
    already there) and no files; if it streams, an empty path and the files of a fixed commit with the hub's digests.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]

    name, _, revision = source.path.partition("@")
    try:
        if not source.streaming:
            how = {"repo_type": "dataset", "allow_patterns": list(patterns), "max_workers": 4}
            return Path(snapshot_download(name, revision=revision or None, **how)), []
        info = HfApi().dataset_info(name, revision=revision or None, files_metadata=True)
    except (HTTPError, OSError, ValueError) as error:  # ValueError: not a valid name of a data set
        reason = " ".join(str(error).split())
        raise ValueError(
            f"source {source.path!r} is no file or folder here, and cannot be read from the hub ({reason})"
        ) from error
    found = []
    for file in info.siblings or []:
        if _matches(file.rfilename, patterns):
            digest = f"git-{file.blob_id}" if file.lfs is None else str(file.lfs.sha256)
            url, kind = f"{REMOTE}datasets/{name}@{info.sha}/{file.rfilename}", _kind(Path(file.rfilename), source)
            found.append(SourceFile(url, f"{source.path}/{file.rfilename}", kind, int(file.size or 0), number, digest))
    return Path(), found
