"""Measure drafters against plain decoding: `longdraft bench --draft FOLDER --data DATA [--suite SUITE] [--out FOLDER]`.

Arguments and printing; what they ask for is in bench_request.py, the measurements are in benchmarks/drafters.py, the
table and picture in benchmarks/drafters_report.py. The last line of the output is one JSON object.
"""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longdraft.launch.console import ends_on_ctrl_c, framed, leave, note, show
from longdraft.launch.shared_options import LOADERS, NEW_TOKENS, PROMPTS, add_drafting, add_dtype, add_sampling

if TYPE_CHECKING:
    import torch

    from longdraft.models.decoder import Decoder
    from longdraft.models.decoder_config import DecoderConfig
    from longdraft.models.target import Target

# benchmarks/proof.py says what each is; here, for --help should not wait for torch.
FORMS = ("fp32", "layerwise", "serving", "off")
# benchmarks/suites.py says what each is.
SUITES = ("longbench", "aime24", "pg19", "spec-bench", "speed-bench", "mrcr", "mt-bench")
# benchmarks/papers.py has their tables.
PAPERS = ("longspec", "tokenswift", "triforce", "token-recycling")
TEXT_TOKENS = 256
# Tokens around a text where the task is more than to continue it.
ASKING = 256


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="longdraft bench", description="Exactness and speed of decoding.")
    add = parser.add_argument
    add("--target", help="a folder, a hub name, a .gguf file or smollm2-135m (default: the draft's own target)")
    add("--gguf-file", help="with --target: name of a .gguf file inside it")
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
    add_drafting(add)
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
    from longdraft.models.files import write_atomically

    metrics = [] if args.run is None else _metrics(args.run)
    try:
        result = _bench(args)
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


def _bench(args: argparse.Namespace) -> dict:
    from longdraft.benchmarks.answers import Record
    from longdraft.benchmarks.drafters import bench
    from longdraft.benchmarks.exchange import write_files
    from longdraft.benchmarks.papers import PAPERS, beside
    from longdraft.benchmarks.tasks import make_tasks
    from longdraft.infer.drafters.build import build_drafter
    from longdraft.launch import runtime
    from longdraft.launch.bench_request import (
        asked_for,
        check_proof,
        settings_of,
        suite_of,
        suite_questions,
        take_paper,
        texts_of,
    )
    from longdraft.launch.progress import Progress
    from longdraft.launch.report import check_name, write_report
    from longdraft.models.device import on_device
    from longdraft.models.hf import load_transformers

    # What can be wrong is found before the model is loaded.
    if args.report is not None:
        check_name(args.report, "--report")
        if args.out is None:
            raise ValueError(f"--report: {args.report} is made of a record; give --out too")
    device = runtime.read_device(args.device)
    args.suite, suite = suite_of(args)
    take_paper(args, suite)
    args.dtype, args.prompt_tokens = args.dtype or "bf16", args.prompt_tokens or TEXT_TOKENS
    names, options = runtime.drafter_names(args.drafter, args.draft), runtime.read_options(args.option)
    runtime.check_options(names, options)
    runtime.check_drafts(names, args.draft, args.target)
    source = runtime.target_source(args.target, args.gguf_file, args.draft)
    settings = settings_of(args, names, suite, source[0])
    for temperature in settings.temperatures:
        settings.params(temperature)
    asked, left_out = suite_questions(args, suite, source, settings) if suite else ([], [])
    given = [] if args.suite else texts_of(args, names)
    record = Record(args.out, asked_for(args, source, names, options, settings, asked or given))
    check_proof(args, record.proof)
    record.leave_out([one._asdict() for one in left_out])
    longest = max((one.tokens for one in asked), default=args.prompt_tokens + ASKING)
    turns = max((len(one.question.turns) for one in asked), default=1)
    # What is proved already need not be loaded for it again.
    wanted = args.exactness if record.proof is None or args.dtype == "fp32" else "serving"
    positions = turns * (longest + settings.new_tokens)
    target, form = _open_target(args, wanted, longest, positions, source, device, options)
    settings = replace(settings, proof=form)
    if not args.suite:
        if isinstance(given, list):
            runtime.check_rows(runtime.heldout_rows(args.data), target)
        texts = given if isinstance(given, list) else runtime.file_texts(target, given, args.prompt_tokens)
        asked = make_tasks(target, texts, args.tasks)
    builders = {
        name: lambda target, name=name: build_drafter(
            name, target, runtime.draft_for(name, args.draft), runtime.options_for(name, options)
        )
        for name in names
        if name != "plain"
    }
    place = target.model.embed_tokens.weight.device
    theirs = load_transformers(source[0], settings.dtype, source[1]).to(place) if args.transformers else None
    with Progress("bench") as watch, on_device(place):
        result = bench(target, builders, asked, settings, theirs, watch, record)
    if args.out is not None:
        folders = write_files(record, args.out, {one.question.id: one.question.said() for one in asked})
        names = ", ".join(folder.name for folder in folders)
        note(f"Written to {args.out}: record.jsonl, and for other programs {names}")
        if args.report is not None:
            write_report([args.out], args.report, "--report")
            note(f"Written to {args.report}")
    if args.paper is not None:
        paper = PAPERS[args.paper]
        own = [name for name in builders if paper.drafter in name.split("+")]
        result["paper"] = beside(paper, record, own, settings.temperatures, source[0])
    return result


