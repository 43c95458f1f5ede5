"""Every Triton kernel compiles for GPUs that are not there. That checks what the interpreter ignores: types, shapes of
blocks, and a program's shared memory, registers and stack. Its results are tested elsewhere, in the interpreter and on
GPUs. benchmarks/kernels/limits.py compiles in a process without the interpreter.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks/kernels/limits.py"

pytestmark = pytest.mark.nightly(of="kernels")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> list[dict]:
    """What each compiled kernel needs, by benchmarks/kernels/limits.py; all are within their limits."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("compiled"))
    ended = subprocess.run([sys.executable, PROGRAM], env=environment, capture_output=True, text=True)
    *table, last = ended.stdout.splitlines() or [""]
    assert ended.returncode in (0, 1) and last.startswith("["), ended.stdout + ended.stderr
    assert not (exceeding := [line for line in table if "EXCEEDS" in line]), "\n".join(exceeding)
    assert ended.returncode == 0
    return json.loads(last)


@pytest.mark.timeout(600)
def test_all_kernels_compile_within_the_limits_of_every_gpu(compiled):
    assert {kernel["variant"]["arch"] for kernel in compiled} == {80, 89, 90, 100, 120}
    trees = [kernel for kernel in compiled if kernel["kernel"] == "_runs" and kernel["variant"]["arch"] == 90]
    shapes = {(kernel["variant"]["dtype"], kernel["variant"]["width"]) for kernel in trees}
    assert shapes == {(dtype, width) for dtype in ("bf16", "fp32") for width in (64, 128, 256)}
    assert {kernel["variant"]["width"] for kernel in trees if kernel["products"]} == {64, 128, 256}
    assert not any(kernel["stack"] for kernel in trees)
