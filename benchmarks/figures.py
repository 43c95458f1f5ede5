"""Figures of answers: the public definitions of acceptance length, speeds, and what of them is chance.

S steps of the target, of which each commits its own token and A accepted ones in all; R requests; N prompts.

| figure | formula | as in |
|---|---|---|
| pooled | 1 + A / S | vLLM, AIPerf |
| per_request | mean over requests of their tokens / steps | specdec_bench |
| per_step | mean of the steps' accept_lengths | Spec-Bench ("mean accepted tokens") |
| alpha | A / (4 S), as a drafter of four tokens a step | TokenSwift: tokens/step = 4 alpha + 1 |
| tau | (A + S + R) / (S + R): the prefill is a call that brings a token | LongSpec |

An engine that leaves out what it accepted behind an answer's end has pooled = per_step; this one does. Intervals are
percentile bootstraps over prompts (95 %). Not here: what is measured (drafters.py).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, zip_longest
from typing import Any

import numpy as np

from longdraft.benchmarks.answers import Answer, Entry

RESAMPLES, SEED = 2000, 0
TOKENSWIFT_GAMMA = 4
EVERY = 10240  # tokens, of a long generation's ms/token (TokenSwift)


def lengths(answers: Sequence[Answer]) -> dict[str, float]:
    """The definitions of acceptance length, and the papers' own figures."""
    steps, accepted = sum(a.steps for a in answers), sum(a.accepted for a in answers)
    every = [length for answer in answers for length in answer.accept_lengths]
    calls = steps + len(answers)
    return {
        "pooled": 1 + accepted / steps,
        "per_request": sum(len(a.tokens) / a.steps for a in answers) / len(answers),
        "per_step": sum(every) / len(every),
        "alpha": accepted / (TOKENSWIFT_GAMMA * steps),
        "tau": (accepted + calls) / calls,
    }


def accepted_by_place(answers: Sequence[Answer]) -> list[int]:
    """[d]: steps that accepted at least d + 1 nodes."""
    every = [length - 1 for answer in answers for length in answer.accept_lengths]
    return [sum(length > place for length in every) for place in range(max(every, default=0))]


def totals(answers: Sequence[Answer]) -> dict[str, Any]:
    """Totals over answers that were made one at a time, with times in milliseconds a step.

    `commit_ms` is accepting, committing and what drafters do of it; `host_ms` is all beside proposals and the target's
    passes, `host_share` its fraction of a step; [d] of `acceptance_by_depth` is the fraction of steps that accepted at
    least d + 1 nodes, and of `conditional_by_depth` that of those which accepted d.
    """
    tokens, steps = sum(len(a.tokens) for a in answers), sum(a.steps for a in answers)
    seconds, drafted = sum(a.decode_seconds for a in answers), sum(a.drafted for a in answers)
    parts: dict[str, float] = {
        part: sum(getattr(a, f"{part}_seconds") for a in answers) for part in ("draft", "target", "commit")
    }
    parts["host"] = seconds - parts["draft"] - parts["target"]
    places = accepted_by_place(answers)
    return {
        "requests": len(answers),
        "tokens": tokens,
        "steps": steps,
        "tokens_per_step": tokens / steps,
        "lengths": lengths(answers),
        "acceptance": (tokens - steps) / max(drafted, 1),
        "acceptance_by_depth": [count / steps for count in places],
        "conditional_by_depth": [count / before for before, count in zip([steps, *places], places, strict=False)],
        "tokens_per_second": tokens / seconds,
        "first_token_seconds": sum(a.first_token_seconds for a in answers) / len(answers),
        **{f"{part}_ms": 1e3 * value / steps for part, value in parts.items()},
        "host_share": parts["host"] / seconds,
        "nodes_per_step": drafted / steps,
        "decisions": answers[-1].decisions,
    }


Pair = tuple[Entry, Entry]  # a drafter's entry, and plain decoding's of the same question and turns


def compared(pairs: Sequence[Pair]) -> dict[str, Any]:
    """`totals`, the speed over plain decoding's on the same prompts, and intervals."""
    found = totals([turn for entry, _ in pairs for turn in entry.turns])
    each = [_sums(*pair) for pair in pairs]
    sums = {name: np.array([one[name] for one in each]) for name in each[0]}
    figures = {
        "pooled": lambda s: s["tokens"] / s["steps"],
        "per_request": lambda s: s["ratios"] / s["requests"],
        "tokens_per_second": lambda s: s["tokens"] / s["seconds"],
        "speedup": _speedup,
    }
    intervals = {name: interval(sums, figure) for name, figure in figures.items()}
    whole = _speedup({name: values.sum() for name, values in sums.items()})
    return found | {"prompts": len(pairs), "speedup": float(whole), "intervals": intervals}


