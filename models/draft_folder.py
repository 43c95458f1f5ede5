"""The exported form of a draft, written by training and read by the runtime: config.json and model.safetensors.

Nothing in it is pickled. Not here: what a method's config means (models/drafts/), where the weights come from
(train/export.py).
"""

import json
import math
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, overload

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from longdraft.models.draft_files import (
    CONFIG,
    STAGED,
    WEIGHTS,
    Entry,
    read_config,
    read_header,
    read_weights,
    shown,
    write_pair,
)
from longdraft.models.drafts.longspec import LongSpec, LongSpecConfig, shape_of
from longdraft.models.drafts.medusa import Medusa, MedusaConfig
from longdraft.models.drafts.tokenswift import TokenSwift, TokenSwiftConfig
from longdraft.models.fingerprint import weights_hash
from longdraft.models.quantised import read_quantisation
from longdraft.models.target import Target

FORMAT_VERSION = 1
MODEL_TYPE = "longdraft"
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
SHIPPED = Path(__file__).parent / "shipped"  # the drafts that come with longdraft, a folder each, by name
DRAFTS = {
    "tokenswift": (TokenSwiftConfig, TokenSwift),
    "longspec": (LongSpecConfig, LongSpec),
    "medusa": (MedusaConfig, Medusa),
}
Draft = TokenSwift | LongSpec | Medusa
D = TypeVar("D", TokenSwift, LongSpec, Medusa)
# Fields of heads that are their target's own; a block's are in `shape_of`.
HEADS = {"tokenswift": ("hidden_size", "rms_norm_eps"), "medusa": ("hidden_size",)}
# Numbers that no tensor of the draft has as its size, nor anything that is built of them before a target is there.
UNSEEN = ("vocab_size", "max_positions", "window", "noise")
FLOATS = ("F32", "BF16", "F16", "F64")
MOST_LEVELS, MOST_WIDTH = 64, 4096  # of a tree: far beyond what pays, and nothing to hold
# A folder that is being replaced, as the files that are made in it say, is whole again after this.
SWAP_S = 0.1


@dataclass(frozen=True)
class DraftInfo:
    """What config.json says beside the network's shape.

    `target`: name, config_sha256, tokenizer_sha256 and, where it is known, weights_sha256, of a sample of the target's
    weights (fingerprint.py), and loader, where another than our decoder computed it. `train_length`: tokens of a
    training row. `tree`, the drafter's default: {"levels": ranks a level, "rank_rates": [level][rank], share of
    held-out positions whose text had that rank, "choice_rates": the same of the target's own choices, which is what
    acceptance depends on}; LongSpec's "levels" are the widths of its beam. `noise`: largest noise shift in training,
    None where the method has none.
    `versions` and `train_config`: how it was made. `weights_sha256`: of model.safetensors, and `step`: how many it was
    trained; both None in older folders.
    """

    target: dict[str, str]
    train_length: int
    tree: dict[str, Any]
    versions: dict[str, str]
    train_config: dict[str, Any]
    noise: int | None = None
    weights_sha256: str | None = None
    step: int | None = None


def target_entry(target: Target, weights_sha256: str | None = None) -> dict[str, str]:
    """How a draft folder names the target that it belongs to.

    weights_sha256: of the weights that it was trained with (`weights_hash`); None: the target's own.
    """
    weights = weights_sha256 or target.fingerprint.get("weights") or weights_hash(target.model)
    entry = {
        "name": target.name,
        "config_sha256": target.fingerprint["config"],
        "tokenizer_sha256": target.fingerprint["tokenizer"],
    }
    if weights is not None:
        entry["weights_sha256"] = weights
    if (quantisation := read_quantisation(target.hf_config)) is not None:
        entry["quantization"] = f"{quantisation.description}, dequantised"
    return entry if target.loader == "longdraft" else entry | {"loader": target.loader}


def save_draft(
    folder: str | Path, draft: Draft, info: DraftInfo, check: Callable[[Path], None] = lambda staged: None
) -> None:
    """Writes both files; raises ValueError, as `write_pair`, where that cannot be done, or what `check` raises of the
    folder that holds them before they take their place, and changes nothing then."""
    method = next(name for name, (_, network) in DRAFTS.items() if isinstance(draft, network))
    # By the second pair transformers and what builds on it, such as vLLM, know a folder's network.
    content = {"format_version": FORMAT_VERSION, "method": method}
    content |= {"model_type": MODEL_TYPE, "architectures": [type(draft).__name__]}
    content |= {"draft": asdict(draft.config)} | asdict(info)
    write_pair(folder, lambda digest: content | {"weights_sha256": digest}, draft.state_dict(), check)


