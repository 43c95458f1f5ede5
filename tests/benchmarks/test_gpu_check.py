"""benchmarks/checks/gpu_check.py on a CPU: its stages as processes, and what its JSON file says of them."""

import json
import os
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from longdraft.benchmarks.checks import gpu_check, long_contexts
from longdraft.benchmarks.drafters import forced
from longdraft.launch import cli
from longdraft.launch.arguments import PARSERS
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


def test_training_is_stopped_gone_on_with_and_decodes(tiny, tmp_path, monkeypatch, shared, capfd):
    """One method, with a target whose steps are short and so many. What is stopped is a rank alone, forked with its
    imports done, and the launcher goes on with it; one that is stopped or killed is what tests/train/ has."""
    original, forked, run, prepared = gpu_check.Run._start, shared("train/conftest.py").Forked, subprocess.run, []

    def start(one: gpu_check.Run):
        if one.log.exists():
            return original(one)
        one.log.touch()
        return forked([str(ROOT / "launch" / "train.py"), str(one.config)], os.environ | {"OMP_NUM_THREADS": "1"})

    def here(command, **options):
        if "prepare" in command:
            return prepared.append(cli.main(command[command.index("prepare") :]))
        return run(command, **options)

    for name, value in {"TARGET": str(tiny), "STEPS": 120}.items():
        monkeypatch.setattr(gpu_check, name, value)
    monkeypatch.setitem(gpu_check.ANCHORED, "max_position", 2048)
    monkeypatch.setattr(gpu_check.Run, "_start", start)
    monkeypatch.setattr(gpu_check.subprocess, "run", here)
    monkeypatch.setenv("LONGDRAFT_TEST_DEVICE", "cpu")
    assert gpu_check.main(["--out", str(tmp_path), "--training", "--methods", "longspec"]) == 0 and prepared == [0]
    *_, line = (line for line in capfd.readouterr().out.splitlines() if line.startswith('{"longspec"'))
    found = json.loads(line)["longspec"]
    assert found["ended_by"] == "SIGTERM" and 5 <= found["resumed_from"] < found["steps"] == 120
    assert found["exact"] is True and found["exact_checked"].startswith("96 tokens a drafter in fp32, ")
    assert found["over_target"] > 1 and found["step_s"] > 0 and len(found["losses"]) == 2


def test_exactness_is_in_fp32_and_speed_in_bf16(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "TARGET", str(tiny))
    monkeypatch.setenv("LONGDRAFT_TEST_DEVICE", "cpu")
    assert gpu_check.main(["--out", str(tmp_path), "--only", "benchmark"]) == 0
    found = json.loads((tmp_path / "gpu_check.json").read_text())["benchmark"]
    assert found["exact"] is True and found["proof"]["form"] == "fp32" and found["dtype"] == "bfloat16"
    assert set(found["runs"][0]["drafters"]) == {"plain", *gpu_check.DRAFTERS}


def test_every_method_is_trained():
    assert set(gpu_check.METHODS) == set(DRAFT_SECTIONS)
    assert {number.name for _, _, number in gpu_check.METHODS.values()} == {"SIGKILL", "SIGTERM"}
    assert {*gpu_check.FEW, *gpu_check.NEEDS} <= {*gpu_check.SECONDS, *gpu_check.EXTRAS}


STUB = """#!/usr/bin/env bash
[ "$1" != -c ] || { echo "$2 $3" | grep 60 >>log; echo 77; exit; }
echo "$LONGDRAFT_EXACT $*" >>log
"""


