"""Measure drafters against plain decoding: `longdraft bench --draft FOLDER --data DATA [--suite SUITE] [--out FOLDER]`.

This file turns the arguments into a bench; benchmarks/drafters/ measures, and makes the table and the HTML report.
The last line of the output is a JSON object, unless it goes to a terminal.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from longdraft.benchmarks.drafters.bench import BenchSettings, bench
from longdraft.benchmarks.drafters.exactness import Builder, NotExact
from longdraft.benchmarks.drafters.forced import LABEL, ORACLE, at_rates, at_tokens_per_step, forced, oracle
from longdraft.benchmarks.drafters.papers import PAPERS, PROMPT, beside
from longdraft.benchmarks.drafters.questions import SUITES, Question, Reader, Suite, questions_of
from longdraft.benchmarks.drafters.record import checkpoint_digest, digest, recorded, write_spec_bench
from longdraft.benchmarks.drafters.report import table, write_report
from longdraft.infer.drafters.build import build_drafter
from longdraft.launch.arguments import NEW_TOKENS, PROMPTS, SAMPLING, TEXT_TOKENS, given_sampling
from longdraft.launch.console import note, read_text, show
from longdraft.launch.runtime import DTYPES, Drafting, heldout_rows, read_options, used_tokens
from longdraft.models.device import on_device
from longdraft.models.draft_folder import local_folder
from longdraft.models.hf import load_tokenizer, load_transformers, read_limits


def run(args: argparse.Namespace) -> int:
    """Run the bench and show its result. Returns the exit status: 1 if a drafter is not exact."""
    try:
        result = run_bench(args)
    except NotExact as error:
        note(f"longdraft bench: error: {error}")
        return 1
    show(table(result) + "\n" + ("" if sys.stdout.isatty() else json.dumps(result) + "\n"))
    return 0


def run_bench(args: argparse.Namespace) -> dict:
    """Run the bench that was asked for and return the result of `bench`.

    Arguments are checked before the target is loaded. Raises ValueError for those that do not fit, and what `bench`
    raises.
    """
    of_suite = args.suite is not None or args.paper is not None
    for option, given, needed, other in (
        ("--report", args.report is not None, args.out is not None, "--out"),
        ("--only", bool(args.only), of_suite, "--suite"),
        ("--suite, --paper", of_suite, args.data is not None, "--data"),
        ("--prompts", args.prompts is not None, args.data is not None, "--data"),
        ("--transformers", args.transformers, args.tensor_parallel == 1, "--tensor-parallel 1"),
    ):
        if given and not needed:
            raise ValueError(f"{option}: needs {other}; add that, or omit {option}")
    args.suite, suite = suite_of(args)
    if args.paper is not None and suite is not None:
        _take_paper(args, suite)
    args.dtype, args.prompt_tokens = args.dtype or "bf16", args.prompt_tokens or TEXT_TOKENS
    drafting = Drafting(args, alone=[ORACLE])
    forcing = forced_rates(args).split("=")[0]
    if forcing and set(drafting.drafters) == {"plain"}:
        raise ValueError(f"{forcing}: plain decoding drafts nothing; name a --drafter, such as {ORACLE}")
    if forcing and args.paper is not None:
        raise ValueError(f"{forcing}: a paper's figures have no forced acceptance; omit it or --paper")
    settings = settings_of(drafting, suite)
    asked = suite_questions(drafting, suite, settings) if suite else questions_of(texts_of(drafting))
    ranks, builders = drafting.ranks, dict(builder_of(drafting, name) for name in drafting.drafters if name != "plain")
    with recorded(args.out if ranks.rank == 0 else None, asked_for(drafting, settings, asked)) as record:
        record.entries, record.proof, record.machine = ranks.from_first((record.entries, record.proof, record.machine))
        target = drafting.open_target()
        device, path = target.model.embed_tokens.weight.device, drafting.source
        theirs = load_transformers(path, DTYPES[args.dtype]).to(device) if args.transformers else None
        with on_device(device):
            result = bench(target, builders, asked, settings, theirs, note, record)
        if record.work is not None:
            note(f"Written to {args.out}; as Spec-Bench's answers: {write_spec_bench(record, args.out)}")
        if args.paper is not None:
            paper = PAPERS[args.paper]
            compared = [name for name, one in drafting.drafters.items() if paper.drafter in one.drafter.split("+")]
            result["paper"] = beside(paper, record, compared, settings.temperatures)
    if args.report is not None and args.out is not None and ranks.rank == 0:
        write_report([args.out], args.report, "--report")
        note(f"Written to {args.report}")
    return result


def forced_rates(args: argparse.Namespace) -> str:
    """The option that forces the acceptance of all drafters, with its value; "" without one."""
    if args.tokens_per_step is not None:
        if not args.tokens_per_step >= 1:
            raise ValueError(f"--tokens-per-step: {args.tokens_per_step:g}; a step gives at least 1; raise it")
        return f"--tokens-per-step={args.tokens_per_step:g}"
    return "" if args.accept_rates is None else f"--accept-rates={','.join(f'{rate:g}' for rate in args.accept_rates)}"


def forced_names(drafting: Drafting) -> dict[str, str]:
    """For each drafter whose acceptance is forced, the name of its figures."""
    every = bool(forced_rates(drafting.args))
    return {name: f"forced-{name}" for name in drafting.drafters if name == ORACLE or (every and name != "plain")}


def builder_of(drafting: Drafting, name: str) -> tuple[str, Builder]:
    """The name of a drafter's figures, and the function that builds the drafter."""
    args, asked, named = drafting.args, drafting.drafters[name], forced_names(drafting)
    build = partial(build_drafter, asked.drafter, draft=asked.draft, options=asked.options)
    if name == ORACLE:
        build = oracle(asked.options)
    if name not in named:
        return name, build
    rates = partial(at_rates, args.accept_rates or [1.0])
    if args.tokens_per_step is not None:
        rates = partial(at_tokens_per_step, args.tokens_per_step)
    return named[name], forced(build, rates, args.seed, drafting.nodes if isinstance(drafting.nodes, int) else None)


