"""The linear layer of a frozen model: y = x W^T + b, with the arithmetic that the CPU at hand is fast at.

Not for layers that train: where x needs a gradient it is torch's own.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F


@cache
def _slow_bf16() -> bool:
    """Whether this CPU emulates bf16 products: wider passes are then several times slower than in fp32."""
    return not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] times weight [out, in] plus bias [out], in x's dtype, accumulated in fp32.

    In bf16 on a CPU without bf16 instructions one row is bound by reading the weight and stays in bf16; more rows are
    bound by arithmetic and run in fp32, rounded to bf16 at the end: the same result as a bf16 layer up to summation.
    """
    return F.linear(x, weight, bias)
