"""The library of C kernels: compiles it once for this machine, loads it and calls it through ctypes. While decoding, it
moves the threads from PyTorch to the C kernels, and a clock measures their work (threads.inc)."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

FOLDER = Path(__file__).parent
SOURCES = FOLDER / "rows.c", *sorted(FOLDER.glob("*.inc"))
# No -ffast-math: it would assume that infinities and NaN never occur, and flush denormals process-wide.
FLAGS = ["-O3", "-march=native", "-ffp-contract=off", "-pthread", "-fPIC"]
SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "f32"}  # of the C functions for each element type
# Whether this thread is inside `decoding`.
is_decoding: ContextVar[bool] = ContextVar("is_decoding", default=False)


def cache_path(name: str) -> Path:
    """Where a library of this name is or may be written: in the user's cache folder or, if that cannot be made or
    written to, in a folder of this user in the temporary directory."""
    with suppress(RuntimeError, OSError):  # the user has no home, or it does not exist
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


def _build() -> Path:
    """Compile the library, unless there already is one for these sources, this compiler and this processor."""
    compiler = _compiler() or "cc"
    flags = [*FLAGS, "-mno-avx512f"] if os.environ.get("LONGDRAFT_CPU_KERNELS") == "avx2" else FLAGS
    processor = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else platform.processor()
    features = sorted({line for line in processor.splitlines() if line.startswith(("flags", "Features", "model name"))})
    run = partial(subprocess.run, check=True, capture_output=True, text=True)
    version = run([compiler, "--version"]).stdout
    identity = [*(source.read_text() for source in SOURCES), *flags, version, *features, platform.machine()]
    path = cache_path(f"rows-{hashlib.sha256(chr(0).join(identity).encode()).hexdigest()[:16]}.so")
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = Path(folder) / "rows.so"
            run([compiler, *flags, "-shared", SOURCES[0], "-o", built, "-lm"])
            built.replace(path)
    return path


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")


def obstacle() -> str | None:
    """Why the kernels cannot be used on this machine, as far as known before they are built; or None."""
    if os.environ.get("LONGDRAFT_CPU_KERNELS") == "0":
        return "LONGDRAFT_CPU_KERNELS=0 turns the CPU kernels off"
    if platform.machine() in ("x86_64", "AMD64") and not torch.cpu._is_avx2_supported():
        return "the CPU kernels need AVX2, which this processor lacks; decoding is slower"
    if _compiler() is None:
        return "no C compiler found, decoding on the CPU is slower; install gcc or set CC"
    return None


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels. If unavailable, None, and one line on stderr says why; PyTorch is then used.

    LONGDRAFT_CPU_KERNELS=0 turns the kernels off; =avx2 builds them as for an x86 processor with only AVX2.
    """
    if (why := obstacle()) is None:
        try:
            loaded = ctypes.CDLL(str(_build()))
            loaded.make_call.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
            loaded.beam_level.argtypes, loaded.beam_level.restype = [ctypes.c_void_p], None
            loaded.uneven_seconds.restype = ctypes.c_double
            return loaded
        except OSError as error:
            advice = f"set XDG_CACHE_HOME to a folder that can be written ({error})"
        except subprocess.CalledProcessError as error:
            advice = f"set CC to a working C compiler. The compiler said: {error.stderr}"
        why = f"the CPU kernels could not be built, decoding is slower; LONGDRAFT_CPU_KERNELS=0 silences this; {advice}"
    if os.environ.get("LONGDRAFT_CPU_KERNELS") != "0":
        print(f"longdraft: {why}", file=sys.stderr)
    return None


def pointers(*tensors: Tensor | None) -> list[int | None]:
    """The addresses of tensors' data, for a structure; None (NULL) for None."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def fits(tensor: Tensor | None, dtype: torch.dtype, *shape: int) -> bool:
    """Whether a tensor is None or contiguous, of this dtype and shape."""
    return tensor is None or (tensor.dtype == dtype and tensor.shape == shape and tensor.is_contiguous())


def structure(
    *parts: tuple[type, str], addresses: str = "", sizes: str = "", floats: str = ""
) -> type[ctypes.Structure]:
    """A structure of these fields, in order. `parts` are nested structures; each string holds the names of one type."""
    groups = *parts, (ctypes.c_void_p, addresses), (ctypes.c_ssize_t, sizes), (ctypes.c_float, floats)
    fields = [(name, c_type) for c_type, names in groups for name in names.split()]
    return type("Structure", (ctypes.Structure,), {"_fields_": fields})


def make_call(name: str, dtype: torch.dtype | None, arguments: ctypes.Structure, what: str) -> None:
    """Run a function of the library, for numbers of this dtype, as one job for its threads.

    Raises MemoryError if there is no memory for `what`.
    """
    lib = library()
    assert lib is not None
    if lib.make_call(getattr(lib, f"{name}_{SUFFIXES[dtype]}" if dtype else name), ctypes.addressof(arguments)):
        raise MemoryError(f"no memory for {what}")


@contextmanager
def decoding(enabled: bool = True) -> Iterator[None]:
    """A context in which this thread's passes of few rows go through the C kernels in fp32 too, on as many threads as
    PyTorch has.

    PyTorch's own operations between them run on one thread: two pools that wait for work by spinning would take the
    processors from each other. Without the kernels, or if not `enabled`, nothing changes.
    """
    lib = library() if enabled else None
    if lib is None:
        yield
        return
    token, taken = is_decoding.set(True), lib.take_threads(1)
    try:
        yield
    finally:
        lib.give_threads(taken)
        is_decoding.reset(token)


@contextmanager
def free_processors(enabled: bool = True) -> Iterator[None]:
    """A context in which PyTorch's operations of this thread run on as many threads as there are processors that no
    other process uses at the moment, at least one.

    OpenMP's threads wait for each other at the end of every operation, so one that has no processor holds up all.
    """
    lib, elsewhere = (library(), running_elsewhere()) if enabled else (None, 0)
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    taken = lib.take_threads(max(1, processors - elsewhere)) if lib is not None and elsewhere else 0
    try:
        yield
    finally:
        if lib is not None:
            lib.give_threads(taken)


def running_elsewhere() -> int:
    """How many threads of other processes run or wait for a processor now; 0 if the system does not report it."""
    with suppress(OSError, ValueError, IndexError):
        running = int(Path("/proc/loadavg").read_text().split()[3].split("/")[0])
        stats = [(task / "stat").read_text() for task in Path("/proc/self/task").iterdir()]
        return max(0, running - sum(stat.rpartition(")")[2].split()[0] == "R" for stat in stats))
    return 0


def work_seconds() -> float:
    """A clock of this thread's work, in seconds. It runs at the speed of time on an idle machine and stops while other
    processes have the processors. The C kernels' work counts as an even share of what all threads spend on it."""
    lib = library()
    return time.thread_time() - (0.0 if lib is None else lib.uneven_seconds())
