"""Measures our kernels, steps and plain decoding beside others' implementations and against this machine's ceilings.

`python benchmarks/kernels/run.py --quick` prints a table; the last line is one JSON object. benchmarks/README.md says
what is measured and how. The exit status is 1 if an implementation of ours gave a wrong output or failed; it is not
timed then. Drafters are measured by `longdraft bench`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from longdraft.benchmarks.kernels import attention, decode, loss, report, step
from longdraft.benchmarks.kernels.candidates import OURS
from longdraft.benchmarks.kernels.profiles import PROFILES
from longdraft.benchmarks.kernels.timing import DTYPES, Bench
from longdraft.models.device import check_device, default_device

# In this order; once the budget is spent, the rest is reported as not measured.
BENCHMARKS = ("attention", "step", "loss", "decode")
# Default values: (on a GPU, quick on a GPU, on a CPU, quick on a CPU).
DEFAULTS = {
    "profile": (["llama3.1-8b"], ["llama3.1-8b"], ["smollm2-135m"], ["smollm2-135m"]),
    "contexts": ([8192, 32768, 131072], [8192, 65536], [1024, 8192], [1024]),
    "nodes": ([1, 16, 64, 128], [64], [1, 8, 16, 64], [1, 8]),
    "rows": (8192, 8192, 512, 64),
    "new_tokens": (128, 32, 32, 8),
    "prompt_tokens": ([512, 8192], [512], [512], [128]),
    "repeats": (30, 10, 9, 3),
    "budget": (1500.0, 150.0, 1500.0, 150.0),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Kernels, steps and plain decoding against the machine's ceilings.")
    add = parser.add_argument
    add("what", nargs="*", help=f"of {', '.join(BENCHMARKS)}; ceilings alone: only those (default: all)")
    add("--profile", nargs="+", choices=PROFILES, help="whose shapes (default: llama3.1-8b, on a CPU smollm2-135m)")
    add("--contexts", nargs="+", type=int, help="committed rows, of attention and step")
    add("--nodes", nargs="+", type=int, help="rows of a pass, 1 to 128, of attention and step")
    add("--rows", type=int, help="of each head's loss")
    add("--prompt-tokens", nargs="+", type=int, help="of decode's prompts")
    add("--new-tokens", type=int, help="that decode makes of each prompt")
    add("--dtype", choices=DTYPES, default="bf16")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--repeats", type=int, help="turns at most")
    add("--budget", type=float, help="seconds, after which nothing new begins")
    add("--quick", action="store_true", help="fewer shapes and turns, within 150 s")
    add("--out", type=Path, metavar="FOLDER", help="also write NAME.json, NAME.txt and NAME.png there")
    add("--name", help="of these files (default: DATE-COMMIT-HARDWARE)")
    return parser


def read(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the arguments, and fill in every default."""
    parser = _parser()
    args = parser.parse_args(argv)
    name, otherwise = "--device", "give --device cpu"
    try:
        device = default_device(name, otherwise) if args.device == "auto" else check_device(args.device, name)
    except ValueError as error:
        parser.error(str(error))
    args.device, cuda = device.type, device.type == "cuda"
    for name, values in DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, values[2 * (not cuda) + args.quick])
    args.what = args.what or list(BENCHMARKS)
    if unknown := sorted(set(args.what) - {*BENCHMARKS, "ceilings"}):
        parser.error(f"{', '.join(unknown)}: no benchmark; give any of {', '.join(BENCHMARKS)}, ceilings")
    for name, least, most in (("contexts", 1, 2**20), ("nodes", 1, 128), ("prompt_tokens", 2, 2**20)):
        if bad := [value for value in getattr(args, name) if not least <= value <= most]:
            parser.error(f"--{name.replace('_', '-')}: {bad[0]} is not from {least} to {most}")
    for name in ("rows", "new_tokens", "repeats"):
        if getattr(args, name) < 2:
            parser.error(f"--{name.replace('_', '-')}: {getattr(args, name)}; give at least 2")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = read(argv)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    bench = Bench(torch.device(args.device), DTYPES[args.dtype], args.repeats, args.budget, args.quick)
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "name")}
    result: dict = report.surroundings(bench) | {"settings": settings, "results": []}
    result["seconds"] = 0.0
    stem = args.name or report.file_name(result)
    print(bench.ceilings, flush=True)
    measures = {
        "attention": lambda shape: attention.measure(bench, shape, args.contexts, args.nodes),
        "step": lambda shape: step.measure(bench, shape, args.contexts, args.nodes),
        "loss": lambda shape: loss.measure(bench, shape, args.rows),
        "decode": lambda shape: decode.measure(bench, shape, args.prompt_tokens, args.new_tokens),
    }
    for name, measure in measures.items():
        for profile in args.profile:
            if name in args.what:
                result["results"] += measure(PROFILES[profile])
                result["seconds"] = round(args.budget - bench.left, 1)
                _write(result, args.out, stem)  # so that a run that is killed leaves what it has
    print("\n" + report.table(result))
    if args.out:
        _write(result, args.out, stem)
        drawn = report.draw(result, args.out / f"{stem}.png")
        endings = "json, txt, png" if drawn else "json, txt; no png: matplotlib is not installed"
        print(f"Written to {args.out}/{stem}: {endings}")
    print(json.dumps(result))
    bad = [r for r in result["results"] if r["implementation"].startswith(OURS) and r["status"] in ("wrong", "failed")]
    return 1 if bad else 0


def _write(result: dict, folder: Path | None, stem: str) -> None:
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / f"{stem}.txt").write_text(report.table(result) + "\n")


if __name__ == "__main__":
    sys.exit(main())
