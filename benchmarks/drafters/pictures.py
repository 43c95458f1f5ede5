"""Draws a bench's figures with matplotlib: a training run's report.png, and the charts of the page."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from longdraft.benchmarks.drafters.text_report import validations

# Group -> a bar for each series: (number of the series, its name, value, ends of its 95 % interval).
Groups = Mapping[str, Sequence[tuple[int, str, float, float, float]]]
Points = Sequence[tuple[float, float]]


def bars(title: str, groups: Groups) -> Figure:
    """Horizontal bars with their intervals beside the name of their group, and a line at 1."""
    rows = [(group, *bar) for group, of in groups.items() for bar in of]
    figure = Figure(figsize=(6, 0.8 + 0.22 * len(rows) + 0.2 * len(groups)), layout="constrained")
    axes, at, ticks = figure.subplots(), 0.0, []
    shown: dict[str, Any] = {}
    for group, of in groups.items():
        ticks.append((at + (len(of) - 1) / 2, group))
        for number, name, value, low, high in of:
            sides = [[max(value - low, 0)], [max(high - value, 0)]]
            shown[name] = axes.barh(at, value, 0.85, xerr=sides, color=f"C{number % 10}", error_kw={"lw": 0.8})
            axes.text(max(value, high), at, f" {value:.2f} ({low:.2f}-{high:.2f})", va="center", fontsize=7)
            at += 1
        at += 0.8
    axes.axvline(1, color="0.5", ls=":", lw=1)
    axes.set_yticks(*zip(*ticks, strict=True))
    axes.set_ylim(at - 0.8, -0.8)
    axes.set_xlim(0, 1.35 * max(max(value, high) for _, _, _, value, _, high in rows))
    axes.set_title(title, fontsize=10, loc="left")
    figure.legend(list(shown.values()), list(shown), fontsize=8, loc="outside lower left", ncols=2)
    return figure


def line_chart(title: str, series: Mapping[tuple[int, str], Points], across: str, up: str) -> Figure:
    """A figure of `lines` alone."""
    figure = Figure(figsize=(6, 3), layout="constrained")
    lines(title, series, across, up, figure.subplots())
    return figure


def lines(title: str, series: Mapping[tuple[int, str], Points], across: str, up: str, axes: Axes) -> None:
    """Joined points (x, y) of each series, which is given by its number and name. The y axis begins at 0."""
    for (number, name), points in series.items():
        if points:
            axes.plot(*zip(*points, strict=True), "o-", ms=3, color=f"C{number % 10}", label=name)
    axes.set(xlabel=across, ylabel=up)
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=10, loc="left")
    if axes.lines:
        axes.legend(fontsize=8)


def svg(figure: Figure) -> str:
    """The figure as an SVG element with its text as text, the same for the same figures."""
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "longdraft", "font.family": "sans-serif"}):
        figure.savefig(file := io.StringIO(), format="svg", metadata={"Date": None, "Creator": None})
    return "<svg" + file.getvalue().partition("<svg")[2]


def draw_report(result: dict, metrics: list[dict], path: str | Path) -> None:
    """Draw losses, agreement by head, the width curve and the speeds as one PNG, whatever the file's name ends in."""
    validated, run = validations(metrics), result["runs"][0]
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    figure.suptitle(f"{result['target']}: speculative decoding against plain decoding", fontsize=13)
    (loss, agreement), (curve, speed) = figure.subplots(2, 2)
    lines("Loss", losses(metrics), "step", "nats", loss)
    lines("Held-out agreement with the text", agreements(validated), "step", "share of positions", agreement)
    widths = {
        (number, f"behind {context} tokens"): [(int(width), ms) for width, ms in of.items()]
        for number, (context, of) in enumerate(result["width_curves_ms"].items())
    }
    lines(f"One target pass, {result['dtype']}", widths, "rows of the pass", "ms", curve)
    speeds = {name: one["tokens_per_second"] for name, one in run["drafters"].items()}
    if "transformers_tokens_per_second" in result:
        speeds = {"transformers": result["transformers_tokens_per_second"], **speeds}
    drawn = speed.bar([name.replace("+", "\n+ ") for name in speeds], list(speeds.values()))
    speed.bar_label(drawn, fmt="%.1f", fontsize=8)
    temperature = "greedy" if run["temperature"] == 0 else f"T {run['temperature']}"
    speed.set_title(f"Decoding, {temperature}", fontsize=10, loc="left")
    speed.set_ylabel(f"tokens/s, {result['dtype']}")
    figure.savefig(path, dpi=110, format="png")


def losses(metrics: list[dict]) -> dict[tuple[int, str], Points]:
    """What training minimised, by name, and the held-out text's cross-entropy, by step."""
    found: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for record in metrics:
        if record.get("loss") is not None:
            name = f"training: {record.get('objective', 'as minimised')}"
            found.setdefault((7, name), []).append((record["step"], record["loss"]))
    held_out = [(record["step"], record["heldout_loss"]) for record in validations(metrics)]
    return {**found, (0, "held-out: cross_entropy"): held_out}


def agreements(validated: list[dict]) -> dict[tuple[int, str], Points]:
    """The share of positions where each head's best token, or one of its best three, is the text's, by step."""
    heads = len(validated[0]["heldout_rank_rates"]) if validated else 0
    found: dict[tuple[int, str], Points] = {}
    for head in range(heads):
        rates = [(record["step"], record["heldout_rank_rates"][head]) for record in validated]
        found[2 * head, f"head {head + 1}, top-1"] = [(step, of[0]) for step, of in rates]
        found[2 * head + 1, f"head {head + 1}, top-3"] = [(step, sum(of)) for step, of in rates]
    return found
