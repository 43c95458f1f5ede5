"""The kinds of drafts as the trainer sees them: what a pass asks of the target, which labels it has, what is drawn.

Everything a pass needs is made on the CPU from (config, piece) alone: offsets, noise shifts and subsets of queries are
drawn by the key of each document piece, so packing, ranks and resumption change nothing. Not here: networks and their
loss (models/drafts/), the step (step.py).
Shapes: N tokens end to end, D hidden, P parts of the loss, R rows.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longdraft.kernels.linear_distillation import TargetStates
from longdraft.kernels.segment_attention import send_segments
from longdraft.kernels.transfer import from_host
from longdraft.models.decoder import Decoder
from longdraft.models.draft_folder import DRAFTS, Draft
from longdraft.models.drafts.longspec import LongSpec, Queries, plan_queries
from longdraft.models.drafts.loss import Part, Teaching, ahead
from longdraft.models.drafts.medusa import Medusa
from longdraft.models.drafts.tokenswift import TokenSwift, TokenSwiftConfig
from longdraft.models.passes import Span, TargetOutput
from longdraft.models.target import Target
from longdraft.train.batches import Batch, draws
from longdraft.train.config import Config, LongSpecSection
from longdraft.train.teacher import Teacher

# Tokens of a piece are chosen for `data.query_share` in blocks of so many: neighbours share what they read.
QUERY_BLOCK = 128
# Tokens without a loss that are asked for with those beside them: fewer than it takes to be worth a run of their own.
MOST_GAP = 16


class Asked(NamedTuple):
    """Where the target is asked what follows: `spans` of tokens in N, in order, each within a piece; `rows` int64 [M]
    of each part: which of these tokens, end to end, stands before what each of its labels is."""

    spans: list[Span]
    rows: list[Tensor]


class MicroBatch(NamedTuple):
    """What one pass over a few rows reads, on the CPU or, after `to`, where it runs. `positions` int64 [N];
    `parts`: labels by part of the loss; `first`: the token that row 0 of the draft's states belongs to; `queries`: what
    LongSpec's block runs for; `asked`: where the loss is the target's."""

    batch: Batch
    positions: Tensor
    parts: list[Part]
    first: int = 0
    queries: Queries | None = None
    asked: Asked | None = None

    @property
    def n_labels(self) -> list[int]:
        """Of each part."""
        return [len(part.labels) for part in self.parts]

    def to(self, device: torch.device) -> "MicroBatch":
        def move(tensor: Tensor) -> Tensor:
            return from_host(tensor, device)

        batch = self.batch._replace(tokens=move(self.batch.tokens), supervised=move(self.batch.supervised))
        queries = self.queries
        if queries is not None:
            send_segments(queries.in_window, device)
            send_segments(queries.in_target, device)
            queries = queries._replace(rows=None if queries.rows is None else move(queries.rows))
        parts = [Part(*map(move, part)) for part in self.parts]
        asked = self.asked and self.asked._replace(rows=list(map(move, self.asked.rows)))
        return self._replace(batch=batch, positions=move(self.positions), parts=parts, queries=queries, asked=asked)

    def without_labels(self) -> "MicroBatch":
        """The same pass with nothing to learn: its loss and gradient are zero."""
        return self._replace(parts=[Part(part.rows[:0], part.labels[:0]) for part in self.parts])


class Method(ABC):
    """A kind of draft under training.

    `draft`: the network, whose forward is the loss; `needs`: fields of TargetOutput it reads; `part_names`: of the
    parts of its loss, which are counted apart.
    """

    draft: Draft
    needs: frozenset[str]
    part_names: list[str]

    def __init__(self, config: Config, draft: Draft, vocab_size: int):
        self.draft, self.data, self.seed = draft, config.data, config.train.seed
        self._draft_ids: Tensor | None = None
        if draft.token_ids is not None:
            self._draft_ids = torch.full((vocab_size,), -1)
            self._draft_ids[draft.token_ids.cpu()] = torch.arange(len(draft.token_ids))

    @abstractmethod
    def micro_batch(self, batch: Batch, span: Span | None = None) -> MicroBatch:
        """A pass over these rows; `span`: the tokens that are this rank's, of rows that ranks share. The draft runs for
        `data.query_share` of the tokens."""

    @abstractmethod
    def eval_batches(self, batch: Batch, span: Span | None = None) -> list[MicroBatch]:
        """The passes over held-out rows whose losses together are the validation: plain positions, all labels."""

    @abstractmethod
    def loss_weights(self, n_labels: Sequence[float]) -> list[float]:
        """What each part's summed loss counts in the step's loss, given the step's labels by part."""

    @abstractmethod
    def arguments(self, micro_batch: MicroBatch, output: TargetOutput, teacher: Teacher) -> tuple[Any, ...]:
        """Of the network's forward, up to `lm_head_VD`."""

    @abstractmethod
    def chosen_after(self, micro_batch: MicroBatch, part: int) -> Tensor:
        """The positions in N after which the target's own choice is what each label of a part stands for."""

    def asking(self, micro_batch: MicroBatch) -> MicroBatch:
        """The pass, on the host, with where the target is asked for all of its labels."""
        places = [self.chosen_after(micro_batch, i) for i in range(len(micro_batch.parts))]
        spans = _spans(torch.cat(places).unique().tolist(), micro_batch.batch.borders)
        tokens_R = torch.cat([torch.arange(0), *(torch.arange(*span) for span in spans)])
        rows = [torch.searchsorted(tokens_R, place) for place in places]
        return micro_batch._replace(asked=Asked(spans, rows))

    def as_labels(self, tokens_R: Tensor) -> Tensor:
        """Token ids as the labels that stand for them, int64 [R]; -1 where the draft has none."""
        return tokens_R if self._draft_ids is None else from_host(self._draft_ids, tokens_R.device)[tokens_R]

    def _labels(self, batch: Batch, distance: int) -> Part:
        """`ahead`, of what the draft can propose: the rest is no label."""
        rows, labels = ahead(batch.tokens, batch.supervised, batch.borders, distance)
        labels = self.as_labels(labels)
        return Part(rows[labels >= 0], labels[labels >= 0])

    def _positions(self, batch: Batch) -> Tensor:
        """Plain ones, or Anchor-Offset Indices (LongSpec, 3.2): the first `sinks` tokens of a piece stay, the rest move
        on by a random offset of 0 to max_position - length."""
        if self.data.positions == "plain":
            return plain_positions(batch.borders)
        parts = []
        for start, stop, key in zip(batch.borders[:-1], batch.borders[1:], batch.keys, strict=True):
            positions = torch.arange(stop - start)
            room = (self.data.max_position or 0) - (stop - start)
            positions[self.data.sinks :] += draws(self.seed, key, 2)[1] % (room + 1)
            parts.append(positions)
        return torch.cat(parts)

    def _ranges(self, batch: Batch, span: Span | None, share: float) -> list[Span] | None:
        """Which tokens the draft runs for: this share of each piece's blocks, at least one, as far as they lie in the
        span, in order; None for all."""
        if share >= 1 and span is None:
            return None
        ranges: list[Span] = []
        for start, stop, key in zip(batch.borders[:-1], batch.borders[1:], batch.keys, strict=True):
            n_blocks = -(-(stop - start) // QUERY_BLOCK)
            noise = draws(self.seed, key, 2 + n_blocks)[2:]
            taken = sorted(range(n_blocks), key=noise.__getitem__)[: max(1, round(share * n_blocks))]
            for i in sorted(taken):
                begin, end = start + i * QUERY_BLOCK, min(start + (i + 1) * QUERY_BLOCK, stop)
                if span is not None:
                    begin, end = max(begin, span[0]), min(end, span[1])
                if ranges and ranges[-1][1] == begin > start:  # blocks that touch are one
                    begin = ranges.pop()[0]
                if begin < end:
                    ranges.append((begin, end))
        return ranges


class HeadsMethod(Method):
    """TokenSwift's and Medusa's heads: part i is head i, and each head's mean counts alike."""

    def __init__(self, config: Config, draft: TokenSwift | Medusa, vocab_size: int):
        super().__init__(config, draft, vocab_size)
        self.needs = draft.needs
        (self._field,) = draft.needs
        self.part_names = [f"head{i + 1}" for i in range(draft.config.n_heads)]

    def eval_batches(self, batch: Batch, span: Span | None = None) -> list[MicroBatch]:
        return [self._pass(batch, span, 1.0, plain_positions(batch.borders))]

    def loss_weights(self, n_labels: Sequence[float]) -> list[float]:
        return [1 / max(n, 1) for n in n_labels]

    def arguments(self, micro_batch: MicroBatch, output: TargetOutput, teacher: Teacher) -> tuple[Any, ...]:
        return getattr(output, self._field), micro_batch.parts

    def chosen_after(self, micro_batch: MicroBatch, part: int) -> Tensor:
        return micro_batch.parts[part].rows + micro_batch.first + part + 1

    def micro_batch(self, batch: Batch, span: Span | None = None) -> MicroBatch:
        return self._pass(batch, span, self.data.query_share, self._positions(batch))

    def _pass(self, batch: Batch, span: Span | None, share: float, positions: Tensor) -> MicroBatch:
        ranges, parts, first = self._ranges(batch, span, share), [], 0 if span is None else span[0]
        for i in range(len(self.part_names)):
            part = self._labels(batch, i + 2)
            if ranges is not None:
                kept = _inside(ranges, len(batch.tokens))[part.rows]
                part = Part(part.rows[kept] - first, part.labels[kept])
            parts.append(part)
        return MicroBatch(batch, positions, parts, first)


class LongSpecMethod(Method):
    """LongSpec's block with flash noisy training (3.3): part j is what was predicted under noise shift j = 1..J, and
    every label counts alike."""

    needs = frozenset({"last_kv"})

    def __init__(self, config: Config, draft: LongSpec):
        super().__init__(config, draft, draft.config.vocab_size)
        self._window, self._level_weights = draft.config.window, config.train.level_weights
        self.part_names = [f"level{j + 1}" for j in range(draft.config.noise)]

    def eval_batches(self, batch: Batch, span: Span | None = None) -> list[MicroBatch]:
        """One for each shift."""
        positions, n_pieces, n_shifts = plain_positions(batch.borders), len(batch.keys), len(self.part_names)
        return [self._pass(batch, span, 1.0, positions, [shift] * n_pieces) for shift in range(1, n_shifts + 1)]

    def loss_weights(self, n_labels: Sequence[float]) -> list[float]:
        return [1 / max(sum(n_labels), 1)] * len(n_labels)

    def arguments(self, micro_batch: MicroBatch, output: TargetOutput, teacher: Teacher) -> tuple[Any, ...]:
        assert output.last_kv is not None
        embeddings_ND = teacher.embed(micro_batch.batch.tokens)
        return embeddings_ND, micro_batch.positions, *output.last_kv, micro_batch.queries, micro_batch.parts

    def chosen_after(self, micro_batch: MicroBatch, part: int) -> Tensor:
        rows, queries = micro_batch.parts[part].rows, micro_batch.queries
        return rows if queries is None or queries.rows is None else queries.rows[rows]

    def micro_batch(self, batch: Batch, span: Span | None = None) -> MicroBatch:
        shifts = [self._shift(draws(self.seed, key, 1)[0]) for key in batch.keys]
        return self._pass(batch, span, self.data.query_share, self._positions(batch), shifts)

    def _shift(self, noise: int) -> int:
        """A shift of 1 to J by 64 random bits."""
        if self._level_weights is None:
            return 1 + noise % len(self.part_names)
        sums = list(accumulate(map(Fraction, self._level_weights)))  # exact: the same shift on every machine
        return 1 + bisect_right(sums, sums[-1] * noise / 2**64)

    def _pass(self, batch: Batch, span: Span | None, share: float, positions: Tensor, shifts: list[int]) -> MicroBatch:
        queries = plan_queries(batch.borders, shifts, self._window, self._ranges(batch, span, share))
        rows, labels = self._labels(batch, 1)
        shift_N = torch.repeat_interleave(torch.tensor(shifts), torch.tensor(batch.borders).diff())
        shift_of, place = shift_N[rows], rows
        if queries.rows is not None:
            place_N = torch.full((len(batch.tokens),), -1)
            place_N[queries.rows] = torch.arange(len(queries.rows))
            place = place_N[rows]
        kept = [(shift_of == j + 1) & (place >= 0) for j in range(len(self.part_names))]
        parts = [Part(place[which], labels[which]) for which in kept]
        return MicroBatch(batch, positions, parts, queries=queries)


def open_method(config: Config, target: Decoder, token_ids_E: Tensor | None = None) -> Method:
    """The method with its network as it is before the first step, drawn from the seed; `token_ids_E`: the restricted
    vocabulary where the config asks for one."""
    section, generator = config.draft, torch.Generator().manual_seed(config.train.seed)
    if isinstance(section, LongSpecSection):
        return LongSpecMethod(config, LongSpec(section.network(target.config), generator, target, token_ids_E))
    shape = section.network(target.config)
    if isinstance(shape, TokenSwiftConfig):
        heads = TokenSwift(shape, generator, target.norm.weight, token_ids_E)
    else:
        heads = Medusa(shape, generator, token_ids_E)
    return HeadsMethod(config, heads, target.config.vocab_size)


def frozen_draft(config: Config, target: Target, weights: Mapping[str, Tensor]) -> Draft:
    """A network of its own with these weights (of a `state_dict`), where the target is."""
    with torch.device("meta"):  # shapes alone: the weights are there
        draft: Draft = DRAFTS[config.draft.method][1](config.draft.network(target.model.config))
    draft.load_state_dict(weights, assign=True)
    return draft.to(target.model.lm_head.weight.device).requires_grad_(False).eval()


def plain_positions(borders: Sequence[int]) -> Tensor:
    """0, 1, 2, ... in each piece, int64 [N]."""
    return torch.cat([torch.arange(stop - start) for start, stop in pairwise(borders)])


def _spans(places: Sequence[int], borders: Sequence[int]) -> list[Span]:
    """Runs of ascending places within the pieces; gaps of up to MOST_GAP do not end one."""
    spans: list[Span] = []
    piece = 0
    for place in places:
        first = piece
        while borders[piece + 1] <= place:
            piece += 1
        if spans and first == piece and place - spans[-1][1] <= MOST_GAP:
            spans[-1] = spans[-1][0], place + 1
        else:
            spans.append((place, place + 1))
    return spans


def taught_by(micro_batch: MicroBatch, output: TargetOutput, objective: tuple[str, float] | None) -> Teaching | None:
    """What the target's pass over the asked spans says for a loss of that name and `text_weight`."""
    if objective is None or micro_batch.asked is None or output.of_spans is None:
        return None
    return Teaching(TargetStates(output.of_spans, micro_batch.asked.rows), *objective)


def _inside(ranges: Sequence[Span], n: int) -> Tensor:
    """bool [n]: the numbers in one of the ranges."""
    mask = torch.zeros(n, dtype=torch.bool)
    for start, stop in ranges:
        mask[start:stop] = True
    return mask
