"""The frozen linear layers of a pass: ours, in which a row's bits do not depend on the other rows, beside PyTorch's.

A few rows read the whole weight, so the ceiling is the speed of a copy. Shapes: M rows, I inputs, N outputs, D hidden
width, V vocabulary.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from longdraft.benchmarks.kernels.race import OURS, PROFILES, Bench, Build, Run, Work, race
from longdraft.kernels.linear import linear


@dataclass
class Case:
    """The inputs, and plain PyTorch's product in fp32 and in the inputs' dtype."""

    x_MI: Tensor
    weight_NI: Tensor
    exact: Tensor
    plain: Tensor


def make_case(bench: Bench, n_rows: int, n_outputs: int, n_inputs: int) -> Case:
    """Random rows and a random weight, whose products are about 1."""
    place = {"generator": torch.Generator(bench.device).manual_seed(n_rows), "device": bench.device}
    x_MI = torch.randn(n_rows, n_inputs, dtype=bench.dtype, **place)
    weight_NI = torch.randn(n_outputs, n_inputs, dtype=bench.dtype, **place).mul_(n_inputs**-0.5)
    return Case(x_MI, weight_NI, F.linear(x_MI.float(), weight_NI.float()), F.linear(x_MI, weight_NI))


def _ours(case: Case) -> Run:
    def run() -> Tensor:
        with patch.dict(os.environ, LONGDRAFT_EXACT="1"):
            return linear(case.x_MI, case.weight_NI)

    return _recorded(run, case.x_MI.device)


def _plain(case: Case) -> Run:
    return _recorded(lambda: F.linear(case.x_MI, case.weight_NI), case.x_MI.device)


def _recorded(run: Run, device: torch.device) -> Run:
    """On CUDA, the replay of a CUDA graph, as in decoding: separate launches would take longer than the product."""
    if device.type != "cuda":
        return run
    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


IMPLEMENTATIONS: dict[str, Build] = {OURS: _ours, "PyTorch": _plain}


@torch.no_grad()
def measure(
    bench: Bench, profile: str, nodes: Sequence[int], builds: Mapping[str, Build] = IMPLEMENTATIONS
) -> list[dict]:
    """Return one row for each implementation, number of rows and layer (output projection [D, D], LM head)."""
    config, rows = PROFILES[profile], list[dict]()
    width = config.hidden_size
    for n_outputs in (width, config.vocab_size):
        for n_rows in nodes:
            shape = {"benchmark": "linear", "profile": profile, "outputs": n_outputs, "nodes": n_rows}
            n_bytes = (n_outputs * width + n_rows * (width + n_outputs)) * bench.dtype.itemsize
            cases = [make_case(bench, n_rows, n_outputs, width)]
            rows += race(bench, shape, builds, cases, Work(n_bytes, 2 * n_rows * n_outputs * width))
    return rows
