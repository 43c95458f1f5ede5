"""LongSpec's drafter (arXiv 2502.17421, section 3): a beam of the draft block over the target's last-layer cache.

Pass l = 1, 2, ... runs the nodes of level l - 1 as queries (first the root, at position p) and proposes level l. The
self-attention of these queries reads the draft's window and their ancestors. Their cross-attention reads the target's
committed keys, which end at p - 1: the noise shift l of training. The draft's own keys and values depend on token and
position only, so there is no prefill: committed tokens are read from the history, whoever proposed them.
The block is in models/drafts/longspec.py, its passes and keys in infer/caches/longspec.py.
Shapes: B slots, T queries of a pass, W nodes of a level, N rows of the tree so far, E draft vocabulary, D hidden.
"""

from collections.abc import Sequence

import torch

from longdraft.infer.accept import AcceptResult
from longdraft.infer.budget import Budget
from longdraft.infer.caches.longspec import DraftPasses, draft_passes, draft_rows
from longdraft.infer.drafters.base import Count, DeviceDrafter, Levels, Request, check_draft
from longdraft.infer.slot_state import SlotState
from longdraft.infer.tree import ROOT, TokenTree
from longdraft.kernels import backend
from longdraft.kernels.beam import Level, beam_level
from longdraft.models.drafts.longspec import LongSpec, shape_of
from longdraft.models.footprint import Allocations
from longdraft.models.kv_cache import KVCache
from longdraft.models.passes import TargetOutput
from longdraft.models.schema import Instance, validated
from longdraft.models.target import Target

# The paper's first level has 4 nodes. More need no further pass of the draft, and where verifying a few nodes costs
# hardly more than verifying the root, this level brings most of the gain.
WIDTHS = (8, 16, 16, 16, 16)
# On a CPU, where every query token costs, only a level's best nodes are extended; a step commits almost as many tokens.
EXTENDED_ON_CPU = 4
# Borders of a level's classes, by surprise: minus a node's log-probability given its parent, in nats.
SURPRISE = (0.05, 0.2, 0.5, 1.0, 1.7, 2.5, 3.5, 5.0, 7.0)


