"""The same run on 1 and 2 ranks and under ZeRO 1, 2 and 3; and its losses against those committed as text."""

from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from longdraft.train.state import WEIGHTS, newest
from longdraft.train.tracking import read_metrics

GOLDEN = Path(__file__).parent
REFERENCE = (1, 1)
OTHERS = [case for case in product((1, 2), (1, 2, 3)) if case != REFERENCE]


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(run) if "loss" in record]


def weights(run: Path) -> dict[str, torch.Tensor]:
    found = newest(run)
    assert found is not None and found[1]["step"] == 20
    return load_file(found[0] / WEIGHTS)


@pytest.mark.parametrize("kind", ["linear_chain", "silu_chain"])
def test_losses_are_the_golden_ones(runs, kind):
    golden = [float(line) for line in (GOLDEN / f"golden_{kind}.txt").read_text().split()]
    assert len(golden) == 20 and golden[-1] < golden[0]
    torch.testing.assert_close(losses(runs / kind), golden, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("n_ranks", "stage"), OTHERS)
def test_fp32_weights_agree(runs, n_ranks, stage):
    expected, got = weights(runs / "fp32-1-1"), weights(runs / f"fp32-{n_ranks}-{stage}")
    assert expected.keys() == got.keys()
    for name, weight in expected.items():
        error = ((got[name] - weight).norm() / weight.norm()).item()
        assert error <= 1e-5, f"{name}: relative error {error}"


@pytest.mark.parametrize(("n_ranks", "stage"), OTHERS)
def test_bf16_losses_agree(runs, n_ranks, stage):
    expected, got = losses(runs / "bf16-1-1"), losses(runs / f"bf16-{n_ranks}-{stage}")
    assert len(expected) == len(got) == 20
    torch.testing.assert_close(got, expected, rtol=5e-3, atol=0)


def test_bf16_keeps_fp32_masters(runs):
    """A rate far below bf16's resolution of a weight still moves it over 20 steps; the losses follow fp32's."""
    assert all(weight.dtype == torch.bfloat16 for weight in weights(runs / "bf16-1-1").values())
    torch.testing.assert_close(losses(runs / "bf16-1-1"), losses(runs / "fp32-1-1"), rtol=2e-2, atol=0)


def test_metrics_have_what_the_plots_need(runs):
    records = read_metrics(runs / "fp32-2-1")
    steps = [record for record in records if "loss" in record]
    assert [record["step"] for record in steps] == list(range(1, 21))
    for record in steps:
        assert len(record["head_loss"]) == len(record["top1"]) == len(record["top3"]) == 3
        assert sum(record["head_loss"]) == pytest.approx(record["loss"])
        assert all(0 <= one <= three <= 1 for one, three in zip(record["top1"], record["top3"], strict=True))
        assert 0 < record["target_share"] < 1 and record["tokens_per_s"] > 0 and record["grad_norm"] > 0
    heldout = [record for record in records if "heldout_loss" in record]
    assert [record["step"] for record in heldout] == [10, 20]
    one = [record for record in read_metrics(runs / "fp32-1-1") if "heldout_loss" in record]
    for key in ("heldout_loss", "heldout_rank_rates", "heldout_choice_rates", "heldout_positions"):
        torch.testing.assert_close(heldout[-1][key], one[-1][key], rtol=1e-4, atol=1e-6)
