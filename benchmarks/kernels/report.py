"""Shows the rows of run.py as a text table and as a picture, with their provenance; and helpers for other tables.

Not here: any measurement.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from longdraft.benchmarks.drafters.provenance import hardware, provenance
from longdraft.benchmarks.kernels.timing import Bench, Ceilings

PACKAGES = ("torch", "triton", "transformers", "flash_attn", "liger_kernel")
# (Title, function that writes a row's cell); the cell is empty if the row has no such figure.
Column = tuple[str, Callable[[dict], str]]


def _number(key: str, form: str, scale: float = 1) -> Callable[[dict], str]:
    return lambda row: format(row[key] * scale, form) if key in row else ""


_TIMED: list[Column] = [
    ("ms", _number("ms", ".3f")),
    ("spread", _number("spread", ".0%")),
    ("GB/s", _number("bytes_per_second", ",.1f", 1e-9)),
    ("of copy", _number("share_of_copy", ".0%")),
    ("over floor", _number("over_floor", ".2f")),
    ("TFLOP/s", _number("flops_per_second", ",.3f", 1e-12)),
    ("of products", _number("share_of_products", ".0%")),
]
_OVER: Column = ("over ours", _number("over_longdraft", ".2f"))
_WHERE: list[Column] = [("profile", lambda row: row["profile"]), ("context", _number("context", ""))]
_WHAT: Column = ("implementation", lambda row: row["implementation"])
_LAYERS: Column = ("layers", lambda row: f"{row['layers']} of {row['layers_of_model']}" if "layers" in row else "")
COLUMNS: dict[str, list[Column]] = {
    "attention": [*_WHERE, ("rows", _number("nodes", "")), _WHAT, *_TIMED, _OVER],
    "step": [
        *_WHERE, _LAYERS, ("rows", _number("nodes", "")), _WHAT, *_TIMED, ("over a read", _number("over_read", ".2f")),
        ("over 1 row", _number("over_one_row", ".2f")),
    ],
    "loss": [
        _WHERE[0], ("dtype", lambda row: row["dtype"]), ("rows", _number("rows", "")), ("heads", _number("heads", "")),
        _WHAT, *_TIMED[:2], *_TIMED[5:],
        ("peak MiB", _number("peak_bytes", ",.0f", 2**-20)), _OVER,
    ],
    "decode": [
        *_WHERE, _LAYERS, _WHAT, ("tokens/s", _number("tokens_per_second", ",.1f")), *_TIMED[:5],
        ("host", _number("host_share", ".1%")), _OVER,
    ],
    "prefill": [*_WHERE, _LAYERS, _WHAT, *_TIMED[:2], *_TIMED[5:], _OVER],
}  # fmt: skip
TITLES = {
    "attention": "Tree attention of one layer, one sequence",
    "step": "A target pass of several rows, one sequence",
    "loss": "Loss and hidden gradients of heads that share one LM head",
    "decode": "Plain decoding, one sequence, greedy",
    "prefill": "A prompt to its first token, one sequence",
}


def surroundings(bench: Bench) -> dict:
    """Date, commit, hardware, versions and ceilings of a run."""
    found = provenance(bench.dtype, PACKAGES)
    found["commit"] = found["commit"] or "unknown"  # is part of the files' names
    found["versions"]["cuda"] = torch.version.cuda
    device = {"hardware": hardware(bench.device), "device": bench.device.type}
    return found | device | {"ceilings": bench.ceilings._asdict()}


def file_name(result: dict) -> str:
    """DATE-COMMIT-HARDWARE, where "-changed" stands for the commit's +."""
    commit = result["commit"].rstrip("+")[:8] + ("-changed" if result["commit"].endswith("+") else "")
    machine = re.sub(r"[^a-z0-9]+", "-", result["hardware"].lower()).strip("-")
    return f"{result['date'][:10]}-{commit}-{machine}"


def table(result: dict) -> str:
    lines = [
        f"{result['hardware']}, {result['threads']} threads, {result['dtype']}, commit {result['commit'][:9]}, "
        f"torch {result['versions']['torch']}, {result['date']}",
        str(Ceilings(**result["ceilings"])),
    ]
    for name, columns in COLUMNS.items():
        rows = [row for row in result["results"] if row["benchmark"] == name]
        if rows:
            lines += ["", TITLES[name], *_lines(columns, rows)]
    return "\n".join(lines)


