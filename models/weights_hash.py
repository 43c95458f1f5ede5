"""A cheap hash of a target's weights: which of several models of one shape and one tokenizer a draft was trained with.

Not here: the hashes that decide what can work together (fingerprint.py, which knows nothing of torch).
"""

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from longdraft.models.decoder import Decoder

# fp16 is not among the dtypes: it cannot hold the small weights of a checkpoint in bf16.
SAMPLED_ROWS, SAMPLED_DTYPES = 8, (torch.float32, torch.bfloat16)


def weights_hash(
    decoder: Decoder, whole: Callable[[nn.Module], AbstractContextManager[object]] = nullcontext
) -> str | None:
    """SHA-256 (hex) of a few rows of every weight outside the layers and in the first, the middle and the last one.

    Rounded to bf16, so that a checkpoint gives the same in bf16 and in fp32, from safetensors or from a GGUF file of
    the same values. None where a weight is in another precision or, as a sharded target's between its passes, not here.

    Args:
        whole: entered around the reading of a layer, for weights that are elsewhere.
    """
    state, last = hashlib.sha256(), len(decoder.layers) - 1
    layers = [decoder.layers[i] for i in sorted({0, last // 2, last})]
    parts = [(part, nullcontext()) for part in (decoder.embed_tokens, decoder.norm, decoder.lm_head)]
    for part, around in [*parts, *((layer, whole(layer)) for layer in layers)]:
        with around:
            for name, weight in part.named_parameters():
                if weight.dtype not in SAMPLED_DTYPES or not weight.numel() or weight.is_meta:
                    return None
                state.update(f"{name} {list(weight.shape)}".encode())
                state.update(_sample(weight.detach()))
    return state.hexdigest()


def _sample(weight: Tensor) -> bytes:
    """Rows of a matrix that are evenly spaced, the first and the last among them; a vector as it is."""
    if weight.dim() > 1:
        n = len(weight)
        weight = weight[sorted({i * (n - 1) // (SAMPLED_ROWS - 1) for i in range(SAMPLED_ROWS)})]
    return weight.to(torch.bfloat16).cpu().contiguous().view(torch.uint8).numpy().tobytes()
