"""The labels that drafts share."""

from itertools import pairwise

import pytest
import torch

from longdraft.train.methods.base import ahead


@pytest.mark.parametrize("distance", [1, 2, 4, 7, 20])
def test_labels_are_those_of_a_loop(distance):
    borders, tokens = [0, 7, 7, 8, 12, 20], torch.arange(20) * 7 % 31
    supervised = torch.rand(20, generator=torch.Generator().manual_seed(1)) < 0.7
    pairs = [
        (t, int(tokens[t + distance]))
        for start, stop in pairwise(borders)
        for t in range(start, stop - distance)
        if supervised[t + distance]
    ]
    part = ahead(tokens, supervised, borders, distance)
    assert list(zip(part.rows.tolist(), part.labels.tolist(), strict=True)) == pairs
