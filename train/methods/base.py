"""The trainer's interface to a method: which fields of the target it reads, its labels and its random draws.

The input of a pass is made on the CPU from (config, document piece) alone. Offsets, noise shifts and subsets of
queries are drawn with the key of each piece, so packing, the number of ranks and resuming change nothing.
Shapes: N tokens of a pass, end to end; D hidden; M labels of a part of the loss; R tokens chosen among the N.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longdraft.kernels.distillation import Distillation
from longdraft.kernels.linear_loss import LossPart
from longdraft.kernels.segment_attention import send_segments
from longdraft.kernels.transfer import from_host
from longdraft.models.draft_folder import Draft
from longdraft.models.drafts.longspec import Queries
from longdraft.models.passes import Span, TargetOutput
from longdraft.train.batches import Batch, draws
from longdraft.train.config import DataSection, TrainSection
from longdraft.train.teacher import Teacher

# `data.query_share` selects a piece's tokens in blocks of this size, since neighbours read mostly the same keys.
QUERY_BLOCK = 128


class MicroBatch(NamedTuple):
    """The input of one pass over a few rows, on the CPU or, after `to`, on the device.

    `positions` int64 [N]. `parts`: the labels of each part of the loss. `first`: index in N of the token of the draft's
    row 0. `queries`: the tokens that LongSpec's block runs for.
    """

    batch: Batch
    positions: Tensor
    parts: list[LossPart]
    first: int = 0
    queries: Queries | None = None

    @property
    def n_labels(self) -> list[int]:
        """The number of labels of each part."""
        return [len(part.labels) for part in self.parts]

    def to(self, device: torch.device) -> "MicroBatch":
        """The same pass on the device, except for `batch.supervised`, which only serves to make labels."""

        def move(tensor: Tensor) -> Tensor:
            return from_host(tensor, device)

        queries = self.queries
        if queries is not None:
            send_segments(queries.self_segments, device)
            send_segments(queries.cross_segments, device)
            queries = queries._replace(rows=None if queries.rows is None else move(queries.rows))
        batch = self.batch._replace(tokens=move(self.batch.tokens))
        parts = [LossPart(*map(move, part)) for part in self.parts]
        return MicroBatch(batch, move(self.positions), parts, self.first, queries)

    def without_labels(self) -> "MicroBatch":
        """The same pass without labels: its loss and gradient are zero."""
        return self._replace(parts=[LossPart(part.rows[:0], part.labels[:0]) for part in self.parts])


class Method(ABC):
    """How one kind of draft is trained.

    `draft`: the network, whose forward returns the loss. `needs`: the fields of TargetOutput that it reads.
    `part_names`: names of the parts of its loss, which are reported separately.
    """

    draft: Draft
    needs: frozenset[str]
    part_names: list[str]

    def __init__(self, data: DataSection, train: TrainSection, draft: Draft, vocab_size: int):
        self.draft, self.data, self.seed = draft, data, train.seed
        self._draft_ids: Tensor | None = None  # [V]: token id to index in a restricted vocabulary, or -1
        if draft.token_ids is not None:
            self._draft_ids = torch.full((vocab_size,), -1)
            self._draft_ids[draft.token_ids.cpu()] = torch.arange(len(draft.token_ids))

    def micro_batch(self, batch: Batch, span: Span | None = None) -> MicroBatch:
        """The training pass over these rows, in which the draft runs for `data.query_share` of the tokens. `span`: this
        rank's tokens, if ranks share the rows."""
        return self._pass(batch, span, self.data.query_share, self._positions(batch))

    def eval_batches(self, batch: Batch, span: Span | None = None) -> list[MicroBatch]:
        """The passes over held-out rows whose losses add up to the validation loss: plain positions, all labels."""
        return [self._pass(batch, span, 1.0, plain_positions(batch.borders))]

    @abstractmethod
    def _pass(self, batch: Batch, span: Span | None, share: float, positions: Tensor) -> MicroBatch:
        """A pass with these positions [N], in which the draft runs for this share of the tokens."""

    @abstractmethod
    def loss_weights(self, n_labels: Sequence[float]) -> list[float]:
        """The weight of each part's summed loss in the step's loss, given the number of labels of each part."""

    @abstractmethod
    def inputs(self, micro_batch: MicroBatch, output: TargetOutput, teacher: Teacher) -> tuple[Any, ...]:
        """The arguments of the network's `states`."""

    @abstractmethod
    def target_rows(self, micro_batch: MicroBatch, part: int) -> Tensor:
        """For each label of a part, the index in N of the token whose target distribution predicts it, int64 [M]."""

    def distillation(self, micro_batch: MicroBatch, states_ND: Tensor, objective: tuple[str, float]) -> Distillation:
        """A loss against the target's distributions, given its post-norm states. `objective`: name and text_weight."""
        return Distillation(
            states_ND, [self.target_rows(micro_batch, i) for i in range(len(self.part_names))], *objective
        )

    def as_labels(self, tokens_R: Tensor) -> Tensor:
        """Token ids as labels, int64 [R]; -1 for tokens outside a restricted vocabulary."""
        return tokens_R if self._draft_ids is None else from_host(self._draft_ids, tokens_R.device)[tokens_R]

    def _labels(self, batch: Batch, distance: int) -> LossPart:
        """The part that `ahead` returns, without labels outside a restricted vocabulary."""
        rows, labels = ahead(batch.tokens, batch.supervised, batch.borders, distance)
        labels = self.as_labels(labels)
        return LossPart(rows[labels >= 0], labels[labels >= 0])

    def _positions(self, batch: Batch) -> Tensor:
        """Plain positions, or Anchor-Offset Indices (LongSpec, 3.2): the first `sinks` positions of a piece stay, the
        others are shifted by a random offset from 0 to max_position - length."""
        if self.data.positions == "plain":
            return plain_positions(batch.borders)
        pieces = []
        for start, stop, key in zip(batch.borders[:-1], batch.borders[1:], batch.keys, strict=True):
            positions = torch.arange(stop - start)
            room = (self.data.max_position or 0) - (stop - start)
            positions[self.data.sinks :] += draws(self.seed, key, 2)[1] % (room + 1)
            pieces.append(positions)
        return torch.cat(pieces)

    def _query_spans(self, batch: Batch, span: Span | None, share: float) -> list[Span] | None:
        """The tokens that the draft runs for, in ascending order: this share of each piece's blocks, at least one,
        clipped to `span`. None for all tokens."""
        if share >= 1 and span is None:
            return None
        spans: list[Span] = []
        for start, stop, key in zip(batch.borders[:-1], batch.borders[1:], batch.keys, strict=True):
            n_blocks = -(-(stop - start) // QUERY_BLOCK)
            noise = draws(self.seed, key, 2 + n_blocks)[2:]
            chosen = sorted(range(n_blocks), key=noise.__getitem__)[: max(1, round(share * n_blocks))]
            for i in sorted(chosen):
                begin, end = start + i * QUERY_BLOCK, min(start + (i + 1) * QUERY_BLOCK, stop)
                if span is not None:
                    begin, end = max(begin, span[0]), min(end, span[1])
                if spans and spans[-1][1] == begin > start:  # merge adjacent blocks of a piece
                    begin = spans.pop()[0]
                if begin < end:
                    spans.append((begin, end))
        return spans


def plain_positions(borders: Sequence[int]) -> Tensor:
    """0, 1, 2, ... in each piece, int64 [N]."""
    return torch.cat([torch.arange(stop - start) for start, stop in pairwise(borders)])


def ahead(tokens_N: Tensor, supervised_N: Tensor, borders: Sequence[int], distance: int) -> LossPart:
    """The loss part in which token t predicts token t + `distance`: all such pairs within a piece whose second token is
    supervised.

    Args:
        tokens_N: token ids. supervised_N: bool; tokens that may be a label.
        borders: where each piece starts, then N.
    """
    device, sizes_P = tokens_N.device, torch.tensor(borders).diff()
    piece_ends_N = torch.tensor(borders[1:]).repeat_interleave(sizes_P).to(device)
    t_N = torch.arange(len(tokens_N), device=device)
    rows = t_N[t_N + distance < piece_ends_N]
    rows = rows[supervised_N[rows + distance]]
    return LossPart(rows, tokens_N[rows + distance].long())
