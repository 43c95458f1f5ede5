"""benchmarks/checks/gpu_check.py on a CPU: its stages as processes, and what its JSON file says of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

from longdraft.benchmarks.checks import gpu_check, gpu_stages
from longdraft.train.config import DRAFT_SECTIONS

ROOT = Path(__file__).resolve().parents[2]


def test_training_is_stopped_gone_on_with_and_decodes(tmp_path):
    """One method under DeepSpeed's launcher; a killed one is what tests/train/ has."""
    environment = {**os.environ, "LONGDRAFT_TEST_DEVICE": "cpu", "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "checks" / "gpu_check.py"),
        "--out",
        str(tmp_path),
        "--only",
        "training",
    ]
    done = subprocess.run([*command, "--methods", "longspec"], env=environment, capture_output=True, text=True)
    made = json.loads((tmp_path / "gpu_check.json").read_text())
    assert done.returncode == 0 and made["passed"] and made["not_run"] == [], done.stdout + done.stderr
    assert not (tmp_path / "training.json").exists()
    found = made["training"]["longspec"]
    assert found["ended_by"] == "SIGTERM" and 5 <= found["resumed_from"] < found["steps"] == 20
    assert found["exact"] is True and found["exact_checked"].startswith("96 tokens a drafter in fp32, all layers")
    assert found["over_target"] > 1 and found["step_s"] > 0 and len(found["losses"]) == 2


def test_exactness_is_in_fp32_and_speed_in_bf16(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGDRAFT_TEST_DEVICE", "cpu")
    for name in ("exactness", "benchmark"):
        assert gpu_stages.main([name, "--out", str(tmp_path)]) == 0
    exactness, benchmark = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("exactness", "benchmark"))
    assert exactness["exact"] is True and exactness["proof"]["complete"] and exactness["dtype"] == "float32"
    assert benchmark["exact"] is None and benchmark["proof"]["form"] == "serving" and benchmark["dtype"] == "bfloat16"
    assert set(benchmark["proof"]["flips"]) == set(gpu_stages.DRAFTERS)
    assert set(benchmark["runs"][0]["drafters"]) == {"plain", *gpu_stages.DRAFTERS}


def test_every_method_is_trained():
    assert set(gpu_stages.METHODS) == set(DRAFT_SECTIONS)
    assert {number.name for _, _, number in gpu_stages.METHODS.values()} == {"SIGKILL", "SIGTERM"}
    assert {*gpu_check.FEW, *gpu_check.NEEDS} <= set(gpu_check.LIMITS)


def test_training_without_time_is_a_failure_that_says_so(tmp_path, monkeypatch, capsys):
    """And nothing goes on behind its back."""
    monkeypatch.setenv("LONGDRAFT_TEST_DEVICE", "cpu")
    arguments = ["training", "--out", str(tmp_path), "--budget", "0", "--methods", "medusa"]
    assert gpu_stages.main(arguments) == 1
    assert "medusa: no time was left for it, at step 0" in capsys.readouterr().out
