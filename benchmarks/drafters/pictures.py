"""Draws the charts of a bench's page with matplotlib."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure


def bars(title: str, groups: Mapping[str, Sequence[tuple[str, float, float, float]]]) -> Figure:
    """Horizontal bars with their intervals beside the name of their group, and a line at 1.

    groups: a bar for each series: (name of the series, value, ends of its 95 % interval), in the same order in each.
    """
    count = sum(map(len, groups.values()))
    figure = Figure(figsize=(6, 0.8 + 0.22 * count + 0.2 * len(groups)), layout="constrained")
    axes, at, ticks = figure.subplots(), 0.0, []
    shown: dict[str, Any] = {}
    for group, of in groups.items():
        ticks.append((at + (len(of) - 1) / 2, group))
        for number, (name, value, low, high) in enumerate(of):
            sides = [[max(value - low, 0)], [max(high - value, 0)]]
            shown[name] = axes.barh(at, value, 0.85, xerr=sides, color=f"C{number % 10}", error_kw={"lw": 0.8})
            axes.text(max(value, high), at, f" {value:.2f} ({low:.2f}-{high:.2f})", va="center", fontsize=7)
            at += 1
        at += 0.8
    axes.axvline(1, color="0.5", ls=":", lw=1)
    axes.set_yticks(*zip(*ticks, strict=True))
    axes.set_ylim(at - 0.8, -0.8)
    axes.set_xlim(0, 1.35 * max(max(value, high) for of in groups.values() for _, value, _, high in of))
    axes.set_title(title, fontsize=10, loc="left")
    figure.legend(list(shown.values()), list(shown), fontsize=8, loc="outside lower left", ncols=2)
    return figure


def line_chart(title: str, series: Mapping[str, Sequence[tuple[float, float]]], across: str, up: str) -> Figure:
    """Joined points (x, y) of each series. The y axis begins at 0."""
    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    for number, (name, points) in enumerate(series.items()):
        axes.plot([x for x, _ in points], [y for _, y in points], "o-", ms=3, color=f"C{number % 10}", label=name)
    axes.set(xlabel=across, ylabel=up)
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=10, loc="left")
    axes.legend(fontsize=8)
    return figure


def svg(figure: Figure) -> str:
    """The figure as an SVG element with its text as text, the same for the same figures."""
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "longdraft", "font.family": "sans-serif"}):
        figure.savefig(file := io.StringIO(), format="svg", metadata={"Date": None, "Creator": None})
    return "<svg" + file.getvalue().partition("<svg")[2]
