"""Converts drafts that their authors published to draft folders: LongSpec's blocks, TokenSwift's merged checkpoints.

LongSpec's tensor names come from descriptions of the authors' program. They are tested only on files that tests make.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.draft_folder import CONFIG, Draft, DraftInfo, check_out, read_config, save_draft, target_entry
from longdraft.models.drafts.heads import TokenSwift, TokenSwiftConfig
from longdraft.models.drafts.longspec import LongSpec, LongSpecConfig
from longdraft.models.files import damage_named
from longdraft.models.hf import METADATA, lasting_name, read_target
from longdraft.models.hf_weights import TOKENSWIFT_HEADS, file_tensors, folder_tensors
from longdraft.models.hub import hub_folder

# How the drafts were trained and are used, from the papers (LongSpec: Appendix E; TokenSwift: Tables 7 and 9).
LONGSPEC_TREE, LONGSPEC_NOISE, LONGSPEC_LENGTH = [4, 16, 16, 16, 16], 4, 32768
TOKENSWIFT_RANKS, TOKENSWIFT_LENGTH = 3, 8192
# LongSpec's tensors. Anything before these names is a prefix (`glide.`, `draft_model.`, ...). Cross-attention's k and v
# were never used.
PART = re.compile(
    r"(?:^|\.)((?:(?:self|cross)_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj)\.(?:weight|bias)|\w*norm\w*\.weight)$"
)
UNUSED = re.compile(r"(?:^|\.)(?:cross_attn\.[kv]_proj\.(?:weight|bias)|rotary_emb\.inv_freq)$")
# The known names of the norms before self-attention, cross-attention and feed-forward.
NORM_NAMES = (
    ("input_layernorm", "cross_attn_layernorm", "post_attention_layernorm"),
    ("input_layernorm", "post_attention_layernorm", "post_cross_attn_layernorm"),
    ("input_layernorm", "post_self_attention_layernorm", "post_cross_attention_layernorm"),
    ("norm1", "norm2", "norm3"),
)
# Our tensors, and the published ones that each concatenates.
FUSED = {
    "self_qkv.weight": [f"self_attn.{x}_proj.weight" for x in "qkv"],
    "self_qkv.bias": [f"self_attn.{x}_proj.bias" for x in "qkv"],
    "self_o.weight": ["self_attn.o_proj.weight"],
    "cross_q.weight": ["cross_attn.q_proj.weight"],
    "cross_q.bias": ["cross_attn.q_proj.bias"],
    "cross_o.weight": ["cross_attn.o_proj.weight"],
    "gate_up.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "down.weight": ["mlp.down_proj.weight"],
}
# TokenSwift's tensors, and our names for their parts.
HEAD = re.compile(re.escape(TOKENSWIFT_HEADS) + r"(\d+)\.(linear|input_layernorm|post_layernorm)\.weight")
OUR_PARTS = {"linear": "proj", "input_layernorm": "in_norm", "post_layernorm": "out_norm"}
D = TypeVar("D", TokenSwift, LongSpec)


def convert(source: str | Path, out: str | Path, target: str | None = None) -> tuple[Draft, DraftInfo]:
    """Write the draft folder of a published draft, completely or not at all. The target's weights are not read.

    Args:
        source: a file of weights or a folder as published, or a hub name.
        target: the model that the draft is for. None for TokenSwift's merged checkpoint, which has its target's
            weights: the checkpoint itself.

    Returns: the draft and what its folder says of it.
    Raises: ValueError if the source cannot be read or downloaded, is not a published draft or is for another target, or
        if `out` cannot be written. The message names tensors and files.
    """
    check_out(out)
    place, name = Path(source).expanduser(), None
    if not place.exists():
        name, weights = str(source), [["*.safetensors"], ["*.bin", "*.pth"]]
        place = hub_folder(name, METADATA, weights, refusal=f"source: {name} is neither a file nor a folder")
    n_heads = read_config(place).get("medusa_heads") if (place / CONFIG).is_file() else None
    path = target or (None if n_heads is None else name or str(place))
    if path is None:
        raise ValueError(f"target: {place} does not say which model it is for; give that model")
    known = read_target(path)
    assert known is not None  # only transformers' loader reads families that our decoder does not know
    shape = known.model.config
    if n_heads is None:
        config = LongSpecConfig.for_target(shape, noise=LONGSPEC_NOISE)
        draft: Draft = published_block(published_tensors(place), config, str(place))
        tree, length, noise = LONGSPEC_TREE, LONGSPEC_LENGTH, LONGSPEC_NOISE
    else:
        draft = _heads(place, shape, n_heads)
        tree, length, noise = [TOKENSWIFT_RANKS] * n_heads, TOKENSWIFT_LENGTH, None
    versions = {package: version(package) for package in ("longdraft", "torch")}
    train_config = {"converted_from": name or place.name, "target": {"path": lasting_name(path)}}
    info = DraftInfo(target_entry(known), length, {"levels": tree}, versions, train_config, noise)
    save_draft(out, draft, info)
    return draft, info


def published_tensors(place: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors by name of a file, or of a folder: its only .pth file, or files as `save_pretrained` writes them."""
    pickles = sorted(place.glob("*.pth"))
    if place.is_dir() and len(pickles) != 1:
        return folder_tensors(place)
    return file_tensors(pickles[0] if pickles else place)


def published_block(tensors: Iterable[tuple[str, Tensor]], config: LongSpecConfig, source: str) -> LongSpec:
    """LongSpec's block from the tensors of a published one.

    Args:
        config: the block's shape, from the target that it was trained for.
        source: what errors call the tensors.

    Raises: ValueError if a tensor is missing, unknown, duplicated or mis-shaped, or the norms' names do not tell where
        each belongs. The message lists the names.
    """
    theirs = dict[str, Tensor]()
    for name, tensor in tensors:
        if not UNUSED.search(name):
            part = PART.search(name)
            theirs[part[1] if part and part[1] not in theirs else name] = tensor
    norms = next((names for names in NORM_NAMES if {f"{name}.weight" for name in names} <= theirs.keys()), ())
    ours = zip(("self_norm", "cross_norm", "mlp_norm"), norms, strict=False)
    parts = FUSED | {f"{our_name}.weight": [f"{name}.weight"] for our_name, name in ours}
    expected = {name for names in parts.values() for name in names}
    problems = [f"unknown: {name}" for name in theirs if name not in expected]
    problems += [f"missing: {name}" for name in sorted(expected - theirs.keys())]
    if problems or not norms:
        raise ValueError(f"{source} is not a LongSpec draft with known tensor names: {'; '.join(problems[:8])}")
    with torch.device("meta"):
        draft = LongSpec(config)
    joined = {name: torch.cat([theirs[one] for one in names]) for name, names in parts.items()}
    return _filled(draft, joined, source)


def _heads(folder: Path, shape: DecoderConfig, n_heads: int) -> TokenSwift:
    """The heads of a merged checkpoint whose target has this shape."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in folder_tensors(folder):
        if name.startswith(TOKENSWIFT_HEADS):
            match = HEAD.fullmatch(name)
            tensors[f"{OUR_PARTS[match[2]]}.{match[1]}.weight" if match else name] = tensor
    with torch.device("meta"):
        draft = TokenSwift(TokenSwiftConfig(shape.hidden_size, shape.rms_norm_eps, n_heads=n_heads))
    return _filled(draft, tensors, str(folder))


def _filled(draft: D, weights: Mapping[str, Tensor], source: str) -> D:
    """The meta-device draft with these weights."""
    with damage_named(Path(source), remedy="give the target that it was trained for"):
        draft.load_state_dict(weights, assign=True)
    return draft
