"""Cross-entropy of several parts that share one frozen linear layer (the LM head), without their logits.

The labelled rows of all parts are laid end to end and taken in chunks: logits by one product, loss and ranks from them,
their gradient in their place, the gradient of the states by a second product. Neither logits nor gradient of them exist
for more than a chunk, and of the states' size there is their gradient alone. What is done to a chunk's logits is a
Triton kernel (triton_impl/) or plain PyTorch (reference/). Ours, for Liger's fused loss does less: one part a call; at
most the top rank; chunks of M * D / V rows, which read the LM head again for every few hundred; and each call waits for
the device to count labels (benchmarks/loss.py measures it beside ours).
Not here: which rows have labels (models/drafts/, train/batches.py).
Shapes: P parts, N states of a part, M labels of a part, T labels of all, C of a chunk, D hidden, V vocabulary, K ranks.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longdraft.kernels import backend
from longdraft.kernels.reference import linear_cross_entropy as reference

IMPLEMENTATIONS = ("auto", "triton", "torch")
# Logits of a chunk. On a CPU 64 MiB are 320 rows in fp32 at V = 49,152, on a GPU 256 MiB are 1024 rows in bf16 at
# V = 128,256: a GPU computes some 200 rows in the time of reading the LM head once, so this is enough to hide it.
CHUNK_BYTES, GPU_CHUNK_BYTES = 64 * 2**20, 256 * 2**20


class LinearCrossEntropy(NamedTuple):
    """`loss_sums` fp32 [P], differentiable; `n_labels` int64 [P]; `rank_counts` int64 [P, K]: labels whose logit is the
    (r+1)-th largest of its row, of equal ones the lower id first."""

    loss_sums: Tensor
    n_labels: Tensor
    rank_counts: Tensor


def linear_cross_entropy(
    hiddens: Sequence[Tensor],
    weight_VD: Tensor,
    labels: Sequence[Tensor],
    *,
    rows: Sequence[Tensor] | None = None,
    ignore_index: int = -100,
    top_k: int = 0,
    implementation: str = "auto",
) -> LinearCrossEntropy:
    """Each part's cross-entropy of `softmax(hidden @ weight.T)` against its labels, summed; never holds M x V.

    The gradient is made in the forward pass and given away in the backward pass, which can therefore run once.

    Args:
        hiddens: a part's states, [N, D] in fp32, bf16 or fp16; the only argument that gets a gradient.
        weight_VD: the frozen LM head, in the states' dtype.
        labels: a part's int64 token ids [M], or `ignore_index`.
        rows: a part's int64 [M], the states that the labels are of; None: label i is of state i.
        top_k: count how often the label has rank 0..top_k-1 among the logits; 0 counts nothing.
        implementation: "triton" and "torch" are taken at their word; "auto" is Triton on a GPU where it is installed,
            else torch.

    Raises:
        ValueError: unknown implementation, or one that is not installed; dtypes, or numbers of parts or labels, that
            differ.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation: {implementation!r} is none of {', '.join(IMPLEMENTATIONS)}")
    check_parts(hiddens, weight_VD, labels, rows)
    n_labels = torch.stack([(labels_M != ignore_index).sum() for labels_M in labels])
    rows = rows or [torch.arange(len(labels_M), device=labels_M.device) for labels_M in labels]
    kernels = None if implementation == "torch" else _triton(implementation, weight_VD.device)
    if kernels is None and backend.is_host(weight_VD.device):  # rows without a label then cost nothing
        kept = [labels_M != ignore_index for labels_M in labels]
        labels, rows = ([x[kept_M] for x, kept_M in zip(part, kept, strict=True)] for part in (labels, rows))
    chunk_losses = (kernels or reference).chunk_losses

    def losses(chunk: slice, *given: Any) -> None:
        chunk_losses(*given)

    loss_sums, rank_counts = chunked(hiddens, weight_VD, labels, rows, ignore_index, top_k, losses)
    return LinearCrossEntropy(loss_sums, n_labels, rank_counts)


def check_parts(
    hiddens: Sequence[Tensor], weight_VD: Tensor, labels: Sequence[Tensor], rows: Sequence[Tensor] | None
) -> None:
    """Raises ValueError for dtypes, or numbers of parts or labels, that differ."""
    if not hiddens:
        raise ValueError("hiddens: [] has no part; give at least one")
    for name, given in (("labels", labels), ("rows", rows)):
        if given is not None and len(given) != len(hiddens):
            raise ValueError(f"{name}: {len(given)} parts, but hiddens has {len(hiddens)}; give one for each")
    for i, (hidden_ND, labels_M) in enumerate(zip(hiddens, labels, strict=True)):
        if hidden_ND.dtype != weight_VD.dtype:
            raise ValueError(f"weight_VD: {weight_VD.dtype}, but hiddens has {hidden_ND.dtype}; cast one of them")
        n_places = len(hidden_ND) if rows is None else len(rows[i])
        if n_places != len(labels_M):
            raise ValueError(f"labels: {len(labels_M)} in part {i}, but {n_places} states or rows; give one for each")


def _triton(implementation: str, device: torch.device) -> Any | None:
    """Asked for by name they are taken anywhere: Triton's interpreter runs them on a CPU."""
    kernels = backend.triton_kernels("linear_cross_entropy", "cuda" if implementation == "triton" else device.type)
    if kernels is None and implementation == "triton":
        raise ValueError("implementation: 'triton' needs the package triton; install longdraft[gpu]")
    return kernels


