"""The loss of several parts, such as heads, that share one frozen LM head, without ever holding all logits.

The labelled rows of all parts are laid end to end and processed in chunks: one product gives a chunk's logits; loss,
ranks and the logits' gradient, in place, are computed from them; a second product gives the states' gradient. Logits
and their gradient exist for one chunk at a time. Only the states' gradient is as large as the states. A distillation
also holds the target's logits of the same rows.

Why ours: Liger's fused cross-entropy takes one part per call and counts at most the top rank. Its chunks have M * D / V
rows, so it reads the LM head again for every few hundred, and each call waits for the device to count labels
(benchmarks/kernels/loss.py measures it beside ours).
Shapes: P parts, N states of a part, M labels of a part, T labels of all parts, C rows of a chunk, B rows of a block,
b of them with the label among the first, D hidden width, V vocabulary, K ranks.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.kernels import backend
from longdraft.kernels.distillation import Distillation, TargetChunk

IGNORED = -100  # a label that does not count
# Size of a chunk's logits. On a CPU 64 MiB are 320 rows in fp32 at V = 49,152; on a GPU 256 MiB are 1024 rows in bf16
# at V = 128,256. A GPU computes some 200 rows in the time that it takes to read the LM head, so this hides the read.
CHUNK_BYTES, GPU_CHUNK_BYTES = 64 * 2**20, 256 * 2**20
# Size of a block's fp32 logits. On a CPU 2 MiB, 10 rows at V = 49,152, stay in the cache and are still enough work to
# outweigh the overhead of a dozen calls; a GPU wants fewer and larger calls.
BLOCK_BYTES, GPU_BLOCK_BYTES = 2 * 2**20, 64 * 2**20


class LossPart(NamedTuple):
    """The labels of a part of the loss: `rows` int64 [M], the states that have a label, and `labels` int64 [M], their
    token ids, or IGNORED."""

    rows: Tensor
    labels: Tensor


class LinearLoss(NamedTuple):
    """Sums over each part's labels."""

    sums: Tensor  # fp32 [P], differentiable: the losses
    n_labels: Tensor  # int64 [P]
    # int64 [P, K]; [p, r] is how many labels have the (r+1)-th largest logit of their row (equal ones rank by id).
    top_k_counts: Tensor
    overlaps: Tensor  # fp32 [P], sums of min(p, q) over all rows of a part, ignored ones included; 0 if not measured


def linear_loss(
    hiddens: Sequence[Tensor],
    weight_VD: Tensor,
    parts: Sequence[LossPart],
    top_k: int = 0,
    distillation: Distillation | None = None,
) -> LinearLoss:
    """Each part's cross-entropy of `softmax(hidden @ weight.T)` against its labels, or its loss against the target's
    distribution, summed, without M x V logits.

    The forward pass computes the gradient and the backward pass returns it, so the latter can run only once. On a GPU
    Triton computes the losses of a chunk, except "acceptance", which sorts.

    Args:
        hiddens: each part's states, [N, D] in fp32, bf16 or fp16; the only argument that gets a gradient.
        weight_VD: the frozen LM head, in the states' dtype.
        parts: one for each of the hiddens.
        top_k: K; count how often the label has rank 0..K-1 among the logits. 0 counts nothing.
        distillation: None for cross-entropy of the labels.
    """
    assert len(hiddens) == len(parts) > 0, "one part for each of the hiddens"
    for i, (hidden_ND, part) in enumerate(zip(hiddens, parts, strict=True)):
        assert hidden_ND.dtype == weight_VD.dtype, f"weight_VD: {weight_VD.dtype}, and hiddens {hidden_ND.dtype}"
        assert len(part.labels) == len(part.rows), f"labels: not one for each row of part {i}"
        assert distillation is None or len(distillation.rows[i]) == len(part.rows), f"distillation: rows of part {i}"
    n_labels = torch.stack([(part.labels != IGNORED).sum() for part in parts])
    if distillation is None and backend.is_host(weight_VD.device):  # rows without a label then cost nothing
        parts = [LossPart(*(x[part.labels != IGNORED] for x in part)) for part in parts]
    learning = [torch.is_grad_enabled() and hidden_ND.requires_grad for hidden_ND in hiddens]
    sums_P, counts_PK, overlaps_P = _LinearLoss.apply(  # pyright: ignore[reportGeneralTypeIssues]
        weight_VD.detach(), parts, top_k, distillation, learning, *hiddens
    )
    return LinearLoss(sums_P, n_labels, counts_PK, overlaps_P)


