"""Few-row passes on a CPU in C: built once for this machine, bound by ctypes. Not here: when they are used.

Why C of our own: on CPUs without bf16 instructions PyTorch's bf16 products of 6 rows cost 5 times one row's, these 1.5
times; and no library promises that a row's result is the same in a pass of 1 and of 40 rows.

An output row does not depend on the other rows of its pass, bit for bit (see rows.c); so decoding is exact in bf16 too,
where these kernels serve all layers: trees of up to 128 nodes, widths that are multiples of 8, sliding windows.
Shapes: M rows, N outputs, I inputs; B slots, T rows of the pass, S cache rows, H query heads, K key/value heads,
d head width.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

SOURCES = tuple(
    Path(__file__).parent / name
    for name in ("rows.c", "threads.inc", "linear.inc", "attention_common.inc", "attention.inc", "noise.inc")
)
# No -ffast-math: it would let infinities and NaN through as if they could not occur, and flush denormals process-wide.
FLAGS = ["-O3", "-march=native", "-ffp-contract=off", "-pthread", "-fPIC"]
# Above these, a matrix product of the BLAS library and PyTorch's flash attention are faster: prefill, not decoding.
MOST_LINEAR_ROWS = 256
MOST_ATTENTION_ROWS = 128


class _Linear(ctypes.Structure):
    """`linear` of rows.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "norm", "w", "bias", "residual", "y")),
        *((name, ctypes.c_ssize_t) for name in ("m", "n", "k", "gated")),
        ("eps", ctypes.c_float),
    ]


class _Rotation(ctypes.Structure):
    """`rotation` of rows.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "cos", "sin", "y")),
        *((name, ctypes.c_ssize_t) for name in ("m", "heads", "d", "stride", "period")),
    ]


class _Attention(ctypes.Structure):
    """`attention` of rows.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "lse", "lengths", "mask")),
        *((name, ctypes.c_ssize_t) for name in ("batch", "rows", "heads", "kv_heads", "width", "window")),
        *((name, ctypes.c_ssize_t) for name in ("q_row", "k_slot", "k_row", "k_head", "v_slot", "v_row", "v_head")),
        ("scale", ctypes.c_float),
    ]


class _Placing(ctypes.Structure):
    """`placing` of rows.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("source", "to", "lengths")),
        *(
            (name, ctypes.c_ssize_t)
            for name in ("batch", "rows", "bytes", "from_slot", "from_row", "to_slot", "to_row")
        ),
    ]


class _Noise(ctypes.Structure):
    """`noise` of noise.inc."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("seeds", "positions", "y")),
        *((name, ctypes.c_ssize_t) for name in ("batch", "per", "vocab")),
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
            link = [compiler, "-shared", "-pthread", compiled, "-o", linked, "-lm"]
            subprocess.run(link, check=True, capture_output=True)
            linked.replace(library)
    return library


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")


def _lacks_avx2() -> bool:
    """Whether this is an x86 processor without AVX2, whose vectors rows.c is written for there."""
    return platform.machine() in ("x86_64", "AMD64") and not torch.cpu._is_avx2_supported()


