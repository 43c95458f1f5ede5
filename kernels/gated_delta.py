"""The gated delta rule: linear attention whose memory is one matrix per head (Gated DeltaNet, arXiv 2412.06464).

A token t decays the memory S, replaces what it holds for the key k_t, and reads it:
    S_t = exp(g_t) S_(t-1);  u_t = beta_t (v_t - S_t^T k_t);  S_t += k_t u_t^T;  o_t = S_t^T q_t
`by_steps` computes just that, along the branches of a tree. A row's bits depend only on its path, so on a CPU steps of
any width agree with plain decoding in every bit. `chain` takes long texts 64 tokens at a time, and `in_one_block` a
tree: the tokens of a block solve one triangular system (equations 7 to 9), because a node reads its ancestors alone.
All in fp32. Shapes: B slots, T tokens, V heads of the values, k key width, v value width, N chunks of C tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from longdraft.kernels import backend
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
        return by_steps(tokens, memory_BVkv, plan)
    if plan.tree_mask_BTT is None:
        return chain(tokens, memory_BVkv)[0]
    return in_one_block(tokens, memory_BVkv, plan.tree_mask_BTT)


def advance(tokens: DeltaTokens, memory_BVkv: Tensor) -> Tensor:
    """The memory after these tokens, which follow each other."""
    if not backend.is_host(memory_BVkv.device):
        return chain(tokens, memory_BVkv)[1]
    for t in range(tokens.g_BTV.shape[1]):
        memory_BVkv = _step(memory_BVkv, tokens.at((slice(None), t)))[0]
    return memory_BVkv


def by_steps(tokens: DeltaTokens, memory_BVkv: Tensor, plan: PassPlan) -> Tensor:
    """`tree`, all nodes of a depth at a time: the definition. Reads the tree on the host."""
    depth_BT, path_BTT = plan.depth_BT.long(), plan.path_BTT
    batch, n_rows = depth_BT.shape
    if path_BTT is None:
        parent_BT = depth_BT - 1
    else:
        parent_BT = path_BTT.long().gather(2, (depth_BT[..., None] - 1).clamp(min=0))[..., 0]
    parent_BT = torch.where(depth_BT > 0, parent_BT, -1)
    memories = memory_BVkv.new_empty(batch, n_rows + 1, *memory_BVkv.shape[1:])  # the last: before the pass
    memories[:, -1] = memory_BVkv
    read_BTVv = torch.empty_like(tokens.v_BTVv)
    for depth in range(int(depth_BT.max()) + 1):
        slot, row = (depth_BT == depth).nonzero(as_tuple=True)
        after, read = _step(memories[slot, parent_BT[slot, row]], tokens.at((slot, row)))
        memories[slot, row], read_BTVv[slot, row] = after, read
    return read_BTVv


def _step(memory: Tensor, tokens: DeltaTokens) -> tuple[Tensor, Tensor]:
    """One token each: the memories [..., V, k, v] after them, and what they read of them."""
    q, k, v, g, beta = tokens
    memory = memory * g.exp()[..., None, None]
    u = (v - (memory * k[..., None]).sum(-2)) * beta[..., None]
    memory = memory + k[..., None] * u[..., None, :]
    return memory, (memory * q[..., None]).sum(-2)


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
