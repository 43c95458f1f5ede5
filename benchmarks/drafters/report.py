"""Reports what `longdraft bench` measured: a result as a text table, and records as one self-contained HTML page with
charts by matplotlib."""

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from longdraft.benchmarks.drafters import papers
from longdraft.benchmarks.drafters.forced import LABEL
from longdraft.benchmarks.drafters.metrics import lay_out, run_figures
from longdraft.benchmarks.drafters.record import Entry, Record, read_record
from longdraft.models.files import write_text

Figures = Mapping[str, Any]
STYLE = """
body { margin: 0 auto; padding: 1.2rem; max-width: 80rem; font: 15px/1.5 system-ui, sans-serif; }
.runs, .charts { display: flex; flex-wrap: wrap; gap: 1.4rem; }
section { border: 1px solid #d6dce2; border-radius: 6px; padding: .2rem 1rem; max-width: 38rem; }
pre { overflow-x: auto; font-size: .85em; } section pre { white-space: pre-wrap; }
svg { max-width: 100%; height: auto; }
"""


def table(result: dict) -> str:
    """Plain decoding beside the drafters at every temperature, with exactness and the cost of a pass by its width."""
    settings = result["settings"]
    lengths = " to ".join(map(str, dict.fromkeys(settings["prompt_tokens"])))
    on_gpu = result.get("on_gpu", False)
    sampling = "".join(f"{name} {value}, " for name, value in settings["sampling"].items())
    sampling += "" if settings["ignore_eos"] else "stop at end tokens, "
    on_ranks = f"{ranks} ranks, " if (ranks := result.get("ranks", 1)) > 1 else ""
    lines = [
        f"{result['target']}, {result['dtype']}, {result['device']}, {on_ranks}threads: {result['threads']}, batch: 1, "
        f"prompts: {settings['prompts']} of {lengths} tokens, new tokens: {settings['new_tokens']} each, "
        f"seed {settings['seed']}, {sampling}peak memory {result['peak_memory_mib']} MiB"
    ]
    for run in result["runs"]:
        title = "greedy" if run["temperature"] == 0 else f"T {run['temperature']}"
        names, *rest = ("  ".join(cells) for cells in lay_out(rows(title, run["drafters"], on_gpu)))
        lines += ["", names, "-" * len(names), *rest]
        for name, one in run["drafters"].items():
            if marks := max(one["ms_per_token"], key=len, default=[]):
                shown = ", ".join(f"{mark['tokens']:,}: {mark['ms']:.2f}" for mark in marks)
                lines.append(f"{name}, ms/token up to token {shown}")
    lines += papers.table(result["paper"]) if "paper" in result else []
    lines += ["", *([f"exact: {exactness(result)}"] if "exact" in result else [])]
    for name, rates in settings.get(LABEL, {}).items():
        levels = [f"{rate:g}" for rate in rates]
        shown = ", ".join(levels) if len({*levels}) > 1 else f"{levels[0]} to depth {len(levels)}"
        lines.append(f"{name}: {LABEL} (rates {shown})")
    for context, curve in result["width_curves_ms"].items():
        shown = ", ".join(f"{width}: {ms / curve['1']:.2f}" for width, ms in curve.items())
        lines.append(f"a pass after {context} tokens, {curve['1']:.1f} ms for one row; by rows: {shown}")
    return "\n".join(lines)


def rows(title: str, drafters: Mapping[str, Figures], on_gpu: bool) -> list[list[str]]:
    """The rows of a table: a name, and a cell for each drafter. The first one has the drafters' names."""
    found = [[f"{title}  ", *drafters]]

    def row(name: str, write: Callable[[Figures], str]) -> None:
        found.append([f"{name}  ", *(write(one) for one in drafters.values())])

    row("tokens/step", lambda one: f"{one['tokens_per_step']:.3f}")
    row("  95 % interval", lambda one: "{:.2f}-{:.2f}".format(*one["intervals"]["per_step"]))
    row("acceptance", lambda one: f"{one['acceptance']:.3f}")
    row("nodes/step", lambda one: f"{one['nodes_per_step']:.1f}")
    row("tokens/s, decoding", lambda one: f"{one['tokens_per_second']:.1f}")
    row("first token, s", lambda one: f"{one['first_token_seconds']:.2f}")
    if on_gpu:  # the parts of a step would measure kernel launches
        row("step, ms", lambda one: f"{1e3 * one['tokens_per_step'] / one['tokens_per_second']:.2f}")
    else:
        for part, name in (("draft", "draft"), ("target", "verify"), ("commit", "commit"), ("host", "host")):
            row(f"{name}, ms/step", lambda one, part=part: f"{one[f'{part}_ms']:.2f}")
        row("host, share of a step", lambda one: f"{one['host_share']:.1%}")
    if len(drafters) > 1:
        row("speed over plain", lambda one: f"{one['speedup']:.2f}")
        row("  95 % interval", lambda one: "{:.2f}-{:.2f}".format(*one["intervals"]["speedup"]))
        for part in ("tasks", "contexts"):
            groups = dict.fromkeys(group for one in drafters.values() for group in one[part])  # runs may have others
            for group in groups if len(groups) > 1 else ():
                speeds = [one[part].get(group, {}).get("speedup") for one in drafters.values()]
                found.append([f"  {group}  ", *("-" if speed is None else f"{speed:.2f}" for speed in speeds)])
        row("  slowest prompt", lambda one: f"{min(one['prompt_speedups']):.2f}")
        row("plain decoding's tokens", lambda one: "{} of {}".format(*one["same_tokens"]))
    return found


