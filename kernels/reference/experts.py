"""Reference of kernels/experts.py: every expert on every token, of which the chosen ones count."""

import torch
from torch import Tensor

from longdraft.kernels.reference.gate import gate


def experts(
    x_BTD: Tensor, router_ED: Tensor, gate_up_EXD: Tensor, down_EDF: Tensor, n_chosen: int, normalised: bool
) -> Tensor:
    """See kernels/experts.py."""
    rows_MD = x_BTD.flatten(0, 1)
    shares_ME = torch.zeros(len(rows_MD), len(router_ED), dtype=torch.float32)
    for shares_E, logits_E in zip(shares_ME, rows_MD @ router_ED.T, strict=True):
        probabilities = logits_E.float().softmax(0).tolist()
        chosen = sorted(range(len(probabilities)), key=lambda e: (-probabilities[e], e))[:n_chosen]
        total = sum(probabilities[e] for e in chosen) if normalised else 1.0
        for e in chosen:
            shares_E[e] = probabilities[e] / total
    outputs_EMD = gate(rows_MD @ gate_up_EXD.mT) @ down_EDF.mT
    return torch.einsum("me,emd->md", shares_ME.to(x_BTD.dtype), outputs_EMD).view_as(x_BTD)
