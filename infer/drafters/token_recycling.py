"""Token Recycling: the target's own candidates after a token are proposed again when the token comes up again.

A table holds, for every token of the vocabulary, the 8 best candidates that the target last computed after it. Each
step fills a fixed tree from the table, level by level, and writes back the candidates of every verified node, accepted
or not (Luo et al., "Turning Trash into Treasure", arXiv 2408.08696). There is no training and no draft pass. The table
lives as long as the drafter, so requests start with what earlier ones left.

The table also holds the candidates' logits, so that at T > 0 they are ranked with the known noise of their position; a
request's penalties are left to verification.
Shapes: B slots, N tree nodes, M rows to write, L nodes of a level, K candidates, V vocabulary.
"""

from collections.abc import Sequence
from math import prod
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from longdraft.infer.accept import AcceptResult
from longdraft.infer.budget import Budget
from longdraft.infer.drafters.base import DeviceDrafter, Request
from longdraft.infer.slot_state import SlotState
from longdraft.infer.tree import PAD, TokenTree, TreeShape
from longdraft.kernels.transfer import integers
from longdraft.models.footprint import Allocations
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
# While a prompt is read, logits of SEED_ROWS rows are computed at once; on a GPU, where every such call reads the whole
# LM head, as many more as fit SEED_BYTES.
SEED_ROWS, SEED_BYTES = 64, 2**27
# Rows of a column in `largest`: fewer make its first round longer, more its second.
BLOCK = 32
# What prefill passes are asked for: the candidates after every prompt token are written, so that the first steps have
# something to propose.
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

    def odds(node: tuple[int, ...]) -> int:
        return prod(2 * (rank + 1) for rank in node)

    return sorted(nodes, key=odds)  # stable: levels first, then lexicographic; a child's odds exceed its parent's


class _Level(NamedTuple):
    """One level of the tree: its nodes' indices, their parents' places in the level above, and their ranks."""

    nodes_L: Tensor
    above_L: Tensor
    ranks_L: Tensor


