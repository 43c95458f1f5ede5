"""A mixture of experts as feed-forward (Mixtral, arXiv 2401.04088; Qwen3, 2505.09388; gpt-oss, 2508.10925).

Shapes: B slots, T tokens, M = B * T, D hidden width, E experts, K of them per token, N = M * K, F an expert's width,
X = 2 F.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from longdraft.kernels.backend import exact_kernels, is_host
from longdraft.kernels.cpu.rows import MOST_ATTENTION_ROWS
from longdraft.kernels.gate import clamped_gate, clamped_gate_reference, gate, gate_reference
from longdraft.kernels.linear import linear
from longdraft.kernels.tree import MOST_ROWS


class ExpertWeights(NamedTuple):
    """Weights of a router and E experts, where an expert is down(gate(gate_up(x))).

    The first F rows of an expert's gate_up are the gate's. Either all biases are given or none.
    clamped: slope and limit of `clamped_gate`; None if the gate is SwiGLU's.
    """

    router_ED: Tensor
    gate_up_EXD: Tensor
    down_EDF: Tensor
    router_bias_E: Tensor | None = None
    gate_up_bias_EX: Tensor | None = None
    down_bias_ED: Tensor | None = None
    clamped: tuple[float, float] | None = None


def experts(x_BTD: Tensor, weights: ExpertWeights, n_chosen: int, normalised: bool) -> Tensor:
    """The sum of each token's experts, weighted with their probabilities: [B, T, D] in x's dtype. No gradient.

    Probabilities are the softmax of the router's product in fp32; of equal ones the lower index comes first. The sum is
    taken in fp32 in the order of the probabilities, and rounded once.

    On a GPU the tokens of all experts go through two grouped products of PyTorch, and nothing is read on the host; with
    LONGDRAFT_EXACT=1, in passes of up to 128 tokens in half precision, through those of triton/linear.py, whose result
    for a token does not depend on the others. (Liger's fused experts wait for the host in every call, and know neither
    biases nor gates other than SwiGLU's.) On a CPU each expert that has tokens is two calls of `linear`, whose result
    for a token does not depend on the others.

    Args:
        x_BTD: hidden states in the weights' dtype.
        n_chosen: K.
        normalised: divide the K probabilities by their sum.
    """
    chosen_MK, shares_MK = choose_experts(x_BTD, weights, n_chosen, normalised)
    if not is_host(x_BTD.device):
        triton = exact_kernels("linear", x_BTD) if x_BTD.shape[1] <= MOST_ROWS else None
        multiply = _grouped if triton is None else triton.grouped_linear
        return grouped(x_BTD.flatten(0, 1), chosen_MK, shares_MK, weights, multiply).view_as(x_BTD)
    return _on_host(x_BTD, chosen_MK, shares_MK, weights).view_as(x_BTD)


def choose_experts(x_BTD: Tensor, weights: ExpertWeights, n_chosen: int, normalised: bool) -> tuple[Tensor, Tensor]:
    """The K likeliest experts of each token, int64 [M, K], and their weights in the sum, fp32 [M, K].

    The arguments are those of `experts`.
    """
    logits_ME = linear(x_BTD, weights.router_ED, weights.router_bias_E).flatten(0, 1)
    ordered = logits_ME.float().softmax(-1).sort(dim=-1, descending=True, stable=True)  # `topk` does not order ties
    shares_MK, chosen_MK = ordered.values[:, :n_chosen], ordered.indices[:, :n_chosen]
    return chosen_MK, shares_MK / shares_MK.sum(-1, keepdim=True) if normalised else shares_MK


def _grouped(rows_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """PyTorch's grouped product. Where PyTorch has no kernel, it loops over the experts, which waits for the host
    (`waits_for_host`)."""
    return F.grouped_mm(rows_NI, weight_EOI.mT, offs=ends_E)


def grouped(
    rows_MD: Tensor,
    chosen_MK: Tensor,
    shares_MK: Tensor,
    weights: ExpertWeights,
    multiply: Callable[[Tensor, Tensor, Tensor], Tensor] = _grouped,
) -> Tensor:
    """[M, D] by two grouped products.

    multiply: the product [N, O] of rows [N, I], those of the first expert first, with their experts' weights
    [E, O, I]; the third argument is int32 [E], where each expert's rows end.
    """
    order_N = chosen_MK.flatten().sort(stable=True).indices
    expert_N = chosen_MK.flatten()[order_N]
    sizes_E = torch.zeros(len(weights.down_EDF), dtype=torch.int32, device=rows_MD.device)
    sizes_E.scatter_add_(0, chosen_MK.flatten(), torch.ones_like(chosen_MK, dtype=torch.int32).flatten())
    ends_E = sizes_E.cumsum(0, dtype=torch.int32)
    rows_ND = rows_MD[order_N // chosen_MK.shape[1]]
    gate_up_NX = multiply(rows_ND, weights.gate_up_EXD, ends_E)
    del rows_ND  # N rows are large: each of these tensors is freed as soon as it is not needed
    if weights.gate_up_bias_EX is not None:
        gate_up_NX += weights.gate_up_bias_EX[expert_N]
    gated_NF = _gate(gate_up_NX, weights)
    del gate_up_NX
    sorted_ND = multiply(gated_NF, weights.down_EDF, ends_E)
    del gated_NF
    if weights.down_bias_ED is not None:
        sorted_ND += weights.down_bias_ED[expert_N]
    outputs_ND = torch.empty_like(sorted_ND).index_copy_(0, order_N, sorted_ND)
    del sorted_ND
    return _add_up(outputs_ND, shares_MK)


def waits_for_host(weight: Tensor) -> bool:
    """Whether a GPU's pass over experts with weights like this one waits for the host and so cannot be recorded.

    PyTorch has a kernel only for bf16 on Hopper and Blackwell.
    """
    if weight.dtype != torch.bfloat16:
        return True
    return weight.is_cuda and torch.cuda.get_device_capability(weight.device)[0] not in (9, 10)


def _on_host(x_BTD: Tensor, chosen_MK: Tensor, shares_MK: Tensor, weights: ExpertWeights) -> Tensor:
    """[M, D], one expert after the other. In passes of few tokens `linear` gets each token as a slot of its own, as in
    decoding."""
    rows_MD, n_chosen, silu = x_BTD.flatten(0, 1), chosen_MK.shape[1], weights.clamped is None
    alone = x_BTD.shape[1] <= MOST_ATTENTION_ROWS
    order_N = chosen_MK.flatten().sort(stable=True).indices
    sizes = torch.bincount(chosen_MK.flatten(), minlength=len(weights.down_EDF)).tolist()
    outputs_ND, start = rows_MD.new_empty(len(order_N), rows_MD.shape[1]), 0
    for expert, size in enumerate(sizes):
        if size == 0:
            continue
        places_S = order_N[start : start + size]
        rows = rows_MD[places_S // n_chosen].unsqueeze(1 if alone else 0)
        bias = None if weights.gate_up_bias_EX is None else weights.gate_up_bias_EX[expert]
        gated = linear(rows, weights.gate_up_EXD[expert], bias, gated=silu)
        gated = gated if silu else _gate(gated, weights)
        bias = None if weights.down_bias_ED is None else weights.down_bias_ED[expert]
        outputs_ND[places_S] = linear(gated, weights.down_EDF[expert], bias).flatten(0, 1)
        start += size
    return _add_up(outputs_ND, shares_MK)


def _gate(gate_up: Tensor, weights: ExpertWeights) -> Tensor:
    return gate(gate_up) if weights.clamped is None else clamped_gate(gate_up, *weights.clamped)


def _add_up(outputs_ND: Tensor, shares_MK: Tensor) -> Tensor:
    """[M, D]: the sum of each token's outputs times their shares, in the order of its experts."""
    outputs_MKD, sum_MD = outputs_ND.view(*shares_MK.shape, outputs_ND.shape[-1]), 0.0
    for outputs_MD, shares_M in zip(outputs_MKD.unbind(1), shares_MK.unbind(1), strict=True):
        sum_MD = sum_MD + outputs_MD.float() * shares_M[:, None]
    assert isinstance(sum_MD, Tensor)
    return sum_MD.to(outputs_ND.dtype)


def experts_reference(x_BTD: Tensor, weights: ExpertWeights, n_chosen: int, normalised: bool) -> Tensor:
    """`experts` with every expert run for every token."""
    rows_MD, (router_ED, gate_up_EXD, down_EDF, *biases, clamped) = x_BTD.flatten(0, 1), weights
    none = rows_MD.new_zeros(1, 1)
    router_bias_E, gate_up_bias_EX, down_bias_ED = (none if bias is None else bias for bias in biases)
    shares_ME = torch.zeros(len(rows_MD), len(router_ED), dtype=torch.float32)
    for shares_E, logits_E in zip(shares_ME, rows_MD @ router_ED.T + router_bias_E, strict=True):
        probabilities = logits_E.float().softmax(0).tolist()
        chosen = sorted(range(len(probabilities)), key=lambda e: (-probabilities[e], e))[:n_chosen]
        total = sum(probabilities[e] for e in chosen) if normalised else 1.0
        for e in chosen:
            shares_E[e] = probabilities[e] / total
    gate_up_EMX = rows_MD @ gate_up_EXD.mT + gate_up_bias_EX[:, None]
    gated_EMF = gate_reference(gate_up_EMX) if clamped is None else clamped_gate_reference(gate_up_EMX, *clamped)
    outputs_EMD = gated_EMF @ down_EDF.mT + down_bias_ED[:, None]
    return torch.einsum("me,emd->md", shares_ME.to(x_BTD.dtype), outputs_EMD).view_as(x_BTD)
