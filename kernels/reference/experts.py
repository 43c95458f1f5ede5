"""Reference of kernels/experts.py: every expert computes every token, and the chosen ones count."""

import torch
from torch import Tensor

from longdraft.kernels.experts import ExpertWeights
from longdraft.kernels.reference.gate import clamped_gate, gate


def experts(x_BTD: Tensor, weights: ExpertWeights, n_chosen: int, normalised: bool) -> Tensor:
    """See `longdraft.kernels.experts.experts`."""
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
    gated_EMF = gate(gate_up_EMX) if clamped is None else clamped_gate(gate_up_EMX, *clamped)
    outputs_EMD = gated_EMF @ down_EDF.mT + down_bias_ED[:, None]
    return torch.einsum("me,emd->md", shares_ME.to(x_BTD.dtype), outputs_EMD).view_as(x_BTD)
