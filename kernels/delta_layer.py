"""What a layer of linear attention does around its rule (kernels/gated_delta.py): before it the convolution, norms of
queries and keys, and gates; after it the norm and the output's gate.

Each is one launch in Triton, and some twenty small operations in PyTorch. Shapes: B slots, T tokens, V heads of the
values, k key width, v value width, C channels of the convolution (queries, keys, values), W its width, F = V v,
X = C + F + 2 V: what one product gives of a token: channels, the output's gate, and for each head beta and decay.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from longdraft.kernels import backend
from longdraft.kernels.gate import sigmoid
from longdraft.kernels.gated_delta import DeltaTokens
from longdraft.kernels.rms_norm import rms_norm


class DeltaWeights(NamedTuple):
    """The convolution, the logarithm of each head's rate of decay and its bias; the number of key heads, and k."""

    conv_CW: Tensor
    log_rate_V: Tensor
    decay_bias_V: Tensor
    key_heads: int
    key_dim: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """C, F, V and V."""
        channels, heads = len(self.conv_CW), len(self.log_rate_V)
        return channels, channels - 2 * self.key_heads * self.key_dim, heads, heads


def delta_tokens(
    projected_BTX: Tensor,
    before_BWC: Tensor,
    recent_BTW: Tensor | None,
    weights: DeltaWeights,
    tokens: slice = slice(None),
) -> DeltaTokens:
    """Some tokens of a pass, by default all.

    Args:
        projected_BTX: of all tokens, contiguous. before_BWC: the channels of the W - 1 tokens before the pass.
        recent_BTW: which tokens each one's convolution reads: `PassPlan.recent_rows` or `recent_in_pieces`. None: the
            last ones.
    """
    triton = backend.triton_kernels("delta_layer", projected_BTX.device.type)
    found = delta_tokens_reference if triton is None else triton.delta_tokens
    return found(projected_BTX, before_BWC, recent_BTW, weights, tokens)


def delta_tokens_reference(
    projected_BTX: Tensor, before_BWC: Tensor, recent_BTW: Tensor | None, weights: DeltaWeights, tokens: slice
) -> DeltaTokens:
    """`delta_tokens` in plain PyTorch."""
    (start, stop, _), inputs_BTC = tokens.indices(projected_BTX.shape[1]), projected_BTX[..., : weights.sizes[0]]
    if recent_BTW is None:
        width = weights.conv_CW.shape[1]
        first = max(0, start - width + 1)
        joined_BSC = torch.cat([before_BWC, inputs_BTC[:, first:stop]], 1)
        taps = (joined_BSC[:, tap : tap + stop - start] for tap in range(start - first, start - first + width))
    else:
        slots_B1 = torch.arange(len(inputs_BTC), device=inputs_BTC.device)[:, None]
        taps = (
            torch.where(
                (row_BT < 0)[..., None],
                before_BWC[slots_B1, row_BT.clamp(max=-1)],
                inputs_BTC[slots_B1, row_BT.clamp(min=0)],
            )
            for row_BT in recent_BTW[:, start:stop].unbind(2)
        )
    return _convolved(taps, projected_BTX[:, start:stop], weights)


def recent_in_pieces(piece_T: Tensor, count: int) -> Tensor:
    """As `PassPlan.recent_rows`, of a packed sequence with zeros before it: tokens of other pieces are -1."""
    row_T = torch.arange(len(piece_T), device=piece_T.device)
    recent_TW = row_T[:, None] + torch.arange(1 - count, 1, device=piece_T.device)
    own_TW = (recent_TW >= 0) & (piece_T[recent_TW.clamp(min=0)] == piece_T[:, None])
    return torch.where(own_TW, recent_TW, -1)[None]


def _convolved(taps: Iterable[Tensor], projected_BTX: Tensor, weights: DeltaWeights) -> DeltaTokens:
    """The convolution's outputs as queries, keys and values, and the gates. taps: the convolution's inputs from the
    earliest on, [B, T, C]."""
    taps, (first_C, *others) = iter(taps), weights.conv_CW.T.float()
    mixed_BTC = next(taps) * first_C
    for x_BTC, weight_C in zip(taps, others, strict=True):
        mixed_BTC = mixed_BTC + x_BTC * weight_C
    mixed_BTC = _silu(mixed_BTC).to(weights.conv_CW.dtype).float()
    _, values, heads, _ = weights.sizes
    keys = weights.key_heads * weights.key_dim
    q, k, v = mixed_BTC.split([keys, keys, values], -1)
    q, k = (x.unflatten(-1, (weights.key_heads, -1)) for x in (q, k))
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    repeats = heads // weights.key_heads
    q, k = (x.repeat_interleave(repeats, 2) for x in (q * weights.key_dim**-0.5, k))
    *_, beta_BTV, g_BTV = projected_BTX.split(weights.sizes, -1)
    # In fp64 for the reason given at `sigmoid`.
    g_BTV = -weights.log_rate_V.double().exp() * softplus(g_BTV.double() + weights.decay_bias_V.double())
    return DeltaTokens(q, k, v.unflatten(-1, (heads, -1)), g_BTV.float(), sigmoid(beta_BTV.float()))


def gated_norm(read_BTVv: Tensor, gate_BTF: Tensor, weight_v: Tensor, eps: float) -> Tensor:
    """RMSNorm of what each head read, in the gate's dtype, times silu of the gate: [B, T, F].

    gate_BTF: its rows may lie apart. weight_v, eps: of the norm.
    """
    triton = backend.triton_kernels("delta_layer", gate_BTF.device.type)
    found = gated_norm_reference if triton is None else triton.gated_norm
    return found(read_BTVv, gate_BTF, weight_v, eps)


def gated_norm_reference(read_BTVv: Tensor, gate_BTF: Tensor, weight_v: Tensor, eps: float) -> Tensor:
    """`gated_norm` in plain PyTorch."""
    normed_BTVv = rms_norm(read_BTVv.to(gate_BTF.dtype), weight_v, eps)
    return (normed_BTVv.flatten(2) * _silu(gate_BTF)).to(gate_BTF.dtype)


def _silu(x: Tensor) -> Tensor:
    """silu in fp32, with `sigmoid`'s bits."""
    return x.float() * sigmoid(x.float())
