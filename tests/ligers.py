"""Liger's kernels of a layer (`backend.liger_layers`) where there is no GPU: in Triton's interpreter.

It lacks two things that these kernels ask of a compiler: arguments that are numbers of Python have no `to`, and
functions of CUDA's libdevice give nothing. Both are supplied; the kernels are as they are.
"""

from importlib import import_module

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from longdraft.kernels import backend


def _rsqrt(x):
    return tl.rsqrt(x)  # looked up when it is called, where the interpreter has put its own


def interpreted(monkeypatch: pytest.MonkeyPatch) -> backend.LigerLayers:
    """The kernels, to be called with tensors of this machine's device."""
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
