"""The cache's methods on plain numbers: which row lands where, for slots of unequal lengths."""

import pytest
import torch
from torch import Tensor

from longdraft.kernels.cpu import rows
from longdraft.models.kv_cache import KVCache

LAYERS, SLOTS, CAPACITY = 2, 3, 12


@pytest.fixture(params=["c", "reference"])
def cache(request, monkeypatch) -> KVCache:
    """Both ways on a CPU; a GPU's is tests/kernels/test_rotate.py's."""
    monkeypatch.setattr(rows, "serves", lambda dtype: request.param == "c")
    made = KVCache(LAYERS, SLOTS, CAPACITY, 1, 2, torch.float32)
    made.keys.fill_(float("nan")), made.values.fill_(float("nan"))
    return made


def write(cache: KVCache, numbers_BT: Tensor) -> None:
    """Write a pass whose keys are these numbers plus 100 per layer, unrotated, and whose values are their negatives."""
    cos, sin = torch.ones(*numbers_BT.shape, 1, 1, 1), torch.zeros(*numbers_BT.shape, 1, 2, 1)
    for layer in range(LAYERS):
        keys_BT12 = (numbers_BT + 100.0 * layer)[:, :, None, None].expand(-1, -1, 1, 2)
        cache.append(layer, torch.cat([torch.zeros_like(keys_BT12), keys_BT12, -keys_BT12], 2), cos, sin)


def held(cache: KVCache) -> list[list[float]]:
    """The committed keys of layer 0 by slot, after a check that the other layer and the values agree."""
    committed = []
    for slot, length in enumerate(cache.lengths.tolist()):
        keys = cache.keys[:, slot, :length, 0, 0]
        assert torch.equal(keys[1], keys[0] + 100) and torch.equal(cache.values[:, slot, :length, 0, 1], -keys)
        committed.append(keys[0].tolist())
    return committed


def test_append_commits_nothing_and_keep_commits_in_order(cache):
    write(cache, torch.arange(12).view(3, 4))
    assert held(cache) == [[], [], []]
    cache.commit(None, torch.tensor([4, 0, 2]))
    assert held(cache) == [[0, 1, 2, 3], [], [8, 9]]
    write(cache, torch.arange(20, 35).view(3, 5))
    rows = torch.tensor([[0, 2, 4], [1, 0, 0], [3, -1, 99]])  # anything may be after the counts
    cache.commit(rows, torch.tensor([3, 1, 0]))
    assert held(cache) == [[0, 1, 2, 3, 20, 22, 24], [26], [8, 9]]
    assert cache.keys.isnan().any(), "rows nobody wrote stay as they were"


def test_rewind_and_reset(cache):
    write(cache, torch.arange(12).view(3, 4))
    cache.commit(torch.arange(4).expand(3, 4), torch.tensor([4, 4, 4]))
    address = cache.lengths.data_ptr()
    cache.rewind(torch.tensor([1, 4, 0]))
    assert held(cache) == [[0], [4, 5, 6, 7], []]
    cache.reset([1], prompt_lengths=[9])
    assert held(cache) == [[0], [], []] and cache.prompt_lengths.tolist() == [0, 9, 0]
    cache.reset(prompt_lengths=torch.tensor([1, 2, 3]))
    assert held(cache) == [[], [], []] and cache.prompt_lengths.tolist() == [1, 2, 3]
    assert cache.lengths.data_ptr() == address


def test_slot_shares_everything(cache):
    write(cache, torch.arange(12).view(3, 4))
    cache.commit(None, torch.tensor([4, 4, 4]))
    one = cache.slot(1)
    one.reset(prompt_lengths=[2])
    write(one, torch.tensor([[50, 51]]))
    one.commit(None, torch.tensor([2]))
    assert held(cache) == [[0, 1, 2, 3], [50, 51], [8, 9, 10, 11]]
    assert cache.prompt_lengths.tolist() == [0, 2, 0] and (one.batch, one.capacity) == (1, CAPACITY)


def test_too_small_a_cache_says_what_it_needs():
    cache = KVCache(LAYERS, 1, 4, 1, 2, torch.float32)
    with pytest.raises(AssertionError, match="capacity of at least 5, the cache has 4"):
        write(cache, torch.zeros(1, 5))
