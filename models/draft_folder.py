"""Draft folders: a trained draft as config.json and model.safetensors, written as a pair and read with checks.

config.json has format_version, method, the network's shape under `draft`, and the fields of DraftInfo. Both files are
written completely before either replaces an older one, and config.json has the digest of the weights, so that one
draft's shape is never read with another's weights.
"""

import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NotRequired

import torch
from pydantic import ConfigDict, Field
from safetensors import SafetensorError
from safetensors.torch import load_file
from typing_extensions import TypedDict

from longdraft.models.drafts.heads import Medusa, MedusaConfig, TokenSwift, TokenSwiftConfig
from longdraft.models.drafts.longspec import LongSpec, LongSpecConfig
from longdraft.models.files import damage_named, file_digest, sync, write_atomically, write_tensors, write_text
from longdraft.models.fingerprint import shape_hash, weights_hash, without_yarn
from longdraft.models.hub import hub_folder
from longdraft.models.schema import Float, Int, Str, validate, validated_dataclass
from longdraft.models.target import Target

CONFIG, WEIGHTS = "config.json", "model.safetensors"
FORMAT_VERSION = 1
MODEL_TYPE = "longdraft"
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
SHIPPED = Path(__file__).parent / "shipped"  # one folder for each draft that comes with longdraft
DRAFTS = {
    "tokenswift": (TokenSwiftConfig, TokenSwift),
    "longspec": (LongSpecConfig, LongSpec),
    "medusa": (MedusaConfig, Medusa),
}
Draft = TokenSwift | LongSpec | Medusa
REMEDY = "copy the whole folder again, or export again"

Rates = Annotated[list[list[Annotated[Float, Field(ge=0, le=1)]]], Field(max_length=64)]


class Tree(TypedDict):
    """The drafter's default tree. "levels": how many ranks each level has; for LongSpec the widths of its beam.
    "rank_rates": [level][rank], the fraction of held-out positions whose text had that rank. "choice_rates": the same
    for the target's own choices, which acceptance depends on. None: not measured."""

    __pydantic_config__ = ConfigDict(extra="allow", allow_inf_nan=False)  # pyright: ignore
    levels: NotRequired[Annotated[list[Annotated[Int, Field(ge=1, le=4096)]], Field(max_length=64)] | None]
    rank_rates: NotRequired[Rates | None]
    choice_rates: NotRequired[Rates | None]


class TargetEntry(TypedDict):
    """The target that a draft was trained for. The hashes are those of fingerprint.py. loader: absent if our decoder
    computed it. quantization: a description, only in older folders."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # pyright: ignore
    name: Str
    config_sha256: Str
    tokenizer_sha256: Str
    weights_sha256: NotRequired[Str]
    loader: NotRequired[Str]
    quantization: NotRequired[Str]


@validated_dataclass
class DraftInfo:
    """What config.json says besides the network's shape.

    Attributes:
        train_length: tokens of a training row.
        versions, train_config: how the draft was made.
        noise: largest noise shift in training; None if the method has none.
        weights_sha256: of model.safetensors. None in older folders.
        step: how many steps it was trained. None in older folders.
    """

    target: TargetEntry
    train_length: Int
    tree: Tree
    versions: dict[Str, Str]
    train_config: dict[Str, Any]
    noise: Int | None = None
    weights_sha256: Str | None = None
    step: Int | None = None


def target_entry(target: Target, weights_sha256: str | None = None) -> TargetEntry:
    """A draft folder's entry for the target that it was trained for.

    weights_sha256: `weights_hash` of the weights that it was trained with; None: the target's own.
    """
    weights = weights_sha256 or target.fingerprint.get("weights")
    if weights is None and target.loader == "longdraft":  # transformers' weights have other names and forms
        weights = weights_hash(target.model)
    entry: TargetEntry = {
        "name": target.name,
        "config_sha256": target.fingerprint["config"],
        "tokenizer_sha256": target.fingerprint["tokenizer"],
    }
    if weights is not None:
        entry["weights_sha256"] = weights
    if target.loader != "longdraft":
        entry["loader"] = target.loader
    return entry


def check_out(folder: str | Path) -> None:
    """Raise ValueError unless a draft can be written there: the folder is absent or empty, or holds a draft that we
    wrote. Changes nothing."""
    folder = Path(folder)
    try:
        is_empty = all(entry.name.startswith(".") for entry in folder.iterdir())  # a kill may leave such files
        is_free = is_empty or read_config(folder).keys() >= {"format_version", "method"}
    except FileNotFoundError:
        return
    except (OSError, ValueError):
        is_free = False
    if not is_free:
        raise ValueError(f"out: {folder} is not a folder, or holds other files; give a new or an empty one")


def save_draft(folder: str | Path, draft: Draft, info: DraftInfo) -> None:
    """Write both files, which replace an older pair once both are complete.

    Raises: ValueError like `check_out`, for a weight that is not finite, and if the files cannot be written.
    """
    folder = Path(folder)
    check_out(folder)
    weights = {name: p.detach().cpu().contiguous() for name, p in draft.state_dict().items()}
    if wrong := [name for name, p in weights.items() if not bool(p.isfinite().all())]:
        raise ValueError(f"out: the draft has NaN or infinite weights ({wrong[0]}); export a good checkpoint")
    method = next(name for name, (_, network) in DRAFTS.items() if isinstance(draft, network))
    # model_type and architectures tell transformers, and what builds on it such as vLLM, which network this is.
    content: dict[str, Any] = {"format_version": FORMAT_VERSION, "method": method}
    content |= {"model_type": MODEL_TYPE, "architectures": [type(draft).__name__]}
    content |= {"draft": asdict(draft.config)} | asdict(info)

    def write(temporary: Path) -> None:
        """Write the weights, and replace config.json just before they are renamed into place."""
        write_tensors(weights, temporary, {"format": "pt"})
        sync(temporary)
        content["weights_sha256"] = file_digest(temporary)
        write_text(folder / CONFIG, json.dumps(content, indent=2) + "\n")

    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / WEIGHTS, write)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"out: no draft can be written to {folder}: {error}; make room or give another") from error


def local_folder(draft: str | Path, revision: str | None = None) -> Path:
    """Find a draft's folder: a local one, a hub repository `owner/name` at `revision` (unless `owner` is a local
    folder), or a draft that comes with longdraft. Raises ValueError if it is none of these."""
    folder, name = Path(draft), str(draft)
    if folder.exists():
        return folder
    if HUB_NAME.fullmatch(name) and not folder.parent.is_dir():
        return _download(name, revision)
    if name in shipped_drafts():
        return SHIPPED / name
    raise ValueError(
        f"draft: {name} holds no {CONFIG}; give a folder that `longdraft export` wrote, a repository of the hub "
        f"(owner/name), or a draft that comes with longdraft: {', '.join(shipped_drafts())}"
    )


def shipped_drafts() -> list[str]:
    """Names of the drafts that come with longdraft. They can be given wherever a draft folder can."""
    return sorted(path.parent.name for path in SHIPPED.glob(f"*/{CONFIG}"))


@cache
def _download(name: str, revision: str | None) -> Path:
    return hub_folder(name, [CONFIG, WEIGHTS], revision=revision, refusal=f"draft: {name} is not a folder")


def read_info(folder: str | Path) -> DraftInfo:
    """Read config.json only. `folder` and errors as in `load_draft`."""
    return _read(local_folder(folder))[1]


def draft_method(folder: str | Path) -> str:
    """The method of a draft folder, which is its drafter's name. Errors as in `read_info`."""
    return _read(local_folder(folder))[0]


