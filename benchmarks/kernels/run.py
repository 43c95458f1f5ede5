"""Measures our kernels and target passes beside others' implementations and against this machine's ceilings.

`python benchmarks/kernels/run.py --quick` prints a table; the last line is one JSON object. benchmarks/README.md says
what is measured and how. The exit status is 1 if an implementation of ours gave a wrong output or failed; it is not
timed then. Drafters are measured by `longdraft bench`.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from longdraft.benchmarks.drafters.metrics import lay_out
from longdraft.benchmarks.drafters.provenance import hardware, provenance
from longdraft.benchmarks.kernels import attention, loss, step
from longdraft.benchmarks.kernels.profiles import POSITIONS, PROFILES
from longdraft.benchmarks.kernels.race import DTYPES, OURS, Bench, Ceilings
from longdraft.models.device import check_device, default_device

# In this order; once the budget is spent, the rest is reported as not measured.
TITLES = {
    "attention": "Tree attention of one layer, one sequence",
    "step": "A target pass of several rows, one sequence",
    "loss": "Loss and hidden gradients of heads that share one LM head",
}
PACKAGES = ("torch", "triton", "transformers", "flash_attn", "liger_kernel")
# Default values: (on a GPU, quick on a GPU, on a CPU, quick on a CPU).
DEFAULTS = {
    "profile": (["llama3.1-8b"], ["llama3.1-8b"], ["smollm2-135m"], ["smollm2-135m"]),
    "contexts": ([8192, 32768, 131072], [8192, 65536], [1024, 8192], [1024]),
    "nodes": ([1, 16, 64, 128], [64], [1, 8, 16, 64], [1, 8]),
    "rows": (8192, 8192, 512, 64),
    "turns": (10, 3, 9, 3),
    "budget": (1500.0, 150.0, 1500.0, 150.0),
}
# Key of a row: (title of its column, format, factor). A table has the columns of which one of its rows has a figure.
COLUMNS = {
    "profile": ("profile", "", None), "dtype": ("dtype", "", None), "context": ("context", "", 1),
    "layers": ("layers", "", 1), "nodes": ("rows", "", 1), "rows": ("rows", "", 1), "heads": ("heads", "", 1),
    "implementation": ("implementation", "", None),
    "ms": ("ms", ".3f", 1), "bytes_per_second": ("GB/s", ",.1f", 1e-9), "share_of_copy": ("of copy", ".0%", 1),
    "flops_per_second": ("TFLOP/s", ",.3f", 1e-12), "share_of_products": ("of products", ".0%", 1),
    "peak_bytes": ("peak MiB", ",.0f", 2**-20),
    "over_one_row": ("over 1 row", ".2f", 1), "over_longdraft": ("over ours", ".2f", 1),
}  # fmt: skip


def read(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments and fill in every default."""
    parser = argparse.ArgumentParser(description="Kernels and target passes against the machine's ceilings.")
    add = parser.add_argument
    help = "any of attention, step, loss; ceilings alone: only those (default: all)"
    add("what", nargs="*", metavar="WHAT", help=help)
    add("--profile", nargs="+", choices=PROFILES, help="whose shapes (default: llama3.1-8b, on a CPU smollm2-135m)")
    add("--contexts", nargs="+", type=_up_to(POSITIONS), help="committed rows, of attention and step")
    add("--nodes", nargs="+", type=_up_to(128), help="rows of a pass, 1 to 128, of attention and step")
    add("--rows", type=_up_to(2**20), help="of each head's loss")
    add("--dtype", choices=DTYPES, default="bf16")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--turns", type=_up_to(1000), help="of the implementations")
    add("--budget", type=float, help="seconds, after which nothing new begins")
    add("--quick", action="store_true", help="fewer shapes and turns, within 150 s")
    add("--out", type=Path, metavar="FOLDER", help="also write NAME.json and NAME.txt there")
    add("--name", help="of these files (default: DATE-COMMIT-HARDWARE)")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.what) - {*TITLES, "ceilings"}):
        parser.error(f"{', '.join(unknown)}: no benchmark; give any of {', '.join(TITLES)}, ceilings")
    args.what = args.what or list(TITLES)
    name, otherwise = "--device", "give --device cpu"
    try:
        device = default_device(name, otherwise) if args.device == "auto" else check_device(args.device, name)
    except ValueError as error:
        parser.error(str(error))
    args.device = device.type
    for name, values in DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, values[2 * (device.type != "cuda") + args.quick])
    return args


