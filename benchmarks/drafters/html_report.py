"""Shows one or several records of `longdraft bench` as one self-contained page."""

from collections.abc import Iterable, Mapping
from html import escape

from longdraft.benchmarks.drafters.metrics import lay_out, run_figures
from longdraft.benchmarks.drafters.pictures import bars, line_chart, svg
from longdraft.benchmarks.drafters.record import Record
from longdraft.benchmarks.drafters.text_report import Figures, exactness, rows

STYLE = """
body { margin: 0 auto; padding: 1.2rem; max-width: 80rem; font: 15px/1.5 system-ui, sans-serif; }
.runs, .charts { display: flex; flex-wrap: wrap; gap: 1.4rem; }
section { border: 1px solid #d6dce2; border-radius: 6px; padding: .2rem 1rem; max-width: 38rem; }
pre { overflow-x: auto; font-size: .85em; } section pre { white-space: pre-wrap; }
svg { max-width: 100%; height: auto; }
"""


def collect(records: Mapping[str, Record]) -> dict[str, Figures]:
    """Each drafter's figures in each run at each temperature, by a name of these. Raises ValueError for a record that
    has no question answered by all."""
    found: dict[str, Figures] = {}
    for run, record in records.items():
        by_temperature = record.by_drafter()
        for temperature, entries in by_temperature.items():
            # In a run that is not finished, some questions have been answered by some drafters only.
            common = set.intersection(*({e.id for e in of} for of in entries.values())) if "plain" in entries else set()
            figures = run_figures({name: [e for e in of if e.id in common] for name, of in entries.items() if common})
            where = [run] if len(records) > 1 else []
            how = [f"T {temperature:g}"] if len(by_temperature) > 1 else []
            found |= {", ".join([drafter, *how, *where]): one for drafter, one in figures.items()}
            if not common:
                by_temperature = {}
        if not by_temperature:
            raise ValueError(f"{run}: no question has been answered by all of its drafters yet; wait for the run")
    return found


def page(records: Mapping[str, Record]) -> str:
    """The HTML page. records: by the names they are shown under."""
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
<h2>By context, task and place</h2><div class='charts'>{"".join(_charts(series))}</div>
</body></html>
"""


def _title(record: Record) -> str:
    return f"{record.settings.get('suite') or 'texts'} on {record.machine.get('target', 'a target')}"


def _run(name: str, record: Record) -> str:
    """A box with what was asked for, on which machine, and whether it is exact."""
    proof = exactness(record.proof) if record.proof else "not asked for, plain decoding alone or switched off"
    count = len({entry.id for entry in record.entries.values()})
    shown = {"exact": proof, "prompts": count} | record.settings | record.machine
    lines = "\n".join(f"{key}: {value}" for key, value in shown.items() if value not in (None, {}, []))
    return f"<section><h3>{escape(name)}</h3><pre>{escape(lines)}</pre></section>"


def _charts(series: Mapping[str, Figures]) -> Iterable[str]:
    """The same drafters in the same order in each chart, so that each has its colour."""
    drafted = {name: one for name, one in series.items() if one["acceptance"] > 0}
    if not drafted:
        return
    for part, what in (("contexts", "context (tokens of the prompt)"), ("tasks", "task")):
        groups: dict[str, list[tuple]] = {}
        for name, figures in drafted.items():
            for group, one in figures[part].items():
                groups.setdefault(group, []).append((name, one["speedup"], *one["intervals"]["speedup"]))
        yield svg(bars(f"Speed over plain decoding, by {what}", groups))
    places = {name: list(enumerate(one["acceptance_by_depth"], start=1)) for name, one in drafted.items()}
    yield svg(line_chart("Steps that accepted each place", places, "place in the tree", "share of steps"))
    marks = {
        name: [(mark["tokens"], mark["ms"]) for mark in max(one["ms_per_token"], key=len, default=[])]
        for name, one in drafted.items()
    }
    if any(marks.values()):
        yield svg(line_chart("ms/token along the longest generation", marks, "tokens generated", "ms/token"))
