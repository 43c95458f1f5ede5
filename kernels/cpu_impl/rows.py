"""Few-row passes on a CPU in C: built once for this machine, bound by ctypes. Not here: when they are used.

Why C of our own: on CPUs without bf16 instructions PyTorch's bf16 products of 6 rows cost 5 times one row's, these 1.5
times; and no library promises that a row's result is the same in a pass of 1 and of 40 rows. Where the processor has
AVX-512's bf16 instructions, bf16 products are theirs (pairs.inc), so that bits are others than on one with AVX2 alone.

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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.kernels.sinks import with_sinks

FOLDER = Path(__file__).parent
SOURCES = FOLDER / "rows.c", *sorted(FOLDER.glob("*.inc"))
# No -ffast-math: it would let infinities and NaN through as if they could not occur, and flush denormals process-wide.
FLAGS = ["-O3", "-march=native", "-ffp-contract=off", "-pthread", "-fPIC"]
# Above these, a matrix product of the BLAS library and PyTorch's flash attention are faster: prefill, not decoding.
MOST_LINEAR_ROWS = 256
MOST_ATTENTION_ROWS = 128
MOST_HEAD_WIDTH = 1024  # of attention
PART_WORDS = 2048  # of best_tokens.inc


def fields(pointers: str, sizes: str, floats: str = "") -> list[tuple[str, type]]:
    """Fields of a structure whose names stand here in three groups, one behind the other."""
    kinds = (ctypes.c_void_p, pointers), (ctypes.c_ssize_t, sizes), (ctypes.c_float, floats)
    return [(name, kind) for kind, names in kinds for name in names.split()]


class Linear(ctypes.Structure):
    """`linear` of rows.c."""

    _fields_ = fields("x norm w bias residual scales y", "m n k gated", "eps")


class Rotation(ctypes.Structure):
    """`rotation` of rows.c."""

    _fields_ = fields(
        "x cos sin q_norm k_norm y keys values lengths",
        "m heads d stride period queries rows k_slot k_row v_slot v_row",
        "eps",
    )


class Attention(ctypes.Structure):
    """`attention` of rows.c."""

    _fields_ = fields(
        "q k v out lse lengths mask",
        "batch rows heads kv_heads width window before blind q_row k_slot k_row k_head v_slot v_row v_head",
        "scale",
    )


class _Noise(ctypes.Structure):
    """`noise` of noise.inc."""

    _fields_ = fields("seeds positions y", "batch per vocab")


class _BestTokens(ctypes.Structure):
    """`best_tokens` of rows.c."""

    _fields_ = fields("logits divisors noise ids parts log_probs words", "batch rows vocab count noise_row")


class _Beam(ctypes.Structure):
    """`beam` of beam.inc."""

    _fields_ = fields(
        "log_probs words ids scores borders open nodes sums below",
        "batch rows count width before n_borders first_node first_class",
    )


def _place(name: str) -> Path:
    """Where a library of this name is or may be written: in the user's cache folder; without one, or where nothing can
    be written there, in a folder of the user's own among the temporary ones."""
    with suppress(RuntimeError, OSError):  # no home; one that is not there
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "longdraft"
        if (folder / name).exists():
            return folder / name
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder / name
    folder = Path(tempfile.gettempdir()) / f"longdraft-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid() or folder.is_symlink():
        raise OSError(f"{folder} is another user's; set XDG_CACHE_HOME to a folder that can be written")
    return folder / name


def _build(compiler: str) -> Path:
    """Compile to a file whose name says source, compiler and processor; once."""
    flags = [*FLAGS, "-mno-avx512f"] if os.environ.get("LONGDRAFT_CPU_KERNELS") == "avx2" else FLAGS
    processor = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else platform.processor()
    features = sorted({line for line in processor.splitlines() if line.startswith(("flags", "Features", "model name"))})
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    known = [*(source.read_text() for source in SOURCES), *flags, version, *features, platform.machine()]
    library = _place(f"rows-{hashlib.sha256(chr(0).join(known).encode()).hexdigest()[:16]}.so")
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            compiled, linked = Path(folder) / "rows.o", Path(folder) / "rows.so"
            subprocess.run([compiler, *flags, "-c", SOURCES[0], "-o", compiled], check=True, capture_output=True)
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

    LONGDRAFT_CPU_KERNELS=0 turns them off, avx2 builds them for an x86 processor with AVX2 alone.
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
        advice, detail = "set XDG_CACHE_HOME to a folder that can be written", f"({error})"
        if isinstance(error, subprocess.CalledProcessError):
            advice, detail = "set CC to a working C compiler", f"The compiler said: {error.stderr.decode()}"
        print(
            f"longdraft: the CPU kernels could not be built, decoding is slower; {advice}, or LONGDRAFT_CPU_KERNELS=0 "
            f"to be silent. {detail}",
            file=sys.stderr,
        )
        return None
    loaded.make_call.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    loaded.beam_level.argtypes, loaded.beam_level.restype = [ctypes.c_void_p], None
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


SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "f32"}


@cache
def _address(name: str) -> int:
    """Where the function of this name lies, for `make_call`."""
    address = ctypes.cast(getattr(library(), name), ctypes.c_void_p).value
    assert address is not None
    return address


def make_call(name: str, arguments: ctypes.Structure, what: str) -> None:
    """Call a function of the library. Raises: MemoryError where there is none for `what`."""
    lib = library()
    assert lib is not None
    if lib.make_call(_address(name), ctypes.addressof(arguments)):
        raise MemoryError(f"no memory for {what}")


def pointer(tensor: Tensor | None) -> int | None:
    """Where a tensor's numbers lie."""
    return None if tensor is None else tensor.data_ptr()


def can_multiply(weight_NI: Tensor, gated: bool) -> bool:
    """Whether `linear_rows` takes this weight, here."""
    n, k = weight_NI.shape
    return k % 8 == 0 and not (gated and n % 16) and weight_NI.is_contiguous() and library() is not None


def can_run(tensors: Iterable[Tensor | None], matrices: Iterable[tuple[Tensor, bool]], head_dim: int) -> bool:
    """Whether layers with heads of this width are one call of C, at any width of pass.

    Args:
        tensors: all that the call reads of the weights; None for what a layer does not have.
        matrices: those of them that rows are multiplied with, and whether the product is gated.
    """
    there = [tensor for tensor in tensors if tensor is not None]
    alike = len({tensor.dtype for tensor in there}) == 1 and there[0].dtype in SUFFIXES
    in_place = all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in there)
    return alike and in_place and _attends(head_dim) and all(can_multiply(*matrix) for matrix in matrices)


class Weight(NamedTuple):
    """A weight [N, I], of the rows' dtype or, where `scales_N` (fp32) are given, in bytes: see `in_bytes`."""

    numbers_NI: Tensor
    scales_N: Tensor | None = None


