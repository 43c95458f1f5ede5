"""Liger's layer kernels (`backend.liger_layers`) in Triton's interpreter, for machines without a GPU.

The interpreter lacks two things that these kernels need: Python numbers as arguments have no `to`, and functions of
CUDA's libdevice return nothing. Both are supplied here; the kernels are unchanged.
"""

from importlib import import_module

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from longdraft.kernels import backend


def _rsqrt(x):
    return tl.rsqrt(x)  # looked up when called, after the interpreter has patched it


def interpreted(monkeypatch: pytest.MonkeyPatch) -> backend.LigerLayers:
    """The kernels, callable with tensors of this machine's device."""
    found = backend.liger_layers("cuda")
    assert found is not None
    if not torch.cuda.is_available():
        convert = interpreter._implicit_cvt

        def with_floats(x):
            if not isinstance(x, float):
                return convert(x)
            return tl.tensor(interpreter.TensorHandle(np.array([x], dtype=np.float32), tl.float32), tl.float32)

        monkeypatch.setattr(interpreter, "_implicit_cvt", with_floats)
        for name in ("rms_norm", "fused_add_rms_norm"):
            monkeypatch.setattr(import_module(f"liger_kernel.ops.{name}"), "rsqrt", _rsqrt)
    return found
