"""Measurements for tests, launch/bench.py and benchmarks/: the memory that a call, and the heads' loss, takes at its
peak."""

from collections.abc import Callable

import torch

from longdraft.kernels.linear_cross_entropy import linear_cross_entropy


def loss_peak_memory(
    n_rows: int,
    hidden_size: int,
    vocab_size: int,
    n_heads: int,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> int:
    """Bytes that the loss of `n_heads` heads over `n_rows` rows each, ranks counted, forward and backward, allocates at
    its peak beyond its inputs. On the CPU it follows every allocation with PyTorch's profiler, on CUDA the allocator's
    own count; the kernels' workspaces that the allocator does not see are not in it."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    hiddens = [draw(n_rows, hidden_size).requires_grad_() for _ in range(n_heads)]
    weight_VD = draw(vocab_size, hidden_size).mul_(hidden_size**-0.5)
    labels = [torch.randint(vocab_size, (n_rows,), generator=generator).to(device) for _ in hiddens]

    def run() -> None:
        linear_cross_entropy(hiddens, weight_VD, labels, top_k=3).loss_sums.sum().backward()

    return peak_bytes(run, weight_VD.device)


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Bytes that a call allocates at its peak beyond what was there before; on a CPU as PyTorch's profiler tells."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    assert profile.profiler is not None
    now = peak = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]
            peak = max(peak, now)
    return peak
