"""Ranks that do not find each other say what to set: a network interface that does not exist, or a machine whose own
name resolves to the loopback. What they take from a launcher, and whose failure they name."""

import socket
from types import SimpleNamespace

import pytest
import torch

from longdraft.train import ranks
from longdraft.train.ranks import TrainingError, check_own_name, failures_named, join_ranks


def test_an_interface_that_is_not_there_is_named(start_ranks, tmp_path, monkeypatch):
    """Two real ranks, over gloo."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothere0")
    ranks = start_ranks(2, [f"train.run_dir={tmp_path / 'run'}"], "ranks_meeting.py")
    said = [rank.communicate(timeout=100)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1], said
    assert [one.count("\n") for one in said] == [1, 1], said
    begin = f"launch/train.py: error: rank 0 of 2 on {socket.gethostname()} does not find the others at 127.0.0.1:"
    assert said[0].startswith(begin)
    assert ", GLOO_SOCKET_IFNAME=nothere0: " in said[0] and "Unable to find address for: nothere0; where" in said[0]
    assert "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME" in said[0] and "interface between the machines" in said[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("address", ["127.0.1.1", "::1", "10.0.0.7", "fe80::1%eth0"])
def test_a_name_that_stands_for_the_loopback(address, monkeypatch):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, port: found)
    if address in ("10.0.0.7", "fe80::1%eth0"):
        check_own_name()
        return
    with pytest.raises(OSError, match=f"GLOO_SOCKET_IFNAME .* stands for {address} "):
        check_own_name()


def test_torchrun_says_how_many_ranks_this_machine_has(monkeypatch, no_launcher):
    given = {"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in (given | {"LOCAL_WORLD_SIZE": "8"}).items():
        monkeypatch.setenv(name, value)

    def refuse():
        raise OSError("the name of one of several machines")

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(ranks, "check_own_name", refuse)
    monkeypatch.setattr(ranks, "_open_device", lambda local_rank: torch.device("cpu"))
    with pytest.raises(TrainingError, match=r"^rank 9 of 16 on .*: the name of one of several machines; "):
        join_ranks()


@pytest.mark.parametrize(
    "error", [RuntimeError("writev [127.0.0.1]:9: Broken pipe"), BrokenPipeError(32, "Broken pipe")]
)
def test_only_a_collective_blames_another_rank(error):
    expected = BrokenPipeError if isinstance(error, OSError) else TrainingError
    with pytest.raises(expected), failures_named(SimpleNamespace(rank=0, local_rank=0)):  # pyright: ignore[reportArgumentType]
        raise error
