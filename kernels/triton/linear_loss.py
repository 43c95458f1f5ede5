"""The loss of a chunk of logits, its gradient written over them, and the labels' ranks, in one Triton kernel.

One program per row passes over the vocabulary twice, with overlap as objective three times. The first pass finds the
maxima and the sums of exponentials, and counts the logits that rank before the label's; the last one overwrites the
draft's logits with their gradient. Nothing else of their size is held.
Shapes: C rows of a chunk, V vocabulary. Prefixes: i_ index, o_ offsets, m_ mask, p_ pointer, b_ block; in a
distillation x are the draft's logits and y the target's, p and q the probabilities as in kernels/distillation.py.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from longdraft.kernels import linear_loss
from longdraft.kernels.distillation import TINY, TargetChunk
from longdraft.kernels.linear_loss import IGNORED

# Logits that a program holds at a time: in bf16, 16 bytes for each of 1024 threads. Its registers allow one program per
# processor, so the rows in flight (256 KiB each in bf16 at V = 128,256) are few enough to still be in an L2 cache of
# 50 MiB for the second pass.
MOST_BLOCK = 8192
# The same for both models in a distillation, which keeps more in registers. Two to four programs fit a processor, so
# with a large vocabulary the second pass reads from memory.
MOST_DISTILLED_BLOCK = 4096
FLOOR = tl.constexpr(TINY)


@triton.jit
def _read(p_row, o_v, n_words):
    return tl.load(p_row + o_v, mask=o_v < n_words, other=float("-inf")).to(tl.float32)


@triton.jit
def _add(b_x, most, total):
    """Update the maximum and the sum of exponentials, relative to it, with a block."""
    higher = tl.maximum(most, tl.max(b_x, 0))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing read yet: avoid inf - inf
    return higher, total * tl.exp(most - base) + tl.sum(tl.exp(b_x - base), 0)


@triton.jit
def _store(p_row, o_v, n_words, b_grad, b_q, label, text_weight):
    """Write a block of the gradient, with `text_weight` of the cross-entropy's."""
    b_text = b_q - tl.where(o_v == label, 1.0, 0.0)
    b_grad += text_weight * (b_text - b_grad)
    tl.store(p_row + o_v, b_grad.to(p_row.dtype.element_ty), mask=o_v < n_words)


