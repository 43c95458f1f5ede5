"""The arguments of the commands. Nothing here imports torch, so that --help and a wrong argument need not wait for it.

`longdraft prepare` and `prepare regenerate` declare their own, the latter with what is shared here.
"""

import argparse
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from longdraft.infer.sampling import PRESETS, SamplingParams, preset
from longdraft.launch.console import flag

# Names that are defined in files which import torch.
DTYPES = ("fp32", "bf16", "fp16")
LOADERS = ("longdraft", "transformers")
FORMS = ("fp32", "serving", "off")
SUITES = ("longbench", "aime24", "pg19", "spec-bench", "speed-bench", "mrcr", "mt-bench")
PAPERS = ("longspec", "tokenswift", "triforce", "token-recycling")
# Defaults of `longdraft bench`.
PROMPTS, TEXT_TOKENS, NEW_TOKENS = 4, 256, 128
API_KEY = "LONGDRAFT_API_KEY"  # the environment variable of `longdraft serve`
DRAFTING = "drafting (affects speed, never the text)"
TARGET = "a folder, a hub name, a .gguf file or smollm2-135m (default: the draft's own target)"
MANY: dict[str, Any] = {"nargs": "+", "action": "extend"}
# Fields of SamplingParams, which has their types and limits, and their help.
SAMPLING = {
    "top_k": "sample from the k most probable tokens; 0 is off",
    "top_p": "sample from the most probable tokens that together reach this probability; 1 is off",
    "min_p": "drop tokens less probable than this fraction of the most probable one; 0 is off",
    "eta_cutoff": "cutoff of eta sampling; 0 is off",
    "min_tokens_to_keep": "the most probable tokens that --min-p and --eta-cutoff always keep (default: 1)",
    "contextual_penalty": "penalise tokens that occur in the last --contextual-window tokens; 1 is off",
    "contextual_window": "tokens that --contextual-penalty looks back over (default: 1024)",
    "repetition_penalty": "penalise tokens that occur in the prompt or the text; 1 is off",
    "presence_penalty": "subtract this from the logit of every generated token; 0 is off",
    "frequency_penalty": "subtract this from a token's logit for each time it was generated; 0 is off",
    "banned_token_ids": "never choose these tokens",
    "stop_strings": "end the text before one of these strings; $'\\n' is a new line",
    "stop_token_ids": "end the text after one of these tokens",
    "ignore_eos": "go on after the target's end tokens",
}
OF_ONE_TEXT = {
    "max_new_tokens": "default: 256",
    "temperature": "0, the default, is greedy",
    "seed": "the same seed gives the same text with any drafter (default: a random one, which is shown)",
}


def at_least(least: int) -> Callable[[str], int]:
    """The type of an option that takes a whole number of at least this."""

    def whole_number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text}; give a whole number of at least {least}")
        return int(text)

    return whole_number


def node_budget(text: str) -> str | int:
    """The type of --nodes."""
    if text in ("auto", "all"):
        return text
    return at_least(1)(text)


def add_loading(add: Callable[..., Any], dtype: str | None = "bf16", dtype_help: str = "default: bf16") -> None:
    """Add the target and how it is loaded."""
    add("--target", help=TARGET)
    add("--loader", choices=LOADERS, help="whose model classes compute the target (default: as its draft was trained)")
    add("--dtype", choices=DTYPES, default=dtype, help=dtype_help)
    add("--device", help="default: cuda if there is a GPU, else cpu")


def add_model(parser: ArgumentParser) -> Callable[..., Any]:
    """Add the options of an engine's model. Returns the `add_argument` of their group, for further options."""
    add = parser.add_argument_group("model").add_argument
    add_loading(add)
    add("--max-length", type=int, help="maximum tokens of prompt and text (default: the target's limit)")
    add("--prefill-chunk", type=int, help="prompt tokens per prefill pass (default: 512, or 2048 on a GPU)")
    return add


