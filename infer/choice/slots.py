"""The choice rule for the slots of a batch: a position's token as a function of logits and seed.

choice(t) = argmax_v( filter(penalised logits / T)_v + g(seed, t, v) ), and at T = 0 the argmax of the penalised logits.
Logits of tokens that a grammar does not allow are -inf.
Plain decoding and the verification of a tree apply this same rule, so every drafter gives plain decoding's text
(Drafter-invariant speculative decoding, arXiv 2408.07978). The parameters are in infer/sampling.py, grammars in
infer/choice/grammar.py, the penalties in infer/choice/penalties.py, the filters in infer/choice/filters.py, and the
noise g in kernels/choice.py.
Shapes: B slots, N nodes, V vocabulary, W words of a grammar's mask.
"""

import torch
from torch import Tensor

from longdraft.infer.choice.filters import Filters
from longdraft.infer.choice.grammar import masked
from longdraft.infer.choice.penalties import Penalties
from longdraft.infer.graphs import fill
from longdraft.infer.history import History
from longdraft.infer.sampling import SamplingParams
from longdraft.kernels import backend
from longdraft.kernels.beam import best_tokens
from longdraft.kernels.choice import choose, gumbel_noise
from longdraft.kernels.transfer import from_host, integers

# Rows of noise cached for each slot on the CPU. Drafting, verifying and the next step need the same positions, so
# without a cache each row would be computed two or three times.
KEPT_ROWS = 32
# Scores that are filtered at once (some 64 nodes with a vocabulary of 128k), and the temporary bytes of each.
MOST_SCORES, SCORE_BYTES = 1 << 23, 40


