"""Texts through the gated delta rule in Triton, a chunk of tokens at a time: kernels/delta_chunks.py.

One kernel solves the triangular systems of all chunks side by side. Another carries the memory from chunk to chunk, a
program for some columns of a head's memory, which it keeps where the result will be: in registers it would not fit
beside its products. These are three of TF32 each, which keep fp32's digits.

Shapes: B slots, T tokens, V heads, k key width, v value width, N chunks of C tokens. Prefixes: i_ index, o_ offsets,
m_ mask, p_ pointer, b_ block.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longdraft.kernels.delta_chunks import CHUNK
from longdraft.kernels.gated_delta import DeltaTokens

PART = 32  # of a key or value, in a product


@triton.jit
def _dot(b_left, b_right, b_sum=None):
    return tl.dot(b_left, b_right, b_sum, input_precision="tf32x3")


@triton.jit
def _load(p_x, o_row, o_x, m_row, WIDTH: tl.constexpr):
    """These rows of a matrix and their numbers o_x, as far as the WIDTH goes."""
    return tl.load(p_x + o_row[:, None] * WIDTH + o_x[None], mask=m_row[:, None] & (o_x < WIDTH)[None], other=0.0)


@triton.jit
def _store(p_x, o_row, o_x, m_row, WIDTH: tl.constexpr, b_x):
    tl.store(p_x + o_row[:, None] * WIDTH + o_x[None], b_x, mask=m_row[:, None] & (o_x < WIDTH)[None])


@triton.jit
def _inverse(b_below, o_c, LEVELS: tl.constexpr):
    """The inverse of 1 - b_below, which is zero on its diagonal and above it: of two blocks on the diagonal whose
    inverses X and Y are known and the block E below them, it is X and Y with Y E X below them."""
    o_row, o_column = o_c[:, None], o_c[None]
    b_inverse = tl.where(o_row == o_column, 1.0, tl.where(o_row // 2 == o_column // 2, b_below, 0.0))
    for level in range(1, LEVELS):
        m_between = (o_row >> level != o_column >> level) & (o_row >> (level + 1) == o_column >> (level + 1))
        b_inverse = _dot(_dot(b_inverse, tl.where(m_between, b_below, 0.0)), b_inverse, b_inverse)
    return b_inverse


@triton.jit(do_not_specialize=("n_tokens", "n_heads", "n_chunks"))
def _solve(
    p_q, p_k, p_v, p_g, p_beta, p_piece, p_fresh, p_faded, p_seen, p_since, p_remaining, n_tokens, n_heads, n_chunks,
    KEYS: tl.constexpr, VALUES: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """What the tokens of one head's chunk have of each other. A factor of 0 stands for what a piece does not read."""
    i_chunk, i_head = tl.program_id(0), tl.program_id(1)
    o_c, o_part = tl.arange(0, CHUNK), tl.arange(0, PART)
    o_t = i_chunk * CHUNK + o_c
    m_t, m_c = o_t < n_tokens, o_c >= 0
    o_token = ((i_head // n_heads).to(tl.int64) * n_tokens + o_t) * n_heads + i_head % n_heads
    b_overlap, b_seen = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    for i_part in range(0, KEYS, PART):
        b_k = _load(p_k, o_token, i_part + o_part, m_t, KEYS)
        b_overlap = _dot(b_k, tl.trans(b_k), b_overlap)
        b_seen = _dot(_load(p_q, o_token, i_part + o_part, m_t, KEYS), tl.trans(b_k), b_seen)
    # In fp64, as in the reference.
    b_since = tl.cumsum(tl.load(p_g + o_token, mask=m_t, other=0.0).to(tl.float64), 0)
    # The first id is the memory's; missing tokens are of the last piece.
    b_piece = tl.load(p_piece + 1 + tl.minimum(o_t, n_tokens - 1))
    m_carried = b_piece == tl.load(p_piece + i_chunk * CHUNK)
    m_remaining = b_piece == tl.load(p_piece + tl.minimum(i_chunk * CHUNK + CHUNK, n_tokens))
    m_seen = (o_c[:, None] >= o_c[None]) & (b_piece[:, None] == b_piece[None])
    b_decay = tl.exp(tl.where(m_seen, (b_since[:, None] - b_since[None]).to(tl.float32), float("-inf")))
    b_total = tl.sum(tl.where(o_c == CHUNK - 1, b_since, 0.0), 0)
    b_remaining = tl.where(m_remaining, tl.exp((b_total - b_since).to(tl.float32)), 0.0)
    b_since = tl.where(m_carried, tl.exp(b_since.to(tl.float32)), 0.0)
    o_row = (i_head.to(tl.int64) * n_chunks + i_chunk) * CHUNK + o_c
    tl.store(p_since + o_row, b_since)
    tl.store(p_remaining + o_row, b_remaining)
    tl.store(p_seen + o_row[:, None] * CHUNK + o_c[None], b_seen * b_decay)
    b_beta = tl.load(p_beta + o_token, mask=m_t, other=0.0)
    b_below = tl.where(o_c[:, None] > o_c[None], -b_overlap * b_decay * b_beta[:, None], 0.0)
    b_inverse = _inverse(b_below, o_c, LEVELS) * b_beta[None]
    for i_part in range(0, VALUES, PART):
        b_fresh = _dot(b_inverse, _load(p_v, o_token, i_part + o_part, m_t, VALUES))
        _store(p_fresh, o_row, i_part + o_part, m_c, VALUES, b_fresh)
    b_inverse *= b_since[None]
    for i_part in range(0, KEYS, PART):
        b_faded = _dot(b_inverse, _load(p_k, o_token, i_part + o_part, m_t, KEYS))
        _store(p_faded, o_row, i_part + o_part, m_c, KEYS, b_faded)


@triton.jit(do_not_specialize=("n_tokens", "n_heads", "n_chunks"))
def _carry(
    p_q, p_k, p_fresh, p_faded, p_seen, p_since, p_remaining, p_memory, p_read, n_tokens, n_heads, n_chunks,
    KEYS: tl.constexpr, VALUES: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """What the tokens of one head read, and its memory after them, at some columns of the values."""
    i_head = tl.program_id(0)
    o_c, o_part = tl.arange(0, CHUNK), tl.arange(0, PART)
    o_v, m_c = tl.program_id(1) * PART + o_part, o_c >= 0
    p_memory += i_head.to(tl.int64) * (KEYS * VALUES)
    for i_chunk in range(n_chunks):
        o_t = i_chunk * CHUNK + o_c
        o_token, m_t = ((i_head // n_heads).to(tl.int64) * n_tokens + o_t) * n_heads + i_head % n_heads, o_t < n_tokens
        i_row = (i_head.to(tl.int64) * n_chunks + i_chunk) * CHUNK
        b_since, b_remaining = tl.load(p_since + i_row + o_c), tl.load(p_remaining + i_row + o_c)
        b_kept = tl.load(p_since + i_row + CHUNK - 1)
        b_u, b_read = _load(p_fresh, i_row + o_c, o_v, m_c, VALUES), tl.zeros([CHUNK, PART], tl.float32)
        for i_part in range(0, KEYS, PART):
            m_part = i_part + o_part < KEYS
            b_memory = _load(p_memory, i_part + o_part, o_v, m_part, VALUES)
            b_u -= _dot(_load(p_faded, i_row + o_c, i_part + o_part, m_c, KEYS), b_memory)
            b_q = _load(p_q, o_token, i_part + o_part, m_t, KEYS) * b_since[:, None]
            b_read += _dot(b_q, b_memory)
        b_read += _dot(tl.load(p_seen + (i_row + o_c)[:, None] * CHUNK + o_c[None]), b_u)
        _store(p_read, o_token, o_v, m_t, VALUES, b_read)
        tl.debug_barrier()  # until all threads have read the memory
        for i_part in range(0, KEYS, PART):
            m_part = i_part + o_part < KEYS
            b_k = _load(p_k, o_token, i_part + o_part, m_t, KEYS) * b_remaining[:, None]
            b_memory = _load(p_memory, i_part + o_part, o_v, m_part, VALUES) * b_kept + _dot(tl.trans(b_k), b_u)
            _store(p_memory, i_part + o_part, o_v, m_part, VALUES, b_memory)
        tl.debug_barrier()  # until all have written it


def chain(tokens: DeltaTokens, memory_BVkv: Tensor, piece_S: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `longdraft.kernels.delta_chunks.chain_reference`."""
    q, k, v, g, beta = (x.contiguous() for x in tokens)
    (n_slots, n_tokens, n_heads, keys), values = k.shape, v.shape[3]
    n_chunks = -(-n_tokens // CHUNK)
    solved = tuple(  # fresh, faded, seen, since, remaining
        k.new_empty(n_slots * n_heads, n_chunks * CHUNK, width) for width in (values, keys, CHUNK, 1, 1)
    )
    sizes = {"KEYS": keys, "VALUES": values, "PART": PART, "CHUNK": CHUNK, "num_stages": 1}
    if piece_S is None:
        piece_S = torch.zeros(n_tokens + 1, dtype=torch.int64, device=k.device)
    solve: Any = _solve[(n_chunks, n_slots * n_heads)]
    solve(
        q, k, v, g, beta, piece_S, *solved, n_tokens, n_heads, n_chunks,
        LEVELS=CHUNK.bit_length() - 1, **sizes, num_warps=8,
    )  # fmt: skip
    read_BTVv, after_BVkv = torch.empty_like(v), memory_BVkv.clone(memory_format=torch.contiguous_format)
    carry: Any = _carry[(n_slots * n_heads, -(-values // PART))]
    carry(q, k, *solved, after_BVkv, read_BTVv, n_tokens, n_heads, n_chunks, **sizes, num_warps=4)
    return read_BTVv, after_BVkv
