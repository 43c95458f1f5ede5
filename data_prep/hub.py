"""Data sets of the Hugging Face hub: fetches files into the hub's own cache, or lists them and reads them remotely.

`datasets` says which files a configuration and a split have. The files themselves come through `huggingface_hub`, which
lists every file's hash before a byte is fetched, and whose cache and remote files serve all formats.
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
    """Fetch the files of `owner/name[@revision]` that match a pattern, and return their folder in the hub's cache.

    Files that are in the cache are not fetched again; without a network, those in the cache are used. Raises ValueError
    if the data set or revision does not exist or may not be read, or if there is no network and nothing in the cache.
    """
    from huggingface_hub import snapshot_download

    name, revision = _split(path)
    with _hub_errors_described(path):
        return Path(
            snapshot_download(
                name, repo_type="dataset", revision=revision, allow_patterns=list(patterns), max_workers=4
            )
        )


def split_patterns(path: str, config: str | None, split: str | None) -> tuple[str, ...]:
    """Patterns that each match one file of a data set's configuration and split, by the rules of `datasets`: the
    README's `configs` decide, or else the names of folders and files.

    path: `owner/name[@revision]`, or a folder. config: None for the only or the default one. split: None for all.
    Raises ValueError if there is no such configuration or split, or no file that `datasets` knows, and as `fetch` does.
    """
    import datasets  # takes two seconds
    from datasets.exceptions import DataFilesNotFoundError

    is_folder = Path(path).is_dir()
    name, revision = (str(Path(path).resolve()), None) if is_folder else _split(path)
    with _hub_errors_described(path):
        try:
            by_split = datasets.load_dataset_builder(name, config, revision=revision).config.data_files or {}
        except (ValueError, RuntimeError, DataFilesNotFoundError) as error:  # RuntimeError: a script makes the data set
            raise ValueError(f"source {path!r}, config {config!r}: {' '.join(str(error).split())}") from error
    if split is not None and split not in by_split:
        raise ValueError(f"source {path!r} has no split {split!r}; it has {', '.join(map(repr, by_split))}")
    files = [file for split_name, of_split in by_split.items() if split in (None, split_name) for file in of_split]
    if not files:
        raise ValueError(f"source {path!r}, config {config!r}: names no file")
    root = f"{name}/" if is_folder else f"{REMOTE}datasets/{name}@"
    relative = [file.removeprefix(root) for file in files]
    # A remote file's path follows the commit.
    return tuple(glob.escape(file if is_folder else file.partition("/")[2]) for file in relative)


def list_remote(path: str, patterns: Sequence[str]) -> list[tuple[str, str, int, str]]:
    """The files of `owner/name[@revision]` that match a pattern, sorted by name: (name, URL for `open_bytes`, bytes,
    the hub's digest of the content). The URL names a commit. Raises ValueError for the reasons of `fetch`."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import filter_repo_objects  # which `fetch` uses too

    name, revision = _split(path)
    with _hub_errors_described(path):
        info = HfApi().dataset_info(name, revision=revision, files_metadata=True)
    found = []
    for file in filter_repo_objects(info.siblings or [], allow_patterns=list(patterns), key=lambda one: one.rfilename):
        digest = f"git-{file.blob_id}" if file.lfs is None else str(file.lfs.sha256)
        url = f"{REMOTE}datasets/{name}@{info.sha}/{file.rfilename}"
        found.append((file.rfilename, url, int(file.size or 0), digest))
    return sorted(found)


def open_bytes(path: str) -> BinaryIO:
    """Open a local file, or a remote one, of which only what is read is fetched. The stream is seekable."""
    if not path.startswith(REMOTE):
        try:
            return Path(path).open("rb")
        except OSError as error:
            raise ValueError(
                f"{path} cannot be read ({error.strerror}); mend its rights, or leave it out (--files)"
            ) from error
    from huggingface_hub import HfFileSystem

    with _hub_errors_described(path):
        # Buffered, because the remote file would read a block of megabytes for every line. HfFileSystem() returns the
        # same instance each time for the same token and process.
        return io.BufferedReader(cast(io.RawIOBase, HfFileSystem().open(path, "rb")), BUFFER_BYTES)


def is_network_error(error: BaseException) -> bool:
    """Whether the error says that the hub's client lost its connection; False if the client was never imported."""
    if "huggingface_hub" not in sys.modules:
        return False
    from huggingface_hub import errors

    return isinstance(error, errors.HTTPError)  # pyright: ignore[reportPrivateImportUsage]


def _split(path: str) -> tuple[str, str | None]:
    match = NAME.fullmatch(path)
    assert match is not None, path
    return match["repository"], match["revision"]


@contextmanager
def _hub_errors_described(path: str) -> Iterator[None]:
    """Turn the hub's errors into a ValueError that says what to do."""
    from huggingface_hub import errors

    # The HTTP client's own error. Which client it is depends on the library's version.
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
