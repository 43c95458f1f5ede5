"""A measurement for tests and launch/bench.py: the memory that the heads' loss takes at its peak."""

import torch

from longdraft.kernels.linear_cross_entropy import linear_cross_entropy


def loss_peak_memory(
    n_rows: int, hidden_size: int, vocab_size: int, n_heads: int, dtype: torch.dtype = torch.float32
) -> int:
    """Bytes that the loss of `n_heads` heads over `n_rows` rows, forward and backward, allocates at its peak beyond its
    inputs. On the CPU it follows every allocation with PyTorch's profiler; for launch/bench.py and the tests."""
    generator = torch.Generator().manual_seed(0)
    hidden_MD = torch.randn(n_rows, hidden_size, generator=generator).to(dtype).requires_grad_()
    weight_VD = torch.randn(vocab_size, hidden_size, generator=generator).to(dtype) * hidden_size**-0.5
    labels_M = torch.randint(vocab_size, (n_rows,), generator=generator)

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        for _ in range(n_heads):
            linear_cross_entropy(hidden_MD, weight_VD, labels_M, top_k=3).loss_sum.backward()
    assert profile.profiler is not None
    now = peak = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]
            peak = max(peak, now)
    return peak
