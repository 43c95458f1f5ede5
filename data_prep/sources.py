"""Lists the sources' files: on this machine, in Python's own library, or on the hub (hub.py)."""

import glob
import json
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

from longdraft.data_prep import hub
from longdraft.data_prep.archives import ARCHIVE_SUFFIXES
from longdraft.data_prep.settings import Source
from longdraft.data_prep.shards import MANIFEST
from longdraft.data_prep.streams import CSV_SUFFIXES, JSON_SUFFIXES, LINES_SUFFIXES, StreamKind, open_plain
from longdraft.data_prep.tables import TABLE_SUFFIXES
from longdraft.data_prep.work_folder import PLAN

TEXT_SUFFIXES = (".md", ".py", ".rst", ".txt")
KNOWN_SUFFIXES = TEXT_SUFFIXES + LINES_SUFFIXES + TABLE_SUFFIXES
# Taken only if the source names them: a .json file may hold records, but is as likely one large object; CSV is as
# likely a table of numbers, and an archive may hold anything.
ON_REQUEST_SUFFIXES = CSV_SUFFIXES + JSON_SUFFIXES + ARCHIVE_SUFFIXES
CODE_SUFFIXES = (".py",)
STDLIB = "stdlib"
STDLIB_CHAT = "stdlib-chat"
# Tests contain files that are broken on purpose (bad UTF-8, bad syntax), and installed packages are not the library.
# `encodings` is mostly tables of numbers, which would teach a draft to count.
STDLIB_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings"}
)
# Files of `datasets` in its folders: the splits of a saved DatasetDict, the files of a saved Dataset, and its features.
SPLITS_LIST, FILES_LIST, INFO = "dataset_dict.json", "state.json", "dataset_info.json"
Kind = StreamKind | Literal["text", "table", "archive", "docstrings"]


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
    """The files of all sources, sorted by name. A file that several sources have belongs to the first of them.

    "stdlib" is Python's own standard library: code and texts, without tests, tables of characters, installed packages
    and the empty files that only mark packages. "stdlib-chat" is conversations from the docstrings of the same code. A
    folder gives the files, at any depth, that match one of the source's patterns, or without patterns those of a known
    suffix; names that begin with a dot are left out, and so is what `datasets` does not list in folders that it wrote
    (`_saved`). A single file is taken whatever its suffix. A data set of the hub is fetched, or only listed if it
    streams.
    Raises ValueError for a source that does not exist or holds no file, for a source whose files all belong to others
    with different settings, and for a name that is not UTF-8.
    """
    if not sources:
        raise ValueError(f"sources is empty; give a file, a folder, a data set's name, {STDLIB!r} or {STDLIB_CHAT!r}")
    found: dict[Path, SourceFile] = {}  # by resolved path, since several links may lead to a file
    remote: list[SourceFile] = []
    for number, source in enumerate(sources):
        if source.config is not None or source.split is not None:
            files = _split_patterns(source)
            source = replace(source, files=files, config=None, split=None)
        if source.streaming:
            remote += _remote(source, number)
            continue
        local = _local(source)
        if not local:
            suggestion = _suggest_files(source)
            raise ValueError(f"source {source.path!r} holds no file {_criterion(source)}; see --files{suggestion}")
        _check_names(local)
        owners = [found[path.resolve()].source for path in local if path.resolve() in found]
        if len(owners) == len(local) and any(_reading(sources[owner]) != _reading(source) for owner in owners):
            raise ValueError(
                f"source {source.path!r}: its files already belong to source {sources[owners[0]].path!r}, which stands "
                "before it and reads them otherwise, and a file is read once; leave one of them out, or give a copy"
            )
        for path, name in local.items():
            kind = "docstrings" if source.path == STDLIB_CHAT else _kind(str(path))
            found.setdefault(path.resolve(), SourceFile(str(path), name, kind, number))
    files = [*found.values()]
    if len({file.name for file in files}) < len(files):
        # Two sources end in the same folder name: prepend parent folders until all names differ.
        common = os.path.commonpath([file.path for file in files])
        files = [replace(file, name=Path(file.path).relative_to(common).as_posix()) for file in files]
    return sorted(files + remote, key=lambda file: file.name)


def _reading(source: Source) -> Source:
    """The settings that decide how a source's files are read, apart from which files they are."""
    return replace(source, path="", files=(), config=None, split=None)


def _check_names(local: dict[Path, str]) -> None:
    """Raises ValueError for a name that a manifest cannot hold."""
    for path, name in local.items():
        try:
            name.encode("utf-8")
        except UnicodeEncodeError:
            shown = os.fsencode(path).decode("utf-8", "backslashreplace")
            raise ValueError(f"{shown} has a name that is no UTF-8; rename it, or leave it out by --files") from None


