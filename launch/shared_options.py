"""Options that the decoding commands share. What the commands do with them is in launch/runtime.py."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from longdraft.launch.console import flag

# The names in launch/runtime.py and infer/sampling.py, repeated here so that --help need not import torch.
DTYPES = ("fp32", "bf16", "fp16")
LOADERS = ("longdraft", "transformers")
PRESETS = (
    "tokenswift-llama3.1-8b",
    "tokenswift-yarn-llama2-7b-128k",
    "tokenswift-qwen2.5-1.5b",
    "tokenswift-qwen2.5-7b",
    "tokenswift-qwen2.5-14b",
)
# Defaults of `longdraft bench`.
PROMPTS, TEXT_TOKENS, NEW_TOKENS = 4, 256, 128
# Fields of SamplingParams: (type, help).
NUMBERS = {
    "top_k": (int, "sample from the k most probable tokens; 0 is off"),
    "top_p": (float, "sample from the most probable tokens that together reach this probability; 1 is off"),
    "min_p": (float, "drop tokens less probable than this fraction of the most probable one; 0 is off"),
    "eta_cutoff": (float, "cutoff of eta sampling; 0 is off"),
    "min_tokens_to_keep": (int, "the most probable tokens that --min-p and --eta-cutoff always keep (default: 1)"),
    "contextual_penalty": (float, "penalise tokens that occur in the last --contextual-window tokens; 1 is off"),
    "contextual_window": (int, "tokens that --contextual-penalty looks back over (default: 1024)"),
    "repetition_penalty": (float, "penalise tokens that occur in the prompt or the text; 1 is off"),
    "presence_penalty": (float, "subtract this from the logit of every generated token; 0 is off"),
    "frequency_penalty": (float, "subtract this from a token's logit for each time it was generated; 0 is off"),
}


def at_least(least: int) -> Callable[[str], int]:
    """The type of an option that takes a whole number of at least this."""

    def whole_number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text}; give a whole number of at least {least}")
        return int(text)

    return whole_number


def add_model(parser: argparse.ArgumentParser) -> Callable[..., Any]:
    """Add the options of an engine's model. Returns the `add_argument` of their group, for further options."""
    add = parser.add_argument_group("model").add_argument
    add_loading(add)
    add("--max-length", type=int, help="maximum tokens of prompt and text (default: the target's limit)")
    add("--prefill-chunk", type=int, help="prompt tokens per prefill pass (default: 512, or 2048 on a GPU)")
    return add


def add_loading(add: Callable[..., Any], dtype: str | None = "bf16", dtype_help: str = "default: bf16") -> None:
    """Add the target and how it is loaded."""
    add_target(add)
    add("--loader", choices=LOADERS, help="whose model classes compute the target (default: as its draft was trained)")
    add("--dtype", choices=DTYPES, default=dtype, help=dtype_help)
    add("--device", help="default: cuda if there is a GPU, else cpu")


def add_target(add: Callable[..., Any]) -> None:
    """Add the target alone."""
    add("--target", help="a folder, a hub name, a .gguf file or smollm2-135m (default: the draft's own target)")
    add("--gguf-file", help="with --target: name of a .gguf file inside it")
    add("--verbose", action="store_true", help="say which tokens end an answer and where each of them is named")


def add_drafting(parser: argparse.ArgumentParser, several: bool) -> None:
    """Add the drafters, their options and how they rank candidates. `several`: they can be compared."""
    add = parser.add_argument_group("drafting (affects speed, never the text)").add_argument
    add_drafters(add, several)
    add(
        "--no-noise",
        action="store_true",
        help="at a temperature above 0, rank candidates without the noise that will decide the target's choice, as "
        "other programs do",
    )


def add_drafters(add: Callable[..., Any], several: bool) -> None:
    """Add the drafters and their options."""
    many: dict[str, Any] = {"nargs": "+", "action": "extend"}
    number: dict[str, Any] = many if several else {"nargs": 1}
    drafters = "one or more drafters" if several else "a drafter"
    help = f"{drafters}; a+b combines several in one tree (default: the draft's own, or plain without a draft)"
    add("--drafter", help=help, **number)
    drafts = "; for several drafters, give one for each method" if several else ""
    help = f"folder written by `longdraft export`, its hub name, or a draft that comes with longdraft{drafts}"
    add("--draft", default=[], help=help, **number)
    help = "an option of the drafters; DRAFTER.KEY=VALUE for one of several"
    add("--option", default=[], metavar="KEY=VALUE", help=help, **many)
    add("--nodes", help="drafted nodes to verify in a step: auto (default: as many as pay off), all, or a maximum")


def add_numbers(add: Callable[..., Any], numbers: Mapping[str, tuple[type, str]], **defaults: float) -> None:
    """Add an option for each of these fields of SamplingParams."""
    for name, (number, help) in numbers.items():
        add(flag(name), type=number, default=defaults.get(name), metavar="N" if number is int else "X", help=help)


def add_sampling(add: Callable[..., Any]) -> None:
    """Add the sampling options, except temperature, seed and length."""
    many: dict[str, Any] = {"nargs": "+", "action": "extend"}
    add("--preset", choices=PRESETS, help="sampling as published for a model; options given with it take precedence")
    add_numbers(add, NUMBERS)
    add("--ban", type=int, metavar="TOKEN_ID", dest="banned_token_ids", help="never choose these tokens", **many)
    help = "end the text before one of these strings; $'\\n' is a new line"
    add("--stop", metavar="STRING", dest="stop_strings", help=help, **many)
    help = "end the text after one of these tokens"
    add("--stop-id", type=int, metavar="TOKEN_ID", dest="stop_token_ids", help=help, **many)
    add("--eos", choices=("stop", "ignore"), help="stop at the target's end tokens, or ignore them and go on")


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The keywords of SamplingParams that were given, on top of the preset's."""
    from longdraft.infer.sampling import preset

    names = (*NUMBERS, "banned_token_ids", "stop_strings", "stop_token_ids")
    values = {} if args.preset is None else dict(preset(args.preset))
    values |= {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return values | ({} if args.eos is None else {"ignore_eos": args.eos == "ignore"})
