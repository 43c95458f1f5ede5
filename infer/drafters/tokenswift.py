"""TokenSwift's drafter (arXiv 2502.18890, section 3): chained heads on the target's own state fill a static tree.

Without a draft pass the heads read the state just before the root, at p - 1 for a root at p (infer/drafters/heads.py):
head i proposes the token at p + i, and the levels are [3, 3, 3]. With a draft pass the target runs over the root on a
selected cache (infer/caches/partial.py): its own logits propose the token at p + 1, head i that at p + 1 + i, and the
levels are [1, 3, 3, 3]. infer/costs.py measures whether the pass pays. The heads are in
models/drafts/tokenswift.py, the n-grams that join them in infer/drafters/ngrams.py.
Shapes: B slots, D hidden, I levels, K ranks.
"""

from collections.abc import Sequence
from typing import Literal

import torch

from longdraft.infer.accept import AcceptResult
from longdraft.infer.budget import Budget
from longdraft.infer.caches.partial import SelectedCache, Selection, refuse_windows
from longdraft.infer.drafters.base import Count, CountOrZero, Drafter, Request
from longdraft.infer.drafters.combine import Combined
from longdraft.infer.drafters.heads import HeadsDrafter, Shape
from longdraft.infer.drafters.ngrams import Ngrams
from longdraft.infer.slot_state import SlotState
from longdraft.infer.tree import TokenTree, TreeShape
from longdraft.models.drafts.tokenswift import TokenSwift
from longdraft.models.footprint import Allocations
from longdraft.models.kv_cache import KVCache
from longdraft.models.passes import Pass, TargetOutput
from longdraft.models.schema import Instance, validated
from longdraft.models.target import Target

# First tokens that always stay in the selected cache.
SINKS = 16


@validated
def tokenswift(
    target: Instance[Target],
    draft: Instance[TokenSwift],
    shape: Shape | None = None,
    *,
    draft_pass: Literal["auto", "always", "never"] = "auto",
    budget: Count = 4096,
    ngrams: CountOrZero = 20,
) -> Drafter:
    """TokenSwift as published: its heads, and in the same tree the text's most frequent n-grams.

    Args:
        shape: which rank combinations of the heads are nodes, best first, or the number of ranks in each level of a
            full Cartesian tree; None means 3 ranks for each head. A draft pass puts one more node, the target's own
            proposal, between the root and this tree.
        draft_pass: "always", "never", or "auto", which measures.
        budget: rows of the selected cache, for each layer and KV head.
        ngrams: how many 4-grams join the tree; 0 for none.

    Raises:
        ValueError: a draft that does not fit the target, a tree that does not fit the draft, or options out of range.
    """
    heads = TokenSwiftDrafter(target, draft, shape, draft_pass, budget)
    return Combined([heads, Ngrams(ngrams, trunk=heads.max_depth - heads.shape.depth)]) if ngrams else heads


class TokenSwiftDrafter(HeadsDrafter):
    """The heads' part of TokenSwift. Its arguments are those of `tokenswift`."""

    def __init__(
        self,
        target: Target,
        draft: TokenSwift,
        shape: Shape | None = None,
        draft_pass: str = "auto",
        budget: int = 4096,
    ):
        super().__init__(target, draft, shape)
        self.target, self._draft_pass, self._selection = target, draft_pass, Selection(budget, fixed=SINKS)
        if draft_pass == "always":
            refuse_windows(target.model.config, "draft_pass='always'")
        self._pass_allowed = draft_pass != "never" and not any(target.model.config.sliding_windows or ())
        # The tree of a proposal with a draft pass. Its nodes have classes of their own.
        self._pass_shape = TreeShape(((0,), *((0, *node) for node in self.shape.nodes)), 1 + len(self.shape.nodes))
        if self._pass_allowed:
            self.max_nodes, self.max_depth = len(self._pass_shape.nodes), self._pass_shape.depth
        self.try_draft_pass_beyond = self._selection.budget if self._pass_allowed and draft_pass == "auto" else None
        self._selected: SelectedCache | None = None  # where the pass may be taken

    @property
    def n_classes(self) -> int:
        return self._pass_shape.first_class + len(self._pass_shape.nodes)

    @property
    def needs(self) -> frozenset[str]:
        return super().needs if self._selected is None else super().needs | self._selected.needs

    def _may_pass(self, capacity: int) -> bool:
        """Whether the draft pass may ever be taken on a full cache of this capacity."""
        return self._pass_allowed and (self._draft_pass == "always" or capacity > self._selection.budget)

    def allocations(self, batch: int, capacity: int) -> Allocations:
        like, dtype = self.target.model.config, self.target.model.embed_tokens.weight.dtype
        selected = self._selection.allocations(like, dtype, batch, capacity, tail=1)
        return selected if self._may_pass(capacity) else {}

    def on_start(self, slot: int, request: Request, cache: KVCache) -> None:
        super().on_start(slot, request, cache)
        if self._selected is not None and self._selected.full is not cache:
            self._selected = None
        if self._selected is None and self._may_pass(cache.capacity):
            like = self.target.model.config
            self._selected = SelectedCache(cache, self._selection, like, tail=1, depth=self.max_depth)
        if self._selected is not None:
            self._selected.start(slot)

    def buffers(self) -> tuple[object, ...]:
        return *super().buffers(), self._selected

    def on_prefill(self, slot: int, prompt: Sequence[int], start: int, end: int, output: TargetOutput) -> None:
        super().on_prefill(slot, prompt, start, end, output)
        if self._selected is not None and end == len(prompt) - 1:
            self._selected.on_prefill(slot, output.queries, end)

    def plan(self, state: SlotState, budget: Budget) -> tuple[int, bool]:
        """The number of nodes, and whether the proposal has a draft pass."""
        takes_pass = self._selected is not None and (self._draft_pass == "always" or budget.draft_pass is True)
        self.trunk = int(takes_pass)
        return budget.max_nodes, takes_pass

    def grow(self, state: SlotState, budget: Budget, plan: tuple[int, bool]) -> TokenTree:
        """The heads' tree below each root; with a draft pass, below the token that the target itself proposes."""
        max_nodes, takes_pass = plan
        if not takes_pass:
            return super().grow(state, budget, max_nodes)
        shape, needs = self._pass_shape.first(max_nodes), self.draft.needs | {"logits"}
        output = self.target.model(Pass(state.roots[:, None], self._selected, state.positions[:, None], needs=needs))
        hidden_B1D = self.state_of(output)
        assert output.logits is not None and hidden_B1D is not None
        _, ranked_BIK = state.best(output.logits, 1, shape.ranks)
        if shape.depth > 1:
            hidden_BD = hidden_B1D[:, 0].to(self.hidden_BD.dtype)
            ranked_BIK = torch.cat([ranked_BIK, self.ranked(state, hidden_BD, shape, first=2)], dim=1)
        return shape.fill(state.roots, ranked_BIK)

    def on_step(self, state: SlotState, tree: TokenTree, accepted: AcceptResult, output: TargetOutput) -> None:
        super().on_step(state, tree, accepted, output)
        if self._selected is not None:
            self._selected.on_step(state.positions, accepted, output.queries)

    def release(self) -> None:
        self._selected = None
