"""Shows one or several records of `longdraft bench` as one self-contained page, or as one picture.

Not here: the figures (figures.py), the drawing of charts (charts.py).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from longdraft.benchmarks.drafters.charts import SERIES, WIDTH, Bar, bar_marks, bars, lines
from longdraft.benchmarks.drafters.metrics import run_figures
from longdraft.benchmarks.drafters.prompts import named_with_tokens
from longdraft.benchmarks.drafters.record import Record

LIGHT = ("#0b62a8", "#c2570c", "#1a7f4e", "#8a3ea8", "#a8133c", "#0f7d86", "#7a5c00", "#5b6470")
DARK = ("#6cb2f0", "#f0a35e", "#5fcf95", "#cc94e8", "#f2839b", "#5cc8d0", "#d9b84a", "#aab4bf")
SCHEMES = {
    "light": {"ink": "#1c2229", "soft": "#5a6570", "paper": "#ffffff", "rule": "#d6dce2", "good": "#1a7f4e"},
    "dark": {"ink": "#e6ebf0", "soft": "#9aa6b2", "paper": "#14181d", "rule": "#333c46", "good": "#5fcf95"},
}
STYLE = """
body { margin: 0 auto; padding: 1.2rem; max-width: 86rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; }
h3 { font-size: 1rem; margin: 0 0 .5rem; } p { margin: .3rem 0; max-width: 60rem; } .soft { color: var(--soft); }
.runs, .charts { display: grid; gap: 1.4rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); }
section.run, figure { margin: 0; border: 1px solid var(--rule); border-radius: 6px; padding: .8rem 1rem; min-width: 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem .8rem; margin: .4rem 0 0; font-size: .94em; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
.proof { font-weight: 600; } .exact { color: var(--good); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88em; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .4rem; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; min-width: 7rem;
  white-space: normal; overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: 600; white-space: normal; vertical-align: bottom; }
figcaption { font-weight: 600; margin-bottom: .6rem; }
svg { width: 100%; max-width: 560px; height: auto; display: block; }
ul.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; margin: .6rem 0; padding: 0; }
ul.legend li { overflow-wrap: anywhere; }
ul.legend svg { width: .8em; height: .8em; display: inline-block; margin-right: .4em; }
details { margin-top: .6rem; } summary { cursor: pointer; color: var(--soft); }
@media print { body { padding: 0; font-size: 11px; max-width: none; } figure, section.run { break-inside: avoid; }
  .charts { grid-template-columns: 1fr 1fr; } details { display: none; } .scroll { overflow: visible; }
  table { font-size: 8px; }
  th, td { padding: .15rem .3rem; } h2 { break-after: avoid; } }
"""
# For the charts, also in a picture of its own.
MARKS = """
.axis { fill: var(--soft); } .grid { stroke: var(--rule); } .mark { stroke: var(--soft); }
.whisker { stroke: var(--ink); fill: none; } .line { fill: none; stroke-width: 2; }
"""
DEFINITIONS = (
    (
        "tokens/step",
        "1 + accepted / steps, pooled over all steps: vLLM's and AIPerf's acceptance length, and Spec-Bench's.",
    ),
    ("by request", "mean over requests of tokens / steps: specdec_bench's acceptance length."),
    ("alpha", "accepted / (4 x steps), TokenSwift's."),
    ("tau", "(accepted + calls) / calls with the prefill a call, LongSpec's."),
    ("over plain", "tokens/s of decoding over plain decoding's on the same prompts, in the same process and turns."),
    ("(a-b)", "the middle 95 % of 2000 bootstraps over prompts."),
)


class Series(NamedTuple):
    """A drafter's figures in one run at one temperature."""

    number: int
    name: str
    figures: Mapping[str, Any]


def collect(records: Mapping[str, Record]) -> list[Series]:
    """All series of the records, by run. Raises ValueError for a record that has no question answered by all."""
    found: list[Series] = []
    for run, record in records.items():
        by_temperature = record.by_drafter()
        if not by_temperature:
            raise ValueError(f"{run}: no question has been answered yet; wait for the run, or start it again")
        for temperature, entries in by_temperature.items():
            # In a run that is not finished, some questions have been answered by some drafters only.
            common = set.intersection(*({e.id for e in of} for of in entries.values())) if "plain" in entries else set()
            if not common:
                raise ValueError(f"{run}: no question has been answered by all of its drafters yet; wait for the run")
            figures = run_figures({name: [e for e in of if e.id in common] for name, of in entries.items()})
            where = [run] if len(records) > 1 else []
            how = [f"T {temperature:g}"] if len(by_temperature) > 1 else []
            for drafter, one in figures.items():
                found.append(Series(len(found), ", ".join([drafter, *how, *where]), one))
    return found