def add_drafters(add: Callable[..., Any], several: bool) -> None:
    """Add the drafters and their options. `several`: they can be compared."""
    number: dict[str, Any] = MANY if several else {"nargs": 1}
    drafters = "one or more drafters" if several else "a drafter"
    help = f"{drafters}; a+b combines several in one tree (default: the draft's own, or plain without a draft)"
    add("--drafter", help=help, **number)
    drafts = "; for several drafters, give one for each method" if several else ""
    help = f"folder written by `longdraft export`, its hub name, or a draft that comes with longdraft{drafts}"
    add("--draft", default=[], help=help, **number)
    help = "an option of the drafters; DRAFTER.KEY=VALUE for one of several"
    add("--option", default=[], metavar="KEY=VALUE", help=help, **MANY)
    help = "drafted nodes to verify in a step: auto (default: as many as pay off), all, or a maximum"
    add("--nodes", type=node_budget, help=help)


def add_fields(add: Callable[..., Any], helps: Mapping[str, str], **defaults: float) -> None:
    """Add an option for each of these fields of SamplingParams, which has their kinds and limits."""
    for name, help in helps.items():
        unset = getattr(SamplingParams(), name)
        kind, metavar = (float, "X") if isinstance(unset, float) else (int, "N")
        options: dict[str, Any] = {"type": kind, "metavar": metavar}
        if unset is False:
            options = {"action": argparse.BooleanOptionalAction}
        elif unset == ():
            options = MANY | ({"metavar": "TEXT"} if name == "stop_strings" else options)
        add(flag(name), default=defaults.get(name), help=help, **options)


def add_sampling(add: Callable[..., Any], helps: Mapping[str, str]) -> None:
    """Add a preset, and the options of these fields of SamplingParams."""
    help = "sampling as published for a model; options given with it take precedence"
    add("--preset", choices=tuple(PRESETS), help=help)
    add_fields(add, helps)


