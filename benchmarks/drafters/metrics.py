"""Computes figures from answers: acceptance length by its public definitions, speeds, and confidence intervals.

S steps of the target, each of which commits one token of its own; A accepted tokens in all; R requests; N prompts.

| figure | formula | as in |
|---|---|---|
| per_step | mean of the steps' accept_lengths, 1 + A / S | Spec-Bench ("mean accepted tokens"), vLLM |
| alpha | A / (4 S), as a drafter of four tokens a step | TokenSwift: tokens/step = 4 alpha + 1 |
| tau | (A + S + R) / (S + R): the prefill is a call that brings a token | LongSpec |

Tokens accepted after an answer's end are dropped. Intervals are 95 % percentile bootstraps over prompts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, zip_longest
from typing import Any

import numpy as np

from longdraft.benchmarks.drafters.record import Answer, Entry

RESAMPLES, SEED = 2000, 0
TOKENSWIFT_GAMMA = 4
EVERY = 10240  # tokens between two figures of a long generation's ms/token (TokenSwift)


def lengths(answers: Sequence[Answer]) -> dict[str, float]:
    """Acceptance length by all definitions in the table above."""
    steps, accepted = sum(a.steps for a in answers), sum(a.accepted for a in answers)
    calls = steps + len(answers)
    return {
        "per_step": 1 + accepted / steps,
        "alpha": accepted / (TOKENSWIFT_GAMMA * steps),
        "tau": (accepted + calls) / calls,
    }


def totals(answers: Sequence[Answer]) -> dict[str, Any]:
    """Totals over answers that were decoded one at a time, with times in milliseconds per step.

    `commit_ms` is the time for accepting, committing and the drafters' updates; `host_ms` is all time except proposals
    and the target's passes, and `host_share` its fraction of a step. `acceptance_by_depth`[d] is the fraction of steps
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
    return {
        "requests": len(answers),
        "tokens": tokens,
        "steps": steps,
        "tokens_per_step": tokens / steps,
        "lengths": lengths(answers),
        "acceptance": (tokens - steps) / max(drafted, 1),
        "acceptance_by_depth": by_depth,
        "tokens_per_second": tokens / seconds,
        "first_token_seconds": sum(a.first_token_seconds for a in answers) / len(answers),
        **{f"{part}_ms": 1e3 * value / steps for part, value in parts.items()},
        "host_share": parts["host"] / seconds,
        "nodes_per_step": drafted / steps,
    }


Pair = tuple[Entry, Entry]  # a drafter's entry, and plain decoding's of the same question and turns


def compared(pairs: Sequence[Pair]) -> dict[str, Any]:
    """`totals`, the speedup over plain decoding on the same prompts, and intervals."""
    found = totals([turn for entry, _ in pairs for turn in entry.turns])
    by_prompt = [_sums(*pair) for pair in pairs]
    sums = {name: np.array([one[name] for one in by_prompt]) for name in by_prompt[0]}
    figures = {"per_step": lambda s: s["tokens"] / s["steps"], "speedup": _speedup}
    intervals = {name: interval(sums, figure) for name, figure in figures.items()}
    whole = _speedup({name: values.sum() for name, values in sums.items()})
    return found | {"prompts": len(pairs), "speedup": float(whole), "intervals": intervals}


def _speedup(s: Mapping[str, Any]) -> Any:
    return s["tokens"] / s["seconds"] / (s["plain_tokens"] / s["plain_seconds"])


def _sums(entry: Entry, plain: Entry) -> dict[str, float]:
    """The sums over one prompt's turns from which figures over prompts are computed."""
    turns, plain_turns = entry.turns, plain.turns
    return {
        "tokens": sum(len(a.tokens) for a in turns),
        "steps": sum(a.steps for a in turns),
        "seconds": sum(a.decode_seconds for a in turns),
        "plain_tokens": sum(len(a.tokens) for a in plain_turns),
        "plain_seconds": sum(a.decode_seconds for a in plain_turns),
    }


def interval(sums: Mapping[str, np.ndarray], figure: Callable[[Mapping[str, np.ndarray]], np.ndarray]) -> list[float]:
    """The middle 95 % of a figure over prompts drawn with replacement. sums: by name, one value per prompt [N]."""
    count = len(next(iter(sums.values())))
    drawn = np.random.default_rng(SEED).integers(count, size=(RESAMPLES, count))
    values = figure({name: by_prompt[drawn].sum(1) for name, by_prompt in sums.items()})
    return [float(one) for one in np.percentile(values, (2.5, 97.5))]


