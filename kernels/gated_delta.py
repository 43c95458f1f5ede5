"""The gated delta rule: linear attention whose memory is one matrix per head (Gated DeltaNet, arXiv 2412.06464).

A token t decays the memory S, replaces what it holds for the key k_t, and reads it:
    S_t = exp(g_t) S_(t-1);  u_t = beta_t (v_t - S_t^T k_t);  S_t += k_t u_t^T;  o_t = S_t^T q_t
A tree's nodes take just these steps, each from its parent's memory: a node's bits depend only on its path, so they are
those of plain decoding. kernels/delta_chunks.py takes long texts. Why ours: flash-linear-attention's kernels know no
trees.
All in fp32. Shapes: B slots, T tokens, V heads of the values, k key width, v value width.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.kernels import backend
from longdraft.kernels.cpu import delta
from longdraft.kernels.tree import PassPlan


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

    parent_BT, depth_BT, path_BTT: as in PassPlan; of these only the parents are read here.
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