def choice_bytes(batch: int, width: int, vocab_size: int, device: torch.device) -> int:
    """The most temporary bytes of the choice rule, for `width` nodes in each of `batch` slots."""
    if backend.is_host(device):
        return batch * vocab_size * 8
    # Filters and penalties take all nodes at once (infer/accept.py).
    return max(batch, min(batch * width, MOST_SCORES // vocab_size)) * vocab_size * SCORE_BYTES


class SlotSampling:
    """The sampling parameters of B slots as tensors, and the noise of their positions.

    A free slot is greedy; where steps are recorded, it has the parameters of another slot.

    Attributes:
        seeds: int64 [B]. temperatures: fp32 [B], 0 for a greedy slot. divisors: fp32 [B, 1], 1 for it.
        greedy: whether all slots are greedy.
    """

    def __init__(self, params: list[SamplingParams], device: torch.device):
        self.params, self.device = params, device
        seeds = [p.seed or 0 for p in params]
        self.seeds = integers([seed - 2**64 if seed >= 2**63 else seed for seed in seeds], device)
        self.greedy = all(p.temperature == 0 for p in params)
        self.penalties = Penalties(params, device)
        self.filters = Filters(params, device)
        self.temperatures = from_host(torch.tensor([p.temperature for p in params], dtype=torch.float32), device)
        self._sampled = self.temperatures[:, None] > 0
        self.divisors = torch.where(self._sampled, self.temperatures[:, None], 1.0)
        self._noise_rows: list[dict[int, Tensor]] = [{} for _ in params]  # of each slot, by position
        self._noise_width = 0  # the widest vocabulary that noise was asked for
        self._of_slots: dict[tuple[int, int], SlotSampling] = {}

    def of_slots(self, slots: slice) -> "SlotSampling":
        """The sampling of these slots alone, which shares their kept rows of noise."""
        key = slots.start, slots.stop
        if key not in self._of_slots:
            self._of_slots[key] = SlotSampling(self.params[slots], self.device)
            self._of_slots[key]._noise_rows = self._noise_rows[slots]
        return self._of_slots[key]

    def follow(self, other: "SlotSampling") -> bool:
        """Copy another's parameters into the tensors of this one, so that recorded work (infer/graphs.py) uses them.
        Returns False, and copies nothing, if the kinds differ."""
        if self.kind != other.kind:
            return False
        fill(self._columns, other._columns)
        self.penalties.follow(other.penalties)
        self.params = other.params
        self._noise_rows, self._noise_width = other._noise_rows, other._noise_width
        return True

    @property
    def _columns(self) -> tuple[Tensor | None, ...]:
        temperatures = self.temperatures, self._sampled, self.divisors
        return self.seeds, *temperatures, *self.filters.columns, *self.penalties.columns

    @property
    def kind(self) -> tuple:
        """Everything on the host that the work depends on: equal kinds queue the same work."""
        absent = tuple(column is None for column in self._columns)
        penalties = self.penalties.widest, self.penalties.biases is None, self.penalties.held_back is None
        limits = *self.filters.limits, *penalties
        return len(self.params), self.greedy, *limits, absent

    def noise(self, positions_B: Tensor, vocab_size: int) -> Tensor:
        """The noise g(seed, t, v) of the token at absolute position t = positions_B[b] of each slot, fp32 [B, V]; 0 for
        a greedy slot.

        Drafter and verifier share this tensor; do not write to it.
        """
        if not backend.is_host(self.device):  # only a CPU keeps rows, see KEPT_ROWS
            return gumbel_noise(self.seeds, positions_B[:, None], vocab_size)[:, 0] * self._sampled
        # The noise of a token does not depend on the vocabulary's size, so the widest row serves all sizes.
        self._noise_width = max(self._noise_width, vocab_size)
        positions, kept = positions_B.tolist(), self._noise_rows
        missing = [b for b, t in enumerate(positions) if t not in kept[b] or len(kept[b][t]) < vocab_size]
        if missing:
            fresh = gumbel_noise(self.seeds[missing], positions_B[missing, None], self._noise_width)
            for b, row in zip(missing, (fresh[:, 0] * self._sampled[missing]).unbind(), strict=True):
                if len(kept[b]) >= KEPT_ROWS:
                    del kept[b][min(kept[b])]
                kept[b][positions[b]] = row
        rows = [kept[b][t][:vocab_size] for b, t in enumerate(positions)]
        return rows[0][None] if len(rows) == 1 else torch.stack(rows)

    def best(
        self,
        logits_BTV: Tensor,
        history: History,
        positions_B: Tensor,
        offset: int,
        count: int,
        token_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The `count` candidates of each row with the best scores, for the token `offset` after each root: penalised
        logits / T + its noise. Filters are skipped, because they only drop what ranks low anyway.

        Args:
            history: valid through the roots; penalties are those of the roots.
            positions_B: int64, the roots' absolute positions.
            token_ids: int64 [V], the target's ids of a restricted vocabulary; None: all, in order.

        Returns: log-probabilities under the softmax over the scores (fp32, -inf where everything is banned), and
            indices into V.
        """
        logits_BTV = self.penalties.apply(logits_BTV, history, positions_B[:, None], ids_R=token_ids)
        if self.greedy:
            return best_tokens(logits_BTV, count)
        width = logits_BTV.shape[-1] if token_ids is None else self.penalties.width_of(token_ids)
        noise_BV = self.noise(positions_B + offset, width)
        return best_tokens(logits_BTV, count, self.divisors[:, 0], noise_BV, token_ids)

    def choose(
        self, logits_BV: Tensor, history: History, positions_B: Tensor, allowed_BW: Tensor | None = None
    ) -> Tensor:
        """The choice rule: the target's token at positions_B + 1, int64 [B].

        Args:
            logits_BV: of the nodes at absolute positions positions_B (int64).
            history: valid through positions_B, so it has the context, the nodes' ancestors and the nodes themselves.
            allowed_BW: int32, which tokens the slots' grammars allow there (`allowed_tokens`); None: all.
        """
        if allowed_BW is not None:
            logits_BV = masked(logits_BV, allowed_BW)
        # On a CPU the argmax of bf16 takes four times as long as the conversion to fp32 and its argmax.
        return self.scores(logits_BV, history, positions_B).float().argmax(dim=-1)

    def choose_all(
        self,
        logits_BNV: Tensor,
        history: History,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        ancestors_BNN: Tensor | None = None,
        allowed_BNW: Tensor | None = None,
    ) -> Tensor:
        """`choose` at all nodes of a tree at once, int64 [B, N], so that filters run once.

        Args:
            history: valid through the roots.
            tokens_BN, positions_BN: int64, of the nodes, the root first.
            ancestors_BNN: bool, [b, i, j]: j is i itself or above it; None where there is the root alone.
            allowed_BNW: int32, which tokens the slots' grammars allow after each node; None: all.
        """
        if not self.penalties.any and not self.filters.any and allowed_BNW is None:
            return choose(logits_BNV, self.seeds, positions_BN + 1, self.temperatures)
        chosen = []
        n_slots, _, vocab = logits_BNV.shape
        first, n_nodes = 0, max(1, MOST_SCORES // (n_slots * vocab))
        for logits_BMV in logits_BNV.split(n_nodes, dim=1):
            if allowed_BNW is not None:
                logits_BMV = masked(logits_BMV, allowed_BNW[:, first : first + n_nodes])
            scores_BMV = self.penalties.apply(logits_BMV, history, positions_BN, tokens_BN, ancestors_BNN, first)
            if not self.greedy:
                next_BM = positions_BN[:, first : first + n_nodes] + 1
                noise_BMV = gumbel_noise(self.seeds, next_BM, vocab) * self._sampled[..., None]
                scores_BMV = self.filtered(scores_BMV) + noise_BMV
            chosen.append(scores_BMV.float().argmax(dim=-1))
            first += n_nodes
        return torch.cat(chosen, dim=1)

    def scores(self, logits_BV: Tensor, history: History, positions_B: Tensor) -> Tensor:
        """What `choose` takes the argmax of: filtered penalised logits / T plus noise, or no noise if greedy."""
        logits_B1V = self.penalties.apply(logits_BV[:, None], history, positions_B[:, None])
        if not self.greedy:
            logits_B1V = self.filtered(logits_B1V) + self.noise(positions_B + 1, logits_BV.shape[-1])[:, None]
        return logits_B1V[:, 0]

    def filtered(self, logits_BNV: Tensor) -> Tensor:
        """Logits / T in fp32, with -inf for what the filters drop."""
        return self.filters.apply(logits_BNV.float() / self.divisors[..., None])
