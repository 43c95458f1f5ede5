"""The papers' tables: how they were measured, their figures, and our figures beside them.

A paper is an entry of PAPERS. Numbers come from the papers' tables; settings that a paper omits come from its authors'
code.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, product, repeat
from typing import Any

from longdraft.benchmarks.drafters.metrics import lay_out, totals
from longdraft.benchmarks.drafters.questions import SUITES, Suite
from longdraft.benchmarks.drafters.record import Answer, Record
from longdraft.infer.sampling import PRESETS, preset_for

PROMPT = "as many as a prompt's tokens"  # in a paper's options: this number is the prompt's length


@dataclass(frozen=True)
class Published:
    """A row of a table.

    Attributes:
        target: the paper's name for it.
        length: the paper's figure of acceptance, None if it gives none. speedup: over its baseline.
        task: of the suite; "" means all of it.
        temperature: None if the table has only one. at: the figures are for this many generated tokens; 0 means all.
    """

    target: str
    length: float | None
    speedup: float
    task: str
    temperature: float | None = None
    at: int = 0


@dataclass(frozen=True)
class Paper:
    """How a paper measures.

    Attributes:
        where: title and table. hardware: the paper's. baseline: what its speedup is relative to.
        figure: the key of `lengths` or `totals` that the paper calls its acceptance.
        drafter, options: as in the table.
        suites: by name, the differences from SUITES; the first suite is the table's.
        sampling: returns, for the target's name, keywords for SamplingParams that replace the suite's.
        dtype: of the weights. rows: the table.
    """

    where: str
    hardware: str
    baseline: str
    figure: str
    drafter: str
    options: Mapping[str, str | int]
    suites: Mapping[str, Mapping[str, Any]]
    rows: tuple[Published, ...]
    sampling: Any = field(default=lambda target: {})
    dtype: str = "fp16"

    def suite(self, name: str | None) -> tuple[str, Suite]:
        """The suite of this name, or the table's, with the paper's changes. Raises ValueError for another suite."""
        name = name or next(iter(self.suites))
        if name not in self.suites:
            raise ValueError(f"--suite: {name} is none of {self.where}; it has {', '.join(self.suites)}")
        return name, replace(SUITES[name], **self.suites[name])


def _longspec_sampling(target: str) -> dict[str, Any]:
    # The end token of the authors' code for Llama-3; the model's configuration names another one.
    return {"stop_token_ids": (128009,)} if re.search("llama-?3", target.lower()) else {}


def _tokenswift_sampling(target: str) -> dict[str, Any]:
    """The paper's table 10. Other targets get Llama-3.1's settings, without that model's banned tokens."""
    if (name := preset_for(target)) is not None:
        return dict(PRESETS[name])
    return {key: value for key, value in PRESETS["tokenswift-llama3.1-8b"].items() if key != "banned_token_ids"}


def _rows(
    figures: Mapping[str, Sequence[tuple[float | None, float]]], columns: Iterable[Mapping[str, Any]]
) -> tuple[Published, ...]:
    """A table of (length, speedup) pairs: figures by target, and the `Published` fields of each column."""
    return tuple(
        Published(target, *pair, **column)
        for target, pairs in figures.items()
        for column, pair in zip(columns, pairs, strict=True)
    )


