"""Lists the sources' files: on this machine, in Python's own library, or on the Hugging Face hub; and opens a file.

`datasets` says which files a configuration and a split have. The files themselves come through `huggingface_hub`, which
lists every file's hash before a byte is fetched, and whose cache and remote files serve all formats.
"""

import csv
import glob
import io
import json
import os
import re
import sysconfig
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import BinaryIO, Literal, cast

import pyarrow as pa

from longdraft.data_prep.recipe import STDLIB, STDLIB_CHAT, Source, changed
from longdraft.data_prep.shards import MANIFEST
from longdraft.models.files import PLAN

COMPRESSED = {".zst": "zstd", ".zstd": "zstd", ".gz": "gzip", ".bz2": "bz2"}
TEXT_SUFFIXES = (".md", ".py", ".rst", ".txt")
LINES_SUFFIXES = tuple(suffix + end for suffix in (".jsonl", ".ndjson") for end in ("", *COMPRESSED))
TABLE_SUFFIXES = (".parquet", ".arrow", *(f".mds{end}" for end in ("", *COMPRESSED)))
RECORD_SUFFIXES = LINES_SUFFIXES + TABLE_SUFFIXES
# Files of other kinds are taken only if the source names them: .csv, .tsv, .json (also compressed) and .tar.
# Tests contain files that are broken on purpose (bad UTF-8, bad syntax), and installed packages are not the library.
# `encodings` is mostly tables of numbers, which would teach a draft to count.
STDLIB_LEFT_OUT = ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings")
HUB_NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>\S+))?")
REMOTE = "hf://"
BUFFER_BYTES = 1 << 20
# What the readers raise for a damaged file: LookupError and TypeError for a value of MDS without its type or shape.
UNREADABLE = (OSError, EOFError, ValueError, LookupError, TypeError, RecursionError)
UNREADABLE += (csv.Error, pa.ArrowException, tarfile.TarError)
Kind = Literal["text", "docstrings", "jsonl", "array", "csv", "table", "archive"]
KINDS: dict[str, Kind] = {
    **{".parquet": "table", ".arrow": "table", ".mds": "table", ".tar": "archive"},
    **{".csv": "csv", ".tsv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl"},
}


@dataclass(frozen=True)
class SourceFile:
    """A file found by `list_files`.

    path: on this machine, or hf://... for a remote file. name: identifies the file in manifests, without this machine's
    path. source: the number of the source that it belongs to. listed: (bytes, digest) of a remote file, as the hub
    lists it; None for a local file.
    """

    path: str
    name: str
    kind: Kind
    source: int = 0
    listed: tuple[int, str] | None = None

    @property
    def size(self) -> int:
        """The file's current size in bytes."""
        return self.listed[0] if self.listed is not None else Path(self.path).stat().st_size


def list_files(sources: Sequence[Source]) -> list[SourceFile]:
    """The files of all sources, sorted by name.

    "stdlib" is Python's own standard library: code and texts, without tests, tables of characters, installed packages
    and the empty files that only mark packages. "stdlib-chat" is conversations from the docstrings of the same code. A
    folder gives the files, at any depth, that match one of the source's patterns, or without patterns those of a known
    suffix; names that begin with a dot are left out, and so is what `datasets` does not list in folders that it wrote.
    A single file is taken whatever its suffix. A data set of the hub is fetched, or only listed if it streams.
    Raises ValueError for a source that does not exist or holds no file, and for a file of two sources.
    """
    local: dict[Path, SourceFile] = {}  # by resolved path, since several links may lead to a file
    remote: list[SourceFile] = []
    for number, source in enumerate(sources):
        if source.config is not None or source.split is not None:
            source = changed(source, files=_files_of_split(source), config=None, split=None)
        found = _remote(source, number) if source.streaming else _local(source, number)
        if not found:
            wanted = " or ".join(_patterns(source))
            raise ValueError(f"source {source.path!r} holds no file {wanted}; name other files by --files")
        if source.streaming:
            remote += found
            continue
        for file in found:
            first = local.setdefault(Path(file.path).resolve(), file)
            if first.source != number:
                raise ValueError(f"source {source.path!r} holds {first.name} of another source; leave one of them out")
    files = list(local.values())
    if len({file.name for file in files}) < len(files):
        # Two sources end in the same folder name: prepend parent folders until all names differ.
        common = os.path.commonpath([file.path for file in files])
        files = [replace(file, name=Path(file.path).relative_to(common).as_posix()) for file in files]
    return sorted(files + remote, key=lambda file: file.name)


