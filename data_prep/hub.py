"""Data sets of the Hugging Face hub: their files, fetched into the hub's own cache, or listed and read from afar.

`datasets` says which files a configuration and a split have. Files come through `huggingface_hub`, on which it builds:
that lists every file's hash before a byte is fetched, and its cache and remote files serve every format alike.

Not here: what stands in the files.
"""

import glob
import io
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>\S+))?")
REMOTE = "hf://"
BUFFER_BYTES = 1 << 20


def is_hub_name(path: str) -> bool:
    return NAME.fullmatch(path) is not None


def fetch(path: str, patterns: Sequence[str]) -> Path:
    """The folder of the hub's cache that then holds the files of `owner/name[@revision]` that match a pattern.

    Files that are there are not fetched again; without network what is there serves.

    Raises:
        ValueError: no such data set or revision, no right to it, no network.
    """
    from huggingface_hub import snapshot_download

    name, revision = _split(path)
    with _named(path):
        return Path(
            snapshot_download(
                name, repo_type="dataset", revision=revision, allow_patterns=list(patterns), max_workers=4
            )
        )


def split_patterns(path: str, config: str | None, split: str | None) -> tuple[str, ...]:
    """Patterns, each of one file, of a data set's configuration and split, by the rules of `datasets`: its README's
    `configs`, or else the names of folders and files.

    path: `owner/name[@revision]`, or a folder. config: None: the only or the default one. split: None: all of them.

    Raises:
        ValueError: no such configuration or split, no file that `datasets` knows, and what `fetch` raises.
    """
    import datasets  # takes two seconds
    from datasets.exceptions import DataFilesNotFoundError

    is_folder = Path(path).is_dir()
    name, revision = (str(Path(path).resolve()), None) if is_folder else _split(path)
    with _named(path):
        try:
            found = datasets.load_dataset_builder(name, config, revision=revision).config.data_files or {}
        except (ValueError, RuntimeError, DataFilesNotFoundError) as error:  # RuntimeError: a set made by a program
            raise ValueError(f"source {path!r}, config {config!r}: {' '.join(str(error).split())}") from error
    if split is not None and split not in found:
        raise ValueError(f"source {path!r} has no split {split!r}; it has {', '.join(map(repr, found))}")
    files = [file for part in found if split in (None, part) for file in found[part]]
    if not files:
        raise ValueError(f"source {path!r}, config {config!r}: names no file")
    root = f"{name}/" if is_folder else f"{REMOTE}datasets/{name}@"
    inside = [file.removeprefix(root) for file in files]
    return tuple(glob.escape(file if is_folder else file.partition("/")[2]) for file in inside)  # behind the commit


def list_remote(path: str, patterns: Sequence[str]) -> list[tuple[str, str, int, str]]:
    """The files of `owner/name[@revision]` that match a pattern: (name, URL for `open_bytes`, of one commit, bytes,
    digest of the content, as the hub keeps it) of each, by name. The same errors as `fetch`."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import filter_repo_objects  # as `fetch` chooses

    name, revision = _split(path)
    with _named(path):
        info = HfApi().dataset_info(name, revision=revision, files_metadata=True)
    found = []
    for file in filter_repo_objects(info.siblings or [], allow_patterns=list(patterns), key=lambda one: one.rfilename):
        digest = f"git-{file.blob_id}" if file.lfs is None else str(file.lfs.sha256)
        url = f"{REMOTE}datasets/{name}@{info.sha}/{file.rfilename}"
        found.append((file.rfilename, url, int(file.size or 0), digest))
    return sorted(found)


def open_bytes(path: str) -> BinaryIO:
    """A file of this machine, or a remote one, of which only what is read is fetched. Seekable."""
    if not path.startswith(REMOTE):
        try:
            return Path(path).open("rb")
        except OSError as error:
            raise ValueError(
                f"{path} cannot be read ({error.strerror}); mend its rights, or leave it out (--files)"
            ) from error
    from huggingface_hub import HfFileSystem

    with _named(path):
        # Buffered: the remote file reads a block of megabytes for every line. The file system is the same one for the
        # same token and process.
        return io.BufferedReader(cast(io.RawIOBase, HfFileSystem().open(path, "rb")), BUFFER_BYTES)


def is_network_error(error: BaseException) -> bool:
    """Whether the hub's client lost its connection; False where it was never used."""
    if "huggingface_hub" not in sys.modules:
        return False
    from huggingface_hub import errors

    return isinstance(error, errors.HTTPError)  # pyright: ignore[reportPrivateImportUsage]


def _split(path: str) -> tuple[str, str | None]:
    match = NAME.fullmatch(path)
    assert match is not None, path
    return match["repository"], match["revision"]


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Turns the hub's errors into one that says what to do."""
    from huggingface_hub import errors

    # The HTTP client's own, whichever client this version of the library has.
    client_error = errors.HTTPError  # pyright: ignore[reportPrivateImportUsage]
    try:
        yield
        return
    except errors.GatedRepoError as error:
        cause, why = error, "asks for its terms to be accepted: do so on its page, then `hf auth login` or HF_TOKEN"
    except errors.RevisionNotFoundError as error:
        cause, why = error, "has no such revision"
    except errors.RepositoryNotFoundError as error:
        cause, why = error, "is neither a file or folder here nor a data set of the hub that this machine may read"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, client_error, OSError) as error:
        cause, why = error, f"is neither a file or folder here nor to be reached on the hub ({error})"
    raise ValueError(f"source {path!r} {why}; or give the folder that its files are in") from cause
