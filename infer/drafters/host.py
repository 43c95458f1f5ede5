"""Drafters on the host: they propose from a sequence's committed tokens, lists in and lists out.

A table for each slot follows the slot's text; what the host does not know of it yet is read once a step, together with
what other drafters of the step are read for (infer/drafters/combine.py). Shapes: B slots.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from longdraft.infer.drafters.base import Drafter, Request, SlotState
from longdraft.infer.ngram import NgramTable, SuffixIndex, Tables
from longdraft.infer.tree import TokenTree
from longdraft.infer.trie import Trie, as_tree
from longdraft.models.kv_cache import KVCache


class HostDrafter(Drafter):
    """Fills a trie below each root from the slot's table.

    Attributes:
        behind_trunk: whether it proposes behind the trunk of another drafter's tree (`Drafter.trunk`), where one is.
    """

    behind_trunk = False
    _tables: Tables | None = None

    def new_table(self) -> NgramTable | SuffixIndex:
        """An empty table of one sequence."""
        raise NotImplementedError

    def fill(self, trie: Trie, node: int, table: NgramTable | SuffixIndex, max_nodes: int) -> None:
        """Put candidates below this node of the trie, at most `max_nodes` in all, the likeliest first."""
        raise NotImplementedError

    def on_start(self, slots: Sequence[int], requests: Sequence[Request], cache: KVCache) -> None:
        if self._tables is None or len(self._tables.of) != cache.batch:
            self._tables = Tables(cache.batch, cache.lengths.device)
        for slot, request in zip(slots, requests, strict=True):
            table = self.new_table()
            table.extend(request.prompt)
            self._tables.begin(slot, table)

    def rewind(self, lengths_B: Tensor) -> None:
        assert self._tables is not None
        self._tables.rewind(lengths_B)

    def asked(self, state: SlotState) -> Tensor:
        """int64 [B, ...], of which `tries` wants the lists."""
        assert self._tables is not None
        return self._tables.asked(state)

    def tries(
        self, state: SlotState, rows: list[list[int]], max_nodes: int, trunks: Sequence[Sequence[int]] = ()
    ) -> list[Trie]:
        """Each slot's candidates; rows: of `asked`, trunks: each slot's tokens to propose behind."""
        assert self._tables is not None
        tries, caught_up = [], self._tables.catch_up(state, rows)
        for slot, (table, (active, root)) in enumerate(zip(self._tables.of, caught_up, strict=True)):
            trie, node = Trie(root), 0
            if active and table is not None:
                for token in trunks[slot] if trunks else ():
                    node = trie.add(node, token, 0)
                self.fill(trie, node, table, max_nodes + node)
            tries.append(trie)
        return tries

    @torch.no_grad()
    def propose(self, state: SlotState, max_nodes: int) -> TokenTree:
        tries = self.tries(state, self.asked(state).tolist(), max_nodes)
        return as_tree(tries, state.roots.device)
