"""What a bench is asked for: arguments to a suite, settings, questions or texts, all checked before the target is
loaded; and the bench itself.

Not here: the arguments themselves (bench.py), what they share with other commands (runtime.py), what is measured
(benchmarks/drafters.py).
"""

import argparse
import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from longdraft.benchmarks.answers import Record
from longdraft.benchmarks.drafters import BenchSettings, bench
from longdraft.benchmarks.exchange import write_files
from longdraft.benchmarks.papers import PAPERS, PROMPT, beside
from longdraft.benchmarks.proof import FORMS, NAMES, Room, choose_form, describe_form, first_dtype, needed_bytes
from longdraft.benchmarks.questions import KINDS, Asked, LeftOut, Reader, fitting, make_tasks
from longdraft.benchmarks.suites import SUITES, Suite
from longdraft.infer.drafters.build import build_drafter
from longdraft.infer.memory import available_bytes, size, weight_count
from longdraft.infer.sampling import SamplingParams
from longdraft.launch.console import note, read_text
from longdraft.launch.progress import Progress
from longdraft.launch.report import check_name, write_report
from longdraft.launch.runtime import DTYPES, Drafting, check_rows, heldout_rows, options_for, read_options, used_tokens
from longdraft.launch.shared_options import NEW_TOKENS, PROMPTS, TEXT_TOKENS, given_sampling
from longdraft.models.decoder import Decoder
from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.device import on_device
from longdraft.models.draft_files import CONFIG, WEIGHTS
from longdraft.models.draft_folder import local_folder
from longdraft.models.files import file_digest
from longdraft.models.hf import build_decoder, load_tokenizer, load_transformers, read_target_config
from longdraft.models.target import Target

