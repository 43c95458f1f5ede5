"""TokenSwift's drafter (arXiv 2502.18890, section 3): chained heads on the target's own state fill a static tree.

Without a draft pass the heads read the state just before the root, at p - 1 for a root at p (infer/drafters/heads.py):
head i proposes the token at p + i, and the levels are [3, 3, 3]. With a draft pass the target runs over the root on a
selected cache (infer/partial_cache.py): its own logits propose the token at p + 1, head i that at p + 1 + i, and the
levels are [1, 3, 3, 3]. The heads are in models/drafts/heads.py. The tree also has the text's most frequent
continuations of the root or, after a draft pass, of the token that the target itself proposed (section 3.3). These are
counted on the device, with shapes that do not depend on the text.
Shapes: B slots, D hidden, I levels, K ranks, N tree nodes, S capacity, R occurrences of a token, G n-grams.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from longdraft.infer.accept import AcceptResult
from longdraft.infer.budget import Budget
from longdraft.infer.drafters.base import Count, CountOrZero, Request
from longdraft.infer.drafters.combine import MOST_NODES
from longdraft.infer.drafters.heads import HeadsDrafter, Shape
from longdraft.infer.history import History
from longdraft.infer.partial_cache import SelectedCache, Selection
from longdraft.infer.slot_state import SlotState
from longdraft.infer.tree import PAD, ROOT, TokenTree, TreeShape
from longdraft.kernels.transfer import integers
from longdraft.models.drafts.heads import TokenSwift
from longdraft.models.footprint import Allocations, cache_rows, delta_states, size_of
from longdraft.models.kv_cache import KVCache
from longdraft.models.passes import Pass, TargetOutput
from longdraft.models.schema import Instance, validated
from longdraft.models.target import Target

# How many of the first tokens always stay in the selected cache.
SINKS = 16
# Tokens after the first one of a 4-gram, and the bits of each in an integer that encodes all three.
FOLLOWING, TOKEN_BITS = 3, 21
# How many of a token's last occurrences are counted.
SEARCHED = 1024
# A draft pass adds a level; it pays if it reads less than this fraction of the bytes of a target's pass.
PASS_SHARE = 0.5
BUDGET = 4096


class TokenSwiftDrafter(HeadsDrafter):
    """TokenSwift as published: its heads, and in the same tree the text's most frequent n-grams.

    A node's class is its index in the heads' tree, or its n-gram's rank (in powers of two) and depth, and whether both
    proposed it.

    Args:
        shape: which rank combinations of the heads are nodes, best first, or the number of ranks in each level of a
            full Cartesian tree; None means 3 ranks for each head. A draft pass puts one more node, the target's own
            proposal, between the root and this tree.
        draft_pass: "always", "never", or "auto": where it reads less than half the bytes of a target's pass.
        budget: rows of the draft pass's selected cache, for each layer and KV head; not with "never".
        ngrams: how many 4-grams join the tree, as far as it has room; 0 for none.

    Raises:
        ValueError: a draft that does not fit the target, a tree that does not fit the draft, or options out of range.
    """

    @validated
    def __init__(
        self,
        target: Instance[Target],
        draft: Instance[TokenSwift],
        shape: Shape | None = None,
        draft_pass: Literal["auto", "always", "never"] = "auto",
        budget: Count = BUDGET,
        ngrams: CountOrZero = 20,
    ):
        super().__init__(target, draft, shape)
        if draft_pass == "never" and budget != BUDGET:
            raise ValueError(f"budget={budget}: only for the draft pass, but draft_pass is 'never'; omit one of them")
        self.target, self._draft_pass, self._selection = target, draft_pass, Selection(budget, fixed=SINKS)
        weights = list(target.model.parameters())
        self._expert_bytes = sum(p.nbytes for p in weights if p.dim() == 3)  # only experts have three dimensions
        self._weight_bytes = target.model.ranks.from_first(sum(p.nbytes for p in weights) - self._expert_bytes)
        self._layers = Counter(target.model.config.cache_windows)  # how many have each window
        self._pass_allowed = draft_pass != "never"
        # The tree of a proposal with a draft pass.
        self._pass_shape = TreeShape(((0,), *((0, *node) for node in self.shape.nodes)))
        heads = self._pass_shape if self._pass_allowed else self.shape
        self.max_nodes, self.max_depth = len(heads.nodes), heads.depth
        self.ngrams, self._joined = ngrams, dict[tuple[int, bool], JoinedTree]()
        self._heads_classes = 1 + self.max_nodes
        if ngrams:
            self.max_nodes = min(self.max_nodes + FOLLOWING * ngrams, max(self.max_nodes, MOST_NODES))
            self.max_depth = max(self.max_depth, FOLLOWING + self._pass_allowed)
        self._selected: SelectedCache | None = None  # None if the draft pass is never run

    @property
    def needs(self) -> frozenset[str]:
        return super().needs if self._selected is None else super().needs | self._selected.needs

    @property
    def class_stages(self) -> Sequence[int]:
        joined = JoinedTree.n_classes(self._heads_classes, self.ngrams) if self.ngrams else self._heads_classes
        return [0, *[1] * (joined - 1)]

    def _may_pass(self, batch: int, capacity: int) -> bool:
        """Whether the draft pass may ever run on a full cache of this size."""
        return self._pass_allowed and self._pass_pays([capacity] * batch)

    def _pass_pays(self, lengths: Sequence[int]) -> bool:
        """Whether to run a draft pass over these contexts: always, or if it reads under half the bytes of a pass on the
        full cache. Of experts, each root reads its own. lengths: 0 for a free slot."""
        if self._draft_pass == "always":
            return True
        config, dtype = self.target.model.config, self.target.model.embed_tokens.weight.dtype
        n_texts = sum(map(bool, lengths))
        taken = n_texts * config.experts.per_token / config.experts.number if config.experts else 1.0
        always = self._weight_bytes + int(self._expert_bytes * min(1.0, taken))
        always += size_of(delta_states(config, n_texts, dtype))
        row_bytes = size_of(cache_rows(config, 1, dtype)) / self._layers.total()
        full, draft = (
            sum(n * min(length, window or length, most) for length in lengths for window, n in self._layers.items())
            for most in (max(lengths), self._selection.budget)
        )
        return always + draft * row_bytes < PASS_SHARE * (always + full * row_bytes)

    def allocations(self, batch: int, capacity: int) -> Allocations:
        selected = self._selection.allocations(self.target.model, batch, capacity, tail=1)
        return selected if self._may_pass(batch, capacity) else {}

    def on_start(self, slot: int, request: Request, cache: KVCache) -> None:
        super().on_start(slot, request, cache)
        if not self._may_pass(cache.batch, cache.capacity):
            self._selected = None
            return
        if self._selected is None or self._selected.full is not cache:
            windows = self.target.model.config.cache_windows
            self._selected = SelectedCache(cache, self._selection, tail=1, depth=self.max_depth, windows=windows)
        self._selected.start(slot)

    def buffers(self) -> tuple[object, ...]:
        return *super().buffers(), self._selected

    def on_prefill(self, slot: int, prompt: Sequence[int], start: int, end: int, output: TargetOutput) -> None:
        super().on_prefill(slot, prompt, start, end, output)
        if self._selected is not None and end == len(prompt) - 1:
            self._selected.on_prefill(slot, output.queries, end)

    def plan(self, state: SlotState, budget: Budget) -> tuple[int, bool]:
        """The number of nodes, and whether the proposal has a draft pass."""
        return budget.max_nodes, self._selected is not None and self._pass_pays([*map(len, state.committed)])

    def grow(self, state: SlotState, budget: Budget, plan: tuple[int, bool]) -> TokenTree:
        """The heads' tree and the n-grams below each root; with a draft pass, below the token that the target itself
        proposes."""
        max_nodes, takes_pass = plan
        shape = (self._pass_shape if takes_pass else self.shape).first(max_nodes)
        some = state if takes_pass else state.leading()
        if takes_pass:
            ranked_BIK = self._ranked_by_pass(state, shape)
        else:
            ranked_BIK = self.ranked(some, self.hidden_BD[: len(some.roots)], shape)
        if not self.ngrams:
            return shape.fill(some.roots, ranked_BIK).with_roots(state.roots)
        first_B = ranked_BIK[:, 0, 0] if takes_pass else some.roots
        grams_BFG = most_frequent(some.history, some.positions, first_B, self.ngrams)
        if plan not in self._joined:
            self._joined[plan] = JoinedTree(shape, self.ngrams, int(takes_pass), self._heads_classes, first_B.device)
        return self._joined[plan].fill(some.roots, ranked_BIK, grams_BFG, max_nodes).with_roots(state.roots)

    def _ranked_by_pass(self, state: SlotState, shape: TreeShape) -> Tensor:
        """int64 [B, I, K]: the best tokens of each level, the first one's by the draft pass itself."""
        needs = self.learns_from | {"logits"}
        output = self.target.model(Pass(state.roots[:, None], self._selected, state.positions[:, None], needs=needs))
        hidden_B1D = self.state_of(output)
        assert output.logits is not None and hidden_B1D is not None
        _, ranked_BIK = state.best(output.logits, 1, shape.ranks)
        if shape.depth > 1:
            hidden_BD = hidden_B1D[:, 0].to(self.hidden_BD.dtype)
            ranked_BIK = torch.cat([ranked_BIK, self.ranked(state, hidden_BD, shape, first=2)], dim=1)
        return ranked_BIK

    def on_step(self, state: SlotState, tree: TokenTree, accepted: AcceptResult, output: TargetOutput) -> None:
        super().on_step(state, tree, accepted, output)
        if self._selected is not None:
            self._selected.on_step(state, accepted, output.queries)

    def release(self) -> None:
        self._selected = None


