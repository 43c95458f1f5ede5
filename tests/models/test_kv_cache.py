"""A cache too small for a pass refuses it. What is written, kept and rewound is tested with the decoder and the
kernels."""

import pytest
import torch

from longdraft.models.kv_cache import KVCache


@pytest.mark.parametrize(("length", "n_rows"), [(0, 5), (3, 2), (4, 1)])
def test_too_small_a_cache_says_what_it_needs(length, n_rows):
    cache = KVCache(2, 1, 4, 1, 2, torch.float32)
    cache.commit(None, torch.tensor([length]))
    cos, sin = torch.ones(1, n_rows, 1, 1, 1), torch.zeros(1, n_rows, 1, 2, 1)
    with pytest.raises(AssertionError, match="capacity of at least 5, the cache has 4"):
        cache.append(0, torch.zeros(1, n_rows, 3, 2), cos, sin)
