"""Options that commands which decode share, and what they become. Not here: what else they do alike (runtime.py)."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from longdraft.launch.console import flag

# launch/runtime.py says what each is, infer/presets.py which presets; here, for --help should not wait for torch.
DTYPES = ("fp32", "bf16", "fp16")
LOADERS = ("longdraft", "transformers")
PRESETS = (
    "tokenswift-llama3.1-8b",
    "tokenswift-yarn-llama2-7b-128k",
    "tokenswift-qwen2.5-1.5b",
    "tokenswift-qwen2.5-7b",
    "tokenswift-qwen2.5-14b",
)
# A bench's defaults.
PROMPTS, TEXT_TOKENS, NEW_TOKENS = 4, 256, 128
# Options of SamplingParams, by their names there.
NUMBERS = {
    "top_k": (int, "sample from the k most probable tokens; 0 is off"),
    "top_p": (float, "sample from the most probable tokens of this share together; 1 is off"),
    "min_p": (float, "drop tokens less probable than this times the most probable one; 0 is off"),
    "eta_cutoff": (float, "eta sampling; 0 is off"),
    "min_tokens_to_keep": (int, "of which --min-p and --eta-cutoff drop none, the most probable ones; 1 is off"),
    "contextual_penalty": (float, "penalise tokens among the last --contextual-window ones; 1 is off"),
    "contextual_window": (int, "default: 1024"),
    "repetition_penalty": (float, "penalise all tokens of prompt and text; 1 is off"),
    "presence_penalty": (float, "taken off the logits of generated tokens once; 0 is off"),
    "frequency_penalty": (float, "taken off the logits of generated tokens for each time; 0 is off"),
}


def add_model(parser: argparse.ArgumentParser) -> Callable[..., Any]:
    """The target and where it runs; returns what adds further ones to the group."""
    add = parser.add_argument_group("model").add_argument
    add_target(add)
    add("--loader", choices=LOADERS, help="whose classes compute the target (default: as its draft was trained)")
    add_dtype(add)
    add("--device", help="default: cuda where there is one")
    add("--max-length", type=int, help="most positions of prompt and text (default: the target's)")
    add("--prefill-chunk", type=int, help="rows of a pass over the prompt (default: 512, 2048 on a GPU)")
    return add


def add_target(add: Callable[..., Any]) -> None:
    """The target alone."""
    add("--target", help="a folder, a hub name, a .gguf file or smollm2-135m (default: the draft's own target)")
    add("--gguf-file", help="with --target: name of a .gguf file inside it")


def add_drafting(parser: argparse.ArgumentParser, several: bool) -> None:
    """Drafters, one or several to compare, their options and how they rank."""
    add = parser.add_argument_group("drafting (speed only, never the text)").add_argument
    add_drafters(add, several)
    add_no_noise(add)


def add_drafters(add: Callable[..., Any], several: bool) -> None:
    """Drafters and their options."""
    which, many = "one or more, " if several else "a name, or ", dict[str, Any](nargs="+", action="extend")
    number: dict[str, Any] = many if several else {"nargs": 1}
    add("--drafter", help=f"{which}a+b for several in one tree; default: the draft's own, else plain", **number)
    several_drafts = "; several, of one method each, for as many drafters" if several else ""
    help = f"folder that `longdraft export` wrote, its hub name, or one that comes with longdraft{several_drafts}"
    add("--draft", default=[], help=help, **number)
    own = "a drafter's own; DRAFTER.KEY=VALUE for one of several"
    add("--option", default=[], metavar="KEY=VALUE", help=own, **many)
    add("--nodes", help="proposed nodes that a step verifies: auto (the default: what pays), all, or a number at most")


def add_numbers(add: Callable[..., Any], numbers: Mapping[str, tuple[type, str]], **defaults: float) -> None:
    """Options of SamplingParams, by their names there."""
    for name, (kind, text) in numbers.items():
        add(flag(name), type=kind, default=defaults.get(name), metavar="N" if kind is int else "X", help=text)


def add_dtype(add: Callable[..., Any], default: str | None = "bf16", help: str = "default: bf16") -> None:
    """--dtype."""
    add("--dtype", choices=DTYPES, default=default, help=help)


def add_no_noise(add: Callable[..., Any]) -> None:
    """How drafters rank."""
    add(
        "--no-noise",
        action="store_true",
        help="drafters rank without the noise that the choice at a temperature above 0 will use, as in other programs",
    )


def add_sampling(add: Callable[..., Any]) -> None:
    """All of sampling but temperature, seed and length."""
    many: dict[str, Any] = {"nargs": "+", "action": "extend"}
    add("--preset", choices=PRESETS, help="sampling as published for a model; options beside it go before")
    add_numbers(add, NUMBERS)
    add("--ban", type=int, metavar="TOKEN_ID", dest="banned_token_ids", help="never choose these", **many)
    add("--stop", metavar="STRING", dest="stop_strings", help="end before these; $'\\n' is a new line", **many)
    add("--stop-id", type=int, metavar="TOKEN_ID", dest="stop_token_ids", help="end behind these tokens", **many)
    add("--eos", choices=("stop", "ignore"), help="at the target's end tokens: stop, or go on")


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The keywords of SamplingParams that were asked for, the preset's among them."""
    from longdraft.infer.presets import preset

    names = (*NUMBERS, "banned_token_ids", "stop_strings", "stop_token_ids")
    found = {} if args.preset is None else dict(preset(args.preset))
    found |= {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return found | ({} if args.eos is None else {"ignore_eos": args.eos == "ignore"})
