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


def lines(title: str, series: Mapping[tuple[int, str], Sequence[tuple[float, float]]], across: str, up: str) -> Figure:
    """Joined points (x, y) of each series, which is given by its number and name. The y axis begins at 0."""
    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    for (number, name), points in series.items():
        axes.plot(*zip(*points, strict=True), "o-", ms=3, color=f"C{number % 10}", label=name)
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


def draw_report(result: dict, metrics: list[dict], path: str | Path) -> None:
    """Draw loss, agreement by head, the width curve and the speeds as one PNG, whatever the file's name ends in."""
    training, validated = [record for record in metrics if record.get("loss") is not None], validations(metrics)
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    figure.suptitle(f"{result['target']}: speculative decoding against plain decoding", fontsize=13)
    (loss, agreement), (curve, speed) = figure.subplots(2, 2)
    draw_loss(loss, training, validated)
    draw_agreement(agreement, validated)
    _draw_curve(curve, result)
    _draw_speed(speed, result)
    figure.savefig(path, dpi=110, format="png")


def draw_loss(axes: Axes, training: list[dict], validated: list[dict]) -> None:
    """Draw what training minimises, and the held-out text's cross-entropy on a second axis unless it is the same."""
    minimised = " then ".join(dict.fromkeys(r.get("objective", "as minimised") for r in training)) or "cross_entropy"
    axes.set(title="Loss", xlabel="step", ylabel=f"{minimised}, nats")
    drawn = axes.plot([r["step"] for r in training], [r["loss"] for r in training], "0.6", lw=1, label="training")
    if minimised != "cross_entropy":
        axes.set_ylabel(f"training: {minimised}, nats", color="0.4")
        axes = axes.twinx()  # type: ignore[assignment]
        axes.set_ylabel("held-out: cross-entropy of the text, nats", color="C0")
    steps, losses = [r["step"] for r in validated], [r["heldout_loss"] for r in validated]
    drawn += axes.plot(steps, losses, "C0o-", ms=4, label="held-out")
    axes.legend(handles=drawn)


def draw_agreement(axes: Axes, validated: list[dict]) -> None:
    axes.set(title="Held-out agreement with the text", xlabel="step", ylabel="share of positions")
    if not validated:
        return
    steps = [record["step"] for record in validated]
    for head in range(len(validated[0]["heldout_rank_rates"])):
        rates = [record["heldout_rank_rates"][head] for record in validated]
        axes.plot(steps, [r[0] for r in rates], "o-", ms=4, color=f"C{head}", label=f"head {head + 1}, top-1")
        axes.plot(steps, [sum(r) for r in rates], "s--", ms=4, color=f"C{head}", label=f"head {head + 1}, top-3")
    axes.set_ylim(0, 1.4 * axes.get_ylim()[1])  # room for the legend
    axes.legend(fontsize=8, ncols=3, loc="upper left")


def _draw_curve(axes: Axes, result: dict) -> None:
    axes.set(title=f"One target pass, {result['dtype']}", xlabel="rows of the pass", ylabel="ms", xscale="log")
    for context, curve in result["width_curves_ms"].items():
        widths = {int(width): ms for width, ms in curve.items()}
        axes.plot(list(widths), list(widths.values()), "o-", ms=4, label=f"behind {context} tokens")
        axes.set_xticks(list(widths), [str(width) for width in widths])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.legend()


def _draw_speed(axes: Axes, result: dict) -> None:
    run = result["runs"][0]
    drafters = run["drafters"]
    speeds = {name: one["tokens_per_second"] for name, one in drafters.items()}
    if "transformers_tokens_per_second" in result:
        speeds = {"transformers": result["transformers_tokens_per_second"], **speeds}
    colours = ["0.7" if name in ("transformers", "plain") else "C0" for name in speeds]
    drawn = axes.bar(range(len(speeds)), list(speeds.values()), color=colours)
    steps = {name: f"\n{one['tokens_per_step']:.2f} a step" for name, one in drafters.items()}
    axes.bar_label(
        drawn, [f"{speed:.1f}{steps.get(name, '')}" for name, speed in speeds.items()], padding=3, fontsize=8
    )
    axes.set_xticks(range(len(speeds)), [name.replace("+", "\n+ ") for name in speeds], fontsize=8)
    exact = f", exact: {'yes' if result['exact'] else 'not proved'}" if "exact" in result else ""
    temperature = "greedy" if run["temperature"] == 0 else f"T {run['temperature']}"
    axes.set(
        title=f"Decoding, {temperature}{exact}",
        ylabel=f"tokens/s, {result['dtype']}",
        ylim=(0, 1.25 * max(speeds.values())),
    )
