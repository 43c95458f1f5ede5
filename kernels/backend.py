"""The one place that imports optional packages; everything else asks here and falls back where the answer is None.

Only a missing package counts as absent: a package that is there and fails to load raises.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any


@cache
def liger_cross_entropy() -> Any | None:
    """Liger's fused linear cross-entropy (an autograd function), or None without liger-kernel and triton."""
    if find_spec("liger_kernel") is None or find_spec("triton") is None:
        return None
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    return LigerFusedLinearCrossEntropyFunction
