"""The frozen target under ZeRO-3 (arXiv 1910.02054): its weights are sharded, and a layer is gathered while it runs.

Each rank keeps a share of every layer's weights. Embedding, final norm and LM head stay whole on every rank, because
the draft's loss reads them outside of any pass. A pass is collective: all ranks run the same passes in the same order,
each over its own tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from longdraft.models.decoder import Decoder
from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.hf import load_target
from longdraft.models.layer import Layer
from longdraft.models.target import Target
from longdraft.train.ranks import Ranks  # before DeepSpeed: it names the accelerator

# isort: split
import deepspeed


def load_sharded_target(path: str | Path, dtype: torch.dtype, ranks: Ranks, max_positions: int | None = None) -> Target:
    """`load_target` (same arguments, same errors) with the layers' weights sharded over all ranks. All ranks call it
    and get the first rank's weights. Beside its share, a device never holds more than one whole layer, and in a pass
    also the next one, which is prefetched.
    """

    @contextmanager
    def whole(parameter: nn.Parameter) -> Iterator[Tensor]:
        with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0):
            yield parameter

    return load_target(path, dtype, ranks.device, max_positions, build=build_sharded_decoder, whole=whole)


def build_sharded_decoder(config: DecoderConfig, dtype: torch.dtype, device: torch.device | str) -> Decoder:
    """`build_decoder` with the layers' weights sharded; no rank ever holds more than one whole layer of them."""
    with torch.device("meta"):
        decoder = Decoder(config)
    decoder = decoder.to(dtype).requires_grad_(False).eval()
    for layer in decoder.layers:
        layer.to_empty(device=device)
        # Memory-efficient linear layers only help a backward pass, and replace torch's F.linear in the whole process.
        deepspeed.zero.Init(module=layer, dtype=dtype, mem_efficient_linear=False)
    for part in (decoder.embed_tokens, decoder.norm, decoder.lm_head):
        part.to_empty(device=device)
    decoder.tie()
    decoder.around_layer = _WholeLayers(cast("Sequence[Layer]", decoder.layers))
    return decoder


def share_out(
    ranks: Ranks, dtype: torch.dtype, read: Callable[[], Any], hf_config: PretrainedConfig
) -> tuple[Any, dict[str, Any]]:
    """A model of transformers with its layers' weights sharded, for `wrap` of `load_through_transformers`.

    The first rank's host reads the whole model and sends the others their shares; a device has at most one whole layer
    of it. Raises ValueError on all ranks if the first one cannot read it.
    """
    from transformers import AutoModelForCausalLM  # imports much of transformers, as does the next import

    from longdraft.models.transformers_model import find_layers

    read_here: list[Any] = []
    ranks.from_first(lambda: read_here.append(read()))
    if read_here:
        (model,) = read_here
    else:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(hf_config, dtype=dtype, trust_remote_code=False)
    layers = find_layers(model.requires_grad_(False))

    def place(part: nn.Module, recurse: bool) -> None:
        if ranks.first:
            part._apply(lambda tensor: tensor.to(ranks.device), recurse)
        else:
            part.to_empty(device=ranks.device, recurse=recurse)

    inside, of_layers = set(layers.modules()), set(layers.parameters())
    for part in model.modules():
        if part not in inside:
            place(part, recurse=False)
    model.tie_weights()  # to_empty has separated tied parameters
    whole = [weight.data for weight in model.parameters() if weight not in of_layers]
    for layer in layers:
        place(layer, recurse=True)
        deepspeed.zero.Init(module=layer, dtype=dtype, mem_efficient_linear=False)  # it sends the first rank's bytes
    for tensor in [*whole, *model.buffers()]:
        deepspeed.comm.broadcast(tensor, 0)
    return model, {"around_layer": _WholeLayers(cast("Sequence[Layer]", layers))}


@contextmanager
def whole_layers(decoder: Decoder, *which: int) -> Iterator[None]:
    """Context in which the weights of these layers are gathered and can be read outside of a pass, whether or not the
    decoder is sharded. All ranks enter together."""
    parameters = [parameter for layer in which for parameter in decoder.layers[layer].parameters()]
    with deepspeed.zero.GatheredParameters(parameters):
        yield


class _WholeLayers:
    """`Decoder.around_layer` of a sharded decoder: gathers a layer before it runs, and prefetches the next one."""

    def __init__(self, layers: Sequence[Layer]):
        self._next = dict(pairwise(layers))
        self._coming: dict[Layer, Any] = {}

    @contextmanager
    def __call__(self, layer: Layer) -> Iterator[None]:
        (self._coming.pop(layer, None) or _gather(layer)).wait()
        following = self._next.get(layer)
        if following is not None and following not in self._coming:  # still there after a pass that failed
            self._coming[following] = _gather(following)
        try:
            yield
        finally:
            parameters: list[Any] = list(layer.parameters())  # with the methods that DeepSpeed adds
            parameters[0].partition(parameters)


def _gather(layer: Layer) -> Any:
    """Start gathering a layer's weights. They are whole after `wait` on the returned handle."""
    parameters: list[Any] = list(layer.parameters())
    return parameters[0].all_gather_coalesced(parameters)
