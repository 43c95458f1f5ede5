"""The gated delta rule by steps in C, fp32. Shapes as in kernels/gated_delta.py."""

from collections.abc import Sequence

import torch
from torch import Tensor

from longdraft.kernels.cpu.library import fits, library, make_call, pointers, structure

# `delta` of delta.inc
Delta = structure(addresses="q k v decay beta parents counts memory result", sizes="batch rows heads keys values")


def serves(width: int) -> bool:
    """Whether C takes steps on memories of values this wide."""
    return width % 8 == 0 and library() is not None


def steps(
    tokens: Sequence[Tensor], memory_BVkv: Tensor, *, parents_BT: Tensor | None = None, counts_B: Tensor | None = None
) -> Tensor:
    """With parents (int64, -1 before the pass), what each node reads, [B, T, V, v]; else the memory after the first
    `counts_B` (int64) of the tokens, which follow each other.

    tokens: q and k [B, T, V, k], v [B, T, V, v], the decay itself and beta [B, T, V].
    """
    given = [x.contiguous() for x in tokens]
    (batch, rows, heads, keys), values = given[0].shape, given[2].shape[-1]
    memory_BVkv = memory_BVkv.contiguous()
    assert all(x.dtype == torch.float32 for x in given)
    assert fits(memory_BVkv, torch.float32, batch, heads, keys, values)
    assert fits(parents_BT, torch.int64, batch, rows) and fits(counts_B, torch.int64, batch)
    result = torch.empty_like(memory_BVkv if parents_BT is None else given[2])
    arguments = Delta(*pointers(*given, parents_BT, counts_B, memory_BVkv, result), batch, rows, heads, keys, values)
    make_call("delta_rule", None, arguments, f"the memories of {batch * rows} tokens")
    return result
