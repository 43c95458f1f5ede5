"""Computes figures from answers: acceptance length by its public definitions, speeds, and confidence intervals.

S steps of the target, each of which commits one token of the target's own; A accepted tokens; R requests; N prompts.

| figure | formula | as in |
|---|---|---|
| per_step | mean of the steps' accept_lengths, 1 + A / S | Spec-Bench ("mean accepted tokens"), vLLM |
| alpha | A / (4 S), as a drafter of four tokens a step | TokenSwift: tokens/step = 4 alpha + 1 |
| tau | (A + S + R) / (S + R): the prefill counts as a call that makes a token | LongSpec |

Tokens accepted after an answer's end are dropped. Intervals are 95 % percentile bootstraps over prompts.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, zip_longest
from typing import Any

import numpy as np

from longdraft.benchmarks.drafters.record import Answer, Entry

RESAMPLES, SEED = 2000, 0
TOKENSWIFT_GAMMA = 4
EVERY = 10240  # tokens between two figures of a long generation's ms/token (TokenSwift)


def totals(answers: Sequence[Answer]) -> dict[str, Any]:
    """Totals over answers that were decoded one at a time, with times in milliseconds per step.

    `commit_ms` is the time for accepting, committing and the drafters' updates; `host_ms` is all time except proposals
    and the target's passes; `host_share` is its fraction of a step. `acceptance_by_depth`[d] is the fraction of steps
    that accepted at least d + 1 nodes.
    """
    tokens, steps = sum(len(a.tokens) for a in answers), sum(a.steps for a in answers)
    seconds, drafted = sum(a.decode_seconds for a in answers), sum(a.drafted for a in answers)
    parts: dict[str, float] = {
        part: sum(getattr(a, f"{part}_seconds") for a in answers) for part in ("draft", "target", "commit")
    }
    parts["host"] = seconds - parts["draft"] - parts["target"]
    accepted = [length - 1 for answer in answers for length in answer.accept_lengths]
    by_depth = [sum(count > depth for count in accepted) / steps for depth in range(max(accepted, default=0))]
    calls = steps + len(answers)
    lengths = {
        "per_step": tokens / steps,
        "alpha": (tokens - steps) / (TOKENSWIFT_GAMMA * steps),
        "tau": (tokens - steps + calls) / calls,
    }
    return {
        "tokens": tokens,
        "steps": steps,
        "tokens_per_step": tokens / steps,
        "lengths": lengths,
        "acceptance": (tokens - steps) / max(drafted, 1),
        "acceptance_by_depth": by_depth,
        "tokens_per_second": tokens / seconds,
        "first_token_seconds": sum(a.first_token_seconds for a in answers) / len(answers),
        **{f"{part}_ms": 1e3 * value / steps for part, value in parts.items()},
        "host_share": parts["host"] / seconds,
        "nodes_per_step": drafted / steps,
    }


Pair = tuple[Entry, Entry]  # a drafter's entry, and plain decoding's of the same question


def compared(pairs: Sequence[Pair]) -> dict[str, Any]:
    """`totals`, the speedup over plain decoding on the same prompts, and 95 % bootstrap intervals of both figures."""
    sums_N5 = np.array([_sums(*pair) for pair in pairs])
    drawn = np.random.default_rng(SEED).integers(len(pairs), size=(RESAMPLES, len(pairs)))
    resampled = sums_N5[drawn].sum(1)
    figures = {"per_step": resampled[:, 0] / resampled[:, 1], "speedup": _speedup(resampled)}
    return totals([turn for entry, _ in pairs for turn in entry.turns]) | {
        "prompts": len(pairs),
        "speedup": float(_speedup(sums_N5.sum(0))),
        "prompt_speedups": _speedup(sums_N5).tolist(),
        "intervals": {name: np.percentile(values, (2.5, 97.5)).tolist() for name, values in figures.items()},
    }


def _sums(entry: Entry, plain: Entry) -> list[float]:
    """A prompt's tokens, steps and seconds, and plain decoding's tokens and seconds."""
    tokens, plain_tokens = (sum(len(a.tokens) for a in one.turns) for one in (entry, plain))
    seconds, plain_seconds = (sum(a.decode_seconds for a in one.turns) for one in (entry, plain))
    return [tokens, sum(a.steps for a in entry.turns), seconds, plain_tokens, plain_seconds]


def _speedup(sums: np.ndarray) -> np.ndarray:
    """Tokens per second over plain decoding's. sums: `_sums` in the last dimension."""
    tokens, _, seconds, plain_tokens, plain_seconds = np.moveaxis(sums, -1, 0)
    return tokens / seconds / (plain_tokens / plain_seconds)


def bucket(tokens: int) -> str:
    """The powers of two around a context's length, such as "4096-8192"."""
    low = 1 << (max(tokens, 1).bit_length() - 1)
    return f"{low}-{2 * low}"


def by_group(pairs: Sequence[Pair], name: Callable[[Pair], str]) -> dict[str, dict[str, Any]]:
    """`compared` for the pairs of each name, in the order of the names' first pairs."""
    found: dict[str, list[Pair]] = {}
    for pair in pairs:
        found.setdefault(name(pair), []).append(pair)
    return {group: compared(of) for group, of in found.items()}


def _context(pair: Pair) -> int:
    return pair[0].turns[0].prompt_tokens


def ms_per_token(answer: Answer, every: int = EVERY) -> list[dict[str, float]]:
    """Milliseconds per token since the previous mark, with a mark every `every` tokens of a generation and at its end,
    as TokenSwift's code prints them; the first interval starts after the first step's tokens."""
    points = list(zip(accumulate(answer.accept_lengths), answer.arrivals, strict=False))  # transformers': no arrivals
    marks, start = [], 0
    for i in range(1, len(points)):
        (before, since), (count, at) = points[start], points[i]
        if count // every > before // every or i == len(points) - 1:
            marks.append({"tokens": count, "ms": 1e3 * (at - since) / (count - before)})
            start = i
    return marks


def same_tokens(one: Sequence[list[int]], other: Sequence[list[int]]) -> tuple[int, int]:
    """Count the equal tokens of two lists of answers, and all tokens."""
    pairs = [pair for texts in zip_longest(one, other, fillvalue=[]) for pair in zip_longest(*texts)]
    return sum(a == b for a, b in pairs), len(pairs)


def run_figures(entries: Mapping[str, Sequence[Entry]]) -> dict[str, dict]:
    """All figures of one temperature, by drafter. entries: by drafter, including "plain", on the same questions."""
    plain = {entry.id: entry for entry in entries["plain"]}
    found = {}
    for name, ours in entries.items():
        pairs = [(entry, plain[entry.id]) for entry in ours]
        same = [same_tokens(*([turn.tokens for turn in one.turns] for one in pair)) for pair in pairs]
        found[name] = compared(pairs) | {
            "tasks": by_group(pairs, lambda pair: pair[0].task),
            "contexts": by_group(sorted(pairs, key=_context), lambda pair: bucket(_context(pair))),
            "same_tokens": [sum(counts) for counts in zip(*same, strict=True)],
            "ms_per_token": [marks for entry in ours for turn in entry.turns if len(marks := ms_per_token(turn)) > 1],
        }
    return found


def lay_out(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[list[str]]:
    """Pad each cell to the width of its column, left-aligned in the columns `left`, right-aligned elsewhere."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust if i in left else str.rjust for i in range(len(widths))]
    return [[side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)] for row in rows]
