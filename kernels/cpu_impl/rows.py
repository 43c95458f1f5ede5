"""Few-row passes on a CPU in C: built once for this machine, bound by ctypes. Not here: when they are used.

Why C of our own: on CPUs without bf16 instructions PyTorch's bf16 products of 6 rows cost 5 times one row's, these 1.5
times; and no library promises that a row's result is the same in a pass of 1 and of 40 rows.

An output row does not depend on the other rows of its pass, bit for bit (see rows.c); so decoding is exact in bf16 too.
Shapes: M rows, N outputs, I inputs; B slots, T rows of the pass, S cache rows, H query heads, K key/value heads,
d head width.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

SOURCES = Path(__file__).parent / "rows.c", Path(__file__).parent / "attention.inc"
# No -ffast-math: it would let infinities and NaN through as if they could not occur, and flush denormals process-wide.
FLAGS = ["-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-fPIC"]
# Above these, a matrix product of the BLAS library and PyTorch's flash attention are faster: prefill, not decoding.
MOST_LINEAR_ROWS = 256
MOST_ATTENTION_ROWS = 64


class _Attention(ctypes.Structure):
    """`attention` of rows.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "lengths", "mask")),
        *((name, ctypes.c_ssize_t) for name in ("batch", "rows", "heads", "kv_heads", "width")),
        *((name, ctypes.c_ssize_t) for name in ("k_slot", "k_row", "k_head", "v_slot", "v_row", "v_head")),
        ("scale", ctypes.c_float),
    ]


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "longdraft"


def _build(compiler: str) -> Path:
    """Compile to the user's cache folder, under a name that says source, compiler and processor; once."""
    processor = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else platform.processor()
    features = sorted({line for line in processor.splitlines() if line.startswith(("flags", "Features", "model name"))})
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    known = [*(source.read_text() for source in SOURCES), *FLAGS, version, *features, platform.machine()]
    library = _cache_folder() / f"rows-{hashlib.sha256(chr(0).join(known).encode()).hexdigest()[:16]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            compiled, linked = Path(folder) / "rows.o", Path(folder) / "rows.so"
            subprocess.run([compiler, *FLAGS, "-c", SOURCES[0], "-o", compiled], check=True, capture_output=True)
            # Linked without OpenMP: its symbols are those of the library that PyTorch has loaded, so there is one pool.
            subprocess.run([compiler, "-shared", compiled, "-o", linked, "-lm"], check=True, capture_output=True)
            linked.replace(library)
    return library


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None (with one line that says why) where they cannot be had; PyTorch serves then.

    LONGDRAFT_CPU_KERNELS=0 turns them off.
    """
    if os.environ.get("LONGDRAFT_CPU_KERNELS") == "0":
        return None
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        print("longdraft: no C compiler found, decoding on the CPU is slower; install gcc or set CC")
        return None
    try:
        loaded = ctypes.CDLL(str(_build(compiler)))
    except (OSError, subprocess.CalledProcessError) as error:
        detail = error.stderr.decode() if isinstance(error, subprocess.CalledProcessError) else error
        print(f"longdraft: the CPU kernels could not be built, decoding is slower: {detail}")
        return None
    loaded.linear_bf16.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_ssize_t] * 3
    loaded.attention_bf16.argtypes = loaded.attention_f32.argtypes = [ctypes.POINTER(_Attention)]
    return loaded


def linear_rows(x: Tensor, weight_NI: Tensor, bias_N: Tensor | None) -> Tensor:
    """x [..., I] bf16 times weight_NI [N, I] bf16, plus bias, summed in fp32: bf16 [..., N]. I a multiple of 8."""
    lib = library()
    assert lib is not None and weight_NI.is_contiguous() and x.dtype == weight_NI.dtype == torch.bfloat16
    x = x.contiguous()
    n, k = weight_NI.shape
    y = x.new_empty(*x.shape[:-1], n)
    bias = None if bias_N is None else bias_N.data_ptr()
    if lib.linear_bf16(x.data_ptr(), weight_NI.data_ptr(), bias, y.data_ptr(), x.numel() // k, n, k):
        raise MemoryError(f"no memory for {x.numel() // k} rows of {k} numbers in fp32")
    return y


def can_attend(q_BTHd: Tensor) -> bool:
    """Whether `attention_rows` computes queries of this dtype and head width here."""
    known = q_BTHd.dtype in (torch.bfloat16, torch.float32) and q_BTHd.shape[3] % 8 == 0 and q_BTHd.shape[3] <= 1024
    return known and library() is not None


def attention_rows(
    q_BTHd: Tensor, keys_BSKd: Tensor, values_BSKd: Tensor, lengths_B: Tensor, tree_mask_BTT: Tensor | None
) -> Tensor:
    """As kernels/tree_attention.py without a window, bf16 or fp32; d a multiple of 8 up to 1024."""
    lib = library()
    assert lib is not None and keys_BSKd.stride(3) == values_BSKd.stride(3) == 1
    q_BTHd = q_BTHd.contiguous()
    mask = None if tree_mask_BTT is None else tree_mask_BTT.contiguous()
    out = torch.empty_like(q_BTHd)
    batch, rows, heads, width = q_BTHd.shape
    arguments = _Attention(
        q_BTHd.data_ptr(), keys_BSKd.data_ptr(), values_BSKd.data_ptr(), out.data_ptr(), lengths_B.data_ptr(),
        None if mask is None else mask.data_ptr(), batch, rows, heads, keys_BSKd.shape[2], width,
        *keys_BSKd.stride()[:3], *values_BSKd.stride()[:3], width**-0.5,
    )  # fmt: skip
    run = lib.attention_bf16 if q_BTHd.dtype == torch.bfloat16 else lib.attention_f32
    if run(ctypes.byref(arguments)):
        raise MemoryError(f"no memory for the partial results of {rows} rows of {heads} heads")
    return out