def local_folder(draft: str | Path, revision: str | None = None) -> Path:
    """A draft's folder: itself, else the one of this name that comes with longdraft, else the snapshot of the hub's
    repository of this name (at `revision`), unless its owner is a folder here. Raises ValueError where there is none of
    the three."""
    folder, name = Path(draft), str(draft)
    if folder.exists():
        return folder
    if HUB_NAME.fullmatch(name) and not folder.parent.is_dir():
        return _download(name, revision)
    if name in (shipped := shipped_drafts()):
        return SHIPPED / name
    raise ValueError(
        f"draft: {name} holds no {CONFIG}; give a folder that `longdraft export` wrote, a repository of the hub "
        f"(owner/name), or a draft that comes with longdraft: {', '.join(shipped)}"
    )


def shipped_drafts() -> list[str]:
    """The names of the drafts that come with longdraft, which are taken wherever a draft folder is."""
    return sorted(path.parent.name for path in SHIPPED.glob(f"*/{CONFIG}"))


@cache
def _download(name: str, revision: str | None) -> Path:
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=[CONFIG, WEIGHTS]))
    except (OSError, ValueError) as error:
        raise ValueError(f"draft: {name} is no folder, and could not be had from the hub: {error}") from error


def read_info(folder: str | Path) -> DraftInfo:
    """config.json without the weights; `folder` and errors as of load_draft."""
    folder = local_folder(folder)
    return _info(folder, _read(folder))


def draft_method(folder: str | Path) -> str:
    """The method that a draft folder says it is a draft of, which is its drafter's name; else as `read_info`."""
    read_info(folder)  # names a folder that is none
    return _read(local_folder(folder))["method"]


@overload
def load_draft(folder: str | Path, target: Target | None = None) -> Any: ...
@overload
def load_draft(folder: str | Path, target: Target | None, kind: type[D]) -> D: ...
def load_draft(folder: str | Path, target: Target | None = None, kind: type[Draft] | None = None) -> Draft:
    """The frozen network of a draft folder.

    Args:
        folder: or the hub name of a repository with its two files.
        target: what it will draft for; the draft comes in its dtype and on its device. None: as stored, on the CPU.
        kind: the network it must be; None: whichever it is.

    Raises:
        ValueError: no draft folder, another format, an unknown or another method, a damaged file, a field that is
            missing, unknown, of another type or larger than the weights show, another target, weights that do not fit,
            are none of this folder's or no numbers. It names the file and what to do.

    A target of the same configuration with other weights is taken, with a warning: its text is exact with any draft.
    """
    folder = local_folder(folder)
    content = _read(folder)
    try:
        return _load(folder, content, target, kind)
    except ValueError:
        if (folder / STAGED).exists():
            time.sleep(SWAP_S)
        if (again := _read(folder)) == content:
            raise
    return _load(folder, again, target, kind)  # another draft was being put there


def _load(folder: Path, content: dict[str, Any], target: Target | None, kind: type[Draft] | None) -> Draft:
    method, values = content["method"], content.get("draft")
    config_type, network = DRAFTS[method]
    if kind not in (None, network):
        wanted = next(name for name, (_, other) in DRAFTS.items() if other is kind)
        raise ValueError(f"draft: {folder} holds a draft of {method}; give one of {wanted}")
    info = _info(folder, content)
    if target is not None:
        _check_target(folder, info.target, target_entry(target))
    _check_fields(folder, "draft", config_type, values)
    assert isinstance(values, dict)
    if target is not None:
        _check_shape(folder, method, values, target)
    header = read_header(folder)
    _check_sizes(folder, method, values, header)
    try:
        with torch.device("meta"):  # shapes alone: the weights come from the file
            draft: Draft = network(config_type(**values))
    except (TypeError, ValueError, KeyError, ArithmeticError, RuntimeError, StrictDataclassError) as error:
        raise ValueError(f"{folder / CONFIG}: {' '.join(str(error).split())}; export again") from error
    _check_header(folder, draft.state_dict(), header)
    draft.load_state_dict(read_weights(folder, info.weights_sha256), assign=True)
    if target is not None:
        place = target.model.lm_head.weight
        draft = draft.to(place.device, place.dtype)
    return draft.requires_grad_(False).eval()