class LongSpecDrafter(DeviceDrafter):
    """Beam search that discards nothing: nodes that are not extended stay in the tree.

    A node's score is the sum of its path's log-probabilities. At T > 0 these are the log-softmax of logits / T + noise:
    the target's choice is the argmax of its own logits / T plus the same noise, and if the draft's sum differs from the
    target's by independent Gumbel errors, the softmax is each token's chance of being that choice.

    Args:
        target: the loaded target (models/target.py).
        draft: a trained block, in the target's dtype and on its device. A CPU with bf16 instructions runs a bf16 block
            in int8 (infer/caches/longspec.py).
        widths: nodes of each level; ones make a chain. A lower `max_nodes` narrows all levels alike.
        extended: how many nodes of a level, the best ones, are queries of the next pass; None: all on a GPU, and
            EXTENDED_ON_CPU on a CPU.
    """

    @validated
    def __init__(
        self,
        target: Instance[Target],
        draft: Instance[LongSpec],
        widths: Levels = WIDTHS,
        extended: Count | None = None,
    ):
        check_draft(target, draft, shape_of(target.model.config))
        if len(widths) > draft.config.window:
            raise ValueError(f"widths: {len(widths)} levels, more than the {draft.config.window} of the draft's window")
        self.widths = widths
        self.draft, self._target = draft, target.model
        self._head_ED = draft.head(target.model.lm_head.weight)
        self.max_nodes, self.max_depth = sum(self.widths), len(self.widths)
        self.extended = extended or (EXTENDED_ON_CPU if backend.is_host(self._head_ED.device) else max(self.widths))
        # The last level's nodes are never queries.
        self._tree_rows = 1 + sum(min(width, self.extended) for width in self.widths[:-1])
        self._borders = torch.tensor(SURPRISE, device=self._head_ED.device)
        self._passes: DraftPasses | None = None

    @property
    def n_classes(self) -> int:
        return 1 + self.max_depth * (len(SURPRISE) + 1)

    @property
    def class_stages(self) -> Sequence[int]:
        return [0, *(level for level in range(1, 1 + self.max_depth) for _ in range(len(SURPRISE) + 1))]

    def on_start(self, slot: int, request: Request, cache: KVCache) -> None:
        if self._passes is None or self._passes.cache is not cache:
            self._passes = draft_passes(self.draft, self._target, self._head_ED, cache, self._tree_rows)
        self._passes.start(slot, len(request.prompt))

    def on_step(self, state: SlotState, tree: TokenTree, accepted: AcceptResult, output: TargetOutput) -> None:
        assert self._passes is not None
        self._passes.on_step(accepted.nodes.shape[1])

    def buffers(self) -> tuple[object, ...]:
        return (self._passes,)

    def release(self) -> None:
        self._passes = None

    def allocations(self, batch: int, capacity: int) -> Allocations:
        return {"draft window": draft_rows(self.draft, self._target, self._head_ED, batch, capacity, self._tree_rows)}

    def plan(self, state: SlotState, budget: Budget) -> tuple[int, ...]:
        """How many positions before the roots the draft must read, at most, and the widths of the levels."""
        assert self._passes is not None
        widths = _fit(self.widths, budget.max_nodes)[: budget.stages]
        self.num_query_tokens = min(max(widths, default=1), self.extended)
        return self._passes.plan(state, len(widths)), *widths

    def grow(self, state: SlotState, budget: Budget, plan: tuple[int, ...]) -> TokenTree:
        n_unread, *widths = plan
        assert self._passes is not None
        self._passes.begin(state, n_unread)
        level = self._root_level(state)
        nodes_3BN, first = level.nodes_3BW, 0  # of the tree so far; index in it of the first node that is extended
        tree = TokenTree(*nodes_3BN)
        for stage, width in enumerate(widths, start=1):
            tokens_BT, scores_BT, open_BTN = level.nodes_3BW[0], level.scores_BW, level.open_BWN
            if (others := tokens_BT.shape[1] - self.extended) > 0:
                tokens_BT, scores_BT = tokens_BT[:, :-others], scores_BT[:, :-others]
                open_BTN = open_BTN[:, :-others, :-others]  # the level's own columns are the last ones
            logits_BTE = self._passes.logits(state, tokens_BT, stage, open_BTN)
            best = state.best(logits_BTE, stage, min(width, logits_BTE.shape[-1]), self.draft.token_ids)
            first_class = 1 + (stage - 1) * (len(SURPRISE) + 1)
            level = beam_level(
                *best, scores_BT, open_BTN, width, first, first_class, self._borders, self.draft.token_ids
            )
            first = nodes_3BN.shape[2]
            nodes_3BN = torch.cat((nodes_3BN, level.nodes_3BW), 2)
            tree = TokenTree(*nodes_3BN)
            if stage < len(widths) and not budget.goes_on(tree):
                break
        return tree

    def _root_level(self, state: SlotState) -> Level:
        """The roots as level 0. The score of an inactive slot's root is -inf, which makes its nodes padding."""
        roots_B1 = state.roots[:, None]
        nodes_3B1 = torch.stack((roots_B1, torch.full_like(roots_B1, ROOT), torch.zeros_like(roots_B1)))
        scores_B1 = torch.zeros_like(roots_B1, dtype=torch.float32).masked_fill_(~state.active[:, None], -torch.inf)
        return Level(nodes_3B1, scores_B1, torch.ones_like(roots_B1, dtype=torch.bool)[:, :, None])


def _fit(widths: Sequence[int], max_nodes: int) -> list[int]:
    """Narrow all levels alike until they have at most `max_nodes` nodes, at least one each. If there are fewer nodes
    than levels, the deepest levels are dropped."""
    widths = list(widths)[:max_nodes]
    narrow = [max(1, min(width, width * max_nodes // sum(widths))) for width in widths]
    while sum(narrow) > max_nodes:
        narrow[narrow.index(max(narrow))] -= 1
    for level, width in enumerate(widths):  # what rounding left over widens the first levels
        narrow[level] += min(width - narrow[level], max_nodes - sum(narrow))
    return narrow
