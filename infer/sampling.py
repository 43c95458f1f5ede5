"""What one request asks of sampling, and the choice rule: the token of a position as a function of logits and seed.

choice(t) = argmax_v( filter(logits / T)_v + g(seed, t, v) ), at T = 0 the argmax of the logits. Plain decoding and the
verification of a tree apply this same rule, so every drafter gives plain decoding's text (Drafter-invariant
speculative decoding, arXiv 2408.07978). Not here: the noise itself (kernels/gumbel.py) and the walk (infer/verify.py).
Shapes: B sequences, V vocabulary.
"""

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from longdraft.kernels.gumbel import gumbel_noise


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded.

    Attributes:
        temperature: 0 is greedy; else logits are divided by it.
        top_k: keep the k largest logits (ties with the k-th stay); 0 is off.
        top_p: keep the most probable tokens until their sum reaches it; 1 is off.
        min_p: drop tokens less probable than min_p times the most probable one; 0 is off.
        seed: 64-bit; the same seed gives the same text with every drafter. None draws one, which the result carries.
        max_new_tokens: at least 1.
        stop_token_ids: end the sequence; the stop token is the last one returned.
        ignore_eos: go on after the target's own end tokens.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_new_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self):
        def demand(holds: bool, name: str, want: str):
            if not holds:
                raise ValueError(f"sampling parameter {name}={getattr(self, name)!r} must be {want}")

        demand(math.isfinite(self.temperature) and self.temperature >= 0, "temperature", "0 (greedy) or a number above")
        demand(self.top_k >= 0 and self.top_k == int(self.top_k), "top_k", "0 (off) or a positive integer")
        demand(0 < self.top_p <= 1, "top_p", "above 0 and at most 1 (off)")
        demand(0 <= self.min_p < 1, "min_p", "at least 0 (off) and below 1")
        demand(self.max_new_tokens >= 1, "max_new_tokens", "at least 1")
        whole = isinstance(self.seed, int) and -(2**63) <= self.seed < 2**64
        demand(self.seed is None or whole, "seed", "None or an integer of 64 bits")
        object.__setattr__(self, "stop_token_ids", tuple(int(token) for token in self.stop_token_ids))


def draw_seed() -> int:
    """A fresh seed for a request that names none."""
    return secrets.randbits(63)


@dataclass
class SlotSampling:
    """The sampling parameters of B slots as tensors, with the noise of the current step.

    A slot that holds no request is greedy. `noise` is computed at most once a position, for drafting and verifying.
    """

    params: list[SamplingParams]
    device: torch.device
    seeds: Tensor = field(init=False)
    temperatures: Tensor = field(init=False)

    def __post_init__(self):
        # A greedy slot passes the filters untouched, so its neighbours' settings cannot reach it.
        params = [p if p.temperature > 0 else replace(p, top_k=0, top_p=1.0, min_p=0.0) for p in self.params]

        def column(name, dtype):
            return torch.tensor([getattr(p, name) for p in params], dtype=dtype, device=self.device)

        signed = [(p.seed or 0) - 2**64 if (p.seed or 0) >= 2**63 else (p.seed or 0) for p in self.params]
        self.seeds = torch.tensor(signed, dtype=torch.int64, device=self.device)
        self.temperatures = column("temperature", torch.float32)
        self.greedy = all(p.temperature == 0 for p in self.params)
        self._mixed = not self.greedy and any(p.temperature == 0 for p in self.params)
        self._divisors = torch.where(self.temperatures > 0, self.temperatures, 1.0)[:, None]
        self._top_k = column("top_k", torch.int64) if any(p.top_k for p in params) else None
        self._all_k = any(p.top_k == 0 for p in params)
        self._most_k = max(p.top_k for p in params)
        self._top_p = column("top_p", torch.float32)[:, None] if any(p.top_p < 1 for p in params) else None
        self._min_p = column("min_p", torch.float32)[:, None] if any(p.min_p > 0 for p in params) else None
        self._noise: dict[tuple[int, int], Tensor] = {}

    def new_step(self) -> None:
        """Forget the noise of the last step; its positions have moved."""
        self._noise.clear()

    def noise(self, root_positions_B: Tensor, offset: int, vocab_size: int) -> Tensor:
        """g at `offset` tokens behind each root, fp32 [B, V]; the same for drafter and verifier."""
        key = offset, vocab_size
        if key not in self._noise:
            self._noise[key] = gumbel_noise(self.seeds, (root_positions_B + offset)[:, None], vocab_size)[:, 0]
        return self._noise[key]

    def scores(self, logits_BV: Tensor, noise_BV: Tensor | None) -> Tensor:
        """What candidates are ranked by: logits / T + noise, or the logits where a slot is greedy. fp32 [B, V]."""
        if self.greedy:
            return logits_BV
        assert noise_BV is not None
        noisy_BV = logits_BV.float() / self._divisors + noise_BV
        if not self._mixed:
            return noisy_BV
        return torch.where(self.temperatures[:, None] > 0, noisy_BV, logits_BV.float())

    def choose(self, logits_BV: Tensor, noise_BV: Tensor | None) -> Tensor:
        """The choice rule, one row a slot: int64 [B]. `noise_BV` is not read when every slot is greedy."""
        if self.greedy:
            return logits_BV.argmax(dim=-1)
        return self.scores(self.filter(logits_BV), noise_BV).argmax(dim=-1)

    def filter(self, logits_BV: Tensor) -> Tensor:
        """Logits with what top-k, top-p and min-p drop at -inf, each taken on the renormalised rest of the one before.

        Greedy slots pass through unchanged.
        """
        dropped = -torch.inf
        if self._top_k is not None:
            vocab = logits_BV.shape[-1]
            k_B = torch.where(self._top_k > 0, self._top_k, vocab).clamp(max=vocab)
            largest = logits_BV.topk(vocab if self._all_k else min(self._most_k, vocab), dim=-1).values
            logits_BV = logits_BV.masked_fill(logits_BV < largest.gather(1, k_B[:, None] - 1), dropped)
        if self._top_p is not None:
            # Sorted as logits: tokens whose probabilities round to the same number keep their order.
            ordered, order = (logits_BV.float() / self._divisors).sort(dim=-1, descending=True, stable=True)
            probs = ordered.softmax(-1)
            before = probs.cumsum(-1) - probs  # the most probable token has 0 before it and always stays
            drop = torch.zeros_like(order, dtype=torch.bool).scatter_(1, order, before >= self._top_p)
            logits_BV = logits_BV.masked_fill(drop & (self._top_p < 1), dropped)
        if self._min_p is not None:
            scaled = logits_BV.float() / self._divisors
            border = scaled.amax(-1, keepdim=True) + self._min_p.log()
            logits_BV = logits_BV.masked_fill(scaled < border, dropped)
        return logits_BV


def one_each(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    """One SamplingParams a prompt; a single one serves all prompts."""
    many = [params] * count if isinstance(params, SamplingParams) else list(params)
    if len(many) != count:
        raise ValueError(f"params: {len(many)} SamplingParams for {count} prompts; give one, or one a prompt")
    return many
