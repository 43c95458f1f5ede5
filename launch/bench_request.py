"""Turns the arguments of `longdraft bench` into a bench and runs it. They are checked before the target is loaded.

Not here: the arguments themselves (bench.py), what they share with other commands (runtime.py), what is measured
(benchmarks/drafters/bench.py).
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from longdraft.benchmarks.drafters.bench import BenchSettings, bench
from longdraft.benchmarks.drafters.digests import checkpoint_digest, digest, draft_digest
from longdraft.benchmarks.drafters.exactness import (
    FORMS,
    NAMES,
    Room,
    choose_form,
    describe_form,
    first_dtype,
    needed_bytes,
)
from longdraft.benchmarks.drafters.other_formats import write_files
from longdraft.benchmarks.drafters.papers import PAPERS, PROMPT, beside
from longdraft.benchmarks.drafters.prompts import KINDS, Asked, LeftOut, Reader, fitting, make_tasks
from longdraft.benchmarks.drafters.record import Record
from longdraft.benchmarks.drafters.suites import SUITES, Suite
from longdraft.infer.drafters.build import build_drafter
from longdraft.infer.sampling import SamplingParams
from longdraft.launch.console import note, read_text
from longdraft.launch.progress import Progress
from longdraft.launch.report import check_name, write_report
from longdraft.launch.runtime import DTYPES, Drafting, check_rows, heldout_rows, options_for, read_options, used_tokens
from longdraft.launch.shared_options import NEW_TOKENS, PROMPTS, TEXT_TOKENS, given_sampling
from longdraft.models.decoder import Decoder
from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.device import available_bytes, on_device
from longdraft.models.draft_folder import WEIGHTS, local_folder
from longdraft.models.footprint import size, weight_count
from longdraft.models.hf import build_decoder, load_tokenizer, load_transformers, read_target_config
from longdraft.models.target import Target

# Room for the words around a text whose task is more than to continue it.
ASKING = 256


def run_bench(args: argparse.Namespace) -> dict:
    """Run the bench that was asked for and return its result, as `bench` gives it.

    Raises ValueError for arguments that do not fit, and what `bench` raises.
    """
    if args.report is not None:
        check_name(args.report, "--report")
        if args.out is None:
            raise ValueError(f"--report: {args.report} is made of a record; give --out too")
    args.suite, suite = suite_of(args)
    take_paper(args, suite)
    args.dtype, args.prompt_tokens = args.dtype or "bf16", args.prompt_tokens or TEXT_TOKENS
    drafting = Drafting(args)
    settings = settings_of(drafting, suite)
    for temperature in settings.temperatures:
        settings.params(temperature)
    asked, left_out = ([], []) if suite is None else suite_questions(drafting, suite, settings)
    texts = texts_of(args) if suite is None else []
    record = Record(args.out, asked_for(drafting, settings, asked or texts))
    check_proof(args, record.proof)
    record.leave_out([question._asdict() for question in left_out])
    target, form = _open_target(drafting, asked, settings.new_tokens, record)
    if suite is None:
        asked = make_tasks(target, texts_for(target, args, texts), args.tasks)
    builders = {name: partial(build_drafter, name, **drafting.of(name)) for name in drafting.names if name != "plain"}
    device = target.model.embed_tokens.weight.device
    path, gguf_file = drafting.source
    theirs = load_transformers(path, settings.dtype, gguf_file).to(device) if args.transformers else None
    with Progress("bench") as watch, on_device(device):
        result = bench(target, builders, asked, replace(settings, proof=form), theirs, watch, record)
    if args.out is not None:
        _write_out(args, record)
    if args.paper is not None:
        paper = PAPERS[args.paper]
        compared = [name for name in builders if paper.drafter in name.split("+")]
        result["paper"] = beside(paper, record, compared, settings.temperatures, path)
    return result


def _write_out(args: argparse.Namespace, record: Record) -> None:
    """Write the record for other programs, and as a page or a picture."""
    folders = write_files(record, args.out)
    names = ", ".join(folder.name for folder in folders)
    note(f"Written to {args.out}: record.jsonl, and for other programs {names}")
    if args.report is not None:
        write_report([args.out], args.report, "--report")
        note(f"Written to {args.report}")


def _open_target(drafting: Drafting, asked: Sequence[Asked], new_tokens: int, record: Record) -> tuple[Target, str]:
    """Choose the form of the exactness proof and load the target as that proof first needs it.

    Returns the target and the form. Raises ValueError, before any weight is loaded, if they do not fit into memory.
    """
    args, device = drafting.args, drafting.device
    dtype, chosen = DTYPES[args.dtype], []
    # A proof that is in the record already need not be loaded for again.
    wanted = args.exactness if record.proof is None or args.dtype == "fp32" else "serving"
    if drafting.loader != "longdraft":
        form = wanted or "fp32"
        if form == "layerwise":
            raise ValueError(
                f"--exactness: layerwise is our own decoder's, and --loader is {drafting.loader}; give fp32 or serving"
            )
        return drafting.load(NAMES[first_dtype(form, dtype)], build_decoder), form
    longest = max((one.tokens for one in asked), default=args.prompt_tokens + ASKING)
    turns = max((len(one.question.turns) for one in asked), default=1)
    positions = max(turns * (longest + new_tokens), *(args.contexts or [0]))

    def build(config: DecoderConfig, *_: object) -> Decoder:
        held = min(positions, config.max_positions)
        room = Room(available_bytes(device), longest, held, _bytes_beside(drafting, config))
        chosen.append(form := choose_form(wanted, config, dtype, room))
        first, free = first_dtype(form, dtype), "" if room.free is None else f", and {size(room.free)} is free"
        takes = size(needed_bytes(form, config, dtype, room))
        note(f"Loading in {NAMES[first]}, to show exactness in {describe_form(form, dtype)}: takes {takes}{free}")
        return build_decoder(config, first, device)

    return drafting.load(None, build), chosen[0]


def _bytes_beside(drafting: Drafting, config: DecoderConfig) -> int:
    """An upper bound of the bytes on the device besides target and cache: drafts and a small model in fp32, and
    transformers' own copy of the target."""
    args = drafting.args
    total = sum(2 * (local_folder(draft) / WEIGHTS).stat().st_size for draft in args.draft)
    for name, value in drafting.options.items():
        if name.split(".")[-1] == "small":
            total += 4 * weight_count(read_target_config(str(value)))
    return total + (DTYPES[args.dtype].itemsize * weight_count(config) if args.transformers else 0)


