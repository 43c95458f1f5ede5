"""The kernels' benchmarks: what is wrong is not timed, what is absent is named, and figures follow from times."""

import json
from importlib import import_module
from unittest.mock import Mock

import pytest
import torch

from longdraft.benchmarks.drafters.timing import peak_bytes
from longdraft.benchmarks.kernels import attention, loss, product, race, run
from longdraft.benchmarks.kernels.attention import attention_work, make_case, random_tree
from longdraft.benchmarks.kernels.loss import loss_work
from longdraft.benchmarks.kernels.race import OURS, PROFILES, Bench, Profile, Wrong, check_error

TINY = "tiny"
SHORT = ["--profile", TINY, "--contexts", "40", "--nodes", "3", "--device", "cpu", "--quick"]


@pytest.fixture
def bench() -> Bench:
    """A short run in bf16 on the CPU, on a machine of round numbers."""
    made = Bench(torch.device("cpu"), torch.bfloat16, turns=2)
    made.ceilings = {"copy": 2e9, "products": 8e9}
    return made


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
        "raises": raises,
        f"{OURS}, chain": without_the_tree,  # last, for it changes the case
    }
    found = by_name(attention.measure(bench, TINY, 33, [9], candidates))
    assert "problem" not in found[OURS] and found[OURS]["ms"] > 0
    for name in (f"{OURS}, wrong", f"{OURS}, chain"):
        assert "ms" not in found[name] and found[name]["problem"].startswith("Wrong: max error")
    assert "nan" in found[f"{OURS}, wrong"]["problem"]
    assert found["raises"]["problem"] == "RuntimeError: no kernel image" and "ms" not in found["raises"]


@pytest.mark.parametrize("nodes", [1, 9])
@pytest.mark.parametrize("context", [1, 70])
def test_every_peer_of_attention_is_right(bench, context, nodes):
    found = by_name(attention.measure(bench, TINY, context, [nodes]))
    assert set(found) == set(attention.IMPLEMENTATIONS)
    assert not any("problem" in row for row in found.values())
    assert found[OURS]["over_longdraft"] == 1.0


