"""The gated delta rule: linear attention whose memory is one matrix per head (Gated DeltaNet, arXiv 2412.06464).

A token t decays the memory S, replaces what it holds for the key k_t, and reads it:
    S_t = exp(g_t) S_(t-1);  u_t = beta_t (v_t - S_t^T k_t);  S_t += k_t u_t^T;  o_t = S_t^T q_t
A tree's nodes take just these steps, each from its parent's memory: a node's bits depend only on its path, so they are
those of plain decoding. `chain` takes long texts, 64 tokens at a time, which solve one triangular system (equations 7
to 9). Why ours: flash-linear-attention's kernels know no trees.
All in fp32. Shapes: B slots, T tokens, V heads of the values, k key width, v value width, N chunks of C tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from longdraft.kernels import backend
from longdraft.kernels.cpu import delta
from longdraft.kernels.tree import PassPlan

CHUNK = 64


class DeltaTokens(NamedTuple):
    """A pass's tokens in one layer, fp32: queries and keys of unit length (queries then divided by the root of k), one
    for each head of the values; the decay's logarithm g, at most 0; and beta, the share that is replaced."""

    q_BTVk: Tensor
    k_BTVk: Tensor
    v_BTVv: Tensor
    g_BTV: Tensor
    beta_BTV: Tensor

    def at(self, places: tuple) -> "DeltaTokens":
        """The tokens at these indices of the first two dimensions."""
        return DeltaTokens(*(x[places] for x in self))

    def only(self, counts_B: Tensor) -> "DeltaTokens":
        """The tokens, where those after a slot's first `counts_B` change no memory."""
        beyond_BT1 = (torch.arange(self.g_BTV.shape[1], device=counts_B.device) >= counts_B[:, None])[..., None]
        return self._replace(
            g_BTV=self.g_BTV.masked_fill(beyond_BT1, 0), beta_BTV=self.beta_BTV.masked_fill(beyond_BT1, 0)
        )


def tree(tokens: DeltaTokens, memory_BVkv: Tensor, plan: PassPlan) -> Tensor:
    """What the tokens of a pass read, [B, T, V, v]: each after its ancestors, and they after the memory."""
    if (triton := backend.triton_kernels("gated_delta", memory_BVkv.device.type)) is not None:
        return triton.tree_steps(tokens, memory_BVkv, plan.parent_BT, plan.depth_BT, plan.path_BTT)
    if backend.is_host(memory_BVkv.device) and delta.serves(memory_BVkv.shape[-1]):
        return delta.steps(_for_steps(tokens), memory_BVkv, parents_BT=plan.parent_BT)
    return tree_steps_reference(tokens, memory_BVkv, plan.parent_BT, plan.depth_BT, plan.path_BTT)


def advance(tokens: DeltaTokens, memory_BVkv: Tensor, counts_B: Tensor) -> Tensor:
    """The memory after each slot's first `counts_B` tokens, which follow each other."""
    if (triton := backend.triton_kernels("gated_delta", memory_BVkv.device.type)) is not None:
        return triton.advance_steps(tokens, memory_BVkv, counts_B)
    if backend.is_host(memory_BVkv.device) and delta.serves(memory_BVkv.shape[-1]):
        return delta.steps(_for_steps(tokens), memory_BVkv, counts_B=counts_B)
    return advance_steps_reference(tokens, memory_BVkv, counts_B)


def _for_steps(tokens: DeltaTokens) -> tuple[Tensor, ...]:
    """q, k, v, the decay exp(g) and beta. The decay is rounded from fp64, because PyTorch's exponential in fp32 differs
    by where in a vector a number stands."""
    q_BTVk, k_BTVk, v_BTVv, g_BTV, beta_BTV = tokens
    return q_BTVk, k_BTVk, v_BTVv, g_BTV.double().exp().float(), beta_BTV


def tree_steps_reference(
    tokens: DeltaTokens, memory_BVkv: Tensor, parent_BT: Tensor, depth_BT: Tensor, path_BTT: Tensor | None
) -> Tensor:
    """What each node reads, [B, T, V, v], by the definition.

    parent_BT, depth_BT, path_BTT: as in PassPlan, which say the same three times; this reads the parents alone.
    """
    (batch, n_rows), reads, given = parent_BT.shape, [], _for_steps(tokens)
    slots, after = torch.arange(batch, device=parent_BT.device), memory_BVkv.new_empty(n_rows + 1, *memory_BVkv.shape)
    after[-1] = memory_BVkv  # where -1 points
    for t in range(n_rows):
        token = [x[:, t] for x in given]
        after[t] = _step(after[parent_BT[:, t], slots], token)
        reads.append((after[t] * token[0][..., None]).sum(-2))
    return torch.stack(reads, 1)


