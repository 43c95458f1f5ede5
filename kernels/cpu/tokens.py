"""Noise and the choice of tokens on a CPU in C: Gumbel noise, the best tokens of rows of logits, a level of a beam.

Shapes: B slots, T rows, V vocabulary, J positions; the others as in kernels/beam.py and kernels/beam.py.
"""

import ctypes

import torch
from torch import Tensor

from longdraft.kernels.cpu.library import fields, library, make_call, pointer
from longdraft.kernels.cpu.rows import SUFFIXES

PART_WORDS = 2048  # of best_tokens.inc


class _Noise(ctypes.Structure):
    """`noise` of noise.inc."""

    _fields_ = fields("seeds positions y", "batch per vocab")


class _BestTokens(ctypes.Structure):
    """`best_tokens` of rows.c."""

    _fields_ = fields("logits divisors noise ids parts log_probs words", "batch rows vocab count noise_row")


class _Beam(ctypes.Structure):
    """`beam` of beam.inc."""

    _fields_ = fields(
        "log_probs words ids scores borders open nodes sums below",
        "batch rows count width before n_borders first_node first_class",
    )


def negated_uniform(seeds_B: Tensor, positions_BJ: Tensor, vocab_size: int) -> Tensor:
    """The Philox words of kernels/choice.py as numbers in (-1, 0), fp32 [B, J, V], with the bits of
    kernels/choice.py."""
    batch, per = positions_BJ.shape
    seeds_B, positions_BJ = seeds_B.contiguous(), positions_BJ.contiguous()
    assert seeds_B.dtype == positions_BJ.dtype == torch.int64 and seeds_B.shape == (batch,)
    y = torch.empty(batch, per, vocab_size, dtype=torch.float32)
    arguments = _Noise(seeds_B.data_ptr(), positions_BJ.data_ptr(), y.data_ptr(), batch, per, vocab_size)
    make_call("philox_uniform", arguments, "noise")
    return y


def best_tokens(
    logits_BTV: Tensor, count: int, divisors_B: Tensor | None, noise_BN: Tensor | None, ids_V: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `longdraft.kernels.beam.best_tokens`."""
    (batch, n_rows, vocab), logits = logits_BTV.shape, logits_BTV.contiguous()
    assert 0 < count <= vocab
    if divisors_B is not None:
        divisors_B = divisors_B.contiguous()
        assert (divisors_B.dtype, divisors_B.shape) == (torch.float32, (batch,))
    if noise_BN is not None:
        assert noise_BN.dtype == torch.float32 and len(noise_BN) == batch and noise_BN.stride(1) == 1
        assert ids_V is not None or noise_BN.shape[1] >= vocab
    if ids_V is not None:
        assert (ids_V.dtype, ids_V.shape) == (torch.int64, (vocab,)) and ids_V.is_contiguous()
    n_parts = batch * n_rows * -(-vocab // PART_WORDS)
    parts = torch.empty(n_parts, 2 + 2 * count, dtype=torch.float32)
    log_probs = torch.empty(batch, n_rows, count, dtype=torch.float32)
    words = torch.empty(batch, n_rows, count, dtype=torch.int64)
    tensors = logits, divisors_B, noise_BN, ids_V, parts, log_probs, words
    noise_row = 0 if noise_BN is None else noise_BN.stride(0)
    arguments = _BestTokens(*map(pointer, tensors), batch, n_rows, vocab, count, noise_row)
    make_call(f"best_tokens_{SUFFIXES[logits.dtype]}", arguments, f"the best tokens of {batch * n_rows} rows")
    return log_probs, words


def beam_level(
    log_probs_BTC: Tensor,
    words_BTC: Tensor,
    scores_BT: Tensor,
    open_BTN: Tensor,
    width: int,
    first_node: int,
    first_class: int,
    borders_K: Tensor,
    token_ids_E: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `longdraft.kernels.beam.beam_level`."""
    (batch, n_rows, count), before, lib = log_probs_BTC.shape, open_BTN.shape[2], library()
    dtypes = (torch.float32, torch.int64, torch.int64, torch.float32, torch.float32, torch.bool)
    inputs = tuple(
        None if tensor is None else tensor.contiguous()
        for tensor in (log_probs_BTC, words_BTC, token_ids_E, scores_BT, borders_K, open_BTN)
    )
    assert all(tensor is None or tensor.dtype == dtype for tensor, dtype in zip(inputs, dtypes, strict=True))
    assert words_BTC.shape == log_probs_BTC.shape and scores_BT.shape == open_BTN.shape[:2] == (batch, n_rows)
    assert 0 < width <= n_rows * count and lib is not None
    nodes_3BW = torch.empty(3, batch, width, dtype=torch.int64)
    scores_BW = torch.empty(batch, width, dtype=torch.float32)
    open_BWN = torch.empty(batch, width, before + width, dtype=torch.bool)
    sizes = batch, n_rows, count, width, before, len(borders_K), first_node, first_class
    arguments = _Beam(*map(pointer, (*inputs, nodes_3BW, scores_BW, open_BWN)), *sizes)
    lib.beam_level(ctypes.addressof(arguments))
    return nodes_3BW, scores_BW, open_BWN
