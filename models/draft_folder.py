"""Draft folders: a trained draft as config.json and model.safetensors, written as a pair and read with checks.

config.json has format_version, method, the network's shape under `draft`, and the fields of DraftInfo. Both files are
written completely before either replaces an older one, and config.json has the digest of the weights, so that one
draft's shape is never read with another's weights. Nothing larger than the weights is allocated because a file says so.
"""

import json
import re
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypeVar, overload

import torch
from huggingface_hub.errors import StrictDataclassError
from pydantic import ConfigDict, Field, GetPydanticSchema
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from typing_extensions import TypedDict

from longdraft.models.drafts.longspec import LongSpec, LongSpecConfig, shape_of
from longdraft.models.drafts.medusa import Medusa, MedusaConfig
from longdraft.models.drafts.tokenswift import TokenSwift, TokenSwiftConfig
from longdraft.models.files import damage_named, file_digest, sync, write_tensors
from longdraft.models.fingerprint import weights_hash
from longdraft.models.hub import hub_folder
from longdraft.models.quantised import read_quantisation
from longdraft.models.schema import Float, Int, Str, validate, validated_dataclass
from longdraft.models.target import Target

CONFIG, WEIGHTS = "config.json", "model.safetensors"
# The folder, inside the final one, that both files are written in. A kill may leave it; the next export removes it.
STAGED = ".export.tmp"
FORMAT_VERSION = 1
MODEL_TYPE = "longdraft"
MOST_BYTES = 2**24  # of a config.json, which has a few kilobytes
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
SHIPPED = Path(__file__).parent / "shipped"  # one folder for each draft that comes with longdraft
DRAFTS = {
    "tokenswift": (TokenSwiftConfig, TokenSwift),
    "longspec": (LongSpecConfig, LongSpec),
    "medusa": (MedusaConfig, Medusa),
}
Draft = TokenSwift | LongSpec | Medusa
D = TypeVar("D", TokenSwift, LongSpec, Medusa)
# Numbers of a draft's shape that are no size of any of its tensors.
UNSEEN = ("vocab_size", "max_positions", "window", "noise")

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
    """The target that a draft was trained for. The hashes are those of fingerprint.py; loader, if another than our
    decoder computed it; quantization, in words."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # pyright: ignore
    name: Str
    config_sha256: Str
    tokenizer_sha256: Str
    weights_sha256: NotRequired[Str]
    loader: NotRequired[Str]
    quantization: NotRequired[Str]


@validated_dataclass
class DraftInfo:
    """What config.json says beside the network's shape.

    Attributes:
        train_length: tokens of a training row.
        versions, train_config: how the draft was made.
        noise: largest noise shift in training; None if the method has none.
        weights_sha256: of model.safetensors. None in older folders.
        step: how many steps it was trained. None in older folders.
    """

    target: Annotated[dict[str, str], GetPydanticSchema(lambda _, schema_of: schema_of(TargetEntry))]
    train_length: Int
    tree: Annotated[dict[str, Any], GetPydanticSchema(lambda _, schema_of: schema_of(Tree))]
    versions: dict[Str, Str]
    train_config: dict[Str, Any]
    noise: Int | None = None
    weights_sha256: Str | None = None
    step: Int | None = None


def target_entry(target: Target, weights_sha256: str | None = None) -> dict[str, str]:
    """How a draft folder names the target that it was trained for.

    weights_sha256: `weights_hash` of the weights that it was trained with; None: the target's own.
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
    if target.loader != "longdraft":
        entry["loader"] = target.loader
    return entry


def check_out(folder: str | Path) -> None:
    """Raise ValueError unless a draft can be written there: the folder is absent or empty, or holds a draft that we
    wrote. Changes nothing."""
    folder = Path(folder)
    try:
        inside = {entry.name for entry in folder.iterdir()} - {STAGED}
    except FileNotFoundError:
        return
    except OSError as error:
        raise ValueError(f"out: no draft can be written to {folder}: {error.strerror}; give another folder") from error
    try:
        is_ours = not inside or read_config(folder).keys() >= {"format_version", "method"}
    except ValueError:
        is_ours = False
    if not is_ours:
        raise ValueError(f"out: {folder} holds files and no draft of longdraft's; give a new or an empty folder")


