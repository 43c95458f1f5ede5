"""What a sequence's own tokens tell about the next ones: counts of continuations, and where a suffix stood before.

Both tables hold one sequence, grow with its committed tokens and take tokens back exactly. Not here: which of it is
proposed (infer/drafters/prompt_lookup.py, infer/drafters/tokenswift.py).
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

import torch
from torch import Tensor

from longdraft.infer.drafters.base import SlotState

# Committed tokens read from the device at once, where the host hears of them a step late: a step rarely commits more.
READ_AHEAD = 32
# More tokens than a sequence has.
NOWHERE = 2**40


class NgramTable:
    """How often which n - 1 tokens followed a token, most frequent first (TokenSwift, section 3.3).

    For every first token its n-grams are kept in groups of equal counts, each ordered by its last occurrence; so a new
    occurrence costs two binary searches, and a ranking looks at no more groups than there are different counts (below
    the square root of twice the tokens) and at `k` n-grams, however many continuations a token has.
    """

    def __init__(self, n: int = 4):
        if n < 2:
            raise ValueError(f"n={n}: an n-gram of a first token and its continuation has at least 2 tokens")
        self.n, self.tokens = n, list[int]()
        self._starts: dict[tuple[int, ...], list[int]] = {}  # of each n-gram, ascending
        self._groups: dict[int, dict[int, list[int]]] = {}  # first token -> count -> last starts, ascending

    def __len__(self) -> int:
        """Tokens so far."""
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens and count the n-grams that they complete."""
        n, sequence = self.n, self.tokens
        for token in tokens:
            sequence.append(token)
            start = len(sequence) - n
            if start < 0:
                continue
            starts = self._starts.setdefault(tuple(sequence[start:]), [])
            groups = self._groups.setdefault(sequence[start], {})
            if starts:
                _leave(groups, len(starts), starts[-1])
            starts.append(start)
            groups.setdefault(len(starts), []).append(start)

    def truncate(self, length: int) -> None:
        """Take back all tokens from index `length` on, as if they had never been appended."""
        n, sequence = self.n, self.tokens
        while len(sequence) > length:
            start = len(sequence) - n
            if start >= 0:
                gram = tuple(sequence[start:])
                starts, groups = self._starts[gram], self._groups[gram[0]]
                _leave(groups, len(starts), start)
                starts.pop()
                if starts:
                    insort(groups.setdefault(len(starts), []), starts[-1])
                else:
                    del self._starts[gram]
                    if not groups:
                        del self._groups[gram[0]]
            sequence.pop()

    def ranked(self, first: int, k: int) -> list[tuple[int, ...]]:
        """The `k` most frequent continuations of `first`, n - 1 tokens each; of equal counts the most recent first."""
        groups = self._groups.get(first, {})
        found: list[tuple[int, ...]] = []
        for count in sorted(groups, reverse=True):
            for start in reversed(groups[count]):
                if len(found) == k:
                    return found
                found.append(tuple(self.tokens[start + 1 : start + self.n]))
        return found


def _leave(groups: dict[int, list[int]], count: int, start: int) -> None:
    """Take the n-gram that last began at `start` out of its group."""
    group = groups[count]
    del group[bisect_left(group, start)]
    if not group:
        del groups[count]


