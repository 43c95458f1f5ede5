"""Where each tensor of a Hugging Face checkpoint goes in our decoder, and the copying.

Foreign names are known here and nowhere else; GGUF's are the gguf library's (gguf_file.py). Not here: finding files
(hf.py), reading configurations (hf_config.py).
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from longdraft.models.decoder import Decoder
from longdraft.models.decoder_config import DecoderConfig, ExpertsConfig

# TokenSwift's authors publish target and heads as one checkpoint; of a target these tensors are no part.
TOKENSWIFT_HEADS = "model.medusa_layers."
# Gemma 3's larger models read images too; these tensors do so.
OF_IMAGES = tuple(f"{prefix}{part}." for prefix in ("", "model.") for part in ("vision_tower", "multi_modal_projector"))
MIXTRAL_NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
# Of what quantised checkpoints hold; safetensors' names.
_DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I32": torch.int32, "U8": torch.uint8}


@dataclass(frozen=True)
class Place:
    """Rows [start, stop) of one of our parameters, or of one of its experts; the whole of it when stop is None. What
    stands there is (published + offset) * factor; `transposed`: of it the last two dimensions in the other order;
    `paired`: of what gate and up are in turns there the rows of the gate, then those of up."""

    parameter: str
    start: int = 0
    stop: int | None = None
    expert: int | None = None
    offset: float = 0.0
    factor: float = 1.0
    transposed: bool = False
    paired: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether a published tensor can be the parameter itself."""
        return self.stop is None and self.expert is None and self._as_published

    @property
    def _as_published(self) -> bool:
        return self.offset == 0.0 and self.factor == 1.0 and not (self.transposed or self.paired)

    def value(self, tensor: Tensor) -> Tensor:
        """What becomes of a published tensor here."""
        if self.transposed:
            tensor = tensor.mT
        if self.paired:
            tensor = torch.cat((tensor[:, ::2], tensor[:, 1::2]), 1)
        return tensor if self.offset == 0.0 and self.factor == 1.0 else (tensor.float() + self.offset) * self.factor

    def rows(self, parameter: Tensor) -> Tensor:
        """The place in the parameter's data, a view."""
        data = parameter.data if self.expert is None else parameter.data[self.expert]
        return data[self.start : self.stop]


def canonical(name: str) -> str:
    """Mixtral's published names of experts, as Qwen's are, and those of a language model beside one of images."""
    name = name.replace("language_model.", "", 1)
    name = name.replace(".block_sparse_moe.", ".mlp.")
    for theirs, ours in MIXTRAL_NAMES.items():
        name = name.replace(f".{theirs}.weight", f".{ours}.weight")
    return name


def places(config: DecoderConfig, loaded: bool = False) -> dict[str, Place]:
    """Hugging Face tensor name to its place, for every tensor a checkpoint of this configuration must hold.

    loaded: as a loaded model of transformers names them, which has an experts' tensors stacked.
    """

    def norm(parameter: str, factor: float = 1.0) -> Place:
        return Place(f"{parameter}.weight", offset=config.norm_offset, factor=factor)

    table = {"model.embed_tokens.weight": Place("embed_tokens.weight"), "model.norm.weight": norm("norm")}
    if not config.tie_embeddings:
        table["lm_head.weight"] = Place("lm_head.weight")
    q_rows, kv_rows = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    qkv_kinds = ("weight", "bias") if config.attention_bias else ("weight",)
    o_kinds = ("weight", "bias") if config.o_bias else ("weight",)
    mlp_kinds = ("weight", "bias") if config.mlp_bias else ("weight",)
    for i in range(config.n_layers):
        theirs, ours = f"model.layers.{i}", f"layers.{i}"
        table[f"{theirs}.input_layernorm.weight"] = norm(f"{ours}.attention_norm")
        if config.post_norms:
            table[f"{theirs}.post_attention_layernorm.weight"] = norm(f"{ours}.post_attention_norm")
            table[f"{theirs}.pre_feedforward_layernorm.weight"] = norm(f"{ours}.mlp_norm")
            table[f"{theirs}.post_feedforward_layernorm.weight"] = norm(f"{ours}.post_mlp_norm")
        else:
            table[f"{theirs}.post_attention_layernorm.weight"] = norm(f"{ours}.mlp_norm")
        for kind in qkv_kinds:
            fused = f"{ours}.attention.qkv_proj.{kind}"
            table[f"{theirs}.self_attn.q_proj.{kind}"] = Place(fused, 0, q_rows)
            table[f"{theirs}.self_attn.k_proj.{kind}"] = Place(fused, q_rows, q_rows + kv_rows)
            table[f"{theirs}.self_attn.v_proj.{kind}"] = Place(fused, q_rows + kv_rows, q_rows + 2 * kv_rows)
        for kind in o_kinds:
            table[f"{theirs}.self_attn.o_proj.{kind}"] = Place(f"{ours}.attention.o_proj.{kind}")
        if config.attention_sinks:
            table[f"{theirs}.self_attn.sinks"] = Place(f"{ours}.attention.sinks")
        if config.qk_norm:
            table[f"{theirs}.self_attn.q_norm.weight"] = norm(f"{ours}.attention.q_norm", config.query_factor)
            table[f"{theirs}.self_attn.k_norm.weight"] = norm(f"{ours}.attention.k_norm")
        if config.experts is not None and config.has_experts(i):
            table |= _expert_places(config.experts, f"{theirs}.mlp", f"{ours}.mlp", loaded)
            continue
        for kind in mlp_kinds:
            fused, width = f"{ours}.mlp.gate_up_proj.{kind}", config.intermediate_size
            table[f"{theirs}.mlp.gate_proj.{kind}"] = Place(fused, 0, width)
            table[f"{theirs}.mlp.up_proj.{kind}"] = Place(fused, width, 2 * width)
            table[f"{theirs}.mlp.down_proj.{kind}"] = Place(f"{ours}.mlp.down_proj.{kind}")
    return table


