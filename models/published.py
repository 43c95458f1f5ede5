"""Converts drafts that their authors published to draft folders: LongSpec's blocks, TokenSwift's merged checkpoints.

This file knows where they come from, which targets they are for, and what the folder says of them. LongSpec's tensor
names are in published_longspec.py, the folder's form in draft_folder.py.
"""

import re
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from longdraft.models.draft_folder import CONFIG, Draft, DraftInfo, check_out, read_config, save_draft, target_entry
from longdraft.models.drafts.longspec import LongSpecConfig
from longdraft.models.drafts.tokenswift import TokenSwift, TokenSwiftConfig
from longdraft.models.hf import METADATA, describe_target, lasting_name, read_target_config
from longdraft.models.hf_weights import TOKENSWIFT_HEADS, folder_tensors
from longdraft.models.hub import hub_folder
from longdraft.models.published_longspec import load_published, read_file
from longdraft.models.target import Target

# LongSpec's repositories and their targets, as the authors' program pairs them.
LONGSPEC_TARGETS = {
    "sail/longspec-vicuna-7b-v1.5-16k": "lmsys/vicuna-7b-v1.5-16k",
    "sail/longspec-vicuna-13b-v1.5-16k": "lmsys/vicuna-13b-v1.5-16k",
    "sail/longspec-longchat-7b-v1.5-32k": "lmsys/longchat-7b-v1.5-32k",
    "sail/longspec-longchat-13b-16k": "lmsys/longchat-13b-16k",
    "sail/longspec-Llama-3-8B-Instruct-262k": "gradientai/Llama-3-8B-Instruct-262k",
    "sail/longspec-QwQ-32B-Preview": "Qwen/QwQ-32B-Preview",
}
# How the drafts were trained and are used, from the papers (LongSpec: Appendix E; TokenSwift: Tables 7 and 9).
LONGSPEC_TREE, LONGSPEC_NOISE, LONGSPEC_LENGTH = [4, 16, 16, 16, 16], 4, 32768
TOKENSWIFT_RANKS, TOKENSWIFT_LENGTH = 3, 8192
HEAD = re.compile(re.escape(TOKENSWIFT_HEADS) + r"(\d+)\.(linear|input_layernorm|post_layernorm)\.weight")
OUR_PARTS = {"linear": "proj", "input_layernorm": "in_norm", "post_layernorm": "out_norm"}


def convert(
    source: str | Path,
    out: str | Path,
    target: str | None = None,
    gguf_file: str | None = None,
    norms: Sequence[str] | None = None,
) -> tuple[Draft, DraftInfo]:
    """Write the draft folder of a published draft, completely or not at all.

    Args:
        source: a file of weights or a folder, as it was published, or a hub name.
        target, gguf_file: the model that the draft is for. None: as the authors pair them; for TokenSwift's merged
            checkpoint, the checkpoint itself, which has its target's weights. A base named instead must have the same.
        norms: names of LongSpec's norms, as of `load_published`.

    Returns: the draft and what its folder says of it.
    Raises: ValueError if the source cannot be had, is no published draft or is for another target, or if `out` cannot
        be written. It names tensors and files.
    """
    check_out(out)
    place, name = _fetch(source)
    merged = _is_merged(place)
    if merged and norms is not None:
        raise ValueError("norms: those of a LongSpec draft, and this is TokenSwift's checkpoint; leave them out")
    if merged:
        draft, entry, path = _tokenswift(place, name, target, gguf_file)
    else:
        draft, entry, path = _longspec(place, name, target, gguf_file, norms)
    block = isinstance(draft.config, LongSpecConfig)
    info = DraftInfo(
        target=entry,
        train_length=LONGSPEC_LENGTH if block else TOKENSWIFT_LENGTH,
        tree={"levels": LONGSPEC_TREE if block else [TOKENSWIFT_RANKS] * draft.config.n_heads},
        versions={name: version(name) for name in ("longdraft", "torch")},
        train_config={
            "target": {"path": lasting_name(path), "gguf_file": gguf_file},
            "converted_from": name or place.name,
        },
        noise=LONGSPEC_NOISE if block else None,
    )
    save_draft(out, draft, info)
    return draft, info


def _fetch(source: str | Path) -> tuple[Path, str | None]:
    """The file or folder, and its hub name if it was downloaded from there because it is not on this machine."""
    local = Path(source).expanduser()
    if local.exists():
        return local, None
    name, weights = str(source), [["*.safetensors"], ["*.bin", "*.pth"]]
    return hub_folder(name, METADATA, weights, refusal=f"source: {name} is no file and no folder"), name


def _is_merged(path: Path) -> bool:
    """Whether this folder is a model with TokenSwift's heads in it."""
    return (path / CONFIG).is_file() and "medusa_heads" in read_config(path)


