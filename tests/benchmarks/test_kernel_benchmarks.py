"""The kernels' benchmarks: what is wrong is not timed, what is absent is named, and figures follow from times."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from longdraft.benchmarks.checks import gpu_check
from longdraft.benchmarks.drafters.timing import peak_bytes
from longdraft.benchmarks.kernels import attention, loss, run, step, timing
from longdraft.benchmarks.kernels.attention import make_case
from longdraft.benchmarks.kernels.candidates import OURS, compare, figures, too_far
from longdraft.benchmarks.kernels.profiles import PROFILES, Work
from longdraft.benchmarks.kernels.timing import CEILING_SIZES, Bench
from longdraft.models import device

ROOT = Path(__file__).resolve().parents[2]
TINY = PROFILES["tiny"]
# What an image for GPUs may lack.
ABSENT = (
    "omegaconf",
    "datasets",
    "deepspeed",
    "wandb",
    "liger_kernel",
    "flash_attn",
    "pyarrow",
    "psutil",
    "matplotlib",
)


def by_name(rows: list[dict]) -> dict[str, dict]:
    return {row["implementation"]: row for row in rows}


def without_the_tree(case):
    """Every row of the pass reads all rows before it, as if the tree were a chain."""
    run = attention.IMPLEMENTATIONS[OURS]
    case.tree_mask_1NN = None
    return run(case)


def reads_the_tail(case):
    """Softmax over the whole capacity, poison and all."""
    q, k, v = case.q_1NHd.transpose(1, 2), case.keys_1CKd.transpose(1, 2), case.values_1CKd.transpose(1, 2)
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)


def raises(case):
    def run():
        raise RuntimeError("no kernel image\nis available")

    return run


def test_a_wrong_implementation_of_attention_has_no_time(bench):
    candidates = {
        OURS: attention.IMPLEMENTATIONS[OURS],
        f"{OURS}, wrong": reads_the_tail,
        f"{OURS}, raises": raises,
        "peer that raises": raises,
        f"{OURS}, chain": without_the_tree,  # last, for it changes the case
    }
    found = by_name(attention.measure(bench, TINY, [33], [9], candidates))
    assert found[OURS]["status"] == "ok" and found[OURS]["ms"] > 0
    for name in (f"{OURS}, wrong", f"{OURS}, chain"):
        assert found[name]["status"] == "wrong" and "ms" not in found[name] and "max error" in found[name]["reason"]
    assert "nan" in found[f"{OURS}, wrong"]["reason"]
    assert (found[f"{OURS}, raises"]["status"], found["peer that raises"]["status"]) == ("failed", "not available")
    assert found["peer that raises"]["reason"] == "RuntimeError: no kernel image"


@pytest.mark.parametrize("nodes", [1, 9])
def test_every_peer_of_attention_is_right_or_named(bench, nodes):
    found = by_name(attention.measure(bench, TINY, [1, 70], [nodes]))
    assert set(found) == set(attention.IMPLEMENTATIONS)
    status = {name: row["status"] for name, row in found.items()}
    assert status.pop("FlexAttention, block mask") == "not available" and set(status.values()) == {"ok"}
    assert found[OURS]["over_longdraft"] == 1.0


def test_where_the_reference_does_not_fit_a_smaller_case_is_compared(bench, monkeypatch):
    monkeypatch.setattr(Bench, "free_bytes", 3 * TINY.attention_work(200, 9, 2).bytes)
    candidates = {OURS: attention.IMPLEMENTATIONS[OURS], f"{OURS}, wrong": reads_the_tail}
    found = by_name(attention.measure(bench, TINY, [200], [9], candidates))
    assert (found[OURS]["status"], found[f"{OURS}, wrong"]["status"]) == ("ok", "wrong")


def test_folding_heads_and_back(bench):
    case = make_case(bench, TINY, 5, 3, True)
    folded = case.folded()
    assert torch.equal(folded[0, 1, 1 * 3 + 2], case.q_1NHd[0, 2, 1 * 2 + 1])  # head 3 is the second of key head 1
    assert torch.equal(case.unfolded(folded), case.q_1NHd)
    assert case.keys_1CKd[0, 8:].isnan().all() and not case.keys_1CKd[0, :8].isnan().any()


def test_a_wrong_loss_or_gradient_has_no_time(bench):
    plain = loss.IMPLEMENTATIONS["PyTorch, head by head"]

    def scaled(of_loss: float, of_gradient: float):
        def build(case):
            run = plain(case)
            return lambda: (run()[0] * of_loss, run()[1] * of_gradient)

        return build

    candidates = {**loss.IMPLEMENTATIONS, "loss": scaled(1.01, 1.0), "gradient": scaled(1.0, 1.5)}
    found = by_name(loss.measure(bench, TINY, 40, candidates))
    assert "loss: max error" in found["loss"]["reason"] and "ms" not in found["loss"]
    assert "gradient: norm" in found["gradient"]["reason"] and "ms" not in found["gradient"]
    assert found["Liger, head by head"]["status"] == "not available"
    for name in (OURS, "PyTorch, head by head"):
        assert found[name]["status"] == "ok"
        assert found[name]["peak_bytes"] >= 3 * 40 * TINY.hidden_size * 2  # the gradients at least


def test_a_wrong_step_has_no_time(bench):
    def shifted(case):
        case.positions_1N = case.positions_1N + 1
        return step.WAYS[f"{OURS}, plain launches"](case)

    rows = step.measure(bench, TINY, [50], [6], {**step.WAYS, f"{OURS}, shifted": shifted})
    found = {(row["implementation"], row["nodes"]): row for row in rows}
    for nodes in (1, 6):
        row = found[f"{OURS}, plain launches", nodes]
        assert row["status"] == "ok" and row["layers"] == TINY.n_layers
        assert found[f"{OURS}, shifted", nodes]["status"] == "wrong" and "ms" not in found[f"{OURS}, shifted", nodes]
        assert found[f"{OURS}, CUDA graph", nodes]["status"] == "not available"
    assert found[f"{OURS}, plain launches", 1]["over_one_row"] == 1.0


def test_what_the_budget_does_not_allow_is_named(bench):
    bench.begun = time.monotonic() - 601
    rows = [
        *attention.measure(bench, TINY, [33], [9]),
        *loss.measure(bench, TINY, 40),
        *step.measure(bench, TINY, [33], [9]),
    ]
    assert len(rows) == len(attention.IMPLEMENTATIONS) + len(loss.IMPLEMENTATIONS) + 2 * len(step.WAYS)
    assert {row["status"] for row in rows} == {"not measured"} and all("600 s" in row["reason"] for row in rows)


def test_the_rule():
    exact = torch.tensor([1.0, -2.0, 3.0])
    plain = exact + torch.tensor([0.0, 0.01, 0.0])
    assert too_far(exact + 0.0199, exact, plain) is None
    assert too_far(exact + 0.03, exact, plain) == "max error 0.03, allowed 0.0201"
    assert too_far(exact + 0.017, exact, plain, times=3, largest=False) is None
    assert too_far(exact + float("nan"), exact, plain) == "max error nan, allowed 0.0201"
    assert too_far(exact[:2], exact, plain) == "shape (2,) instead of (3,)"


def test_figures_by_hand(bench):
    """8 MB and 16 MFLOP in 8 ms, on 2 GB/s of copy and 8 GFLOP/s (fp32's, which bf16 may use)."""
    found = figures(bench, 0.008, Work(8_000_000, 16_000_000))
    assert found["ms"] == 8
    assert found["bytes_per_second"] == pytest.approx(1e9) and found["share_of_copy"] == pytest.approx(0.5)
    assert found["flops_per_second"] == pytest.approx(2e9) and found["share_of_products"] == pytest.approx(0.25)
    rows = [{"implementation": OURS, "ms": 2.0}, {"implementation": "peer", "ms": 5.0}, {"implementation": "absent"}]
    compare(rows)
    assert [row.get("over_longdraft") for row in rows] == [1.0, 2.5, None]


def test_runs_take_turns_until_the_budget_is_spent(bench, monkeypatch):
    order = []
    monkeypatch.setattr(timing, "SPUN_OUT", 0)
    bench.in_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")})
    assert order == ["a", "b", "a", "b", "a", "b"]
    bench.begun, order[:] = time.monotonic() - 601, []
    bench.in_turns({"a": lambda: order.append("a")})
    assert order == ["a", "a"]


def test_ceilings_are_positive_and_peaks_are_counted(bench, monkeypatch):
    monkeypatch.setitem(CEILING_SIZES, "cpu", ((2**20, 32), (2**20, 32)))
    found = Bench(bench.device, bench.dtype, 2, 600.0, log=bench.log).ceilings
    assert min(found) > 0 and found.products(torch.float32) == found.fp32
    assert 0 <= peak_bytes(lambda: torch.ones(2**18) + 1, bench.device) - 2 * 2**20 < 100  # and a scalar


def test_a_table_says_why_there_is_no_time():
    row = {"profile": "tiny", "context": 7, "nodes": 2, "implementation": "peer", "status": "wrong", "reason": "max"}
    timed = row | {"implementation": "ours", "status": "ok", "ms": 1.5, "share_of_copy": 0.8}
    lines = run._lines([row, timed])
    assert lines[0].split() == ["profile", "context", "rows", "implementation", "ms", "of", "copy"]
    assert lines[2] == "tiny           7     2  peer            wrong: max"
    assert lines[3].split() == ["tiny", "7", "2", "ours", "1.500", "80%"]


@pytest.fixture
def small_ceilings(monkeypatch):
    """Measured on a MiB, not on what is larger than any cache."""
    monkeypatch.setitem(timing.CEILING_SIZES, "cpu", ((2**20, 32), (2**20, 32)))
    monkeypatch.setattr(timing, "FLUSHED", 2**20)


def test_gpu_check_runs_the_kernels_benchmarks_with_few_packages(tmp_path):
    """In a process tree in which these packages cannot be imported."""
    site = tmp_path / "site"
    site.mkdir()
    hide = f"import sys\nsys.modules.update(dict.fromkeys({ABSENT}))\n"
    for folder in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        hide += f"try:\n    exec(open({folder + '/sitecustomize.py'!r}).read())\nexcept OSError:\n    pass\n"
    (site / "sitecustomize.py").write_text(hide)
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "LONGDRAFT_TEST_DEVICE": "cpu", "PYTHONSAFEPATH": "1"}
    program = ROOT / "benchmarks/checks/gpu_check.py"
    command = [sys.executable, program, "--out", tmp_path, "--site", site, "--only", "kernel benchmarks", "training"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    made = json.loads((tmp_path / "gpu_check.json").read_text())
    training, benchmarks = made["stages"]
    assert training["name"] == "training" and training["passed"] is None and made["not_run"] == ["training"]
    assert training["not_run"] == "not installed: deepspeed, omegaconf, pyarrow, psutil" and "training" not in made
    assert benchmarks["name"] == "kernel benchmarks" and benchmarks["passed"] is made["passed"] is True
    found = made["kernel benchmarks"]
    assert {row["benchmark"] for row in found["results"]} == {"attention", "step", "loss"}
    assert all(row["ms"] > 0 for row in found["results"] if row["status"] == "ok")
    assert {row["status"] for row in found["results"]} == {"ok", "not available"}
    assert min(found["ceilings"].values()) > 0 and found["commit"] == made["commit"]
    assert found["versions"]["liger_kernel"] and {"date", "hardware", "threads", "seconds"} <= set(found)
    assert "Liger, head by head    not available: " in (tmp_path / "kernel_benchmarks.txt").read_text()


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
    rows = by_name(printed["results"])
    assert rows[OURS]["status"] == "wrong" and "ms" not in rows[OURS]
    assert "ms" in rows["SDPA, dense mask"] and "over_longdraft" not in rows["SDPA, dense mask"]


@pytest.mark.parametrize("words", [["speed"], ["--nodes", "129"], ["--turns", "0"], ["--device", "cuda"]])
def test_arguments_are_checked(words):
    with pytest.raises(SystemExit):
        run.read(["--device", "cpu", *words])


def test_a_gpu_that_cannot_be_used_is_not_passed_over(capsys, tmp_path, monkeypatch):
    """Its figures would be the CPU's."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device, "NODES", tmp_path)
    args = run.read(["--quick"])
    assert (args.device, args.profile, args.contexts, args.nodes) == ("cpu", ["smollm2-135m"], [1024], [1, 8])
    (tmp_path / "nvidia0").touch()
    with pytest.raises(SystemExit):
        run.read([])
    assert "PyTorch cannot use" in capsys.readouterr().err
