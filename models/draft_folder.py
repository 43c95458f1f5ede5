"""The exported form of a draft, written by training and read by the runtime: config.json and model.safetensors.

Nothing in it is pickled. draft_files.py reads and writes the two files, draft_checks.py refuses what does not fit.
"""

import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from huggingface_hub.errors import StrictDataclassError

from longdraft.models.draft_checks import check_fields, check_header, check_shape, check_sizes, check_target, check_tree
from longdraft.models.draft_files import (
    CONFIG,
    STAGED,
    WEIGHTS,
    read_config,
    read_header,
    read_weights,
    shown,
    write_pair,
)
from longdraft.models.drafts.longspec import LongSpec, LongSpecConfig
from longdraft.models.drafts.medusa import Medusa, MedusaConfig
from longdraft.models.drafts.tokenswift import TokenSwift, TokenSwiftConfig
from longdraft.models.fingerprint import weights_hash
from longdraft.models.hub import hub_folder
from longdraft.models.quantised import read_quantisation
from longdraft.models.target import Target

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
D = TypeVar("D", TokenSwift, LongSpec, Medusa)
# Seconds after which a folder that is being replaced is consistent again.
SWAP_S = 0.1


@dataclass(frozen=True)
class DraftInfo:
    """What config.json says beside the network's shape.

    Attributes:
        target: name, config_sha256 and tokenizer_sha256; weights_sha256, of a sample of the target's weights
            (fingerprint.py), if it is known; loader, if another than our decoder computed the target.
        train_length: tokens of a training row.
        tree: the drafter's default. "levels": ranks in each level; for LongSpec the widths of its beam. "rank_rates":
            [level][rank], the fraction of held-out positions whose text had that rank. "choice_rates": the same for the
            target's own choices, which acceptance depends on.
        versions, train_config: how the draft was made.
        noise: largest noise shift in training; None if the method has none.
        weights_sha256: of model.safetensors. None in older folders.
        step: how many steps it was trained. None in older folders.
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
    return entry if target.loader == "longdraft" else entry | {"loader": target.loader}


def save_draft(
    folder: str | Path, draft: Draft, info: DraftInfo, check: Callable[[Path], None] = lambda staged: None
) -> None:
    """Write both files, or change nothing and raise: ValueError as `write_pair`, or what `check` raises. It is called
    with the folder of the new files before they replace older ones."""
    method = next(name for name, (_, network) in DRAFTS.items() if isinstance(draft, network))
    # model_type and architectures tell transformers, and what builds on it such as vLLM, which network this is.
    content = {"format_version": FORMAT_VERSION, "method": method}
    content |= {"model_type": MODEL_TYPE, "architectures": [type(draft).__name__]}
    content |= {"draft": asdict(draft.config)} | asdict(info)
    write_pair(folder, lambda digest: content | {"weights_sha256": digest}, draft.state_dict(), check)


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
    folder = local_folder(folder)
    return _info(folder, _read(folder))


def draft_method(folder: str | Path) -> str:
    """The method of a draft folder, which is its drafter's name. Errors as of `read_info`."""
    read_info(folder)  # refuses what is no draft folder
    return _read(local_folder(folder))["method"]


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
            missing, unknown, of another type or larger than the weights allow, another target, or weights that do not
            fit, are of another folder or not finite. The message names the file and what to do.
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
    return _load(folder, again, target, kind)  # the folder was just being replaced


def _load(folder: Path, content: dict[str, Any], target: Target | None, kind: type[Draft] | None) -> Draft:
    method, values = content["method"], content.get("draft")
    config_type, network = DRAFTS[method]
    if kind not in (None, network):
        expected = next(name for name, (_, other) in DRAFTS.items() if other is kind)
        raise ValueError(f"draft: {folder} holds a draft of {method}; give one of {expected}")
    info = _info(folder, content)
    if target is not None:
        check_target(folder, info.target, target_entry(target))
    check_fields(folder, "draft", config_type, values)
    assert isinstance(values, dict)
    if target is not None:
        check_shape(folder, method, values, target)
    header = read_header(folder)
    check_sizes(folder, method, values, header)
    try:
        with torch.device("meta"):  # shapes only: the weights come from the file
            draft: Draft = network(config_type(**values))
    except (TypeError, ValueError, KeyError, ArithmeticError, RuntimeError, StrictDataclassError) as error:
        raise ValueError(f"{folder / CONFIG}: {' '.join(str(error).split())}; export again") from error
    check_header(folder, draft.state_dict(), header)
    draft.load_state_dict(read_weights(folder, info.weights_sha256), assign=True)
    if target is not None:
        weight = target.model.lm_head.weight
        draft = draft.to(weight.device, weight.dtype)
    return draft.requires_grad_(False).eval()


def _read(folder: Path) -> dict[str, Any]:
    """config.json, if it has our format, our version and a known method."""
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
    """The fields beside the network's shape. Unknown fields of config.json are refused."""
    shape = ("format_version", "method", "draft", "model_type", "architectures")
    beside = {name: value for name, value in content.items() if name not in shape}
    check_fields(folder, "", DraftInfo, beside)
    if "draft" not in content:
        raise ValueError(f"{folder / CONFIG}: lacks draft; export again")
    info = DraftInfo(**beside)
    check_tree(folder, info.tree)
    return info
