"""The filters of a request at T > 0: top-k, top-p, min-p and eta drop what is too unlikely.

They come after penalties, bans and the temperature (infer/choice/slots.py). Each filter sees what the one before has
left, renormalised. A filter is a border that probabilities must reach, so equal ones stay or go together, whatever
their ids. Shapes: B slots, N nodes, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from longdraft.infer.choice.penalties import column
from longdraft.infer.sampling import SamplingParams
from longdraft.kernels import backend

# Top-p looks at the sum over this many most probable tokens before it sorts the whole vocabulary.
LIKELIEST = 256


class Filters:
    """The filters of B slots, from their SamplingParams. Greedy slots pass through unchanged.

    Attributes:
        any: whether any slot has a filter.
        limits: numbers that steer the work on the host: the largest top_k, and the largest min_tokens_to_keep.
    """

    def __init__(self, params: Sequence[SamplingParams], device: torch.device):
        # A greedy slot has no filter, so its settings cannot reach its neighbours.
        sampled = [p.temperature > 0 for p in params]
        keeps_some = [p.temperature > 0 and p.min_p + p.eta_cutoff > 0 for p in params]

        def values(name: str, off: float, used: Sequence[bool]) -> list:
            return [getattr(p, name) if is_used else off for p, is_used in zip(params, used, strict=True)]

        top_k, least = values("top_k", 0, sampled), values("min_tokens_to_keep", 1, keeps_some)
        self._top_k = column(top_k, 0, torch.int64, device)
        self._top_p = column(values("top_p", 1.0, sampled), 1.0, torch.float32, device)
        self._min_p = column(values("min_p", 0.0, sampled), 0.0, torch.float32, device)
        self._eta = column(values("eta_cutoff", 0.0, sampled), 0.0, torch.float32, device)
        self._least = column(least, 1, torch.int64, device)
        self.limits = self._most_k, self._most_least = max(top_k), max(least)
        self.any = any(column is not None for column in self.columns)

    @property
    def columns(self) -> tuple[Tensor | None, ...]:
        """The slots' numbers on the device, [B, 1]; None for filters that no slot has."""
        return self._top_k, self._top_p, self._min_p, self._eta, self._least

    def apply(self, scaled: Tensor) -> Tensor:
        """Write -inf to what the filters drop of `scaled`, logits / T in fp32, [B, V] or [B, N, V], and return it."""
        if self._top_k is not None:
            k = as_wide(self._top_k, scaled)
            scaled.masked_fill_((scaled < _kth_largest(scaled, k, self._most_k)) & (k > 0), -torch.inf)
        if self._top_p is not None:
            scaled.masked_fill_(self._outside_top_p(scaled, as_wide(self._top_p, scaled)), -torch.inf)
        if self._min_p is not None:
            border = scaled.amax(-1, keepdim=True) + as_wide(self._min_p, scaled).log()
            scaled.masked_fill_((scaled < border) & (scaled < self._last_kept(scaled)), -torch.inf)
        if self._eta is not None:
            scaled.masked_fill_(self._below_eta(scaled, as_wide(self._eta, scaled)), -torch.inf)
        return scaled

    def _outside_top_p(self, scaled: Tensor, top_p: Tensor) -> Tensor:
        """Whether a token lies outside of the top-p set.

        The sum is mostly reached within a few hundred tokens, so a CPU sorts the others only where it is not. A GPU
        sorts all, because the host would have to wait for it to know.
        """
        vocab, probs = scaled.shape[-1], scaled.softmax(-1)
        for most in (LIKELIEST, vocab) if backend.is_host(scaled.device) else (vocab,):
            if most < vocab:
                values, order = scaled.topk(most, dim=-1)
            else:
                values, order = scaled.sort(dim=-1, descending=True)
            sums = _running_sum(probs.gather(-1, order))
            short = sums < top_p
            if most >= vocab or not bool((short[..., -1:] & (top_p < 1)).any()):
                break
        # The token with which the sum reaches top_p is the last one to stay.
        border = values.gather(-1, short.sum(-1, keepdim=True).clamp(max=values.shape[-1] - 1))
        return (scaled < border) & (top_p < 1)

    def _below_eta(self, scaled: Tensor, eta: Tensor) -> Tensor:
        probs = scaled.softmax(-1)
        # A running sum, because `sum` adds up in another order for one row than for several.
        entropy = _running_sum(torch.special.entr(probs))[..., -1:].float()
        border = torch.minimum(eta, eta.sqrt() * (-entropy).exp())
        return (probs < border) & (scaled < self._last_kept(scaled))

    def _last_kept(self, scaled: Tensor) -> Tensor:
        """The least score that min-p and eta always keep."""
        if self._least is None:
            return scaled.amax(-1, keepdim=True)
        return _kth_largest(scaled, as_wide(self._least, scaled), self._most_least)


def as_wide(column_B1: Tensor, x: Tensor) -> Tensor:
    """View a column [B, 1] so that it broadcasts with x: [B, V] or [B, N, V]."""
    return column_B1.view(-1, *[1] * (x.dim() - 1))


def _kth_largest(x: Tensor, k: Tensor, most: int) -> Tensor:
    """The k-th largest number of the last dimension, or the smallest one if there are fewer.

    k: int64, [B, 1] for x [B, V] and [B, 1, 1] for [B, N, V], at most `most`.
    """
    largest = x.topk(min(most, x.shape[-1]), dim=-1).values
    return largest.gather(-1, (k.clamp(1, x.shape[-1]) - 1).expand(*x.shape[:-1], 1))


def _running_sum(x_BV: Tensor) -> Tensor:
    """The running sum over the last dimension, with the same bits for a row alone and among others.

    It is taken in order on the CPU, and in fp64 on a GPU, whose scans add up in an order of their own.
    """
    return x_BV.cumsum(-1) if x_BV.device.type == "cpu" else x_BV.double().cumsum(-1)
