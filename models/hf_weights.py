"""Reads the tensors of a Hugging Face folder, and copies each to its place in our decoder.

Hugging Face's tensor names are known here and nowhere else; the gguf library knows GGUF's (gguf_file.py).
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from pickle import UnpicklingError
from zipfile import is_zipfile

import torch
from safetensors import safe_open
from torch import Tensor, nn

from longdraft.models.decoder import Decoder
from longdraft.models.decoder_config import DecoderConfig, DeltaConfig, ExpertsConfig
from longdraft.models.files import damage_named

# TokenSwift's authors publish target and heads as one checkpoint; these tensors are the heads'.
TOKENSWIFT_HEADS = "model.medusa_layers."
# Parts that are not read: image encoders, and the layers with which Qwen3.5 and Qwen3-Next propose tokens (MTP).
NOT_OF_TEXT = "mtp.", *(f"{prefix}{part}." for prefix in ("", "model.") for part in (
    "vision_tower", "multi_modal_projector", "visual",
))  # fmt: skip
# RoPE's table, which old checkpoints carry, and the scales of activations and of fp8 caches, which a target in a plain
# dtype does not need: `input_scale` (all), `self_attn.kv_scale` (AutoFP8), `self_attn.k_scale`, `q_scale`
# (llm-compressor), `k_proj.k_scale` (ModelOpt), `k_proj.output_scale` (Quark, older llm-compressor),
# `prob_output_scale` (Quark), `attn.prob_scale` (vLLM).
NOT_READ = re.compile(r"\.((input|activation|(prob_)?output|prob|kv|[qkv])_(scale|zero_point)|rotary_emb\.inv_freq)$")
# A layer's norms: Hugging Face's names to ours. Gemma's post_attention_layernorm is not the norm that Llama calls so.
NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
GEMMA_NORMS = {
    "input_layernorm": "attention_norm", "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "mlp_norm", "post_feedforward_layernorm": "post_mlp_norm",
}  # fmt: skip
MIXTRAL_NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


@dataclass(frozen=True)
class Place:
    """Where a published tensor goes: rows [start, stop) of one of our parameters, or of one of its experts.

    stop: None for all rows from `start`. offset, factor: our numbers are (published + offset) * factor. transposed: the
    published tensor has its last two dimensions swapped. paired: in the published tensor rows of gate and up alternate;
    ours has all of gate first. heads: how many heads the first rows are, their width, and how many of a head's first
    numbers RoPE rotates, i with i + rotated / 2. Ours rotates i with i + width / 2, so that each half of a head has
    half of the rotated ones first.
    """

    parameter: str
    start: int = 0
    stop: int | None = None
    expert: int | None = None
    offset: float = 0.0
    factor: float = 1.0
    transposed: bool = False
    paired: bool = False
    heads: tuple[int, int, int] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the published tensor can be the parameter itself."""
        return self == Place(self.parameter)

    def value(self, tensor: Tensor) -> Tensor:
        """Our numbers for a published tensor."""
        if self.transposed:
            tensor = tensor.mT
        if self.paired:
            tensor = torch.cat((tensor[:, ::2], tensor[:, 1::2]), 1)
        if self.heads is not None:
            number, width, rotated = self.heads
            of_heads, others = tensor.split([number * width, len(tensor) - number * width])
            sizes = [rotated // 2] * 2 + [(width - rotated) // 2] * 2
            first, second, still, others_still = of_heads.unflatten(0, (number, width)).split(sizes, 1)
            halves = torch.cat([first, still, second, others_still], 1)
            tensor = torch.cat([halves.flatten(0, 1), others])
        return tensor if self.offset == 0.0 and self.factor == 1.0 else (tensor.float() + self.offset) * self.factor

    def rows(self, parameter: Tensor) -> Tensor:
        """The rows of the parameter's data that this place stands for: a view."""
        data = parameter.data if self.expert is None else parameter.data[self.expert]
        return data[self.start : self.stop]


def canonical(name: str) -> str:
    """A tensor's name without a vision model's prefix, and with the experts of Mixtral named as Qwen's."""
    name = name.replace("language_model.", "", 1)
    name = name.replace(".block_sparse_moe.", ".mlp.")
    for theirs, ours in MIXTRAL_NAMES.items():
        name = name.replace(f".{theirs}.weight", f".{ours}.weight")
    return name


def canonical_tensors(
    config: DecoderConfig, tensors: Iterable[tuple[str, Tensor]], loaded: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """The tensors under canonical names, without parts that are not read. One that holds several of the tensors in
    `places` is cut. loaded: as in `places`.

    Raises ValueError that names a tensor whose shape allows no cut."""
    for name, tensor in tensors:
        if name.startswith((TOKENSWIFT_HEADS, *NOT_OF_TEXT)) or NOT_READ.search(name):
            continue
        name, kind = canonical(name), "bias" if name.endswith(".bias") else "weight"
        module, _, last = name.removesuffix(f".{kind}").rpartition(".")
        parts = None
        try:
            if last in ("q_proj", "conv1d", "in_proj_qkvz", "in_proj_ba"):
                parts = _cut(config, last, tensor)
            elif module.endswith(".mlp.experts") and config.experts is not None and not (config.experts.bias or loaded):
                parts = _of_experts(config.experts, last, tensor)
        except (RuntimeError, IndexError) as error:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, which does not fit its configuration") from error
        if parts is None:
            yield name, tensor
        else:
            yield from ((f"{module}.{part}.{kind}", x) for part, x in parts.items())


def _cut(config: DecoderConfig, last: str, tensor: Tensor) -> dict[str, Tensor] | None:
    """The tensors that this one holds, by the last part of their names; None for itself."""
    if last == "q_proj" and config.gated:
        q, gate = tensor.unflatten(0, (config.n_heads, 2, -1)).unbind(1)
        return {"q_proj": q.flatten(0, 1), "gate_proj": gate.flatten(0, 1)}
    if config.delta is None or last == "q_proj":
        return None
    if last == "conv1d":
        return {last: tensor.squeeze(1)}
    # Qwen3-Next, where the rows of each key head lie together.
    n_heads, of_values = config.delta.key_heads, config.delta.value_heads // config.delta.key_heads
    of_heads = tensor.unflatten(0, (n_heads, -1))
    if last == "in_proj_ba":
        b, a = of_heads.split(of_values, 1)
        return {"in_proj_b": b.flatten(0, 1), "in_proj_a": a.flatten(0, 1)}
    *qkv, z = of_heads.split([config.delta.key_dim] * 2 + [of_values * config.delta.value_dim] * 2, 1)
    return {"in_proj_qkv": torch.cat([x.flatten(0, 1) for x in qkv]), "in_proj_z": z.flatten(0, 1)}


def _of_experts(config: ExpertsConfig, last: str, tensor: Tensor) -> dict[str, Tensor]:
    """The tensors of each expert, of one that holds all experts' (Qwen3.5; transposed Qwen3-VL)."""
    dimension, width = (1, 2 * config.size) if last == "gate_up_proj" else (2, config.size)
    if tensor.shape[dimension] != width:
        tensor = tensor.mT
    parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
    of_parts = [(part, x) for part, x in zip(parts, tensor.chunk(len(parts), 1), strict=True)]
    return {f"{i}.{part}": x for part, of_all in of_parts for i, x in enumerate(of_all)}


def places(config: DecoderConfig, loaded: bool = False) -> dict[str, Place]:
    """The place of every tensor that a checkpoint of this configuration must hold, by its Hugging Face name.

    loaded: use the names of a model that transformers has loaded, which stacks a layer's experts in one tensor.
    """
    table = {"model.embed_tokens.weight": Place("embed_tokens.weight"), "model.norm.weight": _norm(config, "norm")}
    if not config.tie_embeddings:
        table["lm_head.weight"] = Place("lm_head.weight")
    norms = GEMMA_NORMS if config.post_norms else NORMS
    for i in range(config.n_layers):
        theirs, ours = f"model.layers.{i}", f"layers.{i}"
        table |= {f"{theirs}.{name}.weight": _norm(config, f"{ours}.{norms[name]}") for name in norms}
        if config.delta is not None and i in config.delta.layers:
            table |= _delta_places(config.delta, f"{theirs}.linear_attn", f"{ours}.attention")
        else:
            table |= _attention_places(config, f"{theirs}.self_attn", f"{ours}.attention")
        if config.experts is not None and config.has_experts(i):
            table |= _expert_places(config.experts, f"{theirs}.mlp", f"{ours}.mlp", loaded)
            if (size := config.shared_expert_size) is not None:
                table |= _mlp_places(config, f"{theirs}.mlp.shared_expert", f"{ours}.mlp.shared", size)
                table[f"{theirs}.mlp.shared_expert_gate.weight"] = Place(f"{ours}.mlp.shared_gate.weight")
        else:
            table |= _mlp_places(config, f"{theirs}.mlp", f"{ours}.mlp", config.intermediate_size)
    return table


def _norm(config: DecoderConfig, parameter: str, factor: float = 1.0) -> Place:
    return Place(f"{parameter}.weight", offset=config.norm_offset, factor=factor)


def _attention_places(config: DecoderConfig, theirs: str, ours: str) -> dict[str, Place]:
    table = {}
    q_rows, kv_rows = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    kinds = ("weight", "bias") if config.attention_bias else ("weight",)
    for kind in kinds:
        parts = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        table |= _joined_places(config, theirs, ours, "qkv_proj", parts, kind)
    for kind in ("weight", "bias") if config.o_bias else ("weight",):
        table[f"{theirs}.o_proj.{kind}"] = Place(f"{ours}.o_proj.{kind}")
    if config.attention_sinks:
        table[f"{theirs}.sinks"] = Place(f"{ours}.sinks")
    if config.qk_norm:
        table[f"{theirs}.q_norm.weight"] = _norm(config, f"{ours}.q_norm", config.query_factor)
        table[f"{theirs}.k_norm.weight"] = _norm(config, f"{ours}.k_norm")
    for kind in kinds if config.gated else ():
        table[f"{theirs}.gate_proj.{kind}"] = Place(f"{ours}.gate_proj.{kind}")
    if config.rope.rotated < config.head_dim:
        heads = {"q_proj": config.n_heads, "k_proj": config.n_kv_heads, "q_norm": 1, "k_norm": 1}
        heads["qkv_proj"] = config.n_heads + config.n_kv_heads
        for name, place in table.items():
            if number := heads.get(name.split(".")[-2]):
                table[name] = replace(place, heads=(number, config.head_dim, config.rope.rotated))
    return table


def _delta_places(config: DeltaConfig, theirs: str, ours: str) -> dict[str, Place]:
    names = {
        "conv1d.weight": "conv", "A_log": "log_rate", "dt_bias": "decay_bias", "norm.weight": "norm.weight",
        "out_proj.weight": "o_proj.weight",
    }  # fmt: skip
    values = config.value_heads
    parts = {"in_proj_qkv": config.channels, "in_proj_z": values * config.value_dim}
    parts |= {"in_proj_b": values, "in_proj_a": values}
    table = {f"{theirs}.{name}": Place(f"{ours}.{own}") for name, own in names.items()}
    return table | _in_parts(theirs, f"{ours}.in_proj.weight", parts, "weight")


def _mlp_places(config: DecoderConfig, theirs: str, ours: str, width: int) -> dict[str, Place]:
    table = {}
    for kind in ("weight", "bias") if config.mlp_bias else ("weight",):
        table |= _joined_places(config, theirs, ours, "gate_up_proj", {"gate_proj": width, "up_proj": width}, kind)
        table[f"{theirs}.down_proj.{kind}"] = Place(f"{ours}.down_proj.{kind}")
    return table


def _joined_places(
    config: DecoderConfig, theirs: str, ours: str, name: str, parts: Mapping[str, int], kind: str
) -> dict[str, Place]:
    """The tensors of one parameter of ours, `name`: one of theirs too, or its parts with their numbers of rows."""
    parameter = f"{ours}.{name}.{kind}"
    if config.joined:
        return {f"{theirs}.{name}.{kind}": Place(parameter)}
    return _in_parts(theirs, parameter, parts, kind)


def _in_parts(theirs: str, parameter: str, parts: Mapping[str, int], kind: str) -> dict[str, Place]:
    """The places of a parameter's parts, given their numbers of rows in order."""
    stops = zip(parts, accumulate(parts.values()), strict=True)
    return {f"{theirs}.{part}.{kind}": Place(parameter, stop - parts[part], stop) for part, stop in stops}


def _expert_places(config: ExpertsConfig, theirs: str, ours: str, loaded: bool) -> dict[str, Place]:
    if config.bias:  # gpt-oss, whose products are x W
        return {
            f"{theirs}.router.weight": Place(f"{ours}.router"),
            f"{theirs}.router.bias": Place(f"{ours}.router_bias"),
            f"{theirs}.experts.gate_up_proj": Place(f"{ours}.gate_up_proj", transposed=True, paired=True),
            f"{theirs}.experts.gate_up_proj_bias": Place(f"{ours}.gate_up_bias", paired=True),
            f"{theirs}.experts.down_proj": Place(f"{ours}.down_proj", transposed=True),
            f"{theirs}.experts.down_proj_bias": Place(f"{ours}.down_bias"),
        }
    table = {f"{theirs}.gate.weight": Place(f"{ours}.router")}
    if loaded:
        return table | {f"{theirs}.experts.{name}": Place(f"{ours}.{name}") for name in ("gate_up_proj", "down_proj")}
    for expert in range(config.number):
        name, fused = f"{theirs}.experts.{expert}", f"{ours}.gate_up_proj"
        table[f"{name}.gate_proj.weight"] = Place(fused, 0, config.size, expert)
        table[f"{name}.up_proj.weight"] = Place(fused, config.size, 2 * config.size, expert)
        table[f"{name}.down_proj.weight"] = Place(f"{ours}.down_proj", expert=expert)
    return table


def fill(
    decoder: Decoder,
    tensors: Iterable[tuple[str, Tensor]],
    source: str,
    whole: Callable[[nn.Parameter], AbstractContextManager[Tensor]] = nullcontext,
    loaded: bool = False,
) -> None:
    """Copy a checkpoint's tensors, by Hugging Face name, into the decoder, cast to its dtype.

    A parameter is written once all of its tensors have been read, inside `whole`, which returns all its rows.
    The LM head of a tied checkpoint is not read. loaded: as in `places`.

    Raises ValueError that names `source` and every missing, unexpected or mis-shaped tensor.
    """
    table, parameters = places(decoder.config, loaded), dict(decoder.named_parameters())
    n_parts = Counter(place.parameter for place in table.values())
    waiting: dict[str, dict[str, Tensor]] = {}  # parameter -> its tensors read so far
    missing, problems = set(table), list[str]()
    for name, tensor in canonical_tensors(decoder.config, tensors, loaded):
        if decoder.config.tie_embeddings and name == "lm_head.weight":
            continue
        if name not in table:
            if not name.endswith(".bias") or tensor.any():  # AutoGPTQ writes zeros for layers without a bias
                problems.append(f"unexpected {name} {list(tensor.shape)}")
            continue
        missing.discard(name)
        parameter = table[name].parameter
        parts = waiting.setdefault(parameter, {})
        parts[name] = tensor
        if len(parts) == n_parts[parameter]:
            with whole(parameters[parameter]) as rows:
                for part, value in waiting.pop(parameter).items():
                    problems += _copy(value, part, table[part], rows)
    problems += [f"missing {name}" for name in table if name in missing]
    if problems:
        raise ValueError(f"{source} does not fit its configuration:\n  " + "\n  ".join(problems))


def _copy(tensor: Tensor, name: str, place: Place, parameter: Tensor) -> list[str]:
    """Copy a tensor to its place. Returns the problem, if its shape does not fit."""
    rows = place.rows(parameter)
    shape = rows.mT.shape if place.transposed else rows.shape
    if shape != tensor.shape:
        return [f"{name} has shape {list(tensor.shape)}, the configuration says {list(shape)}"]
    rows.copy_(place.value(tensor))
    return []


def folder_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a Hugging Face folder, one at a time, by name: of its safetensors files, sharded or not, else of
    its PyTorch .bin files. Raises ValueError if there are none, and for a file that is missing or cannot be read."""
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        index, files = folder / f"{stem}.{suffix}.index.json", [folder / f"{stem}.{suffix}"]
        if not files[0].exists() and index.exists():
            with damage_named(index):
                files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        elif not files[0].exists():
            continue
        for file in files:
            yield from file_tensors(file)
        return
    raise ValueError(f"{folder} holds no weights; fetch model.safetensors, pytorch_model.bin or one's index and shards")


def file_tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one file of weights. Raises ValueError with the file's name if it cannot be read."""
    with damage_named(file):
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a dict)
                    yield name, opened.get_tensor(name)
        else:
            # Memory-mapped like safetensors, except the format before PyTorch 1.6, which cannot be.
            try:
                yield from torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file)).items()
            except UnpicklingError:  # whose text advises to run the file's code
                raise ValueError("not a file of PyTorch's, or one with more than tensors") from None