def rows_per_chunk(vocab_size: int, element_size: int, gpu: bool) -> int:
    """C, in whole tiles of a matrix product where it is many; `element_size`: bytes of all that a logit has there."""
    n_rows = max(16, (GPU_CHUNK_BYTES if gpu else CHUNK_BYTES) // (element_size * vocab_size))
    return n_rows - n_rows % 64 if n_rows > 64 else n_rows


def chunked(
    hiddens: Sequence[Tensor],
    weight_VD: Tensor,
    labels: Sequence[Tensor],
    rows: Sequence[Tensor],
    ignore_index: int,
    top_k: int,
    losses: Callable[..., None],
    logits_beside: int = 0,
) -> tuple[Tensor, Tensor]:
    """A loss of the labelled rows by chunks of their logits: fp32 [P] sums, differentiable, and int64 [P, K] counts.

    Args:
        losses: called with the chunk's place in all labels and then as reference/linear_cross_entropy.py's
            `chunk_losses`: writes losses and ranks, and in the logits' place their gradient.
        logits_beside: how many more logits a logit of the chunk has beside it, in the same memory.
    """
    wanted = [torch.is_grad_enabled() and hidden_ND.requires_grad for hidden_ND in hiddens]
    given = weight_VD.detach(), labels, rows, ignore_index, top_k, wanted, losses, 1 + logits_beside
    return _Chunked.apply(*given, *hiddens)  # pyright: ignore[reportReturnType]


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight_VD, labels, rows, ignore_index, top_k, wanted, losses, n_logits, *hiddens):
        borders = [0, *accumulate(len(labels_M) for labels_M in labels)]
        labels_T, rows_T, n_labels = torch.cat(list(labels)), torch.cat(list(rows)), borders[-1]
        n_words, width = weight_VD.shape
        n_rows = rows_per_chunk(n_words, n_logits * weight_VD.element_size(), weight_VD.is_cuda)
        n_rows = max(1, min(n_labels, n_rows))
        # All chunks share these; the states' gradient takes the states' place, too.
        logits_CV, states_CD = weight_VD.new_empty(n_rows, n_words), weight_VD.new_empty(n_rows, width)
        loss_T = weight_VD.new_empty(n_labels, dtype=torch.float32)
        before_T = labels_T.new_empty(n_labels if top_k else 0, dtype=torch.int32)
        sizes = zip(rows, wanted, strict=True)
        grads = [weight_VD.new_empty(len(rows_M), width) if want else None for rows_M, want in sizes]
        for start in range(0, n_labels, n_rows):
            chunk = slice(start, min(start + n_rows, n_labels))
            pieces = _pieces(borders, chunk)
            states, logits = (x[: chunk.stop - start] for x in (states_CD, logits_CV))
            for piece in pieces:
                torch.index_select(hiddens[piece.part], 0, rows_T[piece.of_all], out=states[piece.of_chunk])
            torch.mm(states, weight_VD.T, out=logits)
            losses(chunk, logits, labels_T[chunk], loss_T[chunk], before_T[chunk], ignore_index, top_k, any(wanted))
            if any(wanted):
                torch.mm(logits, weight_VD, out=states)
                states.masked_fill_((labels_T[chunk] == ignore_index)[:, None], 0.0)
            for piece in pieces:
                if (grad_MD := grads[piece.part]) is not None:
                    grad_MD[piece.of_part] = states[piece.of_chunk]
        ctx.grads, ctx.rows, ctx.n_states = grads, rows, [len(hidden_ND) for hidden_ND in hiddens]
        ranks_K = torch.arange(top_k, device=labels_T.device)
        parts = [slice(*ends) for ends in pairwise(borders)]
        rank_counts_PK = torch.stack([(before_T[part, None] == ranks_K).sum(0) for part in parts])
        ctx.mark_non_differentiable(rank_counts_PK)
        return torch.stack([loss_T[part].sum() for part in parts]), rank_counts_PK

    @staticmethod
    def backward(ctx, *scales):
        if ctx.grads is None:
            raise RuntimeError("linear loss: its gradient was used up by an earlier backward pass")
        grads, ctx.grads = ctx.grads, None
        given: list[Tensor | None] = [None] * len(grads)
        # Each part's is let go before the next one's is made: together they are as large as all states.
        for part, scale_1 in enumerate(scales[0].split(1)):
            grad_MD, grads[part] = grads[part], None
            if grad_MD is not None:
                # A scale of one dimension multiplies in fp32, where one of none would first be rounded to bf16.
                grad_ND = grad_MD.new_zeros(ctx.n_states[part], grad_MD.shape[1])
                given[part] = grad_ND.index_add_(0, ctx.rows[part], grad_MD.mul_(scale_1))
        return *[None] * 8, *given


class _Piece(NamedTuple):
    """What a chunk and a part share: where it is in each and in all labels."""

    part: int
    of_part: slice
    of_chunk: slice
    of_all: slice


def _pieces(borders: list[int], chunk: slice) -> list[_Piece]:
    found = []
    for part, (first, last) in enumerate(pairwise(borders)):
        start, stop = max(first, chunk.start), min(last, chunk.stop)
        if start < stop:
            places = (slice(start - begin, stop - begin) for begin in (first, chunk.start, 0))
            found.append(_Piece(part, *places))
    return found
