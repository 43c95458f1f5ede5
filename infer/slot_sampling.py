"""The choice rule for the slots of a batch: a position's token as a function of logits and seed.

choice(t) = argmax_v( filter(penalised logits / T)_v + g(seed, t, v) ), and at T = 0 the argmax of the penalised logits.
Plain decoding and the verification of a tree apply this same rule, so every drafter gives plain decoding's text
(Drafter-invariant speculative decoding, arXiv 2408.07978). The parameters are infer/sampling.py's, the penalties
infer/penalties.py's, the noise g is kernels/gumbel.py's. Shapes: B slots, N nodes, V vocabulary.
"""

from dataclasses import replace

import torch
from torch import Tensor

from longdraft.infer.history import History
from longdraft.infer.penalties import Penalties
from longdraft.infer.sampling import SamplingParams
from longdraft.kernels import backend
from longdraft.kernels.best_tokens import best_tokens
from longdraft.kernels.choice import choose
from longdraft.kernels.gumbel import gumbel_noise
from longdraft.kernels.transfer import from_host, integers

# Rows of noise kept for each slot on the CPU, where one over 49152 words takes 0.15 ms: drafting, verifying and the
# next step ask for the same positions, so a step would compute each row two or three times.
KEPT_ROWS = 32
# Top-p looks at the sum over this many most probable tokens before it sorts the whole vocabulary.
LIKELIEST = 256
# Scores that are sorted at once (some 64 nodes with a vocabulary of 128k), and the bytes that each takes meanwhile.
MOST_SORTED, SORTED_BYTES = 1 << 23, 40