def page(records: Mapping[str, Record]) -> str:
    """The HTML page. records: by the names they are shown under."""
    series = collect(records)
    drafted = [one for one in series if one.figures["acceptance"] > 0]
    title = " and ".join(dict.fromkeys(_title(record) for record in records.values()))
    body = [
        f"<h1>{escape(title)}</h1>",
        "<p class='soft'>Speculative decoding against plain decoding, by longdraft.</p>",
        f"<div class='runs'>{''.join(_run(name, record) for name, record in records.items())}</div>",
        "<h2>All prompts</h2>",
        _overall(series),
        "<h2>By task, context and place</h2>",
        _legend(series),
        f"<div class='charts'>{''.join(_charts(series, drafted))}</div>",
        "<h2>What the figures are</h2>",
        "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(what)}</dd>" for name, what in DEFINITIONS) + "</dl>",
    ]
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<meta name='color-scheme' content='light dark'><title>{escape(title)}</title>"
        f"<style>{_colours()}{STYLE}{MARKS}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def picture(records: Mapping[str, Record]) -> str:
    """Speed over plain decoding by task, as the text of an SVG file."""
    series = [one for one in collect(records) if not one.name.startswith("plain")]
    height, parts = bar_marks(_by(series, "tasks", _speed), mark=1.0)
    top = 18 * (2 + len(series))
    title = f"{_title(next(iter(records.values())))}: tokens/s over plain decoding's"
    names = "".join(
        f"<rect class='s{one.number % SERIES}' x='0' y='{18 * i + 40}' width='10' height='10'/>"
        f"<text x='16' y='{18 * i + 49}' font-size='12'>{escape(one.name)}</text>"
        for i, one in enumerate(series)
    )
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='-10 -6 {WIDTH + 20} {height + top + 30:g}' "
        f"font-family='system-ui, sans-serif'><style>{_colours('svg')}{MARKS} text {{ fill: var(--ink); }} "
        ".axis { fill: var(--soft); }</style>"
        f"<rect x='-10' y='-6' width='100%' height='100%' fill='var(--paper)'/>"
        f"<text x='0' y='12' font-size='13' font-weight='600'>{escape(title)}</text>"
        f"<text class='axis' x='0' y='28' font-size='11'>with the middle 95 % of bootstraps over prompts</text>{names}"
        f"<g transform='translate(0 {top + 14})'>{''.join(parts)}</g></svg>\n"
    )


def _colours(root: str = ":root") -> str:
    """CSS for both colour schemes and the classes of the series."""

    def scheme(name: str, palette: Sequence[str]) -> str:
        named = {**SCHEMES[name], **{f"c{i}": colour for i, colour in enumerate(palette)}}
        return root + " { " + " ".join(f"--{key}: {value};" for key, value in named.items()) + " }"

    marks = "".join(f".s{i} {{ fill: var(--c{i}); }} .l{i} {{ stroke: var(--c{i}); }}\n" for i in range(SERIES))
    dark = f"@media screen and (prefers-color-scheme: dark) {{ {scheme('dark', DARK)} }}"
    return f"{scheme('light', LIGHT)}\n{dark}\n{marks}"


def _title(record: Record) -> str:
    return f"{record.settings.get('suite') or 'texts'} on {record.machine.get('target', 'a target')}"


def _run(name: str, record: Record) -> str:
    """A box with what was asked for, on which machine, and whether it is exact."""
    proof, settings, machine = record.proof or {}, record.settings, record.machine
    if not proof:
        exactness = "Exactness: not asked for, plain decoding alone or switched off"
    elif proof.get("exact"):
        exactness = f"Exact: yes, {proof['exact_checked']}"
    else:
        flips = "; ".join(
            f"{drafter} {one['flips']} flips of {one['tokens']} tokens"
            for drafter, one in proof.get("proof", {}).get("flips", {}).items()
        )
        exactness = f"Exactness not proved in fp32 ({proof.get('exact_checked', 'not checked')}): {flips}"
    versions = ", ".join(f"{package} {version}" for package, version in machine.get("versions", {}).items() if version)
    rows = {
        "prompts": f"{len({entry.id for entry in record.entries.values()})}"
        + (f", and {len(record.left_out)} left out: {named_with_tokens(record.left_out)}" if record.left_out else ""),
        "drafters": ", ".join(settings.get("drafters", {})),
        **{
            key.replace("_", " "): _setting(settings[key])
            for key in ("dtype", "nodes", "temperatures", "sampling", "seed", "new_tokens", "ignore_eos", "draft")
            if settings.get(key) not in (None, {}, [])
        },
        "machine": f"{machine.get('device', '?')}, {machine.get('threads', '?')} threads",
        "made": f"{machine.get('date', '?')}, commit {str(machine.get('commit'))[:9]}, {versions}",
    }
    listed = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in rows.items())
    proved = f"<p class='proof{' exact' if proof.get('exact') else ''}'>{escape(exactness)}</p>"
    return f"<section class='run'><h3>{escape(name)}</h3>{proved}<dl>{listed}</dl></section>"