def test_on_a_gpu_the_tuned_choice_is_beside_the_tables(monkeypatch):
    """As there, with Triton's interpreter in place of the GPU: both are right, and say how they were launched."""
    kernels = import_module("longdraft.kernels.triton.tree_attention")
    monkeypatch.setattr(attention.backend, "triton_kernels", lambda name, device: kernels)
    monkeypatch.setattr(attention.ours.rows, "can_attend", lambda _: False)
    launch, launched = kernels.tree_attention, []
    monkeypatch.setattr(kernels, "tree_attention", lambda *a, **k: launched.append(k.get("choice")) or launch(*a, **k))
    chosen, tuned = kernels.Choice(16, 32, 3, 4, 1), []

    def tune(*args) -> None:
        tuned.append(args[:9])
        for n_rows in args[8]:
            shape = kernels.tuning.shape_of(args[4], 1, n_rows, *args[:3], args[6], None)
            monkeypatch.setitem(kernels.tuning._chosen, (args[5], shape), chosen)

    monkeypatch.setattr(attention.ours, "tune", tune)
    bench = Bench(torch.device("cpu"), torch.float16, turns=1)
    bench.ceilings = {"copy": 2e9, "products": 8e9}
    found = attention.measure(bench, TINY, 40, [1, 9])
    shapes = [(4, 2, 16, [None], bench.dtype, bench.device, 40 + n + attention.SPARE, 1, [1, 9]) for n in (1, 9)]
    assert tuned == shapes
    assert set(launched) == {None, kernels.Choice(16, 64, 3, 4), kernels.Choice(32, 64, 3, 4)}
    for rows in (by_name(found[: len(found) // 2]), by_name(found[len(found) // 2 :])):
        assert "problem" not in rows[OURS] and "problem" not in rows[attention.BY_TABLE]
        assert rows[OURS]["choice"] == str(chosen) != rows[attention.BY_TABLE]["choice"]
        assert not rows["SDPA, dense mask"]["choice"]


def test_a_wrong_product_has_no_time(bench):
    ours, half = product.IMPLEMENTATIONS[OURS], lambda case: lambda: product.linear(case.x_MI / 2, case.weight_NI)
    rows = product.measure(bench, TINY, [1, 9], {OURS: ours, "half": half})
    assert [(row["outputs"], row["nodes"]) for row in rows[::2]] == [(64, 1), (64, 9), (512, 1), (512, 9)]
    assert all("ms" in row for row in rows[::2]) and all("norm of the error" in row["problem"] for row in rows[1::2])


@pytest.mark.parametrize("objective", loss.IMPLEMENTATIONS)
def test_a_wrong_loss_or_gradient_has_no_time(bench, objective):
    plain = loss.IMPLEMENTATIONS[objective][loss.PLAIN]

    def scaled(of_loss: float, of_gradient: float):
        def build(case):
            run = plain(case)
            return lambda: (run()[0] * of_loss, run()[1] * of_gradient)

        return build

    candidates = {**loss.IMPLEMENTATIONS[objective], "loss": scaled(1.01, 1.0), "gradient": scaled(1.0, 1.5)}
    found = by_name(loss.measure(bench, TINY, 40, objective, candidates))
    assert "max error" in found["loss"]["problem"] and "ms" not in found["loss"]
    assert "norm of the error" in found["gradient"]["problem"] and "ms" not in found["gradient"]
    assert "kl" in objective or "CUDA" in found["Liger, head by head"]["problem"]
    for name in (OURS, loss.PLAIN):
        assert found[name]["ms"] > 0
        assert found[name]["peak_mib"] >= 3 * 40 * PROFILES[TINY].hidden_size * 2 / 2**20  # the gradients at least


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
    with pytest.raises(Wrong, match=reason):
        check_error(*given, **options)


# 3 query heads on 1 key head of 4 numbers.
SMALL = Profile(vocab_size=10, hidden_size=12, n_heads=3, n_kv_heads=1, head_dim=4)


def test_work_by_hand():
    """Attention of 2 rows after 5: K and V of 7 rows of 4 numbers; 2 rows of 12 numbers in and out; pairs 2 * 5 + 3.
    Loss of 3 heads of 7 rows: logits and gradient, 2 FLOP each of 10 x 12; head once, states in and gradients out."""
    work = attention_work(SMALL, context=5, nodes=2, itemsize=2, tree_pairs=3)
    assert work.bytes == 2 * (2 * 7 * 4 + 2 * 2 * 12) and work.flops == 2 * 2 * 3 * 4 * 13
    tree = int(random_tree(64).sum())
    work = attention_work(PROFILES["llama3.1-8b"], 8192, 64, 2, tree)
    assert work.bytes == 33_816_576 + 1_048_576  # K and V; queries and output
    assert work.flops == 4 * 32 * 128 * (64 * 8192 + tree)
    work = loss_work(SMALL, rows=7, heads=3, itemsize=4)
    assert work.flops == 3 * 7 * 2 * (2 * 120) and work.bytes == 4 * (120 + 2 * 3 * 7 * 12)
    kl = loss_work(SMALL, rows=7, heads=3, itemsize=4, of_target=7)  # one product of the target's states for all heads
    assert kl.flops == work.flops + 7 * (2 * 120) and kl.bytes == work.bytes + 4 * 7 * 12


def test_figures_follow_from_the_time(bench, monkeypatch):
    """8 MB and 16 MFLOP in 8 ms, on 2 GB/s of copy and 8 GFLOP/s."""
    monkeypatch.setattr(Bench, "in_turns", lambda self, runs: dict.fromkeys(runs, 0.008))
    work = race.Work(8_000_000, 16_000_000)
    case = make_case(bench, TINY, 5, 1, random_tree(1))
    (row,) = race.race(bench, {}, {OURS: lambda case: lambda: None}, [case], work, Mock())
    assert row["ms"] == 8 and row["over_longdraft"] == 1
    assert row["share_of_copy"] == pytest.approx(0.5) and row["share_of_products"] == pytest.approx(0.25)


def test_runs_take_turns_after_a_warm_up(bench, monkeypatch):
    order = []
    monkeypatch.setattr(race, "SPUN_OUT", 0)
    bench.in_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")})
    assert order == ["a", "b", "a", "b", "a", "b"]


def test_ceilings_are_positive_and_peaks_are_counted(bench, small_ceilings):
    assert min(Bench(bench.device, bench.dtype, 2).ceilings.values()) > 0
    assert 0 <= peak_bytes(lambda: torch.ones(2**18) + 1, bench.device) - 2 * 2**20 < 100  # and a scalar


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
    assert run.main(["attention", *SHORT, "--out", str(tmp_path / "a.json")]) == 1
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((tmp_path / "a.json").read_text()) == printed and "Wrong" in (tmp_path / "a.txt").read_text()
    rows = by_name(printed["results"])
    assert rows[OURS]["problem"].startswith("Wrong") and "ms" not in rows[OURS]
    assert "ms" in rows["SDPA, dense mask"] and "over_longdraft" not in rows["SDPA, dense mask"]


def test_what_was_measured_is_there_if_the_run_is_ended(tmp_path, monkeypatch, small_ceilings):
    monkeypatch.setattr(loss, "measure", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run.main([*SHORT, "--out", str(tmp_path / "a.json")])
    made = json.loads((tmp_path / "a.json").read_text())
    assert {row["benchmark"] for row in made["results"]} == {"attention", "prompt", "linear"}


def test_defaults_and_arguments_that_are_refused():
    args = run.read(["--quick", "--device", "cpu"])
    assert (args.profile, args.contexts, args.nodes) == (["smollm2-135m"], [1024], [1, 8])
    for words in (["speed"], ["--nodes", "x"], ["--device", "cuda"]):
        with pytest.raises(SystemExit):
            run.read(["--device", "cpu", *words])
