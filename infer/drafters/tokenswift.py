"""TokenSwift's drafter (arXiv 2502.18890, section 3): chained heads on the target's own state fill a static tree.

Without a draft pass the heads read the state that the last verification computed at the node whose choice the root is
(position p - 1 for a root at p): head i proposes the token at p + i, levels [3, 3, 3]. With it the target runs over the
root on a selected cache: its own row proposes p + 1, head i proposes p + 1 + i, levels [1, 3, 3, 3]. Not here: the
heads (models/drafts/tokenswift.py), the n-grams that join them (infer/drafters/ngrams.py), the selected cache
(infer/partial_cache.py), when the pass pays (infer/policy.py).
Shapes: B slots, D hidden, V vocabulary, E draft vocabulary, I heads, N nodes.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from longdraft.infer.accept import AcceptResult
from longdraft.infer.drafters.base import DeviceDrafter, Drafter, Request, SlotState
from longdraft.infer.drafters.combine import Combined
from longdraft.infer.drafters.ngrams import Ngrams
from longdraft.infer.last_state import LastState
from longdraft.infer.options import check_heads, head_memory, heads_shape, integer, one_of
from longdraft.infer.partial_cache import RingCache, SelectedCache, refuse_windows, selected_bytes
from longdraft.infer.selection import TopTokens
from longdraft.infer.shape import TreeShape, TreeTemplate
from longdraft.infer.tree import TokenTree
from longdraft.kernels.linear import linear
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


class TokenSwiftDrafter(DeviceDrafter):
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
        check_heads("tokenswift", target, draft, TokenSwift, "TokenSwift heads")
        self._head_ED = draft.head(target.model.lm_head.weight)
        shape = heads_shape("shape", shape, draft.config.n_heads, len(self._head_ED))
        self.shape, self.draft, self.target = shape, draft, target
        self._draft_pass = one_of("draft_pass", draft_pass, DRAFT_PASSES)
        self._budget, self._sinks = integer("budget", budget, 1), integer("sinks", sinks, 0)
        TopTokens(budget, sinks)  # raises where they do not go together
        if draft_pass == "always":
            refuse_windows(target.model.config, "draft_pass='always'")
        windows = target.model.config.sliding_windows
        may_pass = self._may_pass = draft_pass != "never" and not (windows and any(windows))
        (self._state_field,) = draft.needs
        self.needs = self.learns_from = draft.needs
        below = TreeShape(((0,), *((0, *node) for node in shape.nodes)))
        self._shapes = {False: shape, True: below}
        # Classes: the root, and the nodes of either tree.
        self._first_class = {False: 1, True: 1 + len(shape.nodes)}
        self.max_nodes, self.max_depth = len(self._shapes[may_pass].nodes), shape.depth + may_pass
        self.draft_pass_budget = budget if may_pass and draft_pass == "auto" else None
        self._last: LastState | None = None
        self._cache: KVCache | None = None
        self._selected: SelectedCache | None = None
        self._can_select, self._follows = may_pass, False  # whether the selected cache is kept up at present

    @property
    def n_classes(self) -> int:
        return self._first_class[True] + len(self._shapes[True].nodes)

    def decisions(self) -> Mapping[str, str]:
        if self._draft_pass != "auto" or self._can_select:
            return {}
        why = "the cache at hand is a part itself" if self._may_pass else "the target has sliding windows"
        return {"draft_pass": f"never: {why}"}

    def memory_bytes(self, batch: int, capacity: int) -> Mapping[str, int]:
        head = head_memory(self.draft, self._head_ED)
        if not self._may_pass or (self._draft_pass == "auto" and capacity <= self._budget):
            return head
        model = self.target.model
        policy, dtype = TopTokens(self._budget, self._sinks), model.embed_tokens.weight.dtype
        return head | selected_bytes(policy, model.config, dtype, batch, capacity, tail=1)

    def on_start(self, slots: Sequence[int], requests: Sequence[Request], cache: KVCache) -> None:
        if self._last is None or self._last.batch != cache.batch:
            self._last = self._allocate(cache.batch)
        self._can_select = self._may_pass and not isinstance(cache, RingCache)
        if self._draft_pass == "always" and not self._can_select:
            raise ValueError("draft_pass='always' needs the whole context's cache, and this one is a part; use 'never'")
        self._last.on_start(slots)
        for slot, request in zip(slots, requests, strict=True):
            self._to_read[slot] = self._last_read[slot] = len(request.prompt) - 1
        self._cache = cache
        if self._selected is not None and self._selected.full is not cache:
            self._selected, self._follows = None, False
        if self._draft_pass == "always":
            self._selected, self._follows = self._select(), True
        if self._selected is not None:
            self._selected.reset(slots)
        self._ask_for_queries(self._follows)

    def buffers(self) -> tuple[object, ...]:
        return self._last, self._selected

    def _allocate(self, batch: int) -> LastState:
        weight = next(self.draft.parameters())
        self._to_read, self._last_read = [0] * batch, [0] * batch  # of the prompt without its last token
        self._templates = {}
        for with_pass, shape in self._shapes.items():
            first = self._first_class[with_pass]
            classes = [0, *range(first, first + len(shape.nodes))]
            self._templates[with_pass] = TreeTemplate(shape, batch, weight.device, classes)
        return LastState(batch, self.draft.config.hidden_size, weight.dtype, weight.device)

    def on_prefill(self, slots: Sequence[int], tokens_BT: Tensor, output: TargetOutput) -> None:
        assert self._last is not None
        self._last.on_prefill(slots, getattr(output, self._state_field))
        for slot in slots:
            self._to_read[slot] -= tokens_BT.shape[1]
        if any(self._to_read[slot] for slot in slots):
            return
        if self._follows and output.queries is not None:
            self._select().build_from_prompt(slots, output.queries, [self._last_read[slot] for slot in slots])
            self._ask_for_queries(self._select().needs_queries)
        elif self._follows:  # since a step between this prompt's passes, which were not asked for queries
            self._select().select_anew()

    def on_taken_over(self, slots: Sequence[int], tokens_BT: Tensor) -> None:
        assert self._last is not None
        self._last.on_taken_over(slots, tokens_BT.shape[1])
        for slot in slots:
            self._to_read[slot] -= tokens_BT.shape[1]

    def _select(self) -> SelectedCache:
        """The selected cache, allocated where there is none."""
        if self._selected is None:
            assert self._cache is not None
            policy = TopTokens(self._budget, self._sinks)
            self._selected = SelectedCache(self._cache, policy, self.target.model.config, tail=1)
        return self._selected

    def _ask_for_queries(self, wanted: bool) -> None:
        self.needs = self.draft.needs | {"queries"} if wanted else self.draft.needs

    def plan(self, state: SlotState, max_nodes: int) -> tuple[int, SelectedCache | None]:
        """How many nodes, and the selected cache that the draft pass runs on; None without one."""
        wanted = self._can_select and (self._draft_pass == "always" or self.wants_draft_pass)
        if wanted and not self._follows:
            self._select().select_anew()
        self._follows = wanted
        self._ask_for_queries(wanted and self._select().needs_queries)
        self.took_draft_pass = wanted and self._select().ready
        self.trunk = int(self.took_draft_pass)
        return max_nodes, self._select() if self.took_draft_pass else None

    def grow(self, state: SlotState, plan: tuple[int, SelectedCache | None]) -> TokenTree:
        """The heads' tree below each root; on a selected cache, below the token that the target's own row gives."""
        assert self._last is not None
        max_nodes, selected = plan
        ranked, hidden_BD, template = list[Tensor](), self._last.hidden_BD, self._templates[selected is not None]
        ranks = self._shapes[selected is not None].ranks
        if selected is not None:
            needs = self.draft.needs | {"logits"}
            output = self.target.model(Pass(state.roots[:, None], selected, state.positions[:, None], needs=needs))
            assert output.logits is not None
            ranked.append(state.best(output.logits[:, :1], 1, ranks)[1][:, 0])
            hidden_BD = getattr(output, self._state_field)[:, 0].to(hidden_BD.dtype)
        states = self.draft.states(hidden_BD)[: self.shape.depth]
        for logits_B1E in linear(torch.stack(states, dim=1), self._head_ED).split(1, dim=1):
            _, best_B1K = state.best(logits_B1E, 1 + len(ranked), ranks, self.draft.token_ids)
            ranked.append(self.draft.tokens(best_B1K[:, 0]))
        tree = template.fill(state.roots, torch.stack(ranked, dim=1))
        if selected is None:
            tree = self._last.known_only(tree, state)
        if tree.width > max_nodes + 1:
            order_W = torch.arange(max_nodes + 1, device=tree.tokens.device)
            tree = tree.take(order_W.expand(len(tree.tokens), -1))
        return tree

    def update(self, state: SlotState, tree: TokenTree, accepted: AcceptResult, output: TargetOutput) -> None:
        assert self._last is not None
        self._last.update(state, accepted, getattr(output, self._state_field))

    def on_step(self, state: SlotState, tree: TokenTree, accepted: AcceptResult, output: TargetOutput) -> None:
        super().on_step(state, tree, accepted, output)
        if self._follows:
            self._select().on_step(state.positions, accepted, output.queries, self.max_depth)
            self._ask_for_queries(self._select().needs_queries)

    def release(self) -> None:
        self._cache = self._selected = None
        self._follows = False

    def rewind(self, lengths_B: Tensor) -> None:
        assert self._last is not None
        self._last.rewind(lengths_B)
        if self._follows:
            self._select().rewind(lengths_B)