def _expert_places(of: ExpertsConfig, theirs: str, ours: str, loaded: bool) -> dict[str, Place]:
    if of.bias:  # gpt-oss, whose products are x W
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
    for expert in range(of.number):
        name, fused = f"{theirs}.experts.{expert}", f"{ours}.gate_up_proj"
        table[f"{name}.gate_proj.weight"] = Place(fused, 0, of.size, expert)
        table[f"{name}.up_proj.weight"] = Place(fused, of.size, 2 * of.size, expert)
        table[f"{name}.down_proj.weight"] = Place(f"{ours}.down_proj", expert=expert)
    return table


def fill(
    decoder: Decoder,
    tensors: Iterable[tuple[str, Tensor]],
    source: str,
    whole: Callable[[nn.Parameter], AbstractContextManager[object]] = nullcontext,
    loaded: bool = False,
) -> None:
    """Copy a checkpoint's tensors (Hugging Face names) into the decoder, casting to its dtype: each as it comes; with
    `whole`, within which a parameter has all of its rows, all of a parameter at once. loaded: as of `places`.

    Raises: ValueError that names every missing, unexpected or mis-shaped tensor and `source`.
    """
    table, parameters = places(decoder.config, loaded), dict(decoder.named_parameters())
    n_parts = Counter(place.parameter for place in table.values())
    waiting: dict[str, list[tuple[str, Tensor]]] = {}  # parameter -> its parts that have come
    filled: set[str] = set()
    problems: list[str] = []
    head: Tensor | None = None  # of a tied checkpoint that carries one

    def copy(parameter: str) -> None:
        with whole(parameters[parameter]):
            for name, tensor in waiting.pop(parameter):
                rows = table[name].rows(parameters[parameter])
                shape = rows.mT.shape if table[name].transposed else rows.shape
                if shape != tensor.shape:
                    problems.append(f"{name} has shape {list(tensor.shape)}, the configuration says {list(shape)}")
                else:
                    rows.copy_(table[name].value(tensor))

    for name, tensor in tensors:
        if name.endswith("rotary_emb.inv_freq") or name.startswith((TOKENSWIFT_HEADS, *OF_IMAGES)):
            continue  # old checkpoints carry the RoPE table
        name = canonical(name)
        if decoder.config.tie_embeddings and name == "lm_head.weight":
            head = tensor
            continue
        if name not in table:
            problems.append(f"unexpected {name} {list(tensor.shape)}")
            continue
        parameter = table[name].parameter
        parts = waiting.setdefault(parameter, [])
        parts.append((name, tensor))
        filled.add(name)
        if whole is nullcontext or len(parts) == n_parts[parameter]:
            copy(parameter)
    for parameter in list(waiting):
        copy(parameter)
    problems += [f"missing {name}" for name in table if name not in filled]
    embedding = parameters["embed_tokens.weight"]  # whole, wherever the layers' weights are
    if head is not None and not problems and not _is_same(embedding, head):
        problems.append("lm_head.weight is not the embedding: tie_word_embeddings must be false in config.json")
    if problems:
        raise ValueError(f"{source} does not fit its configuration:\n  " + "\n  ".join(problems))


def _is_same(embedding: Tensor, head: Tensor) -> bool:
    if embedding.is_meta or head.is_meta:  # names and shapes are all that is asked
        return True
    return embedding.shape == head.shape and torch.equal(embedding, head.to(embedding))


def folder_tensors(folder: Path, wanted: Callable[[str], bool] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a Hugging Face folder, one at a time: safetensors (sharded or not), else PyTorch .bin files.

    Args:
        wanted: by name, which are read; the others come without numbers, on the meta device. None: all.
    Raises: ValueError where there are no weights or a shard of the index is missing.
    """
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        index = folder / f"{stem}.{suffix}.index.json"
        if (folder / f"{stem}.{suffix}").exists():
            files = [folder / f"{stem}.{suffix}"]
        elif index.exists():
            files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        else:
            continue
        absent = [file.name for file in files if not file.exists()]
        if absent:
            raise ValueError(f"{folder} lacks shards that {index.name} lists: {', '.join(absent)}")
        for file in files:
            if suffix == "safetensors":
                yield from _safetensors(file, wanted)
            else:
                yield from torch.load(file, map_location="cpu", weights_only=True, mmap=True).items()
        return
    raise ValueError(f"{folder} holds no weights: expected model.safetensors, pytorch_model.bin or their index.json")


def _safetensors(file: Path, wanted: Callable[[str], bool] | None) -> Iterator[tuple[str, Tensor]]:
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 (not a dict)
            if wanted is None or wanted(name):
                yield name, opened.get_tensor(name)
            else:
                part = opened.get_slice(name)
                yield name, torch.empty(part.get_shape(), dtype=_DTYPES.get(part.get_dtype()), device="meta")
