"""The draft on held-out rows: loss, how often each rank is right, and how often it is what the target would choose.

Not here: real decoding during training (evaluate.py).
Shapes: N tokens end to end, D hidden, P parts of the loss, K ranks, R sampled labels.
"""

from typing import Any

import torch
from torch import Tensor

from longdraft.kernels.linear_distillation import TargetStates
from longdraft.kernels.transfer import from_host
from longdraft.models.drafts.loss import IGNORED, RANKS, Part, Teaching
from longdraft.train.batches import Place, Rows, read_batch
from longdraft.train.methods import Method, MicroBatch
from longdraft.train.setup import Run
from longdraft.train.teacher import Teacher


@torch.no_grad()
def validate(run: Run, rows: Rows) -> dict[str, Any]:
    """Over `heldout.rows` rows spread evenly over the split (neighbours are often of one document), shared out among
    the ranks; all of them call it and get the same.

    Returns:
        loss: cross-entropy of the text, whatever is minimised; part_loss [P]: its mean in nats;
        rank_rates [P][K]: share of labels that are the part's (k+1)-th candidate;
        choice_rates [P][K]: share of about `heldout.choices` labels where it is the target's own argmax there;
        overlaps [P]: mean sum of min(p, q) there, p the target's distribution and q the draft's, at temperature 1;
        positions: how many labels the first part was counted over.
    """
    config, ranks, method, teacher = run.config, run.ranks, run.method, run.teacher
    n_parts = len(method.part_names)
    n_rows = min(config.heldout.rows, len(rows))
    totals = torch.zeros(n_parts, 2 + 2 * (RANKS + 1) + 1, dtype=torch.float64, device=ranks.device)
    degree = config.train.sequence_parallel  # ranks that read the same row
    n_readers = ranks.world_size // degree
    # Under ZeRO-3 every call of the engine is collective: a rank without a row left passes one without labels.
    for index in range(ranks.rank // degree, -(-n_rows // n_readers) * n_readers, n_readers):
        batch = read_batch(rows, [Place(0, min(index, n_rows - 1) * len(rows) // n_rows)])
        n_tokens = len(batch.tokens)
        eval_batches = method.eval_batches(batch, teacher.own_span(n_tokens))
        tokens_N = from_host(batch.tokens, ranks.device)
        output = teacher.forward(tokens_N, batch.borders, None, method.needs | {"post_norm"})
        assert output.post_norm is not None
        post_norm_ND = teacher.gather(output.post_norm, n_tokens)
        for micro_batch in eval_batches:
            if index >= n_rows:
                micro_batch = micro_batch.without_labels()
            labels, n_chosen, teaching = _choices(
                method, micro_batch, teacher, post_norm_ND, -(-config.heldout.choices // n_rows)
            )
            micro_batch = micro_batch.to(ranks.device)
            text, choice = (
                run.engine.deepspeed(*method.arguments(of, output, teacher), teacher.lm_head_VD, True, target)
                for of, target in ((micro_batch, None), (micro_batch._replace(parts=labels), teaching))
            )
            columns = [text.sums[:, None], text.n_labels[:, None], text.rank_counts, text.n_labels[:, None]]
            columns += [choice.rank_counts, from_host(torch.tensor(n_chosen)[:, None], ranks.device)]
            columns += [choice.overlaps[:, None]]
            totals += torch.cat([column.double() for column in columns], dim=1)
    totals = torch.tensor(ranks.sum(totals.flatten().tolist())).view(totals.shape)
    weights = method.loss_weights(totals[:, 1].tolist())
    return {
        "loss": sum(total * weight for total, weight in zip(totals[:, 0].tolist(), weights, strict=True)),
        "part_loss": (totals[:, 0] / totals[:, 1].clamp(min=1)).tolist(),
        "rank_rates": _rates(totals[:, 2 : 3 + RANKS]),
        "choice_rates": _rates(totals[:, 3 + RANKS : -1]),
        "overlaps": (totals[:, -1] / totals[:, -2].clamp(min=1)).tolist(),
        "positions": int(totals[0, 2 + RANKS]),
    }


def _choices(
    method: Method, micro_batch: MicroBatch, teacher: Teacher, post_norm_ND: Tensor, n: int
) -> tuple[list[Part], list[int], Teaching]:
    """About n labels a part, evenly spaced, each the target's own choice in place of the text, where the target is; how
    many were asked for: a choice that the draft cannot propose is ignored and counts as missed; and the target's whole
    distributions there. `micro_batch` is on the host, where all is decided that need not wait for the target."""
    parts, places = [], []
    for i, part in enumerate(micro_batch.parts):
        step = max(1, len(part.rows) // n)
        parts.append(Part(part.rows[::step][:n], part.labels[::step][:n]))
        places.append(method.chosen_after(micro_batch, i)[::step][:n].contiguous())
    asked = torch.cat(places).unique()  # the parts of one row ask for the same places
    device = post_norm_ND.device
    states_RD = post_norm_ND[from_host(asked, device)]
    choices, log_totals_R = teacher.choices(states_RD)
    labelled, taught = [], [from_host(torch.searchsorted(asked, place_R), device) for place_R in places]
    for part, taught_R in zip(parts, taught, strict=True):
        labels_R = method.as_labels(choices[taught_R])
        labelled.append(Part(from_host(part.rows, device), labels_R.masked_fill(labels_R < 0, IGNORED)))
    teaching = Teaching(TargetStates(states_RD, taught, log_totals_R), "kl", measure=True)
    return labelled, [len(part.rows) for part in parts], teaching


def _rates(counts_PK1: Tensor) -> list[list[float]]:
    """Rank counts and, in the last column, over how many, to fractions."""
    return (counts_PK1[:, :-1] / counts_PK1[:, -1:].clamp(min=1)).tolist()
