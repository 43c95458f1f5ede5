"""The GPUs that the ranks of `longdraft train` get. A GPU that PyTorch cannot use is refused before anything is
loaded."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from longdraft.launch import cli
from longdraft.launch.train import main
from longdraft.models import device
from longdraft.models.files import signals_noted
from longdraft.train import launcher
from longdraft.train.launcher import launch_ranks, rank_devices

# Launches itself on two ranks, which save when they are told to stop. The first one sends a signal to the launcher, at
# once or, as "late", once both can note it.
SAVING = """
import os, sys, time
from pathlib import Path
folder, number = Path(sys.argv[1]), int(sys.argv[2])
if "RANK" not in os.environ:
    from longdraft.train.launcher import launch_ranks
    sys.exit(launch_ranks(sys.argv, ["-1", "-1"]))
rank, parent, late = os.environ["RANK"], os.getppid(), sys.argv[3] == "late"
if rank == "0" and not late:
    os.kill(parent, number)
from longdraft.models.files import signals_noted
from longdraft.train.launcher import stop_with_launcher
with signals_noted() as told:
    stop_with_launcher()
    (folder / f"ready-{rank}").touch()
    while rank == "0" and late and not (folder / "ready-1").exists():
        time.sleep(0.05)
    if rank == "0" and late:
        os.kill(parent, number)
    deadline = time.monotonic() + 60
    while not told and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    (folder / f"saved-{rank}").write_text(str(len(told)))
"""
start_command = partial(cli.run, "train")
UUIDS = ["GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "MIG-e1b5a7c4-0a50-5a2f-9ee1-6f0f6a1b3f0a"]


@pytest.fixture
def gpus(monkeypatch):
    """Sets how many GPUs PyTorch sees, and CUDA_VISIBLE_DEVICES."""

    def pretend(count: int, visible: str | None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return pretend


@pytest.mark.parametrize(
    ("count", "visible", "num_gpus", "expected"),
    [
        (8, None, None, list("01234567")),
        (8, None, 3, list("012")),
        (2, "4,5", None, ["4", "5"]),
        (2, "5, 4", 1, ["5"]),
        (1, "4,99,5", None, ["4"]),  # as CUDA reads it
        (2, ",".join(UUIDS), 2, UUIDS),
    ],
)
def test_ranks_get_the_gpus_that_are_visible(gpus, count, visible, num_gpus, expected):
    gpus(count, visible)
    assert rank_devices(num_gpus, "cuda") == expected


@pytest.mark.parametrize(("count", "visible"), [(8, None), (2, "4,5")])
def test_more_ranks_than_gpus(gpus, count, visible, config_file, capsys):
    gpus(count, visible)
    assert start_command([str(config_file), "--num-gpus", "9"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("longdraft train: error: num_gpus: 9 ") and f" GPUs, {count} (" in said
    assert str(visible) in said


def test_what_the_command_starts(gpus, config_file, monkeypatch):
    started = []
    monkeypatch.setattr(launcher, "launch_ranks", lambda argv, devices: started.append(devices) or 0)
    gpus(2, "4,5")
    assert start_command([str(config_file)]) == start_command([str(config_file), "--num-gpus", "1"]) == 0
    assert start_command([str(config_file), "train.device=cpu", "--num-gpus", "2"]) == 0
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "-1"
    assert started == [["4", "5"], ["4"], ["-1", "-1"]]
    gpus(0, None)
    assert start_command([str(config_file)]) == 0 and started[-1] == ["-1"]


def test_an_empty_option_is_not_forgotten(gpus, config_file, capsys):
    gpus(0, None)
    assert start_command([str(config_file), "--from-draft="]) == 2 and "draft.start_from: " in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])  # SIGHUP comes from a terminal that closes
def test_a_signal_before_the_ranks_are_there(config_file, monkeypatch, capsys, number):
    def interrupted(setting):
        signal.raise_signal(number)
        return "cpu"

    monkeypatch.setattr("longdraft.train.launcher.settle_device", interrupted)
    monkeypatch.setattr(launcher, "launch_ranks", lambda *_: pytest.fail("ranks were started"))
    before = signal.signal(number, signal.SIG_DFL)  # the tests may run under nohup
    try:
        assert start_command([str(config_file)]) == 0
    finally:
        signal.signal(number, before)
    assert capsys.readouterr().out == "Stopped before training began; run the same command again\n"


def test_under_nohup_a_closed_terminal_stops_nothing():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_noted() as stop:
            signal.raise_signal(signal.SIGHUP)
        assert stop == [] and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("number", "when"),
    [(signal.SIGTERM, "early"), (signal.SIGINT, "late"), (signal.SIGKILL, "early"), (signal.SIGKILL, "late")],
)
def test_a_signal_to_the_launcher_reaches_the_ranks(tmp_path, number, when):
    """Once each, also where they cannot note it yet; the launcher waits for what they save. Where it is killed itself,
    it leaves no rank behind."""
    script = tmp_path / "rank.py"
    script.write_text(SAVING)
    done = subprocess.run([sys.executable, script, tmp_path, str(int(number)), when], timeout=100)
    assert done.returncode == (-number if number == signal.SIGKILL else 0)
    deadline = time.monotonic() + 50
    while [path.read_text() for path in tmp_path.glob("saved-*")] != ["1", "1"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(("code", "status", "said"), [
    ("os.kill(os.getpid(), 9)", 137, "a rank was killed by SIGKILL"), ("sys.exit(3)", 3, ""), ("pass", 0, ""),
    ("os.kill(os.getppid(), 2); signal.pthread_sigmask(signal.SIG_UNBLOCK, [15]); time.sleep(50)", 130, ""),
])  # fmt: skip
def test_where_a_rank_ends_the_others_are_ended(tmp_path, monkeypatch, capfd, code, status, said):
    """The second one waits for SIGTERM, and the third for more; where the first ends well, they are waited for."""
    monkeypatch.setattr(launcher, "PATIENCE_S", 1)
    script = tmp_path / "rank.py"
    script.write_text(f"""