def most_frequent(history: History, positions_B: Tensor, first_B: Tensor, count: int) -> Tensor:
    """The `count` most frequent continuations of a token in each slot's text; of equal counts the latest comes first.

    The last SEARCHED occurrences that have a complete continuation are counted. Nothing is read on the host.

    Args:
        history: valid through the roots.
        positions_B: int64, the roots'.
        first_B: int64, the tokens that are continued.

    Returns: int64 [B, FOLLOWING, G], tokens below 2**TOKEN_BITS; -1 where there are fewer continuations.
    """
    tokens_BS, device = history.tokens, first_B.device
    capacity = tokens_BS.shape[1]
    searched = max(count, min(SEARCHED, capacity))
    ago_R = torch.arange(searched, dtype=torch.int32, device=device)  # 0 is the last occurrence
    occurred_BS = (tokens_BS == first_B[:, None]).cumsum(dim=1, dtype=torch.int32)
    last_B1 = positions_B[:, None] - FOLLOWING
    total_B1 = occurred_BS.gather(1, last_B1.clamp(0, capacity - 1)).masked_fill(last_B1 < 0, 0)
    places_BR = torch.searchsorted(occurred_BS, total_B1 - ago_R)
    after_F1 = torch.arange(1, 1 + FOLLOWING, device=device)[:, None]
    grams_BFR = history.read_at((places_BR[:, None] + after_F1).flatten(1)).view(-1, FOLLOWING, searched)

    # Sorting by number groups equal n-grams, the latest first.
    number_BR, ago_BR = as_numbers(grams_BFR).masked_fill(ago_R >= total_B1, -1).sort(dim=1, stable=True)
    begins_BR = pad(number_BR, (1, 0), value=-1).diff(dim=1) != 0
    counts_BR = torch.searchsorted(number_BR, number_BR, right=True) - ago_R  # valid at the first entry of a group
    worth_BG, best_BG = ((counts_BR * searched - ago_BR) * begins_BR).topk(count, dim=1)
    latest_BG = ago_BR.gather(1, best_BG)
    found_BFG = grams_BFR.gather(2, latest_BG[:, None].expand(-1, FOLLOWING, -1))
    return found_BFG.masked_fill(worth_BG[:, None] == 0, -1)