_LONGBENCH = ("gov_report", "qmsum", "multi_news", "lcc", "repobench-p")
# Table 1: tau, and tokens/s over those of "Vanilla FA".
_LONGSPEC = {
    "Vicuna-7B": [(3.57, 2.23), (3.14, 2.04), (3.51, 1.80), (3.73, 1.99), (3.86, 110.76 / 46.61)],
    "Vicuna-13B": [(3.31, 2.49), (2.76, 2.08), (3.44, 2.23), (3.57, 2.39), (3.59, 77.22 / 29.14)],
    "LongChat-7B": [(3.59, 2.41), (3.06, 2.31), (3.41, 1.95), (4.21, 2.26), (4.03, 115.27 / 42.69)],
    "LongChat-13B": [(3.58, 2.67), (3.15, 2.37), (3.50, 2.28), (4.01, 2.63), (4.46, 96.96 / 29.74)],
    "Llama-3-8B": [(3.25, 1.59), (2.99, 1.48), (3.36, 1.60), (3.28, 1.57), (3.39, 91.28 / 54.08)],
}
_LENGTHS = (20480, 40960, 61440, 81920, 102400)
# Prefix 4096, alpha and speedup after 20K, 40K, ... generated tokens: table 3, whose pairs are those of prefixes 2048,
# 4096 and 8192; for Llama-3.1 tables 12 and 15 (min-p 0.1, window 1024); table 4.
_TOKENSWIFT = {
    "YaRN-Llama-2-7B": [(0.68, 2.02), (0.79, 2.56), (0.85, 2.89), (0.88, 3.10), (0.90, 3.23)],
    "Llama-3.1-8B": [(0.66, 2.01), (0.75, 2.58), (0.79, 2.94), (0.81, 3.15), (0.82, 3.26)],
    "Qwen2.5-1.5B": [(0.69, 1.69), (0.80, 2.31), (0.85, 2.69), (0.87, 2.95), (0.89, 3.13)],
    "Qwen2.5-7B": [(0.64, 2.00), (0.77, 2.64), (0.78, 2.86), (0.80, 3.07), (0.82, 3.23)],
    "Qwen2.5-14B": [(0.67, 2.12), (0.78, 2.68), (0.82, 3.01), (0.83, 3.20), (0.84, 3.34)],
}
# Table 2: acceptance and speedup by temperature.
_TRIFORCE = {
    0.0: (0.9234, 2.31), 0.2: (0.9203, 2.25), 0.4: (0.9142, 2.20), 0.6: (0.9137, 2.19), 0.8: (0.8986, 2.08),
    1.0: (0.9004, 2.08), 1.2: (0.8902, 2.02),
}  # fmt: skip
_SPEC_BENCH = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag", "")
# Table 1: the speedup of each task, for which it gives no MAT, and (MAT, speedup) of all tasks together.
_RECYCLING = {
    "Vicuna-7B": [*zip(repeat(None), (2.17, 1.90, 1.94, 1.95, 2.40, 1.78)), (2.70, 2.03)],
    "Vicuna-13B": [*zip(repeat(None), (1.98, 1.77, 1.89, 1.75, 2.21, 1.73)), (2.72, 1.89)],
    "Vicuna-33B": [*zip(repeat(None), (1.95, 1.75, 1.92, 1.77, 2.24, 1.78)), (2.63, 1.91)],
}

PAPERS: dict[str, Paper] = {
    "longspec": Paper(
        "LongSpec (arXiv 2502.17421), table 1 and figure 6",
        "one A100 80GB, fp16, batch 1",
        "decoding with flash attention, without CUDA graphs",
        "tau",
        "longspec",
        {"widths": "4,16,16,16,16", "extended": "16"},
        {"longbench": {}, "aime24": {}},
        (
            *_rows(_LONGSPEC, [{"task": task} for task in _LONGBENCH]),
            Published("QwQ-32B", 3.82, 2.25, "aime24"),
        ),
        sampling=_longspec_sampling,
    ),
    "tokenswift": Paper(
        "TokenSwift (arXiv 2502.18890), tables 3 and 4, prefix 4096",
        "one A100-SXM4-80GB, batch 1",
        "the same program's autoregressive decoding (176 ms/token of an 8B model at 100K)",
        "alpha",
        "tokenswift",
        {"shape": "3,3,3", "draft_pass": "always", "budget": PROMPT, "ngrams": 20},
        {"pg19": {}},
        _rows(_TOKENSWIFT, [{"task": "pg19", "at": at} for at in _LENGTHS]),
        sampling=_tokenswift_sampling,
        dtype="bf16",
    ),
    "triforce": Paper(
        "TriForce (arXiv 2404.11912), table 2",
        "one A100, 122K tokens of prompt, batch 1",
        "autoregressive decoding with CUDA graphs",
        "acceptance",
        "triforce",
        {"budget": 4096, "chain": 6, "chunk": 8},
        {"pg19": {"first_tokens": 124928, "new_tokens": 256}},
        tuple(Published("Llama-2-7B-128K", *pair, "pg19", temperature) for temperature, pair in _TRIFORCE.items()),
        sampling=lambda target: {"top_p": 0.9},
    ),
    "token-recycling": Paper(
        "Token Recycling (arXiv 2408.08696), table 1",
        "one A100 80GB, batch 1",
        "transformers' autoregressive decoding",
        "per_step",
        "token_recycling",
        {"nodes": 80},
        {"spec-bench": {}},
        _rows(_RECYCLING, [{"task": task} for task in _SPEC_BENCH]),
    ),
}


