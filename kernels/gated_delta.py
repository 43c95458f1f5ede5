"""The gated delta rule: linear attention whose memory is one matrix per head (Gated DeltaNet, arXiv 2412.06464).

A token t decays the memory S, replaces what it holds for the key k_t, and reads it:
    S_t = exp(g_t) S_(t-1);  u_t = beta_t (v_t - S_t^T k_t);  S_t += k_t u_t^T;  o_t = S_t^T q_t
`by_steps` computes just that, along the branches of a tree, and on a CPU C does (cpu/delta.inc): a node's bits depend
only on its path, so they are those of plain decoding. `chain` takes long texts, 64 tokens at a time, and `in_one_block`
a tree: the tokens of a block solve one triangular system (equations 7 to 9), because a node reads its ancestors alone.
All in fp32. Shapes: B slots, T tokens, V heads of the values, k key width, v value width, N chunks of C tokens.
"""

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
    if backend.is_host(memory_BVkv.device):
        steps = delta.steps if delta.serves(memory_BVkv) else by_steps
        return steps(_with_decay(tokens), memory_BVkv, parents_BT=_parents(plan))
    if plan.tree_mask_BTT is None:
        return chain(tokens, memory_BVkv)[0]
    return in_one_block(tokens, memory_BVkv, plan.tree_mask_BTT)


def advance(tokens: DeltaTokens, memory_BVkv: Tensor, counts_B: Tensor) -> Tensor:
    """The memory after each slot's first `counts_B` tokens, which follow each other."""
    if not backend.is_host(memory_BVkv.device):
        return chain(tokens.only(counts_B), memory_BVkv)[1]
    steps = delta.steps if delta.serves(memory_BVkv) else by_steps
    return steps(_with_decay(tokens), memory_BVkv, counts_B=counts_B)


def _with_decay(tokens: DeltaTokens) -> DeltaTokens:
    """The tokens with exp(g) instead of g. It is rounded from fp64, because PyTorch's in fp32 differs by where in a
    vector a number stands."""
    return tokens._replace(g_BTV=tokens.g_BTV.double().exp().float())


def _parents(plan: PassPlan) -> Tensor:
    """Each node's parent, int64 [B, T]; -1 for one without."""
    depth_BT = plan.depth_BT.long()
    if plan.path_BTT is None:
        return depth_BT - 1
    parent_BT = plan.path_BTT.long().gather(2, (depth_BT[..., None] - 1).clamp(min=0))[..., 0]
    return torch.where(depth_BT > 0, parent_BT, -1)


def by_steps(
    tokens: DeltaTokens, memory_BVkv: Tensor, *, parents_BT: Tensor | None = None, counts_B: Tensor | None = None
) -> Tensor:
    """The definition, token by token; arguments and result as of `cpu.delta.steps`."""
    before, reads = memory_BVkv, []
    memories, slots = [before], torch.arange(len(before))
    for t in range(tokens.g_BTV.shape[1]):
        q, k, v, decay, beta = (x[:, t] for x in tokens)
        if parents_BT is not None:
            before = torch.stack(memories)[parents_BT[:, t] + 1, slots]
        after = before * decay[..., None, None]
        u = (v - (after * k[..., None]).sum(-2)) * beta[..., None]
        after = after + k[..., None] * u[..., None, :]
        reads.append((after * q[..., None]).sum(-2))
        if counts_B is not None:
            before = torch.where((t < counts_B)[:, None, None, None], after, before)
        memories.append(after)
    return before if counts_B is not None else torch.stack(reads, 1)


def in_one_block(tokens: DeltaTokens, memory_BVkv: Tensor, tree_mask_BTT: Tensor) -> Tensor:
    """`tree` as one triangular system for all nodes."""
    q, k, v, g, beta = (x.transpose(1, 2) for x in tokens)
    fresh_BVTv, faded_BVTk, seen_BVTT, since_BVT, _ = _block(q, k, v, g, beta, tree_mask_BTT[:, None])
    u_BVTv = fresh_BVTv - faded_BVTk @ memory_BVkv
    read_BVTv = since_BVT.exp()[..., None] * (q @ memory_BVkv) + seen_BVTT @ u_BVTv
    return read_BVTv.transpose(1, 2)


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
    fresh, faded, seen, since, remaining = _block(q, k, v, g, beta, mask)
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


def _block(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The triangular system of a block's C tokens, [..., C, width] each: token i reads j where mask[..., i, j].

    Returns: u without a memory, [..., C, v]; what the memory S takes from it, as factors of S, [..., C, k]; the weights
    with which a token reads u, [..., C, C]; the logarithm of the decay since the memory, [..., C]; and what remains of
    each token after the last one, [..., C].
    """
    # In fp64: sums over strong decays would leave no digits for the difference of two neighbours.
    since = (mask.double() @ g.double()[..., None])[..., 0]
    decay = (since[..., :, None] - since[..., None, :]).masked_fill(~mask, float("-inf")).float().exp()
    since = since.float()
    overlap = (k * beta[..., None]) @ k.mT * decay
    right = torch.cat([v * beta[..., None], k * (beta * since.exp())[..., None]], -1)
    solved = torch.linalg.solve_triangular(overlap, right, upper=False, unitriangular=True)
    fresh, faded = solved.split([v.shape[-1], k.shape[-1]], -1)
    return fresh, faded, q @ k.mT * decay, since, decay[..., -1, :]
