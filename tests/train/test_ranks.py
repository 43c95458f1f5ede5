"""Ranks that do not find each other say what to set, as where a network interface does not exist; and whose failure
they name."""

import socket
from types import SimpleNamespace

import pytest
import torch

from longdraft.train.ranks import (  # before DeepSpeed: it names the accelerator
    TIMEOUT,
    TrainingError,
    _set_up_deepspeed,
    failures_named,
)

# isort: split
from deepspeed.accelerator import cuda_accelerator
from deepspeed.comm.torch import TorchBackend


def test_an_interface_that_is_not_there_is_named(start_ranks, tmp_path, monkeypatch):
    """Two real ranks, over gloo."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothere0")
    ranks = start_ranks(2, [{"main": [f"train.run_dir={tmp_path / 'run'}"]}])
    said = [rank.communicate(timeout=100)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1], said
    assert [one.count("\n") for one in said] == [1, 1], said
    assert said[0].startswith(f"launch/train.py: error: rank 0 of 2 on {socket.gethostname()} ")
    assert "nothere0" in said[0] and "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME" in said[0]
    assert not (tmp_path / "run").exists()


def test_deepspeed_tells_nccl_which_gpu_is_this_ranks(monkeypatch):
    """Else NCCL guesses it. The group is not made here."""
    given, gpu = [], SimpleNamespace(device_name=lambda: "cuda", device=lambda i: f"cuda:{i}")

    def init_process_group(backend, device_id=None, **_):
        given.append((backend, device_id))

    monkeypatch.setenv("LOCAL_RANK", "1")
    # `deepspeed.comm.torch` is also PyTorch, by another import.
    monkeypatch.setitem(TorchBackend.init_process_group.__globals__, "get_accelerator", lambda: gpu)
    monkeypatch.setattr("torch.distributed.get_backend", lambda: "nccl")
    monkeypatch.setattr("torch.distributed.init_process_group", init_process_group)
    TorchBackend.init_process_group(object.__new__(TorchBackend), "nccl", TIMEOUT, None, 1, 2)
    assert given == [("nccl", "cuda:1")]


@pytest.mark.parametrize(
    "error", [RuntimeError("writev [127.0.0.1]:9: Broken pipe"), BrokenPipeError(32, "Broken pipe")]
)
def test_only_a_collective_blames_another_rank(error):
    expected = BrokenPipeError if isinstance(error, OSError) else TrainingError
    with pytest.raises(expected), failures_named(SimpleNamespace(rank=0, local_rank=0)):  # pyright: ignore[reportArgumentType]
        raise error


def test_a_gpu_may_be_named_by_its_uuid_where_pynvml_is_installed(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5f9c2a10-0000-4b3c-9d8e-1f2e3d4c5b6a")
    monkeypatch.setattr(cuda_accelerator, "pynvml", SimpleNamespace())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 30)
    _set_up_deepspeed()
    assert (
        cuda_accelerator.CUDA_Accelerator.available_memory(object.__new__(cuda_accelerator.CUDA_Accelerator), 0) == 50
    )
