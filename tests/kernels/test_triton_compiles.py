"""Every Triton kernel compiles for a GPU that is not there, which shows what the interpreter passes over: types, shapes
of blocks, what a program needs of fast memory. Its numbers are shown elsewhere, in the interpreter and on GPUs.

Started as a program, in a process without the interpreter: the public functions are called for a model like
Llama-3.1-8B with tensors that have no memory, and compile what they would launch.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import torch

IMPL = Path(__file__).parents[2] / "kernels" / "triton_impl"
HOPPER, FAST_MEMORY = 90, 227 * 1024  # bytes that one program may have there
LAYERS, ROWS, HEADS, KV, WIDTH, VOCAB, CAPACITY = 32, 64, 32, 8, 128, 128_256, 8192


def test_all_kernels_compile(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    found = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def calls() -> Iterator[tuple[str, Callable[[object], object]]]:
    """(File of triton_impl, a call of its public functions)."""
    words, flags, numbers = ({"dtype": dtype} for dtype in (torch.int64, torch.bool, torch.float32))
    kv = empty(1, CAPACITY, KV, WIDTH), empty(1, CAPACITY, KV, WIDTH)
    q, one, nodes = empty(1, ROWS, HEADS, WIDTH), empty(1, **words), empty(1, ROWS, **words)
    tree = empty(1, ROWS, 2, **words), empty(1, ROWS, dtype=torch.int32)
    yield "tree_attention", lambda m: m.tree_attention(q, *kv, one, *tree, True, 4096)
    yield "tree_attention", lambda m: m.cross_attention(q, *kv, one)
    yield "choice", lambda m: m.choose(empty(1, ROWS, VOCAB), one, nodes, empty(1, **numbers))
    yield "gumbel", lambda m: m.gumbel_noise(one, nodes, VOCAB)
    yield "walk", lambda m: m.walk(nodes, nodes, nodes, empty(1, **flags), 8)
    layers = [empty(LAYERS, 1, CAPACITY, KV, WIDTH) for _ in range(2)]
    yield "keep_rows", lambda m: m.keep_rows(*layers, one, empty(1, 9, **words), one)
    cache = [layer[:, 0] for layer in layers]
    picked = [empty(LAYERS, 1024, KV, WIDTH) for _ in range(2)]
    yield "selection", lambda m: m.key_scores(empty(LAYERS, HEADS, WIDTH), cache[0])
    yield "selection", lambda m: m.chunk_means(cache[0], 8, picked[0])
    yield "selection", lambda m: m.gather_rows(*cache, empty(LAYERS, 1024, KV, **words), *picked)
    loss = empty(512, VOCAB), empty(512, **words), empty(512, **numbers), empty(512, dtype=torch.int32)
    yield "linear_cross_entropy", lambda m: m.chunk_losses(*loss, -100, 5, True)
    rows, keys = empty(CAPACITY, HEADS, WIDTH), empty(CAPACITY, KV, WIDTH)
    segments = empty(3, 4, dtype=torch.int32), empty(4, dtype=torch.int32), 4096
    lse = empty(HEADS, CAPACITY, **numbers)
    yield "segment_attention", lambda m: m.query_gradient(rows, keys, keys, rows, lse, rows, *segments, 513)


class Absent:
    """What Triton asks of a device's driver before it compiles."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", HOPPER, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_all() -> None:
    import triton
    from triton.runtime import driver

    driver.set_active(Absent())
    run, compiled = triton.JITFunction.run, []

    def compile_only(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        print(f"{self.__name__}: {kernel.metadata.shared} bytes of fast memory", flush=True)
        assert kernel.metadata.shared <= FAST_MEMORY
        compiled.append(self)

    triton.JITFunction.run = compile_only
    files = {path.stem: import_module(f"longdraft.kernels.triton_impl.{path.stem}") for path in IMPL.glob("*.py")}
    for file, call in calls():
        call(files[file])
    ours = {x for file in files.values() for x in vars(file).values() if isinstance(x, triton.JITFunction)}
    called = {x for x in ours if any(re.search(rf"\b{x.__name__}\(", other.src) for other in ours - {x})}
    assert not (left := ours - called - set(compiled)), f"no call here compiles {[x.__name__ for x in left]}"


if __name__ == "__main__":
    compile_all()
