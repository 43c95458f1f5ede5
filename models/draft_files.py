"""The two files of an exported draft, config.json and model.safetensors, as files: written as a pair, read with bounds.

Both are written completely before either replaces an older one, and config.json has the digest of its weights, so that
one draft's shape is never read with another's weights. What the fields mean: draft_folder.py.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from reprlib import Repr
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from longdraft.models.files import damage_named, file_digest, sync, write_tensors

CONFIG, WEIGHTS = "config.json", "model.safetensors"
# The folder, inside the final one, that both files are written in. A kill may leave it; the next export removes it.
STAGED = ".export.tmp"
# Fields that tell a config.json of ours.
OURS = {"format_version", "method"}
AGAIN = "copy it again, or export again"
# A config.json has a few kilobytes. What is larger is not read.
MOST_BYTES = 2**24


class Entry(NamedTuple):
    """A tensor in the header of a safetensors file. `dtype` as safetensors names it: F32, BF16, I64."""

    shape: tuple[int, ...]
    dtype: str


def shown(value: Any) -> str:
    """`repr`, shortened if it is long or deep, so that a damaged file's content fits a message of one line."""
    short = Repr()
    short.maxother = short.maxstring = 80
    return short.repr(value)


def check_out(folder: str | Path) -> None:
    """Raise ValueError, with the reason, unless a draft can be written there: the folder is absent and can be made, or
    is empty, or holds a draft that we wrote. Changes nothing."""
    folder = Path(folder)
    try:
        inside = {entry.name for entry in folder.iterdir()} - {STAGED}
    except FileNotFoundError:
        if folder.is_symlink():
            raise ValueError(f"out: {folder} is a link to nothing; remove it, or give another folder") from None
        return
    except OSError as error:
        raise ValueError(f"out: no draft can be written to {folder}: {error.strerror}; give another folder") from error
    if inside and not _is_ours(folder):
        names = ", ".join(sorted(inside)[:3]) + (", ..." if len(inside) > 3 else "")
        raise ValueError(
            f"out: {folder} holds {names}, which is no draft that longdraft wrote, and is left as it is; give a new or "
            "an empty folder"
        )


def _is_ours(folder: Path) -> bool:
    """Whether the folder has a config.json that longdraft wrote."""
    try:
        content = read_config(folder)
    except ValueError:
        return False
    return content.keys() >= OURS


def write_pair(
    folder: str | Path,
    content: Callable[[str], Mapping[str, Any]],
    weights: Mapping[str, Tensor],
    check: Callable[[Path], None] = lambda staged: None,
) -> None:
    """Write config.json and model.safetensors. Whatever fails, an older pair is unchanged and no new folder is left.

    Args:
        content: returns config.json's fields, given the digest of the weights' file.
        check: called with the folder of the new pair before it replaces an older one; raises to prevent that.
    Raises: ValueError as `check_out`, for a weight that is not finite, and if the files cannot be written.
    """
    folder = Path(folder)
    check_out(folder)
    check_finite(weights, "out")
    on_cpu = {name: p.detach().cpu().contiguous() for name, p in weights.items()}
    try:
        with _staged(folder) as staged:
            write_tensors(on_cpu, staged / WEIGHTS, {"format": "pt"})
            text = json.dumps(content(file_digest(staged / WEIGHTS)), indent=2) + "\n"
            (staged / CONFIG).write_text(text, encoding="utf-8")
            for name in (WEIGHTS, CONFIG):
                sync(staged / name)
            check(staged)
            try:
                (staged / WEIGHTS).rename(folder / WEIGHTS)
            finally:  # even if an interrupt comes between the two
                if not (staged / WEIGHTS).exists():
                    (staged / CONFIG).rename(folder / CONFIG)
            sync(folder)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        needed = sum(p.nbytes for p in on_cpu.values()) / 1e6
        raise ValueError(
            f"out: no draft can be written to {folder}: {reason}. It takes {needed:,.1f} MB; what was there before is "
            "untouched: make room, or give another folder"
        ) from error


@contextmanager
def _staged(folder: Path) -> Iterator[Path]:
    """A temporary folder inside `folder`. If the block raises, folders that were made for it are removed again."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    staged = folder / STAGED
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir()
        yield staged
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        for path in made:
            _remove_empty(path)
        raise
    shutil.rmtree(staged)


def _remove_empty(path: Path) -> None:
    try:
        path.rmdir()
    except OSError:  # it was not made, or someone has put something there
        return


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json. Raises ValueError if it is absent, too large, or no JSON object."""
    path = folder / CONFIG
    try:
        if not path.is_file():
            raise FileNotFoundError
        if (size := path.stat().st_size) > MOST_BYTES:
            raise ValueError(f"{size:,} bytes")
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"draft: {folder} holds no {CONFIG}; give a folder that `longdraft export` wrote") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not JSON, not even text, or nested without end
        raise ValueError(f"{path}: cannot be read as JSON ({error}); export again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds no fields; export again")
    return content


def read_header(folder: Path) -> dict[str, Entry]:
    """Read the header of model.safetensors. Raises ValueError if the file is absent or damaged."""
    path = folder / WEIGHTS
    if not path.is_file():
        raise ValueError(f"draft: {folder} holds no {WEIGHTS}; copy the whole folder, or export again")
    with damage_named(path, remedy=AGAIN), safe_open(path, "pt") as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
        return {name: Entry(tuple(tensor.get_shape()), tensor.get_dtype()) for name, tensor in slices.items()}


def read_weights(folder: Path, expected: str | None) -> dict[str, Tensor]:
    """Read the tensors of model.safetensors, on the CPU.

    Args:
        expected: the file's digest; None if config.json does not have it.
    Raises: ValueError if the file is damaged, has another digest, or has a weight that is not finite.
    """
    path = folder / WEIGHTS
    with damage_named(path, remedy=AGAIN):
        weights = load_file(path)
    found = None if expected is None else file_digest(path)  # after reading: a replaced file never comes back
    if found != expected:
        raise ValueError(
            f"{path}: not the weights that {CONFIG} was written with (sha256 {found}, not {shown(expected)}): damaged, "
            "or of another export; copy the whole folder again, or export again"
        )
    check_finite(weights, str(path))
    return weights


def check_finite(weights: Mapping[str, Tensor], where: str) -> None:
    """Raise ValueError that names the weights with NaN or infinite numbers. This takes one pass and no copy: a NaN
    anywhere makes both the minimum and the maximum NaN."""
    floating = {name: p for name, p in weights.items() if p.is_floating_point() and p.numel()}
    wrong = [name for name, p in floating.items() if not bool(torch.stack(torch.aminmax(p.detach())).isfinite().all())]
    if wrong:
        raise ValueError(
            f"{where}: the draft has NaN or infinite weights ({', '.join(wrong[:3])}); export a good checkpoint"
        )