def obstacle() -> str | None:
    """Why the kernels cannot be had here, before they are built; None where nothing stands against them."""
    if os.environ.get("LONGDRAFT_CPU_KERNELS") == "0":
        return "LONGDRAFT_CPU_KERNELS=0 turns the CPU kernels off"
    if _lacks_avx2():
        return "the CPU kernels need AVX2, which this processor lacks; decoding is slower"
    if _compiler() is None:
        return "no C compiler found, decoding on the CPU is slower; install gcc or set CC"
    return None


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None (with one line that says why) where they cannot be had; PyTorch serves then.

    LONGDRAFT_CPU_KERNELS=0 turns them off.
    """
    if (why := obstacle()) is not None:
        if os.environ.get("LONGDRAFT_CPU_KERNELS") != "0":
            print(f"longdraft: {why}", file=sys.stderr)
        return None
    compiler = _compiler()
    assert compiler is not None
    try:
        loaded = ctypes.CDLL(str(_build(compiler)))
    except (OSError, subprocess.CalledProcessError) as error:
        detail = error.stderr.decode() if isinstance(error, subprocess.CalledProcessError) else error
        print(
            f"longdraft: the CPU kernels could not be built, decoding is slower; set CC to a working C compiler, or "
            f"LONGDRAFT_CPU_KERNELS=0 to be silent. The compiler said: {detail}",
            file=sys.stderr,
        )
        return None
    loaded.make_call.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    loaded.make_calls.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t]
    loaded.uneven_seconds.restype = ctypes.c_double
    return loaded


# Whether this thread decodes: see `decoding`.
_decoding: ContextVar[bool] = ContextVar("decoding", default=False)


@contextmanager
def decoding(wanted: bool = True) -> Iterator[None]:
    """While it lasts, this thread's passes of few rows go through the C kernels in fp32 too, on all threads of PyTorch.

    PyTorch's own operations between them run on one thread: two pools that wait for work by spinning would take the
    processors from each other. Without the kernels, or where not `wanted`, nothing changes.
    """
    lib = library() if wanted else None
    if lib is None:
        yield
        return
    token, taken = _decoding.set(True), lib.take_threads(1)
    try:
        yield
    finally:
        lib.give_threads(taken)
        _decoding.reset(token)


@contextmanager
def free_processors(wanted: bool = True) -> Iterator[None]:
    """While it lasts, PyTorch's operations of this thread run on as many threads as processors are free, at least one.

    Where other processes run at the moment, that is: OpenMP's threads wait for each other at the end of every
    operation, and one that is not running holds up all.
    """
    lib, others = (library(), running_elsewhere()) if wanted else (None, 0)
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    taken = lib.take_threads(max(1, processors - others)) if lib is not None and others else 0
    try:
        yield
    finally:
        if lib is not None:
            lib.give_threads(taken)


def running_elsewhere() -> int:
    """Threads of other processes that run or wait for a processor now; 0 where the system does not tell."""
    try:
        running = int(Path("/proc/loadavg").read_text().split()[3].split("/")[0])
        own = sum(
            (task / "stat").read_text().rpartition(")")[2].split()[0] == "R"
            for task in Path("/proc/self/task").iterdir()
        )
    except (OSError, ValueError, IndexError):
        return 0
    return max(0, running - own)


def work_seconds() -> float:
    """A clock of this thread's work: it goes as fast as time where nothing else runs, and does not go on while other
    processes have the processors; work of the C kernels counts by what all threads spend on it."""
    lib = library()
    return time.thread_time() - (0.0 if lib is None else lib.uneven_seconds())


def serves(dtype: torch.dtype) -> bool:
    """Whether the C kernels compute passes of few rows in this dtype: bf16 always, fp32 while decoding."""
    return dtype == torch.bfloat16 or (dtype == torch.float32 and _decoding.get())


@cache
def _address(name: str) -> int:
    """Where the function of this name lies, for `make_call` and `make_calls`."""
    address = ctypes.cast(getattr(library(), name), ctypes.c_void_p).value
    assert address is not None
    return address


# Who is told of every call that can be made again, in this thread: function, arguments, tensors whose memory they name.
listener: ContextVar[Callable[[int, ctypes.Structure, tuple], None] | None] = ContextVar("listener", default=None)
SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "f32"}


def _call(name: str, arguments: ctypes.Structure, what: str, *tensors: Tensor | None) -> None:
    lib = library()
    assert lib is not None
    function = _address(name)
    if lib.make_call(function, ctypes.addressof(arguments)):
        raise MemoryError(f"no memory for {what}")
    if (told := listener.get()) is not None:
        told(function, arguments, tensors)


def can_multiply(weight_NI: Tensor, gated: bool) -> bool:
    """Whether `linear_rows` takes this weight, here."""
    n, k = weight_NI.shape
    return k % 8 == 0 and not (gated and n % 16) and weight_NI.is_contiguous() and library() is not None


def linear_rows(
    x: Tensor,
    weight_NI: Tensor,
    bias_N: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """As kernels/linear.py, all in bf16 or all in fp32; I a multiple of 8, and N of 16 where gated."""
    assert weight_NI.is_contiguous() and x.dtype == weight_NI.dtype
    x = x if x.is_contiguous() else x.contiguous()
    residual = residual if residual is None or residual.is_contiguous() else residual.contiguous()
    n, k = weight_NI.shape
    y = x.new_empty(*x.shape[:-1], n // 2 if gated else n)
    weight_I, eps = norm or (None, 0.0)
    assert all(part is None or part.dtype == x.dtype for part in (bias_N, weight_I, residual))
    arguments = _Linear(
        x.data_ptr(),
        None if weight_I is None else weight_I.data_ptr(),
        weight_NI.data_ptr(),
        None if bias_N is None else bias_N.data_ptr(),
        None if residual is None else residual.data_ptr(),
        y.data_ptr(),
        x.numel() // k,
        n,
        k,
        gated,
        eps,
    )
    what = f"{x.numel() // k} rows of {k} numbers in fp32"
    _call(f"linear_{SUFFIXES[x.dtype]}", arguments, what, x, weight_I, weight_NI, bias_N, residual, y)
    return y


def rotate_rows(x_BTnd: Tensor, cos_BT11F: Tensor, sin_BT12F: Tensor) -> Tensor:
    """As kernels/rotate.py, all in bf16 or all in fp32, x contiguous but for the distance of its rows."""
    batch, rows, heads, width = x_BTnd.shape
    # The distance of rows; where slots have one row each, that of slots (a dimension of size 1 may say anything).
    stride = x_BTnd.stride(1) if rows > 1 else x_BTnd.stride(0)
    assert x_BTnd.stride()[2:] == (width, 1) and (batch == 1 or x_BTnd.stride(0) == rows * stride)
    assert cos_BT11F.is_contiguous() and sin_BT12F.is_contiguous()
    y = x_BTnd.new_empty(x_BTnd.shape)
    period = cos_BT11F.shape[0] * rows
    tensors = x_BTnd, cos_BT11F, sin_BT12F, y
    arguments = _Rotation(*(x.data_ptr() for x in tensors), batch * rows, heads, width, stride, period)
    _call(f"rotate_{SUFFIXES[x_BTnd.dtype]}", arguments, "heads", *tensors)
    return y


def can_append(rows_BSKd: Tensor, new_BTKd: Tensor) -> bool:
    """Whether `append_rows` takes rows that lie like this."""
    heads_adjoin = all(x.stride()[2:] == (x.shape[3], 1) for x in (rows_BSKd, new_BTKd))
    return heads_adjoin and rows_BSKd.device.type == "cpu" and library() is not None


def append_rows(rows_BSKd: Tensor, lengths_B: Tensor, new_BTKd: Tensor) -> None:
    """Copy row t of slot b to row lengths[b] + t; lengths int64, and nobody checks that there is room."""
    assert lengths_B.dtype == torch.int64 and lengths_B.is_contiguous()
    assert rows_BSKd.dtype == new_BTKd.dtype and rows_BSKd.shape[2:] == new_BTKd.shape[2:]
    batch, n_rows, heads, width = new_BTKd.shape
    size = new_BTKd.element_size()
    strides = (size * stride for x in (new_BTKd, rows_BSKd) for stride in x.stride()[:2])
    pointers = new_BTKd.data_ptr(), rows_BSKd.data_ptr(), lengths_B.data_ptr()
    arguments = _Placing(*pointers, batch, n_rows, heads * width * size, *strides)
    _call("append_rows", arguments, "rows", new_BTKd, rows_BSKd, lengths_B)


def can_attend(q_BTHd: Tensor) -> bool:
    """Whether `attention_rows` computes queries of this dtype and head width here."""
    known = q_BTHd.dtype in SUFFIXES and q_BTHd.shape[3] % 8 == 0 and q_BTHd.shape[3] <= 1024
    return known and library() is not None


def attention_rows(
    q_BTHd: Tensor,
    keys_BSKd: Tensor,
    values_BSKd: Tensor,
    lengths_B: Tensor,
    tree_mask_BTT: Tensor | None,
    window: int | None = None,
    lse_BTH: Tensor | None = None,
) -> Tensor:
    """As kernels/tree_attention.py, bf16 or fp32; d a multiple of 8 up to 1024, at most MOST_ATTENTION_ROWS rows.

    lse_BTH: fp32, contiguous; takes the log-sum-exps where it is given.
    """
    assert keys_BSKd.stride(3) == values_BSKd.stride(3) == 1
    batch, rows, heads, width = q_BTHd.shape
    assert 0 < rows <= MOST_ATTENTION_ROWS and (window is None or window >= 1), (rows, window)
    q_row = q_BTHd.stride(1)
    if q_BTHd.stride()[2:] != (width, 1) or (batch > 1 and q_BTHd.stride(0) != rows * q_row):
        q_BTHd, q_row = q_BTHd.contiguous(), heads * width
    assert q_BTHd.dtype == keys_BSKd.dtype == values_BSKd.dtype, (q_BTHd.dtype, keys_BSKd.dtype, values_BSKd.dtype)
    assert lengths_B.dtype == torch.int64 and lengths_B.is_contiguous()
    assert tree_mask_BTT is None or (tree_mask_BTT.dtype, tree_mask_BTT.shape) == (torch.bool, (batch, rows, rows))
    mask = None if tree_mask_BTT is None else tree_mask_BTT.contiguous()
    out = q_BTHd.new_empty(q_BTHd.shape)
    if lse_BTH is not None:
        assert (lse_BTH.dtype, lse_BTH.shape) == (torch.float32, out.shape[:3]) and lse_BTH.is_contiguous()
    arguments = _Attention(
        q_BTHd.data_ptr(), keys_BSKd.data_ptr(), values_BSKd.data_ptr(), out.data_ptr(),
        None if lse_BTH is None else lse_BTH.data_ptr(), lengths_B.data_ptr(),
        None if mask is None else mask.data_ptr(), batch, rows, heads, keys_BSKd.shape[2], width,
        window or 0, q_row, *keys_BSKd.stride()[:3], *values_BSKd.stride()[:3], width**-0.5,
    )  # fmt: skip
    what = f"the partial results of {rows} rows of {heads} heads"
    _call(
        f"attention_{SUFFIXES[q_BTHd.dtype]}",
        arguments,
        what,
        q_BTHd,
        keys_BSKd,
        values_BSKd,
        out,
        lse_BTH,
        lengths_B,
        mask,
    )
    return out


def negated_uniform(seeds_B: Tensor, positions_BJ: Tensor, vocab_size: int) -> Tensor:
    """The words of kernels/gumbel.py's noise as numbers of (-1, 0), fp32 [B, J, V]: bit for bit those of
    kernels/reference/gumbel.py."""
    batch, per = positions_BJ.shape
    seeds_B, positions_BJ = seeds_B.contiguous(), positions_BJ.contiguous()
    assert seeds_B.dtype == positions_BJ.dtype == torch.int64 and seeds_B.shape == (batch,)
    y = torch.empty(batch, per, vocab_size, dtype=torch.float32)
    arguments = _Noise(seeds_B.data_ptr(), positions_BJ.data_ptr(), y.data_ptr(), batch, per, vocab_size)
    _call("philox_uniform", arguments, "noise", seeds_B, positions_BJ, y)
    return y
