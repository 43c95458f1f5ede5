"""The exported form of a draft, written by training and read by the runtime: config.json and model.safetensors.

Nothing in it is pickled. Not here: what a method's config means (models/drafts/), where the weights come from
(train/export.py).
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, cast, get_origin, overload

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from longdraft.models.drafts.longspec import LongSpec, LongSpecConfig
from longdraft.models.drafts.medusa import Medusa, MedusaConfig
from longdraft.models.drafts.tokenswift import TokenSwift, TokenSwiftConfig
from longdraft.models.files import write_tensors
from longdraft.models.hf import Target

FORMAT_VERSION = 1
CONFIG, WEIGHTS = "config.json", "model.safetensors"
DRAFTS = {
    "tokenswift": (TokenSwiftConfig, TokenSwift),
    "longspec": (LongSpecConfig, LongSpec),
    "medusa": (MedusaConfig, Medusa),
}
Draft = TokenSwift | LongSpec | Medusa
D = TypeVar("D", TokenSwift, LongSpec, Medusa)


@dataclass(frozen=True)
class DraftInfo:
    """What config.json says beside the network's shape.

    `target`: name, config_sha256, tokenizer_sha256. `train_length`: tokens of a training row. `tree`, the drafter's
    default: {"levels": ranks a level, "rank_rates": [level][rank], share of held-out positions whose text had that
    rank, "choice_rates": the same of the target's own choices, which is what acceptance depends on}; LongSpec's
    "levels" are the widths of its beam. `noise`: largest noise shift in training, None where the method has none.
    `versions` and `train_config`: how it was made.
    """

    target: dict[str, str]
    train_length: int
    tree: dict[str, Any]
    versions: dict[str, str]
    train_config: dict[str, Any]
    noise: int | None = None


def target_entry(target: Target) -> dict[str, str]:
    """How a draft folder names the target that it belongs to."""
    return {
        "name": target.name,
        "config_sha256": target.fingerprint["config"],
        "tokenizer_sha256": target.fingerprint["tokenizer"],
    }


def save_draft(folder: str | Path, draft: Draft, info: DraftInfo) -> None:
    """Writes both files."""
    method = next(name for name, (_, network) in DRAFTS.items() if isinstance(draft, network))
    content = {"format_version": FORMAT_VERSION, "method": method, "draft": asdict(draft.config)} | asdict(info)
    write_folder(folder, content, draft.state_dict())


def write_folder(folder: str | Path, content: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """config.json and model.safetensors, each whole or not at all; config.json last, so that a folder that has one is
    complete."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).unlink(missing_ok=True)
    on_cpu = {name: p.detach().cpu().contiguous() for name, p in weights.items()}
    write_tensors(on_cpu, folder / f"{WEIGHTS}.tmp", metadata={"format": "pt"})
    (folder / f"{CONFIG}.tmp").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for name in (WEIGHTS, CONFIG):
        temporary = folder / f"{name}.tmp"
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        temporary.rename(folder / name)


def read_info(folder: str | Path) -> DraftInfo:
    """config.json without the weights; raises ValueError as load_draft."""
    return _info(Path(folder), _read(Path(folder)))


@overload
def load_draft(folder: str | Path, target: Target | None = None) -> Any: ...
@overload
def load_draft(folder: str | Path, target: Target | None, kind: type[D]) -> D: ...
def load_draft(folder: str | Path, target: Target | None = None, kind: type[Draft] | None = None) -> Draft:
    """The frozen network of a draft folder.

    Args:
        target: what it will draft for; the draft comes in its dtype and on its device. None: as stored, on the CPU.
        kind: the network it must be; None: whichever it is.

    Raises:
        ValueError: no draft folder, another format, an unknown or another method, a damaged file, a field that is
            missing or unknown, another target, or weights that do not fit. It names the file and what to do.
    """
    folder = Path(folder)
    content = _read(folder)
    config_type, network = DRAFTS[content["method"]]
    if kind not in (None, network):
        wanted = next(name for name, (_, other) in DRAFTS.items() if other is kind)
        raise ValueError(f"draft: {folder} holds a draft of {content['method']}; give one of {wanted}")
    info = _info(folder, content)
    if target is not None:
        _check_target(folder, info.target, target_entry(target))
    _check_fields(folder, "draft", config_type, content["draft"])
    try:
        with torch.device("meta"):  # shapes alone: the weights come from the file
            draft: Draft = network(config_type(**content["draft"]))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder / CONFIG}: {error}; export again") from error
    weights = _weights(folder)
    expected = {name: p.shape for name, p in draft.state_dict().items()}
    if expected != {name: p.shape for name, p in weights.items()}:
        wrong = sorted(n for n in expected.keys() | weights if n not in weights or expected.get(n) != weights[n].shape)
        raise ValueError(f"{folder / WEIGHTS}: missing, unknown or of another shape: {', '.join(wrong)}; export again")
    draft.load_state_dict(weights, assign=True)
    if target is not None:
        place = target.model.lm_head.weight
        draft = draft.to(place.device, place.dtype)
    return draft.requires_grad_(False).eval()