def as_numbers(tokens_BFX: Tensor) -> Tensor:
    """int64 [B, X]: FOLLOWING tokens below 2**TOKEN_BITS encoded as one number, different for different tokens."""
    shifts_F = torch.arange(FOLLOWING - 1, -1, -1, device=tokens_BFX.device) * TOKEN_BITS
    return (tokens_BFX << shifts_F[:, None]).sum(dim=1)


class JoinedTree:
    """The heads' tree and the n-grams' chains as one static tree, whose equal nodes are merged when it is filled.

    Nodes of the heads and of the n-grams alternate. Of equal nodes the first one stays.

    Args:
        heads: the heads' tree.
        count: number of n-grams.
        trunk: depth of the node that the n-grams continue.
        heads_classes: number of the heads' classes.
    """

    def __init__(self, heads: TreeShape, count: int, trunk: int, heads_classes: int, device: torch.device):
        grams = [(0,) * trunk + (heads.ranks + i,) * depth for i in range(count) for depth in range(1, 1 + FOLLOWING)]
        class_of = {node: i for i, node in enumerate(heads.nodes, 1)}
        for i, node in enumerate(grams):
            group = (i // FOLLOWING + 1).bit_length() - 1
            class_of[node] = heads_classes + group * FOLLOWING + i % FOLLOWING
        self.shape = TreeShape(tuple(node for turn in zip_longest(heads.nodes, grams) for node in turn if node))
        self._trunk, self._both = trunk, self.n_classes(heads_classes, count) // 2
        nodes, tree = [(), *self.shape.nodes], self.shape.tree(1, device)
        index = {node: i for i, node in enumerate(nodes)}
        # The nodes on the way from the trunk to each node, then the node itself.
        paths = [[index[node[: 1 + trunk + i]] for node in nodes] for i in range(FOLLOWING)]
        self._path_FN, self._parents_N = integers(torch.tensor(paths), device), tree.parents[0]
        self._classes_N = integers([0] + [class_of[node] for node in nodes[1:]], device)
        is_gram_N, depths_N = self._classes_N >= heads_classes, tree.depths[0]
        self._other_NN = is_gram_N[:, None] != is_gram_N
        # Which nodes may be equal; the heads' nodes differ from each other.
        may_NN = (is_gram_N[:, None] | is_gram_N) & (depths_N[:, None] == depths_N)
        self._may_NN = may_NN | torch.eye(len(nodes), dtype=torch.bool, device=device)

    @staticmethod
    def n_classes(heads_classes: int, count: int) -> int:
        """The classes of the heads and of the n-grams, and as many again for nodes that both propose."""
        return 2 * (heads_classes + FOLLOWING * count.bit_length())

    def fill(self, roots_B: Tensor, ranked_BIK: Tensor, grams_BFG: Tensor, max_nodes: int) -> TokenTree:
        """The tree with at most `max_nodes` nodes below the root.

        Args:
            ranked_BIK: int64, the heads' tokens, as in `TreeShape.fill`.
            grams_BFG: int64, from `most_frequent`.
        """
        depth = self.shape.depth
        heads_BIK = pad(ranked_BIK, (0, 0, 0, depth - ranked_BIK.shape[1]))
        grams_BIG = pad(grams_BFG, (0, 0, self._trunk, depth - FOLLOWING - self._trunk))
        tokens_BN = self.shape.fill(roots_B, torch.cat([heads_BIK, grams_BIG], dim=2)).tokens
        number_BN = as_numbers(tokens_BN[:, self._path_FN])
        equal_BNN = (number_BN[:, :, None] == number_BN[:, None]) & self._may_NN
        first_BN = equal_BNN.max(dim=2).indices
        stays_BN = (first_BN == torch.arange(len(self._parents_N), device=roots_B.device)) & (tokens_BN >= 0)
        parents_BN = first_BN[:, self._parents_N.clamp(min=0)].masked_fill(self._parents_N < 0, ROOT)
        parents_BN = parents_BN.masked_fill(~stays_BN, PAD)
        classes_BN = self._classes_N + self._both * (equal_BNN & self._other_NN).any(dim=2)
        tree = TokenTree(tokens_BN.clamp(min=0), parents_BN, classes_BN)
        if tree.width <= 1 + max_nodes:
            return tree
        return tree.take((parents_BN == PAD).sort(dim=1, stable=True).indices[:, : 1 + max_nodes])
