"""What is logged of a step, and where the time of the last ones went.

Shapes: P parts of the loss, K ranks counted.
"""

from collections.abc import Collection
from statistics import median
from typing import Any

import torch

from longdraft.models.drafts.loss import RANKS
from longdraft.train.agreement import await_agreement
from longdraft.train.run import Run
from longdraft.train.step import StepResult

# The parts of a step's time (`StepResult.parts`), and what they are called.
PARTS = {"target": "the target's passes", "draft": "draft and loss", "backward": "backward and update"}


def measure(run: Run, result: StepResult) -> dict[str, Any]:
    """The step's line in metrics.jsonl, over all ranks; all ranks call it.

    `loss`: as it is minimised. `part_loss`: the mean of each part in nats, None without labels. `top1`, `top3`: the
    share of each part's labels that are the draft's first candidate, or among its first three. `{part}_share`: the
    share of the first rank's time in each of PARTS. `over_target`: the step's time over that of its target's passes;
    estimate_operations.py says what it could be.
    """
    await_agreement(run)
    loss, n_parts = result.loss, len(run.method.part_names)
    sums = torch.cat([loss.sums[:, None], loss.rank_counts, loss.n_labels[:, None]], dim=1).double()
    totals = torch.tensor(run.ranks.sum(sums.flatten().tolist())).view(n_parts, RANKS + 2)
    weights = run.method.loss_weights(result.n_labels)
    loss_sums = totals[:, 0].tolist()
    rates = totals[:, 1:-1].cumsum(1) / totals[:, -1:].clamp(min=1)
    tokens = run.config.train.global_batch * run.config.data.seq_len
    return {
        "step": run.step,
        "tokens": run.step * tokens,
        "loss": sum(total * weight for total, weight in zip(loss_sums, weights, strict=True)),
        "part_loss": [total / n if n else None for total, n in zip(loss_sums, result.n_labels, strict=True)],
        "top1": rates[:, 0].tolist(),
        "top3": rates[:, RANKS - 1].tolist(),
        "lr": result.rate,
        "grad_norm": run.engine.grad_norm(),
        "skipped": run.skipped,
        "step_s": result.seconds,
        "tokens_per_s": tokens / result.seconds,
        **{f"{part}_share": seconds / result.seconds for part, seconds in result.parts.items()},
        "over_target": result.seconds / result.parts["target"],
    }


def where_time_goes(records: Collection[dict[str, Any]], r: float | None) -> str:
    """One line about logged steps, by medians. `r`: the time of a step over its target's passes if all operations were
    equally fast (estimate_operations.py); None where it is not known."""
    seconds, ratio = (median(record[key] for record in records) for key in ("step_s", "over_target"))
    shares = {part: median(record[f"{part}_share"] for record in records) for part in PARTS}
    by_count = "" if r is None else f" ({r:.2f} by count of operations)"
    parts = [f"{PARTS[part]} {share:.0%}" for part, share in shares.items()]
    rest = max(0.0, 1 - sum(shares.values()))  # medians of shares need not add up to 1
    return (
        f"A step took {seconds:.2f} s, {ratio:.2f} times its target's passes{by_count}: "
        f"{', '.join(parts)}, the rest {rest:.0%}"
    )
