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
from collections.abc import Iterator
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
SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
MOST_STACK = 256  # bytes per thread
PROCESSORS = 132
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LAYERS, HEADS, KV, VOCAB, CAPACITY = 32, 32, 8, 128_256, 131_072
MOST_ROWS = 128  # of a pass


@dataclass(frozen=True)
class Variant:
    """A call to a public function: file of triton, which call, architecture, dtype, rows and head width."""

    file: str
    what: str = ""
    arch: int = 90
    dtype: str = "bf16"
    rows: int = 64
    width: int = 128


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel uses: bytes of shared memory per program, registers and bytes of stack per thread."""

    variant: Variant
    kernel: str
    warps: int
    shared_memory: int
    registers: int
    stack: int

    @property
    def excess(self) -> str:
        if self.shared_memory > SHARED_MEMORY[self.variant.arch]:
            return f"more than {SHARED_MEMORY[self.variant.arch]} bytes of shared memory"
        most = 0 if self.variant.arch == 90 and self.variant.file == "tree_attention" else MOST_STACK
        return f"more than {most} bytes of stack" if self.stack > most else ""

    def line(self) -> str:
        v = self.variant
        return (
            f"sm_{v.arch:<4}{v.dtype} {v.rows:>3} rows d {v.width:<4}{v.what:<22}{self.kernel:<16}{self.warps:>3} warps"
            f"{self.shared_memory / 1024:>7.1f} KiB {self.registers:>4} registers {self.stack:>5} stack"
            f"{'  EXCEEDS: ' + self.excess if self.excess else ''}"
        )


def call(v: Variant, module: ModuleType) -> None:
    """Call the public functions of the variant's file, on tensors without storage."""
    dtype, int64, int32 = DTYPES[v.dtype], torch.int64, torch.int32

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    one, nodes, kv = empty(1, dtype=int64), empty(1, v.rows, dtype=int64), empty(1, CAPACITY, KV, v.width)
    if v.file == "tree_attention":
        vars(module)["_device"] = lambda _: (PROCESSORS, SHARED_MEMORY[v.arch])
        q = empty(1, v.rows, HEADS, v.width)
        if v.what == "cross":
            module.cross_attention(q, kv, kv, one)
        else:
            tree = empty(1, v.rows, 2, dtype=int64), empty(1, v.rows, dtype=int32)
            module.tree_attention(q, kv, kv, one, *tree, "tree" in v.what, 4096 if "window" in v.what else None)
    elif v.file == "choice":
        module.gumbel_noise(one, nodes, VOCAB)
        module.choose(empty(1, v.rows, VOCAB), one, nodes, empty(1, dtype=torch.float32))
    elif v.file == "rotate":
        qkv = empty(1, v.rows, HEADS + 2 * KV, v.width)
        tables = empty(1, v.rows, 1, 1, v.width // 2), empty(1, v.rows, 1, 2, v.width // 2)
        norms = module.HeadNorms(empty(v.width), empty(v.width), HEADS, 1e-6)
        module.rotate(qkv[:, :, :-KV], *tables)
        module.rotate_append(qkv, *tables, kv, kv, one, norms)
    else:
        labels, scales, before = (empty(512, dtype=kind) for kind in (int64, torch.float32, int32))
        module.chunk_losses(empty(512, VOCAB), labels, scales, before, 5, True)


FILES = "tree_attention", "choice", "rotate", "linear_cross_entropy"


def tree_shapes(module: ModuleType, dtype: str, width: int) -> list[int]:
    """Numbers of rows that represent all of 1 to 128 on sm_90: one for each block shape of a program."""
    found: dict[tuple[int, int], int] = {}
    for rows in (1, 16, 64, *range(1, MOST_ROWS + 1)):
        blocks = module.blocks(rows * (HEADS // KV), width, DTYPES[dtype].itemsize, SHARED_MEMORY[90])
        found.setdefault(blocks, rows)
    return sorted(found.values())


def variants(module: ModuleType) -> Iterator[Variant]:
    """Every kernel once, every block shape of trees on sm_90, and the most demanding variants elsewhere."""
    for dtype, width in product(DTYPES, (64, 128, 256)):
        for rows in tree_shapes(module, dtype, width):
            yield Variant("tree_attention", "tree", 90, dtype, rows, width)
    yield Variant("tree_attention", "chain")
    yield Variant("tree_attention", "cross", rows=1)
    for arch, dtype, width in (
        (90, "bf16", 128), (90, "bf16", 256), (90, "fp32", 128), (80, "bf16", 128), (89, "fp32", 64),
        (89, "fp32", 128), (100, "bf16", 128), (120, "bf16", 128), (120, "bf16", 256), (120, "fp32", 256),
    ):  # fmt: skip
        yield Variant("tree_attention", "tree, window", arch, dtype, 64, width)
    for file in FILES[1:]:
        yield Variant(file)


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
        self.cuobjdump = str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")
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
        call(variant, self.modules[variant.file])

    def usage(self, name: str, kernel: Any) -> Usage:
        with TemporaryDirectory() as folder:
            file = Path(folder) / "kernel.cubin"
            file.write_bytes(kernel.asm["cubin"])
            command = [self.cuobjdump, "-res-usage", str(file)]
            told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        used = re.search(r"REG:(\d+) STACK:(\d+)", told)
        assert used is not None, f"cuobjdump reports no registers for {name}"
        warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
        return Usage(self.variant, name, warps, shared, int(used[1]), int(used[2]))

    def left(self) -> list[str]:
        """Names of kernels in triton/ that were not compiled."""
        ours = {x for file in self.modules.values() for x in vars(file).values() if isinstance(x, self.functions)}
        called = {x for x in ours if any(re.search(rf"\b{x.__name__}\(", other.src) for other in ours - {x})}
        return sorted(x.__name__ for x in ours - called - self.compiled)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What the Triton kernels use on GPUs that are not present.")
    parser.add_argument("--arch", type=int, nargs="+", choices=SHARED_MEMORY, default=list(SHARED_MEMORY))
    parser.add_argument("--kernel", nargs="+", choices=FILES, default=list(FILES), help="files of kernels/triton")
    args = parser.parse_args(arguments)
    compiler = Compiler()
    for variant in variants(compiler.modules["tree_attention"]):
        if variant.arch in args.arch and variant.file in args.kernel:
            compiler.run(variant)
    print(json.dumps({"found": [asdict(usage) for usage in compiler.found], "not_compiled": compiler.left()}))
    return 1 if any(usage.excess for usage in compiler.found) else 0


if __name__ == "__main__":
    sys.exit(main())