def suite_of(args: argparse.Namespace) -> tuple[str | None, Suite | None]:
    """The suite that was named, or the paper's, with --prompt-tokens applied; (None, None) without one."""
    if args.paper is not None:
        name, suite = PAPERS[args.paper].suite(args.suite)
    elif args.suite is not None:
        name, suite = args.suite, SUITES[args.suite]
    else:
        return None, None
    if args.prompt_tokens is None:
        return name, suite
    if suite.first_tokens is None:
        raise ValueError(f"--prompt-tokens: {args.prompt_tokens}, but {name} asks its prompts whole; leave it out")
    return name, replace(suite, first_tokens=args.prompt_tokens, above=args.prompt_tokens)


def take_paper(args: argparse.Namespace, suite: Suite | None) -> None:
    """Fill arguments that were not given from the --paper."""
    if args.paper is None or suite is None:
        return
    paper = PAPERS[args.paper]
    args.drafter, args.dtype = args.drafter or [paper.drafter], args.dtype or paper.dtype
    args.nodes = args.nodes or "all"
    given = {key.split(".")[-1] for key in read_options(args.option)}
    options = dict(paper.options) | ({"gamma": 2} if "small" in given and paper.drafter == "triforce" else {})
    for name in args.drafter:
        if paper.drafter in name.split("+"):
            args.option = args.option + [
                f"{paper.drafter}.{key}={suite.first_tokens if value == PROMPT else value}"
                for key, value in options.items()
                if key not in given
            ]
            break


