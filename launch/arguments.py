"""The arguments of the commands. Nothing here imports torch, so that --help and a wrong argument need not wait for it.

`longdraft prepare` and `prepare regenerate` declare their own; the latter uses the helpers of this file.
"""

import argparse
import math
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from longdraft.infer.sampling import PRESETS, SamplingParams
from longdraft.launch.console import flag

# Names that are defined in files that import torch.
DTYPES = ("fp32", "bf16", "fp16")
LOADERS = ("longdraft", "transformers")
FORMS = ("fp32", "serving", "off")
DRAFTERS = ("plain", "tokenswift", "medusa", "longspec", "triforce", "small_model", "token_recycling", "prompt_lookup")
SUITES = ("longbench", "aime24", "pg19", "spec-bench", "speed-bench", "mrcr", "mt-bench")
PAPERS = ("longspec", "tokenswift", "triforce", "token-recycling")
# Defaults of `longdraft bench`.
PROMPTS, TEXT_TOKENS, NEW_TOKENS = 4, 256, 128
API_KEY = "LONGDRAFT_API_KEY"  # environment variable with the key of `longdraft serve`
DRAFTING = "drafting (affects speed, never the text)"
TARGET = "a folder, a hub name, a .gguf file or smollm2-135m (default: the draft's own target)"
MANY: dict[str, Any] = {"nargs": "+", "action": "extend"}
# Fields of SamplingParams with their help; their types and limits are in SamplingParams.
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
    "ignore_eos": "continue after the target's end tokens",
}
OF_ONE_TEXT = {
    "max_new_tokens": "default: 256",
    "temperature": "0, the default, is greedy",
    "seed": "the same seed gives the same text with any drafter (default: a random seed, which is printed)",
}


def at_least(least: int) -> Callable[[str], int]:
    """The type of an option that is a whole number of at least `least`."""

    def whole_number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text}; give a whole number of at least {least}")
        return int(text)

    return whole_number


def positive(text: str) -> float:
    """The type of an option that is a number above 0."""
    with suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text}; give a number above 0")


def node_budget(text: str) -> str | int:
    """The type of --nodes."""
    if text not in ("auto", "all") and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}; give auto, all or a number")
    return int(text) if text.isdecimal() else text


def chances(text: str) -> list[float]:
    """The type of an option that is a list of probabilities, separated by commas."""
    try:
        values = [float(value) for value in text.split(",")]
    except ValueError:
        values = [-1.0]
    if not all(0 <= value <= 1 for value in values):
        raise argparse.ArgumentTypeError(f"{text}; give numbers from 0 to 1, such as 0.7,0.6")
    return values


def add_loading(add: Callable[..., Any], dtype: str | None = "bf16", dtype_help: str = "default: bf16") -> None:
    """Add the options that name the target and how it is loaded."""
    add("--target", help=TARGET)
    add("--loader", choices=LOADERS, help="whose model classes compute the target (default: as its draft was trained)")
    add("--dtype", choices=DTYPES, default=dtype, help=dtype_help)
    add("--device", help="default: cuda if there is a GPU, else cpu")


def add_model(parser: ArgumentParser) -> Callable[..., Any]:
    """Add the options of an engine's model. Returns the `add_argument` of their group, for further options."""
    add = parser.add_argument_group("model").add_argument
    add_loading(add)
    add("--max-length", type=at_least(2), help="maximum tokens of prompt and text (default: the target's limit)")
    add("--prefill-chunk", type=at_least(1), help="prompt tokens per prefill pass (default: 512, or 2048 on a GPU)")
    return add


def add_ranks(add: Callable[..., Any]) -> None:
    """Add the option that shares the target among several GPUs."""
    help = "GPUs of this machine, or processes on a CPU, that compute the target together (default: 1)"
    add("--tensor-parallel", type=at_least(1), default=1, metavar="N", help=help)


