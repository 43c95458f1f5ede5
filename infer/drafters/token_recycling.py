"""Token Recycling: the target's candidates after a token are proposed again when the token recurs.

A table holds, for every token of the vocabulary, the 8 best candidates that the target last computed after it. Each
step fills a fixed tree from the table, level by level, and writes back the candidates of every verified node, accepted
or not (Luo et al., "Turning Trash into Treasure", arXiv 2408.08696). There is no training and no draft pass. The table
lives as long as the drafter, so requests start with the entries of earlier ones.

The table also holds the candidates' logits, so that at T > 0 they are ranked with the known noise of their position; a
request's penalties are left to verification.
Shapes: B slots, N tree nodes, M rows to write, L nodes of a level, K candidates, V vocabulary.
"""

from collections.abc import Sequence
from math import prod
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from longdraft.infer.accept import AcceptResult
from longdraft.infer.budget import Budget
from longdraft.infer.drafters.base import DeviceDrafter, Request
from longdraft.infer.slot_state import SlotState
from longdraft.infer.tree import PAD, TokenTree, TreeShape
from longdraft.kernels.transfer import integers
from longdraft.models.kv_cache import KVCache
from longdraft.models.passes import TargetOutput
from longdraft.models.schema import Instance, Int, validated
from longdraft.models.target import Target

CANDIDATES = 8
# Children of each node, level by level, nodes in lexicographic order of their ranks (Token Recycling, figure 5).
CHILD_COUNTS = (
    (8,),
    (8, 4, 3, 2, 1, 1, 1, 1),
    (8, 3, 2, 1, 1, 1, 1, 1, 2, 1, 0, 0, 1, 0, 0, 1, 0, 1, 1, 0, 0),
    (5, 2, 1, 1, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 1, 0, 0),
    (3, 1, 1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 1, 0, 0),
    (2, 0, 0, 1, 0, 0, 0, 0),
)
# During a prefill, the logits of this many rows are computed at once.
SEED_ROWS = 256
# Rows of a column in `largest`. Fewer make its first round slower, more make its second round slower.
BLOCK = 32
# What the drafter needs of prefill passes. They write the candidates after every prompt token, so that the first steps
# have something to propose.
SEEDING = frozenset({"post_norm"})


def static_tree() -> list[tuple[int, ...]]:
    """The published tree's 80 nodes as rank paths, best first by the product of 1 / (2 (rank + 1)) along the path.

    That product nearly explains the published tree (level 2 has exactly the paths whose ranks, counted from 1, multiply
    to at most 8), so the first nodes are the smaller tree that the same reasoning would give.
    """
    level: list[tuple[int, ...]] = [()]
    nodes: list[tuple[int, ...]] = []
    for counts in CHILD_COUNTS:
        level = [(*node, rank) for node, count in zip(level, counts, strict=True) for rank in range(count)]
        nodes += level

    # Stable: levels first, then lexicographic; a child's product exceeds its parent's.
    return sorted(nodes, key=lambda node: prod(2 * (rank + 1) for rank in node))


