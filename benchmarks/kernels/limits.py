"""Compiles the Triton kernels for GPUs that are not present, and reads shared memory, registers and stack of each.

`python benchmarks/kernels/limits.py` takes a minute; `--arch 90 120` and `--kernel tree_attention` select some kernels.
It prints a line per compiled kernel and one JSON object as the last line; the exit status is 1 if a limit is exceeded.
Needs Triton's own tools and no GPU.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import torch

IMPL = Path(__file__).resolve().parents[2] / "kernels" / "triton"
# Bytes of shared memory that a program may use, by architecture: A100; A40; L40S and 4090; H100; B200; 5090.
FAST_MEMORY = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
MOST_STACK = 256  # bytes per thread
PROCESSORS = 132
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
WIDTHS, ROWS = (64, 128, 256), (1, 16, 64)
LAYERS, HEADS, KV, VOCAB, CAPACITY = 32, 32, 8, 128_256, 131_072
MOST_ROWS = 128  # of a pass


@dataclass(frozen=True)
class Variant:
    """A call to a public function: file of triton, which call, architecture, dtype, rows and head width."""

    file: str
    what: str
    arch: int
    dtype: str = "bf16"
    rows: int = 64
    width: int = 128


# The variant whose loops are counted.
MAIN_LOOP = Variant("tree_attention", "tree", 90, "bf16", 64, 128)


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel uses: bytes of shared memory per program, registers and bytes of stack per thread.
    `loops`: for MAIN_LOOP, the instructions of each loop with matrix products, in the order of the code."""

    variant: Variant
    kernel: str
    warps: int
    fast_memory: int
    registers: int
    stack: int
    loops: tuple[int, ...] = ()

    @property
    def excess(self) -> str:
        if self.fast_memory > FAST_MEMORY[self.variant.arch]:
            return f"more than {FAST_MEMORY[self.variant.arch]} bytes of fast memory"
        most = 0 if self.variant.arch == 90 and self.variant.file == "tree_attention" else MOST_STACK
        return f"more than {most} bytes of stack" if self.stack > most else ""

    def line(self) -> str:
        v = self.variant
        loops = f", loops of {' and '.join(map(str, self.loops))}" if self.loops else ""
        return (
            f"sm_{v.arch:<4}{v.dtype} {v.rows:>3} rows d {v.width:<4}{v.what:<22}{self.kernel:<16}{self.warps:>3} warps"
            f"{self.fast_memory / 1024:>7.1f} KiB {self.registers:>4} registers {self.stack:>5} stack{loops}"
            f"{'  EXCEEDS: ' + self.excess if self.excess else ''}"
        )


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor without storage."""
    return torch.empty(shape, dtype=dtype, device="meta")


def _tree_attention(v: Variant, module: ModuleType) -> Any:
    vars(module)["_device"] = lambda _: (PROCESSORS, FAST_MEMORY[v.arch])
    dtype, group = DTYPES[v.dtype], HEADS // KV
    q, kv = empty(1, v.rows, KV * group, v.width, dtype=dtype), empty(1, CAPACITY, KV, v.width, dtype=dtype)
    length = empty(1, dtype=torch.int64)
    if v.what == "cross":
        return module.cross_attention(q, kv, kv, length)
    tree = empty(1, v.rows, 2, dtype=torch.int64), empty(1, v.rows, dtype=torch.int32)
    return module.tree_attention(q, kv, kv, length, *tree, "tree" in v.what, 4096 if "window" in v.what else None)


def _choice(v: Variant, module: ModuleType) -> Any:
    number, nodes = empty(1, dtype=torch.int64), empty(1, v.rows, dtype=torch.int64)
    module.gumbel_noise(number, nodes, VOCAB)
    return module.choose(empty(1, v.rows, VOCAB, dtype=DTYPES[v.dtype]), number, nodes, empty(1, dtype=torch.float32))


def _tree(v: Variant, module: ModuleType) -> Any:
    nodes = empty(1, v.rows, dtype=torch.int64)
    module.accepted_path(nodes, nodes, nodes, empty(1, dtype=torch.bool), 8)
    layers, one = empty(LAYERS, 1, CAPACITY, KV, v.width, dtype=DTYPES[v.dtype]), empty(1, dtype=torch.int64)
    return module.keep_rows(layers, layers, one, empty(1, 9, dtype=torch.int64), one)


def _rotate(v: Variant, module: ModuleType) -> Any:
    dtype, half = DTYPES[v.dtype], v.width // 2
    tables = empty(1, v.rows, 1, 1, half, dtype=dtype), empty(1, v.rows, 1, 2, half, dtype=dtype)
    qkv, kv = empty(1, v.rows, HEADS + 2 * KV, v.width, dtype=dtype), empty(1, CAPACITY, KV, v.width, dtype=dtype)
    norms = module.HeadNorms(empty(v.width, dtype=dtype), empty(v.width, dtype=dtype), HEADS, 1e-6)
    module.rotate(qkv[:, :, :-KV], *tables)
    return module.rotate_append(qkv, *tables, kv, kv, empty(1, dtype=torch.int64), norms)


def _selection(v: Variant, module: ModuleType) -> Any:
    dtype = DTYPES[v.dtype]
    cache, picked = empty(LAYERS, 8192, KV, v.width, dtype=dtype), empty(LAYERS, 1024, KV, v.width, dtype=dtype)
    module.key_scores(empty(LAYERS, HEADS, v.width, dtype=dtype), cache)
    module.chunk_means(cache, 8, picked)
    return module.gather_rows(cache, cache, empty(LAYERS, 1024, KV, dtype=torch.int64), picked, picked)


def _linear_cross_entropy(v: Variant, module: ModuleType) -> Any:
    rows, numbers = empty(512, dtype=torch.int64), empty(512, dtype=torch.float32)
    logits, before = empty(512, VOCAB, dtype=DTYPES[v.dtype]), empty(512, dtype=torch.int32)
    return module.chunk_losses(logits, rows, numbers, before, -100, 5, True)


def _segment_attention(v: Variant, module: ModuleType) -> Any:
    rows, keys, lse = empty(8192, HEADS, v.width), empty(8192, KV, v.width), empty(HEADS, 8192, dtype=torch.float32)
    spans, borders = empty(3, 4, dtype=torch.int32), empty(4, dtype=torch.int32)
    window = 513 if "window" in v.what else None
    return module.query_gradient(rows, keys, keys, rows, lse, rows, spans, borders, 4096, window)


CALLS: dict[str, Callable[[Variant, ModuleType], Any]] = {
    "tree_attention": _tree_attention,
    "choice": _choice,
    "tree": _tree,
    "rotate": _rotate,
    "selection": _selection,
    "linear_cross_entropy": _linear_cross_entropy,
    "segment_attention": _segment_attention,
}
# Files whose code depends on the head width, and on the dtype of the logits.
BY_WIDTH, BY_DTYPE = ("tree", "rotate", "selection"), ("choice", "linear_cross_entropy")


def tree_shapes(module: ModuleType, dtype: str, width: int) -> list[int]:
    """Numbers of rows that represent all of 1 to 128 on sm_90: one for each block shape of a program."""
    found: dict[tuple[int, int], int] = {}
    for rows in (*ROWS, *range(1, MOST_ROWS + 1)):
        blocks = module.blocks(rows * (HEADS // KV), width, DTYPES[dtype].itemsize, FAST_MEMORY[90])
        found.setdefault(blocks, rows)  # a number from ROWS if possible
    return sorted(found.values())


def variants(module: ModuleType) -> Iterator[Variant]:
    """Every kernel once, every block shape of trees on sm_90, and the most demanding variants elsewhere."""
    for dtype, width in product(DTYPES, WIDTHS):
        for rows in tree_shapes(module, dtype, width):
            yield Variant("tree_attention", "tree", 90, dtype, rows, width)
    yield Variant("tree_attention", "chain", 90)
    yield Variant("tree_attention", "cross", 90, "bf16", 1)
    for dtype, width in (("bf16", 128), ("bf16", 256), ("fp32", 128)):
        yield Variant("tree_attention", "tree, window", 90, dtype, 64, width)
    for arch, dtype, width in (
        (80, "bf16", 128), (89, "fp32", 64), (89, "fp32", 128), (100, "bf16", 128), (120, "bf16", 128),
        (120, "bf16", 256), (120, "fp32", 256),
    ):  # fmt: skip
        yield Variant("tree_attention", "tree, window", arch, dtype, 64, width)
    for file in (*BY_WIDTH, *BY_DTYPE):
        yield Variant(file, "", 90)
    for arch in (80, 120):
        yield Variant("segment_attention", "window", arch, "bf16", 4096, 128)


class Absent:
    """Stands in for a device's driver: answers what Triton asks before it compiles."""

    arch = 90

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", Absent.arch, 32)

    def get_current_device(self) -> int:
        return Absent.arch  # Triton keeps what it compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiler:
    """Makes calls to public functions compile the kernels that they would launch."""

    def __init__(self):
        import triton
        from triton.runtime import driver

        assert os.environ.get("TRITON_INTERPRET") != "1", "Triton's interpreter compiles nothing"
        self.found, self.compiled = list[Usage](), set()
        self.tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
        self.functions: Any = triton.JITFunction
        self.modules = {path.stem: import_module(f"longdraft.kernels.triton.{path.stem}") for path in IMPL.glob("*.py")}
        absent: Any = Absent()
        driver.set_active(absent)
        run, seen = self.functions.run, set()

        def compile_only(function, *args, grid, warmup, **options):
            kernel = run(function, *args, grid=grid, warmup=True, **options)
            self.compiled.add(function)
            if (Absent.arch, kernel.hash) not in seen:
                seen.add((Absent.arch, kernel.hash))
                self.found.append(self.usage(function.__name__, kernel))
                print(self.found[-1].line(), flush=True)

        self.functions.run = compile_only

    def run(self, variant: Variant) -> None:
        Absent.arch, self.variant = variant.arch, variant
        CALLS[variant.file](variant, self.modules[variant.file])

    def usage(self, name: str, kernel: Any) -> Usage:
        with TemporaryDirectory() as folder:
            file = Path(folder) / "kernel.cubin"
            file.write_bytes(kernel.asm["cubin"])
            used = re.search(r"REG:(\d+) STACK:(\d+)", self._dump("-res-usage", file))
            assert used is not None, f"cuobjdump reports no registers for {name}"
            listed = name == "_runs" and self.variant == MAIN_LOOP
            loops = loops_of_products(self._dump("-sass", file)) if listed else ()
        warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
        return Usage(self.variant, name, warps, shared, int(used[1]), int(used[2]), loops)

    def _dump(self, option: str, file: Path) -> str:
        command = [str(self.tools / "cuobjdump"), option, str(file)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def left(self) -> list[str]:
        """Names of kernels in triton/ that were not compiled."""
        ours = {x for file in self.modules.values() for x in vars(file).values() if isinstance(x, self.functions)}
        called = {x for x in ours if any(re.search(rf"\b{x.__name__}\(", other.src) for other in ours - {x})}
        return sorted(x.__name__ for x in ours - called - self.compiled)


def loops_of_products(sass: str) -> tuple[int, ...]:
    """Count the instructions of each loop with matrix products (tensor cores, or many multiplications) in a listing."""
    listed = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\d+ )?([A-Z0-9_]+)([^;]*);", sass)
    code = [(int(place, 16), name, rest) for place, name, rest in listed]
    loops = []
    for place, name, rest in code:
        target = re.search(r"0x([0-9a-f]+)", rest) if name == "BRA" else None
        if target is not None and (start := int(target[1], 16)) < place:
            body = [name for at, name, _ in code if start <= at <= place]
            if any("MMA" in name for name in body) or body.count("FFMA") >= 128:
                loops.append(len(body))
    return tuple(loops)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What the Triton kernels use on GPUs that are not present.")
    parser.add_argument("--arch", type=int, nargs="+", choices=FAST_MEMORY, default=list(FAST_MEMORY))
    parser.add_argument("--kernel", nargs="+", choices=CALLS, default=list(CALLS), help="files of kernels/triton")
    args = parser.parse_args(arguments)
    compiler = Compiler()
    for variant in variants(compiler.modules["tree_attention"]):
        if variant.arch in args.arch and variant.file in args.kernel:
            compiler.run(variant)
    print(json.dumps({"found": [asdict(usage) for usage in compiler.found], "not_compiled": compiler.left()}))
    return 1 if any(usage.excess for usage in compiler.found) else 0


if __name__ == "__main__":
    sys.exit(main())
