"""The frozen target's pass over one long row that several ranks share, by DeepSpeed's Ulysses (arXiv 2309.14509).

Each rank has a contiguous slice of the tokens for norms, projections and feed-forward. For attention the ranks exchange
tokens for heads, so that each has all tokens for its share of the heads, and then back. The draft is not shared: every
rank runs it for its own slice of queries.
Shapes: N tokens end to end, n of them a rank's, D hidden, H query heads, K key/value heads, d head width.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from longdraft.kernels.segment_attention import Segment, segment_attention
from longdraft.models.decoder import Decoder
from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.passes import Pass, SequenceShard, TargetOutput
from longdraft.train.ranks import TIMEOUT  # before DeepSpeed: it names the accelerator

# isort: split
from deepspeed.sequence.layer import DistributedAttention


def check_heads(config: DecoderConfig, degree: int) -> None:
    """Raises ValueError if a target's heads do not divide among `train.sequence_parallel` ranks, or if several would
    share rows of linear attention."""
    if config.delta is not None and degree > 1:
        raise ValueError(f"train.sequence_parallel: {degree}, but this target has linear attention; set it to 1")
    if config.n_heads % degree or config.n_kv_heads % degree:
        raise ValueError(
            f"train.sequence_parallel: {degree} ranks cannot share the target's heads; set it to a number that divides "
            f"n_heads = {config.n_heads} and n_kv_heads = {config.n_kv_heads}"
        )


def sequence_group(degree: int) -> dist.ProcessGroup:
    """This rank's group: every `degree` consecutive ranks form one. All ranks call it, once."""
    group: Any = dist.new_subgroups(degree, timeout=TIMEOUT)[0]
    return group


class SequenceParallel:
    """A rank's part of the rows that its group shares; all ranks of the group call each method together.

    Args:
        config: the target's. group: see `sequence_group`.
    Raises ValueError if the heads do not divide among the ranks.
    """

    def __init__(self, config: DecoderConfig, group: dist.ProcessGroup):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        check_heads(config, self.size)

        def attend(q_1NHd: Tensor, k_1NKd: Tensor, v_1NKd: Tensor, *others: Any) -> Tensor:
            """Attention over all tokens, for this rank's share of the heads."""
            return segment_attention(q_1NHd[0], k_1NKd[0], v_1NKd[0], *others)[None]

        self._attention = DistributedAttention(attend, group, scatter_idx=2, gather_idx=1)  # pyright: ignore[reportArgumentType]

    def own_span(self, n_tokens: int) -> tuple[int, int]:
        """Start and stop of this rank's tokens in a row; the last ranks may have fewer tokens, or none."""
        width = -(-n_tokens // self.size)
        return min(self.rank * width, n_tokens), min((self.rank + 1) * width, n_tokens)

    @torch.no_grad()
    def forward(self, model: Decoder, given: Pass) -> TargetOutput:
        """The target's pass over a whole packed sequence; every rank passes in the same one.

        Args:
            given: with borders and without a cache; its `needs` are among last_kv, pre_norm, post_norm, logits.

        Returns: last_kv of all N tokens, on every rank; the other fields for this rank's tokens, `own_span(N)`:
            [1, n, ...].
        """
        tokens_1N, borders, positions_1N = given.tokens_BT, given.borders, given.positions_BT
        assert borders is not None
        n_tokens = tokens_1N.shape[1]
        width = -(-n_tokens // self.size)
        # All ranks exchange the same number of tokens: the padding is a piece of its own, which nothing reads.
        n_padding = self.size * width - n_tokens
        if n_padding:
            tokens_1N, borders = F.pad(tokens_1N, (0, n_padding)), [*borders, n_tokens + n_padding]
            positions_1N = None if positions_1N is None else F.pad(positions_1N, (0, n_padding))
        shard = SequenceShard(slice(self.rank * width, (self.rank + 1) * width), self._attend_together)
        output = model(replace(given, tokens_BT=tokens_1N, borders=borders, positions_BT=positions_1N, shard=shard))
        start, stop = self.own_span(n_tokens)
        for name in ("pre_norm", "post_norm", "logits"):
            field = getattr(output, name)
            setattr(output, name, None if field is None else field[:, : stop - start])
        if output.last_kv is not None:
            k_1nKd, v_1nKd = output.last_kv
            output.last_kv = self.gather(k_1nKd, n_tokens), self.gather(v_1nKd, n_tokens)
        return output

    def _attend_together(
        self,
        q_nHd: Tensor,
        k_nKd: Tensor,
        v_nKd: Tensor,
        pieces: list[Segment],
        window: int | None,
        sinks_H: Tensor | None,
    ) -> Tensor:
        own_sinks = None if sinks_H is None else sinks_H.chunk(self.size)[self.rank]
        return self._attention(q_nHd[None], k_nKd[None], v_nKd[None], 0, None, pieces, window, own_sinks)[0]

    def any(self, flag: Tensor) -> Tensor:
        """Whether the flag is true on any rank of the group: a bool scalar on the device."""
        found = flag.to(torch.uint8)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        return found.bool()

    def gather(self, own_1nX: Tensor, n_tokens: int) -> Tensor:
        """Join the ranks' tensors of their own tokens: [1, n, ...] to [1, n_tokens, ...], without gradient."""
        width = -(-n_tokens // self.size)
        padded = own_1nX.new_zeros(width, *own_1nX.shape[2:])
        padded[: own_1nX.shape[1]] = own_1nX[0]
        whole = own_1nX.new_empty(self.size * width, *own_1nX.shape[2:])
        dist.all_gather_into_tensor(whole, padded, group=self.group)
        return whole[None, :n_tokens]
