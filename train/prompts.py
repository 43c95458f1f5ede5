"""Prompts of given lengths from the held-out rows. Not here: decoding them (evaluate.py)."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

from longdraft.train.batches import Rows

T = TypeVar("T")
# A run of tokens in a row: (row, start, stop).
Span = tuple[int, int, int]


def held_out_prompts(rows: Rows, contexts: Sequence[int], n: int, path: str) -> dict[int, list[list[int]]]:
    """For each length, n prompts: the beginnings of held-out documents, evenly spread over those that are long enough.
    Where these are too few, later stretches of the same length are taken too. A document may lie in several rows.

    Args:
        path: of the data, for messages.

    Raises ValueError where no document is that long, or there are fewer than n such stretches.
    """
    documents = [(spans, sum(stop - start for _, start, stop in spans)) for spans in _documents(rows)]
    longest = max(length for _, length in documents)
    prompts = {}
    for context in contexts:
        if context > longest:
            raise ValueError(
                f"decoding.contexts: {context} tokens, but the longest held-out document in {path} has {longest}; give "
                f"at most {longest}, or prepare longer documents"
            )
        firsts = [(spans, 0) for spans, length in documents if length >= context]
        others = [(spans, i * context) for spans, length in documents for i in range(1, length // context)]
        if len(firsts) + len(others) < n:
            found = len(firsts) + len(others)
            raise ValueError(
                f"decoding.prompts: {n}, but the held-out documents in {path} have {found} stretches of {context} "
                f"tokens; set decoding.prompts={found}, or prepare more text"
            )
        chosen = _spread(firsts, min(n, len(firsts)))
        chosen += _spread(others, n - len(chosen))
        prompts[context] = [_tokens(rows, spans, start, context) for spans, start in chosen]
    return prompts


def _documents(rows: Rows) -> list[list[Span]]:
    """Each document's runs of tokens, in order. Where one is missing, each of the others counts as a document."""
    pieces: dict[str, list[tuple[int, Span]]] = {}
    for i in range(len(rows)):
        borders = [int(border) for border in rows[i]["borders"]]
        for (name, number), (start, stop) in zip(rows.pieces(i), pairwise(borders), strict=True):
            pieces.setdefault(name, []).append((number, (i, start, stop)))
    documents = []
    for found in pieces.values():
        found.sort()
        spans = [span for _, span in found]
        is_whole = [number for number, _ in found] == list(range(len(found)))
        documents += [spans] if is_whole else [[span] for span in spans]
    return documents


def _spread(items: Sequence[T], n: int) -> list[T]:
    """n of the items, evenly spaced."""
    return [items[i * len(items) // n] for i in range(n)]


def _tokens(rows: Rows, spans: Sequence[Span], start: int, n: int) -> list[int]:
    """Tokens start to start + n of a document."""
    tokens: list[int] = []
    for row, first, last in spans:
        if len(tokens) < start + n:
            tokens += rows[row]["tokens"][first:last].tolist()
    return tokens[start : start + n]
