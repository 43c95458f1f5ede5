"""The gated delta rule (kernels/gated_delta.py) over texts, CHUNK tokens at a time: what they have of each other is one
triangular system (arXiv 2412.06464, equations 7 to 9), and the memory passes from chunk to chunk.

All in fp32. Shapes: B slots, T tokens, V heads of the values, k key width, v value width, N chunks of C tokens,
S = 1 + T.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from longdraft.kernels import backend
from longdraft.kernels.gated_delta import DeltaTokens

CHUNK = 64


def chain(tokens: DeltaTokens, memory_BVkv: Tensor, piece_S: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What a text's tokens read, [B, T, V, v], and the memory after the last, CHUNK tokens at a time.

    piece_S: ascending ids of the pieces of a packed sequence, which do not read each other: the memory's, then each
        token's. None: one piece.
    """
    triton = backend.triton_kernels("delta_chunks", memory_BVkv.device.type)
    found = chain_reference if triton is None else triton.chain
    return found(tokens, memory_BVkv, piece_S)


def chain_reference(tokens: DeltaTokens, memory_BVkv: Tensor, piece_S: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`chain` in plain PyTorch."""
    n_tokens = tokens.g_BTV.shape[1]
    size = min(CHUNK, n_tokens)
    n_chunks = -(-n_tokens // size)
    missing = n_chunks * size - n_tokens
    q, k, v, g, beta = (  # [B, V, N, C, ...]; the last chunk's missing tokens change nothing
        pad(x.transpose(1, 2), (0, 0) * (x.dim() - 3) + (0, missing)).unflatten(2, (-1, size)) for x in tokens
    )
    mask = torch.ones(size, size, dtype=torch.bool, device=g.device).tril()
    carried_NC1 = None
    if piece_S is not None:
        piece_NC = torch.cat([piece_S[1:], piece_S[-1:].expand(missing)]).unflatten(0, (-1, size))
        mask = mask & (piece_NC[:, :, None] == piece_NC[:, None])
        carried_NC1 = (piece_NC == piece_S[:-1:size, None])[..., None]
    fresh, faded, seen, since, remaining = _solved(q, k, v, g, beta, mask)
    asked = q * since.exp()[..., None]
    written, decay, reads = k * remaining[..., None], since[..., -1, None, None].exp(), []
    if carried_NC1 is not None:
        faded, asked, decay = faded * carried_NC1, asked * carried_NC1, decay * carried_NC1[:, -1:]
    for n in range(n_chunks):
        u_BVCv = fresh[:, :, n] - faded[:, :, n] @ memory_BVkv
        reads.append(asked[:, :, n] @ memory_BVkv + seen[:, :, n] @ u_BVCv)
        memory_BVkv = memory_BVkv * decay[:, :, n] + written[:, :, n].mT @ u_BVCv
    return torch.cat(reads, 2)[:, :, :n_tokens].transpose(1, 2), memory_BVkv


def _solved(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """Solve the triangular system of each chunk: what its tokens have of each other, whatever the memory S before is.

    mask: [..., C, C], whether token i reads token j.
    Returns: fresh [..., C, v] and faded [..., C, k]: a token's u is fresh - faded S; seen [..., C, C], the weights with
    which a token reads the u of its chunk; since [..., C], the logarithm of the decay since S; and remaining [..., C],
    what remains of each token after the chunk's last one.
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
