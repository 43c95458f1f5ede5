"""The figure of a run's decoding, drawn from its metrics. Not here: what is measured (evaluate.py)."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longdraft.models.files import write_atomically

DECODING = "decoding.png"
NAME = re.compile(r"/ctx(\d+)\.T(.+?)(?:\.depth(\d+))?$")
# Points of a line, by context length and temperature.
Series = dict[tuple[int, float], list[tuple[int, float]]]


def draw_decoding(run_dir: str | Path, records: Sequence[Mapping[str, Any]]) -> Path:
    """Draw run_dir/decoding.png: tokens/step over training steps, and the acceptance by depth of the last evaluation.
    Each context length has a colour; lines are dashed above temperature 0. The file is replaced atomically.

    Args:
        records: lines of metrics.jsonl, in order; at least one holds an evaluation (evaluate.py, `as_record`).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # takes a second to import
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    evaluations = [record for record in records if "decode_tokens_per_step" in record]
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _plot(left, tokens_per_step(evaluations))
    best = evaluations[-1]["decode_best_step"]
    left.axvline(best, color="grey", linestyle=":", label=f"best: step {best}")
    left.set(title="tokens per step of the target", xlabel="training step", ylabel="tokens/step")
    last = evaluations[-1]
    _plot(right, acceptance(last))
    right.set(title=f"acceptance by depth, step {last['step']}", xlabel="depth", ylabel="share of steps", ylim=(0, 1))
    for axes in (left, right):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    path = Path(run_dir) / DECODING
    write_atomically(path, canvas.print_png)
    return path


def tokens_per_step(evaluations: Sequence[Mapping[str, Any]]) -> Series:
    """Points (training step, tokens/step)."""
    lines: Series = {}
    for record in evaluations:
        for key, value in record.items():
            found = NAME.search(key)
            if found and key.startswith("decode_tokens_per_step/"):
                lines.setdefault((int(found[1]), float(found[2])), []).append((record["step"], value))
    return lines


def acceptance(record: Mapping[str, Any]) -> Series:
    """Points (depth, share of steps that accepted a node at this depth)."""
    lines: Series = {}
    for key, value in record.items():
        found = NAME.search(key)
        if found and key.startswith("decode_acceptance/"):
            lines.setdefault((int(found[1]), float(found[2])), []).append((int(found[3]), value))
    return lines


def _plot(axes: Any, lines: Series) -> None:
    contexts = list(dict.fromkeys(context for context, _ in lines))
    for (context, temperature), points in lines.items():
        label = f"{context:,} tokens, {f'T {temperature:g}' if temperature else 'greedy'}"
        style = {"color": f"C{contexts.index(context)}", "linestyle": "--" if temperature else "-"}
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=label, **style)