def exactness(result: Mapping[str, Any]) -> str:
    """Whether exactness was proved and in which form, or how many tokens flipped. result: of `prove`."""
    if result["exact"]:
        return f"yes ({result['exact_checked']})"
    if result["proof"]["form"] == "off":
        return f"not shown ({result['exact_checked']})"
    flips = result["proof"]["flips"].items()
    parts = [f"{name} {found['flips']} near-ties of {found['tokens']} tokens differ" for name, found in flips]
    return f"not proved in fp32 ({result['exact_checked']}): {'; '.join(parts)}"


def write_report(runs: Sequence[Path], path: Path, option: str) -> None:
    """Write the page of these records. Raises ValueError, which names `option` if `path` cannot be written."""
    names = [run.resolve().name for run in runs]
    titles = [name if names.count(name) == 1 else str(run) for name, run in zip(names, runs, strict=True)]
    text = page({title: read_record(run) for title, run in zip(titles, runs, strict=True)})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise ValueError(f"{option}: {path} cannot be written: {error.strerror}; give another path") from error


def collect(records: Mapping[str, Record]) -> dict[str, Figures]:
    """Each drafter's figures in each run at each temperature, under a name made of these. Raises ValueError for a
    record without a question that all drafters have answered."""
    found: dict[str, Figures] = {}
    for run, record in records.items():
        by_temperature = {temperature: _common(entries) for temperature, entries in record.by_drafter().items()}
        if not by_temperature or not all(entries.get("plain") for entries in by_temperature.values()):
            raise ValueError(f"{run}: no question has been answered by all of its drafters yet; wait for the run")
        where = [run] if len(records) > 1 else []
        for temperature, entries in by_temperature.items():
            how = [f"T {temperature:g}"] if len(by_temperature) > 1 else []
            found |= {", ".join([drafter, *how, *where]): one for drafter, one in run_figures(entries).items()}
    return found


def _common(entries: Mapping[str, Sequence[Entry]]) -> dict[str, list[Entry]]:
    """The entries of the questions that all drafters have answered; in an unfinished run some have not."""
    ids = set.intersection(*({entry.id for entry in of} for of in entries.values()))
    return {name: [entry for entry in of if entry.id in ids] for name, of in entries.items()}


def page(records: Mapping[str, Record]) -> str:
    """The HTML page. records: by display name."""
    series = collect(records)
    title = escape(" and ".join(dict.fromkeys(_title(record) for record in records.values())))
    on_gpu = any(record.machine.get("on_gpu") for record in records.values())
    figures = "\n".join("  ".join(cells) for cells in lay_out(rows("", series, on_gpu)))
    return f"""<!doctype html>
<html lang='en'><head><meta charset='utf-8'><meta name='viewport' content='width=device-width, initial-scale=1'>
<title>{title}</title><style>{STYLE}</style></head>
<body>
<h1>{title}</h1><p>Speculative decoding against plain decoding, by longdraft.</p>
<div class='runs'>{"".join(_run(name, record) for name, record in records.items())}</div>
<h2>All prompts</h2><pre>{escape(figures)}</pre>
<h2>By context, task and depth</h2><div class='charts'>{"".join(_charts(series))}</div>
</body></html>
"""


def _title(record: Record) -> str:
    return f"{record.settings.get('suite') or 'texts'} on {record.machine.get('target', 'a target')}"