# Tokens around a text where the task is more than to continue it.
ASKING = 256
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin", "**/*.gguf")
SHOWN = 16  # digits of a digest
# Of each of them so many blocks of so many bytes tell two trainings of one network apart.
SAMPLES, SAMPLE_BYTES = 64, 4096


def run_bench(args: argparse.Namespace) -> dict:
    """Everything that is measured, as `bench` gives it. Raises: ValueError, and what `bench` raises."""
    # What can be wrong is found before the model is loaded.
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
    asked, left_out = suite_questions(drafting, suite, settings) if suite else ([], [])
    given = [] if args.suite else texts_of(args)
    record = Record(args.out, asked_for(drafting, settings, asked or given))
    check_proof(args, record.proof)
    record.leave_out([one._asdict() for one in left_out])
    longest = max((one.tokens for one in asked), default=args.prompt_tokens + ASKING)
    turns = max((len(one.question.turns) for one in asked), default=1)
    # What is proved already need not be loaded for it again.
    wanted = args.exactness if record.proof is None or args.dtype == "fp32" else "serving"
    positions = turns * (longest + settings.new_tokens)
    target, form = _open_target(drafting, wanted, longest, positions)
    settings = replace(settings, proof=form)
    if not args.suite:
        asked = make_tasks(target, texts_for(target, args, given), args.tasks)
    builders = {name: partial(build_drafter, name, **drafting.of(name)) for name in drafting.names if name != "plain"}
    place = target.model.embed_tokens.weight.device
    path, gguf_file = drafting.source
    theirs = load_transformers(path, settings.dtype, gguf_file).to(place) if args.transformers else None
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
        result["paper"] = beside(paper, record, own, settings.temperatures, path)
    return result


def _open_target(drafting: Drafting, wanted: str | None, longest: int, positions: int) -> tuple[Target, str]:
    """The target as the proof begins with it, and the proof's form, which is chosen before a weight is loaded.

    wanted: the form asked for. longest: tokens of the longest prompt. positions: of the longest text.
    Raises ValueError where it does not fit.
    """
    args, device = drafting.args, drafting.device
    dtype, chosen = DTYPES[args.dtype], []
    if drafting.loader != "longdraft":
        form = wanted or "fp32"
        if form == "layerwise":
            raise ValueError(
                f"--exactness: layerwise is our own decoder's, and --loader is {drafting.loader}; give fp32 or serving"
            )
        return drafting.load(NAMES[first_dtype(form, dtype)], build_decoder), form
    positions = max(positions, *(args.contexts or [0]))

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
    """Bytes that lie on the device beside target and cache, at most: the draft and a small model in fp32, and
    transformers' own copy of the target."""
    args = drafting.args
    found = sum(2 * (local_folder(draft) / WEIGHTS).stat().st_size for draft in args.draft)
    for name, value in drafting.options.items():
        if name.split(".")[-1] == "small":
            found += 4 * weight_count(read_target_config(str(value)))
    return found + (DTYPES[args.dtype].itemsize * weight_count(config) if args.transformers else 0)


def suite_of(args: argparse.Namespace) -> tuple[str | None, Suite | None]:
    """The suite that was named, or the paper's, with prompts as long as was asked for."""
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
    """What the paper says goes into the arguments, where nothing else was said."""
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
    """What is measured and how, with what suite and paper say where nothing else is asked for."""
    args, names, given = drafting.args, drafting.names, given_sampling(drafting.args)
    if args.noise and names == ["plain"]:
        raise ValueError("--noise: that of the drafters' ranking, and plain decoding has none; name a --drafter")
    if suite is None and args.only:
        raise ValueError(f"--only: {', '.join(args.only)} of a --suite, which is not given")
    if args.paper is not None:
        published = PAPERS[args.paper].sampling(drafting.source[0])
    else:
        published = {} if suite is None else suite.sampling
    sampling = {**published, **given}
    warmth = sampling.pop("temperature", 0.0)
    ignore_eos = sampling.pop("ignore_eos", suite is None or suite.ignore_eos)
    temperatures = (warmth,) if args.temperature is None else tuple(args.temperature)
    new_tokens = NEW_TOKENS if suite is None else suite.new_tokens
    warmest = max(temperatures)
    drafting.check_sampling(SamplingParams(**{**given, "temperature": warmest}))
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
        # The papers' programs know no noise.
        noise_in_ranking=not args.no_noise and (args.paper is None or warmest == 0),
    )


def suite_questions(drafting: Drafting, suite: Suite, settings: BenchSettings) -> tuple[list[Asked], list[LeftOut]]:
    """A suite's questions that the target has room for, and the others, which are named. Needs no weights."""
    args, source = drafting.args, drafting.source
    if args.data is None or args.text_file is not None or args.tasks != ["continue"]:
        raise ValueError(f"--suite: {args.suite} is asked of --data alone, which holds its files; leave out the rest")
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
            f"--suite: none of {len(questions)} questions has room ({left_out[0].why}); ask for fewer --new-tokens "
            f"than {settings.new_tokens} or take a target of more positions"
        )
    return asked, left_out


def texts_of(args: argparse.Namespace) -> list[list[int]] | dict[Path, str]:
    """The prompts' texts: as tokens, or what stands in each file. Raises ValueError for options that do not fit."""
    if unknown := sorted(set(args.tasks) - set(KINDS)):
        raise ValueError(f"--tasks: {', '.join(unknown)} unknown; known: {', '.join(KINDS)}")
    if args.prompt_tokens < 2:
        raise ValueError(f"--prompt-tokens: {args.prompt_tokens}; a text has at least 2")
    if args.prompts is not None and args.prompts < 1:
        raise ValueError(f"--prompts: {args.prompts}; measure at least 1")
    if args.text_file is not None and args.prompts is not None:
        raise ValueError(f"--prompts: {args.prompts} rows of --data; every file of --text-file is one prompt")
    count = (PROMPTS if args.prompts is None else args.prompts) if args.text_file is None else len(args.text_file)
    if count < len(args.tasks):
        raise ValueError(f"--tasks: {len(args.tasks)} of them take turns, but there are {count} prompts; give more")
    if args.text_file is None:
        return _heldout_prompts(args.data, count, args.prompt_tokens)
    if len(set(args.text_file)) < len(args.text_file):
        raise ValueError("--text-file: a file is named twice; name each once")
    return {file: read_text(file, "--text-file") for file in args.text_file}


def _heldout_prompts(data: str, count: int, length: int) -> list[list[int]]:
    """The first `length` tokens of `count` held-out rows that have as many, evenly spaced."""
    rows = heldout_rows(data)
    long = [i for i in range(len(rows)) if rows[i]["borders"][-1] >= length]
    if not (1 <= count <= len(long) and length >= 2):
        raise ValueError(
            f"{rows.folder} has {len(long)} rows of {length} tokens or more: --prompts {count} must lie in "
            f"1..{len(long)} and --prompt-tokens {length} in 2..{rows.manifest['seq_len']}"
        )
    return [used_tokens(rows[long[i * len(long) // count]])[:length] for i in range(count)]


def texts_for(target: Target, args: argparse.Namespace, given: list[list[int]] | dict[Path, str]) -> list[list[int]]:
    """What `texts_of` gave, as tokens of this target."""
    if isinstance(given, list):
        check_rows(heldout_rows(args.data), target)
        return given
    if target.tokenizer is None:
        raise ValueError("--text-file: this target has no tokenizer to read text with; use --data")
    texts = [target.tokenizer(text).input_ids[: args.prompt_tokens] for text in given.values()]
    for file, text in zip(given, texts, strict=True):
        if len(text) < 2:
            raise ValueError(f"--text-file: {file} has {len(text)} tokens; give a text of at least 2")
    return texts


def asked_for(drafting: Drafting, settings: BenchSettings, prompts: object) -> dict[str, Any]:
    """What answers depend on, by which a record knows its own; drafts and questions by their hash."""
    args, source, options = drafting.args, drafting.source, drafting.options
    return {
        "suite": args.suite,
        "only": args.only,
        "tasks": None if args.suite else list(args.tasks),
        "prompt_tokens": None if args.suite else args.prompt_tokens,
        "questions": _digest(repr(prompts).encode()),
        "target": Path(source[0]).name,
        "gguf_file": source[1],
        "loader": drafting.loader,
        "checkpoint": checkpoint(*source),
        "draft": ",".join(map(_draft_digest, args.draft)) or None,
        "drafters": {
            name: {key: str(value) for key, value in options_for(name, options).items()} for name in drafting.names
        },
        "small": [checkpoint(str(value), None) for key, value in options.items() if key.split(".")[-1] == "small"],
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


def checkpoint(path: str, gguf_file: str | None) -> str | None:
    """What tells a local target from another one of its name: a digest of its config.json, and of the names, the sizes
    and some bytes of its files of weights. None for a target that is no folder or file here."""
    place = Path(path).expanduser()
    if not place.exists():
        return None
    files = [place] if place.is_file() else sorted(file for kind in WEIGHT_FILES for file in place.glob(kind))
    files = files if gguf_file is None else [place / gguf_file]
    config = place / CONFIG
    known = [_digest(config.read_bytes()) if config.is_file() else None]
    return _digest(repr(known + [(file.name, *_sample(file)) for file in files if file.is_file()]).encode())


def _draft_digest(draft: str) -> str:
    """Of a draft's weights and its config.json, which holds the tree."""
    folder = local_folder(draft)
    return _digest((file_digest(folder / WEIGHTS) + file_digest(folder / CONFIG)).encode())


def _sample(file: Path) -> tuple[int, str]:
    """A file's size, and the digest of blocks that are evenly spaced in it."""
    size, blocks = file.stat().st_size, []
    with file.open("rb") as opened:
        for i in range(SAMPLES):
            opened.seek(i * max(0, size - SAMPLE_BYTES) // (SAMPLES - 1))
            blocks.append(opened.read(SAMPLE_BYTES))
    return size, _digest(b"".join(blocks))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:SHOWN]


def check_proof(args: argparse.Namespace, proof: Mapping[str, Any] | None) -> None:
    """Raise ValueError for a form of exactness that is asked for where the record holds a weaker proof."""
    held = (proof or {}).get("proof", {}).get("form")
    if held in FORMS and args.exactness is not None and FORMS.index(held) > FORMS.index(args.exactness):
        raise ValueError(
            f"--exactness: {args.exactness}, but {args.out} was begun with the proof {held}; leave it out, or give "
            "another --out"
        )
