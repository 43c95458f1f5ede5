"""TokenSwift's drafter (arXiv 2502.18890, section 3): chained heads on the target's own state fill a static tree, and
the most frequent n-grams of the text so far join them in one trie.

Without a draft pass the heads read the state that the last verification computed at the node whose choice the root is
(position p - 1 for a root at p): head i proposes the token at p + i, levels [3, 3, 3], and n-grams begin with the root.
With it the target runs over the root on a selected cache: its own row proposes p + 1, head i proposes p + 1 + i, levels
[1, 3, 3, 3], and n-grams begin with that row's best token. Not here: the heads (models/drafts/tokenswift.py), the
selected cache (infer/partial_cache.py), when the pass pays (infer/draft_pass.py), n-gram counts (infer/ngram.py).
Shapes: L layers, B slots, D hidden, H query heads, d head width, V vocabulary, K top ranks, I heads, N nodes.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from longdraft.infer.accept import AcceptResult
from longdraft.infer.draft_pass import DraftPassChoice
from longdraft.infer.drafters.base import Drafter, Inquiry, Request, SlotState
from longdraft.infer.ngram import NgramTable, Tables
from longdraft.infer.options import check_heads, heads_shape, integer, one_of
from longdraft.infer.partial_cache import RingCache, SelectedCache, refuse_windows, selected_bytes
from longdraft.infer.selection import TopTokens
from longdraft.infer.shape import TreeShape
from longdraft.infer.tree import PAD, TokenTree
from longdraft.infer.trie import Trie, as_tree
from longdraft.kernels import backend
from longdraft.kernels.transfer import HostCopy, integers
from longdraft.models.drafts.tokenswift import TokenSwift
from longdraft.models.kv_cache import KVCache
from longdraft.models.passes import Pass, TargetOutput
from longdraft.models.target import Target

DRAFT_PASSES = ("auto", "always", "never")
NGRAM = 4
# Host memory of a table's entry for one token, where no n-gram comes twice (less where they do).
NGRAM_BYTES = 700


class TokenSwiftDrafter(Drafter):
    """Ranks every head's tokens (with the step's noise at T > 0), fills a static tree, and merges n-grams into it.

    Args:
        target: the loaded target (models/target.py).
        draft: trained heads.
        shape: which rank combinations of the heads are nodes, best first, or the ranks of each level of a full
            Cartesian tree; None is that of 3 ranks a head. With a draft pass it stands below the one node of the
            target's own row.
        draft_pass: "always", "never", or "auto", which measures (see `decisions`).
        budget: rows of the selected cache, for each layer and KV head.
        sinks: first tokens that always stay in it.
        ngrams: 4-grams merged into the tree, the most frequent ones; 0 is none.

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
        ngrams: int = 20,
    ):
        check_heads("tokenswift", target, draft, TokenSwift, "TokenSwift heads")
        shape = heads_shape("shape", shape, draft.config.n_heads, target.model.config.vocab_size)
        self.shape, self.draft, self.target = shape, draft, target
        self.ngrams, self._draft_pass = integer("ngrams", ngrams, 0), one_of("draft_pass", draft_pass, DRAFT_PASSES)
        self._budget, self._sinks = integer("budget", budget, 1), integer("sinks", sinks, 0)
        TopTokens(budget, sinks)  # raises where they do not go together
        if draft_pass == "always":
            refuse_windows(target.model.config, "draft_pass='always'")
        windows = target.model.config.sliding_windows
        self._may_pass = draft_pass != "never" and not (windows and any(windows))
        (self._state_field,) = draft.needs
        self.needs = draft.needs
        below = TreeShape(((0,), *((0, *node) for node in shape.nodes)))
        self._shapes = {False: shape, True: below}
        # Classes: the nodes of either tree, then n-gram nodes by rank (powers of two) and depth.
        self._first_class = {False: 1, True: 1 + len(shape.nodes)}
        self._ngram_class = self._first_class[True] + len(below.nodes)
        self.max_nodes = len(self._shapes[self._may_pass].nodes) + (NGRAM - 1) * ngrams
        self.max_depth = max(shape.depth, NGRAM - 1 if ngrams else 0) + self._may_pass
        self.clock = time.perf_counter
        self._hidden = torch.empty(0)
        self._cache: KVCache | None = None
        self._selected: SelectedCache | None = None
        self._can_select, self._began, self._due = self._may_pass, None, False
        self._choice = DraftPassChoice(budget)
        # Measured steps that were not read yet: when each began, and its tokens; and when the last one was read.
        self._measured: deque[tuple[float, HostCopy]] = deque()
        self._read_at = 0.0

    @property
    def n_classes(self) -> int:
        return self._ngram_class + (NGRAM - 1) * self.ngrams.bit_length()

    def decisions(self) -> Mapping[str, str]:
        if self._draft_pass != "auto":
            return {}
        if not self._may_pass:
            return {"draft_pass": "never: the target has sliding windows"}
        return {"draft_pass": self._choice.words if self._can_select else "never: the cache at hand is a part itself"}

    def memory_bytes(self, batch: int, capacity: int) -> Mapping[str, int]:
        tables = {"tokenswift's n-gram table (host)": batch * capacity * NGRAM_BYTES} if self.ngrams else {}
        if not self._may_pass or (self._draft_pass == "auto" and capacity <= self._budget):
            return tables
        model = self.target.model
        policy, dtype = TopTokens(self._budget, self._sinks), model.embed_tokens.weight.dtype
        return tables | selected_bytes(policy, model.config, dtype, batch, capacity, tail=1)

    def on_start(self, slots: Sequence[int], requests: Sequence[Request], cache: KVCache) -> None:
        where = list(slots)
        if self._hidden.shape[0] != cache.batch:
            self._allocate(cache.batch)
        self._can_select = self._may_pass and not isinstance(cache, RingCache)
        if cache.capacity <= self._budget:
            self._choice = DraftPassChoice(self._budget)  # what was decided for a longer cache is not for this one
        if self._draft_pass == "always" and not self._can_select:
            raise ValueError("draft_pass='always' needs the whole context's cache, and this one is a part; use 'never'")
        # A prompt of one token has no position before the root: the heads propose nothing in its first step.
        self._hidden_at.index_fill_(0, integers(where, self._hidden_at.device), -2)
        for slot, request in zip(slots, requests, strict=True):
            self._to_read[slot] = self._last_read[slot] = len(request.prompt) - 1
            if self.ngrams:
                table = NgramTable(NGRAM)
                table.extend(request.prompt)
                self._tables.begin(slot, table)
        self._cache = cache
        if self._selected is not None and self._selected.full is not cache:
            self._selected = None
        if self._holds_cache or self._selected is not None:
            self._select().reset(where)
        self._measured.clear()
        self._set_needs(self._holds_cache)

    def _allocate(self, batch: int) -> None:
        weight = next(self.draft.parameters())
        self._hidden = torch.zeros(batch, self.draft.config.hidden_size, dtype=weight.dtype, device=weight.device)
        self._hidden_at = torch.full((batch,), -2, dtype=torch.int64, device=weight.device)  # its token's position
        self._to_read, self._last_read = [0] * batch, [0] * batch  # of the prompt without its last token
        self._tables = Tables(batch, weight.device)
        self._templates = {}
        for with_pass, shape in self._shapes.items():
            template = self._templates[with_pass] = shape.template(batch, weight.device)
            first, plain = self._first_class[with_pass], template.tree
            classes_N = torch.arange(first - 1, first + len(shape.nodes), device=weight.device)
            classes_N[0].fill_(0)
            template.tree = TokenTree(plain.tokens, plain.parents, classes_N.expand(batch, -1))
            template.tree.__dict__.update(ancestors=plain.ancestors, depths=plain.depths)

    def on_prefill(self, slots: Sequence[int], tokens_BT: Tensor, output: TargetOutput) -> None:
        where = integers(slots, self._hidden.device)
        self._hidden[where] = getattr(output, self._state_field)[:, -1].to(self._hidden.dtype)
        for slot in slots:
            self._to_read[slot] -= tokens_BT.shape[1]
        if any(self._to_read[slot] for slot in slots):
            return
        self._hidden_at[where] = integers([self._last_read[slot] - 1 for slot in slots], where.device)
        if self._holds_cache and output.queries is not None:
            self._select().build_from_prompt(slots, output.queries, [self._last_read[slot] for slot in slots])
            self._set_needs(self._due)

    @property
    def _holds_cache(self) -> bool:
        """Whether the selected cache is kept up at present."""
        return self._can_select and (self._draft_pass == "always" or self._choice.holds_cache)

    def _select(self) -> SelectedCache:
        """The selected cache, allocated where there is none."""
        if self._selected is None:
            assert self._cache is not None
            policy = TopTokens(self._budget, self._sinks)
            self._selected = SelectedCache(self._cache, policy, self.target.model.config, tail=1)
        return self._selected

    def _set_needs(self, queries: bool) -> None:
        self.needs = self.draft.needs | {"queries"} if queries else self.draft.needs

    @torch.no_grad()
    def propose(self, state: SlotState, max_nodes: int) -> TokenTree:
        if self.ngrams:
            return self.inquire(state, max_nodes).now()
        tree, known_B, _ = self._draft(state)
        if known_B is not None and not (backend.is_host(known_B.device) and bool(known_B.all())):
            parents = tree.parents.masked_fill(~known_B[:, None] & (tree.parents >= 0), PAD)
            tree = tree.with_tokens(tree.tokens, parents)
        if tree.width > max_nodes + 1:
            order_W = torch.arange(max_nodes + 1, device=tree.tokens.device)
            tree = tree.take(order_W.expand(len(tree.tokens), -1))
        return tree

    @torch.no_grad()
    def inquire(self, state: SlotState, max_nodes: int) -> Inquiry:
        if not self.ngrams:
            return super().inquire(state, max_nodes)
        tree, known_B, with_pass = self._draft(state)
        known_B = torch.ones_like(state.active) if known_B is None else known_B
        tensors = self._tables.asked(state), known_B, tree.tokens
        return Inquiry(tensors, lambda read: self._merge(state, tree, with_pass, max_nodes, *read))

    def _draft(self, state: SlotState) -> tuple[TokenTree, Tensor | None, bool]:
        """(The heads' tree, the slots whose state it was made of is known, None for all; whether with a draft pass)."""
        self._began = self.clock()
        if self._can_select and self._draft_pass == "auto":
            self._choice.plan(max(map(len, state.committed), default=0))
            if not self._choice.measuring:
                self._measured.clear()
            if self._choice.phase == "short" and self._selected is not None:
                state.graphs.forget(self._selected)
                self._selected = None
        with_pass = self._holds_cache
        selected = self._select() if with_pass else None
        owners = (self.draft, self._templates[with_pass], *([] if selected is None else [selected]))
        fill = partial(self._fill, selected)
        tree = state.run(("tokenswift",), owners, fill, self._hidden)
        return tree, None if with_pass else self._hidden_at + 1 == state.positions, with_pass

    def _fill(self, selected: SelectedCache | None, state: SlotState, hidden_BD: Tensor) -> TokenTree:
        """The heads' tree below each root; on a selected cache, below the token that the target's own row gives."""
        rows = list[Tensor]()
        if selected is not None:
            output = self.target.model(
                Pass(
                    state.roots[:, None],
                    cache=selected,
                    positions_BT=state.positions[:, None],
                    needs=self.draft.needs | {"logits"},
                )
            )
            assert output.logits is not None
            rows.append(output.logits[:, 0])
            hidden_BD = getattr(output, self._state_field)[:, 0].to(hidden_BD.dtype)
        states = self.draft.states(hidden_BD)[: self.shape.depth]
        rows += self.target.model.lm_head(torch.stack(states, dim=1)).unbind(1)
        ranks = self._shapes[selected is not None].ranks
        ranked = [state.ranking(row, offset=i + 1).topk(ranks).indices for i, row in enumerate(rows)]
        return self._templates[selected is not None].fill(state.roots, torch.stack(ranked, dim=1))

    def _merge(
        self,
        state: SlotState,
        tree: TokenTree,
        with_pass: bool,
        max_nodes: int,
        rows: list[list[int]],
        known: list[bool],
        tokens: list[list[int]],
    ) -> TokenTree:
        """The heads' tree with the n-grams in it, at most `max_nodes` nodes; n-grams may take half of what is scarce.

        rows: of the tables' `asked`. known: whether a slot's heads had a state. tokens: of the heads' tree.
        """
        active = [active for active, _ in self._tables.catch_up(state, rows)]
        first = 1 if with_pass else 0
        grams = [
            table.ranked(row[first], self.ngrams) if isinstance(table, NgramTable) and active[slot] else []
            for slot, (row, table) in enumerate(zip(tokens, self._tables.of, strict=True))
        ]
        start = self._first_class[with_pass]
        parents, kinds = self._templates[with_pass].parents, [0, *range(start, start + tree.width - 1)]
        if not any(grams) and all(known) and tree.width <= max_nodes + 1:
            return tree.take_lists([tokens, [parents] * len(tokens), [kinds] * len(tokens)])
        tries = [Trie(row[0]) for row in tokens]
        for slot, trie in enumerate(tries):
            if active[slot]:
                heads_room = max(max_nodes - (NGRAM - 1) * len(grams[slot]), max_nodes - max_nodes // 2)
                stop = min(tree.width, heads_room + 1) if known[slot] else 1
                for node in range(1, stop):
                    trie.add(parents[node], tokens[slot][node], kinds[node])
                self._add_ngrams(trie, first, grams[slot], max_nodes)
        return as_tree(tries, state.roots.device)

    def _add_ngrams(self, trie: Trie, start: int, grams: Sequence[Sequence[int]], max_nodes: int) -> None:
        for rank, gram in enumerate(grams):
            node, group = start, (rank + 1).bit_length() - 1
            for depth, token in enumerate(gram):
                child = trie.child(node, token)
                if child is None:
                    if len(trie) > max_nodes:
                        return
                    child = trie.add(node, token, self._ngram_class + group * (NGRAM - 1) + depth)
                node = child

    def on_step(self, state: SlotState, tree: TokenTree, accepted: AcceptResult, output: TargetOutput) -> None:
        hidden_BND = getattr(output, self._state_field)
        rows_B = accepted.last(accepted.nodes)
        last_BD = hidden_BND[torch.arange(len(rows_B), device=rows_B.device), rows_B]
        took_part_B = accepted.counts > 0
        self._hidden = torch.where(took_part_B[:, None], last_BD.to(self._hidden.dtype), self._hidden)
        self._hidden_at = torch.where(took_part_B, state.positions - 1, self._hidden_at)
        if not self._can_select:
            return
        if self._choice.measuring and self._draft_pass == "auto" and self._began is not None:
            self._measure(self._began, accepted)
        self._began = None
        self._keep_up(state, accepted, output.queries)

    def _measure(self, began: float, accepted: AcceptResult) -> None:
        """Tell the choice what a step took, until its tokens are on the host. On a GPU that is the step before, whose
        time counts from the read before it: the host runs ahead and does not wait for this one."""
        self._measured.append((began, HostCopy(accepted.counts)))
        if len(self._measured) == 1 and not backend.is_host(accepted.counts.device):
            return
        began, copy = self._measured.popleft()
        (counts,) = copy.lists()
        now, counts = self.clock(), [count for count in counts if count]
        if counts:
            self._choice.record(now - max(began, self._read_at), sum(counts) / len(counts))
        self._read_at = now

    def _keep_up(self, state: SlotState, accepted: AcceptResult, queries_LBHd: Tensor | None) -> None:
        """The selected cache follows the full one; where a rebuild is due, queries are asked for, and then used."""
        preparing, self._due = self._choice.phase == "prepare", False
        if preparing or self._holds_cache:
            selected, most = self._select(), accepted.nodes.shape[1]
            # On a GPU a rebuild comes a step later.
            steps = 1 if backend.is_host(state.positions.device) else 2
            most_next = steps * max(most, self.max_depth + 1)
            waited = selected.building
            slots = list(range(selected.batch)) if preparing and not waited else selected.due(most_next)
            if waited or not preparing:
                selected.follow(most)
            if slots and queries_LBHd is not None:
                if preparing:
                    selected.reset(slots)
                # The root's query sees what stood before it, and itself.
                selected.build(slots, queries_LBHd, state.positions - accepted.counts + 1)
            if preparing and not selected.building and (waited or queries_LBHd is not None):
                self._choice.prepared()
                preparing = False
            self._due = not selected.building if preparing else bool(selected.due(most_next))
        self._set_needs(self._due)

    def release(self) -> None:
        self._cache = self._selected = None

    def rewind(self, lengths_B: Tensor) -> None:
        self._hidden_at = torch.where(self._hidden_at < lengths_B, self._hidden_at, -2)
        if self._holds_cache and self._selected is not None:
            self._selected.rewind(lengths_B)
        if self.ngrams:
            self._tables.rewind(lengths_B)
