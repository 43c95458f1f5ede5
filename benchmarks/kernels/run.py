"""Measures our kernels beside others' implementations and against this machine's ceilings.

`python benchmarks/kernels/run.py --quick` prints a table; the last line is one JSON object. benchmarks/README.md says
what is measured and how. The exit status is 1 if an implementation of ours failed or gave a wrong output; it is then
not timed. Drafters and passes of a target are measured by `longdraft bench`.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from longdraft.benchmarks.drafters.metrics import lay_out
from longdraft.benchmarks.drafters.provenance import hardware, provenance
from longdraft.benchmarks.kernels import attention, loss, product
from longdraft.benchmarks.kernels.race import DTYPES, OURS, PROFILES, Bench
from longdraft.kernels.linear import emulates_bf16
from longdraft.models.device import on_device, option_device

TITLES = {
    "attention": "Tree attention of one layer, one sequence",
    "prompt": "Attention of one layer, a chunk of a prompt",
    "linear": "Linear layers of a pass",
    "loss": "Loss and hidden gradients of heads that share one LM head",
}
PACKAGES = ("torch", "triton", "liger_kernel")
# Default values by device, and those that --quick replaces.
DEFAULTS = {
    "cuda": {"profile": ["llama3.1-8b"], "contexts": [8192, 32768, 131072], "nodes": [1, 16, 64, 128], "rows": 8192},
    "cpu": {"profile": ["smollm2-135m"], "contexts": [1024, 8192], "nodes": [1, 8, 16, 64], "rows": 512},
}
QUICK = {
    "cuda": {"contexts": [8192, 65536], "nodes": [1, 64]}, "cpu": {"contexts": [1024], "nodes": [1, 8], "rows": 64},
}  # fmt: skip
TURNS, QUICK_TURNS = {"cuda": 3, "cpu": 9}, {"cuda": 1, "cpu": 3}  # on a GPU a turn is `tuning.CALLS` calls
# Key of a row: title and format of its column. A table has only columns for which a row has a figure.
COLUMNS = {
    "profile": ("profile", ""), "context": ("context", ""), "outputs": ("outputs", ""), "nodes": ("rows", ""),
    "rows": ("rows", ""), "heads": ("heads", ""),
    "objective": ("objective", ""), "implementation": ("implementation", ""), "ms": ("ms", ".3f"),
    "share_of_copy": ("of copy", ".0%"), "share_of_products": ("of products", ".0%"),
    "peak_mib": ("peak MiB", ",.0f"), "over_longdraft": ("over ours", ".2f"),
    "choice": ("choice", ""),
}  # fmt: skip


def read(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments and fill in every default."""
    parser = argparse.ArgumentParser(description="Kernels against their peers and the machine's ceilings.")
    add = parser.add_argument
    add("what", nargs="?", choices=(*TITLES, "ceilings"), help="run only this benchmark (default: all)")
    add("--profile", nargs="+", choices=PROFILES, help="models' shapes (default: llama3.1-8b, on a CPU smollm2-135m)")
    add("--contexts", nargs="+", type=int, help="committed rows, for attention and prompt")
    add("--nodes", nargs="+", type=int, help="rows of a pass, for attention and linear")
    add("--rows", type=int, help="rows of each head, for loss")
    add("--dtype", choices=DTYPES, help="default: bf16, or fp32 on a CPU that emulates it")
    add("--device", help="default: cuda if there is a GPU, else cpu")
    add("--quick", action="store_true", help="fewer shapes and turns")
    add("--out", type=Path, metavar="FILE.json", help="also write the result there, and the table as .txt beside it")
    args = parser.parse_args(argv)
    try:
        device = option_device(args.device)
    except ValueError as error:
        parser.error(str(error))
    args.device = str(device)
    args.dtype = args.dtype or ("fp32" if device.type == "cpu" and emulates_bf16() else "bf16")
    for name, value in (DEFAULTS[device.type] | (QUICK[device.type] if args.quick else {})).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = read(argv)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    device = torch.device(args.device)
    bench = Bench(device, DTYPES[args.dtype], (QUICK_TURNS if args.quick else TURNS)[device.type])
    result = provenance(bench.dtype, PACKAGES) | {"hardware": hardware(bench.device), "device": args.device}
    measures: dict[str, Callable[[str], Iterable[list[dict]]]] = {
        "attention": lambda profile: (attention.measure(bench, profile, one, args.nodes) for one in args.contexts),
        "prompt": lambda profile: (attention.measure_chunk(bench, profile, one) for one in args.contexts),
        "linear": lambda profile: [product.measure(bench, profile, args.nodes)],
        "loss": lambda profile: (loss.measure(bench, profile, args.rows, one) for one in loss.IMPLEMENTATIONS),
    }
    with on_device(bench.device):
        result |= {"ceilings": bench.ceilings, "results": []}
        _save(args.out, result)
        for profile in args.profile:
            for name in (name for name in measures if args.what in (None, name)):
                for rows in measures[name](profile):
                    result["results"] += rows
                    _save(args.out, result)
    print("\n" + table(result))
    print(json.dumps(result))
    return int(any("problem" in row for row in result["results"] if row["implementation"] == OURS))


def _save(out: Path | None, result: dict) -> None:
    """Write the results so far, because a run may be killed when its time is over."""
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")
        out.with_suffix(".txt").write_text(table(result) + "\n")


def table(result: dict) -> str:
    """The result as text: a table for each benchmark; a row that was not timed ends in the reason."""
    copy, products = (result["ceilings"][name] for name in ("copy", "products"))
    lines = [
        f"{result['hardware']}, threads: {result['threads']}, {result['dtype']}, commit {result['commit']}, "
        f"torch {result['versions']['torch']}, {result['date']}",
        f"ceilings: copy {copy / 1e9:,.1f} GB/s (read and written), products {products / 1e12:,.3f} TFLOP/s",
    ]
    for name, title in TITLES.items():
        if rows := [row for row in result["results"] if row["benchmark"] == name]:
            lines += ["", title, *_lines(rows)]
    return "\n".join(lines)


def _lines(rows: Sequence[dict]) -> list[str]:
    keys = [key for key in COLUMNS if any(key in row for row in rows)]
    what = keys.index("implementation")
    cells = [[format(row[key], COLUMNS[key][1]) if key in row else "" for key in keys] for row in rows]
    header, *padded = lay_out([[COLUMNS[key][0] for key in keys], *cells], (0, what))
    lines = ["  ".join(header).rstrip()]
    lines.append("-" * len(lines[0]))
    for cells, row in zip(padded, rows, strict=True):
        shown = [*cells[: what + 1], row["problem"]] if "problem" in row else cells
        lines.append("  ".join(shown).rstrip())
    return lines


if __name__ == "__main__":
    sys.exit(main())
