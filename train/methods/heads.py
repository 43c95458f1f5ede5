"""How TokenSwift's and Medusa's heads are trained (the heads and their loss: models/drafts/heads.py)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from longdraft.kernels.linear_loss import LossPart
from longdraft.models.drafts.heads import Medusa, TokenSwift
from longdraft.models.passes import Span, TargetOutput
from longdraft.train.batches import Batch
from longdraft.train.config import DataSection, TrainSection
from longdraft.train.methods.base import Method, MicroBatch
from longdraft.train.teacher import Teacher


class HeadsMethod(Method):
    """Part i of the loss is that of head i; the mean losses of all heads have equal weight."""

    def __init__(self, data: DataSection, train: TrainSection, draft: TokenSwift | Medusa, vocab_size: int):
        super().__init__(data, train, draft, vocab_size)
        self._reads, self.needs = draft.reads, frozenset({draft.reads})
        self.part_names = [f"head{i + 1}" for i in range(draft.config.n_heads)]

    def loss_weights(self, n_labels: Sequence[float]) -> list[float]:
        return [1 / max(n, 1) for n in n_labels]

    def inputs(self, micro_batch: MicroBatch, output: TargetOutput, teacher: Teacher) -> tuple[Any, ...]:
        return (getattr(output, self._reads),)

    def target_rows(self, micro_batch: MicroBatch, part: int) -> Tensor:
        return micro_batch.parts[part].rows + micro_batch.first + part + 1

    def _pass(self, batch: Batch, span: Span | None, share: float, positions: Tensor) -> MicroBatch:
        """Head i proposes the token i + 2 places ahead: the target itself gives the next one."""
        query_spans, parts, first = self._query_spans(batch, span, share), [], 0 if span is None else span[0]
        is_query_N = torch.full((len(batch.tokens),), query_spans is None)
        for start, stop in query_spans or ():
            is_query_N[start:stop] = True
        for i in range(len(self.part_names)):
            rows, labels = self._labels(batch, i + 2)
            kept = is_query_N[rows]
            parts.append(LossPart(rows[kept] - first, labels[kept]))
        return MicroBatch(batch, positions, parts, first)