def _read(folder: Path) -> dict[str, Any]:
    if not (folder / CONFIG).is_file():
        raise ValueError(f"draft: {folder} holds no {CONFIG}; give a folder that `longdraft export` wrote")
    try:
        content = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, or not even text
        raise ValueError(f"{folder / CONFIG}: cannot be read as JSON ({error}); export again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{folder / CONFIG}: holds no fields; export again")
    version, method = content.get("format_version"), content.get("method")
    if version is None:
        raise ValueError(
            f"draft: {folder} is no draft folder, its {CONFIG} has no format_version; give one that `longdraft export` "
            "wrote in its own format"
        )
    if version != FORMAT_VERSION:
        raise ValueError(
            f"draft: {folder} has format_version {version}, this version reads {FORMAT_VERSION}; export again"
        )
    if method not in DRAFTS:
        raise ValueError(f"draft: {folder} holds the method {method!r}; known: {', '.join(DRAFTS)}")
    return content


def _info(folder: Path, content: dict[str, Any]) -> DraftInfo:
    """What stands beside the shape; the whole of config.json must be known."""
    beside = {name: value for name, value in content.items() if name not in ("format_version", "method", "draft")}
    _check_fields(folder, "", DraftInfo, beside)
    if "draft" not in content:
        raise ValueError(f"{folder / CONFIG}: lacks draft; export again")
    return DraftInfo(**beside)


def _check_fields(folder: Path, where: str, config_type: type, values: Any) -> None:
    """That these are the dataclass's fields, each of its type: none unknown, none missing but those with a default."""
    if not isinstance(values, dict):
        raise ValueError(f"{folder / CONFIG}: {where} must hold fields, not {values!r}; export again")
    dot = where and f"{where}."
    known = {f.name: f for f in fields(config_type)}
    needed = [name for name, f in known.items() if f.default is MISSING and f.default_factory is MISSING]
    missing = [dot + name for name in needed if name not in values]
    unknown = [dot + name for name in values if name not in known]
    for name in known.keys() & values.keys():
        kind, value = cast(Any, known[name].type), values[name]
        plain = kind if isinstance(kind, UnionType) else get_origin(kind) or kind
        if not isinstance(value, int if plain is float and isinstance(value, int) else plain):
            raise ValueError(f"{folder / CONFIG}: {dot}{name} is {value!r}, not of type {kind}; export again")
    problems = [
        f"{verb} {', '.join(names)}" for verb, names in (("lacks", missing), ("does not know", unknown)) if names
    ]
    if problems:
        raise ValueError(
            f"{folder / CONFIG}: {' and '.join(problems)}; export again, with the version of longdraft that reads it"
        )


def _weights(folder: Path) -> dict[str, Tensor]:
    path = folder / WEIGHTS
    if not path.is_file():
        raise ValueError(f"draft: {folder} holds no {WEIGHTS}; copy the whole folder, or export again")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path}: damaged ({error}); copy it again, or export again") from error


def _check_target(folder: Path, own: dict[str, str], given: dict[str, str]) -> None:
    """Names may differ (a local copy of a hub model), fingerprints may not."""
    if not isinstance(own, dict) or own.keys() != given.keys():
        raise ValueError(f"{folder / CONFIG}: target must hold {', '.join(given)}, not {own!r}; export again")
    different = [key for key in ("config_sha256", "tokenizer_sha256") if own[key] != given[key]]
    if different:

        def show(entry: dict[str, str], keys: Sequence[str] = different) -> str:
            return f"{entry['name']} ({', '.join(f'{key} {entry[key]}' for key in keys)})"

        raise ValueError(
            f"draft: {folder} was trained for {show(own)} and cannot draft for {show(given)}; load its own target"
        )