def _up_to(most: int):
    def number(text: str) -> int:
        if not text.isdecimal() or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text} is not from 1 to {most}")
        return int(text)

    return number


def main(argv: Sequence[str] | None = None) -> int:
    args = read(argv)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    bench = Bench(torch.device(args.device), DTYPES[args.dtype], args.turns, args.budget)
    result = provenance(bench.dtype, PACKAGES) | {"hardware": hardware(bench.device), "device": args.device}
    result["settings"] = {name: value for name, value in vars(args).items() if name not in ("out", "name")}
    result |= {"ceilings": bench.ceilings._asdict(), "results": []}
    print(bench.ceilings, flush=True)
    measures = {
        "attention": lambda shape: attention.measure(bench, shape, args.contexts, args.nodes),
        "step": lambda shape: step.measure(bench, shape, args.contexts, args.nodes),
        "loss": lambda shape: loss.measure(bench, shape, args.rows),
    }
    for name, measure in measures.items():
        for profile in args.profile:
            if name in args.what:
                result["results"] += measure(profile)
                result["seconds"] = round(args.budget - bench.left, 1)
                _write(result, args)  # so that a run that is killed leaves what it has
    print("\n" + table(result))
    print(json.dumps(result))
    bad = [r for r in result["results"] if r["implementation"].startswith(OURS) and r["status"] in ("wrong", "failed")]
    return 1 if bad else 0


def _write(result: dict, args: argparse.Namespace) -> None:
    if args.out is None:
        return
    commit = (result["commit"] or "unknown").rstrip("+")[:8]
    machine = re.sub(r"[^a-z0-9]+", "-", result["hardware"].lower()).strip("-")
    stem = args.name or f"{result['date'][:10]}-{commit}-{machine}"
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{stem}.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / f"{stem}.txt").write_text(table(result) + "\n")


def table(result: dict) -> str:
    """The result as text: a table for each benchmark; a row that was not timed ends in the reason."""
    lines = [
        f"{result['hardware']}, {result['threads']} threads, {result['dtype']}, commit {result['commit']}, "
        f"torch {result['versions']['torch']}, {result['date']}",
        str(Ceilings(**result["ceilings"])),
    ]
    for name, title in TITLES.items():
        if rows := [row for row in result["results"] if row["benchmark"] == name]:
            lines += ["", title, *_lines(rows)]
    return "\n".join(lines)


def _lines(rows: Sequence[dict]) -> list[str]:
    keys = [key for key in COLUMNS if any(key in row for row in rows)]
    what = keys.index("implementation")
    titles = [COLUMNS[key][0] for key in keys]
    header, *padded = lay_out([titles, *([_cell(row, key) for key in keys] for row in rows)], (0, what))
    lines = ["  ".join(header).rstrip()]
    lines.append("-" * len(lines[0]))
    for cells, row in zip(padded, rows, strict=True):
        shown = cells if "ms" in row else [*cells[: what + 1], f"{row['status']}: {row['reason']}"]
        lines.append("  ".join(shown).rstrip())
    return lines


def _cell(row: dict, key: str) -> str:
    _, form, scale = COLUMNS[key]
    return "" if key not in row else row[key] if scale is None else format(row[key] * scale, form)


if __name__ == "__main__":
    sys.exit(main())
