"""Reference of kernels/walk.py: a plain loop over slots, steps and nodes."""

import torch
from torch import Tensor


def walk(
    tokens_BN: Tensor, parents_BN: Tensor, choices_BN: Tensor, active_B: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `longdraft.kernels.walk.walk`."""
    rows, chosen, counts = [], [], []
    slots = zip(tokens_BN.tolist(), parents_BN.tolist(), choices_BN.tolist(), active_B.tolist(), strict=True)
    for tokens, parents, choices, active in slots:
        path = [0]
        while len(path) <= max_depth:
            wanted = path[-1], choices[path[-1]]
            child = next((n for n, pair in enumerate(zip(parents, tokens, strict=True)) if pair == wanted), None)
            if child is None:
                break
            path.append(child)
        counts.append(len(path) if active else 0)
        path += path[-1:] * (max_depth + 1 - len(path))
        rows.append(path)
        chosen.append([choices[node] for node in path])
    made = [torch.tensor(part, dtype=torch.int64, device=tokens_BN.device) for part in (rows, chosen, counts)]
    return made[0], made[1], made[2]