def _local(source: Source) -> dict[Path, str]:
    """A source's files on this machine, after fetching them if needed, with their names for manifests."""
    path = source.path
    if path in (STDLIB, STDLIB_CHAT):
        root = Path(sysconfig.get_path("stdlib")).resolve()
        suffixes = TEXT_SUFFIXES if path == STDLIB else CODE_SUFFIXES
        patterns = source.files or tuple(f"*{suffix}" for suffix in suffixes)
        paths = [p for p in _walk(root, patterns, STDLIB_LEFT_OUT) if p.stat().st_size]
    elif Path(path).is_dir():
        root = Path(path).resolve()
        if (root / PLAN).exists() and not (root / MANIFEST).exists():
            raise ValueError(f"source {path!r} is not finished ({PLAN} without {MANIFEST}); finish it first")
        paths = _walk(root, _patterns(source))
    elif Path(path).is_file():
        if source.files and not _matches(Path(path).name, source.files):
            return {}
        # The file itself is not resolved: a link's own name and suffix count (the hub's cache links to nameless blobs).
        return {Path(path).parent.resolve() / Path(path).name: Path(path).name}
    elif Path(path).exists() or Path(path).is_symlink():
        raise ValueError(_no_file(Path(path)))
    elif hub.is_hub_name(path):
        root = hub.fetch(path, _patterns(source))
        found = _walk(root, _patterns(source)) if root.exists() else []
        # The cache's folders are named after commits, so the data set's name takes their place.
        return {file: f"{path}/{file.relative_to(root).as_posix()}" for file in found}
    else:
        raise ValueError(
            f"source {path!r} does not exist; give a file, a folder, a data set's name (owner/name), {STDLIB!r} or "
            f"{STDLIB_CHAT!r}"
        )
    return {file: file.relative_to(root.parent).as_posix() for file in paths}


def _split_patterns(source: Source) -> tuple[str, ...]:
    path = source.path
    if not Path(path).is_dir() and (Path(path).exists() or not hub.is_hub_name(path)):
        raise ValueError(f"source {path!r} is neither a folder nor a data set of the hub; leave out config and split")
    if source.config is None and source.split is not None and Path(path, SPLITS_LIST).is_file():
        return (f"{glob.escape(source.split)}/*",)
    return hub.split_patterns(path, source.config, source.split)


def _remote(source: Source, number: int) -> list[SourceFile]:
    if Path(source.path).exists() or not hub.is_hub_name(source.path):
        raise ValueError(f"source {source.path!r} is no data set of the hub (owner/name), and streaming is for these")
    files = hub.list_remote(source.path, _patterns(source))
    if not files:
        raise ValueError(f"source {source.path!r} holds no file {_criterion(source)}; see its `files`")
    return [
        SourceFile(url, f"{source.path}/{name}", _kind(url), number, (size, digest))
        for name, url, size, digest in files
    ]


def _patterns(source: Source) -> tuple[str, ...]:
    return source.files or tuple(f"*{suffix}" for suffix in _suffixes(source))


def _suffixes(source: Source) -> tuple[str, ...]:
    """The suffixes to take by default. Text files are left out if the source says how its records are read, and on the
    hub, where every data set has a README."""
    is_remote = source.streaming or not Path(source.path).exists()
    return LINES_SUFFIXES + TABLE_SUFFIXES if source.field_named or is_remote else KNOWN_SUFFIXES


def _criterion(source: Source) -> str:
    """Which files the source takes, for messages."""
    if source.files:
        return f"that matches {' or '.join(source.files)}"
    return f"with a suffix of {', '.join(_suffixes(source))}"


def _suggest_files(source: Source) -> str:
    """Which files of a folder --files could take, for messages."""
    root = Path(source.path)
    if source.files or not root.is_dir():
        return ""
    found = [path.suffix for path in _walk(root, [f"*{suffix}" for suffix in ON_REQUEST_SUFFIXES])]
    return f" (--files '*{found[0]}' takes the {len(found)} files of {', '.join(sorted(set(found)))})" if found else ""


def _kind(path: str) -> Kind:
    name = path.lower()
    if name.endswith(TABLE_SUFFIXES):
        return "table"
    if name.endswith(ARCHIVE_SUFFIXES):
        return "archive"
    if name.endswith(CSV_SUFFIXES):
        return "csv"
    if name.endswith(JSON_SUFFIXES):
        return "array" if _begins_as_array(path) else "jsonl"
    return "jsonl" if name.endswith(LINES_SUFFIXES) else "text"


def _begins_as_array(path: str) -> bool:
    with open_plain(path) as stream:
        begin = stream.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    return begin.startswith(b"[")


def _walk(root: Path, patterns: Sequence[str], left_out: frozenset[str] = frozenset()) -> list[Path]:
    """The files below a folder whose relative path matches a pattern, ignoring case; * matches slashes too."""
    found, seen = [], set()
    for folder, folders, names in os.walk(root, onerror=_unreadable, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:  # a link to a folder that has been visited
            folders[:] = []
            continue
        seen.add(real)
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(".")]
        folders[:], names = _saved(Path(folder), folders, names)
        paths = [Path(folder, name) for name in names if not name.startswith(".")]
        for path in paths:
            name = path.relative_to(root).as_posix()
            if not _matches(name, patterns):
                continue
            if not path.is_file():
                raise ValueError(_no_file(path))
            found.append(path)
    return sorted(found)


def _saved(folder: Path, folders: list[str], names: list[str]) -> tuple[list[str], list[str]]:
    """Of a folder's subfolders and files, those to read. Where `datasets` saved a data set (save_to_disk), they are
    those of its own lists: `map` and `filter` leave caches beside them, and in the cache of load_dataset too."""
    if SPLITS_LIST not in names and not {FILES_LIST, INFO} <= {*names}:
        return folders, [name for name in names if INFO not in names or not fnmatch(name, "cache-*.arrow")]
    path = folder / (SPLITS_LIST if SPLITS_LIST in names else FILES_LIST)
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        listed = read["splits"] if path.name == SPLITS_LIST else [file["filename"] for file in read["_data_files"]]
        missing = sorted({*listed} - {*folders, *names})
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is not as `datasets` writes it ({error!r}); save the data set again") from error
    if missing:
        raise ValueError(f"{path} lists {missing[0]}, which is not there; copy the whole folder, or save it again")
    return (listed, []) if path.name == SPLITS_LIST else (folders, listed)


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