def _open_target(
    args: argparse.Namespace,
    wanted: str | None,
    longest: int,
    positions: int,
    source: tuple[str, str | None],
    device: "torch.device",
    options: Mapping[str, Any],
) -> "tuple[Target, str]":
    """The target as the proof begins with it, and the proof's form, which is chosen before a weight is loaded.

    wanted: the form asked for. longest: tokens of the longest prompt. positions: of the longest text.
    Raises ValueError where it does not fit.
    """
    from longdraft.benchmarks.proof import NAMES, Room, choose_form, describe_form, first_dtype, needed_bytes
    from longdraft.infer.memory import available_bytes, size
    from longdraft.launch import runtime
    from longdraft.models.hf import build_decoder

    dtype, chosen = runtime.DTYPES[args.dtype], []
    loader = runtime.target_loader(args.loader, args.draft)
    if loader != "longdraft":
        form = wanted or "fp32"
        if form == "layerwise":
            raise ValueError(
                f"--exactness: layerwise is our own decoder's, and --loader is {loader}; give fp32 or serving"
            )
        first = NAMES[first_dtype(form, dtype)]
        return runtime.open_target(*source, first, device, runtime.max_positions(args.draft), loader=loader), form
    positions = max(positions, *(args.contexts or [0]))

    def build(config: "DecoderConfig", *_: object) -> "Decoder":
        held = min(positions, config.max_positions)
        room = Room(available_bytes(device), longest, held, _beside(args, config, options))
        chosen.append(form := choose_form(wanted, config, dtype, room))
        first, free = first_dtype(form, dtype), "" if room.free is None else f", and {size(room.free)} is free"
        takes = size(needed_bytes(form, config, dtype, room))
        note(f"Loading in {NAMES[first]}, to show exactness in {describe_form(form, dtype)}: takes {takes}{free}")
        return build_decoder(config, first, device)

    target = runtime.open_target(*source, None, device, runtime.max_positions(args.draft), build)
    return target, chosen[0]


def _beside(args: argparse.Namespace, config: "DecoderConfig", options: Mapping[str, Any]) -> int:
    """Bytes that lie on the device beside target and cache, at most: the draft and a small model in fp32, and
    transformers' own copy of the target."""
    from longdraft.infer.memory import weight_count
    from longdraft.launch.runtime import DTYPES
    from longdraft.models.draft_files import WEIGHTS
    from longdraft.models.draft_folder import local_folder
    from longdraft.models.hf import read_target_config

    found = sum(2 * (local_folder(draft) / WEIGHTS).stat().st_size for draft in args.draft)
    for name, value in options.items():
        if name.split(".")[-1] == "small":
            found += 4 * weight_count(read_target_config(str(value)))
    return found + (DTYPES[args.dtype].itemsize * weight_count(config) if args.transformers else 0)


def _loss_memory(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Three heads at SmolLM2's width, two lengths: what is allocated beyond inputs, beside what the logits would be."""
    others = [name for name, value in vars(args).items() if value != parser.get_default(name) and name != "loss_memory"]
    if others:
        raise ValueError(f"--loss-memory: it takes no other option; leave out --{others[0].replace('_', '-')}")
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
