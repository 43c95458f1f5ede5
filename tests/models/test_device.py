"""A GPU that PyTorch cannot use is refused. The places that are looked at are faked."""

from contextlib import contextmanager

import pytest
import torch

from longdraft.models import device
from longdraft.models.device import check_device, default_device, n_gpus, start

CPU = "give --device cpu"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """(CUDA_VISIBLE_DEVICES, number of GPUs): a machine whose GPUs PyTorch does not see."""

    def pretend(visible: str | None = None, n_nodes: int = 2) -> None:
        for name in ("nvidiactl", "nvidia-uvm", "null", *(f"nvidia{i}" for i in range(n_nodes))):
            (tmp_path / name).touch()
        monkeypatch.setattr(device, "NODES", tmp_path)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return pretend


@pytest.mark.parametrize("visible", [None, "7"])
def test_a_gpu_that_cannot_be_used_is_refused(machine, visible):
    machine(visible)
    with pytest.raises(ValueError, match=rf"^--device: .*CUDA_VISIBLE_DEVICES={visible or 'unset'}.*{CPU}$"):
        default_device("--device", CPU)
    with pytest.raises(ValueError, match=r"^--device: 'cuda' "):
        check_device("cuda", "--device")
    assert check_device("cpu", "--device").type == "cpu"


@pytest.mark.parametrize(("visible", "n_nodes"), [("", 2), (" -1,-1", 2), ("-1,0", 2), (None, 0)])
def test_hidden_on_purpose_or_absent_it_is_the_cpu(machine, visible, n_nodes):
    machine(visible, n_nodes)
    assert default_device("--device", CPU).type == "cpu" and n_gpus() == 0
    for name in ("cuda:1", "mps", "gpu", 3.5):
        with pytest.raises(ValueError, match=rf"^device: '{name}' .* cpu$"):
            check_device(name)


def test_a_gpu_that_does_not_start_is_named(monkeypatch):
    def refuse(where):
        raise RuntimeError(f"CUDA error: {where} is busy or unavailable\nCUDA kernel errors might be")

    monkeypatch.setattr(torch.cuda, "mem_get_info", refuse)
    start(torch.device("cpu"), "--device")
    with pytest.raises(ValueError, match=r"^--device: .*cuda:1 .* busy or unavailable$"):
        start(torch.device("cuda:1"), "--device")


def test_a_gpu_becomes_the_current_one(monkeypatch):
    entered = []

    @contextmanager
    def enter(where):
        entered.append(where)
        yield

    monkeypatch.setattr(torch.cuda, "device", enter)
    for where in (torch.device("cuda:1"), torch.device("cpu")):
        with device.on_device(where):
            pass
    assert entered == [torch.device("cuda:1")]
