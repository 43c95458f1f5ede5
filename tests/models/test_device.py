"""A GPU that PyTorch cannot use is refused with PyTorch's reason. The places that are looked at are faked."""

import re
from contextlib import contextmanager

import pytest
import torch

from longdraft.models import device
from longdraft.models.device import check_device, default_device, n_gpus, start

CPU = "give --device cpu"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """(why CUDA does not start, CUDA_VISIBLE_DEVICES): a machine with two GPUs that PyTorch does not see."""

    def pretend(error: str = "", visible: str | None = None) -> None:
        def init():
            raise RuntimeError(error)

        for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
            (tmp_path / name).touch()
        monkeypatch.setattr(device, "NODES", tmp_path)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "init", init)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return pretend


@pytest.mark.parametrize("visible", [None, "7"])
def test_a_gpu_that_cannot_be_used_is_refused(machine, visible):
    machine("CUDA unknown error - set up wrongly.\nmore", visible)
    found = f"{device.NODES / 'nvidia0'}) that PyTorch cannot use: CUDA unknown error - set up wrongly ("
    found += f"CUDA_VISIBLE_DEVICES={visible or 'unset'})"
    with pytest.raises(ValueError, match=f"^--device: .*{re.escape(found)}.*{CPU}$"):
        default_device("--device", CPU)
    with pytest.raises(ValueError, match=rf"^--device: 'cuda' .*{re.escape(found)}"):
        check_device("cuda", "--device")
    assert check_device("cpu", "--device").type == "cpu"


@pytest.mark.parametrize("visible", ["", "-1", " -1,-1", "-1,0"])
def test_hidden_on_purpose_is_the_cpu(machine, visible):
    machine(visible=visible)
    assert default_device("--device", CPU).type == "cpu"


def test_without_a_gpu_it_is_the_cpu(machine, tmp_path):
    machine()
    for name in ("nvidia0", "nvidia1"):
        (tmp_path / name).unlink()
    assert default_device("--device", CPU).type == "cpu" and n_gpus() == 0
    with pytest.raises(ValueError, match=r"^device: 'cuda:1' .* this machine has cpu$"):
        check_device("cuda:1")


def test_a_gpu_that_does_not_start_is_named(monkeypatch):
    def refuse(where):
        assert where == torch.device("cuda:1")
        raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCUDA kernel errors might be")

    monkeypatch.setattr(torch.cuda, "mem_get_info", refuse)
    start(torch.device("cpu"), "--device")
    with pytest.raises(
        ValueError,
        match=r"^--device: CUDA does not start on cuda:1: .* busy or unavailable; look at nvidia-smi, [^\n]*$",
    ):
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