def suite_of(args: argparse.Namespace) -> tuple[str | None, Suite | None]:
    """The suite that was named, or the paper's, with --prompt-tokens applied; (None, None) without one."""
    if args.paper is None and args.suite is None:
        return None, None
    name, suite = (args.suite, SUITES[args.suite]) if args.paper is None else PAPERS[args.paper].suite(args.suite)
    if args.prompt_tokens is None:
        return name, suite
    if suite.first_tokens is None:
        raise ValueError(f"--prompt-tokens: {args.prompt_tokens}, but {name} does not shorten its prompts; omit it")
    return name, replace(suite, first_tokens=args.prompt_tokens)


def _take_paper(args: argparse.Namespace, suite: Suite) -> None:
    """Set arguments that were not given to those of the --paper."""
    paper = PAPERS[args.paper]
    args.drafter, args.dtype = args.drafter or [paper.drafter], args.dtype or paper.dtype
    args.nodes = args.nodes or "all"
    given = {key.split(".")[-1] for key in read_options(args.option)}
    options = dict(paper.options) | ({"gamma": 2} if "small" in given and paper.drafter == "triforce" else {})
    if any(paper.drafter in name.split("+") for name in args.drafter):
        args.option = args.option + [
            f"{paper.drafter}.{key}={suite.first_tokens if value == PROMPT else value}"
            for key, value in options.items()
            if key not in given
        ]


