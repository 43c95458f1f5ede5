"""Caches whose recent tokens stand in a ring, so that a pass costs the same at any context length.

A decoder runs on them as on a full cache, with explicit positions: attention does not depend on the order of rows, and
RoPE is in the keys already. infer/caches/partial.py selects rows of a full cache.
Shapes: L layers, B slots, s sinks, M rows moved at once, K KV heads, d head width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from longdraft.kernels import backend
from longdraft.kernels.rotate import rotate
from longdraft.kernels.transfer import integers
from longdraft.models.decoder import Decoder
from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.kv_cache import KVCache


class RingCache(KVCache):
    """Rows [0, fixed) hold the first tokens for good, rows [fixed, budget) are a ring, and a tail follows them.

    The tail is what passes on this cache have committed (`append`, `commit`); `rewind` takes it back. The rows before
    it stand for the text's first `held` tokens: the first `budget` of these went to their own rows, token t to row t,
    and each further one overwrote the ring's next row, starting at row `fixed`.

    Attributes:
        held: int64 [B].
    """

    def __init__(
        self,
        like: DecoderConfig,
        batch: int,
        tail: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        fixed: int,
        budget: int,
    ):
        """`tail` counts the rows after the budget, a pass's pending rows included."""
        # The extra last row takes writes that nobody reads, so that slots of unequal counts share one indexed copy.
        capacity = budget + tail + 1
        super().__init__(like.n_layers, batch, capacity, like.n_kv_heads, like.head_dim, dtype, device)
        self.fixed, self.budget = fixed, budget
        self.held = torch.zeros_like(self.lengths)
        self._written = torch.full_like(self.lengths, -fixed)  # ring writes since row `fixed` was the next one

    @property
    def tokens(self) -> Tensor:
        """int64 [B]: how many tokens of the text the slot has seen, the tail's included."""
        return self.held + self.lengths - self.held.clamp(max=self.budget)

    def reset(
        self, slots: Sequence[int] | Tensor | None = None, prompt_lengths: Sequence[int] | Tensor | None = None
    ) -> None:
        where = integers(range(self.batch) if slots is None else slots, self.lengths.device)
        super().reset(where, prompt_lengths)
        self.held.index_fill_(0, where, 0)
        self._written.index_fill_(0, where, -self.fixed)

    def _ring_rows(self, most: int, counts_B: Tensor) -> Tensor:
        """int64 [B, M]: the rows of the next counts_B[b] tokens. Tokens beyond these, and tokens that a later one of
        them overwrites, get the last row, which nobody reads."""
        ring_size = self.budget - self.fixed
        writes_BM = self._written[:, None] + torch.arange(most, device=counts_B.device)
        rows_BM = torch.where(writes_BM < 0, writes_BM + self.fixed, writes_BM % ring_size + self.fixed)
        end_B1 = (self._written + counts_B)[:, None]
        lost_BM = (writes_BM >= end_B1) | ((writes_BM >= 0) & (writes_BM < end_B1 - ring_size))
        return rows_BM.masked_fill(lost_BM, self.capacity - 1)


