"""The training loss of several heads on one frozen LM head, forward and backward: ours, Liger's, plain PyTorch's.

Cross-entropy of labels, and KL to the target's distribution, without Liger. Ours takes all heads in one call; Liger and
PyTorch take them one by one, as they are designed to. Peak memory does not count the inputs (hidden states, weight,
labels), but counts the gradients of the hidden states.
Shapes: P heads, M rows of a head, D hidden width, V vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from longdraft.benchmarks.kernels.race import OURS, PROFILES, Bench, Build, Profile, Run, Work, check_error, race
from longdraft.kernels import backend
from longdraft.kernels.distillation import Distillation
from longdraft.kernels.linear_loss import IGNORED, LossPart, linear_loss

HEADS, CROSS_ENTROPY = 3, "cross-entropy"
SMALL_ROWS = 129  # of the checked case, whose reference holds all logits in fp32
Found = tuple[Tensor, Tensor]  # losses [P], gradients [P, M, D]


@dataclass
class Case:
    """The inputs; `states_MD`: the target's, None in cross-entropy. `exact` and `plain`: results of plain PyTorch in
    fp32 and in the inputs' dtype; None: not checked."""

    hiddens: list[Tensor]
    weight_VD: Tensor
    labels: list[Tensor]
    states_MD: Tensor | None
    exact: Found | None = None
    plain: Found | None = None


def make_case(bench: Bench, profile: str, n_rows: int, objective: str, compared: bool) -> Case:
    """Random hidden states and labels; one label in eight is ignored."""
    config = PROFILES[profile]
    place = {"generator": torch.Generator(bench.device).manual_seed(n_rows), "device": bench.device}
    *hiddens, states = (torch.randn(n_rows, config.hidden_size, dtype=bench.dtype, **place) for _ in range(HEADS + 1))
    weight = torch.randn(config.vocab_size, config.hidden_size, dtype=bench.dtype, **place)
    weight.mul_(config.hidden_size**-0.5)
    labels = [torch.randint(config.vocab_size, (n_rows,), **place) for _ in range(HEADS)]
    for labels_M in labels:
        labels_M[::8] = IGNORED
    case = Case(hiddens, weight, labels, None if objective == CROSS_ENTROPY else states)
    if compared:
        wide = [x.float() for x in hiddens], weight.float(), labels, None if case.states_MD is None else states.float()
        wide = Case(*wide)
        case.exact, case.plain = _plain(wide)(), _plain(case)()
    return case


def _backward(case: Case, loss_sums: Callable[[list[Tensor]], Tensor]) -> Found:
    """Losses and gradients of new leaves. loss_sums: hidden states -> losses [P]."""
    leaves = [hidden.detach().requires_grad_() for hidden in case.hiddens]
    losses = loss_sums(leaves)
    if losses.requires_grad:
        losses.sum().backward()
    return losses.detach().float(), torch.stack([leaf.grad for leaf in leaves if leaf.grad is not None])


def _ours(case: Case) -> Run:
    parts = [LossPart(torch.arange(len(x), device=x.device), x) for x in case.labels]
    rows, states = [part.rows for part in parts], case.states_MD
    distillation = None if states is None else Distillation(states, rows, "kl")

    def loss_sums(leaves: list[Tensor]) -> Tensor:
        return linear_loss(leaves, case.weight_VD, parts, distillation=distillation).sums

    return lambda: _backward(case, loss_sums)


def _without_triton(case: Case) -> Run:
    ours = _ours(case)

    def run() -> Found:
        with patch.object(backend, "triton_kernels", lambda *_: None):
            return ours()

    return run


def _head_by_head(case: Case, loss: Callable[[Tensor, Tensor], Tensor]) -> Run:
    """Run each head's backward right after its loss, so that only one head's logits are alive at a time."""

    def loss_sums(leaves: list[Tensor]) -> Tensor:
        losses = []
        for leaf, labels_M in zip(leaves, case.labels, strict=True):
            losses.append(loss(leaf, labels_M))
            losses[-1].backward()
        return torch.stack([one.detach() for one in losses])

    return lambda: _backward(case, loss_sums)


def _plain(case: Case) -> Run:
    def loss(leaf: Tensor, labels_M: Tensor) -> Tensor:
        logits_MV = (leaf @ case.weight_VD.T).float()
        if case.states_MD is None:
            return F.cross_entropy(logits_MV, labels_M, ignore_index=IGNORED, reduction="sum")
        target_MV = (case.states_MD @ case.weight_VD.T).float().log_softmax(1)
        divergence_MV = F.kl_div(logits_MV.log_softmax(1), target_MV, reduction="none", log_target=True)
        return (divergence_MV.sum(1) * (labels_M != IGNORED)).sum()

    return _head_by_head(case, loss)


def _liger(case: Case) -> Run:
    if not case.weight_VD.is_cuda:
        raise RuntimeError("Liger's kernel needs a CUDA device")
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as liger

    def loss(leaf: Tensor, labels_M: Tensor) -> Tensor:
        # (bias, class weights, ignore_index, z-loss, smoothing, reduction); the first result is the loss.
        return liger.apply(leaf, case.weight_VD, labels_M, None, None, IGNORED, 0.0, 0.0, "sum")[0]

    return _head_by_head(case, loss)


PLAIN = "PyTorch, head by head"
IMPLEMENTATIONS: dict[str, dict[str, Build]] = {
    CROSS_ENTROPY: {OURS: _ours, "Liger, head by head": _liger, PLAIN: _plain},
    "kl": {OURS: _ours, "longdraft, without Triton": _without_triton, PLAIN: _plain},
}


def check(_: str, case: Any, found: Found) -> None:
    """Allow twice plain PyTorch's error for losses, three times for gradients."""
    check_error(found[0], case.exact[0], case.plain[0])
    check_error(found[1], case.exact[1], case.plain[1], times=3, largest=False)


def measure(
    bench: Bench, profile: str, n_rows: int, objective: str = CROSS_ENTROPY, builds: Mapping[str, Build] | None = None
) -> list[dict]:
    """Return one row for each implementation (`builds`, or those of the objective), with its peak memory."""
    shape = {"benchmark": "loss", "profile": profile, "rows": n_rows, "heads": HEADS, "objective": objective}
    of_target = 0 if objective == CROSS_ENTROPY else n_rows
    work = loss_work(PROFILES[profile], n_rows, HEADS, bench.dtype.itemsize, of_target)
    rows = (min(SMALL_ROWS, n_rows), True), (n_rows, False)
    cases = [make_case(bench, profile, n, objective, compared) for n, compared in rows]
    return race(bench, shape, builds or IMPLEMENTATIONS[objective], cases, work, check, memory=True)


def loss_work(profile: Profile, rows: int, heads: int, itemsize: int, of_target: int = 0) -> Work:
    """The work of loss and hidden gradients of `heads` heads on one LM head: a product each for logits and gradients,
    and one for the target's logits of `of_target` rows, which the heads share. The LM head and hidden states are read
    once, gradients are written."""
    head = profile.vocab_size * profile.hidden_size
    moved = head + (2 * heads * rows + of_target) * profile.hidden_size
    return Work(moved * itemsize, 2 * (2 * heads * rows + of_target) * head)
