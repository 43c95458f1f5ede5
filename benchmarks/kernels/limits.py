"""Compiles the Triton kernels for GPUs that are not present, and reports each one's shared memory, registers and stack.

`python benchmarks/kernels/limits.py` takes some minutes on all processors. It prints a line per kernel, then one JSON
array as the last line; the exit status is 1 if a limit is exceeded. Needs Triton's own tools and no GPU.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import islice, product, repeat
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import torch

from longdraft.kernels.distillation import Distillation, TargetChunk
from longdraft.kernels.triton import tuning

# Bytes of shared memory that a program may use, by architecture: A100; A40; L40S and 4090; H100; B200; 5090.
SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
MOST_STACK = 256  # bytes per thread
PROCESSORS = 132
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
HEADS, KV, VOCAB, CAPACITY = 32, 8, 128_256, 131_072


@dataclass(frozen=True)
class Variant:
    """A call to a public function: the file in triton/, which call, architecture, dtype, rows, head width, and for tree
    attention the choice (None: the table's)."""

    file: str
    what: str = ""
    arch: int = 90
    dtype: str = "bf16"
    rows: int = 64
    width: int = 128
    choice: tuning.Choice | None = None


def call(v: Variant, module: ModuleType) -> None:
    """Call the public functions of the variant's file, on tensors without storage."""
    dtype, int64, int32 = DTYPES[v.dtype], torch.int64, torch.int32

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    one, nodes, kv = empty(1, dtype=int64), empty(1, v.rows, dtype=int64), empty(1, CAPACITY, KV, v.width)
    q, depth = empty(1, v.rows, HEADS, v.width), empty(1, v.rows, dtype=int32)
    window, memory = 4096 if "window" in v.what else None, SHARED_MEMORY[v.arch]
    vars(module)["_device"] = lambda _: (PROCESSORS, module.stages(memory) if v.file == "linear" else memory)
    if v.what == "cross":
        module.cross_attention(q, kv, kv, one)
    elif v.file == "tree_attention":
        bits = empty(1, v.rows, 2, dtype=int64) if "tree" in v.what else None
        module.tree_attention(q, kv, kv, one, bits, depth, window, None, v.choice)
    elif v.file == "exact_attention":
        path = empty(1, v.rows, v.rows, dtype=int32) if "tree" in v.what else None
        module.tree_attention(q, kv, kv, one, path, depth, window)
    elif v.file == "linear":
        if v.what == "experts":
            module.grouped_linear(empty(v.rows, 4096), empty(128, 4096, 4096), empty(128, dtype=torch.int32))
        else:
            module.linear(empty(v.rows, 4096), empty(4096, 4096), empty(4096))
    elif v.file == "choice":
        module.gumbel_noise(one, nodes, VOCAB)
        module.choose(empty(1, v.rows, VOCAB), one, nodes, empty(1, dtype=torch.float32))
        module.top_p_border(*(empty(1, *shape, dtype=torch.float32) for shape in ((v.rows, VOCAB), (1, 1))))
    elif v.file == "rotate":
        qkv = empty(1, v.rows, HEADS + 2 * KV, v.width)
        tables = empty(1, v.rows, 1, 1, v.width // 2), empty(1, v.rows, 1, 2, v.width // 2)
        norms = module.HeadNorms(empty(v.width), empty(v.width), HEADS, 1e-6)
        module.rotate(qkv[:, :, :-KV], *tables)
        module.rotate(qkv, *tables, norms, (kv, kv, one))
    elif v.file in ("gated_delta", "delta_chunks"):
        heads = [empty(1, v.rows, HEADS, v.width, dtype=torch.float32) for _ in "qkv"]
        tokens = *heads, *(empty(1, v.rows, HEADS, dtype=torch.float32) for _ in range(2))
        memory, path = empty(1, HEADS, v.width, v.width, dtype=torch.float32), empty(1, v.rows, v.rows, dtype=int32)
        if v.file == "delta_chunks":
            module.chain(tokens, memory, empty(1 + v.rows, dtype=int64))
        else:
            module.tree_steps(tokens, memory, nodes, depth, path)
            module.advance_steps(tokens, memory, one)
    elif v.file == "delta_layer":
        channels, heads = 4 * HEADS * v.width, 2 * HEADS  # of the values
        weights = module.DeltaWeights(empty(channels, 4), empty(heads), empty(heads), HEADS, v.width)
        projected = empty(1, v.rows, channels + 2 * HEADS * v.width + 2 * heads)
        for recent in (None, empty(1, v.rows, 4, dtype=int64)):
            module.delta_tokens(projected, empty(1, 3, channels), recent, weights, slice(None))
        read, gate = empty(1, v.rows, heads, v.width, dtype=torch.float32), projected[..., channels : -2 * heads]
        module.gated_norm(read, gate, empty(v.width), 1e-6)
    elif v.file == "rank_sum":
        module.rank_sum(empty(8, 1, v.rows, 4096))
    else:
        labels, scales, before = (empty(512, dtype=kind) for kind in (int64, torch.float32, int32))
        for objective in (None, "kl", "overlap"):
            target = objective and TargetChunk(Distillation(kv, [], objective), empty(512, VOCAB), scales, scales)
            module.chunk_losses(empty(512, VOCAB), labels, scales, before, 5, True, target)


def variants() -> Iterator[Variant]:
    """Every kernel once, trees of several sizes on sm_90, the most demanding variants elsewhere, and all choices that
    tuning measures."""
    for dtype, width, rows in product(DTYPES, (64, 128, 256), (1, 8, 16, 64, 128)):
        if width == 128 or rows in (1, 64):
            yield Variant("tree_attention", "tree", 90, dtype, rows, width)
    yield Variant("tree_attention", "chain")
    yield Variant("tree_attention", "cross", rows=1)
    for arch, dtype, width in (
        (90, "bf16", 128), (90, "bf16", 256), (90, "fp32", 128), (80, "bf16", 128), (89, "fp32", 64),
        (89, "fp32", 128), (100, "bf16", 128), (120, "bf16", 128), (120, "bf16", 256), (120, "fp32", 256),
    ):  # fmt: skip
        yield Variant("tree_attention", "tree, window", arch, dtype, 64, width)
    for arch, width in ((80, 128), (90, 64), (90, 128), (120, 128)):
        shape = tuning.shape_of(torch.bfloat16, 1, 128, HEADS, KV, width, CAPACITY, 4096)
        for choice in tuning.variants(shape, SHARED_MEMORY[arch]):
            large = choice.queries * choice.keys >= 128 * 128
            if choice.programs == 1 and (large or (arch, width) == (90, 128)):
                yield Variant("tree_attention", "tree, window", arch, "bf16", 128, width, choice)
    for arch, width in ((80, 128), (89, 128), (89, 256), (90, 64), (90, 128), (90, 256), (100, 128), (120, 256)):
        yield Variant("exact_attention", "tree, window", arch, width=width)
    yield Variant("exact_attention", "tree")
    for arch, rows in ((80, 128), (89, 128), (90, 1), (90, 17), (90, 128), (100, 128), (120, 128)):
        yield Variant("linear", arch=arch, rows=rows)
    for arch in (80, 90, 120):
        yield Variant("linear", "experts", arch)
    for arch in (80, 89, 90, 100, 120):
        yield Variant("gated_delta", "tree", arch, "fp32")
        yield Variant("delta_chunks", "text", arch, "fp32", 1024)
        yield Variant("delta_layer", "tree", arch)
    for file in ("choice", "rotate", "linear_loss", "rank_sum"):
        yield Variant(file)


class Absent:
    """Stands in for a device's driver: answers what Triton asks before compiling."""

    arch = 90

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", Absent.arch, 32)

    def get_current_device(self) -> int:
        return Absent.arch  # Triton caches compiled kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_all(part: int, parts: int) -> list[dict[str, Any]]:
    """Call the public functions, which compile the kernels that they would launch. Return for each kernel its variant,
    name, warps, bytes of shared memory per program, registers and bytes of stack per thread, and the number of sm_90's
    products (HGMMA) and waits for them in its code. Of every `parts` variants one is compiled."""
    import triton
    from triton.runtime import driver

    assert os.environ.get("TRITON_INTERPRET") != "1", "Triton's interpreter compiles nothing"
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    function: Any = triton.JITFunction
    absent: Any = Absent()
    driver.set_active(absent)
    run, made, found = function.run, list[tuple[str, Any]](), dict[tuple[int, str], dict[str, Any]]()

    def compile_only(function, *args, grid, warmup, **options):
        made.append((function.__name__, run(function, *args, grid=grid, warmup=True, **options)))

    function.run = compile_only
    for variant in islice(variants(), part, None, parts):
        Absent.arch = variant.arch
        call(variant, import_module(f"longdraft.kernels.triton.{variant.file}"))
        for name, kernel in made:
            if (key := (variant.arch, kernel.hash)) not in found:
                usage = {"warps": kernel.metadata.num_warps, "shared_memory": kernel.metadata.shared}
                found[key] = {"variant": asdict(variant), "kernel": name, **usage, **read(tools, kernel.asm)}
        made.clear()
    return list(found.values())


def read(tools: Path, asm: Any) -> dict[str, int]:
    """Registers and bytes of stack per thread, products and waits, as Triton's cuobjdump and nvdisasm report them. Only
    code whose PTX has products of sm_90 (wgmma) is disassembled."""

    def told(tool: str, *options: str) -> str:
        return subprocess.run([tools / tool, *options, file], check=True, capture_output=True, text=True).stdout

    with TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(asm["cubin"])
        used = re.search(r"REG:(\d+) STACK:(\d+)", told("cuobjdump", "-res-usage"))
        code = told("nvdisasm") if "wgmma" in asm["ptx"] else ""
    assert used is not None, "cuobjdump reports no registers"
    counts = {"products": code.count("HGMMA."), "waits": code.count("WARPGROUP.DEPBAR")}
    return {"registers": int(used[1]), "stack": int(used[2]), **counts}


def exceeds(usage: dict[str, Any]) -> bool:
    """Whether a kernel uses more shared memory or stack than it may, or waits for each product before the next."""
    arch, file = usage["variant"]["arch"], usage["variant"]["file"]
    most_stack = 0 if arch == 90 and file == "tree_attention" else MOST_STACK
    serial = usage["waits"] > usage["products"] / 2
    return usage["shared_memory"] > SHARED_MEMORY[arch] or usage["stack"] > most_stack or serial


def main() -> int:
    found, parts = list[dict[str, Any]](), os.cpu_count() or 1
    with ProcessPoolExecutor(parts, mp_context=get_context("spawn")) as pool:
        for usages in pool.map(compile_all, range(parts), repeat(parts)):
            found += usages
            for usage in usages:
                print("EXCEEDS" if exceeds(usage) else "", json.dumps(usage), flush=True)
    print(json.dumps(found))
    return int(any(map(exceeds, found)))


if __name__ == "__main__":
    sys.exit(main())