def _speedup(s: Mapping[str, Any]) -> Any:
    return s["tokens"] / s["seconds"] / (s["plain_tokens"] / s["plain_seconds"])


def _sums(entry: Entry, plain: Entry) -> dict[str, float]:
    """Of one prompt, of which figures over prompts are made."""
    turns, slow = entry.turns, plain.turns
    return {
        "tokens": sum(len(a.tokens) for a in turns),
        "steps": sum(a.steps for a in turns),
        "seconds": sum(a.decode_seconds for a in turns),
        "requests": len(turns),
        "ratios": sum(len(a.tokens) / a.steps for a in turns),
        "plain_tokens": sum(len(a.tokens) for a in slow),
        "plain_seconds": sum(a.decode_seconds for a in slow),
    }


def interval(sums: Mapping[str, np.ndarray], figure: Callable[[Mapping[str, np.ndarray]], np.ndarray]) -> list[float]:
    """The middle 95 % of a figure over prompts drawn with replacement; sums: of each prompt, [N], by name."""
    count = len(next(iter(sums.values())))
    drawn = np.random.default_rng(SEED).integers(count, size=(RESAMPLES, count))
    values = figure({name: of_each[drawn].sum(1) for name, of_each in sums.items()})
    return [float(one) for one in np.percentile(values, (2.5, 97.5))]


def bucket(tokens: int) -> str:
    """The powers of two between which a context lies, as "4K-8K"."""
    low = 1 << (max(tokens, 1).bit_length() - 1)
    return f"{_short(low)}-{_short(2 * low)}"


def _short(count: int) -> str:
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if count >= size:
            return f"{count // size}{unit}"
    return str(count)


def by_context(pairs: Sequence[Pair]) -> dict[str, list[Pair]]:
    """Pairs by the bucket of plain decoding's prompts, from the shortest on; turns of one question may be in several.

    A later turn's prompt holds the answers before it, which a drafter's flips make shorter or longer.
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
    """Along a generation, at each `every` tokens and at its end: ms/token since the mark before, and since the first
    step's tokens, as TokenSwift's program prints it."""
    if len(answer.arrivals) < 2:
        return []
    start, first = answer.arrivals[0], answer.accept_lengths[0]
    marks, last = [], (first, start)
    counts = list(accumulate(answer.accept_lengths))
    for count, at in zip(counts, answer.arrivals, strict=True):
        if count // every > last[0] // every or (count == counts[-1] and count > last[0]):
            since, whole = 1e3 * (at - last[1]) / (count - last[0]), 1e3 * (at - start) / (count - first)
            marks.append({"tokens": count, "ms": since, "mean_ms": whole})
            last = (count, at)
    return marks


def same_tokens(one: Sequence[list[int]], other: Sequence[list[int]]) -> tuple[int, int]:
    """How many tokens of the same prompts are equal, of how many."""
    pairs = [pair for texts in zip_longest(one, other, fillvalue=[]) for pair in zip_longest(*texts)]
    return sum(a == b for a, b in pairs), len(pairs)


def rounded(figures: Any) -> Any:
    """Figures to what a clock can tell, for JSON."""
    if isinstance(figures, dict):
        return {key: rounded(value) for key, value in figures.items()}
    if isinstance(figures, list | tuple):
        return [rounded(value) for value in figures]
    return round(figures, 4) if isinstance(figures, float) else figures


def run_figures(entries: Mapping[str, Sequence[Entry]]) -> dict[str, dict]:
    """All figures of one temperature.

    Args:
        entries: by drafter, "plain" among them, on the same questions.
    """
    plain = {entry.id: entry for entry in entries["plain"]}
    found = {}
    for name, ours in entries.items():
        pairs = [(entry, plain[entry.id]) for entry in ours]
        tasks = {task: [pair for pair in pairs if pair[0].task == task] for task in dict.fromkeys(e.task for e in ours)}
        same = [same_tokens(*([turn.tokens for turn in one.turns] for one in pair)) for pair in pairs]
        found[name] = rounded(
            compared(pairs)
            | {
                "prompt_speedups": [_speedup(_sums(*pair)) for pair in pairs],
                "tasks": {task: compared(of) for task, of in tasks.items()},
                "contexts": {context: compared(of) for context, of in by_context(pairs).items()},
                "same_tokens": [sum(counts) for counts in zip(*same, strict=True)],
                "ms_per_token": [m for e in ours for turn in e.turns if len(m := ms_per_token(turn)) > 1],
            }
        )
    return found
