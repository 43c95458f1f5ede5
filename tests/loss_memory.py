"""The peak memory of the heads' training loss. D hidden width, V vocabulary."""

import torch
from torch import Tensor

from longdraft.benchmarks.drafters.timing import peak_bytes
from longdraft.kernels.linear_loss import LossPart, linear_loss


def loss_peak_memory(
    n_rows: int,
    hidden_size: int,
    vocab_size: int,
    n_heads: int,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> int:
    """Peak bytes beyond the inputs that the loss of `n_heads` heads over `n_rows` rows each allocates, forward and
    backward, counting ranks. Allocations are those that PyTorch's profiler sees on a CPU and its allocator on a GPU;
    workspaces that kernels allocate elsewhere are not counted."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    hiddens = [draw(n_rows, hidden_size).requires_grad_() for _ in range(n_heads)]
    weight_VD = draw(vocab_size, hidden_size).mul_(hidden_size**-0.5)
    rows = torch.arange(n_rows, device=device)
    labels = [torch.randint(vocab_size, (n_rows,), generator=generator).to(device) for _ in hiddens]
    parts = [LossPart(rows, labels_N) for labels_N in labels]

    def run() -> None:
        linear_loss(hiddens, weight_VD, parts, top_k=3).sums.sum().backward()

    return peak_bytes(run, weight_VD.device)