class SlotSampling:
    """The sampling parameters of B slots as tensors, and the noise of the positions they are at.

    A free slot is greedy; where steps are recorded, it has the parameters of another slot.

    Attributes:
        seeds: int64 [B]. temperatures: fp32 [B], 0 for a greedy slot.
        greedy: whether all slots are greedy.
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
        self._noise_rows: list[dict[int, Tensor]] = [{} for _ in params]  # of each slot, by position
        self._noise_width = 0  # the widest vocabulary that noise was asked for
        self._of_slots: dict[tuple[int, int], SlotSampling] = {}

    def of_slots(self, slots: slice) -> "SlotSampling":
        """The sampling of these slots alone, which shares their kept rows of noise."""
        key = slots.start, slots.stop
        if key not in self._of_slots:
            self._of_slots[key] = type(self)(self.params[slots], self.device, self.noise_in_ranking)
            self._of_slots[key]._noise_rows = self._noise_rows[slots]
        return self._of_slots[key]

    @property
    def unfiltered(self) -> bool:
        """Whether logits, temperature and noise alone decide: no slot has a filter, penalty or ban."""
        return not self.penalties.any and all(column is None for column in self._filters)

    @property
    def _filters(self) -> tuple[Tensor | None, ...]:
        return self._top_k, self._top_p, self._min_p, self._eta, self._least

    def follow(self, other: "SlotSampling") -> bool:
        """Copy another's parameters into the tensors of this one, so that recorded work (infer/graphs.py) goes on with
        them. Returns False, and copies nothing, if they need other work."""
        if self._kind != other._kind:
            return False
        for column, new in zip(self._columns, other._columns, strict=True):
            if column is not None and new is not None:
                column.copy_(new)
        self.params = other.params
        self._noise_rows, self._noise_width = other._noise_rows, other._noise_width
        return True

    @property
    def _columns(self) -> tuple[Tensor | None, ...]:
        temperatures = self.temperatures, self._sampled, self._divisors
        return self.seeds, *temperatures, *self._filters, *self.penalties.columns

    @property
    def _kind(self) -> tuple:
        """Everything that steers the work on the host: equal kinds queue the same work."""
        absent = tuple(column is None for column in self._columns)
        limits = self._most_k, self._most_least, self.penalties.widest, self.penalties.banned
        return len(self.params), self.greedy, self._mixed, self.noise_in_ranking, *limits, absent

    def noise(self, positions_B: Tensor, vocab_size: int) -> Tensor:
        """The noise g(seed, t, v) of the token at absolute position t = positions_B[b] of each slot: fp32 [B, V].

        Drafter and verifier get the same; do not write to it.
        """
        if not backend.is_host(self.device):  # only a CPU keeps rows, see KEPT_ROWS
            return gumbel_noise(self.seeds, positions_B[:, None], vocab_size)[:, 0]
        # The noise of a token does not depend on the vocabulary's size, so the widest row serves all sizes.
        self._noise_width = max(self._noise_width, vocab_size)
        positions, kept = positions_B.tolist(), self._noise_rows
        missing = [b for b, t in enumerate(positions) if t not in kept[b] or len(kept[b][t]) < vocab_size]
        if missing:
            fresh = gumbel_noise(self.seeds[missing], positions_B[missing, None], self._noise_width)
            for b, row in zip(missing, fresh[:, 0].unbind(), strict=True):
                if len(kept[b]) >= KEPT_ROWS:
                    del kept[b][min(kept[b])]
                kept[b][positions[b]] = row
        rows = [kept[b][t][:vocab_size] for b, t in enumerate(positions)]
        return rows[0][None] if len(rows) == 1 else torch.stack(rows)

    def ranking(
        self, logits: Tensor, history: History, positions_B: Tensor, offset: int, token_ids: Tensor | None = None
    ) -> Tensor:
        """Scores to rank candidates by, for the token `offset` behind each root: penalised logits / T + its noise.

        Filters are left out, because they only drop what ranks low anyway. If all slots are greedy and none has a
        penalty, the scores are the logits themselves.

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
        node_dims = [1] * (logits.dim() - 2)
        divisors, sampled, noise = (x.view(len(x), *node_dims, -1) for x in (self._divisors, self._sampled, noise_BV))
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
        """The `count` candidates of each row that `ranking` puts first; see there for the arguments.

        Returns: log-probabilities under the softmax over the scores (fp32, -inf where everything is banned), and
            indices into V.
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
        """`noise` of a vocabulary that holds `token_ids`, or of `vocab_size` words if that is None."""
        if token_ids is not None:
            vocab_size = len(self.penalties.places_of(token_ids)) - 1
        return self.noise(positions_B, vocab_size)

    def choose(self, logits_BV: Tensor, history: History, positions_B: Tensor) -> Tensor:
        """The choice rule: the target's token at positions_B + 1, int64 [B].

        Args:
            logits_BV: of the nodes at absolute positions positions_B (int64).
            history: valid through positions_B, so it has the context, the nodes' ancestors and the nodes themselves.
        """
        # On a CPU the argmax of bf16 takes four times as long as the conversion to fp32 and its argmax.
        return self.scores(logits_BV, history, positions_B).float().argmax(dim=-1)

    def choose_all(
        self,
        logits_BNV: Tensor,
        history: History,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        ancestors_BNN: Tensor | None = None,
    ) -> Tensor:
        """`choose` at all nodes of a tree at once, int64 [B, N], so that scores are sorted once.

        On a GPU the last bit of a probability may depend on the node's index if the vocabulary is no multiple of 8,
        because PyTorch's softmax then starts each row at a different alignment.

        Args:
            history: valid through the roots.
            tokens_BN, positions_BN: int64, of the nodes, the root first.
            ancestors_BNN: bool, [b, i, j]: j is i itself or above it; None where there is the root alone.
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
        """What `choose` takes the argmax of: filtered penalised logits / T plus noise, or no noise if greedy."""
        logits_BV = self.penalties.apply(logits_BV, history, positions_B)
        if self.greedy:
            return logits_BV
        scores_BV = self.filtered(logits_BV)
        noisy_BV = scores_BV + self.noise(positions_B + 1, logits_BV.shape[-1])
        return torch.where(self._sampled, noisy_BV, scores_BV) if self._mixed else noisy_BV

    def filtered(self, logits: Tensor) -> Tensor:
        """Logits / T in fp32, with -inf for what top-k, top-p, min-p and eta drop. logits: [B, V] or [B, N, V].

        Each filter sees what the one before has left, renormalised. A filter is a border that probabilities must reach,
        so equal ones stay or go together, whatever their ids. Greedy slots pass through unchanged.
        """
        scaled = logits.float() / _as_wide(self._divisors, logits)
        if self._top_k is not None:
            k = _as_wide(self._top_k, scaled)
            scaled.masked_fill_((scaled < _kth_largest(scaled, k, self._most_k)) & (k > 0), -torch.inf)
        if self._top_p is not None:
            scaled.masked_fill_(self._outside_top_p(scaled, _as_wide(self._top_p, scaled)), -torch.inf)
        if self._min_p is not None:
            border = scaled.amax(-1, keepdim=True) + _as_wide(self._min_p, scaled).log()
            scaled.masked_fill_((scaled < border) & (scaled < self._last_kept(scaled)), -torch.inf)
        if self._eta is not None:
            scaled.masked_fill_(self._below_eta(scaled, _as_wide(self._eta, scaled)), -torch.inf)
        return scaled

    def _outside_top_p(self, scaled: Tensor, top_p: Tensor) -> Tensor:
        """Whether a token lies outside of the top-p set.

        The sum is mostly reached within a few hundred tokens, so a CPU sorts the others only where it is not: 0.3 ms
        for 49152 words in place of 4.4. A GPU sorts all, because the host would have to wait for it to know.
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
        return _kth_largest(scaled, _as_wide(self._least, scaled), self._most_least)


def _as_wide(column_B1: Tensor, x: Tensor) -> Tensor:
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
