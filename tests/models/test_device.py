"""The refusal of a GPU that PyTorch cannot use says what was found and what to do. The places it looks at are faked."""

import re
from contextlib import contextmanager

import pytest
import torch

from longdraft.models import device
from longdraft.models.device import check_device, default_device, n_gpus, start

CPU = "give --device cpu"
VERSION = """NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02  Tue Jul 13 16:14:05 UTC 2021
GCC version:  gcc version 9.3.0
"""
OPEN_VERSION = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (root@host)\n"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """(driver's version file, version of PyTorch's CUDA, why it does not start, CUDA_VISIBLE_DEVICES): a machine with
    two GPUs that PyTorch does not see."""

    def pretend(version: str | None, cuda: str | None, error: str = "", visible: str | None = None) -> None:
        def init():
            raise RuntimeError(error)

        for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
            (tmp_path / name).touch()
        if version is not None:
            (tmp_path / "version").write_text(version)
        monkeypatch.setattr(device, "NODES", tmp_path)
        monkeypatch.setattr(device, "VERSION", tmp_path / "version")
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "init", init)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return pretend


CASES = {
    "old driver": ((VERSION, "13.0"), "its driver is 470.57.02, and CUDA 13.0 needs 580 or newer; update the driver"),
    "open driver": (
        (OPEN_VERSION, "13.0", "CUDA unknown error - set up wrongly.\nmore"),
        "CUDA unknown error - set up wrongly (driver 580.65.06, CUDA 13.0); look at nvidia-smi",
    ),
    "old driver, devices chosen": (
        (VERSION, "13.0", "no CUDA-capable device is detected", "0,1"),
        "its driver is 470.57.02, and CUDA 13.0 needs 580 or newer; update the driver",
    ),
    "not up yet, devices chosen": (
        (OPEN_VERSION, "13.0", "system not yet initialized", "0,1"),
        "system not yet initialized (driver 580.65.06, CUDA 13.0); look at nvidia-smi",
    ),
    "no version": ((None, "12.8", "no"), "no (driver unknown, CUDA 12.8); look at nvidia-smi"),
    "a build without CUDA": (
        (VERSION, None),
        f"{torch.__version__} is a build of PyTorch without CUDA; install one with CUDA",
    ),
    "hidden by mistake": (
        (OPEN_VERSION, "13.0", "No CUDA GPUs are available", "7"),
        "CUDA_VISIBLE_DEVICES=7 names none that is there; name those of nvidia-smi -L, or unset it",
    ),
}


@pytest.mark.parametrize(("given", "why"), CASES.values(), ids=CASES)
def test_a_gpu_that_cannot_be_used_is_refused(machine, given, why):
    machine(*given)
    found = f"this machine has a GPU ({device.NODES / 'nvidia0'}) that PyTorch cannot use: {why}"
    with pytest.raises(ValueError, match=f"^{re.escape(f'--device: {found}; if the CPU is meant, {CPU}')}$"):
        default_device("--device", CPU)
    with pytest.raises(ValueError, match=re.escape(f"--device: 'cuda' is not here ({found}); this machine has cpu")):
        check_device("cuda", "--device")
    assert check_device("cpu", "--device").type == "cpu"


@pytest.mark.parametrize("visible", ["", "-1", " -1,-1", "-1,0"])
def test_hidden_on_purpose_is_the_cpu(machine, visible):
    machine(VERSION, "13.0", visible=visible)
    assert default_device("--device", CPU).type == "cpu"


def test_without_a_gpu_it_is_the_cpu(machine, tmp_path):
    machine(VERSION, "13.0")
    for name in ("nvidia0", "nvidia1"):
        (tmp_path / name).unlink()
    assert default_device("--device", CPU).type == "cpu" and n_gpus() == 0
    with pytest.raises(
        ValueError, match=r"'cuda:1' is not here \(PyTorch sees no CUDA device\); this machine has cpu$"
    ):
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