def in_bytes(weight_NI: Tensor) -> Weight:
    """A weight as int8 [N, I] and one fp32 scale [N] an output, which read half of bf16's bytes: numbers are off by at
    most a 254th of their output's largest. Not for a target, whose numbers are its own."""
    in_bytes_NI = torch.empty_like(weight_NI, dtype=torch.int8)
    scales_N = torch.empty(len(weight_NI), dtype=torch.float32)
    for first in range(0, len(weight_NI), 4096):  # in fp32 only some outputs at a time
        part = slice(first, first + 4096)
        wide_PI = weight_NI[part].float()
        scales_N[part] = (wide_PI.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        in_bytes_NI[part] = (wide_PI / scales_N[part, None]).round_()
    return Weight(in_bytes_NI, scales_N)


def linear_rows(
    x: Tensor,
    weight_NI: Tensor,
    bias_N: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
    scales_N: Tensor | None = None,
) -> Tensor:
    """As kernels/linear.py, all in bf16 or all in fp32; I a multiple of 8, and N of 16 where gated.

    scales_N: fp32, of a weight in bytes (see `in_bytes`); None for a weight of x's dtype.
    """
    assert weight_NI.is_contiguous() and weight_NI.dtype == (x.dtype if scales_N is None else torch.int8)
    assert scales_N is None or (scales_N.dtype, scales_N.shape) == (torch.float32, weight_NI.shape[:1])
    x = x if x.is_contiguous() else x.contiguous()
    residual = residual if residual is None or residual.is_contiguous() else residual.contiguous()
    n, k = weight_NI.shape
    y = x.new_empty(*x.shape[:-1], n // 2 if gated else n)
    weight_I, eps = norm or (None, 0.0)
    assert all(part is None or part.dtype == x.dtype for part in (bias_N, weight_I, residual))
    m = x.numel() // k
    arguments = Linear(
        x.data_ptr(), pointer(weight_I), weight_NI.data_ptr(), pointer(bias_N), pointer(residual), pointer(scales_N),
        y.data_ptr(), m, n, k, gated, eps,
    )  # fmt: skip
    make_call(f"linear_{SUFFIXES[x.dtype]}", arguments, f"{m} rows of {k} numbers in fp32")
    return y


def rotate_rows(
    x_BTNd: Tensor,
    cos_BT11F: Tensor,
    sin_BT12F: Tensor,
    norms: tuple[Tensor, Tensor, int, float] | None = None,
    cache: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """As `rotate` of kernels/rotate.py, or with a cache (keys, values [B, S, K, d] and lengths [B]) as `rotate_append`.

    All in bf16 or all in fp32, x contiguous but for the distance of its rows, d a multiple of 8 where there are norms.
    """
    batch, rows, heads, width = x_BTNd.shape
    # The distance of rows; where slots have one row each, that of slots (a dimension of size 1 may say anything).
    stride = x_BTNd.stride(1) if rows > 1 else x_BTNd.stride(0)
    assert x_BTNd.stride()[2:] == (width, 1) and (batch == 1 or x_BTNd.stride(0) == rows * stride)
    assert cos_BT11F.is_contiguous() and sin_BT12F.is_contiguous() and cos_BT11F.shape[1] == rows
    q_norm, k_norm, queries, eps = norms or (None, None, heads, 0.0)
    keys, values, lengths = cache or (None, None, None)
    strides = (0, 0, 0, 0)
    if keys is not None and values is not None and lengths is not None:
        assert keys.dtype == values.dtype == x_BTNd.dtype and keys.shape[2:] == values.shape[2:]
        assert lengths.dtype == torch.int64 and lengths.is_contiguous() and keys.shape[3] == width
        heads, queries = heads - keys.shape[2], heads - 2 * keys.shape[2]
        assert norms is None or norms[2] == queries
        strides = *keys.stride()[:2], *values.stride()[:2]
    y = x_BTNd.new_empty(batch, rows, heads, width)
    arguments = Rotation(
        x_BTNd.data_ptr(), cos_BT11F.data_ptr(), sin_BT12F.data_ptr(), pointer(q_norm), pointer(k_norm), y.data_ptr(),
        pointer(keys), pointer(values), pointer(lengths),
        batch * rows, heads, width, stride, cos_BT11F.shape[0] * rows, queries, rows, *strides, eps,
    )  # fmt: skip
    make_call(f"rotate_{SUFFIXES[x_BTNd.dtype]}", arguments, "heads")
    return y


def can_attend(q_BTHd: Tensor) -> bool:
    """Whether `attention_rows` computes queries of this dtype and head width here."""
    known = q_BTHd.device.type == "cpu" and q_BTHd.dtype in SUFFIXES
    return known and _attends(q_BTHd.shape[3]) and library() is not None


def _attends(head_dim: int) -> bool:
    return head_dim % 8 == 0 and head_dim <= MOST_HEAD_WIDTH


def attends_chains(q_BTHd: Tensor) -> bool:
    """Whether `chain_rows` is faster here than PyTorch's attention: where products of pairs serve these queries."""
    takes_pairs = q_BTHd.dtype == torch.bfloat16 and q_BTHd.shape[3] % 16 == 0 and can_attend(q_BTHd)
    return takes_pairs and multiplies_bf16()


def multiplies_bf16() -> bool:
    """Whether the kernels use the processor's instructions for products of bf16."""
    lib = library()
    return lib is not None and bool(ctypes.c_int.in_dll(lib, "has_pairs").value)


def chain_rows(
    q_BTHd: Tensor,
    keys_BSKd: Tensor,
    values_BSKd: Tensor,
    lengths_B: Tensor,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """`rows_with_sinks` of any number of rows that are a chain."""
    parts = [
        rows_with_sinks(q, keys_BSKd, values_BSKd, lengths_B + i * MOST_ATTENTION_ROWS, None, window, sinks_H)
        for i, q in enumerate(q_BTHd.split(MOST_ATTENTION_ROWS, 1))
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def rows_with_sinks(
    q_BTHd: Tensor,
    keys_BSKd: Tensor,
    values_BSKd: Tensor,
    lengths_B: Tensor,
    tree_mask_BTT: Tensor | None,
    window: int | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """`attention_rows`, as if its queries had read the sinks too (kernels/sinks.py)."""
    lse_BTH = None if sinks_H is None else torch.empty(q_BTHd.shape[:3])
    out_BTHd = attention_rows(q_BTHd, keys_BSKd, values_BSKd, lengths_B, tree_mask_BTT, window, lse_BTH)
    return with_sinks(out_BTHd, lse_BTH, sinks_H)


def attention_rows(
    q_BTHd: Tensor,
    keys_BSKd: Tensor,
    values_BSKd: Tensor,
    lengths_B: Tensor,
    tree_mask_BTT: Tensor | None,
    window: int | None = None,
    lse_BTH: Tensor | None = None,
    blind: bool = False,
) -> Tensor:
    """As kernels/tree_attention.py, bf16 or fp32; d a multiple of 8 up to 1024, at most MOST_ATTENTION_ROWS rows.

    lse_BTH: fp32, contiguous; takes the log-sum-exps where it is given. blind: rows read the committed ones alone.
    """
    assert keys_BSKd.stride(3) == values_BSKd.stride(3) == 1
    batch, rows, heads, width = q_BTHd.shape
    assert 0 < rows <= MOST_ATTENTION_ROWS and (window is None or window >= 1), (rows, window)
    assert can_attend(q_BTHd), (q_BTHd.dtype, width)
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
    arguments = Attention(
        q_BTHd.data_ptr(), keys_BSKd.data_ptr(), values_BSKd.data_ptr(), out.data_ptr(), pointer(lse_BTH),
        lengths_B.data_ptr(), pointer(mask), batch, rows, heads, keys_BSKd.shape[2], width,
        window or 0, 0, blind, q_row, *keys_BSKd.stride()[:3], *values_BSKd.stride()[:3], width**-0.5,
    )  # fmt: skip
    make_call(f"attention_{SUFFIXES[q_BTHd.dtype]}", arguments, f"the partial results of {rows} rows of {heads} heads")
    return out


def negated_uniform(seeds_B: Tensor, positions_BJ: Tensor, vocab_size: int) -> Tensor:
    """The words of kernels/gumbel.py's noise as numbers of (-1, 0), fp32 [B, J, V]: bit for bit those of
    kernels/reference/gumbel.py."""
    batch, per = positions_BJ.shape
    seeds_B, positions_BJ = seeds_B.contiguous(), positions_BJ.contiguous()
    assert seeds_B.dtype == positions_BJ.dtype == torch.int64 and seeds_B.shape == (batch,)
    y = torch.empty(batch, per, vocab_size, dtype=torch.float32)
    arguments = _Noise(seeds_B.data_ptr(), positions_BJ.data_ptr(), y.data_ptr(), batch, per, vocab_size)
    make_call("philox_uniform", arguments, "noise")
    return y


def best_tokens(
    logits_BTV: Tensor, count: int, divisors_B: Tensor | None, noise_BN: Tensor | None, ids_V: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As kernels/best_tokens.py."""
    (batch, n_rows, vocab), logits = logits_BTV.shape, logits_BTV.contiguous()
    assert 0 < count <= vocab
    if divisors_B is not None:
        divisors_B = divisors_B.contiguous()
        assert (divisors_B.dtype, divisors_B.shape) == (torch.float32, (batch,))
    if noise_BN is not None:
        assert noise_BN.dtype == torch.float32 and len(noise_BN) == batch and noise_BN.stride(1) == 1
        assert ids_V is not None or noise_BN.shape[1] >= vocab
    if ids_V is not None:
        assert (ids_V.dtype, ids_V.shape) == (torch.int64, (vocab,)) and ids_V.is_contiguous()
    n_parts = batch * n_rows * -(-vocab // PART_WORDS)
    parts = torch.empty(n_parts, 2 + 2 * count, dtype=torch.float32)
    log_probs = torch.empty(batch, n_rows, count, dtype=torch.float32)
    words = torch.empty(batch, n_rows, count, dtype=torch.int64)
    tensors = logits, divisors_B, noise_BN, ids_V, parts, log_probs, words
    noise_row = 0 if noise_BN is None else noise_BN.stride(0)
    arguments = _BestTokens(*map(pointer, tensors), batch, n_rows, vocab, count, noise_row)
    make_call(f"best_tokens_{SUFFIXES[logits.dtype]}", arguments, f"the best tokens of {batch * n_rows} rows")
    return log_probs, words


def beam_level(
    log_probs_BTC: Tensor,
    words_BTC: Tensor,
    scores_BT: Tensor,
    open_BTN: Tensor,
    width: int,
    first_node: int,
    first_class: int,
    borders_K: Tensor,
    token_ids_E: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As kernels/beam.py."""
    (batch, n_rows, count), before, lib = log_probs_BTC.shape, open_BTN.shape[2], library()
    kinds = (torch.float32, torch.int64, torch.int64, torch.float32, torch.float32, torch.bool)
    given = tuple(
        None if part is None else part.contiguous()
        for part in (log_probs_BTC, words_BTC, token_ids_E, scores_BT, borders_K, open_BTN)
    )
    assert all(part is None or part.dtype == kind for part, kind in zip(given, kinds, strict=True))
    assert words_BTC.shape == log_probs_BTC.shape and scores_BT.shape == open_BTN.shape[:2] == (batch, n_rows)
    assert 0 < width <= n_rows * count and lib is not None
    nodes_3BW = torch.empty(3, batch, width, dtype=torch.int64)
    scores_BW = torch.empty(batch, width, dtype=torch.float32)
    open_BWN = torch.empty(batch, width, before + width, dtype=torch.bool)
    sizes = batch, n_rows, count, width, before, len(borders_K), first_node, first_class
    arguments = _Beam(*map(pointer, (*given, nodes_3BW, scores_BW, open_BWN)), *sizes)
    lib.beam_level(ctypes.addressof(arguments))
    return nodes_3BW, scores_BW, open_BWN
