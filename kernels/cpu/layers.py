"""All layers of a decoder as one C call, for passes of few tokens: one job for the threads, in many stages.

A pass of one token is seven calls a layer, so short that preparing them one by one in Python takes as long as the work
(docs/log). The bits are the same.
Shapes: L layers, B slots, T tokens of the pass, S cache capacity, D hidden width, F feed-forward width, H query heads,
K key/value heads, N = H + 2 K, d head width.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.kernels.cpu import rows
from longdraft.kernels.cpu.library import fits, make_call, pointers, structure

# Above this many tokens, counted over all slots, a pass takes so long that Python's share does not matter.
MOST_TOKENS = 32


class LayerWeights(NamedTuple):
    """One layer's tensors, all of one dtype. Biases and norms of heads may be None.

    window: how many keys a token reads at most, its own included; None for all.
    """

    attention_norm_D: Tensor
    qkv_XD: Tensor
    qkv_bias_X: Tensor | None
    q_norm_d: Tensor | None
    k_norm_d: Tensor | None
    o_DX: Tensor
    o_bias_D: Tensor | None
    mlp_norm_D: Tensor
    gate_up_XD: Tensor
    gate_up_bias_X: Tensor | None
    down_DF: Tensor
    down_bias_D: Tensor | None
    window: int | None


# `layer`, `layer_calls` and `decoder_layers` of rows.c.
Layer = structure(addresses=" ".join(LayerWeights._fields[:-1]), sizes="window")
Calls = structure((rows.Linear, "qkv o gate_up down"), (rows.Rotation, "turned"), (rows.Attention, "attended"))
DecoderLayers = structure(
    addresses="table calls x cos sin y projected turned rest keys values lengths mask",
    sizes="layers batch rows hidden heads kv_heads width inner period ends_early cache_layer cache_slot cache_row",
    floats="eps scale",
)


class LayersOutput(NamedTuple):
    """The hidden states (uninitialized if the last layer ended early), and all layers' queries and keys, after RoPE,
    and values."""

    hidden_BTD: Tensor
    q_LBTHd: Tensor
    k_LBTKd: Tensor
    v_LBTKd: Tensor


class LayerTable:
    """A table of the addresses of all layers' weights. The caller keeps the weights alive, in place.

    Args:
        layers: the weights, of the same shapes in every layer.
        n_heads, n_kv_heads: H and K.
        eps: epsilon of all RMSNorms, those of heads included.
    """

    def __init__(self, layers: Sequence[LayerWeights], n_heads: int, n_kv_heads: int, eps: float):
        self._entries = (Layer * len(layers))(*(Layer(*pointers(*layer[:-1]), layer.window or 0) for layer in layers))
        self._heads, self._eps = (n_heads, n_kv_heads), eps
        (self._hidden, self._inner), self._dtype = layers[0].down_DF.shape, layers[0].down_DF.dtype

    def run(
        self,
        x_BTD: Tensor,
        cos_BT11F: Tensor,
        sin_BT12F: Tensor,
        cache: tuple[Tensor, Tensor, Tensor],
        tree_mask_BTT: Tensor | None,
        ends_early: bool,
    ) -> LayersOutput:
        """Run one pass through all layers. Raises MemoryError if there is no memory for it.

        Args:
            x_BTD: embeddings in the weights' dtype; not changed.
            cos_BT11F, sin_BT12F: as in kernels/rotate.py.
            cache: keys and values [L, B, S, K, d] of the same strides with contiguous heads, and lengths int64 [B]. The
                pass's keys and values are written after the committed ones; whether there is room is not checked.
            tree_mask_BTT: bool, as in kernels/tree_attention.py.
            ends_early: the last layer ends once its keys and values are written.
        """
        n_layers, (heads, kv_heads), (keys, values, lengths_B) = len(self._entries), self._heads, cache
        batch, n_tokens, hidden = x_BTD.shape
        width, turned = keys.shape[4], heads + kv_heads
        cos, sin, x = cos_BT11F.contiguous(), sin_BT12F.contiguous(), x_BTD.contiguous()
        mask = None if tree_mask_BTT is None else tree_mask_BTT.contiguous()
        assert hidden == self._hidden and keys.stride() == values.stride() and keys.stride()[3:] == (width, 1)
        assert keys.dtype == values.dtype == x.dtype == cos.dtype == self._dtype and cos.shape[1] == n_tokens
        assert fits(lengths_B, torch.int64, batch) and fits(mask, torch.bool, batch, n_tokens, n_tokens)
        y, pass_shape = torch.empty_like(x), (n_layers, batch, n_tokens)
        projected, rotated = x.new_empty(*pass_shape, turned + kv_heads, width), x.new_empty(*pass_shape, turned, width)
        rest = x.new_empty(*pass_shape, heads * width + 2 * hidden + self._inner)
        calls = torch.empty(n_layers * ctypes.sizeof(Calls), dtype=torch.uint8)
        arguments = DecoderLayers(
            ctypes.addressof(self._entries),
            *pointers(calls, x, cos, sin, y, projected, rotated, rest, keys, values, lengths_B, mask),
            n_layers, batch, n_tokens, hidden, heads, kv_heads, width, self._inner, len(cos) * n_tokens, ends_early,
            *keys.stride()[:3], self._eps, width**-0.5,
        )  # fmt: skip
        make_call("layers", x.dtype, arguments, f"the layers of {batch * n_tokens} tokens")
        return LayersOutput(y, rotated[..., :heads, :], rotated[..., heads:, :], projected[..., turned:, :])


def can_run(layers: Sequence[LayerWeights], head_dim: int) -> bool:
    """Whether the C kernels can compute these layers, at any width of pass."""
    plain = [(weight, False) for layer in layers for weight in (layer.qkv_XD, layer.o_DX, layer.down_DF)]
    gated = [(layer.gate_up_XD, True) for layer in layers]
    return rows.can_run([tensor for layer in layers for tensor in layer[:-1]], plain + gated, head_dim)
