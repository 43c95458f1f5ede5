"""Drafters on the host: they propose from a sequence's committed tokens, lists in and lists out.

A table for each slot follows the slot's text; what the host does not know of it yet is read once a step, together with
what other drafters of the step are read for (infer/drafters/combine.py). Shapes: B slots, R recent tokens.
"""

from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from longdraft.infer.drafters.base import Drafter, Request, SlotState
from longdraft.infer.tree import TokenTree
from longdraft.infer.trie import Trie, as_tree
from longdraft.models.kv_cache import KVCache

# Committed tokens read from the device at once, where the host hears of them a step late: a step rarely commits more.
READ_AHEAD = 32
# More tokens than a sequence has.
NOWHERE = 2**40


class Table:
    """What is looked up of one sequence. Attributes: tokens: the sequence so far."""

    def __init__(self):
        self.tokens = list[int]()

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens."""
        raise NotImplementedError

    def truncate(self, length: int) -> None:
        """Take back all tokens from index `length` on, as if they had never been appended."""
        raise NotImplementedError


T = TypeVar("T", bound=Table)


class HostDrafter(Drafter, Generic[T]):
    """Fills a trie below each root from the slot's table.

    Attributes:
        behind_trunk: whether it proposes behind the trunk of another drafter's tree (`Drafter.trunk`), where one is.
    """

    behind_trunk = False
    _tables: list[T | None] = []  # one a slot, None before its first request

    def new_table(self) -> T:
        """An empty table of one sequence."""
        raise NotImplementedError

    def fill(self, trie: Trie, node: int, table: T, max_nodes: int) -> None:
        """Put candidates below this node of the trie, at most `max_nodes` in all, the likeliest first."""
        raise NotImplementedError

    def on_start(self, slot: int, request: Request, cache: KVCache) -> None:
        if len(self._tables) != cache.batch:
            self._tables = [None] * cache.batch
            # So many tokens of each table stand, of which the host is told with the next read.
            self._standing_B = torch.full((cache.batch,), NOWHERE, device=cache.lengths.device)
        self._tables[slot] = table = self.new_table()
        table.extend(request.prompt)
        self._standing_B[slot].fill_(NOWHERE)

    def rewind(self, lengths_B: Tensor) -> None:
        self._standing_B = torch.minimum(self._standing_B, lengths_B)

    def asked(self, state: SlotState) -> Tensor:
        """int64 [B, 4 + R], of which `tries` wants the lists: active, root, position, tokens that stand, and the last R
        tokens up to the root, of which the host may not know some yet."""
        parts = state.active.long(), state.roots, state.positions, self._standing_B
        recent_BR = state.history.read(state.positions - (READ_AHEAD - 1), READ_AHEAD)
        return torch.cat([torch.stack(parts, dim=1), recent_BR], dim=1)

    def tries(
        self, state: SlotState, rows: list[list[int]], max_nodes: int, trunks: Sequence[Sequence[int]] = ()
    ) -> list[Trie]:
        """Each slot's candidates; rows: of `asked`, trunks: each slot's tokens to propose behind."""
        self._catch_up(state, rows)
        tries = []
        for slot, (table, (active, root, *_)) in enumerate(zip(self._tables, rows, strict=True)):
            trie, node = Trie(root), 0
            if active and table is not None:
                for token in trunks[slot] if trunks else ():
                    node = trie.add(node, token, 0)
                self.fill(trie, node, table, max_nodes + node)
            tries.append(trie)
        return tries

    def _catch_up(self, state: SlotState, rows: Sequence[Sequence[int]]) -> None:
        """Bring each table to its slot's root; rows: of `asked`."""
        self._standing_B.fill_(NOWHERE)
        if count := self._extend(state, rows):  # further behind than what was read: read as much
            recent = state.history.read(state.positions - (count - 1), count).tolist()
            self._extend(state, [[*row[:4], *tokens] for row, tokens in zip(rows, recent, strict=True)])

    def _extend(self, state: SlotState, rows: Sequence[Sequence[int]]) -> int:
        """With the committed tokens that the host knows, and those of the rows. Returns how many tokens a table still
        lacks at most, of those that lack more than a row has."""
        most = 0
        for slot, (table, (_, _, position, standing, *recent)) in enumerate(zip(self._tables, rows, strict=True)):
            if table is None:
                continue
            table.truncate(standing)
            if slot < len(state.committed):
                table.extend(state.committed[slot][len(table) : position + 1])
            missing = position + 1 - len(table)
            if missing > len(recent):
                most = max(most, missing)
            elif missing > 0:
                table.extend(recent[len(recent) - missing :])
        return most

    @torch.no_grad()
    def propose(self, state: SlotState, max_nodes: int) -> TokenTree:
        return as_tree(self.tries(state, self.asked(state).tolist(), max_nodes), state.roots.device)
