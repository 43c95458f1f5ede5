"""Downloads from Hugging Face's hub: the only place where models and drafts are downloaded."""

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError


def hub_folder(
    name: str,
    files: Sequence[str],
    weights: Sequence[Sequence[str]] = (),
    *,
    refusal: str,
    ignored: Sequence[str] = (),
    revision: str | None = None,
) -> Path:
    """Download files of a hub repository, or find them in the hub's cache. Returns the folder that they are in.

    Args:
        files: patterns of the files to download; `ignored`: patterns of files to skip even if they match.
        weights: groups of patterns, the preferred one first. The first group that the repository has is downloaded too.
        refusal: the beginning of the error message, which continues with the hub's own.
    Raises: ValueError if there is no such repository or revision, it cannot be reached, or its files cannot be stored.
    """
    options = {"revision": revision, "ignore_patterns": list(ignored)}
    try:
        for group in weights or [()]:
            folder = Path(snapshot_download(name, allow_patterns=[*files, *group], **options))
            if any(any(folder.glob(pattern)) for pattern in group):
                break
    except HFValidationError as error:  # it has the form of a path, not that of a repository's name
        raise ValueError(f"{refusal}; check the path") from error
    except Exception as error:  # connection errors and the hub's own have no common class
        reason = " ".join(str(error).split())  # some are several lines
        raise ValueError(f"{refusal}, and could not be fetched from the hub: {reason}") from error
    return folder
