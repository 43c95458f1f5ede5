"""Checks of a draft folder's content, made before anything is built or allocated because the folder says so.

Each raises a ValueError that names the file and the remedy. draft_folder.py calls them; draft_files.py reads the files.
"""

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from types import UnionType
from typing import Any, cast, get_args, get_origin

from torch import Tensor

from longdraft.models.draft_files import CONFIG, WEIGHTS, Entry, shown
from longdraft.models.drafts.longspec import shape_of
from longdraft.models.target import Target

# Config fields of heads that must equal the target's. Those of a LongSpec block are in `shape_of`.
HEADS = {"tokenswift": ("hidden_size", "rms_norm_eps"), "medusa": ("hidden_size",)}
# Config numbers that are no size of any tensor of the draft, nor of anything that is built before a target is there.
UNSEEN = ("vocab_size", "max_positions", "window", "noise")
FLOATS = ("F32", "BF16", "F16", "F64")
MOST_LEVELS, MOST_WIDTH = 64, 4096  # of a tree: far beyond what pays, and little memory


def check_tree(folder: Path, tree: dict[str, Any]) -> None:
    """Check that levels are widths, that rates are fractions, and that there are at most MOST_LEVELS levels."""
    levels = tree.get("levels") or []
    problem = None
    if not _is_list(levels, int) or not all(1 <= width <= MOST_WIDTH for width in levels):
        problem = f"levels is {shown(levels)}, not whole numbers of 1 to {MOST_WIDTH}"
    for name in ("rank_rates", "choice_rates"):
        rates = tree.get(name) or []
        if not isinstance(rates, list) or not all(
            _is_list(level, float) and all(0 <= rate <= 1 for rate in level) for level in rates
        ):
            problem = f"{name} is {shown(rates)}, not shares of 0 to 1 for each level"
        levels = max(levels, rates, key=len) if problem is None else levels
    if problem is None and len(levels) > MOST_LEVELS:
        problem = f"{len(levels)} levels, and at most {MOST_LEVELS} are read"
    if problem is not None:
        raise ValueError(f"{folder / CONFIG}: tree.{problem}; export again")


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(_is_of(kind, one) for one in value)


def check_fields(folder: Path, where: str, config_type: type, values: Any) -> None:
    """Check that `values` has the dataclass's fields, each of its type: all without a default, and no unknown ones.

    where: name of the object in config.json, for messages; "" for the top level.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{folder / CONFIG}: {where} must hold fields, not {shown(values)}; export again")
    dot = where and f"{where}."
    known = {f.name: f for f in fields(config_type)}
    needed = [name for name, f in known.items() if f.default is MISSING and f.default_factory is MISSING]
    missing = [dot + name for name in needed if name not in values]
    unknown = [dot + name for name in values if name not in known]
    for name in known.keys() & values.keys():
        kind, value = cast(Any, known[name].type), values[name]
        if not _is_of(kind, value):
            raise ValueError(f"{folder / CONFIG}: {dot}{name} is {shown(value)}, not of type {kind}; export again")
    problems = [
        f"{verb} {', '.join(names)}" for verb, names in (("lacks", missing), ("does not know", unknown)) if names
    ]
    if problems:
        raise ValueError(
            f"{folder / CONFIG}: {' and '.join(problems)}; export again, with the version of longdraft that reads it"
        )


def _is_of(kind: Any, value: Any) -> bool:
    """Whether a JSON value has a field's type. True is no number, an integer is a float as well, NaN and infinity are
    not."""
    kinds = get_args(kind) if isinstance(kind, UnionType) else (get_origin(kind) or kind,)
    if isinstance(value, bool):
        return bool in kinds
    if isinstance(value, (int, float)) and float in kinds:
        return abs(value) < math.inf
    return isinstance(value, kinds)


def check_shape(folder: Path, method: str, values: dict[str, Any], target: Target) -> None:
    """Check that the draft's shape is that of its target."""
    config = target.model.config
    if method == "longspec":
        shape = shape_of(config) | {"rope": json.loads(json.dumps(dict(config.rope_of(-1).parameters)))}
    else:
        shape = {name: getattr(config, name) for name in HEADS[method]}
    for name, value in shape.items():
        if values.get(name) != value:
            raise ValueError(
                f"{folder / CONFIG}: draft.{name} is {shown(values.get(name))}, and {target.name} has {shown(value)}; "
                "export again, or load the draft's own target"
            )


def check_sizes(folder: Path, method: str, values: dict[str, Any], header: Mapping[str, Entry]) -> None:
    """Check that no number is larger than the weights' sizes, before anything of this size is built."""
    largest = max((size for entry in header.values() for size in entry.shape), default=0)
    for name, value in values.items():
        heads = name == "n_heads" and method != "longspec"
        most = len(header) if heads else largest
        if isinstance(value, int) and name not in UNSEEN and value > most:
            words = f"{most} tensors" if heads else f"tensors of up to {most} rows or columns"
            raise ValueError(
                f"{folder / CONFIG}: draft.{name} is {shown(value)}, but {WEIGHTS} has {words}; export again"
            )


def check_header(folder: Path, network: Mapping[str, Tensor], header: Mapping[str, Entry]) -> None:
    """Check that the weights are the network's: names, shapes, and floats or int64 ids as the network has them."""
    wrong = [
        name
        for name in sorted(network.keys() | header)
        if name not in network or name not in header or tuple(network[name].shape) != header[name].shape
    ]
    if wrong:
        names = ", ".join(wrong[:8]) + (f" and {len(wrong) - 8} more" if len(wrong) > 8 else "")
        raise ValueError(f"{folder / WEIGHTS}: missing, unknown or of another shape: {names}; export again")
    for name, entry in header.items():
        kinds = FLOATS if network[name].is_floating_point() else ("I64",)
        if entry.dtype not in kinds:
            raise ValueError(f"{folder / WEIGHTS}: {name} is of {entry.dtype}, not {' or '.join(kinds)}; export again")


def check_target(folder: Path, trained_for: dict[str, str], target: dict[str, str]) -> None:
    """Compare the target that the folder names with the one at hand (`target_entry`). Names may differ (a local copy of
    a hub model), fingerprints of configuration and tokenizer may not. Other weights are only warned of."""
    needed, optional = {"name", "config_sha256", "tokenizer_sha256"}, {"weights_sha256", "loader", "quantization"}
    texts = all(isinstance(value, str) for value in trained_for.values())
    if not (needed <= trained_for.keys() <= {*target, *optional} and texts):
        raise ValueError(
            f"{folder / CONFIG}: target must hold {', '.join(sorted(needed, key=len))}, each a text, not "
            f"{shown(trained_for)}; export again"
        )

    def show(entry: dict[str, str], keys: Sequence[str]) -> str:
        return f"{entry['name']} ({', '.join(f'{key} {entry[key]}' for key in keys)})"

    different = [key for key in ("config_sha256", "tokenizer_sha256") if trained_for[key] != target[key]]
    if different:
        raise ValueError(
            f"draft: {folder} was trained for {show(trained_for, different)} and cannot draft for "
            f"{show(target, different)}; load its own target"
        )
    key = "weights_sha256"
    if key in trained_for and key in target and trained_for[key] != target[key]:
        warnings.warn(
            f"draft: {folder} was trained with the weights of {show(trained_for, [key])}, and these are "
            f"{show(target, [key])}: the text is exact all the same, but fewer of the draft's tokens may be accepted. "
            "Load its own target, or train a draft for this one.",
            stacklevel=4,  # who called load_draft
        )