def settings_of(drafting: Drafting, suite: Suite | None) -> BenchSettings:
    """The settings of the bench. Values that were not given come from the paper or the suite."""
    args = drafting.args
    published = {} if suite is None else suite.sampling
    published = published if args.paper is None else PAPERS[args.paper].sampling(drafting.source)
    sampling = {**published, **given_sampling(args, SAMPLING)}
    temperatures = args.temperature or (sampling.get("temperature", 0.0),)
    if args.transformers and any("penalty" in name or "banned" in name for name in sampling):
        raise ValueError("--transformers: it decodes without penalties and bans; omit it or those")
    settings = BenchSettings(
        proof=args.exactness,
        new_tokens=args.new_tokens or (NEW_TOKENS if suite is None else suite.new_tokens),
        temperatures=tuple(temperatures),
        seed=args.seed,
        nodes=drafting.nodes,
        sampling={key: value for key, value in sampling.items() if key not in ("temperature", "ignore_eos")},
        ignore_eos=sampling.get("ignore_eos", suite is None or suite.ignore_eos),
        contexts=(() if suite else None) if args.contexts is None else tuple(args.contexts),
    )
    for temperature in temperatures:
        settings.params(temperature)  # raises ValueError for invalid values
    return settings


def suite_questions(drafting: Drafting, suite: Suite, settings: BenchSettings) -> list[Question]:
    """A suite's questions that fit into the target's positions; the others are printed. Loads no weights."""
    args, source = drafting.args, drafting.source
    questions = suite.questions(args.data, args.only)
    if args.prompts is not None:
        questions = _evenly(questions, args.prompts)
    positions, *_ = read_limits(source, drafting.max_positions, drafting.loader)
    reader = Reader(Path(source).name, load_tokenizer(source))
    asked, omitted = suite.fitting(reader, questions, positions, settings.new_tokens)
    if omitted:
        why = f"too short for the suite or too long for the target's {positions} positions"
        note(f"Omitted questions, {why}: {len(omitted)} of {len(questions)}, {', '.join(omitted)}")
    if not asked:
        raise ValueError("--suite: no question fits; ask for fewer --new-tokens")
    return asked


def _evenly(items: Sequence[Any], count: int) -> list[Any]:
    """At most `count` of the items, evenly spaced."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def texts_of(drafting: Drafting) -> list[list[int]]:
    """The prompts' tokens: the beginnings of files, or of held-out rows, evenly spaced among those long enough."""
    args, length, tokenizer = drafting.args, drafting.args.prompt_tokens, load_tokenizer(drafting.source)
    if args.text_file is not None:
        texts = {file: tokenizer(read_text(file, "--text-file")).input_ids[:length] for file in args.text_file}
        if short := [file for file, tokens in texts.items() if len(tokens) < 2]:
            raise ValueError(f"--text-file: {short[0]} has fewer than 2 tokens")
        return list(texts.values())
    rows = heldout_rows(args.data, tokenizer)
    long = [i for i in range(len(rows)) if rows[i]["borders"][-1] >= length]
    if not long:
        raise ValueError(f"--prompt-tokens: {length}, but no row of {rows.folder} has as many tokens; ask for fewer")
    return [used_tokens(rows[i])[:length] for i in _evenly(long, args.prompts or PROMPTS)]


def asked_for(drafting: Drafting, settings: BenchSettings, questions: object) -> dict[str, Any]:
    """Everything that the answers depend on. A record is resumed only if this is the same."""
    args, source = drafting.args, drafting.source
    small = [str(value) for key, value in drafting.options.items() if key.split(".")[-1] == "small"]  # other targets
    named = dict.fromkeys(forced_names(drafting).values(), forced_rates(args) or "rates of 1")
    asked = vars(settings) | ({LABEL: named} if named else {})
    asked |= {"ranks": drafting.ranks.size} if drafting.ranks.size > 1 else {}
    return asked | {
        "suite": args.suite,
        "questions": digest(questions),
        "target": Path(source).name,
        "loader": drafting.loader,
        "checkpoint": checkpoint_digest(source),
        "draft": ",".join(str(checkpoint_digest(local_folder(draft))) for draft in args.draft) or None,
        "drafters": {
            name: {key: str(value) for key, value in one.options.items()} for name, one in drafting.drafters.items()
        },
        "small": [checkpoint_digest(one) for one in small],
        "dtype": args.dtype,
        "transformers": args.transformers,
    }
