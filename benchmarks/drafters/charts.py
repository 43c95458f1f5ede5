"""Draws bar and line charts as inline SVG. Colours are CSS classes: s0, s1, ... for series, `axis` for labels.

Every mark has its numbers in a `title`. Not here: what is drawn (html_report.py).
"""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

WIDTH, BAR, GAP, LABEL = 440, 13, 4, 17
LEFT, RIGHT, TOP, HEIGHT = 46, 10, 10, 190  # of a line chart
VALUE = 104  # room for the number after the longest bar
TICK = 46  # least distance between two labels on the axis
SERIES = 8  # number of colours
TEXT = "font-size='11' font-family='system-ui, sans-serif'"


class Bar(NamedTuple):
    """The value of a series in a group. low, high: ends of its interval, if it has one."""

    series: int
    name: str
    value: float
    low: float | None = None
    high: float | None = None

    @property
    def text(self) -> str:
        return f"{self.value:.2f}" + ("" if self.low is None else f" ({self.low:.2f}-{self.high:.2f})")


def bars(label: str, groups: Mapping[str, Sequence[Bar]], mark: float | None = None) -> str:
    """Horizontal bars below the name of their group. mark: a value at which a line crosses all bars."""
    return _svg(label, *bar_marks(groups, mark))


def bar_marks(groups: Mapping[str, Sequence[Bar]], mark: float | None = None) -> tuple[float, list[str]]:
    """The height of `bars`, and the SVG elements."""
    most = max([mark or 0.0, *(max(b.value, b.high or 0.0) for group in groups.values() for b in group)]) or 1.0
    scale = (WIDTH - VALUE) / most
    parts, y = [], 0.0
    for name, group in groups.items():
        parts.append(f"<text class='axis' x='0' y='{y + LABEL - 5:g}' {TEXT}>{escape(name)}</text>")
        y += LABEL
        for bar in group:
            parts.append(_bar(name, bar, y, scale))
            y += BAR + 1
        y += GAP
    if mark is not None:
        x = round(mark * scale, 1)
        parts.append(f"<line class='mark' x1='{x:g}' x2='{x:g}' y1='0' y2='{y:g}' stroke-dasharray='3 3'/>")
    return y, parts


def _bar(group: str, bar: Bar, y: float, scale: float) -> str:
    width, middle = round(bar.value * scale, 1), y + BAR / 2
    end = max(width, round((bar.high or 0.0) * scale, 1))
    parts = [
        f"<g><title>{escape(f'{group}, {bar.name}: {bar.text}')}</title>",
        f"<rect class='s{bar.series % SERIES}' x='0' y='{y:g}' width='{width:g}' height='{BAR}'/>",
    ]
    if bar.low is not None and bar.high is not None:
        low, high = (round(edge * scale, 1) for edge in (bar.low, bar.high))
        parts.append(
            f"<path class='whisker' d='M{low:g} {middle:g}H{high:g}M{low:g} {y + 3:g}v7M{high:g} {y + 3:g}v7'/>"
        )
    parts.append(f"<text class='axis' x='{end + 5:g}' y='{y + BAR - 3:g}' {TEXT}>{bar.text}</text></g>")
    return "".join(parts)


def lines(label: str, series: Mapping[int, Sequence[tuple[float, float]]], across: str, up: str) -> str:
    """Joined points of each series, (x, y). The y axis begins at 0, the x axis at the first point."""
    points = [point for joined in series.values() for point in joined]
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    top = max(y for _, y in points) or 1.0
    step = _nice(top / 4)
    top = step * math.ceil(top / step - 1e-9)
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - 34

    def place(x: float, y: float) -> tuple[float, float]:
        share = (x - first) / (last - first) if last > first else 0.5
        return round(LEFT + share * wide, 1), round(TOP + high * (1 - y / top), 1)

    parts = []
    for i in range(round(top / step) + 1):
        _, y = place(first, i * step)
        parts.append(f"<line class='grid' x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{y:g}' y2='{y:g}'/>")
        parts.append(f"<text class='axis' x='{LEFT - 5}' y='{y + 4:g}' text-anchor='end' {TEXT}>{i * step:g}</text>")
    labelled = -math.inf
    for x in sorted({x for x, _ in points}):
        at, _ = place(x, 0)
        if at - labelled >= TICK:
            anchor = "end" if at > WIDTH - RIGHT - TICK / 2 else "middle"
            parts.append(
                f"<text class='axis' x='{at:g}' y='{HEIGHT - 20}' text-anchor='{anchor}' {TEXT}>{x:,.0f}</text>"
            )
            labelled = at
    parts.append(f"<text class='axis' x='{LEFT}' y='{HEIGHT - 5}' {TEXT}>{escape(up)} by {escape(across)}</text>")
    for number, joined in series.items():
        placed = [place(x, y) for x, y in joined]
        path = "L".join(f"{x:g} {y:g}" for x, y in placed)
        parts.append(f"<path class='line l{number % SERIES}' d='M{path}'/>")
        for (x, y), (at, value) in zip(placed, joined, strict=True):
            title = f"<title>{at:,g}: {value:.3g}</title>"
            parts.append(f"<circle class='s{number % SERIES}' cx='{x:g}' cy='{y:g}' r='3'>{title}</circle>")
    return _svg(label, HEIGHT, parts)


def _nice(step: float) -> float:
    """Round up to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(size * power for size in (1, 2, 5, 10) if size * power >= step * 0.999)


def _svg(label: str, height: float, parts: Sequence[str]) -> str:
    return (
        f"<svg role='img' aria-label='{escape(label, quote=True)}' viewBox='0 0 {WIDTH} {height:g}'>"
        f"{''.join(parts)}</svg>"
    )