def given_sampling(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """The keywords of SamplingParams that were given, on top of the preset's."""
    values = {} if args.preset is None else dict(preset(args.preset))
    return values | {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def generate() -> ArgumentParser:
    parser = ArgumentParser(prog="longdraft generate", description="Decode a prompt with any drafter.")
    add_model(parser)
    group = parser.add_argument_group("prompt")
    add = group.add_mutually_exclusive_group().add_argument
    add("--prompt", help="the text (default, or -: read it from standard input)")
    add("--prompt-file", type=Path, help="a text file")
    add("--heldout", type=Path, metavar="DATA", help="take a prepared folder's first held-out row as the prompt")
    add = group.add_argument
    add("--prompt-tokens", type=at_least(1), metavar="N", help="use only the first N tokens of the prompt")
    add("--chat", action="store_true", help="put the prompt into the target's chat template, as a user's message")
    add("--system", help="the system message of a chat (implies --chat)")
    add_drafters(parser.add_argument_group(DRAFTING).add_argument, several=True)
    add = parser.add_argument_group("sampling").add_argument
    add_sampling(add, OF_ONE_TEXT | SAMPLING)
    add = parser.add_argument_group("output").add_argument
    help = "print one JSON object instead of the text: text, tokens, finish reason, statistics"
    add("--json", action="store_true", help=help)
    return parser


def serve() -> ArgumentParser:
    description = f"Serve OpenAI's interface. The environment variable {API_KEY} sets a key."
    parser = ArgumentParser(prog="longdraft serve", description=description)
    add = add_model(parser)
    add("--slots", type=at_least(1), default=8, help="requests decoded together (default: 8)")
    add_drafters(parser.add_argument_group(DRAFTING).add_argument, several=False)
    add = parser.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", help="address to listen at (default: this machine only)")
    add("--port", type=at_least(0), default=8000, help="default: 8000; 0 takes a free one, which is shown")
    add("--model-name", help="the model's name in requests (default: the target's name)")
    help = "requests that may wait for a slot (default: 256); more are answered with 429"
    add("--queue", type=at_least(0), default=256, help=help)
    return parser


def bench() -> ArgumentParser:
    description = "Measure drafters against plain decoding: exactness and speed."
    parser = ArgumentParser(prog="longdraft bench", description=description)
    add = parser.add_argument_group("model").add_argument
    add_loading(add, dtype=None, dtype_help="dtype of the timed decoding (default: bf16, or the --paper's)")
    add_drafters(parser.add_argument_group(DRAFTING).add_argument, several=True)
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
    help = f"with --data: most prompts, evenly spaced (default: {PROMPTS}, or all of a suite)"
    add("--prompts", type=at_least(1), metavar="N", help=help)
    help = f"tokens of a text (default: {TEXT_TOKENS}, or the suite's)"
    add("--prompt-tokens", type=at_least(2), metavar="N", help=help)
    help = f"maximum tokens of an answer (default: {NEW_TOKENS}, or the suite's)"
    add("--new-tokens", type=at_least(1), metavar="N", help=help)
    add = parser.add_argument_group("sampling").add_argument
    add("--temperature", nargs="+", type=float, help="one or more; 0 is greedy (default: 0, or the suite's)")
    add("--seed", type=int, default=0, help="default: 0")
    add_sampling(add, SAMPLING)
    add = parser.add_argument_group("measurements").add_argument
    add(
        "--exactness",
        choices=FORMS,
        default=FORMS[0],
        help="how exactness is shown: fp32, computed one layer at a time (default); serving, in --dtype, counting "
        "tokens that differ at near-ties; or off, and the result says so",
    )
    add("--transformers", action="store_true", help="also time transformers' greedy generate on the same prompts")
    add = parser.add_argument_group("output").add_argument
    help = "keep a record of every answer here; a run that was stopped continues from it"
    add("--out", type=Path, metavar="FOLDER", help=help)
    help = "with --out: also show the record as an HTML page"
    add("--report", type=Path, metavar="FILE", help=help)
    return parser


def report() -> ArgumentParser:
    parser = ArgumentParser(prog="longdraft report", description="Show the records of benches side by side.")
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folders that `longdraft bench --out` wrote")
    add("--out", type=Path, default=Path("report.html"), help="the HTML page (default: report.html)")
    return parser


def export() -> ArgumentParser:
    parser = ArgumentParser(prog="longdraft export", description="Make a draft folder of a run's weights.")
    add = parser.add_argument
    add("run_dir", help="the run's folder (train.run_dir)")
    add("--out", help="folder to write (default: RUN_DIR/draft)")
    help = "let the draft propose only this many tokens, the most frequent ones of the run's training data"
    add("--draft-vocab-size", type=int, help=help)
    help = "take the weights that decoded best during training (default: the newest)"
    add("--best", action="store_true", help=help)
    help = "also write a model card and generate.py for transformers, for this repository of the hub if it is named"
    add("--card", nargs="?", const="", metavar="OWNER/NAME", help=help)
    return parser


def convert() -> ArgumentParser:
    description = "Make a draft folder of a published draft: LongSpec's blocks, TokenSwift's merged checkpoints."
    parser = ArgumentParser(prog="longdraft convert", description=description)
    add = parser.add_argument
    add("source", help="the draft's file of weights, its folder as it was published, or its hub name")
    add("--out", required=True, help="draft folder to write")
    help = "the model that it drafts for (default: as the authors pair them; a merged checkpoint drafts for itself, "
    add("--target", help=help + "unless the base model in it is given)")
    return parser


def train() -> ArgumentParser:
    parser = ArgumentParser(prog="longdraft train", description="Train a draft against a frozen target.")
    add = parser.add_argument
    add("config", help="a YAML file, such as those in configs/")
    add("overrides", nargs="*", metavar="section.field=value", help="for example train.steps=500")
    add("--stage", help="of a config with stages: start with this one (default: the first unfinished)")
    add("--from-draft", help="draft folder whose weights the training starts from")
    add("--estimate", action="store_true", help="print the memory, operations and hours it takes")
    help = "10^12 operations a second of a rank, for the hours (default: those of the run so far)"
    add("--tflops", type=float, help=help)
    help = "ranks on this machine (default: one for each GPU, or for each in CUDA_VISIBLE_DEVICES; 1 on a CPU)"
    add("--num-gpus", type=at_least(1), help=help)
    add("--local_rank", type=int, help=SUPPRESS)  # given to each rank by DeepSpeed's launcher, as LOCAL_RANK is
    return parser


PARSERS = {command.__name__: command for command in (train, export, convert, generate, serve, bench, report)}