def settings_of(drafting: Drafting, suite: Suite | None) -> BenchSettings:
    """What is measured and how. Values that were not given come from the paper or the suite."""
    args, given = drafting.args, given_sampling(drafting.args)
    if args.noise and drafting.names == ["plain"]:
        raise ValueError("--noise: it is about drafters' rankings, and plain decoding has none; name a --drafter")
    if suite is None and args.only:
        raise ValueError(f"--only: {', '.join(args.only)}, but no --suite is given; give one or leave it out")
    if args.paper is not None:
        published = PAPERS[args.paper].sampling(drafting.source[0])
    else:
        published = {} if suite is None else suite.sampling
    sampling = {**published, **given}
    temperature = sampling.pop("temperature", 0.0)
    ignore_eos = sampling.pop("ignore_eos", suite is None or suite.ignore_eos)
    temperatures = (temperature,) if args.temperature is None else tuple(args.temperature)
    new_tokens = NEW_TOKENS if suite is None else suite.new_tokens
    highest = max(temperatures)
    drafting.check_sampling(SamplingParams(**{**given, "temperature": highest}))
    if args.transformers and any("penalty" in name or "banned" in name for name in sampling):
        raise ValueError("--transformers: it decodes without penalties and bans; leave one or the other out")
    return BenchSettings(
        new_tokens=new_tokens if args.new_tokens is None else args.new_tokens,
        dtype=DTYPES[args.dtype],
        temperatures=temperatures,
        seed=args.seed,
        nodes=drafting.nodes,
        sampling=sampling,
        ignore_eos=ignore_eos,
        passes=suite is None or args.contexts is not None,
        contexts=None if args.contexts is None else tuple(args.contexts),
        noise=args.noise,
        # The papers' programs rank without noise.
        noise_in_ranking=not args.no_noise and (args.paper is None or highest == 0),
    )