class TokenRecycling(DeviceDrafter):
    """Fills the first `nodes` nodes of the static tree from the table.

    Every verified node writes its token's row. If several nodes have the same token, the first one counts, which is the
    likeliest; in a prompt, a token's last occurrence.

    Args:
        target: the loaded target, for its LM head and its vocabulary.
        nodes: 1 to 80.

    Attributes:
        candidates: int32 [V + 2, K], the table; -1 in rows that were never written. After the tokens' rows come one for
            discarded writes, and one that stays -1 and is read at index -1.
        logits: fp16 [V + 2, K], the candidates' logits, largest first.
    """

    @validated
    def __init__(self, target: Instance[Target], nodes: Annotated[Int, Field(ge=1, le=80)] = 80):
        self.target, paths = target, static_tree()
        self.shape = TreeShape(tuple(paths[:nodes]))
        self.max_nodes, self.max_depth = nodes, self.shape.depth
        self.needs, self.learns_from = SEEDING, frozenset({"logits"})
        weight = target.model.lm_head.weight
        self.vocab_size, self._device = target.model.config.vocab_size, weight.device
        shape_VK = self.vocab_size + 2, CANDIDATES
        self.candidates = torch.full(shape_VK, -1, dtype=torch.int32, device=self._device)
        self.logits = torch.full(shape_VK, -torch.inf, dtype=torch.float16, device=self._device)
        self._levels = [self._level(depth) for depth in range(1, 1 + self.max_depth)]

    def _level(self, depth: int) -> tuple[Tensor, Tensor, Tensor]:
        """The nodes of a level of the tree, their parents, and their ranks; int64 [L]."""
        parents = self.shape.tree(1, self._device).parents[0]
        level = [(i, node[-1]) for i, node in enumerate(self.shape.nodes, 1) if len(node) == depth]
        nodes_L, ranks_L = torch.tensor(level, device=self._device).T
        return nodes_L, parents[nodes_L], ranks_L

    def on_start(self, slot: int, request: Request, cache: KVCache) -> None:
        self.needs = SEEDING

    @torch.no_grad()
    def on_prefill(self, slot: int, prompt: Sequence[int], start: int, end: int, output: TargetOutput) -> None:
        if output.post_norm is None:  # rows of an earlier prompt, which the table already has
            return
        # Only a token's last occurrence before the root is written, so the LM head runs only there.
        later = set(prompt[end:-1])
        last = {token: place for place, token in enumerate(prompt[start:end]) if token not in later}
        states_MD = output.post_norm[0]
        places_M, tokens_M = integers(list(last.values()), self._device), integers(list(last), self._device)
        for places, tokens in zip(places_M.split(SEED_ROWS), tokens_M.split(SEED_ROWS), strict=True):
            logits_MV = self.target.model.lm_head(states_MD[places])
            self._write(tokens, *largest(logits_MV, CANDIDATES))

    def _write(self, tokens_M: Tensor, logits_MK: Tensor, ids_MK: Tensor) -> None:
        """Write rows of the table. tokens_M are all different, except for discarded ones."""
        self.candidates[tokens_M, : ids_MK.shape[1]] = ids_MK.int()
        self.logits[tokens_M, : ids_MK.shape[1]] = logits_MK.half()

    def plan(self, state: SlotState, budget: Budget) -> int:
        self.needs = frozenset({"logits"})
        return budget.max_nodes

    def grow(self, state: SlotState, budget: Budget, plan: int) -> TokenTree:
        """The tree of the candidates that the table holds after the roots, at most `plan` nodes."""
        batch = len(state.roots)
        tokens_BN = torch.empty(batch, 1 + self.max_nodes, dtype=torch.int64, device=self._device)
        tokens_BN[:, 0] = state.roots
        for depth, (nodes_L, above_L, ranks_L) in enumerate(self._levels, 1):
            ids_BLK = self._ranked(state, tokens_BN[:, above_L], depth)
            tokens_BN[:, nodes_L] = ids_BLK.gather(2, ranks_L[:, None].expand(batch, -1, 1))[:, :, 0]
        shape = self.shape.first(plan).tree(batch, self._device)
        tokens_BN = tokens_BN[:, : shape.width]
        return shape.with_tokens(tokens_BN.clamp(min=0), shape.parents.masked_fill(tokens_BN < 0, PAD))

    def _ranked(self, state: SlotState, tokens_BL: Tensor, depth: int) -> Tensor:
        """int64 [B, L, K]: the candidates after these nodes, best first; -1 for none.

        tokens_BL: -1 for a missing node, which has no candidates.
        """
        ids_BLK = self.candidates[tokens_BL].long()
        if state.sampling.greedy:
            return ids_BLK
        noise_BV = state.sampling.noise(state.positions + depth, self.vocab_size)
        noise_BLK = noise_BV.gather(1, ids_BLK.clamp(min=0).flatten(1)).view_as(ids_BLK)
        scores_BLK = self.logits[tokens_BL].float() / state.sampling.divisors[..., None] + noise_BLK
        # Stable, so that in a greedy slot candidates with equal fp16 logits keep the table's order.
        return ids_BLK.gather(2, scores_BLK.sort(dim=2, descending=True, stable=True).indices)

    def update(self, state: SlotState, tree: TokenTree, accepted: AcceptResult, output: TargetOutput) -> None:
        """Write the rows of a verified tree's tokens, without reading on the host which nodes are padding."""
        assert output.logits is not None
        void = self.vocab_size
        there_BN = (tree.parents != PAD) & (accepted.counts > 0)[:, None]
        tokens_M = tree.tokens.masked_fill(~there_BN, void).flatten()
        places_M = torch.arange(len(tokens_M), device=self._device)
        first_V = places_M.new_full((1 + void,), len(places_M))
        is_first_M = first_V.scatter_reduce_(0, tokens_M, places_M, "amin")[tokens_M] == places_M
        self._write(tokens_M.masked_fill(~is_first_M, void), *largest(output.logits.flatten(0, 1), CANDIDATES))


def largest(logits_MV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` largest logits of each row (all, if there are fewer) and their indices.

    On a CPU this takes two rounds: the k largest values are in those k columns of a [BLOCK, V / BLOCK] view that have
    the largest maxima. They ignore the last V % BLOCK tokens.
    """
    vocab = logits_MV.shape[1]
    columns = vocab // BLOCK
    if logits_MV.device.type != "cpu" or columns < 4 * k:
        return logits_MV.topk(min(k, vocab), dim=1)
    blocks_MRC = logits_MV[:, : columns * BLOCK].unflatten(1, (BLOCK, columns))
    best_Mk = blocks_MRC.amax(1).topk(k, dim=1).indices
    inside = blocks_MRC.gather(2, best_Mk[:, None].expand(-1, BLOCK, -1)).flatten(1)
    values_Mk, places_Mk = inside.topk(k, dim=1)
    return values_Mk, places_Mk // k * columns + best_Mk.gather(1, places_Mk % k)