def _setting(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {one}" for key, one in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _overall(series: Sequence[Series]) -> str:
    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "tokens/step": lambda f: _length(f).text,
        "by request": lambda f: f"{f['lengths']['per_request']:.2f}",
        "alpha": lambda f: f"{f['lengths']['alpha']:.3f}",
        "tau": lambda f: f"{f['lengths']['tau']:.2f}",
        "accepted": lambda f: f"{f['acceptance']:.1%}",
        "nodes/step": lambda f: f"{f['nodes_per_step']:.1f}",
        "tokens/s": lambda f: f"{f['tokens_per_second']:.1f}",
        "over plain": lambda f: _speed(f).text,
        "ms/step: draft, verify, host": lambda f: ", ".join(f"{f[f'{p}_ms']:.1f}" for p in ("draft", "target", "host")),
        "plain's tokens": lambda f: "{:,} of {:,}".format(*f["same_tokens"]),
    }
    rows = [[one.name, *(write(one.figures) for write in columns.values())] for one in series]
    return _table(["drafter", *columns], rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    heads = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    return f"<div class='scroll'><table><thead><tr>{heads}</tr></thead><tbody>{cells}</tbody></table></div>"


def _legend(series: Sequence[Series]) -> str:
    items = (
        f"<li><svg viewBox='0 0 10 10' aria-hidden='true'><rect class='s{one.number % SERIES}' width='10' height='10'/>"
        f"</svg>{escape(one.name)}</li>"
        for one in series
    )
    return f"<ul class='legend'>{''.join(items)}</ul>"


def _length(figures: Mapping[str, Any]) -> Bar:
    return Bar(0, "", figures["tokens_per_step"], *figures["intervals"]["pooled"])


def _speed(figures: Mapping[str, Any]) -> Bar:
    return Bar(0, "", figures["speedup"], *figures["intervals"]["speedup"])


def _by(series: Sequence[Series], part: str, value: Callable[[Mapping[str, Any]], Bar]) -> dict[str, list[Bar]]:
    """A bar per series for each group of `part` ("tasks" or "contexts")."""
    groups: dict[str, list[Bar]] = {}
    for one in series:
        for group, figures in one.figures[part].items():
            groups.setdefault(group, []).append(value(figures)._replace(series=one.number, name=one.name))
    return groups


def _charts(series: Sequence[Series], drafted: Sequence[Series]) -> list[str]:
    fast = [one for one in series if not one.name.startswith("plain")]
    found = []
    for part, what in (("contexts", "context (tokens of the prompt)"), ("tasks", "task")):
        if drafted:
            found.append(_bar_chart(f"Tokens a step, by {what}", _by(drafted, part, _length)))
        if fast:
            found.append(_bar_chart(f"Speed over plain decoding, by {what}", _by(fast, part, _speed)))
    if drafted:
        places = {
            one.number: [(i + 1, share) for i, share in enumerate(one.figures["acceptance_by_depth"])]
            for one in drafted
        }
        title = "Steps that accepted each place"
        found.append(_figure(title, lines(title, places, "place in the tree", "share of steps")))
    marks = {
        one.number: [(mark["tokens"], mark["ms"]) for mark in max(one.figures["ms_per_token"], key=len)]
        for one in series
        if one.figures["ms_per_token"]
    }
    if marks:
        title = "ms/token along the longest generation"
        found.append(_figure(title, lines(title, marks, "tokens generated", "ms/token")))
    return found


def _bar_chart(title: str, groups: Mapping[str, Sequence[Bar]]) -> str:
    """Bars with a line at 1, and their numbers in a table that can be unfolded."""
    numbers = _table(
        ["", "drafter", title], ([group, bar.name, bar.text] for group, of in groups.items() for bar in of)
    )
    return _figure(title, bars(title, groups, 1.0) + f"<details><summary>Numbers</summary>{numbers}</details>")


def _figure(title: str, content: str) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{content}</figure>"
