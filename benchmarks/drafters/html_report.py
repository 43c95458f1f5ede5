"""Shows one or several records of `longdraft bench` as one self-contained page."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from longdraft.benchmarks.drafters.metrics import run_figures
from longdraft.benchmarks.drafters.pictures import Groups, bars, line_chart, svg
from longdraft.benchmarks.drafters.prompts import named_with_tokens
from longdraft.benchmarks.drafters.record import Record
from longdraft.benchmarks.drafters.text_report import Figures, exactness, rows

STYLE = """
body { margin: 0 auto; padding: 1.2rem; max-width: 80rem; color: #1c2229; background: #fff;
  font: 15px/1.5 system-ui, sans-serif; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem .8rem; } dt { color: #5a6570; }
dd { margin: 0; overflow-wrap: anywhere; } .runs, .charts { display: flex; flex-wrap: wrap; gap: 1.4rem; }
section { border: 1px solid #d6dce2; border-radius: 6px; padding: .2rem 1rem; max-width: 38rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9em; }
td { padding: .2rem .5rem; text-align: right; border-bottom: 1px solid #d6dce2; }
td:first-child { text-align: left; } svg { max-width: 100%; height: auto; }
"""
DEFINITIONS = {
    "tokens/step": "1 + accepted / steps, pooled over all steps: vLLM's and AIPerf's acceptance length, Spec-Bench's.",
    "speed over plain": "tokens/s over plain decoding's on the same prompts, in the same process and turns.",
    "95 % of it": "the middle 95 % of 2000 bootstraps over prompts.",
}


class Series(NamedTuple):
    """A drafter's figures in one run at one temperature."""

    number: int
    name: str
    figures: Figures


def collect(records: Mapping[str, Record]) -> list[Series]:
    """All series of the records, by run. Raises ValueError for a record that has no question answered by all."""
    found: list[Series] = []
    for run, record in records.items():
        by_temperature = record.by_drafter()
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
        if not by_temperature:
            raise ValueError(f"{run}: no question has been answered yet; wait for the run, or start it again")
    return found


def page(records: Mapping[str, Record]) -> str:
    """The HTML page. records: by the names they are shown under."""
    series = collect(records)
    title = escape(" and ".join(dict.fromkeys(_title(record) for record in records.values())))
    on_gpu = any(record.machine.get("on_gpu") for record in records.values())
    figures = rows("", {one.name: one.figures for one in series}, on_gpu)
    return f"""<!doctype html>
<html lang='en'><head><meta charset='utf-8'><meta name='viewport' content='width=device-width, initial-scale=1'>
<title>{title}</title><style>{STYLE}</style></head>
<body>
<h1>{title}</h1><p>Speculative decoding against plain decoding, by longdraft.</p>
<div class='runs'>{"".join(_run(name, record) for name, record in records.items())}</div>
<h2>All prompts</h2>{_table(figures)}
<h2>By task, context and place</h2><div class='charts'>{"".join(_charts(series))}</div>
<h2>What the figures are</h2>{_list(DEFINITIONS)}
</body></html>
"""


def _title(record: Record) -> str:
    return f"{record.settings.get('suite') or 'texts'} on {record.machine.get('target', 'a target')}"


def _run(name: str, record: Record) -> str:
    """A box with what was asked for, on which machine, and whether it is exact."""
    settings, machine = record.settings, record.machine
    count = len({entry.id for entry in record.entries.values()})
    left_out = f", and {len(record.left_out)} left out: {named_with_tokens(record.left_out)}" if record.left_out else ""
    versions = ", ".join(f"{package} {version}" for package, version in machine.get("versions", {}).items() if version)
    shown = ("dtype", "nodes", "temperatures", "seed", "new_tokens", "sampling", "ignore_eos", "draft")
    rows = {
        "exact": exactness(record.proof) if record.proof else "not asked for, plain decoding alone or switched off",
        "prompts": f"{count}{left_out}",
        "drafters": ", ".join(settings.get("drafters", {})),
        **{key: _setting(settings[key]) for key in shown if settings.get(key) not in (None, {}, [])},
        "machine": f"{machine.get('device', '?')}, {machine.get('threads', '?')} threads",
        "made": f"{machine.get('date', '?')}, commit {str(machine.get('commit'))[:9]}, {versions}",
    }
    return f"<section><h3>{escape(name)}</h3>{_list(rows)}</section>"


def _setting(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {one}" for key, one in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _list(rows: Mapping[str, str]) -> str:
    return f"<dl>{''.join(f'<dt>{escape(key)}</dt><dd>{escape(value)}</dd>' for key, value in rows.items())}</dl>"


def _table(rows: Iterable[Sequence[str]]) -> str:
    cells = "".join(f"<tr>{''.join(f'<td>{escape(cell.strip())}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div class='scroll'><table>{cells}</table></div>"


def _length(figures: Figures) -> tuple[float, float, float]:
    return figures["tokens_per_step"], *figures["intervals"]["per_step"]


def _speed(figures: Figures) -> tuple[float, float, float]:
    return figures["speedup"], *figures["intervals"]["speedup"]


def _groups(series: Sequence[Series], part: str, value: Callable[[Figures], tuple[float, float, float]]) -> Groups:
    """A bar per series for each group of `part` ("tasks" or "contexts")."""
    groups: dict[str, list] = {}
    for one in series:
        for group, figures in one.figures[part].items():
            groups.setdefault(group, []).append((one.number, one.name, *value(figures)))
    return groups


def _charts(series: Sequence[Series]) -> Iterable[str]:
    drafted = [one for one in series if one.figures["acceptance"] > 0]
    fast = [one for one in series if not one.name.startswith("plain")]
    for part, what in (("contexts", "context (tokens of the prompt)"), ("tasks", "task")):
        if drafted:
            yield svg(bars(f"Tokens a step, by {what}", _groups(drafted, part, _length)))
        if fast:
            yield svg(bars(f"Speed over plain decoding, by {what}", _groups(fast, part, _speed)))
    if drafted:
        places = {one[:2]: list(enumerate(one.figures["acceptance_by_depth"], start=1)) for one in drafted}
        yield svg(line_chart("Steps that accepted each place", places, "place in the tree", "share of steps"))
    if long := [one for one in series if one.figures["ms_per_token"]]:
        longest = {one[:2]: max(one.figures["ms_per_token"], key=len) for one in long}
        marks = {key: [(mark["tokens"], mark["ms"]) for mark in of] for key, of in longest.items()}
        yield svg(line_chart("ms/token along the longest generation", marks, "tokens generated", "ms/token"))