def test_more_is_done_for_smollm2_only_where_it_is_asked_for(tmp_path, monkeypatch):
    """With a Python that only notes its arguments. Steps that a run has begun with stay, and nothing is exported before
    the last."""
    monkeypatch.setenv("LONGDRAFT_TEST_DEVICE", "cuda")
    monkeypatch.setattr(gpu_check, "SMOLLM2", tmp_path / "launch" / "smollm2_gpu.sh")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    (tmp_path / "python").write_text(STUB)
    (tmp_path / "python").chmod(0o755)
    runs = tmp_path / "my out" / "runs"
    heads_run, block_run = (runs / f"{method}-smollm2-gpu" for method in ("tokenswift", "longspec"))
    last_step = block_run / "checkpoints" / "step_000099"
    for folder in (tmp_path / "data/smollm2-all", heads_run / "checkpoints/step_000077", last_step):
        folder.mkdir(parents=True)
    (tmp_path / "data/smollm2-all/manifest.json").touch()
    (block_run / "config.yaml").write_text("optimizer:\n  warmup_steps: 5\n  steps: 99\n")

    def noted(name: str) -> list[str]:
        (tmp_path / "log").unlink(missing_ok=True)
        command = gpu_check._command(name, Namespace(out=tmp_path / "my out"), ())
        subprocess.run(command, check=True, capture_output=True)
        return (tmp_path / "log").read_text().splitlines()

    few, counted, heads, exported, block, _ = noted("drafts")
    recipe = "0 -m longdraft.launch.cli train configs/{0}/smollm2-gpu.yaml --num-gpus 1 log.wandb=disabled "
    recipe += f"train.run_dir={runs}/{{0}}-smollm2-gpu train.steps={{1}}"
    assert few.startswith(recipe.format("tokenswift", f"12 train.run_dir={heads_run}/measured "))
    assert "int(60 * 0.2 * 4 / " in counted and counted.endswith(f"{heads_run}/measured")
    assert exported.endswith(f" export {heads_run}")
    assert [heads, block] == [recipe.format("tokenswift", 77), recipe.format("longspec", 99)]
    last_step.rename(last_step.with_name("step_000050"))
    with pytest.raises(subprocess.CalledProcessError):
        noted("drafts")
    assert (tmp_path / "log").read_text().splitlines()[-1] == block
    for name, exact in (("length", 0), ("exact length", 1)):
        made, bench = noted(name)
        assert made.endswith(" - data/smollm2-yarn") and bench.startswith(f"{exact} -m longdraft.launch.cli bench ")
        args = PARSERS["bench"]().parse_args(bench.replace("my out", "my_out").split()[4:])
        assert (args.new_tokens, args.nodes, args.draft) == (100_000, "all", ["smollm2-135m-tokenswift"])
        assert args.out == tmp_path / "my_out" / "runs" / f"length-exact{exact}"
    assert not {"drafts", "length", "exact length"} & set(gpu_check.SECONDS)


def in_place(monkeypatch, tmp_path, *stages: str) -> tuple[int, dict, list[str]]:
    """The check in this process, each stage being what it prints: the status, what was written, and which ones ran."""
    monkeypatch.setenv("LONGDRAFT_TEST_DEVICE", "cpu")
    monkeypatch.setenv("LONGDRAFT_COMMIT", "abc")
    monkeypatch.setattr(gpu_check, "CPU_PATIENCE", 1)
    ran, scripts = [], dict(stage.split(":", 1) for stage in stages)

    def command(name, args, methods):
        ran.append(f"{name} {' '.join(methods)}" if name == "training" else name)
        return ["bash", "-c", scripts[name]]

    monkeypatch.setattr(gpu_check, "_command", command)
    status = gpu_check.main(["--out", str(tmp_path), "--minutes", "0.2", "--only", *scripts])
    return status, json.loads((tmp_path / "gpu_check.json").read_text()), ran


def test_a_stage_whose_time_is_over_is_not_finished_and_the_next_call_goes_on(tmp_path, monkeypatch, capsys):
    figures = """echo '{"longspec": {"exact": true}}'; echo '{"medusa": {"steps": 5}}'; echo; """
    quick, slow = "benchmark:echo 3 passed", f"training:{figures}sleep 60"
    status, made, ran = in_place(monkeypatch, tmp_path, quick, slow)
    assert status == 0 and made["passed"] and ran == ["benchmark", "training longspec tokenswift medusa"]
    assert [stage["state"] for stage in made["stages"].values()] == ["passed", "not finished"]
    assert made["training"] == {"longspec": {"exact": True}, "medusa": {"steps": 5}}
    assert "training          not finished" in capsys.readouterr().out
    status, made, ran = in_place(monkeypatch, tmp_path, quick, "training:exit 3")
    assert status == 1 and not made["passed"] and ran == ["training tokenswift medusa"]
    assert made["stages"]["training"]["state"] == "failed" and made["stages"]["benchmark"]["state"] == "passed"
    assert made["training"]["longspec"] == {"exact": True}
    status, made, ran = in_place(monkeypatch, tmp_path, "runtime tests:echo ..F.; sleep 60")
    assert status == 1 and made["stages"]["runtime tests"]["state"] == "failed", "though it was stopped"
    flips = """exact:echo '{"proof": {"flips": {"medusa": {"flips": 1}}}}'"""
    assert in_place(monkeypatch, tmp_path, flips)[1]["stages"]["exact"]["state"] == "failed"
    monkeypatch.setattr(gpu_check.provenance, "commit", lambda: "another")
    assert in_place(monkeypatch, tmp_path, quick)[2] == ["benchmark"]


def test_tests_are_a_sample_of_those_that_fit(tmp_path):
    environment = {**os.environ, "LONGDRAFT_TESTS_UNTIL": "0"}
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", str(ROOT / "tests/test_setup.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "no time was left" in done.stdout and "passed" not in done.stdout, done.stdout