def save_draft(
    folder: str | Path, draft: Draft, info: DraftInfo, check: Callable[[Path], None] = lambda staged: None
) -> None:
    """Write both files. Whatever fails, an older pair is unchanged.

    check: called with the folder of the new pair before it replaces an older one; raises to prevent that.

    Raises: ValueError as `check_out`, for a weight that is not finite, and if the files cannot be written.
    """
    folder = Path(folder)
    check_out(folder)
    weights = {name: p.detach().cpu().contiguous() for name, p in draft.state_dict().items()}
    check_finite(weights, "out")
    method = next(name for name, (_, network) in DRAFTS.items() if isinstance(draft, network))
    # model_type and architectures tell transformers, and what builds on it such as vLLM, which network this is.
    content: dict[str, Any] = {"format_version": FORMAT_VERSION, "method": method}
    content |= {"model_type": MODEL_TYPE, "architectures": [type(draft).__name__]}
    content |= {"draft": asdict(draft.config)} | asdict(info)
    staged, is_new = folder / STAGED, not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir()
        write_tensors(weights, staged / WEIGHTS, {"format": "pt"})
        content["weights_sha256"] = file_digest(staged / WEIGHTS)
        (staged / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
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
        size = sum(p.nbytes for p in weights.values()) / 1e6
        raise ValueError(f"out: no draft of {size:,.1f} MB can be written to {folder}: {reason}; make room") from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
        with suppress(OSError):  # it holds something, or was never made
            if is_new:
                folder.rmdir()


def local_folder(draft: str | Path, revision: str | None = None) -> Path:
    """Find a draft's folder: a local one, a hub repository `owner/name` at `revision` (unless `owner` is a local
    folder), or a draft that comes with longdraft. Raises ValueError if it is none of these."""
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
    """Names of the drafts that come with longdraft. They can be given wherever a draft folder can."""
    return sorted(path.parent.name for path in SHIPPED.glob(f"*/{CONFIG}"))


@cache
def _download(name: str, revision: str | None) -> Path:
    return hub_folder(name, [CONFIG, WEIGHTS], revision=revision, refusal=f"draft: {name} is no folder")


def read_info(folder: str | Path) -> DraftInfo:
    """Read config.json only. `folder` and errors as of `load_draft`."""
    return _read(local_folder(folder))[1]


def draft_method(folder: str | Path) -> str:
    """The method of a draft folder, which is its drafter's name. Errors as of `read_info`."""
    return _read(local_folder(folder))[0]


@overload
def load_draft(folder: str | Path, target: Target | None = None) -> Any: ...
@overload
def load_draft(folder: str | Path, target: Target | None, kind: type[D]) -> D: ...
def load_draft(folder: str | Path, target: Target | None = None, kind: type[Draft] | None = None) -> Draft:
    """Load the frozen network of a draft folder.

    A target with the same configuration and other weights is accepted with a warning: its text is exact with any draft.

    Args:
        folder: a folder or a name, as of `local_folder`.
        target: what it will draft for; the draft gets its dtype and device. None: as stored, on the CPU.
        kind: the class that the network must have; None for any.

    Raises:
        ValueError: no draft folder, another format, an unknown or another method, a damaged file, a field that is
            missing, unknown, invalid or larger than the weights allow, another target, or weights that do not fit, are
            of another folder or not finite. The message names the file and what to do.
    """
    folder = local_folder(folder)
    method, info, shape = _read(folder)
    config_type, network = DRAFTS[method]
    if kind not in (None, network):
        expected = next(name for name, (_, other) in DRAFTS.items() if other is kind)
        raise ValueError(f"draft: {folder} holds a draft of {method}; give one of {expected}")
    if target is not None:
        _check_target(folder, info.target, target_entry(target))
    weights = _read_weights(folder, info.weights_sha256)
    try:
        config: Any = validate(config_type, shape, "draft")
        _check_shape(config, weights, target)
        with torch.device("meta"):  # shapes only: the weights come from the file
            draft: Draft = network(config)
    except (TypeError, ValueError, KeyError, ArithmeticError, RuntimeError, StrictDataclassError) as error:
        raise ValueError(f"{folder / CONFIG}: {' '.join(str(error).split())}; export again") from error
    kinds = [{name: _kind(p) for name, p in tensors.items()} for tensors in (draft.state_dict(), weights)]
    if wrong := sorted(name for name in kinds[0] | kinds[1] if kinds[0].get(name) != kinds[1].get(name)):
        raise ValueError(
            f"{folder / WEIGHTS}: missing, unknown or of another shape or dtype: {', '.join(wrong[:8])}; export again"
        )
    draft.load_state_dict(weights, assign=True)
    if target is not None:
        weight = target.model.lm_head.weight
        draft = draft.to(weight.device, weight.dtype)
    return draft.requires_grad_(False).eval()


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    """What must be the same in the file and in the network; all floats that are not of 8 bits are alike."""
    return tensor.shape, (tensor.is_floating_point() and tensor.element_size() > 1) or tensor.dtype


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json. Raises ValueError if it is absent, too large, or no JSON object."""
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"draft: {folder} holds no {CONFIG}; give a folder that `longdraft export` wrote")
    with damage_named(path, remedy="copy it again, or export again"):
        if (size := path.stat().st_size) > MOST_BYTES:
            raise ValueError(f"{size:,} bytes")
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it holds no fields")
    return content


def _read(folder: Path) -> tuple[str, DraftInfo, Any]:
    """config.json: method, info, and the network's shape, which is not checked yet."""
    content = read_config(folder)
    version, method = content.get("format_version"), content.get("method")
    if version is None:
        raise ValueError(f"draft: {folder / CONFIG} has no format_version; give a folder that `longdraft export` wrote")
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise ValueError(f"draft: {folder / CONFIG} has another format_version than {FORMAT_VERSION}; export again")
    if not isinstance(method, str) or method not in DRAFTS:
        raise ValueError(f"draft: {folder / CONFIG} has an unknown method; known: {', '.join(DRAFTS)}")
    shape = ("format_version", "method", "draft", "model_type", "architectures")
    beside = {name: value for name, value in content.items() if name not in shape}
    try:
        return method, validate(DraftInfo, beside), content.get("draft")
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG}: {error}; export again") from error