def bucket(tokens: int) -> str:
    """The powers of two between which a context lies, such as "4K-8K"."""
    low = 1 << (max(tokens, 1).bit_length() - 1)
    ends = (f"{n >> 20}M" if n >= 1 << 20 else f"{n >> 10}K" if n >= 1 << 10 else str(n) for n in (low, 2 * low))
    return "-".join(ends)


def by_context(pairs: Sequence[Pair]) -> dict[str, list[Pair]]:
    """Group pairs by the bucket of the prompt's length, the shortest first; a question's turns may fall into several.

    Plain decoding's prompts decide, because a later turn's prompt holds the earlier answers, whose lengths a drafter's
    flips may change.
    """
    found: dict[int, list[Pair]] = {}
    for entry, plain in pairs:
        sizes = [max(turn.prompt_tokens, 1).bit_length() for turn in plain.turns]
        for size in dict.fromkeys(sizes):
            chosen = [place for place, other in enumerate(sizes) if other == size and place < len(entry.turns)]
            if chosen:
                parts = (replace(one, turns=[one.turns[place] for place in chosen]) for one in (entry, plain))
                found.setdefault(size, []).append(tuple(parts))  # type: ignore[arg-type]
    return {bucket((1 << size) - 1): found[size] for size in sorted(found)}


def ms_per_token(answer: Answer, every: int = EVERY) -> list[dict[str, float]]:
    """Milliseconds per token at each `every` tokens of a generation and at its end, since the previous mark, as
    TokenSwift's program prints them; the first step's tokens are the first mark's start."""
    marks, last = [], None
    counts = list(accumulate(answer.accept_lengths))
    for count, at in zip(counts, answer.arrivals, strict=False):  # transformers' answers have no arrivals
        if last is not None and (count // every > last[0] // every or (count == counts[-1] and count > last[0])):
            marks.append({"tokens": count, "ms": 1e3 * (at - last[1]) / (count - last[0])})
        if last is None or (marks and marks[-1]["tokens"] == count):
            last = (count, at)
    return marks


def same_tokens(one: Sequence[list[int]], other: Sequence[list[int]]) -> tuple[int, int]:
    """Count the equal tokens of two lists of answers, and all tokens."""
    pairs = [pair for texts in zip_longest(one, other, fillvalue=[]) for pair in zip_longest(*texts)]
    return sum(a == b for a, b in pairs), len(pairs)


def rounded(figures: Any) -> Any:
    """Round figures for JSON to four digits, which is what a clock can tell."""
    if isinstance(figures, dict):
        return {key: rounded(value) for key, value in figures.items()}
    if isinstance(figures, list | tuple):
        return [rounded(value) for value in figures]
    return round(figures, 4) if isinstance(figures, float) else figures


def run_figures(entries: Mapping[str, Sequence[Entry]]) -> dict[str, dict]:
    """All figures of one temperature, by drafter. entries: by drafter, "plain" among them, on the same questions."""
    plain = {entry.id: entry for entry in entries["plain"]}
    found = {}
    for name, ours in entries.items():
        pairs = [(entry, plain[entry.id]) for entry in ours]
        tasks: dict[str, list[Pair]] = {}
        for pair in pairs:
            tasks.setdefault(pair[0].task, []).append(pair)
        same = [same_tokens(*([turn.tokens for turn in one.turns] for one in pair)) for pair in pairs]
        found[name] = rounded(
            compared(pairs)
            | {
                "prompt_speedups": [_speedup(_sums(*pair)) for pair in pairs],
                "tasks": {task: compared(group) for task, group in tasks.items()},
                "contexts": {context: compared(group) for context, group in by_context(pairs).items()},
                "same_tokens": [sum(counts) for counts in zip(*same, strict=True)],
                "ms_per_token": [
                    marks for entry in ours for turn in entry.turns if len(marks := ms_per_token(turn)) > 1
                ],
            }
        )
    return found


def lay_out(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[list[str]]:
    """Pad each cell to the width of its column, left-aligned in the columns `left`, right-aligned elsewhere."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust if i in left else str.rjust for i in range(len(widths))]
    return [[side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)] for row in rows]
