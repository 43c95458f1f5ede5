"""A GPU that is too small is refused before anything is loaded for it."""

from dataclasses import replace

import pytest
import torch

from longdraft.models.hf import read_target_config
from longdraft.train import opening
from longdraft.train.config import load_config
from longdraft.train.memory import estimate

GPU = torch.device("cuda:1")


@pytest.fixture
def opened(alone, config_file, monkeypatch, capsys):
    """(free bytes) -> what is printed where a target is opened on a GPU that has so many; all asked of one device."""
    config = load_config(config_file)
    loaded = []
    monkeypatch.setattr(opening, "load_target", lambda *given: loaded.append(given))

    def open_on(free: int) -> str:
        def free_on(device):
            assert device == GPU
            return free

        monkeypatch.setattr(opening, "free_bytes", free_on)
        loaded.clear()
        opening.open_target(config, replace(alone, device=GPU))
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
        "train.device: cuda:1 has 0.00 GiB free, and training keeps 0.00 GiB there (target's weights "
    )
    assert said.endswith("target.zero_stage=3, train.zero_stage=3 or train.offload_optimizer=true")
    assert open_on(kept).startswith(
        f"The {moment} is estimated at {peak / 2**30:.2f} GiB in all, and cuda:1 has 0.00 GiB"
    )
    assert open_on(peak) == ""
