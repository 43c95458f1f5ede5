"""benchmarks/checks/gpu_check.py on a CPU: its stages as processes, and what its JSON file says of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

from longdraft.benchmarks.checks import gpu_check
from longdraft.train.config import DRAFT_SECTIONS

ROOT = Path(__file__).resolve().parents[2]
# What an image for GPUs may lack.
ABSENT = (
    "omegaconf", "datasets", "deepspeed", "wandb", "liger_kernel", "flash_attn", "pyarrow", "psutil", "matplotlib",
)  # fmt: skip


def run(out: Path, *words: str, **environment: str) -> tuple[int, str]:
    environment = {**os.environ, "LONGDRAFT_TEST_DEVICE": "cpu", "PYTHONSAFEPATH": "1", **environment}
    command = [sys.executable, str(ROOT / "benchmarks/checks/gpu_check.py"), "--out", str(out), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_training_is_stopped_gone_on_with_and_decodes(tmp_path):
    """One method under DeepSpeed's launcher; a killed one is what tests/train/ has."""
    status, said = run(tmp_path, "--only", "training", "--methods", "longspec", OMP_NUM_THREADS="1")
    made = json.loads((tmp_path / "gpu_check.json").read_text())
    assert status == 0 and made["passed"] and made["not_run"] == [], said
    found = made["training"]["longspec"]
    assert found["ended_by"] == "SIGTERM" and 5 <= found["resumed_from"] < found["steps"] == 20
    assert found["exact"] is True and found["exact_checked"].startswith("96 tokens a drafter in fp32, ")
    assert found["over_target"] > 1 and found["step_s"] > 0 and len(found["losses"]) == 2


def test_exactness_is_in_fp32_and_speed_in_bf16(tmp_path):
    status, said = run(tmp_path, "--only", "benchmark", OMP_NUM_THREADS="1")
    assert status == 0, said
    found = json.loads((tmp_path / "gpu_check.json").read_text())["benchmark"]
    assert found["exact"] is True and found["proof"]["form"] == "fp32" and found["dtype"] == "bfloat16"
    assert set(found["runs"][0]["drafters"]) == {"plain", *gpu_check.DRAFTERS}


def test_every_method_is_trained():
    assert set(gpu_check.METHODS) == set(DRAFT_SECTIONS)
    assert {number.name for _, _, number in gpu_check.METHODS.values()} == {"SIGKILL", "SIGTERM"}
    assert {*gpu_check.FEW, *gpu_check.NEEDS} <= set(gpu_check.LIMITS)


def test_the_kernels_benchmarks_run_with_few_packages(tmp_path):
    """In a process tree in which these packages cannot be imported."""
    site = tmp_path / "site"
    site.mkdir()
    hide = f"import sys\nsys.modules.update(dict.fromkeys({ABSENT}))\n"
    for folder in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        hide += f"try:\n    exec(open({folder + '/sitecustomize.py'!r}).read())\nexcept OSError:\n    pass\n"
    (site / "sitecustomize.py").write_text(hide)
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    status, said = run(tmp_path, "--only", "training", "kernel benchmarks", PYTHONPATH=path)
    assert status == 0, said
    made = json.loads((tmp_path / "gpu_check.json").read_text())
    training, benchmarks = made["stages"]
    assert training["name"] == "training" and training["passed"] is None and made["not_run"] == ["training"]
    assert training["not_run"] == "not installed: deepspeed, omegaconf, pyarrow, psutil" and "training" not in made
    assert benchmarks["name"] == "kernel benchmarks" and benchmarks["passed"] is made["passed"] is True
    found = made["kernel benchmarks"]
    assert {row["benchmark"] for row in found["results"]} == {"attention", "loss"}
    assert all("problem" in row or row["ms"] > 0 for row in found["results"])
    assert min(found["ceilings"].values()) > 0 and found["commit"] == made["commit"]
    assert found["versions"]["liger_kernel"] and {"date", "hardware", "threads"} <= set(found)
    assert "RuntimeError: Liger" in (tmp_path / "kernel_benchmarks.txt").read_text()


def test_stages_keep_within_eight_minutes_and_cover_the_tests_of_triton():
    assert sum(gpu_check.LIMITS.values()) <= 480 - 5
    triton = {
        file.name
        for file in (ROOT / "tests" / "kernels").glob("test_*.py")
        if "\nfrom longdraft.kernels.triton" in file.read_text(encoding="utf-8")
    }
    assert triton and triton <= {file.name for file in gpu_check.triton_tests()}


def test_a_gpu_that_is_not_there_is_a_failure(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LONGDRAFT_TEST_DEVICE", "cuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu_check.main(["--out", str(tmp_path)]) == 1
    assert "no CUDA device" in capsys.readouterr().out