class TokenRecycling(DeviceDrafter):
    """Fills the first `nodes` nodes of the static tree from the table.

    Every verified node writes its token's row. If several nodes have the same token, the deepest one wins, among
    equally deep ones that of the last slot, and within a slot the last one. Of a prompt's tokens the last occurrence
    wins.

    Args:
        target: the loaded target, for its LM head and its vocabulary.
        nodes: 1 to 80.
    """

    @validated
    def __init__(self, target: Instance[Target], nodes: Annotated[Int, Field(ge=1, le=80)] = 80):
        self.target, paths = target, static_tree()
        self.shape = TreeShape(tuple(paths[:nodes]))
        self.max_nodes, self.max_depth = nodes, self.shape.depth
        self.needs, self.learns_from = SEEDING, frozenset({"logits"})
        weight = target.model.lm_head.weight
        self.vocab_size, self._device = weight.shape[0], weight.device
        fitting = SEED_BYTES // (self.vocab_size * weight.element_size())
        self._seed_rows = SEED_ROWS if self._device.type == "cpu" else max(SEED_ROWS, fitting)
        # After the tokens' rows come TRASH, for void writes, and NOTHING, which stays -1 and is read at index -1.
        shape_VK = self.vocab_size + 2, CANDIDATES
        self._ids_VK = torch.full(shape_VK, -1, dtype=torch.int32, device=self._device)
        self._logits_VK = torch.full(shape_VK, -torch.inf, dtype=torch.float16, device=self._device)
        self._levels = self._make_levels()

    def _make_levels(self) -> list[_Level]:
        levels: list[_Level] = []
        above: list[tuple[int, ...]] = [()]
        for depth in range(1, self.max_depth + 1):
            numbers = [i for i, node in enumerate(self.shape.nodes, 1) if len(node) == depth]
            level = [self.shape.nodes[i - 1] for i in numbers]
            fields = numbers, [above.index(node[:-1]) for node in level], [node[-1] for node in level]
            levels.append(_Level(*(torch.tensor(field, device=self._device) for field in fields)))
            above = level
        return levels

    @property
    def candidates(self) -> Tensor:
        """int32 [V, K]: the table; -1 in rows that were never written."""
        return self._ids_VK[: self.vocab_size]

    @property
    def logits(self) -> Tensor:
        """fp16 [V, K]: the candidates' logits, largest first."""
        return self._logits_VK[: self.vocab_size]

    def allocations(self, batch: int, capacity: int) -> Allocations:
        tables = [(table.shape, table.dtype) for table in (self._ids_VK, self._logits_VK)]
        logits = [((self._seed_rows, self.vocab_size), self.target.model.lm_head.weight.dtype)]
        return {"token recycling's table": tables, "token recycling's logits of a prompt": logits}

    def on_start(self, slot: int, request: Request, cache: KVCache) -> None:
        self.needs = SEEDING

    @torch.no_grad()
    def on_prefill(self, slot: int, prompt: Sequence[int], start: int, end: int, output: TargetOutput) -> None:
        if output.post_norm is None:  # rows of an earlier prompt, which the table has seen
            return
        # Only a token's last occurrence in the chunk is written, so the LM head runs only there.
        last = {token: place for place, token in enumerate(prompt[start:end])}
        states_MD = output.post_norm[0]
        places_M, tokens_M = integers(list(last.values()), self._device), integers(list(last), self._device)
        for places, tokens in zip(places_M.split(self._seed_rows), tokens_M.split(self._seed_rows), strict=True):
            logits_MV = self.target.model.lm_head(states_MD[places])
            self._write(tokens, *largest(logits_MV, CANDIDATES))

    def _write(self, tokens_M: Tensor, logits_MK: Tensor, ids_MK: Tensor) -> None:
        """Write rows of the table. tokens_M are all different, except TRASH."""
        self._ids_VK[tokens_M, : ids_MK.shape[1]] = ids_MK.int()
        self._logits_VK[tokens_M, : ids_MK.shape[1]] = logits_MK.half()

    def plan(self, state: SlotState, budget: Budget) -> int:
        self.needs = frozenset({"logits"})
        return budget.max_nodes

    def grow(self, state: SlotState, budget: Budget, plan: int) -> TokenTree:
        """The tree of the candidates that the table holds after the roots, at most `plan` nodes."""
        roots_B, batch = state.roots, len(state.roots)
        tokens_BN = torch.empty(batch, 1 + self.max_nodes, dtype=torch.int64, device=self._device)
        tokens_BN[:, 0] = roots_B
        tokens_BL = roots_B[:, None]
        for depth, level in enumerate(self._levels, 1):
            ids_BLK = self._ranked(state, tokens_BL, depth)
            tokens_BL = ids_BLK[:, level.above_L, level.ranks_L]
            tokens_BN[:, level.nodes_L] = tokens_BL
        shape = self.shape.first(plan).tree(batch, roots_B.device)
        tokens_BN = tokens_BN[:, : shape.width]
        return shape.with_tokens(tokens_BN.clamp(min=0), shape.parents.masked_fill(tokens_BN < 0, PAD))

    def _ranked(self, state: SlotState, tokens_BL: Tensor, depth: int) -> Tensor:
        """int64 [B, L, K]: the candidates after these nodes, best first; -1 for none.

        tokens_BL: -1 for a missing node, which reads the row NOTHING.
        """
        ids_BLK = self._ids_VK[tokens_BL].long()
        if state.sampling.greedy:
            return ids_BLK
        logits_BLK = self._logits_VK[tokens_BL].float()
        noise_BV = state.sampling.noise(state.positions + depth, self.vocab_size)
        noise_BLK = noise_BV.gather(1, ids_BLK.clamp(min=0).flatten(1)).view_as(logits_BLK)
        temperatures_B11 = state.sampling.temperatures[:, None, None]
        warm_B11 = temperatures_B11 > 0
        scores_BLK = torch.where(warm_B11, logits_BLK / temperatures_B11 + noise_BLK, logits_BLK)
        # Stable, so that in a greedy slot candidates with equal fp16 logits keep the table's order.
        return ids_BLK.gather(2, scores_BLK.sort(dim=2, descending=True, stable=True).indices)

    def update(self, state: SlotState, tree: TokenTree, accepted: AcceptResult, output: TargetOutput) -> None:
        """Write the rows of a verified tree's tokens, without reading on the host which nodes are padding."""
        assert output.logits is not None
        there_BN = (tree.parents != PAD) & (accepted.counts > 0)[:, None]
        tokens_M, places_M = self._last_of_each(tree.tokens, tree.depths, there_BN)
        logits_MK, ids_MK = largest(output.logits.flatten(0, 1), CANDIDATES)
        self._write(tokens_M, logits_MK[places_M], ids_MK[places_M])

    def _last_of_each(self, tokens_BN: Tensor, depths_BN: Tensor, there_BN: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of a verified tree, and each one's winning node (slot * N + node) in the class's order.

        All other nodes are listed too, with TRASH as their token, because dropping them would wait for the device.
        """
        tokens_M, count, there_M = tokens_BN.flatten(), tokens_BN.numel(), there_BN.flatten()
        order_M = depths_BN.flatten() * count + torch.arange(count, device=self._device)
        # Sorted by token, then by order; padding comes first.
        keys_M = torch.where(there_M, tokens_M * (count * tokens_BN.shape[1]) + order_M, -1)
        places_M = keys_M.argsort()
        tokens_M = tokens_M[places_M]
        last_M = there_M[places_M]
        last_M[:-1] &= tokens_M[:-1] != tokens_M[1:]
        return torch.where(last_M, tokens_M, self.vocab_size), places_M


def largest(logits_MV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` largest logits of each row (all, if there are fewer) and their indices, exactly as `topk` gives them.

    On a CPU this takes two rounds: the k largest values are in those k columns of a [BLOCK, V / BLOCK] view that have
    the largest maxima. Among equal logits it may choose others.
    """
    vocab = logits_MV.shape[1]
    columns = vocab // BLOCK
    if logits_MV.device.type != "cpu" or columns < 4 * k:
        return logits_MV.topk(min(k, vocab), dim=1)
    blocks_MRC = logits_MV[:, : columns * BLOCK].unflatten(1, (BLOCK, columns))
    best_Mk = blocks_MRC.amax(1).topk(k, dim=1).indices
    inside = blocks_MRC.gather(2, best_Mk[:, None].expand(-1, BLOCK, -1)).flatten(1)
    values_Mk, places_Mk = torch.cat([inside, logits_MV[:, columns * BLOCK :]], dim=1).topk(k, dim=1)
    rest = places_Mk - BLOCK * k
    ids_Mk = places_Mk // k * columns + best_Mk.gather(1, places_Mk % k)
    return values_Mk, torch.where(rest < 0, ids_Mk, columns * BLOCK + rest)
