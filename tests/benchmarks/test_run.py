"""The command: arguments, files, and the whole of it as gpu_check.py runs it where few packages are there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from longdraft.benchmarks.checks import gpu_check
from longdraft.benchmarks.kernels import attention, run, timing
from longdraft.benchmarks.kernels.candidates import OURS
from longdraft.models import device

ROOT = Path(__file__).resolve().parents[2]
# What an image for GPUs may lack.
ABSENT = ("omegaconf", "datasets", "deepspeed", "wandb", "liger_kernel", "flash_attn", "pyarrow", "psutil")


@pytest.fixture
def small_ceilings(monkeypatch):
    """Measured on a MiB, not on what is larger than any cache."""
    monkeypatch.setitem(timing.CEILING_SIZES, "cpu", ((2**20, 32), (2**20, 32)))


def test_gpu_check_runs_the_harness_with_few_packages(tmp_path):
    """In a process tree in which these packages cannot be imported; table, picture and JSON are there."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({ABSENT}))\n")
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "LONGDRAFT_TEST_DEVICE": "cpu", "PYTHONSAFEPATH": "1"}
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "checks" / "gpu_check.py"),
        "--out",
        str(tmp_path),
        "--site",
        str(site),
    ]
    stages = ["--only", "kernel benchmarks", "training"]
    done = subprocess.run([*command, *stages], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    made = json.loads((tmp_path / "gpu_check.json").read_text())
    training, benchmarks = made["stages"]
    assert training["name"] == "training" and training["passed"] is None and made["not_run"] == ["training"]
    assert training["not_run"] == "not installed: deepspeed, omegaconf, pyarrow, psutil"
    assert "== training: NOT RUN, not installed: deepspeed" in done.stdout and "training" not in made
    assert benchmarks["name"] == "kernel benchmarks" and benchmarks["passed"] is made["passed"] is True
    found = made["kernel benchmarks"]
    rows = found["results"]
    assert {row["benchmark"] for row in rows} == {"attention", "step", "loss", "decode", "prefill"}
    assert all(row["ms"] > 0 and row["over_floor"] > 0 for row in rows if row["status"] == "ok")
    assert {row["status"] for row in rows} == {"ok", "not available"}
    assert min(found["ceilings"].values()) > 0 and found["commit"] == made["commit"]
    assert found["versions"]["liger_kernel"] and {"date", "hardware", "threads", "seconds"} <= set(found)
    table = (tmp_path / "kernel_benchmarks.txt").read_text()
    assert "FlexAttention, block mask    not available: left out of --quick" in table
    assert "Liger, head by head    not available: " in table and "transformers generate" in table
    assert (tmp_path / "kernel_benchmarks.png").read_bytes().startswith(b"\x89PNG")


def test_stages_keep_within_eight_minutes_and_cover_the_tests_of_triton():
    assert sum(gpu_check.LIMITS.values()) <= 480 - 5
    covered = {file.name for file in gpu_check.triton_tests()}
    triton = {
        file.name
        for file in (ROOT / "tests" / "kernels").glob("test_*.py")
        if "\nfrom longdraft.kernels.triton" in file.read_text(encoding="utf-8")
    }
    assert triton and triton <= covered


def test_a_wrong_output_of_ours_is_the_exit_status_and_has_no_time(tmp_path, capsys, monkeypatch, small_ceilings):
    right = attention.IMPLEMENTATIONS[OURS]

    def wrong(case):
        run = right(case)
        return lambda: run() * 1.1

    monkeypatch.setitem(attention.IMPLEMENTATIONS, OURS, wrong)
    shape = ["--profile", "tiny", "--contexts", "40", "--nodes", "3", "--device", "cpu", "--quick"]
    status = run.main(["attention", *shape, "--out", str(tmp_path)])
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert status == 1
    (path,) = tmp_path.glob("*.json")
    assert json.loads(path.read_text()) == printed
    assert path.name.startswith(f"{printed['date'][:10]}-{printed['commit'][:8]}")
    rows = {row["implementation"]: row for row in printed["results"]}
    assert rows[OURS]["status"] == "wrong" and "ms" not in rows[OURS]
    assert "ms" in rows["SDPA, dense mask"] and "over_longdraft" not in rows["SDPA, dense mask"]


def test_without_matplotlib_there_is_no_picture_and_that_is_said(tmp_path, capsys, monkeypatch, small_ceilings):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    shape = ["--device", "cpu", "--profile", "tiny", "--contexts", "9", "--nodes", "1", "--quick"]
    assert run.main(["attention", *shape, "--out", str(tmp_path), "--name", "named"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"named.json", "named.txt"}
    assert "no png: matplotlib is not installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["speed"], "speed: no benchmark; give any of attention, step, loss, decode, ceilings"),
        (["--nodes", "129"], "--nodes: 129 is not from 1 to 128"),
        (["--repeats", "1"], "--repeats: 1; give at least 2"),
    ],
)
def test_arguments_are_checked(capsys, words, said):
    with pytest.raises(SystemExit):
        run.read(["--device", "cpu", *words])
    assert said in capsys.readouterr().err


def test_a_gpu_that_cannot_be_used_is_not_passed_over(capsys, tmp_path, monkeypatch):
    """Its figures would be the CPU's."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device, "NODES", tmp_path)
    assert run.read([]).device == "cpu"
    (tmp_path / "nvidia0").touch()
    for words, message in (
        ([], "that PyTorch cannot use: "),
        (["--device", "cuda"], "'cuda' is not here (this machine"),
    ):
        with pytest.raises(SystemExit):
            run.read(words)
        assert message in capsys.readouterr().err


def test_defaults_follow_device_and_quick():
    args = run.read(["--device", "cpu", "--quick"])
    assert (args.profile, args.contexts, args.nodes) == (["smollm2-135m"], [1024], [1, 8])
    assert args.what == ["attention", "step", "loss", "decode"]
    assert run.read(["--device", "cpu", "--contexts", "7"]).contexts == [7]
