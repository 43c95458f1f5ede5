"""A GPU that is too small is refused before anything is loaded for it."""

import socket
from dataclasses import replace

import pytest
import torch

from longdraft.models.hf import LOADERS, read_target_config
from longdraft.train import ranks, setup
from longdraft.train.config_file import load_config
from longdraft.train.memory import estimate

GPU = torch.device("cuda:1")
PLACE = f"cuda:1 of {socket.gethostname()}"


@pytest.fixture
def opened(alone, config_file, monkeypatch, capsys):
    """(free bytes) -> what is printed where a target is opened on a GPU with that much memory free. Only that device
    may be asked."""
    config = load_config(config_file)
    loaded = []
    monkeypatch.setitem(LOADERS, "longdraft", lambda *given: loaded.append(given))

    def open_on(free: int) -> str:
        def free_on(device):
            assert device == GPU
            return free

        monkeypatch.setattr(setup, "free_bytes", free_on)
        loaded.clear()
        setup.open_target(config, replace(alone, device=GPU))
        assert len(loaded) == 1
        return capsys.readouterr().out

    target = read_target_config(config.target.path, config.target.gguf_file)
    return open_on, estimate(config, target, 1, gpu=True), loaded


def test_what_is_kept_must_fit_and_a_tight_peak_is_said(opened):
    open_on, needed, loaded = opened
    kept, (moment, peak) = sum(needed.kept.values()), needed.peak
    with pytest.raises(ValueError) as refused:
        open_on(kept - 1)
    assert loaded == []
    said = str(refused.value)
    assert said.startswith(
        f"train.device: {PLACE} has 0.00 GiB free, and training keeps 0.00 GiB there (target's weights "
    )
    assert said.endswith("target.zero_stage=3, train.zero_stage=3 or train.offload_optimizer=true")
    assert open_on(kept).startswith(
        f"The {moment} is estimated at {peak / 2**30:.2f} GiB in all, and {PLACE} has 0.00 GiB"
    )
    assert open_on(peak - needed.process) == ""


@pytest.mark.parametrize("local_rank", [0, 1])
def test_a_gpu_that_fails_alone_is_named_by_its_rank(monkeypatch, capsys, local_rank):
    """The first rank of a machine prints its own error in any case."""
    given = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": str(local_rank), "LOCAL_SIZE": "2", "OMP_NUM_THREADS": "1"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)

    def start(device, name):
        raise ValueError(f"{name}: CUDA does not start on {device}: all devices are busy")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(ranks, "start", start)
    with pytest.raises(ValueError, match="does not start on cuda:"):
        ranks.join_ranks()
    said = f"rank 5 on {socket.gethostname()}: train.device: CUDA does not start on cuda:1: all devices are busy\n"
    assert capsys.readouterr().out == (said if local_rank else "")
