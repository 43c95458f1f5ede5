"""Measure drafters against plain decoding: `longdraft bench --draft FOLDER --data DATA [--suite SUITE] [--out FOLDER]`.

Arguments and printing; what they ask for is in bench_request.py, the measurements are in benchmarks/drafters.py, the
table and picture in benchmarks/drafters_report.py. The last line of the output is one JSON object.
"""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from longdraft.launch.console import ends_on_ctrl_c, flag, framed, leave, note, show
from longdraft.launch.shared_options import (
    LOADERS,
    NEW_TOKENS,
    PROMPTS,
    TEXT_TOKENS,
    add_dtype,
    add_no_noise,
    add_sampling,
    add_target,
)

# benchmarks/proof.py says what each is; here, for --help should not wait for torch.
FORMS = ("fp32", "layerwise", "serving", "off")
# benchmarks/suites.py says what each is.
SUITES = ("longbench", "aime24", "pg19", "spec-bench", "speed-bench", "mrcr", "mt-bench")
# benchmarks/papers.py has their tables.
PAPERS = ("longspec", "tokenswift", "triforce", "token-recycling")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="longdraft bench", description="Exactness and speed of decoding.")
    add = parser.add_argument
    add_target(add)
    add("--loader", choices=LOADERS, help="whose classes compute the target (default: as its draft was trained)")
    add(
        "--draft",
        nargs="+",
        default=[],
        help="folder that `longdraft export` wrote, its hub name, or one that comes with longdraft; several, of one "
        "method each, for as many drafters",
    )
    add("--drafter", nargs="+", help="one or more, a+b for a combination; default: the draft's own")
    add("--option", action="append", default=[], metavar="KEY=VALUE", help="drafter option, DRAFTER.KEY=VALUE for one")
    add(
        "--suite",
        choices=SUITES,
        help="a published suite of prompts; --data then holds its files as they are published",
    )
    add(
        "--paper",
        choices=PAPERS,
        help="as in a paper's table: suite, drafter, tree, sampling, dtype and ends, each where nothing else is said; "
        "our figures stand beside the paper's",
    )
    add("--only", nargs="+", default=[], help="with --suite: these of its tasks, categories or files")
    add(
        "--data",
        help="prepared folder; texts are the beginnings of its held-out rows. With --suite a folder, a file or a data "
        "set of the hub",
    )
    add("--text-file", nargs="+", type=Path, help="instead of --data: texts are the beginnings of these files")
    add("--tasks", nargs="+", default=["continue"], help="what to do with the texts in turn: continue, summarise, edit")
    add("--prompts", type=int, help=f"with --data: how many, evenly spaced (default: {PROMPTS}, of a suite all)")
    add("--prompt-tokens", type=int, help=f"of a text (default: {TEXT_TOKENS}, or as the suite says)")
    add("--new-tokens", type=int, help=f"of an answer, at most (default: {NEW_TOKENS}, or as the suite says)")
    add("--nodes", help="nodes a step verifies: auto (the default: what pays), all, or a number")
    add_dtype(add, None, "of the speeds (default: bf16, or as the --paper says)")
    add(
        "--exactness",
        choices=FORMS,
        help="how it is shown: the whole target loaded in fp32; layerwise, all of it in fp32 but one layer at a time; "
        "serving, in --dtype, counting tokens that differ at near-ties (default: the first that fits the free memory); "
        "or off, and the result says so",
    )
    add("--device", help="default: cuda where there is one")
    add("--temperature", nargs="+", type=float, help="one or more; 0 is greedy (default: 0, or as the suite says)")
    add("--seed", type=int, default=0)
    add_no_noise(add)
    add_sampling(add)
    add("--contexts", nargs="+", type=int, help="lengths for the cost of a pass by its rows (default: the prompts')")
    add(
        "--noise",
        action="store_true",
        help="also acceptance with and without the noise in the drafters' ranking, beside classical rejection's",
    )
    add("--transformers", action="store_true", help="also time transformers' greedy generate on the same prompts")
    add("--loss-memory", action="store_true", help="only: peak memory of the heads' training loss at two lengths")
    add("--out", type=Path, metavar="FOLDER", help="record of every answer, with which a stopped run goes on")
    add("--report", type=Path, metavar="FILE", help="with --out: also a page (.html) or a picture (.svg) of the record")
    add("--run", type=Path, metavar="RUN", help="training run's folder: bench.json, report.txt and report.png go there")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 where the draft is not exact, 2 after an error, 130 after Ctrl-C."""
    parser = _parser()

    def work() -> int:
        args = parser.parse_args(argv)
        with ends_on_ctrl_c(parser.prog):
            return _loss_memory(args, parser) if args.loss_memory else _measure(args)

    return framed(parser.prog, work)


def _measure(args: argparse.Namespace) -> int:
    if (args.data is None) == (args.text_file is None):
        raise ValueError(
            "--data, --text-file: name either a prepared folder, whose held-out rows give the texts, or files"
        )
    # Here, not above: --help and a wrong argument should not wait for torch.
    import torch

    from longdraft.benchmarks.drafters_report import draw, table
    from longdraft.benchmarks.proof import NotExact
    from longdraft.launch.bench_request import run_bench
    from longdraft.models.files import write_atomically

    metrics = [] if args.run is None else _metrics(args.run)
    try:
        result = run_bench(args)
    except NotExact as error:
        note(f"longdraft bench: error: {error}")
        return 1
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"--device: {str(error).splitlines()[0]} Take a smaller target, fewer --prompt-tokens or fewer --new-tokens"
        ) from error
    text, written = table(result, metrics), ""
    if args.run:
        try:
            figures = json.dumps(result, indent=1) + "\n"
            write_atomically(args.run / "bench.json", lambda path: path.write_text(figures))
            write_atomically(args.run / "report.png", lambda path: draw(result, metrics, path))
            write_atomically(args.run / "report.txt", lambda path: path.write_text(text + "\n"))
        except OSError as error:
            note(f"longdraft bench: --run: {args.run} cannot be written: {error.strerror}; the figures come without")
        else:
            written = f"Written to {args.run}: report.txt, report.png, bench.json\n"
    show(f"{text}\n{written}{json.dumps(result)}\n")
    return 0 if written or not args.run else 2


def _metrics(run: Path) -> list[dict]:
    """The records of a training run, whose folder is there and can be written. Raises: ValueError where not."""
    from longdraft.train.tracking import read_metrics

    if not run.is_dir():
        raise ValueError(f"--run: {run} is no folder; name a training run's (train.run_dir), or leave it out")
    if not os.access(run, os.W_OK | os.X_OK):
        raise ValueError(f"--run: {run} cannot be written; give one that can, or leave it out")
    return read_metrics(run)


def _loss_memory(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Three heads at SmolLM2's width, two lengths: what is allocated beyond inputs, beside what the logits would be."""
    others = [name for name, value in vars(args).items() if value != parser.get_default(name) and name != "loss_memory"]
    if others:
        raise ValueError(f"--loss-memory: it takes no other option; leave out {flag(others[0])}")
    from longdraft.benchmarks.loss import loss_peak_memory

    hidden, vocab, heads = 576, 49152, 3
    result = {}
    for tokens in (2048, 4096):
        peak, logits = loss_peak_memory(tokens, hidden, vocab, heads), heads * tokens * vocab * 4
        show(
            f"{heads} heads x {tokens} tokens x {vocab} words, fp32: peak {peak / 2**20:.0f} MiB beyond the inputs "
            f"(the logits alone would be {logits / 2**20:.0f} MiB)\n"
        )
        result[tokens] = {"peak_bytes": peak, "logits_bytes": logits}
    show(json.dumps({"loss_memory": result}) + "\n")
    return 0


if __name__ == "__main__":
    leave(main())
