"""What tells a checkpoint's files from damaged ones: a sha256 of each in state.json, and of state.json itself.

A core hashes 1 to 2 GB a second. Ranks hash side by side, when saving what each has written, on resume a share each:
for a LongSpec draft of an 8B model, 4 GB, that is half a second on 8 ranks. Not here: what a damaged file leads to
(checkpoint.py).
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from longdraft.models.files import file_digest
from longdraft.train.ranks import wrong_files

STATE, DIGESTS = "state.json", "sha256"
# Names and types of what a state file must have; a name `a.b` is b in a.
Fields = Mapping[str, type | tuple[type, ...]]
# Of a state file with digests; the first had none, and no such field.
FORMAT = 2


def seal(content: Mapping[str, Any], digests: Mapping[str, str]) -> str:
    """The text of a state file.

    Args:
        content: JSON values. digests: of the folder's other files, by name.
    """
    whole = {"format": FORMAT, **content, DIGESTS: dict(digests)}
    whole[DIGESTS][STATE] = _own_digest(whole)
    return json.dumps(whole, indent=1)


def unseal(text: bytes, fields: Fields) -> dict[str, Any]:
    """What `seal` or an earlier version wrote.

    Raises:
        ValueError: it is not as it was written, or lacks a field; says what is wrong in a few words.
    """
    try:
        state = json.loads(text)
    except ValueError:
        raise ValueError("is no JSON") from None
    if not isinstance(state, dict):
        raise ValueError("holds no fields")
    sealed = "format" in state or DIGESTS in state
    for name, kind in [*fields.items(), *([(f"{DIGESTS}.{STATE}", str)] if sealed else [])]:
        value: Any = state
        for key in name.split(".", 1):
            value = value.get(key, _MISSING) if isinstance(value, dict) else _MISSING
        if value is _MISSING or not isinstance(value, kind):
            raise ValueError(f"has no field {name}" if value is _MISSING else f"has {value!r} in its field {name}")
    if sealed and state[DIGESTS][STATE] != _own_digest(state):
        raise ValueError("is not as it was saved")
    return state


def has_digests(state: Mapping[str, Any]) -> bool:
    return DIGESTS in state


def changed(folder: Path, state: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """Those of the folder's files that cannot be read, or are not as they were saved, and what is wrong with each."""
    found = []
    for name in names:
        try:
            if file_digest(folder / name) != state[DIGESTS].get(name):
                found.append(f"{name} is not as it was saved")
        except OSError as error:
            found.append(f"{name} cannot be read: {error.strerror}")
    return found


def whole(folder: Path, fields: Fields, read: Collection[str]) -> dict[str, Any] | None:
    """The folder's state file; None, and a line that says so, where it is damaged, a file is missing or has another
    size than when it was saved, or one of those in `read` another content."""
    state = None
    try:
        state = unseal((folder / STATE).read_bytes(), fields)
        broken = wrong_files(folder, state["files"])
        if read and not broken:
            say_without_digests(folder, state)
            broken = changed(folder, state, read) if has_digests(state) else []
    except ValueError as error:
        broken = [f"{STATE} {error}"]
    if not broken:
        return state
    print(damage(folder, broken), flush=True)
    return None


def damage(folder: Path, broken: Collection[str]) -> str:
    """A line about a folder and what is wrong in it."""
    return f"{folder} is damaged ({', '.join(broken)}) and is passed over"


def say_without_digests(folder: Path, state: Mapping[str, Any]) -> None:
    if not has_digests(state):
        print(f"{folder} has no digests, an earlier version saved it: the sizes of its files alone are checked")


def _own_digest(state: Mapping[str, Any]) -> str:
    """Of a state file's values but this one."""
    others = {**state, DIGESTS: {name: digest for name, digest in state[DIGESTS].items() if name != STATE}}
    # To text and back: what was written is what will be read, keys and numbers too.
    return hashlib.sha256(json.dumps(json.loads(json.dumps(others)), sort_keys=True).encode()).hexdigest()


_MISSING = object()
