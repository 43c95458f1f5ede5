"""Short digests by which a bench's record recognises its target, its draft and its prompts."""

import hashlib
from pathlib import Path

from longdraft.models.draft_folder import CONFIG, WEIGHTS, local_folder
from longdraft.models.files import file_digest

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin", "**/*.gguf")
DIGITS = 16
# Enough of a weight file to tell two trainings of one network apart: this many blocks of this many bytes.
SAMPLES, SAMPLE_BYTES = 64, 4096


def digest(content: bytes) -> str:
    """The first hexadecimal digits of the content's SHA-256."""
    return hashlib.sha256(content).hexdigest()[:DIGITS]


def checkpoint_digest(path: str, gguf_file: str | None = None) -> str | None:
    """Tells a local checkpoint from another one of its name: covers config.json and each weight file's name, size and
    some of its bytes. None if `path` is not a local file or folder.
    """
    place = Path(path).expanduser()
    if not place.exists():
        return None
    files = [place] if place.is_file() else sorted(file for kind in WEIGHT_FILES for file in place.glob(kind))
    files = files if gguf_file is None else [place / gguf_file]
    config = place / CONFIG
    content = [digest(config.read_bytes()) if config.is_file() else None]
    return digest(repr(content + [(file.name, *_sample(file)) for file in files if file.is_file()]).encode())


def draft_digest(draft: str) -> str:
    """Covers a draft's weights and its config.json, which holds the tree."""
    folder = local_folder(draft)
    return digest((file_digest(folder / WEIGHTS) + file_digest(folder / CONFIG)).encode())


def _sample(file: Path) -> tuple[int, str]:
    """A file's size, and the digest of blocks evenly spaced in it."""
    size, blocks = file.stat().st_size, []
    with file.open("rb") as opened:
        for i in range(SAMPLES):
            opened.seek(i * max(0, size - SAMPLE_BYTES) // (SAMPLES - 1))
            blocks.append(opened.read(SAMPLE_BYTES))
    return size, digest(b"".join(blocks))