def load_draft(folder: str | Path, target: Target | None = None) -> Any:
    """Load the frozen network of a draft folder: a `Draft`.

    A target with the same configuration and other weights is accepted with a warning: its text is exact with any draft.
    Heads are accepted for their target with YaRN, too.

    Args:
        folder: a folder or a name, as in `local_folder`.
        target: what it will draft for; the draft gets its dtype and device. None: as stored, on the CPU.

    Raises:
        ValueError: not a draft folder, another format, an unknown method, another target, or a damaged file: a field
            that is missing, unknown or invalid, or weights that do not fit or belong to another folder. The message
            names the file and the remedy.
    """
    folder = local_folder(folder)
    method, info, shape = _read(folder)
    if target is not None:
        entry = target_entry(target)
        # Heads read only hidden states; LongSpec's block reads keys, which YaRN rotates differently.
        if method != "longspec" and info.target["config_sha256"] == shape_hash(without_yarn(target.model.whole_config)):
            entry["config_sha256"] = info.target["config_sha256"]
        _check_target(folder, info.target, entry)
    config_type, network = DRAFTS[method]
    path = folder / WEIGHTS
    with damage_named(folder / CONFIG, remedy=REMEDY), torch.device("meta"):  # shapes only: the weights come from files
        draft: Draft = network(validate(config_type, shape, "draft"))  # pyright: ignore[reportArgumentType]
    with damage_named(path, remedy=REMEDY):
        weights = load_file(path)
        if info.weights_sha256 not in (None, file_digest(path)):  # after reading, to notice a replaced file
            raise ValueError(f"not the weights that {CONFIG} was written with")
        draft.load_state_dict(weights, assign=True)
    if target is not None:
        weight = target.model.lm_head.weight
        draft = draft.to(weight.device, weight.dtype)
    return draft.requires_grad_(False).eval()


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json. Raises ValueError if it is absent or not a JSON object."""
    path = folder / CONFIG
    with damage_named(path, remedy="give a draft folder that `longdraft export` wrote"):
        return dict(json.loads(path.read_text(encoding="utf-8")))


def _read(folder: Path) -> tuple[str, DraftInfo, Any]:
    """config.json: method, info, and the network's shape, which is not checked yet."""
    content = read_config(folder)
    names = ("format_version", "method", "draft", "model_type", "architectures")
    version, method, shape, *_ = (content.pop(name, None) for name in names)
    if version != FORMAT_VERSION or method not in list(DRAFTS):
        raise ValueError(
            f"draft: {folder / CONFIG} has format_version {version!r} and method {method!r}; this version reads "
            f"{FORMAT_VERSION} and {', '.join(DRAFTS)}: give a folder that `longdraft export` wrote"
        )
    with damage_named(folder / CONFIG, remedy=REMEDY):
        return method, validate(DraftInfo, content), shape


def _check_target(folder: Path, trained_for: Mapping[str, Any], target: Mapping[str, Any]) -> None:
    """Compare the target that the folder names with the one at hand. Names may differ (a local copy of a hub model),
    hashes of configuration and tokenizer may not. Other weights only cause a warning."""
    for key in ("config_sha256", "tokenizer_sha256"):
        if trained_for[key] != target[key]:
            raise ValueError(
                f"draft: {folder} was trained for {trained_for['name']}, and {target['name']} has another {key}; load "
                "its own target"
            )
    if len({entry.get("weights_sha256") for entry in (trained_for, target)} - {None}) > 1:
        warnings.warn(
            f"draft: {folder} was trained with other weights than those of {target['name']} (weights_sha256): the text "
            "is exact, but fewer of the draft's tokens may be accepted",
            stacklevel=3,  # the caller of load_draft
        )