import os, signal, sys, time
if os.environ["RANK"] == "0":
    {code}
    sys.exit(0)
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
deadline = time.monotonic() + {60 if status else 1}
while time.monotonic() < deadline and not (told and os.environ["RANK"] == "1"):
    time.sleep(0.05)
""")
    begun = time.monotonic()
    assert launch_ranks([str(script)], ["-1"] * 3) == status
    assert time.monotonic() - begun < 30
    assert said in (err := capfd.readouterr().err) and (said or not err)


def test_each_rank_gets_the_devices(monkeypatch):
    """Numbers and UUIDs in order, one for each rank."""
    started = []
    ended = SimpleNamespace(poll=lambda: 0)
    monkeypatch.setattr(launcher.subprocess, "Popen", lambda argv, env, **_: started.append(env) or ended)
    assert launch_ranks(["script.py"], ["5", *UUIDS]) == 0
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "CUDA_VISIBLE_DEVICES")
    devices = ",".join(["5", *UUIDS])
    assert [[env[name] for name in names] for env in started] == [[str(i), str(i), "3", "3", devices] for i in range(3)]


def test_training_does_not_fall_back_to_the_cpu(gpus, config_file, tmp_path, monkeypatch, capsys):
    """Where there is a GPU that PyTorch does not see."""
    gpus(0, None)
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(device, "NODES", tmp_path)
    for command, prog in ((main, "launch/train.py"), (start_command, "longdraft train")):
        for setting in ("auto", "cuda", "gpu"):
            assert command([str(config_file), f"train.run_dir={tmp_path / 'run'}", f"train.device={setting}"]) == 2
            said = capsys.readouterr().err
            assert said.startswith(f"{prog}: error: train.device: ") and said.count("\n") == 1
    assert not (tmp_path / "run").exists()