class SuffixIndex:
    """Where the last tokens of a sequence stood before.

    A table for each length up to `max_ngram` holds where every n-gram ends; matches are then measured beyond that
    length by comparing tokens backwards. So a step costs `max_ngram` entries for each new token, and at most `search`
    occurrences are looked at, however long the context is.

    Args:
        max_ngram: longest n-gram with a table.
        search: most recent occurrences that are compared.
        longest: matches are not measured beyond this.
    """

    def __init__(self, max_ngram: int = 3, search: int = 64, longest: int = 32):
        self.max_ngram, self.search, self.longest, self.tokens = max_ngram, search, longest, list[int]()
        self._ends: list[dict[tuple[int, ...], list[int]]] = [{} for _ in range(max_ngram)]

    def __len__(self) -> int:
        """Tokens so far."""
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens."""
        sequence = self.tokens
        for token in tokens:
            sequence.append(token)
            end = len(sequence)
            for n, ends in enumerate(self._ends[:end], 1):
                ends.setdefault(tuple(sequence[end - n :]), []).append(end)

    def truncate(self, length: int) -> None:
        """Take back all tokens from index `length` on."""
        sequence = self.tokens
        while len(sequence) > length:
            end = len(sequence)
            for n, ends in enumerate(self._ends[:end], 1):
                gram = tuple(sequence[end - n :])
                ends[gram].pop()
                if not ends[gram]:
                    del ends[gram]
            sequence.pop()

    def matches(self, enough: int, skipped: int = 0) -> list[tuple[int, int]]:
        """Earlier occurrences of the longest suffix, then of shorter ones until there are `enough`.

        Args:
            skipped: last tokens that are left out of the suffix. What follows an occurrence then stands in for them.

        Returns:
            (match length, index of the token behind it), longest match first, of equal lengths the most recent first.
        """
        sequence, end = self.tokens, len(self.tokens) - skipped
        found: dict[int, int] = {}
        for n in range(min(self.max_ngram, end), 0, -1):
            ends = self._ends[n - 1][tuple(sequence[end - n : end])]
            stop = len(ends)
            while stop and ends[stop - 1] >= end:  # the suffix itself, and what lies in the skipped tokens
                stop -= 1
            for at in ends[max(stop - self.search, 0) : stop]:
                if at not in found:
                    found[at] = self._length(at, end, n)
            if len(found) >= enough:
                break
        return sorted(((length, at) for at, length in found.items()), reverse=True)

    def _length(self, at: int, end: int, known: int) -> int:
        """How many tokens before index `at` equal those before `end`; `known` of them do."""
        sequence, back = self.tokens, end - at
        stop = max(at - self.longest, 0)
        place = at - known
        while place > stop and sequence[place - 1] == sequence[place - 1 + back]:
            place -= 1
        return at - place

    def continuation(self, at: int, count: int) -> list[int]:
        """The `count` tokens from index `at` on; behind the sequence's end it repeats itself, as a loop would."""
        tokens = self.tokens[at : at + count]
        period = len(self.tokens) - at
        for i in range(len(tokens), count):
            tokens.append(tokens[i - period])
        return tokens


class Tables:
    """A table for each slot (None: no request yet), brought to the slots' roots by what is read of them once a step.

    Attributes:
        of: the tables, one a slot.
    """

    def __init__(self, batch: int, device: torch.device):
        self.of: list[NgramTable | SuffixIndex | None] = [None] * batch
        # So many tokens of each stand, of which the host is told with the next read.
        self._standing_B = torch.full((batch,), NOWHERE, device=device)

    def begin(self, slot: int, table: NgramTable | SuffixIndex) -> None:
        """A request's table, with its prompt."""
        self.of[slot] = table
        self._standing_B[slot].fill_(NOWHERE)

    def rewind(self, lengths_B: Tensor) -> None:
        """Only the first lengths_B[b] tokens stand."""
        self._standing_B = torch.minimum(self._standing_B, lengths_B)

    def asked(self, state: SlotState) -> Tensor:
        """int64 [B, 4 + R], of which `catch_up` wants the lists: active, root, position, tokens that stand, and the
        last R tokens up to the root, of which the host may not know some yet."""
        parts = state.active.long(), state.roots, state.positions, self._standing_B
        recent_BR = state.history.read(state.positions - (READ_AHEAD - 1), READ_AHEAD)
        return torch.cat([torch.stack(parts, dim=1), recent_BR], dim=1)

    def catch_up(self, state: SlotState, rows: Sequence[Sequence[int]]) -> list[tuple[bool, int]]:
        """Bring each table to its slot's root; rows: of `asked`. Returns (active, root) of each slot."""
        self._standing_B.fill_(NOWHERE)
        if count := self._extend(state, rows):  # further behind than what was read: read as much
            recent = state.history.read(state.positions - (count - 1), count).tolist()
            self._extend(state, [[*row[:4], *tokens] for row, tokens in zip(rows, recent, strict=True)])
        return [(bool(row[0]), row[1]) for row in rows]

    def _extend(self, state: SlotState, rows: Sequence[Sequence[int]]) -> int:
        """With the committed tokens that the host knows, and those of the rows. Returns how many tokens a table still
        lacks at most, of those that lack more than a row has."""
        most = 0
        for slot, (table, (_, _, position, standing, *recent)) in enumerate(zip(self.of, rows, strict=True)):
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
