"""The kernels' benchmarks: what is wrong is not timed, what is absent is named, and figures follow from times."""

import json
import time

import pytest
import torch

from longdraft.benchmarks.drafters.timing import peak_bytes
from longdraft.benchmarks.kernels import attention, loss, race, run, step
from longdraft.benchmarks.kernels.attention import make_case
from longdraft.benchmarks.kernels.profiles import PROFILES, Work
from longdraft.benchmarks.kernels.race import OURS, Bench, NotTimed, check_error
from longdraft.models.footprint import weight_count

TINY = "tiny"


def by_name(rows: list[dict]) -> dict[str, dict]:
    return {row["implementation"]: row for row in rows}


def without_the_tree(case):
    """Every row of the pass reads all rows before it, as if the tree were a chain."""
    run = attention.IMPLEMENTATIONS[OURS]
    case.tree_1NN = case.tree_1NN.new_ones(case.tree_1NN.shape).tril()
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


def test_folding_heads_and_back(bench):
    case = make_case(bench, TINY, 5, 3)
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
    assert "max error" in found["loss"]["reason"] and "ms" not in found["loss"]
    assert "norm of the error" in found["gradient"]["reason"] and "ms" not in found["gradient"]
    assert found["Liger, head by head"]["status"] == "not available"
    for name in (OURS, "PyTorch, head by head"):
        assert found[name]["status"] == "ok"
        assert found[name]["peak_bytes"] >= 3 * 40 * PROFILES[TINY].hidden_size * 2  # the gradients at least


def test_a_step_is_timed_by_its_rows_with_as_many_layers_as_fit(bench, monkeypatch):
    weights = weight_count(PROFILES[TINY])
    for free, layers in ((4 * weights * 2, 2), (weights * 2, 1)):  # bytes in bf16, of which 70 % are taken
        monkeypatch.setattr(Bench, "free_bytes", free)
        rows = step.measure(bench, TINY, [50], [6])
        found = {(row["implementation"], row["nodes"]): row for row in rows}
        for nodes in (1, 6):
            row = found[f"{OURS}, plain launches", nodes]
            assert row["status"] == "ok" and row["layers"] == layers and row["ms"] > 0
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


@pytest.mark.parametrize(
    ("out", "options", "reason"),
    [
        (0.0199, {}, None),
        (0.03, {}, "max error 0.03, allowed 0.0201"),
        (0.017, {"times": 3, "largest": False}, None),
        (float("nan"), {}, "max error nan, allowed 0.0201"),
    ],
)
def test_the_rule(out, options, reason):
    exact = torch.tensor([1.0, -2.0, 3.0])
    given = exact + out, exact, exact + torch.tensor([0.0, 0.01, 0.0])
    if reason is None:
        check_error(*given, **options)
        return
    with pytest.raises(NotTimed) as wrong:
        check_error(*given, **options)
    assert (wrong.value.status, str(wrong.value)) == ("wrong", reason)


def test_figures_by_hand(bench):
    """8 MB and 16 MFLOP in 8 ms, on 2 GB/s of copy and 8 GFLOP/s (fp32's, which bf16 may use)."""
    found = bench.figures(0.008, Work(8_000_000, 16_000_000))
    assert found["ms"] == 8
    assert found["bytes_per_second"] == pytest.approx(1e9) and found["share_of_copy"] == pytest.approx(0.5)
    assert found["flops_per_second"] == pytest.approx(2e9) and found["share_of_products"] == pytest.approx(0.25)


def test_runs_take_turns_after_a_warm_up(bench, monkeypatch):
    order = []
    monkeypatch.setattr(race, "SPUN_OUT", 0)
    bench.in_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")})
    assert order == ["a", "b", "a", "b", "a", "b"]


def test_ceilings_are_positive_and_peaks_are_counted(bench, monkeypatch):
    monkeypatch.setitem(race.CEILING_SIZES, "cpu", (2**20, 32))
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
    monkeypatch.setitem(race.CEILING_SIZES, "cpu", (2**20, 32))
    monkeypatch.setattr(race, "FLUSHED", 2**20)


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


def test_defaults_and_arguments_that_are_refused():
    args = run.read(["--quick", "--device", "cpu"])
    assert (args.profile, args.contexts, args.nodes) == (["smollm2-135m"], [1024], [1, 8])
    for words in (["speed"], ["--nodes", "129"], ["--turns", "0"], ["--device", "cuda"]):
        with pytest.raises(SystemExit):
            run.read(["--device", "cpu", *words])
