"""How LongSpec's block (models/drafts/longspec.py) is trained: flash noisy training (arXiv 2502.17421, 3.3)."""

from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from longdraft.kernels.linear_loss import LossPart
from longdraft.models.drafts.longspec import LongSpec, plan_queries
from longdraft.models.passes import Span, TargetOutput
from longdraft.train.batches import Batch, draws
from longdraft.train.config import DataSection, TrainSection
from longdraft.train.methods.base import Method, MicroBatch, plain_positions
from longdraft.train.teacher import Teacher


class LongSpecMethod(Method):
    """Part j of the loss holds the predictions made under noise shift j = 1..J; all labels have equal weight."""

    needs = frozenset({"last_kv"})

    def __init__(self, data: DataSection, train: TrainSection, draft: LongSpec, vocab_size: int):
        super().__init__(data, train, draft, vocab_size)
        self._window, self._level_weights = draft.config.window, train.level_weights
        self.part_names = [f"level{j + 1}" for j in range(draft.config.noise)]

    def eval_batches(self, batch: Batch, span: Span | None = None) -> list[MicroBatch]:
        """One pass for each noise shift."""
        given = batch, span, 1.0, plain_positions(batch.borders)
        return [self._pass(*given, [j + 1] * len(batch.keys)) for j in range(len(self.part_names))]

    def loss_weights(self, n_labels: Sequence[float]) -> list[float]:
        return [1 / max(sum(n_labels), 1)] * len(n_labels)

    def inputs(self, micro_batch: MicroBatch, output: TargetOutput, teacher: Teacher) -> tuple[Any, ...]:
        assert output.last_kv is not None
        embeddings_ND = teacher.model.embed_tokens(micro_batch.batch.tokens)
        return embeddings_ND, micro_batch.positions, *output.last_kv, micro_batch.queries

    def target_rows(self, micro_batch: MicroBatch, part: int) -> Tensor:
        rows, queries = micro_batch.parts[part].rows, micro_batch.queries
        return rows if queries is None or queries.rows is None else queries.rows[rows]

    def _shift(self, bits: int) -> int:
        """Map 64 random bits to a noise shift from 1 to J."""
        if self._level_weights is None:
            return 1 + bits % len(self.part_names)
        sums = list(accumulate(map(Fraction, self._level_weights)))  # exact: the same shift on every machine
        return 1 + bisect_right(sums, sums[-1] * bits / 2**64)

    def _pass(
        self, batch: Batch, span: Span | None, share: float, positions: Tensor, shifts: list[int] | None = None
    ) -> MicroBatch:
        """`shifts`: the noise shift of each piece. None: they are drawn at random."""
        shifts = shifts or [self._shift(draws(self.seed, key, 1)[0]) for key in batch.keys]
        spans = self._query_spans(batch, span, share)
        if spans == []:
            # Without queries nothing reads the draft's own keys, so they would have no backward pass. Under ZeRO-3 all
            # ranks must run the same ones.
            return self._pass(batch, (0, 1), 1.0, positions, shifts).without_labels()
        queries = plan_queries(batch.borders, shifts, self._window, spans)
        rows, labels = self._labels(batch, 1)
        shift_N = torch.repeat_interleave(torch.tensor(shifts), torch.tensor(batch.borders).diff())
        shift_of_label, query_of_label = shift_N[rows], rows
        if queries.rows is not None:
            query_N = torch.full((len(batch.tokens),), -1)
            query_N[queries.rows] = torch.arange(len(queries.rows))
            query_of_label = query_N[rows]
        kept = [(shift_of_label == j + 1) & (query_of_label >= 0) for j in range(len(self.part_names))]
        parts = [LossPart(query_of_label[mask], labels[mask]) for mask in kept]
        return MicroBatch(batch, positions, parts, queries=queries)