def _run(name: str, record: Record) -> str:
    """A box with a run's settings, its machine, and whether it is exact."""
    proof = exactness(record.proof) if record.proof else "not asked for, plain decoding alone or switched off"
    count = len({entry.id for entry in record.entries.values()})
    shown = {"exact": proof, "prompts": count} | record.settings | record.machine
    lines = "\n".join(f"{key}: {value}" for key, value in shown.items() if value not in (None, {}, []))
    return f"<section><h3>{escape(name)}</h3><pre>{escape(lines)}</pre></section>"


def _charts(series: Mapping[str, Figures]) -> Iterable[str]:
    """The charts. Each has all drafters in the same order, so that a drafter keeps its colour."""
    drafted = {name: one for name, one in series.items() if one["acceptance"] > 0}
    if not drafted:
        return
    for part, what in (("contexts", "context (tokens of the prompt)"), ("tasks", "task")):
        groups: dict[str, list[tuple]] = {}
        for name, figures in drafted.items():
            for group, one in figures[part].items():
                groups.setdefault(group, []).append((name, one["speedup"], *one["intervals"]["speedup"]))
        if part == "contexts" or len(groups) > 1:  # a single task's bars are those of all prompts
            yield _svg(bars(f"Speed over plain decoding, by {what}", groups))
    depths = {name: list(enumerate(one["acceptance_by_depth"], start=1)) for name, one in drafted.items()}
    yield _svg(line_chart("Steps that accepted at least each depth", depths, "depth in the tree", "share of steps"))
    marks = {
        name: [(mark["tokens"], mark["ms"]) for mark in max(one["ms_per_token"], key=len, default=[])]
        for name, one in drafted.items()
    }
    if any(marks.values()):
        yield _svg(line_chart("ms/token along the longest generation", marks, "tokens generated", "ms/token"))


def bars(title: str, groups: Mapping[str, Sequence[tuple[str, float, float, float]]]) -> Any:
    """A figure of horizontal bars with their intervals beside the name of their group, and a line at 1.

    groups: a group's bars, one a series in a fixed order: (name of the series, value, ends of its 95 % interval).
    """
    from matplotlib.figure import Figure  # matplotlib takes a second to import

    count = sum(map(len, groups.values()))
    names = list(dict.fromkeys(name for of in groups.values() for name, *_ in of))
    figure = Figure(figsize=(6, 0.8 + 0.22 * count + 0.2 * len(groups)), layout="constrained")
    axes, at, ticks = figure.subplots(), 0.0, []
    shown: dict[str, Any] = {}
    for group, of in groups.items():
        ticks.append((at + (len(of) - 1) / 2, group))
        for name, value, low, high in of:
            sides = [[max(value - low, 0)], [max(high - value, 0)]]
            shown[name] = axes.barh(
                at, value, 0.85, xerr=sides, color=f"C{names.index(name) % 10}", error_kw={"lw": 0.8}
            )
            axes.text(max(value, high), at, f" {value:.2f} ({low:.2f}-{high:.2f})", va="center", fontsize=7)
            at += 1
        at += 0.8
    axes.axvline(1, color="0.5", ls=":", lw=1)
    axes.set_yticks(*zip(*ticks, strict=True))
    axes.set_ylim(at - 0.8, -0.8)
    axes.set_xlim(0, 1.35 * max(max(value, high) for of in groups.values() for _, value, _, high in of))
    axes.set_title(title, fontsize=10, loc="left")
    columns = 2 if max(map(len, shown)) < 50 else 1
    figure.legend(list(shown.values()), list(shown), fontsize=8, loc="outside lower left", ncols=columns)
    return figure


def line_chart(title: str, series: Mapping[str, Sequence[tuple[float, float]]], across: str, up: str) -> Any:
    """A figure of joined points (x, y) of each series. x are whole numbers; the y axis begins at 0."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    for number, (name, points) in enumerate(series.items()):
        axes.plot([x for x, _ in points], [y for _, y in points], "o-", ms=3, color=f"C{number % 10}", label=name)
    axes.set(xlabel=across, ylabel=up)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=10, loc="left")
    axes.legend(fontsize=8)
    return figure


def _svg(figure: Any) -> str:
    """The figure as an SVG element with selectable text, deterministic."""
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "longdraft", "font.family": "sans-serif"}):
        figure.savefig(file := io.StringIO(), format="svg", metadata={"Date": None, "Creator": None})
    return "<svg" + file.getvalue().partition("<svg")[2]
