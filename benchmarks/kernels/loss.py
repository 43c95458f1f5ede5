"""The training loss of several heads on one frozen LM head, forward and backward: ours, Liger's, plain PyTorch's.

Ours takes all heads in one call; Liger and PyTorch take them one by one, as they are designed to. Peak memory does not
count the inputs (hidden states, weight, labels), but counts the gradients of the hidden states.
Shapes: P heads, M rows of a head, D hidden width, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from longdraft.benchmarks.kernels.candidates import OURS, Build, Run, Unavailable, race, too_far
from longdraft.benchmarks.kernels.profiles import Profile
from longdraft.benchmarks.kernels.timing import Bench
from longdraft.kernels.linear import emulates_bf16
from longdraft.kernels.linear_cross_entropy import linear_cross_entropy

HEADS = 3
SMALL_ROWS = 129  # of the case that is compared
IGNORED = -100


@dataclass
class Case:
    """The inputs. `exact` and `plain` are (losses [P], gradients [P, M, D]) of plain PyTorch in fp32 and in the inputs'
    dtype; None if nothing is compared."""

    hiddens: list[Tensor]
    weight_VD: Tensor
    labels: list[Tensor]
    exact: tuple[Tensor, Tensor] | None = None
    plain: tuple[Tensor, Tensor] | None = None

    def leaves(self) -> list[Tensor]:
        """The hidden states as new leaf tensors that receive a gradient."""
        return [hidden.detach().requires_grad_() for hidden in self.hiddens]


def make_case(bench: Bench, profile: Profile, n_rows: int, compared: bool) -> Case:
    """Random hidden states and labels; one label in eight is ignored."""
    generator = torch.Generator(bench.device).manual_seed(n_rows)
    place = {"generator": generator, "device": bench.device}
    hiddens = [torch.randn(n_rows, profile.hidden_size, dtype=bench.dtype, **place) for _ in range(HEADS)]
    weight = torch.randn(profile.vocab_size, profile.hidden_size, dtype=bench.dtype, **place)
    weight.mul_(profile.hidden_size**-0.5)
    labels = [torch.randint(profile.vocab_size, (n_rows,), **place) for _ in range(HEADS)]
    for labels_M in labels:
        labels_M[::8] = IGNORED
    case = Case(hiddens, weight, labels)
    if compared:
        wide = Case([hidden.float() for hidden in hiddens], weight.float(), labels)
        case.exact, case.plain = _plain(wide)(), _plain(case)()
    return case


def _collect(losses: list[Tensor], leaves: list[Tensor]) -> tuple[Tensor, Tensor]:
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    return torch.stack([loss.detach().float() for loss in losses]), torch.stack(gradients)


def _plain(case: Case) -> Run:
    def run() -> tuple[Tensor, Tensor]:
        leaves, losses = case.leaves(), []
        for leaf, labels_M in zip(leaves, case.labels, strict=True):
            logits_MV = (leaf @ case.weight_VD.T).float()
            losses.append(F.cross_entropy(logits_MV, labels_M, ignore_index=IGNORED, reduction="sum"))
            losses[-1].backward()
        return _collect(losses, leaves)

    return run


def _ours(case: Case) -> Run:
    def run() -> tuple[Tensor, Tensor]:
        leaves = case.leaves()
        found = linear_cross_entropy(leaves, case.weight_VD, case.labels, ignore_index=IGNORED)
        found.loss_sums.sum().backward()
        return _collect(list(found.loss_sums), leaves)

    return run


def _liger(case: Case) -> Run:
    if not case.weight_VD.is_cuda:
        raise Unavailable("Liger's kernel needs a CUDA device; Triton's interpreter on a CPU is for tests alone")
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as liger
    except ImportError:
        raise Unavailable("liger-kernel is not installed") from None

    def run() -> tuple[Tensor, Tensor]:
        leaves, losses = case.leaves(), []
        for leaf, labels_M in zip(leaves, case.labels, strict=True):
            # (bias, class weights, ignore_index, z-loss, smoothing, reduction); the first result is the loss.
            losses.append(liger.apply(leaf, case.weight_VD, labels_M, None, None, IGNORED, 0.0, 0.0, "sum")[0])
            losses[-1].backward()
        return _collect(losses, leaves)

    return run


IMPLEMENTATIONS: dict[str, Build] = {OURS: _ours, "Liger, head by head": _liger, "PyTorch, head by head": _plain}


def verdict(_: str, case: Any, found: tuple[Tensor, Tensor]) -> str | None:
    """Allow twice plain PyTorch's error for losses, three times for gradients."""
    loss = too_far(found[0], case.exact[0], case.plain[0])
    gradient = too_far(found[1], case.exact[1], case.plain[1], times=3, largest=False)
    return f"loss: {loss}" if loss else gradient and f"gradient: {gradient}"


def measure(bench: Bench, profile: Profile, n_rows: int, builds: Mapping[str, Build] = IMPLEMENTATIONS) -> list[dict]:
    """Return a row for each implementation, with its peak memory. A CPU that emulates bf16 is measured in fp32, because
    one would train in that."""
    if bench.device.type == "cpu" and emulates_bf16():
        bench = replace(bench, dtype=torch.float32)
    dtype = str(bench.dtype).removeprefix("torch.")
    shape = {"benchmark": "loss", "profile": profile.name, "rows": n_rows, "heads": HEADS, "dtype": dtype}
    work = profile.loss_work(n_rows, HEADS, bench.dtype.itemsize)

    def cases() -> list[Case]:
        small = make_case(bench, profile, min(SMALL_ROWS, n_rows), True)
        return [small, make_case(bench, profile, n_rows, False)]

    return race(bench, shape, builds, cases, verdict, work, memory=True)