def advance_steps_reference(tokens: DeltaTokens, memory_BVkv: Tensor, counts_B: Tensor) -> Tensor:
    """The memory after the first `counts_B` (int64) tokens of each slot, by the definition."""
    given = _for_steps(tokens)
    for t in range(given[0].shape[1]):
        after = _step(memory_BVkv, [x[:, t] for x in given])
        memory_BVkv = torch.where((t < counts_B)[:, None, None, None], after, memory_BVkv)
    return memory_BVkv


def _step(memory_BVkv: Tensor, token: Sequence[Tensor]) -> Tensor:
    """The memory after one more token of each slot."""
    _, k_BVk, v_BVv, decay_BV, beta_BV = token
    memory_BVkv = memory_BVkv * decay_BV[..., None, None]
    u_BVv = (v_BVv - (memory_BVkv * k_BVk[..., None]).sum(-2)) * beta_BV[..., None]
    return memory_BVkv + k_BVk[..., None] * u_BVv[..., None, :]


def chain(tokens: DeltaTokens, memory_BVkv: Tensor, piece_T: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What a text's tokens read, [B, T, V, v], and the memory after the last, CHUNK tokens at a time.

    piece_T: ascending ids of the pieces of a packed sequence, which do not read each other. The memory belongs to the
    first one. None: one piece.
    """
    n_tokens = tokens.g_BTV.shape[1]
    size = min(CHUNK, n_tokens)
    n_chunks = -(-n_tokens // size)
    missing = n_chunks * size - n_tokens
    q, k, v, g, beta = (  # [B, V, N, C, ...]; the last chunk's missing tokens change nothing
        pad(x.transpose(1, 2), (0, 0) * (x.dim() - 3) + (0, missing)).unflatten(2, (-1, size)) for x in tokens
    )
    mask = torch.ones(size, size, dtype=torch.bool, device=g.device).tril()
    if piece_T is None:
        carried_NC1, kept_N = None, None
    else:
        piece_NC = torch.cat([piece_T, piece_T[-1:].expand(missing)]).unflatten(0, (-1, size))
        mask = mask & (piece_NC[:, :, None] == piece_NC[:, None])
        before_N = torch.cat([piece_NC[:1, 0], piece_NC[:-1, -1]])
        carried_NC1 = (piece_NC == before_N[:, None])[..., None]
        kept_N = carried_NC1[:, -1, 0]
    fresh, faded, seen, since, remaining = _solved(q, k, v, g, beta, mask)
    asked = q * since.exp()[..., None]
    if carried_NC1 is not None:
        faded, asked = faded * carried_NC1, asked * carried_NC1
    written, decay, reads = k * remaining[..., None], since[..., -1, None, None].exp(), []
    if kept_N is not None:
        decay = decay * kept_N[:, None, None]
    for n in range(n_chunks):
        u_BVCv = fresh[:, :, n] - faded[:, :, n] @ memory_BVkv
        reads.append(asked[:, :, n] @ memory_BVkv + seen[:, :, n] @ u_BVCv)
        memory_BVkv = memory_BVkv * decay[:, :, n] + written[:, :, n].mT @ u_BVCv
    return torch.cat(reads, 2)[:, :, :n_tokens].transpose(1, 2), memory_BVkv


class _Chunks(NamedTuple):
    """What the tokens of chunks, [..., C, width], have of each other, whatever the memory S before their chunk is.

    Attributes:
        fresh, faded: [..., C, v] and [..., C, k]; a token's u is fresh - faded S.
        seen: [..., C, C], the weights with which a token reads the u of its chunk.
        since: [..., C], the logarithm of the decay since S.
        remaining: [..., C], what remains of each token after the chunk's last one.
    """

    fresh: Tensor
    faded: Tensor
    seen: Tensor
    since: Tensor
    remaining: Tensor


def _solved(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, mask: Tensor) -> _Chunks:
    """Solve the triangular system of each chunk. mask: [..., C, C], whether token i reads token j."""
    # In fp64: sums over strong decays would leave no digits for the difference of two neighbours.
    since = (mask.double() @ g.double()[..., None])[..., 0]
    decay = (since[..., :, None] - since[..., None, :]).masked_fill(~mask, float("-inf")).float().exp()
    since = since.float()
    overlap = (k * beta[..., None]) @ k.mT * decay
    right = torch.cat([v * beta[..., None], k * (beta * since.exp())[..., None]], -1)
    solved = torch.linalg.solve_triangular(overlap, right, upper=False, unitriangular=True)
    fresh, faded = solved.split([v.shape[-1], k.shape[-1]], -1)
    return _Chunks(fresh, faded, q @ k.mT * decay, since, decay[..., -1, :])
