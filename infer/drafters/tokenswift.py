"""TokenSwift's drafter (arXiv 2502.18890, section 3): chained heads on the target's own state fill a static tree.

Without a draft pass the heads read the state before the root, at p - 1 for a root at p (infer/drafters/heads.py): head
i proposes the token at p + i, levels [3, 3, 3]. With it the target runs over the root on a selected cache: its own row
proposes p + 1, head i proposes p + 1 + i, levels [1, 3, 3, 3]. Not here: the heads (models/drafts/tokenswift.py), the
n-grams that join them (infer/drafters/ngrams.py), the selected cache (infer/partial_cache.py), when the pass pays
(infer/policy.py). Shapes: B slots, D hidden, I levels, K ranks.
"""

from collections.abc import Mapping, Sequence

import torch

from longdraft.infer.accept import AcceptResult
from longdraft.infer.drafters.base import Drafter, Request, SlotState
from longdraft.infer.drafters.combine import Combined
from longdraft.infer.drafters.heads import HeadsDrafter
from longdraft.infer.drafters.ngrams import Ngrams
from longdraft.infer.options import integer, one_of
from longdraft.infer.partial_cache import RingCache, SelectedCache, refuse_windows, selected_bytes
from longdraft.infer.selection import TopTokens
from longdraft.infer.shape import TreeShape
from longdraft.infer.tree import TokenTree
from longdraft.models.drafts.tokenswift import TokenSwift
from longdraft.models.kv_cache import KVCache
from longdraft.models.passes import Pass, TargetOutput
from longdraft.models.target import Target

DRAFT_PASSES = ("auto", "always", "never")


def tokenswift(
    target: Target,
    draft: TokenSwift,
    shape: TreeShape | Sequence[int] | int | None = None,
    *,
    draft_pass: str = "auto",
    budget: int = 4096,
    sinks: int = 16,
    ngrams: int = 20,
) -> Drafter:
    """TokenSwift as published: its heads (see `TokenSwiftDrafter`), and in the same tree the most frequent n-grams.

    Args:
        ngrams: 4-grams merged into the tree; 0 is none.
    """
    integer("ngrams", ngrams, 0)
    heads = TokenSwiftDrafter(target, draft, shape, draft_pass=draft_pass, budget=budget, sinks=sinks)
    return Combined([heads, Ngrams(ngrams, trunk=heads.max_depth - heads.shape.depth)]) if ngrams else heads


