"""What one request asks of sampling, and the choice rule: the token of a position as a function of logits and seed.

choice(t) = argmax_v( filter(penalised logits / T)_v + g(seed, t, v) ), at T = 0 the argmax of the penalised logits.
Plain decoding and the verification of a tree apply this same rule, so every drafter gives plain decoding's text
(Drafter-invariant speculative decoding, arXiv 2408.07978). Not here: the penalties (infer/penalties.py), the noise
itself (kernels/gumbel.py) and accepting (infer/accept.py). Shapes: B slots, N nodes, V vocabulary.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longdraft.infer.history import History
from longdraft.infer.penalties import Penalties
from longdraft.infer.values import check_text, is_integer, is_number, short_repr
from longdraft.kernels import backend
from longdraft.kernels.best_tokens import best_tokens
from longdraft.kernels.choice import choose
from longdraft.kernels.gumbel import gumbel_noise
from longdraft.kernels.transfer import from_host, integers

# Rows of noise kept for each slot on the CPU, where one of 49152 words takes 0.15 ms: drafting, verifying and the next
# step ask for the same positions, so that a step would make each of them two or three times.
KEPT_ROWS = 32
# Of so many most probable tokens top-p looks at the sum before it sorts the whole vocabulary.
LIKELIEST = 256
# Scores that are sorted at once: of some 64 nodes with a vocabulary of 128k. Bytes that each takes meanwhile.
MOST_SORTED, SORTED_BYTES = 1 << 23, 40
# Below this a logit / T could overflow; the choice is the greedy one long before.
COLDEST = 1e-6
# Above this it would leave fp32, and infinities would be divided.
WARMEST = 1e30


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded. Penalties and bans also hold when greedy; the filters only above temperature 0.

    Order: contextual, repetition, presence and frequency penalty, bans, temperature, top-k, top-p, min-p, eta.

    Attributes:
        temperature: 0 is greedy; else logits are divided by it.
        top_k: keep the k largest logits (ties with the k-th stay); 0 is off.
        top_p: keep the most probable tokens until their sum reaches it (ties with the last one stay); 1 is off.
        min_p: drop tokens less probable than min_p times the most probable one; 0 is off.
        seed: 64-bit; the same seed gives the same text with every drafter. None draws one, which the result carries.
        max_new_tokens: at least 1.
        stop_token_ids: end the sequence; the stop token is the last one returned.
        ignore_eos: go on after the target's own end tokens.
        eta_cutoff: drop tokens less probable than min(eta_cutoff, sqrt(eta_cutoff) * exp(-entropy)), never the most
            probable one (Hewitt et al. 2022); 0 is off.
        min_tokens_to_keep: min-p and eta leave at least so many of the most probable tokens in (ties with the last one
            stay), as TokenSwift's program does with 20; 1 is off.
        contextual_penalty: logits of tokens among the last `contextual_window` ones are divided by it where positive,
            multiplied where negative (TokenSwift, section 3.3); 1 is off.
        contextual_window: how far that penalty looks back, in tokens.
        repetition_penalty: the same over prompt and generation, as in transformers; 1 is off.
        presence_penalty: taken off the logits of generated tokens, once; 0 is off.
        frequency_penalty: taken off the logits of generated tokens, for each time; 0 is off.
        banned_token_ids: never chosen.
        stop_strings: text that ends the sequence, also across the borders of tokens.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_new_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    eta_cutoff: float = 0.0
    min_tokens_to_keep: int = 1
    contextual_penalty: float = 1.0
    contextual_window: int = 1024
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    banned_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self):
        def demand(holds: bool, name: str, want: str):
            if not holds:
                raise ValueError(f"sampling parameter {name}={short_repr(getattr(self, name))} must be {want}")

        def number(name: str, holds, want: str):
            value = getattr(self, name)
            demand(is_number(value) and holds(value), name, want)
            object.__setattr__(self, name, float(value))

        def integer(name: str, least: int, want: str, most: int = 2**62 - 1):
            value = getattr(self, name)
            demand(is_integer(value) and least <= int(value) <= most, name, want)
            object.__setattr__(self, name, int(value))

        warmest = "0 (greedy) or a number above, from 1e-06 on up to 1e+30"
        number("temperature", lambda t: t == 0 or COLDEST <= t <= WARMEST, warmest)
        integer("top_k", 0, "0 (off) or a positive integer")
        number("top_p", lambda p: 0 < p <= 1, "above 0 and at most 1 (off)")
        number("min_p", lambda p: 0 <= p < 1, "at least 0 (off) and below 1")
        number("eta_cutoff", lambda p: 0 <= p < 1, "at least 0 (off) and below 1")
        integer("max_new_tokens", 1, "at least 1, an integer")
        integer("min_tokens_to_keep", 1, "at least 1 (off), an integer")
        integer("contextual_window", 1, "at least 1, an integer")
        for name in ("contextual_penalty", "repetition_penalty"):
            number(name, lambda p: 1e-30 <= p <= 1e30, "above 0 (1e-30 to 1e30); 1 is off, above it penalises")
        for name in ("presence_penalty", "frequency_penalty"):
            number(name, lambda p: abs(p) <= 1e30, "a number from -1e30 to 1e30; 0 is off, above it penalises")
        if self.seed is not None:
            integer("seed", -(2**63), "None or an integer of 64 bits", 2**64 - 1)
        demand(isinstance(self.ignore_eos, bool), "ignore_eos", "True or False")
        for name in ("stop_token_ids", "banned_token_ids"):
            ids = getattr(self, name)
            listed = isinstance(ids, Sequence | set | frozenset) and not isinstance(ids, str | bytes)
            demand(listed and all(is_integer(t) and int(t) >= 0 for t in ids), name, "a list of token ids")
            object.__setattr__(self, name, tuple(int(token) for token in ids))
        listed = isinstance(self.stop_strings, list | tuple)
        full = listed and all(isinstance(text, str) and text for text in self.stop_strings)
        demand(full, "stop_strings", "a list of strings that are not empty")
        for text in self.stop_strings:
            check_text("sampling parameter stop_strings", text)
        object.__setattr__(self, "stop_strings", tuple(self.stop_strings))


def draw_seed() -> int:
    """A fresh seed for a request that names none."""
    return secrets.randbits(63)


class SlotSampling:
    """The sampling parameters of B slots as tensors, and the noise of the positions they are at.

    A slot that holds no request is greedy, or as another where steps are recorded. On the CPU rows of noise are kept
    from step to step.

    Attributes:
        seeds: int64 [B]. temperatures: fp32 [B], 0 for a greedy slot.
        greedy: whether every slot is.
    """

    def __init__(self, params: list[SamplingParams], device: torch.device, noise_in_ranking: bool = True):
        self.params, self.device, self.noise_in_ranking = params, device, noise_in_ranking
        # A greedy slot passes the filters untouched, so its neighbours' settings cannot reach it.
        off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "eta_cutoff": 0.0, "min_tokens_to_keep": 1}
        filters = [p if p.temperature > 0 else replace(p, **off) for p in params]

        def column(name: str) -> Tensor:
            return from_host(torch.tensor([getattr(p, name) for p in filters], dtype=torch.float32), device)[:, None]

        signed = [(p.seed or 0) - 2**64 if (p.seed or 0) >= 2**63 else (p.seed or 0) for p in params]
        self.seeds = integers(signed, device)
        self.greedy = all(p.temperature == 0 for p in params)
        self.penalties = Penalties(params, device)
        self.temperatures = column("temperature")[:, 0]
        self._sampled = column("temperature") > 0
        self._mixed = not self.greedy and any(p.temperature == 0 for p in params)
        self._divisors = torch.where(self._sampled, column("temperature"), 1.0)
        top_k = [p.top_k for p in filters]
        self._top_k = integers(top_k, device)[:, None] if any(top_k) else None
        self._most_k = max(top_k)
        self._top_p = column("top_p") if any(p.top_p < 1 for p in filters) else None
        self._min_p = column("min_p") if any(p.min_p > 0 for p in filters) else None
        self._eta = column("eta_cutoff") if any(p.eta_cutoff > 0 for p in filters) else None
        least = [p.min_tokens_to_keep if p.min_p or p.eta_cutoff else 1 for p in filters]
        self._least = integers(least, device)[:, None] if max(least) > 1 else None
        self._most_least = max(least)
        self._rows: list[dict[int, Tensor]] = [{} for _ in params]
        self._width = 0
        self._parts: dict[tuple[int, int], SlotSampling] = {}

    def of_slots(self, slots: slice) -> "SlotSampling":
        """These slots' alone, with the rows of noise that are kept for them."""
        key = slots.start, slots.stop
        if key not in self._parts:
            self._parts[key] = type(self)(self.params[slots], self.device, self.noise_in_ranking)
            self._parts[key]._rows = self._rows[slots]
        return self._parts[key]

    @property
    def unfiltered(self) -> bool:
        """Whether logits, temperature and noise alone decide: no filter, no penalty, no ban, in any slot."""
        return not self.penalties.any and all(part is None for part in self._filters)

    @property
    def _filters(self) -> tuple[Tensor | None, ...]:
        return self._top_k, self._top_p, self._min_p, self._eta, self._least

    def follow(self, other: "SlotSampling") -> bool:
        """Take over another's parameters, each tensor where it lies, so that recorded work (infer/graphs.py) goes on
        with them. False, and nothing done, where other work is needed for them."""
        if self._kind != other._kind:
            return False
        for to, given in zip(self._columns, other._columns, strict=True):
            if to is not None and given is not None:
                to.copy_(given)
        self.params = other.params
        self._rows, self._width = other._rows, other._width
        return True

    @property
    def _columns(self) -> tuple[Tensor | None, ...]:
        own = self.seeds, self.temperatures, self._sampled, self._divisors
        return *own, *self._filters, *self.penalties.columns

    @property
    def _kind(self) -> tuple:
        """What steers the work on the host."""
        absent = tuple(part is None for part in self._columns)
        own = len(self.params), self.greedy, self._mixed, self._most_k, self._most_least, self.noise_in_ranking
        return *own, self.penalties.widest, self.penalties.banned, absent

    def noise(self, positions_B: Tensor, vocab_size: int) -> Tensor:
        """g(seed, t, v) for the token at absolute position t = positions_B[b] of each slot: fp32 [B, V].

        The same for drafter and verifier; it must not be written to.
        """
        if not backend.is_host(self.device):
            return gumbel_noise(self.seeds, positions_B[:, None], vocab_size)[:, 0]
        # A row does not depend on the vocabulary's size, so the widest one asked for serves all.
        self._width = max(self._width, vocab_size)
        wanted = list(enumerate(positions_B.tolist()))
        missing = [b for b, t in wanted if t not in self._rows[b] or len(self._rows[b][t]) < vocab_size]
        if missing:
            fresh = gumbel_noise(self.seeds[missing], positions_B[missing, None], self._width)
            for b, row in zip(missing, fresh[:, 0].unbind(), strict=True):
                kept = self._rows[b]
                if len(kept) >= KEPT_ROWS:
                    del kept[min(kept)]
                kept[wanted[b][1]] = row
        found = [self._rows[b][t][:vocab_size] for b, t in wanted]
        return found[0][None] if len(found) == 1 else torch.stack(found)

    def ranking(
        self, logits: Tensor, history: History, positions_B: Tensor, offset: int, token_ids: Tensor | None = None
    ) -> Tensor:
        """Scores to rank candidates for the token `offset` behind each root by: penalised logits / T + its noise.

        Filters are left out, they only drop what ranks low anyway. The logits themselves where every slot is greedy
        and none has a penalty.

        Args:
            logits: [B, V] or [B, N, V].
            history: valid through the roots; penalties count as they do there.
            positions_B: int64, the roots' absolute positions.
            token_ids: int64 [V], the target's ids of a restricted vocabulary; None: all, in order.
        """
        logits = self.penalties.apply(logits, history, positions_B, token_ids)
        if self.greedy or not self.noise_in_ranking:
            return logits
        noise_BV = self._noise_of(positions_B + offset, logits.shape[-1], token_ids)
        noise_BV = noise_BV if token_ids is None else noise_BV[:, token_ids]
        extra = logits.dim() - 2  # dimensions for nodes
        divisors, sampled, noise = (
            part.view(len(part), *[1] * extra, -1) for part in (self._divisors, self._sampled, noise_BV)
        )
        scores = logits.float() / divisors
        return torch.where(sampled, scores + noise, scores) if self._mixed else scores.add_(noise)

    def best(
        self,
        logits_BTV: Tensor,
        history: History,
        positions_B: Tensor,
        offset: int,
        count: int,
        token_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The `count` candidates of each row that `ranking` puts first, with its arguments.

        Returns: log-probabilities of the softmax over its scores (fp32, -inf where everything is banned), and indices
            into V.
        """
        if self._mixed:
            ranked_BTV = self.ranking(logits_BTV, history, positions_B, offset, token_ids)
            return best_tokens(ranked_BTV, count)
        logits_BTV = self.penalties.apply(logits_BTV, history, positions_B, token_ids)
        if self.greedy or not self.noise_in_ranking:
            return best_tokens(logits_BTV, count)
        noise_BV = self._noise_of(positions_B + offset, logits_BTV.shape[-1], token_ids)
        return best_tokens(logits_BTV, count, self._divisors[:, 0], noise_BV, token_ids)

    def _noise_of(self, positions_B: Tensor, vocab_size: int, token_ids: Tensor | None) -> Tensor:
        """The noise of a vocabulary that holds these ids, or has this size without any."""
        if token_ids is not None:
            vocab_size = len(self.penalties.places_of(token_ids)) - 1
        return self.noise(positions_B, vocab_size)

    def choose(self, logits_BV: Tensor, history: History, positions_B: Tensor) -> Tensor:
        """The choice rule: the target's token at positions_B + 1, int64 [B].

        Args:
            logits_BV: of the nodes at absolute position positions_B (int64).
            history: valid through positions_B: the context and the node's ancestors and itself.
        """
        # On a CPU the argmax of bf16 costs four times fp32's with the conversion.
        return self.scores(logits_BV, history, positions_B).float().argmax(dim=-1)

    def choose_all(
        self,
        logits_BNV: Tensor,
        history: History,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        ancestors_BNN: Tensor | None = None,
    ) -> Tensor:
        """`choose` at all nodes of a tree at once, int64 [B, N]: what has to be sorted is sorted once.

        On a GPU the last bit of a probability may depend on the node's index where the vocabulary is no multiple of 8,
        for PyTorch's softmax then begins each row at another address.

        Args:
            history: valid through the roots.
            tokens_BN, positions_BN: int64, of the nodes, the root first. ancestors_BNN: bool, [b, i, j]: j is i itself
                or above it; None where there is the root alone.
        """
        if self.unfiltered:
            return choose(logits_BNV, self.seeds, positions_BN + 1, self.temperatures)
        chosen = []
        n_slots, _, vocab = logits_BNV.shape
        first, n_nodes = 0, max(1, MOST_SORTED // (n_slots * vocab))
        for logits_BMV in logits_BNV.split(n_nodes, dim=1):
            scores_BMV = self.penalties.apply_at_nodes(
                logits_BMV, history, tokens_BN, positions_BN, ancestors_BNN, first
            )
            if not self.greedy:
                scores_BMV = self.filtered(scores_BMV)
                next_BM = positions_BN[:, first : first + n_nodes] + 1
                noisy_BMV = scores_BMV + gumbel_noise(self.seeds, next_BM, vocab)
                scores_BMV = torch.where(self._sampled[..., None], noisy_BMV, scores_BMV) if self._mixed else noisy_BMV
            chosen.append(scores_BMV.float().argmax(dim=-1))
            first += n_nodes
        return torch.cat(chosen, dim=1)

    def scores(self, logits_BV: Tensor, history: History, positions_B: Tensor) -> Tensor:
        """What `choose` takes the argmax of: filtered penalised logits / T plus noise, where greedy without them."""
        logits_BV = self.penalties.apply(logits_BV, history, positions_B)
        if self.greedy:
            return logits_BV
        scores_BV = self.filtered(logits_BV)
        noisy_BV = scores_BV + self.noise(positions_B + 1, logits_BV.shape[-1])
        return torch.where(self._sampled, noisy_BV, scores_BV) if self._mixed else noisy_BV

    def filtered(self, logits: Tensor) -> Tensor:
        """logits / T in fp32, with what top-k, top-p, min-p and eta drop at -inf. logits: [B, V] or [B, N, V].

        Each filter sees the renormalised rest of the one before. A filter is a border that probabilities must reach, so
        equal ones stay or go together, whatever their ids. Greedy slots pass through unchanged.
        """
        scaled = logits.float() / _as_wide(self._divisors, logits)
        if self._top_k is not None:
            wanted = _as_wide(self._top_k, scaled)
            scaled.masked_fill_((scaled < _kth_largest(scaled, wanted, self._most_k)) & (wanted > 0), -torch.inf)
        if self._top_p is not None:
            scaled.masked_fill_(self._outside_top_p(scaled, _as_wide(self._top_p, scaled)), -torch.inf)
        if self._min_p is not None:
            border = scaled.amax(-1, keepdim=True) + _as_wide(self._min_p, scaled).log()
            scaled.masked_fill_((scaled < border) & (scaled < self._last_kept(scaled)), -torch.inf)
        if self._eta is not None:
            scaled.masked_fill_(self._below_eta(scaled, _as_wide(self._eta, scaled)), -torch.inf)
        return scaled

    def _outside_top_p(self, scaled: Tensor, top_p: Tensor) -> Tensor:
        """The sum is mostly reached within a few hundred tokens, and the rest is only sorted where it is not: 0.3 ms of
        49152 words on a CPU in place of 4.4. On a GPU all are, for to see whether would be to wait for it."""
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
        # The token with which the sum reaches top_p is the last to stay.
        border = values.gather(-1, short.sum(-1, keepdim=True).clamp(max=values.shape[-1] - 1))
        return (scaled < border) & (top_p < 1)

    def _below_eta(self, scaled: Tensor, eta: Tensor) -> Tensor:
        probs = scaled.softmax(-1)
        # A running sum, for `sum` adds up in another order for one row than for several.
        entropy = _running_sum(torch.special.entr(probs))[..., -1:].float()
        border = torch.minimum(eta, eta.sqrt() * (-entropy).exp())
        return (probs < border) & (scaled < self._last_kept(scaled))

    def _last_kept(self, scaled: Tensor) -> Tensor:
        """The least score that min-p and eta always keep."""
        if self._least is None:
            return scaled.amax(-1, keepdim=True)
        return _kth_largest(scaled, _as_wide(self._least, scaled), self._most_least)


def _as_wide(column_B1: Tensor, x: Tensor) -> Tensor:
    """One number a slot, for [B, V] as it is and for [B, N, V] as [B, 1, 1]."""
    return column_B1.view(-1, *[1] * (x.dim() - 1))


def _kth_largest(x: Tensor, k: Tensor, most: int) -> Tensor:
    """The k-th largest number of the last dimension. k: int64, for [B, V] as [B, 1], for [B, N, V] as [B, 1, 1], of at
    most `most`; where it is beyond the dimension, the smallest number."""
    largest = x.topk(min(most, x.shape[-1]), dim=-1).values
    return largest.gather(-1, (k.clamp(1, x.shape[-1]) - 1).expand(*x.shape[:-1], 1))


def _running_sum(x_BV: Tensor) -> Tensor:
    """Over the last dimension; the same for a row alone and among others.

    In order on the CPU; in fp64 on a GPU, whose scans add up in an order of their own.
    """
    return x_BV.cumsum(-1) if x_BV.device.type == "cpu" else x_BV.double().cumsum(-1)


def one_each(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    """One SamplingParams a prompt; a single one serves all prompts."""
    if not isinstance(params, SamplingParams | Sequence):
        raise ValueError(f"params: {params!r}; give SamplingParams, one or one a prompt")
    many = [params] * count if isinstance(params, SamplingParams) else list(params)
    if len(many) != count:
        raise ValueError(f"params: {len(many)} SamplingParams for {count} prompts; give one, or one a prompt")
    return many