def beside(paper: Paper, record: Record, names: Sequence[str], temperatures: Sequence[float]) -> dict:
    """Our figures beside the paper's, for each of its targets."""
    found = []
    for name, temperature, row in product(names, temperatures, paper.rows):
        if row.temperature not in (None, temperature):
            continue
        if (ours := _ours(paper, record, name, temperature, row.task, row.at)) is not None:
            theirs = {"length": row.length, "speedup": row.speedup}
            task = row.task + (f", {row.at} tokens" if row.at else "")
            shown = {"drafter": name, "temperature": temperature, "task": task, "paper_target": row.target}
            found.append(shown | {"ours": ours, "paper": theirs})
    return {name: getattr(paper, name) for name in ("where", "hardware", "baseline", "figure")} | {"rows": found}


def table(found: Mapping[str, Any]) -> list[str]:
    """Lines of text that show what `beside` found."""
    lines = [
        "",
        f"beside {found['where']}: {found['hardware']}; its speedup is over {found['baseline']}, ours over plain "
        "decoding here",
    ]
    rows = [["", f"{found['figure']} here", "paper", "speedup here", "paper", "paper's target"]]
    for row in found["rows"]:
        numbers = [row[side][part] for part in ("length", "speedup") for side in ("ours", "paper")]
        what = f"{row['drafter']}, T {row['temperature']:g}{', ' if row['task'] else ''}{row['task']}"
        rows.append([what, *("-" if n is None else f"{n:.2f}" for n in numbers), row["paper_target"]])
    if len(rows) == 1:
        return [*lines, "no task or length of this table was measured"]
    return lines + ["  ".join(cells) for cells in lay_out(rows)]


def _ours(paper: Paper, record: Record, name: str, temperature: float, task: str, at: int) -> dict | None:
    """Our acceptance and speedup for a task, or for the first `at` tokens; None if that was not measured."""

    def answers(drafter: str) -> list[Answer]:
        found = [turn for entry in record.of(drafter, temperature) if task in ("", entry.task) for turn in entry.turns]
        return [_first(answer, at) for answer in found if len(answer.tokens) >= at] if at else found

    ours, plain = answers(name), answers("plain")
    if not ours or not plain:
        return None
    figures, speed = totals(ours), totals(plain)["tokens_per_second"]
    length = (figures["lengths"] | {"acceptance": figures["acceptance"]})[paper.figure]
    return {"length": length, "speedup": figures["tokens_per_second"] / speed}


def _first(answer: Answer, count: int) -> Answer:
    """An answer cut after the step that reaches `count` tokens; its seconds end there."""
    steps = next(i for i, total in enumerate(accumulate(answer.accept_lengths), start=1) if total >= count)
    kept = answer.accept_lengths[:steps]
    seconds = answer.decode_seconds - (answer.arrivals[-1] - answer.arrivals[steps - 1])
    return replace(answer, tokens=answer.tokens[: sum(kept)], accept_lengths=kept, decode_seconds=seconds)