def is_compressed(path: str) -> bool:
    return Path(path).suffix.lower() in COMPRESSED


@contextmanager
def open_plain(path: str) -> Iterator[BinaryIO]:
    """Open a file's uncompressed bytes. Of a remote file, only what is read is fetched.

    An uncompressed file is seekable. Raises ValueError if the file cannot be opened, or, inside the block, if what is
    read in it is damaged or ends early.
    """
    with damage_described(path), _open(path) as raw:
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


@contextmanager
def damage_described(path: str) -> Iterator[None]:
    """Turn what goes wrong while this file is read into a ValueError that names it."""
    try:
        yield
    except UNREADABLE as error:
        raise ValueError(f"{path} cannot be read ({error}); if it was not fetched whole, fetch it again") from error


def _patterns(source: Source) -> tuple[str, ...]:
    """Without patterns of its own, a source has the files of known suffixes. Text files are left out if it says how its
    records are read, and on the hub, where every data set has a README."""
    is_remote = source.streaming or not Path(source.path).exists()
    suffixes = RECORD_SUFFIXES if source.field_named or is_remote else TEXT_SUFFIXES + RECORD_SUFFIXES
    suffixes = {STDLIB: TEXT_SUFFIXES, STDLIB_CHAT: (".py",)}.get(source.path, suffixes)
    return source.files or tuple(f"*{suffix}" for suffix in suffixes)


def _local(source: Source, number: int) -> list[SourceFile]:
    """A source's files on this machine, after fetching them if needed."""
    path, patterns = Path(source.path), _patterns(source)
    if source.path in (STDLIB, STDLIB_CHAT):
        root = Path(sysconfig.get_path("stdlib")).resolve()
        prefix, paths = f"{root.name}/", [one for one in _walk(root, patterns, STDLIB_LEFT_OUT) if one.stat().st_size]
    elif path.is_dir():
        root = path.resolve()
        if (root / PLAN).exists() and not (root / MANIFEST).exists():
            raise ValueError(f"source {source.path!r} is not finished ({PLAN} without {MANIFEST}); finish it first")
        prefix, paths = f"{root.name}/", _walk(root, patterns)
    elif path.is_file():
        # The file itself is not resolved: a link's own name and suffix count (the hub's cache links to nameless blobs).
        root = path.parent.resolve()
        prefix, paths = "", [root / path.name] if not source.files or _matches(path.name, source.files) else []
    elif HUB_NAME.fullmatch(source.path):
        root = _fetch(source.path, patterns)
        # The cache's folder names a commit. It is not there if no file matches.
        prefix, paths = f"{source.path}/", _walk(root, patterns) if root.exists() else []
    else:
        raise ValueError(
            f"source {source.path!r} does not exist; give a file, a folder, a data set's name (owner/name), {STDLIB!r} "
            f"or {STDLIB_CHAT!r}"
        )
    return [
        SourceFile(str(path), prefix + path.relative_to(root).as_posix(), _kind(str(path), source), number)
        for path in paths
    ]


def _kind(path: str, source: Source) -> Kind:
    if source.path == STDLIB_CHAT:
        return "docstrings"
    suffix = Path(Path(path).stem if is_compressed(path) else path).suffix.lower()
    if suffix == ".json":
        with open_plain(path) as stream:
            return "array" if stream.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[") else "jsonl"
    return KINDS.get(suffix, "text")


def _walk(root: Path, patterns: Sequence[str], left_out: Sequence[str] = ()) -> list[Path]:
    """The files below a folder whose relative path matches a pattern, ignoring case; * matches slashes too."""
    found, seen = [], set()
    for folder, folders, names in os.walk(root, onerror=_raise, followlinks=True):
        folders[:], names = _listed(Path(folder), folders, names)
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(".")]
        if (real := os.path.realpath(folder)) in seen:  # a link to a folder that has been visited
            folders[:], names = [], []
        seen.add(real)
        paths = [Path(folder, name) for name in names if not name.startswith(".")]
        found += [path for path in paths if _matches(path.relative_to(root).as_posix(), patterns)]
    for path in found:
        if not path.is_file():
            raise ValueError(f"{path} is no file that can be read (a broken link, a pipe); leave it out by --files")
    return sorted(found)


