"""What is wrong is not timed, what is absent is named, and figures follow from times."""

import time

import pytest
import torch

from longdraft.benchmarks.drafters.timing import peak_bytes
from longdraft.benchmarks.kernels import attention, decode, loss, report, step
from longdraft.benchmarks.kernels.attention import make_case
from longdraft.benchmarks.kernels.candidates import OURS, figures, ratios, too_far
from longdraft.benchmarks.kernels.profiles import PROFILES, Work
from longdraft.benchmarks.kernels.timing import CEILING_SIZES, Bench, Times
from longdraft.kernels.cpu.library import library

TINY = PROFILES["tiny"]


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
        # Last, for it changes the case.
        f"{OURS}, chain": without_the_tree,
    }
    found = by_name(attention.measure(bench, TINY, [33], [9], candidates))
    assert found[OURS]["status"] == "ok" and found[OURS]["ms"] > 0
    for name in (f"{OURS}, wrong", f"{OURS}, chain"):
        assert found[name]["status"] == "wrong" and "ms" not in found[name]
        assert found[name]["reason"].startswith("max error")
    assert "nan" in found[f"{OURS}, wrong"]["reason"]
    assert (found[f"{OURS}, raises"]["status"], found["peer that raises"]["status"]) == ("failed", "not available")
    assert found["peer that raises"]["reason"] == "RuntimeError: no kernel image"


@pytest.mark.parametrize("nodes", [1, 9])
def test_every_peer_of_attention_is_right_or_named(bench, nodes):
    found = by_name(attention.measure(bench, TINY, [1, 70], [nodes]))
    assert set(found) == set(attention.IMPLEMENTATIONS)
    in_c = set() if library() is None else {f"{OURS}, C"}
    assert {name for name, row in found.items() if row["status"] == "ok"} == {
        OURS, "SDPA, dense mask", "PyTorch flash prefix + tree", *in_c,
    }  # fmt: skip
    assert in_c or "no C compiler" in found[f"{OURS}, C"]["reason"]
    assert found["flash-attn prefix + tree"]["reason"] == "flash-attn needs a CUDA device"
    assert "Triton needs a CUDA device" in found[f"{OURS}, Triton"]["reason"]
    assert "--quick" in found["FlexAttention, block mask"]["reason"]
    assert found[OURS]["over_longdraft"] == 1.0


def test_where_the_reference_does_not_fit_a_smaller_case_is_compared(bench, monkeypatch):
    """Free memory for K and V twice, but not for all scores."""
    work = TINY.attention_work(200, 9, 2)
    monkeypatch.setattr(attention, "free_bytes", lambda _: 3 * work.bytes)
    candidates = {OURS: attention.IMPLEMENTATIONS[OURS], f"{OURS}, wrong": reads_the_tail}
    found = by_name(attention.measure(bench, TINY, [200], [9], candidates))
    assert (found[OURS]["status"], found[f"{OURS}, wrong"]["status"]) == ("ok", "wrong")
    monkeypatch.setattr(attention, "free_bytes", lambda _: work.bytes)
    found = by_name(attention.measure(bench, TINY, [200], [9], candidates))
    assert {row["status"] for row in found.values()} == {"not measured"}


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
    assert found["loss"]["reason"].startswith("loss: max error") and "ms" not in found["loss"]
    assert found["gradient"]["reason"].startswith("gradient: norm of the error") and "ms" not in found["gradient"]
    assert found["Liger, head by head"]["status"] == "not available"
    for name in (OURS, f"{OURS}, PyTorch", "PyTorch, head by head"):
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
        assert row["bytes"] == TINY.step_work(50, nodes, 2, 2).bytes
        assert found[f"{OURS}, shifted", nodes]["status"] == "wrong" and "ms" not in found[f"{OURS}, shifted", nodes]
        assert found[f"{OURS}, CUDA graph", nodes]["reason"] == "CUDA graphs need a CUDA device"
    assert found[f"{OURS}, plain launches", 1]["over_one_row"] == 1.0


def test_decoding_that_differs_from_transformers_has_no_time(bench, monkeypatch):
    made = decode.target_from_transformers

    def changed(model):
        target = made(model)
        target.model.norm.weight = torch.nn.Parameter(-target.model.norm.weight)
        return target

    monkeypatch.setattr(decode, "target_from_transformers", changed)
    (row,) = decode.measure(bench, TINY, [20], 4)
    assert row["status"] == "wrong" and "tokens in fp32 are not transformers'" in row["reason"] and "ms" not in row