def suite_questions(drafting: Drafting, suite: Suite, settings: BenchSettings) -> tuple[list[Asked], list[LeftOut]]:
    """A suite's questions that the target has room for, and those left out, which are listed. Loads no weights."""
    args, source = drafting.args, drafting.source
    if args.data is None or args.text_file is not None or args.tasks != ["continue"]:
        raise ValueError(f"--suite: {args.suite} reads its prompts from --data; leave out --text-file and --tasks")
    questions = suite.questions(args.data, args.only)
    if args.prompts is not None:
        if not 1 <= args.prompts <= len(questions):
            raise ValueError(f"--prompts: {args.prompts} must lie in 1..{len(questions)}, the suite's questions there")
        questions = [questions[i * len(questions) // args.prompts] for i in range(args.prompts)]
    room = suite.room(read_target_config(*source, drafting.max_positions).max_positions, settings.new_tokens)
    asked, left_out = fitting(Reader(Path(source[0]).name, load_tokenizer(*source)), questions, room)
    for why in dict.fromkeys(one.why for one in left_out):
        named = [f"{one.id} ({one.tokens} tokens)" for one in left_out if one.why == why]
        note(f"{len(named)} of {len(questions)} questions are left out, {why}: {', '.join(named)}")
    if not asked:
        raise ValueError(
            f"--suite: none of {len(questions)} questions fits ({left_out[0].why}); ask for fewer --new-tokens than "
            f"{settings.new_tokens} or take a target with more positions"
        )
    return asked, left_out


def texts_of(args: argparse.Namespace) -> list[list[int]] | dict[Path, str]:
    """The prompts' texts: the tokens of held-out rows, or each file's content."""
    if unknown := sorted(set(args.tasks) - set(KINDS)):
        raise ValueError(f"--tasks: {', '.join(unknown)} unknown; known: {', '.join(KINDS)}")
    if args.prompt_tokens < 2:
        raise ValueError(f"--prompt-tokens: {args.prompt_tokens}; a text has at least 2")
    if args.prompts is not None and args.prompts < 1:
        raise ValueError(f"--prompts: {args.prompts}; measure at least 1")
    if args.text_file is not None and args.prompts is not None:
        raise ValueError(f"--prompts: {args.prompts} is for --data; every file of --text-file is one prompt")
    count = (PROMPTS if args.prompts is None else args.prompts) if args.text_file is None else len(args.text_file)
    if count < len(args.tasks):
        raise ValueError(f"--tasks: {len(args.tasks)} of them take turns, but there are {count} prompts; give more")
    if args.text_file is None:
        return _heldout_prompts(args.data, count, args.prompt_tokens)
    if len(set(args.text_file)) < len(args.text_file):
        raise ValueError("--text-file: a file is named twice; name each once")
    return {file: read_text(file, "--text-file") for file in args.text_file}


def _heldout_prompts(data: str, count: int, length: int) -> list[list[int]]:
    """The first `length` tokens of `count` held-out rows, evenly spaced among those long enough."""
    rows = heldout_rows(data)
    long = [i for i in range(len(rows)) if rows[i]["borders"][-1] >= length]
    if count > len(long):
        raise ValueError(
            f"{rows.folder} has {len(long)} rows of {length} tokens or more: --prompts {count} must lie in "
            f"1..{len(long)} and --prompt-tokens {length} in 2..{rows.manifest['seq_len']}"
        )
    return [used_tokens(rows[long[i * len(long) // count]])[:length] for i in range(count)]


def texts_for(target: Target, args: argparse.Namespace, texts: list[list[int]] | dict[Path, str]) -> list[list[int]]:
    """The texts of `texts_of` as this target's tokens."""
    if isinstance(texts, list):
        check_rows(heldout_rows(args.data), target)
        return texts
    if target.tokenizer is None:
        raise ValueError("--text-file: this target has no tokenizer to read text with; use --data")
    prompts = [target.tokenizer(text).input_ids[: args.prompt_tokens] for text in texts.values()]
    for file, tokens in zip(texts, prompts, strict=True):
        if len(tokens) < 2:
            raise ValueError(f"--text-file: {file} has {len(tokens)} tokens; give a text of at least 2")
    return prompts


def asked_for(drafting: Drafting, settings: BenchSettings, prompts: object) -> dict[str, Any]:
    """All that the answers depend on. A record continues only where this is the same."""
    args, source, options = drafting.args, drafting.source, drafting.options
    return {
        "suite": args.suite,
        "only": args.only,
        "tasks": None if args.suite else list(args.tasks),
        "prompt_tokens": None if args.suite else args.prompt_tokens,
        "questions": digest(repr(prompts).encode()),
        "target": Path(source[0]).name,
        "gguf_file": source[1],
        "loader": drafting.loader,
        "checkpoint": checkpoint_digest(*source),
        "draft": ",".join(map(draft_digest, args.draft)) or None,
        "drafters": {
            name: {key: str(value) for key, value in options_for(name, options).items()} for name in drafting.names
        },
        "small": [checkpoint_digest(str(value)) for key, value in options.items() if key.split(".")[-1] == "small"],
        "nodes": settings.nodes,
        "dtype": args.dtype,
        "temperatures": list(settings.temperatures),
        "seed": settings.seed,
        "new_tokens": settings.new_tokens,
        "sampling": dict(settings.sampling),
        "ignore_eos": settings.ignore_eos,
        "noise_in_ranking": settings.noise_in_ranking,
        "exactness_off": args.exactness == "off",
        "transformers": args.transformers,
    }


def check_proof(args: argparse.Namespace, proof: Mapping[str, Any] | None) -> None:
    """Raise ValueError if a stronger form of exactness is asked for than the record was begun with."""
    held = (proof or {}).get("proof", {}).get("form")
    if held in FORMS and args.exactness is not None and FORMS.index(held) > FORMS.index(args.exactness):
        raise ValueError(
            f"--exactness: {args.exactness}, but {args.out} was begun with the proof {held}; leave it out, or give "
            "another --out"
        )
