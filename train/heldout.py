"""The draft on held-out rows: loss, how often each rank is right, and how often it is what the target would choose.

Not here: real decoding during training (evaluate.py).
Shapes: N tokens end to end, D hidden, P parts of the loss, K ranks, R sampled labels.
"""

from typing import Any

import torch
from torch import Tensor

from longdraft.models.drafts.loss import RANKS, Part
from longdraft.train.batches import Place, Rows, read_batch
from longdraft.train.config import Config
from longdraft.train.engine import DraftEngine
from longdraft.train.methods import Method, Work
from longdraft.train.teacher import Teacher


@torch.no_grad()
def evaluate(config: Config, method: Method, engine: DraftEngine, teacher: Teacher, rows: Rows) -> dict[str, Any]:
    """Over `heldout.rows` rows spread evenly over the split (neighbours are often of one document), shared out among
    the ranks; all of them call it and get the same.

    Returns:
        loss: as it is minimised; part_loss [P]: mean cross-entropy in nats;
        rank_rates [P][K]: share of labels that are the part's (k+1)-th candidate;
        choice_rates [P][K]: share of about `heldout.choices` labels where it is the target's own argmax there;
        positions: how many labels the first part was counted over.
    """
    ranks, n_parts = engine.ranks, len(method.part_names)
    n_rows = min(config.heldout.rows, len(rows))
    totals = torch.zeros(n_parts, 2 + 2 * (RANKS + 1), dtype=torch.float64)
    degree = config.train.sequence_parallel  # ranks that read the same row
    n_readers = ranks.world_size // degree
    # Under ZeRO-3 every call of the engine is collective: a rank without a row left passes one without labels.
    for index in range(ranks.rank // degree, -(-n_rows // n_readers) * n_readers, n_readers):
        batch = read_batch(rows, [Place(0, min(index, n_rows - 1) * len(rows) // n_rows)])
        n_tokens = len(batch.tokens)
        probes = [work.to(ranks.device) for work in method.probes(batch, teacher.share(n_tokens))]
        seen = teacher.look(probes[0].batch.tokens, batch.borders, None, method.needs | {"post_norm"})
        assert seen.post_norm is not None
        post_norm_ND = teacher.whole(seen.post_norm, n_tokens)
        for work in probes:
            if index >= n_rows:
                work = work.without_labels()
            chosen, n_chosen = _choices(method, work, teacher, post_norm_ND, -(-config.heldout.choices // n_rows))
            text, choice = (
                engine(*method.arguments(of, seen, teacher), teacher.lm_head_VD, True) for of in (work, chosen)
            )
            columns = [text.sums[:, None], text.n_labels[:, None], text.rank_counts, text.n_ranked[:, None]]
            columns += [choice.rank_counts, torch.tensor(n_chosen)[:, None]]
            totals += torch.cat([column.double().cpu() for column in columns], dim=1)
    totals = torch.tensor(ranks.sum(totals.flatten().tolist())).view_as(totals)
    shares = method.shares(totals[:, 1].tolist())
    return {
        "loss": sum(total * share for total, share in zip(totals[:, 0].tolist(), shares, strict=True)),
        "part_loss": (totals[:, 0] / totals[:, 1].clamp(min=1)).tolist(),
        "rank_rates": _rates(totals[:, 2 : 3 + RANKS]),
        "choice_rates": _rates(totals[:, 3 + RANKS :]),
        "positions": int(totals[0, 2 + RANKS]),
    }


def _choices(method: Method, work: Work, teacher: Teacher, post_norm_ND: Tensor, n: int) -> tuple[Work, list[int]]:
    """The same pass with about n labels a part, evenly spaced, each the target's own choice in place of the text, and
    how many were asked for: a choice that the draft cannot say has no label and counts as missed."""
    parts, places = [], []
    for i, part in enumerate(work.parts):
        step = max(1, len(part.rows) // n)
        parts.append(Part(part.rows[::step][:n], part.labels[::step][:n]))
        places.append(method.chosen_after(work, i)[::step][:n].contiguous())
    asked = torch.cat(places).unique()  # the parts of one row ask for the same places
    choices = teacher.choices(post_norm_ND[asked])
    labelled = []
    for part, place_R in zip(parts, places, strict=True):
        labels_R = method.as_labels(choices[torch.searchsorted(asked, place_R)])
        labelled.append(Part(part.rows[labels_R >= 0], labels_R[labels_R >= 0]))
    return work._replace(parts=labelled), [len(part.rows) for part in parts]


def _rates(counts_PK1: Tensor) -> list[list[float]]:
    """Rank counts and, in the last column, over how many, to shares."""
    return (counts_PK1[:, :-1] / counts_PK1[:, -1:].clamp(min=1)).tolist()
