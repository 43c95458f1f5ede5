"""What is logged of a step, and where the time of the last ones went.

Shapes: P parts of the loss, K ranks counted.
"""

from collections.abc import Collection
from statistics import median
from typing import Any

import torch

from longdraft.models.drafts.loss import RANKS
from longdraft.train.estimate import Operations, operations
from longdraft.train.run import Run
from longdraft.train.step import StepResult, read_sums

# The parts of a step's time (`StepResult.parts`), and what they are called.
PARTS = {"target": "the target's passes", "draft": "draft and loss", "backward": "backward and update"}
# By PyTorch's name of a GPU: the TFLOP/s of its products in bf16 without sparsity, from NVIDIA's data sheets.
PEAKS = {
    "NVIDIA A100-SXM4-40GB": 312.0, "NVIDIA A100-SXM4-80GB": 312.0, "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0, "NVIDIA H100 80GB HBM3": 989.4, "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.0, "NVIDIA H200": 989.4, "NVIDIA L40S": 362.0, "NVIDIA RTX A6000": 154.8,
    "NVIDIA GeForce RTX 4090": 165.2,
}  # fmt: skip


def measure(run: Run, result: StepResult) -> dict[str, Any]:
    """The step's line in metrics.jsonl, over all ranks; all ranks call it.

    `loss`: as it is minimised, by `objective`; None without labels. `part_loss`: the mean of each part in nats. `top1`,
    `top3`: the share of each part's labels that are the draft's first candidate, or among its first three; of a part
    without labels all are None. `{part}_share`: the share of the first rank's time in each of PARTS. `over_target`: the
    step's time over that of its target's passes; estimate.py says what it could be. Others: `_speed`.
    """
    read_sums(run)
    loss, n_parts = result.loss, len(run.method.part_names)
    sums = torch.cat([loss.sums[:, None], loss.rank_counts, loss.n_labels[:, None]], dim=1).double()
    totals = torch.tensor(run.ranks.sum(sums.flatten().tolist())).view(n_parts, RANKS + 2)
    weights = run.method.loss_weights(result.n_labels)
    loss_sums = totals[:, 0].tolist()
    rates = [(row[1:-1].cumsum(0) / row[-1]).tolist() if row[-1] else [None] * RANKS for row in totals]
    tokens = run.config.train.global_batch * run.config.data.seq_len
    distillation = run.config.train.distillation(run.step - 1)
    loss_sum = sum(total * weight for total, weight in zip(loss_sums, weights, strict=True))
    return {
        "step": run.step,
        "tokens": run.step * tokens,
        "loss": loss_sum if any(result.n_labels) else None,
        "objective": distillation[0] if distillation else "cross_entropy",
        "part_loss": [total / n if n else None for total, n in zip(loss_sums, result.n_labels, strict=True)],
        "top1": [part[0] for part in rates],
        "top3": [part[-1] for part in rates],
        "lr": result.rate,
        "grad_norm": run.engine.grad_norm(),
        "skipped": run.skipped,
        "step_s": result.seconds,
        "tokens_per_s": tokens / result.seconds,
        **_speed(run, result, tokens),
        **{f"{part}_share": seconds / result.seconds for part, seconds in result.parts.items()},
        "over_target": result.seconds / result.parts["target"],
    }


def counted(run: Run) -> Operations | None:
    """The operations of a token; None for a target whose operations are not counted."""
    config = run.config
    if config.target.loader != "longdraft":
        return None
    return operations(config.draft, config.data, config.train.loss, run.teacher.model.config)


def _speed(run: Run, result: StepResult, tokens: int) -> dict[str, float]:
    """What a rank, which is a GPU or a process on a CPU, reached in the step.

    `tokens_per_s_per_rank`. `tflops_per_rank`: counted operations, in 10^12 a second. `share_of_peak`: that over what
    the first rank's card can do in bf16, where PEAKS has it. `peak_memory_gib`: of tensors, on the GPU that had most.
    """
    ranks, found = run.ranks, counted(run)
    speed = {"tokens_per_s_per_rank": tokens / result.seconds / ranks.world_size}
    if found is not None:
        operations_s = found.of_step(tokens, sum(result.n_labels)) / result.seconds
        speed["tflops_per_rank"] = operations_s / 1e12 / ranks.world_size
    if ranks.device.type == "cuda":
        speed["peak_memory_gib"] = max(ranks.gather(torch.cuda.max_memory_allocated(ranks.device))) / 2**30
        peak = PEAKS.get(torch.cuda.get_device_name(ranks.device))
        if peak and "tflops_per_rank" in speed and run.config.train.precision == "bf16":
            speed["share_of_peak"] = speed["tflops_per_rank"] / peak
    return speed


def where_time_goes(records: Collection[dict[str, Any]], r: float | None) -> str:
    """One line about logged steps, by medians. `r`: the time of a step over its target's passes if all operations were
    equally fast (estimate.py); None where it is not known."""
    seconds, ratio = (median(record[key] for record in records) for key in ("step_s", "over_target"))
    shares = {part: median(record[f"{part}_share"] for record in records) for part in PARTS}
    by_count = "" if r is None else f" ({r:.2f} by count of operations)"
    parts = [f"{PARTS[part]} {share:.0%}" for part, share in shares.items()]
    rest = max(0.0, 1 - sum(shares.values()))  # medians of shares need not add up to 1
    return (
        f"A step took {seconds:.2f} s, {ratio:.2f} times its target's passes{by_count}: "
        f"{', '.join(parts)}, the rest {rest:.0%}"
    )
