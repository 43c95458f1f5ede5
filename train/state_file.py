"""The state file of a saved folder, state.json, written last: it has the size and sha256 of every file beside it, and a
digest of itself, so that one changed bit is found.

A core hashes 1 to 2 GB a second, and ranks hash side by side: for a LongSpec draft of an 8B model, 4 GB, that is half a
second on 8 ranks. Not here: which folders there are (checkpoint.py), writing them (saving.py).
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from longdraft.models.files import file_digest

STATE, DIGESTS = "state.json", "sha256"
FORMAT = 2
# Names and types of the fields that a state file must have; `a.b` is the field b of a.
Fields = Mapping[str, type | tuple[type, ...]]


def seal(content: Mapping[str, Any], digests: Mapping[str, str]) -> str:
    """The text of a state file.

    Args:
        content: JSON values. digests: those of the folder's other files, by name.
    """
    state = {"format": FORMAT, **content, DIGESTS: dict(digests)}
    state[DIGESTS][STATE] = _digest_of_values(state)
    return json.dumps(state, indent=1)


def unseal(text: bytes, fields: Fields) -> dict[str, Any]:
    """The values of a state file that `seal` wrote.

    Raises ValueError, saying what is wrong in a few words, where the text was changed or lacks a field.
    """
    try:
        state = json.loads(text)
    except ValueError:
        raise ValueError("is not JSON") from None
    if not isinstance(state, dict):
        raise ValueError("holds no fields")
    for name, kind in [*fields.items(), (f"{DIGESTS}.{STATE}", str)]:
        value: Any = state
        for key in name.split(".", 1):
            value = value.get(key, _MISSING) if isinstance(value, dict) else _MISSING
        if value is _MISSING or not isinstance(value, kind):
            raise ValueError(f"has no field {name}" if value is _MISSING else f"has {value!r} in its field {name}")
    if state[DIGESTS][STATE] != _digest_of_values(state):
        raise ValueError("is not as it was saved")
    return state


_MISSING = object()


def _digest_of_values(state: Mapping[str, Any]) -> str:
    """The digest of all values of a state file but the digest itself."""
    others = {**state, DIGESTS: {name: digest for name, digest in state[DIGESTS].items() if name != STATE}}
    # To text and back, because JSON changes keys and numbers: what is hashed is what will be read.
    return hashlib.sha256(json.dumps(json.loads(json.dumps(others)), sort_keys=True).encode()).hexdigest()


def read_state(folder: Path, fields: Fields, read: Collection[str]) -> dict[str, Any] | None:
    """The folder's state file. None, with a line that says so, where it is damaged, a file is missing or has another
    size than when it was saved, or a file in `read` has other content."""
    state = None
    try:
        state = unseal((folder / STATE).read_bytes(), fields)
        broken = wrong_files(folder, state["files"]) or changed(folder, state, read)
    except ValueError as error:
        broken = [f"{STATE} {error}"]
    if not broken:
        return state
    print(damage(folder, broken), flush=True)
    return None


def damage(folder: Path, broken: Collection[str]) -> str:
    """A line about a folder and what is wrong in it."""
    return f"{folder} is damaged ({', '.join(broken)}) and is passed over"


def changed(folder: Path, state: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """Which of these files of the folder cannot be read or are not as they were saved, each with what is wrong."""
    found = []
    for name in names:
        try:
            if file_digest(folder / name) != state[DIGESTS].get(name):
                found.append(f"{name} is not as it was saved")
        except OSError as error:
            found.append(f"{name} cannot be read: {error.strerror}")
    return found


def wrong_files(folder: Path, sizes: Mapping[str, int]) -> list[str]:
    """Names of the files that are missing or do not have their size in bytes."""
    return [
        name for name, size in sizes.items() if not (folder / name).is_file() or (folder / name).stat().st_size != size
    ]