def test_what_the_budget_does_not_allow_is_named(bench):
    bench.begun = time.monotonic() - 601
    rows = [
        *attention.measure(bench, TINY, [33], [9]),
        *loss.measure(bench, TINY, 40),
        *step.measure(bench, TINY, [33], [9]),
        *decode.measure(bench, TINY, [33], 4),
    ]
    assert len(rows) == len(attention.IMPLEMENTATIONS) + len(loss.IMPLEMENTATIONS) + 2 * len(step.WAYS) + 2
    assert {(row["status"], row["reason"]) for row in rows} == {("not measured", "the budget of 600 s was spent")}
    assert all("context" in row or "rows" in row for row in rows)


def test_the_rule():
    exact = torch.tensor([1.0, -2.0, 3.0])
    plain = exact + torch.tensor([0.0, 0.01, 0.0])
    assert too_far(exact + 0.0199, exact, plain) is None
    assert too_far(exact + 0.03, exact, plain) == "max error 0.03, allowed 0.0201"
    assert too_far(exact + 0.017, exact, plain, times=3, largest=False) is None
    assert too_far(exact + float("nan"), exact, plain) == "max error nan, allowed 0.0201"
    assert too_far(exact[:2], exact, plain) == "shape (2,) instead of (3,)"


def test_figures_by_hand(bench):
    """8 MB and 16 MFLOP in 8 ms, on 2 GB/s of copy, 4 GB/s of reading, 8 GFLOP/s (fp32's, which bf16 may use)."""
    found = figures(bench, Times(0.008, 0.004, 0.1, 5), Work(8_000_000, 16_000_000))
    assert found["ms"] == 8 and found["least_ms"] == 4
    assert found["bytes_per_second"] == pytest.approx(1e9) and found["share_of_copy"] == pytest.approx(0.5)
    assert found["flops_per_second"] == pytest.approx(2e9) and found["share_of_products"] == pytest.approx(0.25)
    assert found["over_floor"] == pytest.approx(4)
    rows = [{"implementation": OURS, "ms": 2.0}, {"implementation": "peer", "ms": 5.0}, {"implementation": "absent"}]
    ratios(rows)
    assert [row.get("over_longdraft") for row in rows] == [1.0, 2.5, None]


def test_times_of_turns():
    assert Times.of([3.0, 1.0, 2.0, 5.0, 4.0]) == (3.0, 1.0, pytest.approx(2 / 3), 5)
    assert Times.of([2.0]) == (2.0, 2.0, 0.0, 1)


def test_runs_take_turns_behind_a_cold_cache(bench, monkeypatch):
    order = []
    monkeypatch.setattr(bench, "cold", lambda: order.append("cold"))
    bench.in_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")})
    assert order == ["a", "a", "b", "b", "cold", "a", "cold", "b", "cold", "a", "cold", "b"]


def test_ceilings_are_positive_and_peaks_are_counted(bench, monkeypatch):
    monkeypatch.setitem(CEILING_SIZES, "cpu", ((2**20, 32), (2**20, 32)))
    found = Bench(bench.device, bench.dtype, 2, 600.0, log=bench.log).ceilings
    assert min(found) > 0
    assert found.memory == max(found.copy, found.read)
    assert found.products(torch.float32) == found.fp32
    assert 0 <= peak_bytes(lambda: torch.ones(2**18) + 1, bench.device) - 2 * 2**20 < 100  # and a scalar


def test_a_table_says_why_there_is_no_time():
    row = {"profile": "tiny", "context": 7, "nodes": 2, "implementation": "peer", "status": "wrong", "reason": "max"}
    timed = row | {"implementation": "ours", "status": "ok", "ms": 1.5, "spread": 0.25, "share_of_copy": 0.8}
    lines = report._lines(report.COLUMNS["attention"], [row, timed])
    assert lines[0].split()[:4] == ["profile", "context", "rows", "implementation"]
    assert lines[2] == "tiny           7     2  peer            wrong: max"
    assert lines[3].split() == ["tiny", "7", "2", "ours", "1.500", "25%", "80%"]