def rows_per_chunk(vocab_size: int, element_size: int, gpu: bool) -> int:
    """C, rounded down to whole tiles of a matrix product if it is large. `element_size`: bytes of memory per logit."""
    n_rows = max(16, (GPU_CHUNK_BYTES if gpu else CHUNK_BYTES) // (element_size * vocab_size))
    return n_rows - n_rows % 64 if n_rows > 64 else n_rows


def rows_per_block(vocab_size: int, gpu: bool = False, distilled: bool = False) -> int:
    """B: losses are computed for a few rows at a time, so that on a CPU they stay in the cache. A distillation on a GPU
    takes a quarter, because it holds more than a dozen numbers per logit."""
    n_rows = (GPU_BLOCK_BYTES if gpu else BLOCK_BYTES) // (4 * vocab_size)
    return max(1, n_rows // 4 if gpu and distilled else n_rows)


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight_VD, parts, top_k, distillation, learning, *hiddens):  # pyright: ignore[reportIncompatibleMethodOverride]
        borders, learns = [0, *accumulate(len(part.rows) for part in parts)], any(learning)
        rows_T, labels_T = (torch.cat(fields) for fields in zip(*parts, strict=True))
        (n_words, width), n_labels = weight_VD.shape, borders[-1]
        n_rows = rows_per_chunk(n_words, (2 if distillation else 1) * weight_VD.element_size(), weight_VD.is_cuda)
        n_rows = max(1, min(n_labels, n_rows))
        # All chunks share these buffers; the states' gradient overwrites the states.
        logits_CV, states_CD = weight_VD.new_empty(n_rows, n_words), weight_VD.new_empty(n_rows, width)
        loss_T = weight_VD.new_empty(n_labels, dtype=torch.float32)
        overlap_T = torch.zeros_like(loss_T)
        before_T = labels_T.new_empty(n_labels if top_k else 0, dtype=torch.int32)
        if distillation is not None:
            target_rows_T, target_CV = torch.cat(list(distillation.rows)), torch.empty_like(logits_CV)
        kernels = backend.triton_kernels("linear_loss", weight_VD.device.type)
        compute = chunk_losses if kernels is None else kernels.chunk_losses
        sizes = zip(parts, learning, strict=True)
        grads = [weight_VD.new_empty(len(part.rows), width) if one_learns else None for part, one_learns in sizes]
        for start in range(0, n_labels, n_rows):
            chunk = slice(start, min(start + n_rows, n_labels))
            shared, labels_C = _shared(borders, chunk), labels_T[chunk]
            states, logits = (x[: len(labels_C)] for x in (states_CD, logits_CV))
            for part, of_all, of_chunk, _ in shared:
                torch.index_select(hiddens[part], 0, rows_T[of_all], out=states[of_chunk])
            torch.mm(states, weight_VD.T, out=logits)
            target = None
            if distillation is not None:
                rows_C, target_logits = target_rows_T[chunk], target_CV[: len(labels_C)]
                target = distillation.of_chunk(rows_C, weight_VD, target_logits, overlap_T[chunk])
            compute(logits, labels_C, loss_T[chunk], before_T[chunk], top_k, learns, target)
            if learns:
                torch.mm(logits, weight_VD, out=states)
                states.masked_fill_((labels_C == IGNORED)[:, None], 0.0)
            for part, _, of_chunk, of_part in shared:
                if (grad_MD := grads[part]) is not None:
                    grad_MD[of_part] = states[of_chunk]
        ctx.grads, ctx.rows, ctx.n_states = grads, [part.rows for part in parts], [len(x) for x in hiddens]
        ranks_K, of_parts = torch.arange(top_k, device=labels_T.device), [slice(*ends) for ends in pairwise(borders)]
        counts_PK = torch.stack([(before_T[part, None] == ranks_K).sum(0) for part in of_parts])
        sums_P, overlaps_P = (torch.stack([x_T[part].sum() for part in of_parts]) for x_T in (loss_T, overlap_T))
        ctx.mark_non_differentiable(counts_PK, overlaps_P)
        return sums_P, counts_PK, overlaps_P

    @staticmethod
    def backward(ctx, *scales):
        if ctx.grads is None:
            raise RuntimeError("linear loss: its gradient was used up by an earlier backward pass")
        grads, ctx.grads = ctx.grads, None
        state_grads: list[Tensor | None] = [None] * len(grads)
        # Each part's gradient is freed before the next one's is made: together they are as large as all states.
        for part, scale_1 in enumerate(scales[0].split(1)):
            grad_MD, grads[part] = grads[part], None
            if grad_MD is not None:
                # The scale has one dimension to multiply in fp32: PyTorch would round a scalar to bf16 first.
                grad_ND = grad_MD.new_zeros(ctx.n_states[part], grad_MD.shape[1])
                state_grads[part] = grad_ND.index_add_(0, ctx.rows[part], grad_MD.mul_(scale_1))
        return *[None] * 5, *state_grads


def _shared(borders: list[int], chunk: slice) -> list[tuple[int, slice, slice, slice]]:
    """The labels that a chunk and each part share: the part, and where they are among all labels, in the chunk and in
    the part."""
    shared = []
    for part, (first, last) in enumerate(pairwise(borders)):
        start, stop = max(first, chunk.start), min(last, chunk.stop)
        if start < stop:
            shared.append((part, *(slice(start - begin, stop - begin) for begin in (0, chunk.start, first))))
    return shared


def chunk_losses(
    logits_CV: Tensor,
    labels_C: Tensor,
    loss_C: Tensor,
    before_C: Tensor,
    top_k: int,
    gradient: bool,
    target: TargetChunk | None = None,
) -> None:
    """The loss of every row, computed in fp32 for logits of any dtype.

    Args:
        logits_CV: fp32, bf16 or fp16; with `gradient` overwritten with the loss's gradient, in cross-entropy softmax -
            onehot(label). Rows whose label is IGNORED then hold arbitrary values.
        labels_C: int64 token ids, or IGNORED.
        loss_C: fp32, written; 0 where the label is IGNORED.
        before_C: int32 [C], or [0] if top_k is 0; written: how many logits rank before the label's, where equal logits
            rank by id, as in an argmax. It is exact below top_k; otherwise, and where the label is IGNORED, it is at
            least top_k.
        top_k: how many ranks are needed; 0 counts nothing.
        gradient: whether to overwrite the logits.
        target: what the draft is compared with; None for cross-entropy.
    """
    n_rows, n_words = logits_CV.shape
    n_block = min(n_rows, rows_per_block(n_words, logits_CV.is_cuda, target is not None))
    ignored_C = labels_C == IGNORED
    labels_C = labels_C.masked_fill(ignored_C, 0)  # `gather` needs an id
    scratch_BV = logits_CV.new_empty((n_block, n_words), dtype=torch.float32)
    for start in range(0, n_rows, n_block):
        block, scratch = slice(start, start + n_block), scratch_BV[: n_rows - start]
        logits_BV, label_B1 = logits_CV[block].float(), labels_C[block, None]  # does not copy fp32 logits
        if top_k:
            before_C[block] = count_before(logits_BV, label_B1, top_k, scratch).int()
        if target is None:
            loss_C[block], gradient_BV = _cross_entropy(logits_BV, label_B1, scratch)
        else:
            loss_C[block], gradient_BV = target.losses(block, logits_BV, label_B1)
        if gradient:
            logits_CV[block] = gradient_BV
    loss_C.masked_fill_(ignored_C, 0.0)
    if top_k:
        before_C.masked_fill_(ignored_C, n_words)


def _cross_entropy(logits_BV: Tensor, label_B1: Tensor, scratch_BV: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's loss, [B], and its gradient, in `scratch_BV`."""
    # The exponentials cost most. softmax computes them once, and its largest probability is 1 / their sum.
    probs_BV = torch.softmax(logits_BV, 1, out=scratch_BV)
    loss_B = logits_BV.amax(1) - logits_BV.gather(1, label_B1)[:, 0] - probs_BV.amax(1).log_()
    return loss_B, probs_BV.scatter_add_(1, label_B1, probs_BV.new_full(label_B1.shape, -1.0))


def count_before(logits_BV: Tensor, label_B1: Tensor, top_k: int, scratch_BV: Tensor) -> Tensor:
    """How many logits rank before the label's, as `chunk_losses` counts, in fp32: exact up to 2 ** 24. Summing bools
    would convert them all to int64."""
    own_B1 = logits_BV.gather(1, label_B1)
    before_B = torch.gt(logits_BV, own_B1, out=scratch_BV).sum(1)
    # Equal logits matter only for labels within the first top_k, which are few. A GPU counts all, to avoid a wait.
    first_b = torch.arange(len(before_B), device=logits_BV.device)
    if backend.is_host(logits_BV.device):
        first_b = first_b[before_B < top_k]
    equal_bV = torch.index_select(logits_BV, 0, first_b, out=scratch_BV[: len(first_b)]).eq_(own_B1[first_b])
    ids_V = torch.arange(logits_BV.shape[1], device=logits_BV.device)
    equal_bV.masked_fill_(ids_V >= label_B1[first_b], 0.0)
    return before_B.index_add_(0, first_b, equal_bV.sum(1))
