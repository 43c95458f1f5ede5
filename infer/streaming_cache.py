"""StreamingLLM's cache for a small model: the first tokens and the most recent ones, at positions inside the cache, so
that a model trained on 2K positions drafts at any length (TriForce, section 4.2; Xiao et al., arXiv 2309.17453).

RoPE is relative, so only distances count: recent tokens keep the keys that were rotated at their absolute positions,
and the sinks alone are rotated on, from their first keys every time, so that they stand directly before the oldest
recent token. That is the cache-internal numbering 0, 1, 2, ... shifted by one number. Which token comes next is
infer/drafters/small_model.py's work. Shapes: L layers, B slots, s sinks, M rows of the tail, K KV heads, d head width.
"""

import torch
from torch import Tensor

from longdraft.infer.partial_cache import RingCache, refuse_windows
from longdraft.kernels import backend
from longdraft.kernels.rotate import rotate
from longdraft.models.decoder import Decoder


class StreamingCache(RingCache):
    """At most `window` rows when a pass begins: sinks, a ring of recent tokens, and a tail that can be taken back.

    `settle`, called before a pass, moves the tail's older tokens into the ring; the `slack` most recent ones always
    stay in the tail, so that going back so far is exact. Further back, what the ring has overwritten is lost, and the
    slot starts from nothing (`tokens` says how many it stands for).

    Args:
        slack: how many tokens back a rewind finds everything; the window holds at least twice as many, and the sinks.
        widest: rows of the widest pass.
    Raises: ValueError for a window too small, and for a model whose RoPE table depends on the length (dynamic,
        longrope: there a key cannot be rotated on) or that has sliding windows.
    """

    def __init__(self, model: Decoder, batch: int, *, window: int = 256, sinks: int = 16, slack: int = 16, widest: int):
        check_streaming(model, window, sinks, slack)
        weight = model.embed_tokens.weight
        super().__init__(
            model.config, batch, 2 * slack + widest, weight.dtype, weight.device, fixed=sinks, budget=window - 2 * slack
        )
        self._rope, self._slack = model.rope, slack
        shape = model.config.n_layers, batch, sinks, model.config.n_kv_heads, model.config.head_dim
        self._sinks_LBsKd = self.keys.new_zeros(shape)  # where they have been rotated on, as they were before

    def settle(self, appended: int) -> None:
        """Move what is too much in the tails into the ring; no slot kept more than so many rows since the last time."""
        base_B = self.held.clamp(max=self.budget)
        tail_B = self.lengths - base_B
        moved_B = torch.where(tail_B > 2 * self._slack, tail_B - self._slack, 0)
        most = 2 * self._slack + appended
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
        # Gathered whole before anything is written: sources and targets overlap.
        keys, values = self.keys[:, self._slots_B1, source_BM], self.values[:, self._slots_B1, source_BM]
        self.keys[:, self._slots_B1, target_BM] = keys
        self.values[:, self._slots_B1, target_BM] = values
        before_B = self._evicted()
        self.held.add_(moved_B)
        self._written.add_(moved_B)
        self.lengths.copy_(stay_B + tail_B - moved_B)
        self._rotate_sinks(before_B)

    def take_slot(self, slot: int, other: "StreamingCache", place: int) -> None:
        """This slot as that of another cache of the same window, sinks and slack, which is settled."""
        rows = slice(0, self.budget + 2 * self._slack)
        self.keys[:, slot, rows], self.values[:, slot, rows] = other.keys[:, place, rows], other.values[:, place, rows]
        self._sinks_LBsKd[:, slot] = other._sinks_LBsKd[:, place]
        for name in ("lengths", "prompt_lengths", "held", "_written"):
            getattr(self, name)[slot] = getattr(other, name)[place]

    def rewind(self, lengths_B: Tensor) -> None:
        """Back to the first lengths_B[b] tokens; to none at all where what stood there is lost."""
        kept_B = torch.minimum(lengths_B, self.tokens)
        kept_B = torch.where((kept_B < self.held) & (self._evicted() > 0), 0, kept_B)
        self.held.copy_(torch.minimum(self.held, kept_B))
        self._written.copy_(self.held - self.fixed)
        self.lengths.copy_(self.held.clamp(max=self.budget) + kept_B - self.held)

    def _evicted(self) -> Tensor:
        """int64 [B]: tokens that are no longer held."""
        return (self.held - self.budget).clamp(min=0)

    def _rotate_sinks(self, before_B: Tensor) -> None:
        """Let the sinks stand directly before the oldest recent token; before_B: how far they were rotated on."""
        now_B, sinks = self._evicted(), self.fixed
        if sinks == 0:
            return
        first_BsKd = (before_B == 0)[:, None, None, None]
        self._sinks_LBsKd.copy_(torch.where(first_BsKd, self.keys[:, :, :sinks], self._sinks_LBsKd))
        n_layers, batch = self.keys.shape[:2]
        rows_BTKd = self._sinks_LBsKd.transpose(0, 1).flatten(1, 2).float()
        cos, sin = self._rope(now_B[:, None], None, torch.float32)
        # The keys have the table's scaling already.
        rotated_BTKd = rotate(rows_BTKd, cos / self._rope.scaling, sin / self._rope.scaling).to(self.keys.dtype)
        self.keys[:, :, :sinks] = rotated_BTKd.view(batch, n_layers, sinks, *self.keys.shape[3:]).transpose(0, 1)


def check_streaming(model: Decoder, window: int, sinks: int, slack: int) -> None:
    """The ValueErrors of StreamingCache."""
    if model.rope.length_dependent:
        raise ValueError(
            f"rope_type is {model.config.rope.type!r}, whose table depends on the length, so keys cannot stand at "
            f"positions inside a cache; use a small model with another RoPE type"
        )
    refuse_windows(model.config, f"window={window}: a streaming cache")
    if sinks < 0 or window <= sinks + 2 * slack:
        raise ValueError(
            f"window={window}: must exceed sinks={sinks} and twice slack={slack}, the rows to take back; raise it"
        )
