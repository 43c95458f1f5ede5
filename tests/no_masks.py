"""Guards prefill's memory: no pass over a prompt may have a mask of its rows x the context.

The fixture `no_masks` is the class.
"""

import sys

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class NoMasks(TorchDispatchMode):
    """Fails if a mask of several queries x more than `most_keys` keys is made or passed to attention."""

    def __init__(self, most_keys: int = 128):
        super().__init__()
        self._most_keys = most_keys

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if _in_a_reference():  # a reference stands in for a kernel
            return found
        masks = [x for x in tree_leaves(found) if isinstance(x, Tensor) and x.dtype == torch.bool]
        if "attention" in str(func):
            masks += [x for x in (*args[3:4], (kwargs or {}).get("attn_mask")) if isinstance(x, Tensor)]
        sizes = [
            tuple(x.shape) for x in masks if x.dim() > 1 and min(x.shape[-2:]) > 1 and x.shape[-1] > self._most_keys
        ]
        assert not sizes, f"{func}: masks of {sizes}"
        return found


def _in_a_reference() -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name.endswith("_reference"):
            return True
        frame = frame.f_back
    return False
