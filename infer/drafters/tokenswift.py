"""TokenSwift's drafter (arXiv 2502.18890, section 3): chained heads on the target's own state fill a static tree.

Without a draft pass the heads read the state just before the root, at p - 1 for a root at p (infer/drafters/heads.py):
head i proposes the token at p + i, and the levels are [3, 3, 3]. With a draft pass the target runs over the root on a
selected cache (infer/caches/partial.py): its own logits propose the token at p + 1, head i that at p + 1 + i, and the
levels are [1, 3, 3, 3]. The heads are in models/drafts/heads.py.
They are joined by the most frequent continuations of a token in the text so far (section 3.3): of the root, or after a
draft pass of the token that the target itself proposed. Shapes: B slots, D hidden, I levels, K ranks.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import torch

from longdraft.infer.accept import AcceptResult
from longdraft.infer.budget import Budget
from longdraft.infer.caches.partial import SelectedCache, Selection, refuse_windows
from longdraft.infer.drafters.base import Count, CountOrZero, Drafter, Request
from longdraft.infer.drafters.combine import Combined
from longdraft.infer.drafters.heads import HeadsDrafter, Shape
from longdraft.infer.drafters.host import HostDrafter, NgramIndex
from longdraft.infer.slot_state import SlotState
from longdraft.infer.tree import TokenTree, TreeShape, Trie
from longdraft.models.drafts.heads import TokenSwift
from longdraft.models.footprint import Allocations, cache_rows, size_of
from longdraft.models.kv_cache import KVCache
from longdraft.models.passes import Pass, TargetOutput
from longdraft.models.schema import Instance, validated
from longdraft.models.target import Target

# First tokens that always stay in the selected cache.
SINKS = 16
N = 4
# How many occurrences of a token are counted, the last ones: what they cost does not grow with the text.
SEARCHED = 1024
# A draft pass adds a level; it pays where it reads less than this fraction of what a pass of the target reads.
PASS_SHARE = 0.5
BUDGET = 4096


@validated
def tokenswift(
    target: Instance[Target],
    draft: Instance[TokenSwift],
    shape: Shape | None = None,
    *,
    draft_pass: Literal["auto", "always", "never"] = "auto",
    budget: Count = BUDGET,
    ngrams: CountOrZero = 20,
) -> Drafter:
    """TokenSwift as published: its heads, and in the same tree the text's most frequent n-grams.

    Args:
        shape: which rank combinations of the heads are nodes, best first, or the number of ranks in each level of a
            full Cartesian tree; None means 3 ranks for each head. A draft pass puts one more node, the target's own
            proposal, between the root and this tree.
        draft_pass: "always", "never", or "auto": where it reads less than half of what a pass of the target reads.
        budget: rows of the draft pass's selected cache, for each layer and KV head; not with "never".
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
        budget: int = BUDGET,
    ):
        super().__init__(target, draft, shape)
        if draft_pass == "never" and budget != BUDGET:
            raise ValueError(f"budget={budget}: is the draft pass's, and draft_pass is 'never'; omit one of them")
        self.target, self._draft_pass, self._selection = target, draft_pass, Selection(budget, fixed=SINKS)
        if draft_pass == "always":
            refuse_windows(target.model.config, "draft_pass='always'")
        self._weight_bytes = sum(p.numel() * p.element_size() for p in target.model.parameters())
        self._pass_allowed = draft_pass != "never" and not any(target.model.config.sliding_windows or ())
        # The tree of a proposal with a draft pass.
        self._pass_shape = TreeShape(((0,), *((0, *node) for node in self.shape.nodes)))
        if self._pass_allowed:
            self.max_nodes, self.max_depth = len(self._pass_shape.nodes), self._pass_shape.depth
        self._selected: SelectedCache | None = None  # where the pass may be taken

    @property
    def needs(self) -> frozenset[str]:
        return super().needs if self._selected is None else super().needs | self._selected.needs

    def _may_pass(self, batch: int, capacity: int) -> bool:
        """Whether the draft pass may ever be taken on a full cache of this size."""
        return self._pass_allowed and (self._draft_pass == "always" or self._pass_pays([capacity] * batch))

    def _pass_pays(self, lengths: Sequence[int]) -> bool:
        """Whether weights and selected rows are less than half of weights and all rows. lengths: of the contexts."""
        config, dtype = self.target.model.config, self.target.model.embed_tokens.weight.dtype
        all_rows, selected = sum(lengths), sum(min(length, self._selection.budget) for length in lengths)
        full, draft = (self._weight_bytes + size_of(cache_rows(config, n, dtype)) for n in (all_rows, selected))
        return draft < PASS_SHARE * full

    def allocations(self, batch: int, capacity: int) -> Allocations:
        like, dtype = self.target.model.config, self.target.model.embed_tokens.weight.dtype
        selected = self._selection.allocations(like, dtype, batch, capacity, tail=1)
        return selected if self._may_pass(batch, capacity) else {}

    def on_start(self, slot: int, request: Request, cache: KVCache) -> None:
        super().on_start(slot, request, cache)
        if not self._may_pass(cache.batch, cache.capacity):
            self._selected = None
            return
        if self._selected is None or self._selected.full is not cache:
            like = self.target.model.config
            self._selected = SelectedCache(cache, self._selection, like, tail=1, depth=self.max_depth)
        self._selected.start(slot)

    def buffers(self) -> tuple[object, ...]:
        return *super().buffers(), self._selected

    def on_prefill(self, slot: int, prompt: Sequence[int], start: int, end: int, output: TargetOutput) -> None:
        super().on_prefill(slot, prompt, start, end, output)
        if self._selected is not None and end == len(prompt) - 1:
            self._selected.on_prefill(slot, output.queries, end)

    def plan(self, state: SlotState, budget: Budget) -> tuple[int, bool]:
        """The number of nodes, and whether the proposal has a draft pass."""
        always = self._draft_pass == "always"
        takes_pass = self._selected is not None and (always or self._pass_pays([*map(len, state.committed)]))
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


def most_frequent(table: NgramIndex, first: int, k: int, n: int = N) -> list[tuple[int, ...]]:
    """The `k` most frequent continuations of `first`, n - 1 tokens each; among equal counts the latest first."""
    tokens, ends = table.tokens, table.ends[0].get((first,), [])
    complete = (end for end in reversed(ends[-SEARCHED:]) if end + n - 1 <= len(tokens))
    counts = Counter(tuple(tokens[end : end + n - 1]) for end in complete)
    return [gram for gram, _ in counts.most_common(k)]


class Ngrams(HostDrafter):
    """Proposes the `count` most frequent 4-grams. A node's class is its n-gram's rank, in powers of two, and its depth.

    Args:
        trunk: the greatest depth of the node that the n-grams start after.
    """

    after_trunk = True

    def __init__(self, count: int = 20, trunk: int = 0):
        self.count = count
        self.max_nodes, self.max_depth = (N - 1) * count + trunk, N - 1 + trunk

    @property
    def n_classes(self) -> int:
        return 1 + (N - 1) * self.count.bit_length()

    def fill(self, trie: Trie, node: int, table: NgramIndex, max_nodes: int) -> None:
        for rank, gram in enumerate(most_frequent(table, trie.tokens[node], self.count)):
            place, group = node, (rank + 1).bit_length() - 1
            for depth, token in enumerate(gram):
                child = trie.child(place, token)
                if child is None:
                    if len(trie) > max_nodes:
                        return
                    child = trie.add(place, token, 1 + group * (N - 1) + depth)
                place = child