def _read(folder: Path) -> dict[str, Any]:
    content = read_config(folder)
    version, method = content.get("format_version"), content.get("method")
    if version is None:
        raise ValueError(
            f"draft: {folder} is no draft folder, its {CONFIG} has no format_version; give one that `longdraft export` "
            "wrote in its own format"
        )
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise ValueError(
            f"draft: {folder} has format_version {shown(version)}, this version reads {FORMAT_VERSION}; export again"
        )
    if not isinstance(method, str) or method not in DRAFTS:
        raise ValueError(f"draft: {folder} holds the method {shown(method)}; known: {', '.join(DRAFTS)}")
    return content


def _info(folder: Path, content: dict[str, Any]) -> DraftInfo:
    """What stands beside the shape; the whole of config.json must be known."""
    shape = ("format_version", "method", "draft", "model_type", "architectures")
    beside = {name: value for name, value in content.items() if name not in shape}
    _check_fields(folder, "", DraftInfo, beside)
    if "draft" not in content:
        raise ValueError(f"{folder / CONFIG}: lacks draft; export again")
    info = DraftInfo(**beside)
    _check_tree(folder, info.tree)
    return info


def _check_tree(folder: Path, tree: dict[str, Any]) -> None:
    """That levels are widths, and rates shares, of no more levels than a tree can have."""
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


def _check_fields(folder: Path, where: str, config_type: type, values: Any) -> None:
    """That these are the dataclass's fields, each of its type: none unknown, none missing but those with a default."""
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
    """Whether a value of JSON is of a field's type. True is no number, a whole number is a float too, and neither NaN
    nor infinity is one."""
    kinds = get_args(kind) if isinstance(kind, UnionType) else (get_origin(kind) or kind,)
    if isinstance(value, bool):
        return bool in kinds
    if isinstance(value, (int, float)) and float in kinds:
        return abs(value) < math.inf
    return isinstance(value, kinds)


def _check_shape(folder: Path, method: str, values: dict[str, Any], target: Target) -> None:
    """That the draft is of its target's shape."""
    config = target.model.config
    if method == "longspec":
        shape = shape_of(config) | {"rope": json.loads(json.dumps(dict(config.rope_of(-1).parameters)))}
    else:
        shape = {name: getattr(config, name) for name in HEADS[method]}
    for name, own in shape.items():
        if values.get(name) != own:
            raise ValueError(
                f"{folder / CONFIG}: draft.{name} is {shown(values.get(name))}, and {target.name} has {shown(own)}; "
                "export again, or load the draft's own target"
            )


def _check_sizes(folder: Path, method: str, values: dict[str, Any], header: Mapping[str, Entry]) -> None:
    """That no number is larger than the weights have, before anything of this size is built."""
    largest = max((size for entry in header.values() for size in entry.shape), default=0)
    for name, value in values.items():
        heads = name == "n_heads" and method != "longspec"
        most = len(header) if heads else largest
        if isinstance(value, int) and name not in UNSEEN and value > most:
            words = f"{most} tensors" if heads else f"tensors of up to {most} rows or columns"
            raise ValueError(
                f"{folder / CONFIG}: draft.{name} is {shown(value)}, but {WEIGHTS} has {words}; export again"
            )


def _check_header(folder: Path, network: Mapping[str, Tensor], header: Mapping[str, Entry]) -> None:
    """That the weights are the network's: names, shapes, numbers where it has numbers and ids where it has ids."""
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


def _check_target(folder: Path, own: dict[str, str], given: dict[str, str]) -> None:
    """Names may differ (a local copy of a hub model), fingerprints of configuration and tokenizer may not; of other
    weights it warns."""
    needed, known = {"name", "config_sha256", "tokenizer_sha256"}, {*given, "weights_sha256", "loader", "quantization"}
    if not (needed <= own.keys() <= known and all(isinstance(value, str) for value in own.values())):
        raise ValueError(
            f"{folder / CONFIG}: target must hold {', '.join(sorted(needed, key=len))}, each a text, not {shown(own)}; "
            "export again"
        )

    def show(entry: dict[str, str], keys: Sequence[str]) -> str:
        return f"{entry['name']} ({', '.join(f'{key} {entry[key]}' for key in keys)})"

    different = [key for key in ("config_sha256", "tokenizer_sha256") if own[key] != given[key]]
    if different:
        raise ValueError(
            f"draft: {folder} was trained for {show(own, different)} and cannot draft for {show(given, different)}; "
            "load its own target"
        )
    key = "weights_sha256"
    if key in own and key in given and own[key] != given[key]:
        warnings.warn(
            f"draft: {folder} was trained with the weights of {show(own, [key])}, and these are {show(given, [key])}: "
            "the text is exact all the same, but fewer of the draft's tokens may be accepted. Load its own target, or "
            "train a draft for this one.",
            stacklevel=4,  # who called load_draft
        )