class TokenSwiftDrafter(HeadsDrafter):
    """Ranks every head's tokens (with the step's noise at T > 0) and fills a static tree.

    Args:
        target: the loaded target (models/target.py).
        draft: trained heads.
        shape: which rank combinations of the heads are nodes, best first, or the ranks of each level of a full
            Cartesian tree; None is that of 3 ranks a head. With a draft pass it stands below the one node of the
            target's own row.
        draft_pass: "always", "never", or "auto", which measures (infer/policy.py).
        budget: rows of the selected cache, for each layer and KV head.
        sinks: first tokens that always stay in it.

    Raises:
        ValueError: a draft that does not fit the target, a tree that does not fit the draft, or options out of range.
    """

    def __init__(
        self,
        target: Target,
        draft: TokenSwift,
        shape: TreeShape | Sequence[int] | int | None = None,
        *,
        draft_pass: str = "auto",
        budget: int = 4096,
        sinks: int = 16,
    ):
        super().__init__(target, draft, shape, "tokenswift", TokenSwift)
        self.target, self._draft_pass = target, one_of("draft_pass", draft_pass, DRAFT_PASSES)
        self._top = TopTokens(integer("budget", budget, 1), integer("sinks", sinks, 0))
        if draft_pass == "always":
            refuse_windows(target.model.config, "draft_pass='always'")
        windows = target.model.config.sliding_windows
        self._may_pass = draft_pass != "never" and not (windows and any(windows))
        # With a draft pass; its nodes have classes of their own.
        self._below = TreeShape(((0,), *((0, *node) for node in self.shape.nodes)), 1 + len(self.shape.nodes))
        if self._may_pass:
            self.max_nodes, self.max_depth = len(self._below.nodes), self._below.depth
        self.draft_pass_budget = self._top.budget if self._may_pass and draft_pass == "auto" else None
        self._cache: KVCache | None = None
        self._selected: SelectedCache | None = None
        self._can_select, self._follows = self._may_pass, False  # whether the selected cache is kept up at present

    @property
    def n_classes(self) -> int:
        return self._below.first_class + len(self._below.nodes)

    def decisions(self) -> Mapping[str, str]:
        if self._draft_pass != "auto" or self._can_select:
            return {}
        why = "the cache at hand is a part itself" if self._may_pass else "the target has sliding windows"
        return {"draft_pass": f"never: {why}"}

    def memory_bytes(self, batch: int, capacity: int) -> Mapping[str, int]:
        head, model = super().memory_bytes(batch, capacity), self.target.model
        if not self._may_pass or (self._draft_pass == "auto" and capacity <= self._top.budget):
            return head
        return head | selected_bytes(self._top, model.config, model.embed_tokens.weight.dtype, batch, capacity, tail=1)

    def on_start(self, slot: int, request: Request, cache: KVCache) -> None:
        super().on_start(slot, request, cache)
        self._can_select = self._may_pass and not isinstance(cache, RingCache)
        if self._draft_pass == "always" and not self._can_select:
            raise ValueError("draft_pass='always' needs the whole context's cache, and this one is a part; use 'never'")
        if self._cache is not cache:
            self._cache, self._selected, self._follows = cache, None, False
        if self._draft_pass == "always":
            self._follows = True
            self._select()
        if self._selected is not None:
            self._selected.reset([slot])
        self._ask_for_queries(self._follows)

    def buffers(self) -> tuple[object, ...]:
        return *super().buffers(), self._selected

    def on_prefill(self, slot: int, prompt: Sequence[int], start: int, end: int, output: TargetOutput) -> None:
        super().on_prefill(slot, prompt, start, end, output)
        if not self._follows or end < len(prompt) - 1:
            return
        if output.queries is None:  # since a step between this prompt's passes, which were not asked for queries
            self._select().select_anew()
        else:
            self._select().build_from_prompt(slot, output.queries, end)
            self._ask_for_queries(self._select().needs_queries)

    def _select(self) -> SelectedCache:
        """The selected cache, allocated where there is none."""
        if self._selected is None:
            assert self._cache is not None
            self._selected = SelectedCache(self._cache, self._top, self.target.model.config, tail=1)
        return self._selected

    def _ask_for_queries(self, wanted: bool) -> None:
        self.needs = self.draft.needs | {"queries"} if wanted else self.draft.needs

    def plan(self, state: SlotState, max_nodes: int) -> tuple[int, SelectedCache | None]:
        """How many nodes, and the selected cache that the draft pass runs on; None without one."""
        choice = state.draft_pass
        wanted = self._can_select and (self._draft_pass == "always" or (choice is not None and choice.with_pass))
        if wanted and not self._follows:
            self._select().select_anew()
        self._follows = wanted
        self._ask_for_queries(wanted and self._select().needs_queries)
        takes = wanted and self._select().ready
        if choice is not None and takes:
            choice.taken = True
        self.trunk = int(takes)
        return max_nodes, self._select() if takes else None

    def grow(self, state: SlotState, plan: tuple[int, SelectedCache | None]) -> TokenTree:
        """The heads' tree below each root; on a selected cache, below the token that the target's own row gives."""
        max_nodes, selected = plan
        if selected is None:
            return super().grow(state, max_nodes)
        shape, needs = self._below.first(max_nodes), self.draft.needs | {"logits"}
        output = self.target.model(Pass(state.roots[:, None], selected, state.positions[:, None], needs=needs))
        hidden_B1D = self.state_of(output)
        assert output.logits is not None and hidden_B1D is not None
        _, ranked_BIK = state.best(output.logits, 1, shape.ranks)
        if shape.depth > 1:
            hidden_BD = hidden_B1D[:, 0].to(self.hidden_BD.dtype)
            ranked_BIK = torch.cat([ranked_BIK, self.ranked(state, hidden_BD, shape, first=2)], dim=1)
        return shape.fill(state.roots, ranked_BIK)

    def on_step(self, state: SlotState, tree: TokenTree, accepted: AcceptResult, output: TargetOutput) -> None:
        super().on_step(state, tree, accepted, output)
        if self._follows:
            self._select().on_step(state.positions, accepted, output.queries, self.max_depth)
            self._ask_for_queries(self._select().needs_queries)

    def release(self) -> None:
        self._cache = self._selected = None
        self._follows = False
