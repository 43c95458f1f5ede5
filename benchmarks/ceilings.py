"""What this machine does at best: a copy, a sum and square matrix products, all larger than its caches."""

import torch

from longdraft.benchmarks.timing import Bench, Ceilings
from longdraft.kernels.linear import emulates_bf16

# Bytes of the copied tensor and width of the square matrices: (full, quick).
SIZES = {"cuda": ((2**30, 8192), (2**29, 8192)), "cpu": ((2**28, 1024), (2**26, 512))}


def measure(bench: Bench, n_bytes: int | None = None, width: int | None = None) -> Ceilings:
    """The best of some turns each; TF32 is off in fp32."""
    sizes = SIZES[bench.device.type][bench.quick]
    n_bytes, width = n_bytes or sizes[0], width or sizes[1]
    source = torch.ones(n_bytes // 4, device=bench.device)
    target = torch.empty_like(source)
    # Where bf16 is emulated it is a hundred times slower, and a small product shows that as well.
    low_width = min(width, 256) if bench.device.type == "cpu" and emulates_bf16() else width
    low = torch.randn(low_width, low_width, device=bench.device, dtype=torch.bfloat16)
    high = torch.randn(width, width, device=bench.device)
    with torch.no_grad():
        times = bench.in_turns(
            {
                "copy": lambda: target.copy_(source),
                "sum": lambda: source.sum(),
                "dot": lambda: torch.dot(source, source),
                "bf16": lambda: low @ low,
                "fp32": lambda: high @ high,
            }
        )
    return Ceilings(
        copy=2 * n_bytes / times["copy"].least,
        read=n_bytes / min(times["sum"].least, times["dot"].least),
        bf16=2 * low_width**3 / times["bf16"].least,
        fp32=2 * width**3 / times["fp32"].least,
    )


def describe(ceilings: Ceilings) -> str:
    """One line of them."""
    return (
        f"ceilings: copy {ceilings.copy / 1e9:,.1f} GB/s (read and written), sum {ceilings.read / 1e9:,.1f} GB/s, "
        f"products {ceilings.bf16 / 1e12:,.3f} TFLOP/s in bf16, {ceilings.fp32 / 1e12:,.3f} in fp32"
    )