def _read_weights(folder: Path, expected: str | None) -> dict[str, Tensor]:
    """The tensors of model.safetensors, on the CPU. expected: the file's digest; None if config.json has none."""
    path = folder / WEIGHTS
    if not path.is_file():
        raise ValueError(f"draft: {folder} holds no {WEIGHTS}; copy the whole folder, or export again")
    with damage_named(path, remedy="copy it again, or export again"):
        weights = load_file(path)
    if expected is not None and file_digest(path) != expected:  # after reading: a replaced file never comes back
        raise ValueError(f"{path}: not the weights that {CONFIG} was written with; copy the whole folder again")
    check_finite(weights, str(path))
    return weights


def check_finite(weights: Mapping[str, Tensor], where: str) -> None:
    """Raise ValueError that names the weights with NaN or infinite numbers. This takes one pass and no copy: a NaN
    anywhere makes both the minimum and the maximum NaN."""
    floating = {name: p for name, p in weights.items() if p.is_floating_point() and p.numel() and p.element_size() > 1}
    wrong = [name for name, p in floating.items() if not bool(torch.stack(torch.aminmax(p)).isfinite().all())]
    if wrong:
        raise ValueError(
            f"{where}: the draft has NaN or infinite weights ({', '.join(wrong[:3])}); export a good checkpoint"
        )


def _check_shape(config: Any, weights: Mapping[str, Tensor], target: Target | None) -> None:
    """Raise ValueError if a size is larger than every tensor, or a field differs from the target's."""
    largest = max((size for p in weights.values() for size in p.shape), default=0)
    for field in fields(config):
        value = getattr(config, field.name)
        most = len(weights) if field.name == "n_heads" and not isinstance(config, LongSpecConfig) else largest
        if isinstance(value, int) and field.name not in UNSEEN and value > most:
            raise ValueError(f"draft.{field.name}: larger than the weights in {WEIGHTS}")
    if target is None:
        return
    theirs = target.model.config
    expected = {name: getattr(theirs, name) for name in ("hidden_size", "rms_norm_eps") if hasattr(config, name)}
    if isinstance(config, LongSpecConfig):
        expected = shape_of(theirs) | {"rope": json.loads(json.dumps(dict(theirs.rope_of(-1).parameters)))}
    for name, value in expected.items():
        if getattr(config, name) != value:
            raise ValueError(f"draft.{name}: {getattr(config, name)}, and {target.name} has {value}")


def _check_target(folder: Path, trained_for: Mapping[str, str], target: Mapping[str, str]) -> None:
    """Compare the target that the folder names with the one at hand. Names may differ (a local copy of a hub model),
    hashes of configuration and tokenizer may not. Other weights are only warned of."""

    def show(entry: Mapping[str, str], keys: Sequence[str]) -> str:
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
            stacklevel=3,  # who called load_draft
        )