def test_the_reason_of_a_failure_outlives_the_process(tmp_path):
    """At its limit a stage is killed, and pytest shows why a test failed only at the end."""
    tests = 'def test_a():\n    assert not "this"\n\ndef test_b():\n    __import__("os")._exit(9)\n'
    (tmp_path / "test_some.py").write_text(tests)
    environment = {**os.environ, "LONGDRAFT_TESTS_UNTIL": str(time.time() + 600), "PYTHONPATH": str(ROOT / "tests")}
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "conftest", str(tmp_path / "test_some.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 9 and 'assert not "this"' in done.stdout, done.stdout


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
    training, benchmarks = made["stages"]["training"], made["stages"]["kernel benchmarks"]
    assert training["state"] == "not run" and "training" not in made
    assert training["output"] == "not installed: deepspeed, omegaconf, pyarrow, psutil"
    assert benchmarks["state"] == "passed" and made["passed"]
    found = made["kernel benchmarks"]
    assert {row["benchmark"] for row in found["results"]} == {"attention", "prompt", "linear", "loss"}
    assert all("problem" in row or row["ms"] > 0 for row in found["results"])
    assert min(found["ceilings"].values()) > 0 and found["commit"] == made["commit"]
    assert found["versions"]["liger_kernel"] and {"date", "hardware", "threads"} <= set(found)
    assert "RuntimeError: Liger" in (tmp_path / "kernel_benchmarks.txt").read_text()


def test_long_contexts_are_measured_with_forced_acceptance(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LONGDRAFT_TEST_DEVICE", "cpu")
    known = lambda self, prompt, params: self._texts[forced._key(prompt, params)]  # noqa: E731
    monkeypatch.setattr(forced.Forced, "text", known)
    options = gpu_check.FEW["long contexts"].split()
    assert long_contexts.main([*options, "--device", "cpu", "--out", str(tmp_path)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = {key: figures for line in lines for key, figures in line.items()}
    after = ["plain after 512", "transformers after 512", "transformers after 64", "plain after 64"]
    after += [*(f"{name} after 64" for name in ("oracle", "longspec", "token_recycling")), "passes after 16"]
    assert list(found) == after and set(found.pop("passes after 16")) == {"1 rows", "64 rows"}
    assert all(one["first_token_s"] > 0 for one in found.values())
    assert found["token_recycling after 64"]["nodes_per_step"] == 80, "though the text is too short to fill its table"
    assert found["oracle after 64"]["tokens_per_step"] == 8 and 1 < found["longspec after 64"]["tokens_per_step"] <= 6
    assert all("aten::mm" in (tmp_path / name).read_text() for name in ("prefill.txt", "steps.txt"))


def test_the_recipes_for_8b_targets_are_trained_on_a_tiny_one(shared):
    script = str(ROOT / "benchmarks/checks/long_training.py")
    process = shared("train/conftest.py").Forked([script, *gpu_check.FEW["long training"].split()], dict(os.environ))
    output = process.communicate()[0]
    assert process.returncode == 0, output
    found = {}
    for line in output.splitlines():
        found |= json.loads(line) if line.startswith("{") else {}
    assert found["longspec"]["rows"] == 1 and found["tokenswift"]["rows"] == 3
    timed = "step_s", "tokens_per_s_per_rank", "heldout_s", "checkpoint_s", "estimated_memory_gib"
    assert all(one[key] > 0 for one in found.values() for key in timed)


def test_the_tests_of_triton_are_all_there():
    triton = {
        file.name
        for file in (ROOT / "tests" / "kernels").glob("test_*.py")
        if "\nfrom longdraft.kernels.triton" in file.read_text(encoding="utf-8")
    }
    assert triton and triton <= {file.name for file in gpu_check.triton_tests()}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"is_available": lambda: False}, "PyTorch finds no CUDA GPU"),
        ({"get_device_capability": lambda _: (7, 5)}, "the GPU: cuda:0 is a card (sm_75), and the kernels need sm_80"),
        ({"mem_get_info": lambda *_: (2**30, 2**34)}, "a card has 1.0 of 16.0 GiB free, but the check needs 12"),
        ({}, "Triton is not installed"),
    ],
)
def test_a_gpu_that_will_not_do_is_named_in_a_sentence(tmp_path, monkeypatch, capsys, change, reason):
    monkeypatch.setenv("LONGDRAFT_TEST_DEVICE", "cuda")
    good = {
        "is_available": lambda: True, "mem_get_info": lambda *_: (2**36, 2**36), "get_device_name": lambda _: "a card",
        "get_device_capability": lambda _: (9, 0),
    }  # fmt: skip
    for name, value in (good | change).items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(gpu_check, "find_spec", lambda name: None if not change else name)
    assert gpu_check.main(["--out", str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"gpu_check: {reason}") and printed.count("\n") == 1 and not list(tmp_path.iterdir())
