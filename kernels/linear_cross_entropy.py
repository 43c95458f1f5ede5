"""Cross-entropy of several parts, such as heads, that share one frozen LM head, without ever holding all logits.

The labelled rows of all parts are laid end to end and processed in chunks: one product gives a chunk's logits; loss,
ranks and the logits' gradient, in place, are computed from them; a second product gives the states' gradient. Logits
and their gradient exist for one chunk at a time. Of the size of the states there is only their gradient.

Why ours: Liger's fused loss takes one part per call and knows at most the top rank. Its chunks have M * D / V rows, so
it reads the LM head again for every few hundred, and each call waits for the device to count labels
(benchmarks/kernels/loss.py measures it beside ours).
Shapes: P parts, N states of a part, M labels of a part, T labels of all parts, C rows of a chunk, B rows of a block,
b of them with the label among the first, D hidden width, V vocabulary, K ranks.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longdraft.kernels import backend

# Size of a chunk's logits. On a CPU 64 MiB are 320 rows in fp32 at V = 49,152; on a GPU 256 MiB are 1024 rows in bf16
# at V = 128,256. A GPU computes some 200 rows in the time that it takes to read the LM head, so this hides the read.
CHUNK_BYTES, GPU_CHUNK_BYTES = 64 * 2**20, 256 * 2**20
# Size of a block's fp32 logits. On a CPU 2 MiB, 10 rows at V = 49,152, stay in the cache and are still enough work to
# outweigh the overhead of a dozen calls; a GPU wants fewer and larger calls.
BLOCK_BYTES, GPU_BLOCK_BYTES = 2 * 2**20, 64 * 2**20


class LinearCrossEntropy(NamedTuple):
    """Sums over each part's labels."""

    loss_sums: Tensor  # fp32 [P], differentiable
    n_labels: Tensor  # int64 [P]
    # int64 [P, K]; [p, r] is how many labels have the (r+1)-th largest logit of their row (equal ones rank by id).
    top_k_counts: Tensor


def linear_cross_entropy(
    hiddens: Sequence[Tensor],
    weight_VD: Tensor,
    labels: Sequence[Tensor],
    *,
    rows: Sequence[Tensor] | None = None,
    ignore_index: int = -100,
    top_k: int = 0,
) -> LinearCrossEntropy:
    """Each part's cross-entropy of `softmax(hidden @ weight.T)` against its labels, summed, without M x V logits.

    The forward pass computes the gradient and the backward pass hands it over, so the latter can run only once. A
    chunk's logits are Triton's on a GPU, elsewhere PyTorch's.

    Args:
        hiddens: each part's states, [N, D] in fp32, bf16 or fp16; the only argument that gets a gradient.
        weight_VD: the frozen LM head, in the states' dtype.
        labels: each part's int64 token ids [M], or `ignore_index`.
        rows: each part's int64 [M]: the state that each label belongs to; None: label i belongs to state i.
        ignore_index: the label of rows that do not count.
        top_k: K; count how often the label has rank 0..K-1 among the logits. 0 counts nothing.
    """
    check_parts(hiddens, weight_VD, labels, rows)
    n_labels = torch.stack([(labels_M != ignore_index).sum() for labels_M in labels])
    rows = rows or [torch.arange(len(labels_M), device=labels_M.device) for labels_M in labels]
    kernels = backend.triton_kernels("linear_cross_entropy", weight_VD.device.type)
    if kernels is None and backend.is_host(weight_VD.device):  # rows without a label then cost nothing
        labelled = [labels_M != ignore_index for labels_M in labels]
        labels, rows = ([x[some_M] for x, some_M in zip(parts, labelled, strict=True)] for parts in (labels, rows))
    of_chunk = chunk_losses if kernels is None else kernels.chunk_losses

    def losses(chunk: slice, *arguments: Any) -> None:
        of_chunk(*arguments)

    loss_sums, top_k_counts = chunked(hiddens, weight_VD, labels, rows, ignore_index, top_k, losses)
    return LinearCrossEntropy(loss_sums, n_labels, top_k_counts)