def add_drafters(add: Callable[..., Any], several: bool) -> None:
    """Add the options for drafters. `several`: whether several drafters can be given and compared."""
    number: dict[str, Any] = MANY if several else {"nargs": 1}
    names = f"{', '.join(DRAFTERS)}, or several of them in one tree as a+b (default: the draft's own, or plain)"
    add("--drafter", help=names, **number)
    add("--draft", default=[], help="a draft's folder, hub name, or name if it comes with longdraft", **number)
    help = "a drafter's option; DRAFTER.KEY=VALUE for one of several"
    add("--option", default=[], metavar="KEY=VALUE", help=help, **MANY)
    add("--nodes", type=node_budget, help="drafted nodes to verify in a step: auto (default), all, or a maximum")


def add_fields(add: Callable[..., Any], helps: Mapping[str, str], **defaults: float) -> None:
    """Add an option for each of these fields of SamplingParams, with the type of the field's default."""
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
    """Add --preset, and the options for these fields of SamplingParams."""
    add("--preset", choices=tuple(PRESETS), help="as published for a model; other options take precedence")
    add_fields(add, helps)


def given_sampling(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """The given keyword arguments of SamplingParams, on top of the preset's."""
    values = {} if args.preset is None else dict(PRESETS[args.preset])
    return values | {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def generate() -> ArgumentParser:
    parser = ArgumentParser(prog="longdraft generate", description="Decode a prompt with any drafter.")
    add_ranks(add_model(parser))
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
    add("--json-schema", type=Path, metavar="FILE", help="the text is JSON of the schema in this file")
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="print one JSON object: text, tokens, finish reason, statistics")
    return parser


def serve() -> ArgumentParser:
    description = f"Serve OpenAI's interface. The environment variable {API_KEY} sets a key."
    parser = ArgumentParser(prog="longdraft serve", description=description)
    add = add_model(parser)
    add_ranks(add)
    add("--slots", type=at_least(1), default=8, help="requests decoded together (default: 8)")
    add_drafters(parser.add_argument_group(DRAFTING).add_argument, several=False)
    add = parser.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    add("--port", type=at_least(0), default=8000, help="default: 8000; 0 chooses a free port, which is printed")
    add("--model-name", help="the model's name in requests (default: the target's name)")
    add("--queue", type=at_least(0), default=256, help="requests that may wait (default: 256); more get 429")
    help = "write the token ids of all prompts and answers to files of this folder, to train a draft on them"
    add("--record", type=Path, metavar="FOLDER", help=help)
    return parser


def bench() -> ArgumentParser:
    description = "Measure drafters against plain decoding: exactness and speed."
    parser = ArgumentParser(prog="longdraft bench", description=description)
    add = parser.add_argument_group("model").add_argument
    add_loading(add, dtype=None, dtype_help="dtype of the timed decoding (default: bf16, or the --paper's)")
    add_ranks(add)
    add_drafters(parser.add_argument_group(DRAFTING).add_argument, several=True)
    forcing = "forced acceptance: a draft's cost at a given acceptance (not a result of the draft)"
    either = parser.add_argument_group(forcing).add_mutually_exclusive_group().add_argument
    help = "probability for each level that its proposal is right if its parent is; the last also for deeper levels"
    either("--accept-rates", type=chances, metavar="P,P,...", help=help)
    help = "one such probability for all levels, chosen so that the drafter's depth gives X tokens per step"
    either("--tokens-per-step", type=float, metavar="X", help=help)
    prompts = parser.add_argument_group("prompts")
    add = prompts.add_argument
    add("--suite", choices=SUITES, help="a published suite of prompts; --data holds its files as published")
    add(
        "--paper",
        choices=PAPERS,
        help="use suite, drafter, tree, sampling and dtype of a paper's table, and show its figures beside ours",
    )
    add("--only", nargs="+", default=[], help="with --suite: use only these tasks, categories or files")
    either = prompts.add_mutually_exclusive_group(required=True).add_argument
    either("--data", help="a prepared folder with held-out rows; with --suite, a folder, file or data set on the hub")
    either("--text-file", nargs="+", type=Path, help="use the beginnings of these files instead")
    many, tokens, new = f"default: {PROMPTS}", f"default: {TEXT_TOKENS}", f"default: {NEW_TOKENS}"
    help = f"number of prompts, evenly spaced in --data ({many}, a suite's: all)"
    add("--prompts", type=at_least(1), metavar="N", help=help)
    add("--prompt-tokens", type=at_least(2), metavar="N", help=f"tokens of a prompt ({tokens}, or the suite's)")
    add("--new-tokens", type=at_least(1), metavar="N", help=f"maximum tokens of an answer ({new}, or the suite's)")
    add = parser.add_argument_group("sampling").add_argument
    add("--temperature", nargs="+", type=float, help="one or more; 0 is greedy (default: 0, or the suite's)")
    add("--seed", type=int, default=0, help="default: 0")
    add_sampling(add, SAMPLING)
    add = parser.add_argument_group("measurements").add_argument
    help = "check exactness in fp32 (default), in --dtype (serving: count tokens that differ at near-ties), or not"
    add("--exactness", choices=FORMS, default=FORMS[0], help=help)
    add("--transformers", action="store_true", help="also time transformers' greedy generate on the same prompts")
    help = "context lengths at which to time passes of each width (default: the first prompt's; none for a suite)"
    add("--contexts", nargs="+", type=at_least(1), metavar="N", help=help)
    add = parser.add_argument_group("output").add_argument
    add("--out", type=Path, metavar="FOLDER", help="save every answer here; a stopped run resumes from it")
    add("--report", type=Path, metavar="FILE", help="with --out: also write an HTML report")
    return parser


def report() -> ArgumentParser:
    parser = ArgumentParser(prog="longdraft report", description="Show the records of benches side by side.")
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folders written by `longdraft bench --out`")
    add("--out", type=Path, default=Path("report.html"), help="the HTML page (default: report.html)")
    return parser


def export() -> ArgumentParser:
    parser = ArgumentParser(prog="longdraft export", description="Make a draft folder of a run's weights.")
    add = parser.add_argument
    add("run_dir", help="the run's folder (train.run_dir)")
    add("--out", help="folder to write (default: RUN_DIR/draft)")
    add("--draft-vocab-size", type=int, help="propose only this many tokens, the most frequent of the training data")
    add("--best", action="store_true", help="export the weights that decoded best in training (default: the newest)")
    help = "also write a model card and generate.py for transformers, for this hub repository if one is given"
    add("--card", nargs="?", const="", metavar="OWNER/NAME", help=help)
    return parser


def convert() -> ArgumentParser:
    description = "Make a draft folder of a published draft: LongSpec's blocks, TokenSwift's merged checkpoints."
    parser = ArgumentParser(prog="longdraft convert", description=description)
    add = parser.add_argument
    add("source", help="the draft's weights file, its folder as published, or its hub name")
    add("--out", required=True, help="draft folder to write")
    add("--target", help="the model that it drafts for (default: a merged TokenSwift checkpoint itself)")
    return parser


def train() -> ArgumentParser:
    parser = ArgumentParser(prog="longdraft train", description="Train a draft against a frozen target.")
    add = parser.add_argument
    add("config", help="a YAML file, such as those in configs/")
    add("overrides", nargs="*", metavar="section.field=value", help="for example train.steps=500")
    add("--stage", help="of a config with stages: start with this one (default: the first unfinished)")
    add("--from-draft", help="draft folder whose weights the training starts from")
    add("--estimate", action="store_true", help="only print the memory, operations and hours that training takes")
    add("--tflops", type=positive, help="for --estimate: TFLOP/s of a rank (default: the run's, or an H100's)")
    add("--num-gpus", type=at_least(1), help="ranks on this machine (default: one for each visible GPU; 1 on a CPU)")
    add("--local_rank", type=int, help=SUPPRESS)  # DeepSpeed's launcher passes it to each rank, like LOCAL_RANK
    return parser


PARSERS = {command.__name__: command for command in (train, export, convert, generate, serve, bench, report)}
