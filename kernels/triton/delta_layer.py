"""kernels/delta_layer.py in Triton: one launch for each function.

A program makes one token of one key head and of its heads of the values, or norms what one head read. Shapes and names
as there. Prefixes: i_ index, o_ offsets, m_ mask, p_ pointer, b_ block.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longdraft.kernels.delta_layer import DeltaWeights
from longdraft.kernels.gated_delta import DeltaTokens


@triton.jit
def _convolved(
    p_x, p_before, p_recent, p_conv, i_b, i_t, n_rows, x_t, channels, o_c, m_c, CHAIN: tl.constexpr, TAPS: tl.constexpr
):
    """silu of the convolution at these channels, rounded to the dtype of its weights."""
    b_sum = tl.zeros_like(o_c).to(tl.float32)
    for tap in range(TAPS):
        if CHAIN:
            i_row = (i_t + tap - (TAPS - 1)).to(tl.int64)
        else:
            i_row = tl.load(p_recent + (i_b * n_rows + i_t) * TAPS + tap)
        p_earlier = p_before + (i_b * (TAPS - 1) + TAPS - 1 + i_row) * channels
        b_x = tl.load(p_earlier + o_c, mask=m_c & (i_row < 0), other=0.0).to(tl.float32)
        b_x += tl.load(p_x + (i_b * n_rows + i_row) * x_t + o_c, mask=m_c & (i_row >= 0), other=0.0).to(tl.float32)
        b_sum += b_x * tl.load(p_conv + o_c * TAPS + tap, mask=m_c, other=0.0).to(tl.float32)
    return (b_sum * tl.sigmoid(b_sum)).to(p_conv.dtype.element_ty).to(tl.float32)


@triton.jit(do_not_specialize=("n_rows", "start", "n_tokens"))
def _delta_tokens(
    p_x, p_before, p_recent, p_conv, p_log_rate, p_bias, p_q, p_k, p_v, p_g, p_beta, n_rows, start, n_tokens, x_t,
    CHAIN: tl.constexpr, KEY_HEADS: tl.constexpr, REPEATS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    TAPS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    i_node, i_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_b, i_t = i_node // n_tokens, start + i_node % n_tokens
    HEADS: tl.constexpr = KEY_HEADS * REPEATS
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEYS + HEADS * VALUES
    o_k, o_v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    m_k, m_v = o_k < KEYS, o_v < VALUES
    o_q = i_head * KEYS + o_k
    b_q = _convolved(p_x, p_before, p_recent, p_conv, i_b, i_t, n_rows, x_t, CHANNELS, o_q, m_k, CHAIN, TAPS)
    o_q += KEY_HEADS * KEYS
    b_k = _convolved(p_x, p_before, p_recent, p_conv, i_b, i_t, n_rows, x_t, CHANNELS, o_q, m_k, CHAIN, TAPS)
    b_q = b_q * tl.rsqrt(tl.sum(b_q * b_q, 0) + 1e-6) * (KEYS**-0.5)
    b_k = b_k * tl.rsqrt(tl.sum(b_k * b_k, 0) + 1e-6)
    for i_repeat in range(REPEATS):
        i_value = i_head * REPEATS + i_repeat
        o_c = 2 * KEY_HEADS * KEYS + i_value * VALUES + o_v
        b_v = _convolved(p_x, p_before, p_recent, p_conv, i_b, i_t, n_rows, x_t, CHANNELS, o_c, m_v, CHAIN, TAPS)
        i_out = i_node * HEADS + i_value
        tl.store(p_q + i_out * KEYS + o_k, b_q, mask=m_k)
        tl.store(p_k + i_out * KEYS + o_k, b_k, mask=m_k)
        tl.store(p_v + i_out * VALUES + o_v, b_v, mask=m_v)
        p_gates = p_x + (i_b * n_rows + i_t) * x_t + CHANNELS + HEADS * VALUES + i_value
        tl.store(p_beta + i_out, tl.sigmoid(tl.load(p_gates).to(tl.float32)))
        decay = tl.load(p_gates + HEADS).to(tl.float32) + tl.load(p_bias + i_value).to(tl.float32)
        # softplus; log(1 + e), where 1 + e loses the digits of a small e
        e = tl.exp(-tl.abs(decay))
        one = 1.0 + e
        log1p = tl.where(one == 1.0, e, tl.log(one) * (e / tl.where(one == 1.0, 1.0, one - 1.0)))
        rate = tl.exp(tl.load(p_log_rate + i_value).to(tl.float32))
        tl.store(p_g + i_out, -rate * (tl.maximum(decay, 0.0) + log1p))


@triton.jit
def _gated_norm(p_read, p_gate, p_weight, p_out, n_heads, gate_t, eps, VALUES: tl.constexpr, BLOCK_V: tl.constexpr):
    i_head, o_v = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_V)
    m_v = o_v < VALUES
    dtype = p_out.dtype.element_ty
    b_read = tl.load(p_read + i_head * VALUES + o_v, mask=m_v, other=0.0).to(dtype).to(tl.float32)
    b_weight = tl.load(p_weight + o_v, mask=m_v, other=0.0).to(tl.float32)
    b_normed = b_read * tl.rsqrt(tl.sum(b_read * b_read, 0) / VALUES + eps) * b_weight
    p_gates = p_gate + (i_head // n_heads) * gate_t + (i_head % n_heads) * VALUES
    b_gate = tl.load(p_gates + o_v, mask=m_v, other=0.0).to(tl.float32)
    b_gated = b_normed.to(dtype).to(tl.float32) * b_gate * tl.sigmoid(b_gate)
    tl.store(p_out + i_head * VALUES + o_v, b_gated, mask=m_v)


def delta_tokens(
    projected_BTX: Tensor, before_BWC: Tensor, recent_BTW: Tensor | None, weights: DeltaWeights, tokens: slice
) -> DeltaTokens:
    """See `longdraft.kernels.delta_layer.delta_tokens`."""
    (batch, n_rows, x_t), (_, values, heads, _) = projected_BTX.shape, weights.sizes
    keys, width, (start, stop, _) = weights.key_dim, values // heads, tokens.indices(n_rows)

    def empty(*shape: int) -> Tensor:
        return projected_BTX.new_empty(batch, stop - start, heads, *shape, dtype=torch.float32)

    found = DeltaTokens(empty(keys), empty(keys), empty(width), empty(), empty())
    before_BWC = before_BWC.contiguous()
    recent = before_BWC if recent_BTW is None else recent_BTW.contiguous()  # a chain's is not read
    kernel: Any = _delta_tokens[(batch * (stop - start), weights.key_heads)]
    kernel(
        projected_BTX, before_BWC, recent, weights.conv_CW, weights.log_rate_V, weights.decay_bias_V, *found,
        n_rows, start, stop - start, x_t,
        CHAIN=recent_BTW is None, KEY_HEADS=weights.key_heads, REPEATS=heads // weights.key_heads, KEYS=keys,
        VALUES=width, TAPS=weights.conv_CW.shape[1], BLOCK_K=triton.next_power_of_2(keys),
        BLOCK_V=triton.next_power_of_2(width),
        num_warps=1,
    )  # fmt: skip
    return found


def gated_norm(read_BTVv: Tensor, gate_BTF: Tensor, weight_v: Tensor, eps: float) -> Tensor:
    """See `longdraft.kernels.delta_layer.gated_norm`."""
    batch, n_rows, heads, width = read_BTVv.shape
    assert gate_BTF.stride(2) == 1 and gate_BTF.stride(0) == n_rows * gate_BTF.stride(1)
    out_BTF = torch.empty(batch, n_rows, heads * width, dtype=gate_BTF.dtype, device=gate_BTF.device)
    kernel: Any = _gated_norm[(batch * n_rows * heads,)]
    kernel(
        read_BTVv.contiguous(), gate_BTF, weight_v, out_BTF, heads, gate_BTF.stride(1), eps,
        VALUES=width, BLOCK_V=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return out_BTF