def check_parts(
    hiddens: Sequence[Tensor], weight_VD: Tensor, labels: Sequence[Tensor], rows: Sequence[Tensor] | None
) -> None:
    """Assert that every part has its labels and rows, and that states and LM head have one dtype."""
    assert len(hiddens) == len(labels) > 0 and (rows is None or len(rows) == len(labels)), "one of each for each part"
    for i, (hidden_ND, labels_M) in enumerate(zip(hiddens, labels, strict=True)):
        assert hidden_ND.dtype == weight_VD.dtype, f"weight_VD: {weight_VD.dtype}, and hiddens {hidden_ND.dtype}"
        assert len(labels_M) == len(hidden_ND if rows is None else rows[i]), f"labels: not one for each row of part {i}"


def rows_per_chunk(vocab_size: int, element_size: int, gpu: bool) -> int:
    """C, rounded down to whole tiles of a matrix product if it is large. `element_size`: bytes of memory per logit."""
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
    """Any loss of the labelled rows, by chunks of their logits: fp32 sums [P], differentiable, and int64 counts [P, K].

    Args:
        hiddens, weight_VD, labels, rows, ignore_index, top_k: as for `linear_cross_entropy`; `rows` is needed.
        losses: called with the chunk's place among all labels and then with the arguments of `chunk_losses` in
            this file. It writes losses and ranks, and in place of the logits their gradient.
        logits_beside: how many tensors of the logits' size `losses` holds beside them.
    """
    learning = [torch.is_grad_enabled() and hidden_ND.requires_grad for hidden_ND in hiddens]
    settings = weight_VD.detach(), labels, rows, ignore_index, top_k, learning, losses, 1 + logits_beside
    return _Chunked.apply(*settings, *hiddens)  # pyright: ignore[reportReturnType]


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight_VD, labels, rows, ignore_index, top_k, learning, losses, n_logits, *hiddens):
        borders = [0, *accumulate(len(labels_M) for labels_M in labels)]
        labels_T, rows_T, n_labels = torch.cat(list(labels)), torch.cat(list(rows)), borders[-1]
        n_words, width = weight_VD.shape
        n_rows = rows_per_chunk(n_words, n_logits * weight_VD.element_size(), weight_VD.is_cuda)
        n_rows = max(1, min(n_labels, n_rows))
        # All chunks share these buffers; the states' gradient overwrites the states.
        logits_CV, states_CD = weight_VD.new_empty(n_rows, n_words), weight_VD.new_empty(n_rows, width)
        loss_T = weight_VD.new_empty(n_labels, dtype=torch.float32)
        before_T = labels_T.new_empty(n_labels if top_k else 0, dtype=torch.int32)
        sizes = zip(rows, learning, strict=True)
        grads = [weight_VD.new_empty(len(rows_M), width) if learns else None for rows_M, learns in sizes]
        for start in range(0, n_labels, n_rows):
            chunk = slice(start, min(start + n_rows, n_labels))
            pieces = _pieces(borders, chunk)
            states, logits = (x[: chunk.stop - start] for x in (states_CD, logits_CV))
            for piece in pieces:
                torch.index_select(hiddens[piece.part], 0, rows_T[piece.of_all], out=states[piece.of_chunk])
            torch.mm(states, weight_VD.T, out=logits)
            losses(chunk, logits, labels_T[chunk], loss_T[chunk], before_T[chunk], ignore_index, top_k, any(learning))
            if any(learning):
                torch.mm(logits, weight_VD, out=states)
                states.masked_fill_((labels_T[chunk] == ignore_index)[:, None], 0.0)
            for piece in pieces:
                if (grad_MD := grads[piece.part]) is not None:
                    grad_MD[piece.of_part] = states[piece.of_chunk]
        ctx.grads, ctx.rows, ctx.n_states = grads, rows, [len(hidden_ND) for hidden_ND in hiddens]
        ranks_K = torch.arange(top_k, device=labels_T.device)
        parts = [slice(*ends) for ends in pairwise(borders)]
        top_k_counts_PK = torch.stack([(before_T[part, None] == ranks_K).sum(0) for part in parts])
        ctx.mark_non_differentiable(top_k_counts_PK)
        return torch.stack([loss_T[part].sum() for part in parts]), top_k_counts_PK

    @staticmethod
    def backward(ctx, *scales):
        if ctx.grads is None:
            raise RuntimeError("linear loss: its gradient was used up by an earlier backward pass")
        grads, ctx.grads = ctx.grads, None
        state_grads: list[Tensor | None] = [None] * len(grads)
        # Each part's is freed before the next one's is made: together they are as large as all states.
        for part, scale_1 in enumerate(scales[0].split(1)):
            grad_MD, grads[part] = grads[part], None
            if grad_MD is not None:
                # The scale has one dimension to multiply in fp32: PyTorch would round a scalar to bf16 first.
                grad_ND = grad_MD.new_zeros(ctx.n_states[part], grad_MD.shape[1])
                state_grads[part] = grad_ND.index_add_(0, ctx.rows[part], grad_MD.mul_(scale_1))
        return *[None] * 8, *state_grads