class StreamingCache(RingCache):
    """At most `window` rows when a pass begins: sinks, a ring of recent tokens, and a tail that can be taken back.

    `settle`, called before a pass, moves the tail's older tokens into the ring. The `slack` most recent ones always
    stay in the tail, so that a rewind by that many tokens is exact.

    Args:
        slack: how many tokens a rewind can take back. The window must exceed the sinks plus twice as many.
        widest: rows of the widest pass.
    Raises: ValueError for a window too small, for a model whose RoPE table depends on the length (dynamic, longrope:
        its keys cannot be rotated again), and for one with sliding windows.
    """

    def __init__(self, model: Decoder, batch: int, *, window: int, sinks: int, slack: int, widest: int):
        check_streaming(model, window, sinks, slack)
        weight = model.embed_tokens.weight
        super().__init__(
            model.config, batch, 2 * slack + widest, weight.dtype, weight.device, fixed=sinks, budget=window - 2 * slack
        )
        self._rope, self._slack = model.rope, slack
        shape = model.config.n_layers, batch, sinks, model.config.n_kv_heads, model.config.head_dim
        self._sinks_LBsKd = self.keys.new_zeros(shape)  # first keys of the sinks, where these have been rotated again

    def settle(self) -> None:
        """Move what exceeds the tails into the ring. On a CPU, where reading lengths waits for no device, it returns at
        once if no tail is too long."""
        base_B = self.held.clamp(max=self.budget)
        tail_B = self.lengths - base_B
        moved_B = torch.where(tail_B > 2 * self._slack, tail_B - self._slack, 0)
        most = self.capacity - 1 - self.budget
        if backend.is_host(moved_B.device):
            if not moved_B.any():
                return
            most = int(tail_B.max())
        places_BM = torch.arange(most, device=tail_B.device)[None]
        stay_B = (self.held + moved_B).clamp(max=self.budget)
        source_BM = (base_B[:, None] + places_BM).clamp(max=self.capacity - 1)
        staying_BM = (stay_B - moved_B)[:, None] + places_BM
        target_BM = torch.where(places_BM < moved_B[:, None], self._ring_rows(most, moved_B), staying_BM)
        target_BM = target_BM.masked_fill(places_BM >= tail_B[:, None], self.capacity - 1)
        # Everything is gathered before anything is written, because sources and targets overlap.
        keys, values = self.keys[:, self._slots_B1, source_BM], self.values[:, self._slots_B1, source_BM]
        self.keys[:, self._slots_B1, target_BM] = keys
        self.values[:, self._slots_B1, target_BM] = values
        before_B = self._evicted()
        self.held.add_(moved_B)
        self._written.add_(moved_B)
        self.lengths.copy_(stay_B + tail_B - moved_B)
        self._rotate_sinks(before_B)

    def rewind(self, lengths_B: Tensor) -> None:
        """Go back to the first lengths_B[b] tokens, by at most `slack` tokens."""
        kept_B = torch.minimum(lengths_B, self.tokens)
        self.held.copy_(torch.minimum(self.held, kept_B))
        self._written.copy_(self.held - self.fixed)
        self.lengths.copy_(self.held.clamp(max=self.budget) + kept_B - self.held)

    def _evicted(self) -> Tensor:
        """int64 [B]: how many tokens the ring has overwritten."""
        return (self.held - self.budget).clamp(min=0)

    def _rotate_sinks(self, before_B: Tensor) -> None:
        """Rotate the sinks so that they end right before the oldest recent token. before_B: `_evicted` as of the last
        rotation."""
        now_B, sinks = self._evicted(), self.fixed
        if sinks == 0:
            return
        first_BsKd = (before_B == 0)[:, None, None, None]
        self._sinks_LBsKd.copy_(torch.where(first_BsKd, self.keys[:, :, :sinks], self._sinks_LBsKd))
        n_layers, batch = self.keys.shape[:2]
        rows_BTKd = self._sinks_LBsKd.transpose(0, 1).flatten(1, 2).float()
        cos, sin = self._rope(now_B[:, None], None, torch.float32)
        # The keys have been multiplied by the table's scaling already.
        rotated_BTKd = rotate(rows_BTKd, cos / self._rope.scaling, sin / self._rope.scaling).to(self.keys.dtype)
        self.keys[:, :, :sinks] = rotated_BTKd.view(batch, n_layers, sinks, *self.keys.shape[3:]).transpose(0, 1)


def check_streaming(model: Decoder, window: int, sinks: int, slack: int) -> None:
    """Raise the ValueErrors of StreamingCache."""
    if model.rope.length_dependent:
        raise ValueError(
            f"rope_type is {model.config.rope.type!r}, whose table depends on the length, so keys cannot stand at "
            f"positions inside a cache; use a small model with another RoPE type"
        )
    refuse_windows(model.config, f"window={window}: a streaming cache")
    if sinks < 0 or window <= sinks + 2 * slack:
        raise ValueError(
            f"window={window}: must exceed sinks={sinks} and twice the {slack} tokens that may be taken back; raise it"
        )


def refuse_windows(like: DecoderConfig, what: str) -> None:
    """Raise ValueError, about `what`, if a layer has a sliding window."""
    if like.sliding_windows and any(like.sliding_windows):
        raise ValueError(f"{what} does not go with this model's sliding windows; use a drafter that needs none")
