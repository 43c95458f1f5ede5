"""Measure drafters against plain decoding: `longdraft bench --draft FOLDER --data DATA [--suite SUITE] [--out FOLDER]`.

Only arguments and printing are here. bench_request.py turns the arguments into a bench; benchmarks/drafters/ measures
and makes the table, the page and the picture. The last line of the output is a JSON object.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from longdraft.launch.console import flag, leave, note, run_command, show
from longdraft.launch.shared_options import (
    NEW_TOKENS,
    PROMPTS,
    TEXT_TOKENS,
    add_drafting,
    add_loading,
    add_sampling,
    at_least,
)

# The names in benchmarks/drafters/, repeated here so that --help need not import torch.
FORMS = ("fp32", "layerwise", "serving", "off")
SUITES = ("longbench", "aime24", "pg19", "spec-bench", "speed-bench", "mrcr", "mt-bench")
PAPERS = ("longspec", "tokenswift", "triforce", "token-recycling")
KINDS = ("continue", "summarise", "edit")


def _parser() -> argparse.ArgumentParser:
    description = "Measure drafters against plain decoding: exactness and speed."
    parser = argparse.ArgumentParser(prog="longdraft bench", description=description)
    add = parser.add_argument_group("model").add_argument
    add_loading(add, dtype=None, dtype_help="dtype of the timed decoding (default: bf16, or the --paper's)")
    add_drafting(parser, several=True)
    _add_prompts(parser)
    add = parser.add_argument_group("sampling").add_argument
    add("--temperature", nargs="+", type=float, help="one or more; 0 is greedy (default: 0, or the suite's)")
    add("--seed", type=int, default=0, help="default: 0")
    add_sampling(add)
    _add_measurements(parser)
    add = parser.add_argument_group("output").add_argument
    help = "keep a record of every answer here; a run that was stopped continues from it"
    add("--out", type=Path, metavar="FOLDER", help=help)
    help = "with --out: also show the record as a page (.html) or a picture (.svg)"
    add("--report", type=Path, metavar="FILE", help=help)
    help = "a training run's folder: bench.json, report.txt and report.png are written there"
    add("--run", type=Path, metavar="RUN", help=help)
    return parser


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("prompts").add_argument
    help = "a published suite of prompts; --data then holds its files as they were published"
    add("--suite", choices=SUITES, help=help)
    help = "suite, drafter, tree, sampling, dtype and end tokens as in a paper's table, except what is given here; the "
    add("--paper", choices=PAPERS, help=help + "paper's figures are shown beside ours")
    add("--only", nargs="+", default=[], help="with --suite: only these of its tasks, categories or files")
    help = "a prepared folder: the texts are the beginnings of its held-out rows. With --suite: a folder, a file or a "
    add("--data", help=help + "data set on the hub")
    help = "instead of --data: the texts are the beginnings of these files"
    add("--text-file", nargs="+", type=Path, help=help)
    help = "what to do with the texts, in turn (default: continue)"
    add("--tasks", nargs="+", choices=KINDS, default=["continue"], help=help)
    help = f"with --data: number of prompts, evenly spaced (default: {PROMPTS}, or all of a suite)"
    add("--prompts", type=at_least(1), metavar="N", help=help)
    help = f"tokens of a text (default: {TEXT_TOKENS}, or the suite's)"
    add("--prompt-tokens", type=at_least(2), metavar="N", help=help)
    help = f"maximum tokens of an answer (default: {NEW_TOKENS}, or the suite's)"
    add("--new-tokens", type=at_least(1), metavar="N", help=help)


def _add_measurements(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("measurements").add_argument
    add(
        "--exactness",
        choices=FORMS,
        help="how exactness is shown: fp32, with the whole target in fp32; layerwise, in fp32 with one layer loaded at "
        "a time; serving, in --dtype, counting tokens that differ at near-ties (default: the first of these that fits "
        "into free memory); or off, and the result says so",
    )
    help = "context lengths at which to time passes of different numbers of query tokens (default: the prompts' length)"
    add("--contexts", nargs="+", type=at_least(1), metavar="N", help=help)
    help = "also measure acceptance with and without noise in the drafters' ranking, and under classical rejection"
    add("--noise", action="store_true", help=help)
    add("--transformers", action="store_true", help="also time transformers' greedy generate on the same prompts")
    help = "measure only the peak memory of the heads' training loss, at two lengths"
    add("--loss-memory", action="store_true", help=help)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 1 if a drafter is not exact, 2 after an error, 130 after Ctrl-C."""
    parser = _parser()

    def work() -> int:
        args = parser.parse_args(argv)
        return _loss_memory(args, parser) if args.loss_memory else _measure(args)

    return run_command(parser.prog, work, by_force=True)


def _measure(args: argparse.Namespace) -> int:
    """Run the bench, show its result and write it to --run."""
    if (args.data is None) == (args.text_file is None):
        raise ValueError("--data, --text-file: give either a prepared folder or files")
    # Imported here so that --help and a wrong argument need not wait for torch.
    import torch

    from longdraft.benchmarks.drafters.exactness import NotExact
    from longdraft.benchmarks.drafters.pictures import draw_report
    from longdraft.benchmarks.drafters.text_report import table
    from longdraft.launch.bench_request import run_bench
    from longdraft.models.files import write_atomically
    from longdraft.train.tracking import read_metrics

    if args.run is not None and not args.run.is_dir():
        raise ValueError(f"--run: {args.run} is no folder; name a training run's (train.run_dir), or leave it out")
    metrics = [] if args.run is None else read_metrics(args.run)
    try:
        result = run_bench(args)
    except NotExact as error:
        note(f"longdraft bench: error: {error}")
        return 1
    except torch.OutOfMemoryError as error:
        first = str(error).splitlines()[0]
        raise ValueError(f"--device: {first} Take a smaller target or fewer --prompt-tokens or --new-tokens") from error
    text, status = table(result, metrics), 0
    if args.run is not None:
        try:
            write_atomically(args.run / "bench.json", lambda path: path.write_text(json.dumps(result, indent=1) + "\n"))
            write_atomically(args.run / "report.png", lambda path: draw_report(result, metrics, path))
            write_atomically(args.run / "report.txt", lambda path: path.write_text(text + "\n"))
            text += f"\nWritten to {args.run}: report.txt, report.png, bench.json"
        except OSError as error:
            note(f"longdraft bench: error: --run: {args.run} cannot be written: {error.strerror}")
            status = 2
    show(f"{text}\n{json.dumps(result)}\n")
    return status


def _loss_memory(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Show what the loss of three heads allocates beyond its inputs, at SmolLM2's width and two lengths."""
    given = [name for name, value in vars(args).items() if value != parser.get_default(name) and name != "loss_memory"]
    if given:
        raise ValueError(f"--loss-memory: it takes no other option; leave out {flag(given[0])}")
    from longdraft.benchmarks.drafters.loss_memory import loss_peak_memory

    hidden, vocab, heads, result = 576, 49152, 3, {}
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