def lay_out(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[list[str]]:
    """Pad each cell to the width of its column, left-aligned in the columns `left`, right-aligned elsewhere."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust if i in left else str.rjust for i in range(len(widths))]
    return [[side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)] for row in rows]


def _lines(columns: Sequence[Column], rows: Sequence[dict]) -> list[str]:
    """The lines of a table; a row that was not timed ends in the reason."""
    titles = [title for title, _ in columns]
    what = titles.index("implementation")
    header, *padded = lay_out([titles, *([write(row) for _, write in columns] for row in rows)], (0, what))
    lines = ["  ".join(header).rstrip()]
    lines.append("-" * len(lines[0]))
    for cells, row in zip(padded, rows, strict=True):
        timed = row["status"] == "ok"
        reason = [] if timed else [f"{row['status']}: {row['reason']}"]
        lines.append("  ".join((cells if timed else cells[: what + 1]) + reason).rstrip())
    return lines


@contextmanager
def drawn_panels(path: str | Path, rows: int, size: tuple[float, float], title: str, fontsize: int) -> Iterator[Any]:
    """Yield the axes of `rows` x 2 panels, and write them as one PNG, whatever the name of the file ends in."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(rows, 2, figsize=size, constrained_layout=True)
    figure.suptitle(title, fontsize=fontsize)
    yield axes
    figure.savefig(path, dpi=110, format="png")
    plt.close(figure)


def draw(result: dict, path: Path) -> bool:
    """Draw what was timed as one PNG. Returns False if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        return False
    timed = [row for row in result["results"] if "ms" in row]
    title = f"{result['hardware']}, {result['dtype']}, commit {result['commit'][:9]}"
    n_rows = -(-len(TITLES) // 2)
    with drawn_panels(path, n_rows, (13, 4.5 * n_rows), title, 12) as axes:
        for panel in axes.flat[len(TITLES) :]:
            panel.axis("off")
        for panel, (name, title) in zip(axes.flat, TITLES.items(), strict=False):
            rows = [row for row in timed if row["benchmark"] == name]
            panel.set_title(title, fontsize=10)
            if not rows:
                panel.text(0.5, 0.5, "not measured", ha="center", transform=panel.transAxes)
            elif name in ("attention", "step"):
                _draw_lines(panel, rows, name)
            else:
                _draw_bars(panel, rows, name)
    return True


def _draw_lines(panel, rows: list[dict], name: str) -> None:
    """Draw attention over the context, at the largest number of rows; a step over the rows of its pass, by context."""
    across, up = ("context", "share_of_copy") if name == "attention" else ("nodes", "over_one_row")
    if name == "attention":
        most = max(row["nodes"] for row in rows)
        rows = [row for row in rows if row["nodes"] == most]
    groups: dict[str, list[tuple]] = {}
    for row in rows:
        if up in row:
            behind = "" if name == "attention" else f", behind {row['context']}"
            label = f"{row['implementation']}, {row['profile']}{behind}"
            groups.setdefault(label, []).append((row[across], row[up]))
    for label, points in groups.items():
        panel.plot(*zip(*sorted(points), strict=True), "o-", ms=4, label=label)
    places = sorted({place for points in groups.values() for place, _ in points})
    panel.set_xscale("log", base=2)
    panel.set_xticks(places, [f"{place:,}" for place in places])
    panel.set_ylim(bottom=0)
    panel.set_xlabel(f"context, at {most} rows" if name == "attention" else "rows of the pass")
    panel.set_ylabel("share of the copy's bytes a second" if name == "attention" else "time over one row's")
    panel.legend(fontsize=7)


def _draw_bars(panel, rows: list[dict], name: str) -> None:
    units = {"decode": ("tokens_per_second", "tokens/s"), "prefill": ("ms", "ms")}
    key, unit = units.get(name, ("ms", "ms, forward and backward"))
    places = [f"{row['profile']}\n{row.get('context', row.get('rows'))}" for row in rows]
    labels = [f"{row['implementation']}\n{place}" for row, place in zip(rows, places, strict=True)]
    colors = ["C0" if row["implementation"].startswith("longdraft") else "0.7" for row in rows]
    bars = panel.bar(range(len(rows)), [row[key] for row in rows], color=colors)
    panel.bar_label(bars, [format(row[key], ".3g") for row in rows], fontsize=8)
    panel.set_xticks(range(len(rows)), labels, fontsize=7)
    panel.set_ylabel(unit)