@triton.jit
def _row(
    p_logits, p_labels, p_loss, p_before, p_target, p_totals, p_overlap, row_stride, n_words, ignored, text_weight,
    OBJECTIVE: tl.constexpr, TOTALS: tl.constexpr, MEASURE: tl.constexpr, TOP_K: tl.constexpr,
    GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    label = tl.load(p_labels + i_row)
    if not MEASURE:  # noqa: SIM102, what is known at compile time stays apart
        if label == ignored:
            tl.store(p_loss + i_row, 0.0)
            if TOP_K:
                tl.store(p_before + i_row, n_words)
            return
    p_row = p_logits + i_row * row_stride
    p_taught = p_row if OBJECTIVE == "cross_entropy" else p_target + i_row * row_stride
    # Read before the first reduction, which synchronises all threads: none has begun to overwrite it by then.
    label_logit = tl.load(p_row + label, mask=(label >= 0) & (label < n_words), other=float("nan")).to(tl.float32)

    most, most_y = float("-inf"), float("-inf")
    total, total_y = 0.0, 0.0
    b_before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, n_words, BLOCK):
        o_v = start + tl.arange(0, BLOCK)
        b_x = _read(p_row, o_v, n_words)
        if TOP_K:
            b_before += ((b_x > label_logit) | ((b_x == label_logit) & (o_v < label))).to(tl.int32)
        most, total = _add(b_x, most, total)
        if OBJECTIVE != "cross_entropy":
            most_y, total_y = _add(_read(p_taught, o_v, n_words), most_y, total_y)
    loss = tl.log(total) + (most - label_logit)
    if TOP_K:
        before = tl.sum(b_before, 0)
        tl.store(p_before + i_row, tl.where(label == ignored, n_words, before))
    if OBJECTIVE == "cross_entropy":
        if GRADIENT:
            for start in range(0, n_words, BLOCK):
                o_v = start + tl.arange(0, BLOCK)
                b_q = tl.exp(_read(p_row, o_v, n_words) - most) / total
                _store(p_row, o_v, n_words, b_q, b_q, label, 1.0)
    else:
        log_total = tl.log(total)
        log_total_y = most_y + tl.log(total_y)
        totals = log_total_y
        if TOTALS:
            totals = tl.load(p_totals + i_row)
        whole = tl.exp(log_total_y - totals)  # the sum of p
        shared, lower, divergence = 0.0, 0.0, 0.0
        for start in range(0, n_words, BLOCK):
            o_v = start + tl.arange(0, BLOCK)
            b_log_q = _read(p_row, o_v, n_words) - most - log_total
            b_log_p = _read(p_taught, o_v, n_words) - totals
            b_p, b_q = tl.exp(b_log_p), tl.exp(b_log_q)
            if MEASURE or OBJECTIVE == "overlap":
                shared += tl.sum(tl.minimum(b_p, b_q, propagate_nan=tl.PropagateNan.ALL), 0)
            if OBJECTIVE == "overlap":
                lower += tl.sum(tl.where(b_q < b_p, b_q, 0.0), 0)
            else:
                divergence += tl.sum(tl.where(b_p != 0, b_p * (b_log_p - b_log_q), 0.0), 0)
                if GRADIENT:
                    _store(p_row, o_v, n_words, b_q * whole - b_p, b_q, label, text_weight)
        if MEASURE:
            tl.store(p_overlap + i_row, shared)
        if OBJECTIVE == "overlap":
            shared = tl.maximum(shared, FLOOR, propagate_nan=tl.PropagateNan.ALL)
            divergence = -tl.log(shared)
            if GRADIENT:
                for start in range(0, n_words, BLOCK):
                    o_v = start + tl.arange(0, BLOCK)
                    b_q = tl.exp(_read(p_row, o_v, n_words) - most - log_total)
                    b_lower = tl.where(b_q < tl.exp(_read(p_taught, o_v, n_words) - totals), b_q, 0.0)
                    _store(p_row, o_v, n_words, (b_q * lower - b_lower) / shared, b_q, label, text_weight)
        loss = tl.where(text_weight > 0, divergence + text_weight * (loss - divergence), divergence)
    tl.store(p_loss + i_row, tl.where(label == ignored, 0.0, loss))


def chunk_losses(
    logits_CV: Tensor,
    labels_C: Tensor,
    loss_C: Tensor,
    before_C: Tensor,
    top_k: int,
    gradient: bool,
    target: TargetChunk | None = None,
) -> None:
    """See `longdraft.kernels.linear_loss.chunk_losses`, which computes "acceptance" (it sorts). Counts are exact for
    any top_k, and a label outside the vocabulary gives a cross-entropy of NaN, without an out-of-bounds read."""
    if target is not None and target.like.objective == "acceptance":
        linear_loss.chunk_losses(logits_CV, labels_C, loss_C, before_C, top_k, gradient, target)
        return
    n_rows, n_words = logits_CV.shape
    assert logits_CV.stride(1) == 1, "each row must be contiguous"
    assert target is None or target.logits_CV.stride() == logits_CV.stride(), "logits of different strides"
    like, taught_CV, totals_C, overlap_C = (None,) * 4 if target is None else target
    block = min(MOST_BLOCK if like is None else MOST_DISTILLED_BLOCK, triton.next_power_of_2(n_words))
    kernel: Any = _row[(n_rows,)]  # its launch options are not in its signature
    kernel(
        logits_CV, labels_C, loss_C, before_C, taught_CV, totals_C, overlap_C, logits_CV.stride(0),
        n_words, IGNORED, 0.0 if like is None else float(like.text_weight),
        OBJECTIVE="cross_entropy" if like is None else like.objective, TOTALS=totals_C is not None,
        MEASURE=overlap_C is not None, TOP_K=top_k > 0, GRADIENT=gradient, BLOCK=block, num_warps=max(4, block // 256),
    )  # fmt: skip
