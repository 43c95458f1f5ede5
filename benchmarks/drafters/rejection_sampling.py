"""What classical rejection sampling would accept at the first place after a root, compared with our rule.

Classical rejection (Leviathan et al., arXiv 2211.17192) draws a token from the draft's distribution q and accepts it
with probability min(1, p / q), on average the overlap sum_v min(p_v, q_v). Our rule takes the draft's best token,
ranked with or without the noise of the target's choice, and accepts it if it is that choice. Both distributions have
the same temperature, filters and penalties. Drafters that rank nothing (look-ups) have no q.
Shapes: B = 1 slot, V vocabulary.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from longdraft.infer.choice.slots import SlotSampling
from longdraft.infer.engine import Engine
from longdraft.infer.history import History
from longdraft.infer.sampling import SamplingParams

# Figures of a step whose first place a drafter ranked: "classical" is sum_v min(p_v, q_v); "with" and "without" say
# whether the drafter's best token, ranked with the noise or without it, was the target's choice.
FirstPlace = dict[str, float]


def shares(seen: Sequence[FirstPlace]) -> FirstPlace | None:
    """The mean of each figure, or None if nothing was ranked."""
    return {name: sum(one[name] for one in seen) / len(seen) for name in seen[0]} if seen else None


def first_places(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> list[FirstPlace]:
    """Decode the prompts one at a time, at a temperature above 0, and return every step's first place.

    engine: verifies every node, records no steps, and ranks with the noise. Its tokens are not affected.
    """
    seen: list[FirstPlace] = []
    pool = engine.pool
    before, pool.make_sampling = pool.make_sampling, partial(_Watched, seen)
    try:
        for prompt in prompts:
            engine.generate([prompt], params)
    finally:
        pool.make_sampling = before
    return seen


class _Watched(SlotSampling):
    """Keeps the draft's distribution for the first place until the target has chosen there, and compares them."""

    def __init__(self, seen: list[FirstPlace], *args):
        super().__init__(*args)
        self._seen = seen
        self._draft: tuple[Tensor, Tensor, int, int] | None = None

    def _distribution(self, logits: Tensor) -> Tensor:
        return self.filtered(logits.reshape(1, -1)).softmax(-1)[0]

    def ranking(self, *args) -> Tensor:
        self._watch(*args)
        return super().ranking(*args)

    def best(self, logits_BTV: Tensor, history: History, positions_B: Tensor, offset: int, count: int, *token_ids):
        self._watch(logits_BTV, history, positions_B, offset, *token_ids)
        return super().best(logits_BTV, history, positions_B, offset, count, *token_ids)

    def _watch(
        self, logits: Tensor, history: History, positions_B: Tensor, offset: int, token_ids: Tensor | None = None
    ) -> None:
        if offset != 1 or self._draft is not None:
            return
        scores = super().ranking(logits, history, positions_B, offset, token_ids)
        penalised = self.penalties.apply(logits, history, positions_B, token_ids).reshape(-1)
        best = torch.stack([scores.reshape(-1).argmax(), penalised.argmax()])
        with_noise, without = (best if token_ids is None else token_ids[best]).tolist()
        q_V = self._distribution(penalised)
        if token_ids is not None:
            q_V = torch.zeros(int(token_ids.max()) + 1, device=q_V.device).index_put_((token_ids,), q_V)
        self._draft = positions_B.clone(), q_V, with_noise, without

    def choose(self, logits_BV: Tensor, history: History, positions_B: Tensor) -> Tensor:
        chosen_B = super().choose(logits_BV, history, positions_B)
        self._compare(logits_BV, history, positions_B, chosen_B)
        return chosen_B

    def choose_all(
        self, logits_BNV: Tensor, history: History, tokens_BN: Tensor, positions_BN: Tensor, *rest
    ) -> Tensor:
        chosen_BN = super().choose_all(logits_BNV, history, tokens_BN, positions_BN, *rest)
        self._compare(logits_BNV[:, 0], history, positions_BN[:, 0], chosen_BN[:, 0])
        return chosen_BN

    def _compare(self, logits_BV: Tensor, history: History, positions_B: Tensor, chosen_B: Tensor) -> None:
        if self._draft is None or not torch.equal(self._draft[0], positions_B):
            return
        _, q_V, with_noise, without = self._draft
        self._draft = None
        p_V = self._distribution(self.penalties.apply(logits_BV, history, positions_B))
        overlap, chosen = float(torch.minimum(p_V[: len(q_V)], q_V).sum()), int(chosen_B)
        self._seen.append({"classical": overlap, "with": chosen == with_noise, "without": chosen == without})
