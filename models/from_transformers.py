"""target_from_transformers: a model that transformers has loaded, as our decoder over the model's own tensors."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from longdraft.models.decoder import Decoder
from longdraft.models.fingerprint import fingerprint
from longdraft.models.hf_config import decoder_config
from longdraft.models.hf_weights import canonical, fill, places
from longdraft.models.special_tokens import end_tokens
from longdraft.models.target import Target


def target_from_transformers(model: Any, tokenizer: Any = None) -> Target:
    """A target with the weights of a loaded transformers model, in its dtype and on its device.

    Embedding, norms, output and down projections and the LM head share the model's tensors. q, k and v are one tensor
    here, and so are gate and up; these are copied, about two thirds of the layers' bytes once more. After the model's
    weights change, call `refresh`.

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
    _share(decoder, {canonical(key): tensor for key, tensor in model.state_dict().items()}, name)
    generation = getattr(model, "generation_config", None)
    ends = end_tokens(model.config, getattr(generation, "eos_token_id", None), tokenizer)
    target = Target(decoder.eval(), tokenizer, name, model.config, fingerprint(config, tokenizer), ends)
    refresh(target, model)
    return target


def _share(decoder: Decoder, weights: Mapping[str, Tensor], name: str) -> None:
    """Put the model's tensors into a meta decoder where they are whole parameters of it; allocate the others, unset."""
    table, embedding = places(decoder.config, loaded=True), weights["model.embed_tokens.weight"]
    if any((weights[key].dtype, weights[key].device) != (embedding.dtype, embedding.device) for key in table):
        raise ValueError(f"{name}: its weights have several dtypes or devices; bring them to one by model.to(...)")
    if decoder.config.tie_embeddings and weights.get("lm_head.weight", embedding).data_ptr() != embedding.data_ptr():
        raise ValueError(f"{name}: tie_word_embeddings is True, but lm_head.weight is not the embedding; set it False")
    whole = {place.parameter: weights[key] for key, place in table.items() if place.is_whole}
    shared = {key: tensor for key, tensor in whole.items() if tensor.is_contiguous()}
    copied = {key: parameter.shape for key, parameter in decoder.named_parameters() if key not in shared}
    unset = {key: torch.empty(shape, dtype=embedding.dtype, device=embedding.device) for key, shape in copied.items()}
    decoder.load_state_dict(shared | unset, strict=False, assign=True)  # not strict: a tied head is not among them
    decoder.requires_grad_(False)
    decoder.tie()


@torch.no_grad()
def refresh(target: Target, model: Any) -> None:
    """Bring a target that `target_from_transformers` made of `model` up to date, however the model's weights changed.

    All weights are copied, about the cost of two decoding steps; those that the model has replaced are no longer
    shared. The model must still have the same dtype, device and configuration.
    """
    fill(target.model, model.state_dict().items(), target.name, loaded=True)
    target.model.refreshed += 1
