"""Tensor parallelism (arXiv 1909.08053, section 3): several processes, one a GPU, compute one target together.

Each rank has its share of every layer: of the heads, with their rows of the cache, and of the feed-forward's width.
What a sub-layer adds to the residual stream is summed over the ranks, so the stream is the same on all of them, bit for
bit. They share the LM head's rows too, and each gets all logits. Embedding, norms and drafts are whole on each. All
ranks run the same program on the same requests; what only one of them can know, such as a measured time, comes from the
first.
"""

import gc
import os
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from longdraft.kernels.rank_sum import rank_sum
from longdraft.kernels.tree import MOST_ROWS
from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.device import available_bytes

T = TypeVar("T")
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the new and the old name
# A server's ranks wait as long as no request comes. A rank that dies is noticed at once.
TIMEOUT = timedelta(days=365)


@dataclass(frozen=True)
class TensorParallel:
    """This process among the `size` ranks that compute a target. With one rank nothing is communicated."""

    rank: int = 0
    size: int = 1

    def sum(self, x_BTD: Tensor) -> Tensor:
        """The sum over the ranks, with the same bits on all of them; x may be overwritten. In a pass of up to MOST_ROWS
        tokens a slot, as every verification is, they do not depend on the number of tokens."""
        if self.size == 1:
            return x_BTD
        if x_BTD.shape[1] > MOST_ROWS:
            dist.all_reduce(x_BTD)
            return x_BTD
        return rank_sum(self._gathered(x_BTD))

    def place(self, total: int) -> tuple[int, int]:
        """Start and length of this rank's part of `total`; the last one's is shorter where they do not divide it."""
        most = -(-total // self.size)
        return min(most * self.rank, total), min(most, max(0, total - most * self.rank))

    def part(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of a dimension: a view."""
        return x.narrow(dim, *self.place(x.shape[dim]))

    def joined(self, part: Tensor, dim: int, total: int) -> Tensor:
        """The ranks' parts of a dimension together, which then has the size `total`."""
        if self.size == 1:
            return part
        missing = -(-total // self.size) - part.shape[dim]
        padded = pad(part, (0, 0) * (part.dim() - 1 - dim) + (0, missing)) if missing else part
        return torch.cat(self._gathered(padded).unbind(0), dim).narrow(dim, 0, total)

    def _gathered(self, x: Tensor) -> Tensor:
        """The tensors of all ranks, [P, ...]."""
        parts = x.new_empty(self.size * len(x), *x.shape[1:])
        _gather(parts, x.contiguous())
        return parts.unflatten(0, (self.size, len(x)))

    def of_first(self, x: Tensor) -> Tensor:
        """The first rank's tensor; x, of its shape and dtype, may be overwritten."""
        if self.size > 1:
            dist.broadcast(x, 0)
        return x

    def numbers_of_first(self, *numbers: float) -> tuple[float, ...]:
        """The first rank's numbers. This is faster than `from_first`, which sends pickled objects."""
        return numbers if self.size == 1 else tuple(self.of_first(torch.tensor(numbers, dtype=torch.float64)).tolist())

    def from_first(self, value: T) -> T:
        """The first rank's value, which may be any object, on the host."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, 0, device=torch.device("cpu"))
        return values[0]

    def free_bytes(self, device: torch.device) -> int | None:
        """`available_bytes` for each rank, where least is free: ranks on CPUs share the machine's memory."""
        free = available_bytes(device)
        if free is None or self.size == 1:
            return free
        least = torch.tensor([free // self.size if device.type == "cpu" else free])
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)


ALONE = TensorParallel()


def join(size: int, device: torch.device) -> TensorParallel:
    """Meet the other ranks, which the launcher describes in the environment, as `torchrun` does.

    CPU threads are divided among the ranks. Raises ValueError if the launcher started another number of ranks.
    """
    if size == 1:
        return ALONE
    if (started := os.environ.get("WORLD_SIZE")) != str(size):
        raise ValueError(f"tensor_parallel: {size}, but WORLD_SIZE is {started}; start as many ranks, e.g. by torchrun")
    torch.set_num_threads(max(1, torch.get_num_threads() // size))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    ranks = TensorParallel(dist.get_rank(), size)
    for n_tokens in (1, MOST_ROWS + 1):  # NCCL connects, and takes memory, at its first collectives
        ranks.sum(torch.zeros(1, n_tokens, 1, device=device))
    return ranks


def leave() -> None:
    """Leave the other ranks, if there are any, as the last action."""
    if dist.is_initialized():
        gc.collect()  # engines, because NCCL's groups do not end before all CUDA graphs with their work are freed
        dist.barrier()
        dist.destroy_process_group()


def split(config: DecoderConfig, size: int) -> DecoderConfig:
    """The shape of what one of `size` ranks computes. Raises ValueError if they cannot share it evenly."""

    def part(of: Any, *names: str) -> Any:
        for name in names:
            if getattr(of, name) % size:
                raise ValueError(
                    f"tensor_parallel: {size} ranks cannot share the target's {name}, {getattr(of, name)}; give a "
                    "number that divides it"
                )
        return replace(of, **{name: getattr(of, name) // size for name in names})

    if size == 1:
        return config
    config = part(config, "n_heads", "n_kv_heads", "intermediate_size")
    if config.experts is not None:
        config = replace(config, experts=part(config.experts, "size"))
    if config.shared_expert_size is not None:
        config = part(config, "shared_expert_size")
    if config.delta is not None:
        config = replace(config, delta=part(config.delta, "key_heads", "value_heads"))
    return config


def share(name: str, whole: Tensor, shape: torch.Size, config: DecoderConfig, ranks: TensorParallel) -> Tensor:
    """A rank's share of one of the decoder's parameters.

    Args:
        name: of the parameter. shape: of the share. config: of the whole target.
    """
    dims = [dim for dim, (all_of_it, ours) in enumerate(zip(whole.shape, shape, strict=True)) if all_of_it != ours]
    if not dims:  # whole on each rank; but what is added to a sum over the ranks is added once
        added = name.endswith(("o_proj.bias", "down_proj.bias", "down_bias"))
        return torch.zeros_like(whole) if added and ranks.rank > 0 else whole
    (dim,) = dims
    joined = whole.split(_joined_sizes(name, whole.shape[dim], config), dim)
    return torch.cat([ranks.part(part, dim) for part in joined], dim)


def _joined_sizes(name: str, size: int, config: DecoderConfig) -> list[int]:
    """The sizes of what a parameter joins; the ranks share each. size: of all together."""
    if "qkv_proj" in name:
        return [heads * config.head_dim for heads in (config.n_heads, config.n_kv_heads, config.n_kv_heads)]
    if "gate_up" in name:
        return [size // 2] * 2
    if (delta := config.delta) is not None and name.endswith((".in_proj.weight", ".conv")):
        keys, values, heads = delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim, delta.value_heads
        convolved = [keys, keys, values]
        return convolved if name.endswith("conv") else [*convolved, values, heads, heads]
    return [size]
