"""The filters of a request at T > 0: top-k, top-p, min-p and eta drop what is too unlikely.

They come after penalties, bans and the temperature (infer/choice/slots.py). Each filter sees what the filter before it
has left, renormalised. A filter is a threshold on probabilities, so tokens of equal probability stay or go together,
whatever their ids. Shapes: B slots, N nodes, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from longdraft.infer.choice.penalties import column
from longdraft.infer.sampling import GREEDY, SamplingParams
from longdraft.kernels import backend
from longdraft.kernels.choice import top_p_border

ALIGNED = 8  # the most fp32 numbers that a GPU loads at once


class Filters:
    """The filters of B slots, from their SamplingParams. Greedy slots pass through unchanged.

    Attributes:
        any: whether any slot has a filter.
        limits: the largest top_k and min_tokens_to_keep, each rounded up to a power of two. Recorded work depends on
            them, so there must be few.
    """

    def __init__(self, params: Sequence[SamplingParams], device: torch.device):
        # A greedy slot has no filter, so its settings must not affect other slots.
        params = [p if p.temperature > 0 else GREEDY for p in params]

        def of_all(name: str, off: float, dtype: torch.dtype = torch.float32) -> Tensor | None:
            return column([getattr(p, name) for p in params], off, dtype, device)

        self._top_k, self._top_p = of_all("top_k", 0, torch.int64), of_all("top_p", 1.0)
        self._min_p, self._eta = of_all("min_p", 0.0), of_all("eta_cutoff", 0.0)
        least = [p.min_tokens_to_keep if p.min_p + p.eta_cutoff > 0 else 1 for p in params]
        self._least = column(least, 1, torch.int64, device)
        most = max(p.top_k for p in params), max(least)
        self.limits = self._most_k, self._most_least = tuple(1 << max(0, n - 1).bit_length() for n in most)
        self.any = any(column is not None for column in self.columns)

    @property
    def columns(self) -> tuple[Tensor | None, ...]:
        """The slots' numbers on the device, [B, 1]; None for filters that no slot has."""
        return self._top_k, self._top_p, self._min_p, self._eta, self._least

    def apply(self, scaled_BNV: Tensor) -> Tensor:
        """Set the logits / T (fp32) that the filters drop to -inf in place, and return them."""
        if self._top_k is not None:
            k_B11 = self._top_k[:, None]
            is_dropped = (scaled_BNV < _kth_largest(scaled_BNV, k_B11, self._most_k)) & (k_B11 > 0)
            scaled_BNV.masked_fill_(is_dropped, -torch.inf)
        if self._top_p is not None:
            scaled_BNV.masked_fill_(scaled_BNV < top_p_border(scaled_BNV, self._top_p[:, None]), -torch.inf)
        if self._min_p is not None:
            border_BN1 = scaled_BNV.amax(-1, keepdim=True) + self._min_p[:, None].log()
            scaled_BNV.masked_fill_((scaled_BNV < border_BN1) & (scaled_BNV < self._last_kept(scaled_BNV)), -torch.inf)
        if self._eta is not None:
            scaled_BNV.masked_fill_(self._below_eta(scaled_BNV, self._eta[:, None]), -torch.inf)
        return scaled_BNV

    def _below_eta(self, scaled_BNV: Tensor, eta_B11: Tensor) -> Tensor:
        probs_BNV = _softmax(scaled_BNV)
        # A running sum, because the order in which `sum` adds depends on the number of rows.
        entropy_BN1 = _running_sum(torch.special.entr(probs_BNV))[..., -1:].float()
        border_BN1 = torch.minimum(eta_B11, eta_B11.sqrt() * (-entropy_BN1).exp())
        return (probs_BNV < border_BN1) & (scaled_BNV < self._last_kept(scaled_BNV))

    def _last_kept(self, scaled_BNV: Tensor) -> Tensor:
        """The lowest score that min-p and eta always keep."""
        if self._least is None:
            return scaled_BNV.amax(-1, keepdim=True)
        return _kth_largest(scaled_BNV, self._least[:, None], self._most_least)


def _kth_largest(x_BNV: Tensor, k_B11: Tensor, most: int) -> Tensor:
    """The k-th largest number of the last dimension, or the smallest one if there are fewer. k: int64, <= `most`."""
    vocab = x_BNV.shape[-1]
    largest_BNK = x_BNV.topk(min(most, vocab), dim=-1).values
    return largest_BNK.gather(-1, (k_B11.clamp(1, vocab) - 1).expand(*x_BNV.shape[:-1], 1))


def _softmax(x_BNV: Tensor) -> Tensor:
    """Softmax over the last dimension, with the same bits for a row alone and in a batch.

    PyTorch's sum on a GPU depends on the alignment of a row's first number, so all rows get the same one.
    """
    missing = 0 if backend.is_host(x_BNV.device) else -x_BNV.shape[-1] % ALIGNED
    return pad(x_BNV, (0, missing), value=-torch.inf).softmax(-1)[..., :-missing] if missing else x_BNV.softmax(-1)


def _running_sum(x_BNV: Tensor) -> Tensor:
    """The running sum over the last dimension, with the same bits for a row alone and in a batch.

    On the CPU it adds in order. On a GPU it is in fp64, because the order of a scan's additions is not fixed.
    """
    return x_BNV.cumsum(-1) if x_BNV.device.type == "cpu" else x_BNV.double().cumsum(-1)
