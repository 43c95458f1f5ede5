"""The same run on 1 and 2 ranks, under ZeRO 1, 2 and 3, in other passes, with the optimizer on the host; and its losses
against those committed as text."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from longdraft.data_prep.shards import ShardSet
from longdraft.models.hf import load_target
from longdraft.train.batches import read_batch, step_rows
from longdraft.train.checkpoint import WEIGHTS
from longdraft.train.config_file import load_config
from longdraft.train.methods.build import frequent_tokens, open_method
from longdraft.train.teacher import Teacher
from longdraft.train.tracking import read_metrics

GOLDEN = Path(__file__).parent
PREFIXES = {"tokenswift": "", "longspec": "longspec-"}
# Runs that must equal the reference run of their method, {prefix}{precision}-1-1.
SAME = [
    "fp32-1-3", "fp32-2-1", "fp32-2-2", "fp32-2-3", "longspec-fp32-2-1", "longspec-fp32-2-3", "offload-2", "offload-3",
    "micro-1", "micro-4", "longspec-micro-1",
]  # fmt: skip
SAME_IN_BF16 = ["bf16-1-3", "bf16-2-2", "bf16-2-3", "longspec-bf16-2-2"]
GOLDEN_RUNS = {
    "linear_chain": "fp32-1-1",
    "silu_chain": "silu_chain",
    "medusa": "medusa",
    "longspec": "longspec",
    "longspec_anchored": "longspec-anchored",
}


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step_{step:06d}" / WEIGHTS)


@pytest.mark.parametrize("kind", GOLDEN_RUNS)
def test_golden_losses(runs, losses, kind):
    """20 steps in fp32 on one rank. Whoever changes what training computes commits the new losses and says why."""
    golden = [float(line) for line in (GOLDEN / f"golden_{kind}.txt").read_text().split()]
    assert len(golden) == 20 and golden[-1] < golden[0]
    torch.testing.assert_close(losses(runs / GOLDEN_RUNS[kind]), golden, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", ["linear_chain", "longspec", "longspec_anchored"])
def test_a_plain_loop_gives_the_same_losses(runs, losses, kind):
    """Row by row, with PyTorch's AdamW and clipping, and one backward pass for a step's whole loss."""
    config = load_config(runs / GOLDEN_RUNS[kind] / "config.yaml")
    target, train, optimizer = load_target(config.target.path, torch.float32), config.train, config.optimizer
    rows, ids = ShardSet(Path(config.data.path) / "train"), None
    if kind == "longspec_anchored":
        ids = frequent_tokens(rows, 97, 80, target.eos_token_ids)
    method, teacher = open_method(config.draft, config.data, config.train, target.model, ids), Teacher(target.model)
    weights = list(method.draft.parameters())
    groups = [
        {"params": [w for w in weights if w.ndim == 2], "weight_decay": optimizer.weight_decay},
        {"params": [w for w in weights if w.ndim == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, betas=optimizer.betas, eps=optimizer.eps)
    found = []
    for step in range(20):
        passes = []
        for place in step_rows(train.seed, step, len(rows), train.global_batch):
            micro_batch = method.micro_batch(read_batch(rows, [place]))
            seen = teacher.forward(
                micro_batch.batch.tokens, micro_batch.batch.borders, micro_batch.positions, method.needs
            )
            passes.append(
                method.draft(method.inputs(micro_batch, seen, teacher), micro_batch.parts, teacher.lm_head_VD, False)
            )
        sums, n_labels = (sum(field) for field in list(zip(*passes, strict=True))[:2])
        loss = (sums / n_labels).sum() if kind == "linear_chain" else sums.sum() / n_labels.sum()
        found.append(loss.item())
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, optimizer.clip)
        for group in adam.param_groups:
            warm = (step + 1) / 4
            group["lr"] = 5e-3 * (warm if step < 4 else (1 + math.cos(math.pi * (step - 4) / 16)) / 2)
        adam.step()
    torch.testing.assert_close(found, losses(runs / GOLDEN_RUNS[kind]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", SAME)
def test_fp32_weights_agree(runs, name):
    prefix = "longspec-" if name.startswith("longspec-") else ""
    step = 8 if prefix else 20 if name == "fp32-2-1" else 10
    expected, got = weights(runs / f"{prefix}fp32-1-1", step), weights(runs / name, step)
    assert expected.keys() == got.keys()
    for key, weight in expected.items():
        error = ((got[key] - weight).norm() / weight.norm()).item()
        assert error <= 1e-5, f"{key}: relative error {error}"


@pytest.mark.parametrize("name", SAME_IN_BF16)
def test_bf16_losses_agree(runs, losses, name):
    prefix = "longspec-" if name.startswith("longspec-") else ""
    expected, got = losses(runs / f"{prefix}bf16-1-1"), losses(runs / name)
    assert len(got) == (8 if prefix else 10)
    torch.testing.assert_close(got, expected[: len(got)], rtol=5e-3, atol=0)


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_bf16_keeps_fp32_masters(runs, losses, prefix):
    """A rate far below bf16's resolution of a weight still moves it over 20 steps, and the losses follow those of
    fp32."""
    assert all(
        weight.dtype == torch.bfloat16 for weight in weights(runs / f"{prefix}bf16-1-1", 8 if prefix else 20).values()
    )
    torch.testing.assert_close(
        losses(runs / f"{prefix}bf16-1-1"), losses(runs / f"{prefix}fp32-1-1"), rtol=2e-2, atol=0
    )


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_metrics_have_what_the_plots_need(runs, prefix):
    records = read_metrics(runs / f"{prefix}fp32-2-1")
    steps = [record for record in records if "loss" in record]
    assert [record["step"] for record in steps] == list(range(1, 9 if prefix else 21))
    for record in steps:
        assert len(record["part_loss"]) == len(record["top1"]) == len(record["top3"]) == 3
        if prefix:  # every label counts alike, whatever its part
            counted = [loss for loss in record["part_loss"] if loss is not None]
            assert min(counted) <= record["loss"] <= max(counted)
        else:
            assert sum(record["part_loss"]) == pytest.approx(record["loss"])
        assert all(0 <= one <= three <= 1 for one, three in zip(record["top1"], record["top3"], strict=True))
        assert record["over_target"] > 1 and record["tokens_per_s"] > 0 and record["grad_norm"] > 0
        assert record["tflops_per_rank"] > 0 and record["objective"] in ("cross_entropy", "kl")
        assert not {"peak_memory_gib"} & record.keys()  # of a GPU alone
        assert record["skipped"] == 0
    heldout = [record for record in records if "heldout_loss" in record]
    assert [record["step"] for record in heldout] == ([8] if prefix else [10, 20])