class _Piece(NamedTuple):
    """The labels that a chunk and a part share: where they are in the part, in the chunk and among all labels."""

    part: int
    of_part: slice
    of_chunk: slice
    of_all: slice


def _pieces(borders: list[int], chunk: slice) -> list[_Piece]:
    pieces = []
    for part, (first, last) in enumerate(pairwise(borders)):
        start, stop = max(first, chunk.start), min(last, chunk.stop)
        if start < stop:
            places = (slice(start - begin, stop - begin) for begin in (first, chunk.start, 0))
            pieces.append(_Piece(part, *places))
    return pieces


def rows_per_block(vocab_size: int, gpu: bool = False) -> int:
    """B: `chunk_losses` takes a few rows at a time, so that on a CPU they stay in the cache."""
    return max(1, (GPU_BLOCK_BYTES if gpu else BLOCK_BYTES) // (4 * vocab_size))


def chunk_losses(
    logits_CV: Tensor,
    labels_C: Tensor,
    loss_C: Tensor,
    before_C: Tensor,
    ignore_index: int,
    top_k: int,
    gradient: bool,
) -> None:
    """Cross-entropy of every row, computed in fp32 for logits of any dtype.

    Args:
        logits_CV: fp32, bf16 or fp16; with `gradient` overwritten with softmax - onehot(label). Rows whose label is
            `ignore_index` then hold arbitrary values.
        labels_C: int64 token ids, or `ignore_index`.
        loss_C: fp32, written; 0 where the label is `ignore_index`.
        before_C: int32 [C], or [0] if top_k is 0; written: how many logits rank before the label's, where equal logits
            rank by id, as in an argmax. It is exact below top_k; otherwise, and where the label is `ignore_index`, it
            is at least top_k.
        ignore_index: the label of rows that do not count.
        top_k: how many ranks are needed; 0 counts nothing.
        gradient: whether to overwrite the logits.
    """
    n_rows, n_words = logits_CV.shape
    n_block = rows_per_block(n_words, logits_CV.is_cuda)
    ignored_C = labels_C == ignore_index
    labels_C = labels_C.masked_fill(ignored_C, 0)  # `gather` needs an id
    scratch_BV = logits_CV.new_empty((min(n_block, n_rows), n_words), dtype=torch.float32)
    for start in range(0, n_rows, n_block):
        rows = slice(start, start + n_block)
        inputs = logits_CV[rows], labels_C[rows, None], scratch_BV[: min(n_block, n_rows - start)]
        _block_losses(*inputs, loss_C[rows], before_C[rows], top_k, gradient)
    loss_C.masked_fill_(ignored_C, 0.0)
    if top_k:
        before_C.masked_fill_(ignored_C, n_words)


def _block_losses(
    logits_BV: Tensor,
    label_B1: Tensor,
    scratch_BV: Tensor,
    loss_B: Tensor,
    before_B: Tensor,
    top_k: int,
    gradient: bool,
) -> None:
    exact_BV = logits_BV.float()  # no copy of fp32 logits
    if top_k:
        before_B.copy_(count_before(exact_BV, label_B1, top_k, scratch_BV))
    # The exponentials cost most. softmax computes them once, and its largest probability is 1 / their sum.
    probs_BV = torch.softmax(exact_BV, 1, out=scratch_BV)
    torch.sub(exact_BV.amax(1) - exact_BV.gather(1, label_B1)[:, 0], probs_BV.amax(1).log_(), out=loss_B)
    if gradient:
        probs_BV.scatter_add_(1, label_B1, probs_BV.new_full(label_B1.shape, -1.0))
        logits_BV.copy_(probs_BV)


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
