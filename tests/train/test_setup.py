"""A GPU that is too small is refused before anything is loaded for it."""

import socket
from dataclasses import replace

import pytest
import torch

from longdraft.models.hf import LOADERS, read_target_config
from longdraft.train import ranks, setup
from longdraft.train.config_file import load_config
from longdraft.train.estimate import memory

GPU = torch.device("cuda:1")
PLACE = f"cuda:1 of {socket.gethostname()}"


@pytest.fixture
def opened(alone, config_file, monkeypatch):
    """(free bytes) -> opens a target on a GPU with that much memory free. Only that device may be asked."""
    config = load_config(config_file)
    loaded = []
    monkeypatch.setitem(LOADERS, "longdraft", lambda *given: loaded.append(given))

    def open_on(free: int) -> None:
        def free_on(device):
            assert device == GPU
            return free

        monkeypatch.setattr(setup, "free_bytes", free_on)
        loaded.clear()
        setup.open_target(config, replace(alone, device=GPU))
        assert len(loaded) == 1

    target = read_target_config(config.target.path)
    return open_on, memory(config, target, 1, gpu=True), loaded


def test_what_is_kept_must_fit(opened):
    open_on, needed, loaded = opened
    kept = sum(needed.kept.values())
    with pytest.raises(ValueError) as refused:
        open_on(kept - 1)
    assert loaded == []
    assert str(refused.value).startswith(f"train.device: {PLACE} has ")
    open_on(kept)


def test_a_gpu_that_fails_alone_is_named_by_its_rank(monkeypatch):
    given = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "OMP_NUM_THREADS": "1"}
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)

    def start(device, name):
        raise ValueError(f"{name}: CUDA does not start on {device}: all devices are busy")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(ranks, "start", start)
    with pytest.raises(ranks.RankError, match=r"^rank 5 of 8 on .*train\.device: CUDA does not start on cuda:1: "):
        ranks.join_ranks()