def _longspec(
    place: Path, name: str | None, target: str | None, gguf_file: str | None, norms: Sequence[str] | None
) -> tuple[Draft, dict[str, str], str]:
    """The block, how its folder names the target (`target_entry`), and the target's name or path."""
    path = target or LONGSPEC_TARGETS.get(name or "")
    if path is None:
        raise ValueError(
            f"target: {place} does not say which model it is for; name that (the authors pair "
            f"{'; '.join(f'{draft} with {own}' for draft, own in LONGSPEC_TARGETS.items())})"
        )
    known = describe_target(path, gguf_file)
    if place.is_dir():
        _compare_rope(place, known)
    config = LongSpecConfig.for_target(known.model.config, noise=LONGSPEC_NOISE)
    return load_published(_weights(place), config, norms, str(place), known.name), target_entry(known), path


def _weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, or of a folder: its only .pth file, or files as `save_pretrained` writes them."""
    if path.is_file():
        return dict(read_file(path))
    pickles = sorted(path.glob("*.pth"))
    if len(pickles) == 1 and not any(path.glob("*.safetensors")):
        return dict(read_file(pickles[0]))
    return dict(folder_tensors(path))


def _compare_rope(folder: Path, target: Target) -> None:
    """Warn if the configuration beside the draft has another RoPE than the target. Vicuna's and LongChat's tensors have
    the same shapes, so nothing else tells them apart."""
    if not (folder / CONFIG).is_file():
        return
    try:
        config = read_target_config(folder)
    except ValueError:  # of an unknown kind of model: the tensors' shapes must do
        return
    theirs, ours = dict(config.rope.parameters), dict(target.model.config.rope.parameters)
    if theirs != ours:
        warnings.warn(
            f"{folder / CONFIG} has the RoPE {theirs}, and {target.name} has {ours}: where the draft was not trained "
            "for this target, it guesses badly; check --target",
            stacklevel=2,
        )


def _tokenswift(
    folder: Path, name: str | None, base: str | None, gguf_file: str | None
) -> tuple[Draft, dict[str, str], str]:
    """The heads of a merged checkpoint, and what `_longspec` returns beside the block. Reads only as much of the target
    as tells it from others."""
    merged = describe_target(folder, sample=True)
    count = merged.hf_config.to_dict()["medusa_heads"]
    if type(count) is not int or count < 1:
        raise ValueError(f"{folder / CONFIG}: medusa_heads is {count!r}, not a number of heads; download it again")
    config = TokenSwiftConfig(merged.model.config.hidden_size, merged.model.config.rms_norm_eps, n_heads=count)
    with torch.device("meta"):
        draft = TokenSwift(config)
    draft.load_state_dict(_heads(folder, draft), assign=True)
    if base is None:
        return draft, target_entry(merged) | {"name": name or merged.name}, name or str(folder)
    known = describe_target(base, gguf_file, sample=True)
    different = [part for part in ("config", "weights") if known.fingerprint[part] != merged.fingerprint[part]]
    if different:
        raise ValueError(
            f"target: {base} has another {' and other '.join(different)} than {folder}, in which the heads were "
            "trained; name their base, or leave it out: the checkpoint is then the draft's target itself"
        )
    return draft, target_entry(known), base


def _heads(folder: Path, draft: TokenSwift) -> dict[str, Tensor]:
    """The heads' tensors by our names. Raises ValueError that names what is missing, unknown or of another shape."""
    shapes = {name: list(parameter.shape) for name, parameter in draft.state_dict().items()}
    tensors: dict[str, Tensor] = {}
    problems = []
    for name, tensor in folder_tensors(folder, lambda name: name.startswith(TOKENSWIFT_HEADS)):
        if not name.startswith(TOKENSWIFT_HEADS):
            continue
        match = HEAD.fullmatch(name)
        ours = f"{OUR_PARTS[match[2]]}.{match[1]}.weight" if match else name
        if ours not in shapes:
            problems.append(f"unknown {name}")
        elif list(tensor.shape) != shapes[ours]:
            problems.append(f"{name} has shape {list(tensor.shape)}, the configuration says {shapes[ours]}")
        tensors[ours] = tensor
    theirs = {ours: part for part, ours in OUR_PARTS.items()}
    for name in shapes.keys() - tensors.keys():
        part, head, _ = name.split(".")
        problems.append(f"missing {TOKENSWIFT_HEADS}{head}.{theirs[part]}.weight")
    if problems:
        shown = "\n  ".join(sorted(problems)[:12])
        raise ValueError(f"{folder} does not hold {draft.config.n_heads} heads of TokenSwift's:\n  {shown}")
    return tensors
