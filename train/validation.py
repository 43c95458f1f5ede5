"""Validates the draft on held-out rows: its loss, and how often its candidates match the text and the target's choice.

Shapes: N tokens end to end, D hidden, P parts of the loss, K candidates, M sampled labels of a part, R their tokens.
"""

from typing import Any

import torch
from torch import Tensor

from longdraft.data_prep.shards import ShardSet
from longdraft.kernels.distillation import Distillation
from longdraft.kernels.linear_loss import IGNORED, LossPart
from longdraft.kernels.transfer import from_host
from longdraft.models.drafts.base import TOP_K
from longdraft.train.batches import EpochRow, read_batch
from longdraft.train.methods.base import Method, MicroBatch
from longdraft.train.setup import Run
from longdraft.train.teacher import Teacher


@torch.no_grad()
def validate(run: Run, rows: ShardSet) -> dict[str, Any]:
    """Measure the draft on `heldout.rows` rows, spread evenly over the split since neighbours often come from one
    document. The rows are divided among the ranks, which all call it and get the same result.

    Returns:
        loss: cross-entropy of the text, whatever train.loss is; None without labels. part_loss [P]: means in nats;
        rank_rates [P][K]: share of labels that are the part's (k+1)-th candidate;
        choice_rates [P][K]: share of about `heldout.choices` positions where that candidate is the target's argmax;
        overlaps [P]: mean sum of min(p, q) there, p the target's distribution and q the draft's, at temperature 1;
        positions: the number of labels of the first part.
        A part without labels has loss and overlap None; then all rates are None, since a tree needs those of all parts.
    """
    config, ranks, method, teacher = run.config, run.ranks, run.method, run.teacher
    n_parts = len(method.part_names)
    n_rows = min(config.heldout.rows, len(rows))
    n_choices = -(-config.heldout.choices // n_rows)
    totals = torch.zeros(n_parts, 2 * TOP_K + 4, dtype=torch.float64, device=ranks.device)
    degree = config.train.sequence_parallel  # the number of ranks that read the same row
    n_readers = ranks.world_size // degree
    # Under ZeRO-3 every call of the engine is collective: a rank that has no row left repeats one without labels.
    for index in range(ranks.rank // degree, -(-n_rows // n_readers) * n_readers, n_readers):
        batch = read_batch(rows, [EpochRow(0, min(index, n_rows - 1) * len(rows) // n_rows)])
        n_tokens = len(batch.tokens)
        eval_batches = method.eval_batches(batch, teacher.own_span(n_tokens))
        tokens_N = from_host(batch.tokens, ranks.device)
        output = teacher.forward(tokens_N, batch.borders, None, method.needs | {"post_norm"})
        assert output.post_norm is not None
        post_norm_ND = teacher.gather(output.post_norm, n_tokens)
        for micro_batch in eval_batches:
            if index >= n_rows:
                micro_batch = micro_batch.without_labels()
            labels, n_chosen, distillation = _choices(method, micro_batch, teacher, post_norm_ND, n_choices)
            micro_batch = micro_batch.to(ranks.device)
            inputs = method.inputs(micro_batch, output, teacher)
            text, choice = (
                run.engine.deepspeed(inputs, parts, teacher.lm_head_VD, True, taught)
                for parts, taught in ((micro_batch.parts, None), (labels, distillation))
            )
            chosen_P = from_host(torch.tensor(n_chosen), ranks.device)
            of_text, of_choices = [*text.top_k_counts.T, text.n_labels], [*choice.top_k_counts.T, chosen_P]
            columns = [text.sums, *of_text, *of_choices, choice.overlaps]
            totals += torch.stack([column.double() for column in columns], dim=1)
    totals = torch.tensor(ranks.sum(totals.flatten().tolist())).view(totals.shape)
    sums_P1, of_text_PK1, of_choices_PK1, _ = totals.split([1, TOP_K + 1, TOP_K + 1, 1], dim=1)
    losses, n_labels = sums_P1[:, 0].tolist(), of_text_PK1[:, -1].tolist()
    loss = sum(total * weight for total, weight in zip(losses, method.loss_weights(n_labels), strict=True))
    return {
        "loss": loss if any(n_labels) else None,
        "part_loss": [total / n if n else None for total, n in zip(losses, n_labels, strict=True)],
        "rank_rates": _rates(of_text_PK1),
        "choice_rates": _rates(of_choices_PK1),
        "overlaps": [total / n if n else None for n, total in totals[:, -2:].tolist()],
        "positions": int(n_labels[0]),
    }


def _choices(
    method: Method, micro_batch: MicroBatch, teacher: Teacher, post_norm_ND: Tensor, n: int
) -> tuple[list[LossPart], list[int], Distillation]:
    """About n evenly spaced labels of each part, with the target's own choice in place of the text.

    `micro_batch` is on the host, so that only the choices themselves wait for the target.

    Returns these parts, on the target's device; the number of labels of each; and the target's distributions there. A
    choice that the draft cannot propose is IGNORED but included in that number, so it counts as missed.
    """
    rows, places = [], []
    for i, part in enumerate(micro_batch.parts):
        step = max(1, len(part.rows) // n)
        rows.append(part.rows[::step][:n])
        places.append(method.target_rows(micro_batch, i)[::step][:n].contiguous())
    unique_R = torch.cat(places).unique()  # the parts of a row mostly need the same tokens
    device = post_norm_ND.device
    states_RD = post_norm_ND[from_host(unique_R, device)]
    choices_R, log_totals_R = teacher.choices(states_RD)
    parts, taught = [], [from_host(torch.searchsorted(unique_R, place_M), device) for place_M in places]
    for rows_M, taught_M in zip(rows, taught, strict=True):
        labels_M = method.as_labels(choices_R[taught_M])
        parts.append(LossPart(from_host(rows_M, device), labels_M.masked_fill(labels_M < 0, IGNORED)))
    distillation = Distillation(states_RD, taught, "kl", log_totals=log_totals_R, measure=True)
    return parts, [len(rows_M) for rows_M in rows], distillation


def _rates(counts_PK1: Tensor) -> list[list[float]] | None:
    """Counts by candidate, divided by the totals in the last column; None if a total is 0."""
    return (counts_PK1[:, :-1] / counts_PK1[:, -1:]).tolist() if counts_PK1[:, -1].all() else None
