"""How a launch of tree attention is cut up: blocks of queries and keys, stages, warps, and runs of keys.

`table` works everywhere. Before the first request on a GPU the variants of TILES are measured (`tune` in
triton/tree_attention.py), and the fastest are kept in a file that holds for this card, its driver, PyTorch, Triton and
these sources. `triton.autotune` would measure within the first launch of a shape, which may be a request's or recorded,
with the lengths of that moment; and it cannot choose the number of runs, on which buffers depend.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from longdraft.kernels.cpu.library import cache_path

SOURCES = Path(__file__), Path(__file__).with_name("tree_attention.py")
DRIVER = Path("/proc/driver/nvidia/version")
KINDS = 1, 16, 128  # rows of passes that share a choice: up to this many
MOST_RUNS = 64
CALLS, COLD = 11, 2**28  # of a measurement; bytes read before each call, more than caches hold


class Choice(NamedTuple):
    """Queries and keys of a block, stages of the loads, warps of a program, how many programs per processor to cut the
    keys into runs for (0: as the table does), and whether products begin a block ahead (1) or not (0)."""

    queries: int
    keys: int
    stages: int
    warps: int
    programs: int = 0
    ahead: int = 0


# On sm_90 two stages fetch the next keys only after the last product of a block has begun, so larger tiles have more.
TILES = (
    Choice(64, 64, 2, 4), Choice(64, 64, 3, 4), Choice(64, 64, 4, 4), Choice(64, 32, 4, 4),
    Choice(128, 64, 2, 8), Choice(128, 64, 3, 8), Choice(128, 32, 4, 8), Choice(128, 64, 3, 8, ahead=1),
    Choice(128, 128, 3, 8), Choice(256, 64, 4, 8),
)  # fmt: skip
PROGRAMS = 1, 2, 4


class Shape(NamedTuple):
    """What a choice is for. The number of slots and the capacity are rounded up to powers of two, rows to KINDS."""

    dtype: torch.dtype
    n_slots: int
    n_rows: int
    n_heads: int
    n_kv_heads: int
    width: int
    capacity: int
    window: int | None


def shape_of(
    dtype: torch.dtype, n_slots: int, n_rows: int, n_heads: int, n_kv_heads: int, width: int, capacity: int,
    window: int | None,
) -> Shape:  # fmt: skip
    """The shape of a pass of up to 128 rows over a cache of this capacity."""
    kind = next(most for most in KINDS if n_rows <= most)
    return Shape(dtype, _power(n_slots), kind, n_heads, n_kv_heads, width, _power(capacity), window)


def _power(count: int) -> int:
    """The next power of two."""
    return 1 << max(0, count - 1).bit_length()


def blocks(rows: int, width: int, itemsize: int, fast_memory: int) -> tuple[int, int]:
    """Queries (rows of the pass times the group) and keys that a program takes at a time, by the table.

    In fp32, threads multiply whole rows of their operands, and larger blocks would spill their registers. In half
    precision, tensor cores read keys and values from shared memory, which holds them twice since the next ones are
    fetched meanwhile.

    rows: of all queries. width: d. itemsize: bytes of a number. fast_memory: bytes of shared memory for a program.
    """
    block_d = at_least_16(width)
    if itemsize > 2:
        block_m, block_n = 32 if block_d <= 64 else 16, 16
    else:
        block_m, block_n = (128, 64) if block_d <= 128 else (64, 32)
    block_m = min(block_m, at_least_16(rows))
    while (block_m + 4 * block_n) * block_d * itemsize > fast_memory and max(block_m, block_n) > 16:
        block_m, block_n = (block_m, block_n // 2) if block_n > 16 else (block_m // 2, block_n)
    return block_m, block_n


def at_least_16(count: int) -> int:
    """The next power of two that is a size `tl.dot` takes."""
    return max(16, _power(count))


def table(shape: Shape, n_rows: int, fast_memory: int) -> Choice:
    """The choice for a pass of `n_rows` rows where nothing was measured; see `blocks`."""
    rows, block_d, itemsize = n_rows * shape.n_heads // shape.n_kv_heads, at_least_16(shape.width), shape.dtype.itemsize
    block_m, block_n = blocks(rows, shape.width, itemsize, fast_memory)
    # With two stages an H100 fetches nothing before it is needed: the copies wait for a block's last product.
    fits_3 = (block_m + 6 * block_n) * block_d * itemsize <= fast_memory
    return Choice(
        block_m, block_n, 3 if itemsize == 2 and fits_3 else 2, 8 if block_m * max(block_d, 128) >= 128 * 128 else 4
    )


def choose_splits(n_programs: int, capacity: int, n_processors: int, block_n: int, per_processor: int = 0) -> int:
    """Into how many runs to cut the keys, of at least four blocks each.

    n_programs: programs of a run. per_processor: the most programs for each processor; 0: at least two, by a power of
    two of runs.
    """
    if per_processor:
        wanted = per_processor * n_processors // n_programs
        return max(1, min(wanted, capacity // (4 * block_n), MOST_RUNS))
    n_splits = 1
    while n_splits < MOST_RUNS and n_programs * n_splits < 2 * n_processors and capacity >= 8 * n_splits * block_n:
        n_splits *= 2
    return n_splits


def fitted(choice: Choice, rows: int) -> Choice:
    """The choice with its block of queries no larger than needed, with four warps if the block has fewer than 128, and
    with no product ahead if it has fewer than 64, because its products are then not asynchronous."""
    block_m = min(choice.queries, at_least_16(rows))
    warps, ahead = choice.warps if block_m >= 128 else 4, choice.ahead if block_m >= 64 else 0
    return choice._replace(queries=block_m, warps=warps, ahead=ahead)


def variants(shape: Shape, fast_memory: int) -> list[Choice]:
    """What is measured for a shape: each of TILES that fits the shared memory, with each of PROGRAMS."""
    block_d, itemsize = at_least_16(shape.width), shape.dtype.itemsize
    tiles = dict.fromkeys(fitted(tile, shape.n_rows * shape.n_heads // shape.n_kv_heads) for tile in TILES)
    return [
        tile._replace(programs=programs)
        for tile in tiles
        if (tile.queries + (2 * tile.stages + tile.ahead) * tile.keys) * block_d * itemsize <= fast_memory
        for programs in PROGRAMS
    ]


# By device and shape; None is the table.
_chosen: dict[tuple[torch.device, Shape], Choice | None] = {}


def chosen(device: torch.device, shape: Shape) -> Choice | None:
    """The measured choice; None if the table is used. It does not change after the shape's first launch, because
    recorded work keeps its own."""
    return _chosen.setdefault((device, shape), None)


def tune(
    device: torch.device,
    passes: Mapping[Shape, int],
    fast_memory: int,
    call_of: Callable[[Shape, int], Callable[[Choice | None], Tensor]],
    log: Callable[[str], object],
    seconds: Callable[[Callable[[], object]], float],
) -> None:
    """Settle the choices of all shapes that have none, by the file or by measuring, and write the file.

    Args:
        passes: the number of rows of each shape's pass that is measured.
        call_of: prepares such a pass as a function that launches it with a choice and returns its output.
        log: called once before anything is measured, and with the time that it took. seconds: times a call.
    """
    file, kept, begin = _file(device), _read(_file(device)), time.perf_counter()
    found: dict[str, Choice | None] = {}
    for shape, n_rows in passes.items():
        if (device, shape) in _chosen:
            continue
        name, possible = f"{n_rows} rows: {shape}", [None, *variants(shape, fast_memory)]
        if (before := kept.get(name, ())) not in possible:
            if not found:
                log(f"tree attention: measuring what is fastest on this device, once; {file} keeps it")
            before = found[name] = fastest(possible, call_of(shape, n_rows), seconds)
        _chosen[device, shape] = None if before is None else Choice(*map(int, before))
    if found:
        log(f"tree attention: measured {len(found)} shapes in {time.perf_counter() - begin:.1f} s")
        if file is not None:
            _write(file, device, {**_read(file), **found})


def fastest(
    choices: Iterable[Choice | None],
    run: Callable[[Choice | None], Tensor],
    seconds: Callable[[Callable[[], object]], float],
) -> Choice | None:
    """The choice with the fastest call. Choices that fail, or whose output differs from the first one's by more than
    rounding, are dropped; the first must not fail."""
    first, *others = choices
    wanted, times = run(first), {first: seconds(partial(run, first))}
    allowed = 8 * torch.finfo(wanted.dtype).eps * wanted.abs().max()
    for choice in others:
        with suppress(triton.TritonError, RuntimeError):  # does not compile, or does not fit the device
            if bool((run(choice) - wanted).abs().max() <= allowed):
                times[choice] = seconds(partial(run, choice))
    return min(times, key=times.__getitem__)


def seconds_on(device: torch.device, call: Callable[[], object]) -> float:
    """The median seconds that a GPU, which must be the current one, spends on a call with cold caches.

    The GPU first gets enough work that the host stays ahead of it, as with recorded work. Caches are emptied by
    reading, as the weights between two layers' attention do: written data would be written back later, during the call.
    """
    cold, stream = torch.zeros(COLD // 8, dtype=torch.int64, device=device), torch.cuda.current_stream(device)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(CALLS)]
    for _ in range(4 * CALLS):
        cold.amax()
    for begin, end in events:
        cold.amax()
        begin.record(stream)
        call()
        end.record(stream)
    stream.synchronize()
    return median(begin.elapsed_time(end) for begin, end in events) / 1e3


def _identity(device: torch.device) -> dict[str, str]:
    """Everything that a measurement depends on."""
    card: Any = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return {
        "card": str(card and (card.name, card.multi_processor_count)),
        "driver": DRIVER.read_text() if DRIVER.exists() else "",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "sources": hashlib.sha256(b"".join(source.read_bytes() for source in SOURCES)).hexdigest(),
    }


def _file(device: torch.device) -> Path | None:
    """The file of this device and these versions, in the user's cache folder; None if there can be none."""
    digest = hashlib.sha256(json.dumps(_identity(device)).encode()).hexdigest()
    with suppress(OSError):
        return cache_path(f"tree_attention-{digest[:16]}.json")
    return None


def _read(file: Path | None) -> dict[str, Any]:
    """The choices in a file by their names, each None or a tuple; none of a file that is absent or damaged."""
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        choices = json.loads(file.read_text())["choices"] if file else {}
        return {name: None if choice is None else tuple(choice) for name, choice in choices.items()}
    return {}


def _write(file: Path, device: torch.device, choices: Mapping[str, Choice | None]) -> None:
    """Replace the file as a whole, so that processes may write at once. If it cannot be written, later processes
    measure again."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    with suppress(OSError):
        temporary.write_text(json.dumps({"made on": _identity(device), "choices": choices}, indent=1) + "\n")
        temporary.replace(file)
