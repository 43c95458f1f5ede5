"""Noise and the choice of tokens on a CPU in C: Gumbel noise, the best tokens of rows of logits, a level of a beam.

Shapes: B slots, T rows, V vocabulary, J positions; the others as in kernels/beam.py.
"""

import ctypes

import torch
from torch import Tensor

from longdraft.kernels.cpu.library import fits, library, make_call, pointers, structure

PART_WORDS = 2048  # as in best_tokens.inc
# `noise` of noise.inc, `best_tokens` of rows.c, `beam` of beam.inc.
Noise = structure(addresses="seeds positions y", sizes="batch per vocab")
BestTokens = structure(
    addresses="logits divisors noise ids parts log_probs words", sizes="batch rows vocab count noise_row"
)
Beam = structure(
    addresses="log_probs words ids scores borders ancestors nodes sums ancestors_below",
    sizes="batch rows count width before n_borders first_node first_class",
)


def negated_uniform(seeds_B: Tensor, positions_BJ: Tensor, vocab_size: int) -> Tensor:
    """The Philox words of kernels/choice.py as numbers in (-1, 0), fp32 [B, J, V]."""
    batch, per = positions_BJ.shape
    seeds_B, positions_BJ = seeds_B.contiguous(), positions_BJ.contiguous()
    assert fits(seeds_B, torch.int64, batch) and positions_BJ.dtype == torch.int64
    y = torch.empty(batch, per, vocab_size, dtype=torch.float32)
    make_call("philox_uniform", None, Noise(*pointers(seeds_B, positions_BJ, y), batch, per, vocab_size), "noise")
    return y


def best_tokens(
    logits_BTV: Tensor, count: int, divisors_B: Tensor | None, noise_BN: Tensor | None, ids_V: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `longdraft.kernels.beam.best_tokens`."""
    (batch, n_rows, vocab), logits = logits_BTV.shape, logits_BTV.contiguous()
    assert 0 < count <= vocab
    divisors_B = None if divisors_B is None else divisors_B.contiguous()
    assert fits(divisors_B, torch.float32, batch) and fits(ids_V, torch.int64, vocab)
    if noise_BN is not None:
        assert noise_BN.dtype == torch.float32 and len(noise_BN) == batch and noise_BN.stride(1) == 1
        assert ids_V is not None or noise_BN.shape[1] >= vocab
    parts = torch.empty(batch * n_rows * -(-vocab // PART_WORDS), 2 + 2 * count, dtype=torch.float32)
    log_probs = torch.empty(batch, n_rows, count, dtype=torch.float32)
    words = torch.empty(batch, n_rows, count, dtype=torch.int64)
    sizes = batch, n_rows, vocab, count, 0 if noise_BN is None else noise_BN.stride(0)
    arguments = BestTokens(*pointers(logits, divisors_B, noise_BN, ids_V, parts, log_probs, words), *sizes)
    make_call("best_tokens", logits.dtype, arguments, f"the best tokens of {batch * n_rows} rows")
    return log_probs, words


def beam_level(
    log_probs_BTC: Tensor,
    words_BTC: Tensor,
    scores_BT: Tensor,
    ancestors_BTN: Tensor,
    width: int,
    first_node: int,
    first_class: int,
    borders_K: Tensor,
    token_ids_E: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `longdraft.kernels.beam.beam_level`."""
    (batch, n_rows, count), before, lib = log_probs_BTC.shape, ancestors_BTN.shape[2], library()
    dtypes = (torch.float32, torch.int64, torch.int64, torch.float32, torch.float32, torch.bool)
    given = log_probs_BTC, words_BTC, token_ids_E, scores_BT, borders_K, ancestors_BTN
    inputs = [None if tensor is None else tensor.contiguous() for tensor in given]
    assert all(tensor is None or tensor.dtype == dtype for tensor, dtype in zip(inputs, dtypes, strict=True))
    assert words_BTC.shape == log_probs_BTC.shape and scores_BT.shape == ancestors_BTN.shape[:2] == (batch, n_rows)
    assert 0 < width <= n_rows * count and lib is not None
    nodes_3BW = torch.empty(3, batch, width, dtype=torch.int64)
    scores_BW = torch.empty(batch, width, dtype=torch.float32)
    ancestors_BWN = torch.empty(batch, width, before + width, dtype=torch.bool)
    sizes = batch, n_rows, count, width, before, len(borders_K), first_node, first_class
    arguments = Beam(*pointers(*inputs, nodes_3BW, scores_BW, ancestors_BWN), *sizes)
    lib.beam_level(ctypes.addressof(arguments))
    return nodes_3BW, scores_BW, ancestors_BWN
