"""Cross-entropy of a chunk of logits, its gradient in their place, and the labels' ranks, in one Triton kernel.

One program per row makes two passes over the vocabulary. The first finds the maximum and the sum of exponentials, and
counts the logits that rank before the label's; the second overwrites the logits with softmax - onehot. Nothing else of
their size is held.
Shapes: C rows of a chunk, V vocabulary. Prefixes: i_ index, o_ offsets, m_ mask, p_ pointer, b_ block.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from longdraft.kernels.linear_loss import IGNORED

# Logits that a program holds at a time: in bf16, 16 bytes for each of 1024 threads. Its registers allow one program per
# processor, so the rows in flight (256 KiB each in bf16 at V = 128,256) are few enough to still be in an L2 cache of
# 50 MiB for the second pass.
MOST_BLOCK = 8192


@triton.jit
def _row(
    p_logits, p_labels, p_loss, p_before, row_stride, n_words, ignored,
    TOP_K: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    label = tl.load(p_labels + i_row)
    if label == ignored:
        tl.store(p_loss + i_row, 0.0)
        if TOP_K:
            tl.store(p_before + i_row, n_words)
        return
    p_row = p_logits + i_row * row_stride
    # Read before the first reduction, which synchronizes all threads: none has begun to overwrite it by then.
    label_logit = tl.load(p_row + label, mask=(label >= 0) & (label < n_words), other=float("nan")).to(tl.float32)

    most = float("-inf")
    total = 0.0
    b_before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, n_words, BLOCK):
        o_v = start + tl.arange(0, BLOCK)
        b_x = tl.load(p_row + o_v, mask=o_v < n_words, other=float("-inf")).to(tl.float32)
        if TOP_K:
            b_before += ((b_x > label_logit) | ((b_x == label_logit) & (o_v < label))).to(tl.int32)
        higher = tl.maximum(most, tl.max(b_x, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing read yet: avoid inf - inf
        total = total * tl.exp(most - base) + tl.sum(tl.exp(b_x - base), 0)
        most = higher
    tl.store(p_loss + i_row, tl.log(total) + (most - label_logit))
    if TOP_K:
        tl.store(p_before + i_row, tl.sum(b_before, 0))
    if GRADIENT:
        for start in range(0, n_words, BLOCK):
            o_v = start + tl.arange(0, BLOCK)
            m_v = o_v < n_words
            b_x = tl.load(p_row + o_v, mask=m_v, other=float("-inf")).to(tl.float32)
            b_grad = tl.exp(b_x - most) / total - tl.where(o_v == label, 1.0, 0.0)
            tl.store(p_row + o_v, b_grad.to(p_logits.dtype.element_ty), mask=m_v)


def chunk_losses(
    logits_CV: Tensor,
    labels_C: Tensor,
    loss_C: Tensor,
    before_C: Tensor,
    top_k: int,
    gradient: bool,
) -> None:
    """See `longdraft.kernels.linear_loss.chunk_losses`. Counts are exact for any top_k, and a label
    outside the vocabulary gives a loss of NaN, without a read out of bounds."""
    n_rows, n_words = logits_CV.shape
    assert logits_CV.stride(1) == 1, "a row's logits must lie together"
    block = min(MOST_BLOCK, triton.next_power_of_2(n_words))
    kernel: Any = _row[(n_rows,)]  # its launch options are not in its signature
    kernel(
        logits_CV, labels_C, loss_C, before_C, logits_CV.stride(0), n_words, IGNORED,
        TOP_K=top_k > 0, GRADIENT=gradient, BLOCK=block, num_warps=max(4, block // 256),
    )  # fmt: skip
