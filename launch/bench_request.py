"""What a bench is asked for: arguments to a suite, settings, questions or texts, checked before a model is loaded.

Not here: the arguments themselves (bench.py), what they share with other commands (runtime.py).
"""

import argparse
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from longdraft.benchmarks.drafters import BenchSettings
from longdraft.benchmarks.papers import PAPERS, PROMPT
from longdraft.benchmarks.proof import FORMS
from longdraft.benchmarks.questions import Asked, LeftOut, Reader, fitting
from longdraft.benchmarks.suites import SUITES, Suite
from longdraft.benchmarks.tasks import KINDS
from longdraft.infer.sampling import SamplingParams
from longdraft.launch.console import note
from longdraft.launch.runtime import (
    DTYPES,
    check_filters,
    heldout_prompts,
    max_positions,
    node_budget,
    options_for,
    read_options,
    read_text,
    target_loader,
)
from longdraft.launch.shared_options import NEW_TOKENS, PROMPTS, given_sampling
from longdraft.models.draft_files import CONFIG, WEIGHTS
from longdraft.models.draft_folder import local_folder
from longdraft.models.files import file_digest
from longdraft.models.hf import load_tokenizer, read_target_config

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin", "**/*.gguf")
SHOWN = 16  # digits of a digest
# Of each of them so many blocks of so many bytes tell two trainings of one network apart.
SAMPLES, SAMPLE_BYTES = 64, 4096


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


def settings_of(args: argparse.Namespace, names: Sequence[str], suite: Suite | None, target: str) -> BenchSettings:
    """What is measured and how, with what suite and paper say where nothing else is asked for."""
    if args.noise and list(names) == ["plain"]:
        raise ValueError("--noise: that of the drafters' ranking, and plain decoding has none; name a --drafter")
    found = BenchSettings(
        new_tokens=NEW_TOKENS if args.new_tokens is None else args.new_tokens,
        dtype=DTYPES[args.dtype],
        temperatures=(0.0,) if args.temperature is None else tuple(args.temperature),
        seed=args.seed,
        nodes=node_budget(args.nodes, names),
        contexts=None if args.contexts is None else tuple(args.contexts),
        noise=args.noise,
        noise_in_ranking=not args.no_noise,
    )
    given = given_sampling(args)
    if suite is None and args.only:
        raise ValueError(f"--only: {', '.join(args.only)} of a --suite, which is not given")
    if suite is not None:
        found = replace(
            found,
            new_tokens=suite.new_tokens if args.new_tokens is None else args.new_tokens,
            ignore_eos=suite.ignore_eos,
            passes=args.contexts is not None,
        )
    published = {} if suite is None else suite.sampling
    if args.paper is not None:
        published = PAPERS[args.paper].sampling(target)
    sampling = {**published, **given}
    warmth, ignore_eos = sampling.pop("temperature", 0.0), sampling.pop("ignore_eos", found.ignore_eos)
    temperatures = (warmth,) if args.temperature is None else found.temperatures
    found = replace(found, temperatures=temperatures, sampling=sampling, ignore_eos=ignore_eos)
    if args.paper is not None and max(temperatures) > 0:
        found = replace(found, noise_in_ranking=False)  # their programs know no noise
    _check_sampling(args, found, given, names)
    return found


def _check_sampling(
    args: argparse.Namespace, settings: BenchSettings, given: Mapping[str, Any], names: Sequence[str]
) -> None:
    """Raise ValueError for an option of sampling that nothing looks at; given: what was asked for on the line."""
    warmest = max(settings.temperatures)
    check_filters(SamplingParams(**{**given, "temperature": warmest}))
    if args.no_noise and (warmest == 0 or list(names) == ["plain"]):
        raise ValueError("--no-noise: of drafters that rank at a --temperature above 0; give both or leave it out")
    if args.transformers and any("penalty" in name or "banned" in name for name in settings.sampling):
        raise ValueError("--transformers: it decodes without penalties and bans; leave one or the other out")


def suite_questions(
    args: argparse.Namespace, suite: Suite, source: tuple[str, str | None], settings: BenchSettings
) -> tuple[list[Asked], list[LeftOut]]:
    """A suite's questions that the target has room for, and the others, which are named. Needs no weights."""
    if args.data is None or args.text_file is not None or args.tasks != ["continue"]:
        raise ValueError(f"--suite: {args.suite} is asked of --data alone, which holds its files; leave out the rest")
    questions = suite.questions(args.data, args.only)
    if args.prompts is not None:
        if not 1 <= args.prompts <= len(questions):
            raise ValueError(f"--prompts: {args.prompts} must lie in 1..{len(questions)}, the suite's questions there")
        questions = [questions[i * len(questions) // args.prompts] for i in range(args.prompts)]
    room = suite.room(read_target_config(*source, max_positions(args.draft)).max_positions, settings.new_tokens)
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


def texts_of(args: argparse.Namespace, names: Sequence[str]) -> list[list[int]] | dict[Path, str]:
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
        return heldout_prompts(args.data, count, args.prompt_tokens)
    if len(set(args.text_file)) < len(args.text_file):
        raise ValueError("--text-file: a file is named twice; name each once")
    return {file: read_text(file, "--text-file") for file in args.text_file}


def asked_for(
    args: argparse.Namespace,
    source: tuple[str, str | None],
    names: Sequence[str],
    options: Mapping[str, Any],
    settings: BenchSettings,
    prompts: object,
) -> dict[str, Any]:
    """What answers depend on, by which a record knows its own; drafts and questions by their hash."""

    return {
        "suite": args.suite,
        "only": args.only,
        "tasks": None if args.suite else list(args.tasks),
        "prompt_tokens": None if args.suite else args.prompt_tokens,
        "questions": _digest(repr(prompts).encode()),
        "target": Path(source[0]).name,
        "gguf_file": source[1],
        "loader": target_loader(args.loader, args.draft),
        "checkpoint": checkpoint(*source),
        "draft": ",".join(map(_draft_digest, args.draft)) or None,
        "drafters": {name: {key: str(value) for key, value in options_for(name, options).items()} for name in names},
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
