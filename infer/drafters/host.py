"""Drafters on the host: they propose from a sequence's committed tokens, lists in and lists out.

Each slot has an n-gram table of its text. Tokens that the host does not know yet are read from the device once a step,
together with other drafters' trees (infer/drafters/combine.py). Shapes: B slots, R recent tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from longdraft.infer.budget import Budget
from longdraft.infer.drafters.base import Drafter, Request
from longdraft.infer.slot_state import SlotState
from longdraft.infer.tree import TokenTree, Trie
from longdraft.models.kv_cache import KVCache
from longdraft.models.passes import TargetOutput

# How many of the last committed tokens every step reads from the device, because the host may lag by one step. If a
# step commits more, the slot proposes nothing until the host knows them.
READ_AHEAD = 128


class NgramIndex:
    """One sequence's tokens, and where each of their n-grams ends, for every n up to `longest`.

    Attributes:
        tokens: the sequence so far.
        ends: for each n from 1 on, n-gram -> the indices after its occurrences, ascending.
    """

    def __init__(self, longest: int = 1):
        self.tokens = list[int]()
        self.ends: list[dict[tuple[int, ...], list[int]]] = [{} for _ in range(longest)]

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens."""
        sequence = self.tokens
        for token in tokens:
            sequence.append(token)
            end = len(sequence)
            for n, ends in enumerate(self.ends[:end], 1):
                ends.setdefault(tuple(sequence[end - n :]), []).append(end)


class HostDrafter(Drafter):
    """Fills a trie below each root from the slot's n-grams. A subclass implements `fill`.

    Attributes:
        longest_ngram: the longest n-grams that it looks up.
    """

    longest_ngram = 1
    _tables: list[NgramIndex | None] = []  # one for each slot, None before its first request

    def fill(self, trie: Trie, table: NgramIndex, max_nodes: int) -> None:
        """Put candidates below the root of the trie, likeliest first, until it has `max_nodes` beside the root."""
        raise NotImplementedError

    def on_start(self, slot: int, request: Request, cache: KVCache) -> None:
        if len(self._tables) != cache.batch:
            self._tables = [None] * cache.batch
        self._tables[slot] = NgramIndex(self.longest_ngram)

    def on_prefill(self, slot: int, prompt: Sequence[int], start: int, end: int, output: TargetOutput) -> None:
        table = self._tables[slot]
        assert table is not None
        table.extend(prompt[start:end])  # while a GPU runs the pass

    def device_rows(self, state: SlotState) -> Tensor:
        """int64 [B, 3 + R], the rows that `tries` needs: active, root, position, and the last R tokens up to the root;
        the host may not know all of these yet."""
        return state.run(("device_rows",), (), _device_rows)

    def tries(self, state: SlotState, rows: list[list[int]], max_nodes: int) -> list[Trie]:
        """Each slot's candidates. rows: `device_rows` as lists."""
        tries = []
        for slot, (table, (active, root, position, *recent)) in enumerate(zip(self._tables, rows, strict=True)):
            trie = Trie(root)
            if active and table is not None:
                table.extend(state.committed[slot][len(table) : position + 1])
                missing = position + 1 - len(table)
                if 0 < missing <= len(recent):
                    table.extend(recent[-missing:])
                if len(table) == position + 1:
                    self.fill(trie, table, max_nodes)
            tries.append(trie)
        return tries

    @torch.no_grad()
    def propose(self, state: SlotState, budget: Budget) -> TokenTree:
        return TokenTree.from_tries(self.tries(state, self.device_rows(state).tolist(), budget.max_nodes))


def _device_rows(state: SlotState) -> Tensor:
    numbers = state.active.long(), state.roots, state.positions
    recent_BR = state.history.read(state.positions - (READ_AHEAD - 1), READ_AHEAD)
    return torch.cat([torch.stack(numbers, dim=1), recent_BR], dim=1)