def _listed(folder: Path, folders: list[str], names: list[str]) -> tuple[list[str], list[str]]:
    """Of a folder's subfolders and files, those to read. Where `datasets` saved a data set (save_to_disk), they are
    those of its own lists: `map` and `filter` leave caches beside them, and in the cache of load_dataset too."""
    try:
        if "dataset_dict.json" in names:
            return json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8"))["splits"], []
        if {"state.json", "dataset_info.json"} <= {*names}:
            state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            return folders, [file["filename"] for file in state["_data_files"]]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{folder} is not as `datasets` writes it ({error!r}); save the data set again") from error
    is_cache = "dataset_info.json" in names
    return folders, [name for name in names if not (is_cache and fnmatch(name, "cache-*.arrow"))]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name.lower(), pattern.lower()) for pattern in patterns)


def _raise(error: OSError) -> None:
    raise error


def _files_of_split(source: Source) -> tuple[str, ...]:
    """Patterns that each match one file of a data set's configuration and split, by the rules of `datasets`: the
    README's `configs` decide, or else the names of folders and files."""
    import datasets  # takes two seconds
    from datasets.exceptions import DataFilesNotFoundError

    path, is_folder = source.path, Path(source.path).is_dir()
    if source.config is None and source.split is not None and Path(path, "dataset_dict.json").is_file():
        return (f"{glob.escape(source.split)}/*",)
    name, revision = (str(Path(path).resolve()), None) if is_folder else _repository(path)
    with _hub_errors(path):
        try:
            by_split = datasets.load_dataset_builder(name, source.config, revision=revision).config.data_files or {}
        except (ValueError, RuntimeError, DataFilesNotFoundError) as error:  # RuntimeError: a script makes the data set
            raise ValueError(f"source {path!r}, config {source.config!r}: {' '.join(str(error).split())}") from error
    chosen = by_split if source.split is None else {name: by_split[name] for name in by_split if name == source.split}
    files = [file for of_split in chosen.values() for file in of_split]
    if not files:
        names = ", ".join(map(repr, by_split)) or "none"
        raise ValueError(f"source {path!r}, config {source.config!r} has no split {source.split!r}; it has {names}")
    root = f"{name}/" if is_folder else f"{REMOTE}datasets/{name}@"
    relative = [file.removeprefix(root) for file in files]
    # A remote file's path follows the commit.
    return tuple(glob.escape(file if is_folder else file.partition("/")[2]) for file in relative)


def _fetch(path: str, patterns: Sequence[str]) -> Path:
    """The folder in the hub's cache with the files of a data set that match a pattern, those of the cache if there is
    no network."""
    from huggingface_hub import snapshot_download

    name, revision = _repository(path)
    with _hub_errors(path):
        folder = snapshot_download(
            name, repo_type="dataset", revision=revision, allow_patterns=list(patterns), max_workers=4
        )
    return Path(folder)


def _remote(source: Source, number: int) -> list[SourceFile]:
    """A data set's files on the hub, of a fixed commit, with the hub's own digests."""
    from huggingface_hub import HfApi

    name, revision = _repository(source.path)
    with _hub_errors(source.path):
        info = HfApi().dataset_info(name, revision=revision, files_metadata=True)
    found = []
    for file in info.siblings or []:
        if _matches(file.rfilename, _patterns(source)):
            digest = f"git-{file.blob_id}" if file.lfs is None else str(file.lfs.sha256)
            url = f"{REMOTE}datasets/{name}@{info.sha}/{file.rfilename}"
            listed = (int(file.size or 0), digest)
            found.append(SourceFile(url, f"{source.path}/{file.rfilename}", _kind(url, source), number, listed))
    return found


def _repository(path: str) -> tuple[str, str | None]:
    """(Name, revision) of a data set. Raises ValueError if the path exists here, or is no data set's name."""
    match = HUB_NAME.fullmatch(path)
    if match is None or Path(path).exists():
        raise ValueError(
            f"source {path!r} is neither a folder nor a data set of the hub; leave out streaming, config and split"
        )
    return match["repository"], match["revision"]


@contextmanager
def _hub_errors(path: str) -> Iterator[None]:
    """Turn the hub's errors into a ValueError that names the source."""
    from huggingface_hub import errors

    try:
        yield
    except (errors.HTTPError, errors.OfflineModeIsEnabled, OSError) as error:  # pyright: ignore
        reason = " ".join(str(error).split())
        raise ValueError(f"source {path!r} is no file or folder here, nor to be read on the hub ({reason})") from error
