"""The draft on held-out rows: loss, how often each rank is right, and how often it is what the target would choose.

Not here: real decoding during training.
Shapes: B rows (one here), T positions, D hidden, I heads, K ranks, R sampled positions.
"""

from typing import Any

import torch
from torch import Tensor

from longdraft.models.drafts.tokenswift import IGNORE, RANKS, HeadsLoss, chain_labels
from longdraft.train.batches import Batch, Rows, read_batch
from longdraft.train.config import Config
from longdraft.train.engine import DraftEngine
from longdraft.train.teacher import Teacher


@torch.no_grad()
def evaluate(config: Config, engine: DraftEngine, teacher: Teacher, rows: Rows) -> dict[str, Any]:
    """Over `heldout.rows` rows spread evenly over the split (neighbours are often of one document), shared out among
    the ranks; all of them call it and get the same.

    Returns:
        loss: sum of head_loss; head_loss [I]: mean cross-entropy in nats;
        rank_rates [I][K]: share of positions where the head's (k+1)-th candidate is the text's token;
        choice_rates [I][K]: share of about `heldout.choices` positions where it is the target's own argmax there;
        positions: how many positions rank_rates of the first head were counted over.
    """
    ranks, n_heads = engine.ranks, config.draft.n_heads
    n_rows = min(config.heldout.rows, len(rows))
    samples_a_row = -(-config.heldout.choices // n_rows)
    totals = torch.zeros(n_heads, 2 + 2 * (RANKS + 1), dtype=torch.float64)
    # Under ZeRO-3 every call of the engine is collective: a rank without a row left passes one without labels.
    for index in range(ranks.rank, -(-n_rows // ranks.world_size) * ranks.world_size, ranks.world_size):
        batch = read_batch(rows, [min(index, n_rows - 1) * len(rows) // n_rows]).to(ranks.device)
        if index >= n_rows:
            batch = Batch(batch.tokens, torch.full_like(batch.pieces, -1), batch.supervised)
        labels_BTI = chain_labels(batch.tokens, batch.pieces, batch.supervised, n_heads)
        hidden_BTD = teacher.hidden(batch.tokens)
        text: HeadsLoss = engine(hidden_BTD, labels_BTI, teacher.lm_head_VD, True)
        choice: HeadsLoss = engine(*_choices(teacher, hidden_BTD[0], labels_BTI[0], samples_a_row), True)
        columns = [text.sums[:, None], text.n_labels[:, None], text.rank_counts, text.n_ranked[:, None]]
        columns += [choice.rank_counts, choice.n_ranked[:, None]]
        totals += torch.cat([column.double().cpu() for column in columns], dim=1)
    totals = torch.tensor(ranks.sum(totals.flatten().tolist())).view_as(totals)
    head_loss = (totals[:, 0] / totals[:, 1].clamp(min=1)).tolist()
    return {
        "loss": sum(head_loss),
        "head_loss": head_loss,
        "rank_rates": _rates(totals[:, 2 : 3 + RANKS]),
        "choice_rates": _rates(totals[:, 3 + RANKS :]),
        "positions": int(totals[0, 2 + RANKS]),
    }


def _choices(teacher: Teacher, hidden_TD: Tensor, labels_TI: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """About n positions, evenly spaced among those where every head has a label, as a batch of one row: the states,
    and as head i's label the target's own choice behind token t + i, given the text up to there; the LM head."""
    usable = (labels_TI != IGNORE).all(1).nonzero().squeeze(1)
    picked_R = usable[:: max(1, len(usable) // n)][:n]
    offsets_I = torch.arange(1, labels_TI.shape[1] + 1, device=picked_R.device)
    behind_RI = picked_R[:, None] + offsets_I
    labels_RI = teacher.choices(hidden_TD[behind_RI.flatten()]).view_as(behind_RI)
    return hidden_TD[picked_R][None], labels_RI[None], teacher.lm_head_VD


def _rates(counts_IK1: Tensor) -> list[list[float]]:
    """Rank counts and, in the last column, over how many, to shares."""
    return (counts_IK1[:, :-1] / counts_IK1[:, -1:].clamp(min=1)).tolist()
