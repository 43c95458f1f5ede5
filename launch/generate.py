"""Decode a prompt with one drafter or several: `longdraft generate --target smollm2-135m --prompt "..."`.

The work is in infer/engine.py. Standard output gets only the generated text (with a heading for each of several
drafters, or as one JSON object); everything else is printed on standard error.
"""

import argparse
import json
import os
import sys
from dataclasses import replace
from typing import Any

from pydantic import Json

from longdraft.infer.choice.grammar import json_grammar
from longdraft.infer.engine import Engine
from longdraft.infer.generation import Generation
from longdraft.infer.requests import Prompt, prompt_tokens
from longdraft.infer.sampling import SamplingParams, draw_seed
from longdraft.launch.arguments import OF_ONE_TEXT, SAMPLING, given_sampling
from longdraft.launch.console import note, read_text, show
from longdraft.launch.runtime import Drafting, heldout_rows, used_tokens
from longdraft.models.hf import load_tokenizer
from longdraft.models.schema import validate

DRAFTED, OWN, PLAIN = "\033[32m", "\033[36m", "\033[0m"


def run(args: argparse.Namespace) -> None:
    """Decode with each drafter."""
    # Everything that can be checked without the model is checked before it is loaded.
    drafting, params = Drafting(args), SamplingParams(**given_sampling(args, (*OF_ONE_TEXT, *SAMPLING)))
    params = replace(params, seed=draw_seed()) if params.seed is None else params
    if args.json_schema is not None:
        schema = validate(Json[dict[str, Any]], read_text(args.json_schema, "--json-schema"), "--json-schema")
        params = replace(params, grammar=json_grammar(schema))
    given = drafting.ranks.from_first(_prompt(args, drafting.source) if drafting.ranks.rank == 0 else "")
    chat = args.chat or args.system is not None
    if given == "" and not chat and not load_tokenizer(drafting.source)("").input_ids:
        option = "--prompt" if args.prompt_file is None else "--prompt-file"
        raise ValueError(f"{option}: it is empty, and this target's tokenizer adds no token to it; give some text")
    target = drafting.open_target()
    if target.tokenizer is None:
        raise ValueError(f"{target.name} has no tokenizer files, so no text can be shown; add them")
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    asked = [*system, {"role": "user", "content": given}] if chat else given
    tokens = prompt_tokens(target, asked, "--chat" if chat else "--prompt")[: args.prompt_tokens]
    # If the engine gets the prompt as text, the generated text continues it.
    prompt = given if isinstance(given, str) and not chat and args.prompt_tokens is None else tokens
    # All engines are opened first, so that an error in the last one is raised before any output.
    engines, several = drafting.open_engines(target), len(drafting.drafters) > 1
    done: dict[str, Generation] = {}
    for name, engine in engines.items():
        if several and not args.json:
            show(f"\n--- {name} ---\n")
        done[name] = _decode(engine, name, prompt, params, args.json)
    same = len({tuple(generation.tokens) for generation in done.values()}) == 1
    if several:
        note(f"\nSame tokens from {', '.join(done)} ({args.dtype}): {'yes' if same else 'NO'}")
    if args.json:
        objects = [_as_json(name, generation) for name, generation in done.items()]
        show(json.dumps({"generations": objects, "same_tokens": same} if several else objects[0]) + "\n")


def _prompt(args: argparse.Namespace, target: str) -> str | list[int]:
    """The text that was given or read from a file or standard input, or the first held-out row's tokens."""
    if args.heldout is not None:
        return used_tokens(heldout_rows(args.heldout, load_tokenizer(target))[0])
    if args.prompt_file is None and args.prompt not in (None, "-"):
        return args.prompt
    if args.prompt_file is None and sys.stdin is not None and sys.stdin.isatty():
        note("Reading the prompt from the terminal; end it with Ctrl-D")
    return read_text(args.prompt_file, "--prompt" if args.prompt_file is None else "--prompt-file")


def _decode(engine: Engine, name: str, prompt: Prompt, params: SamplingParams, as_json: bool) -> Generation:
    """Decode with one drafter and print the text as it is generated, unless it will be printed as JSON. On a terminal,
    colours show which tokens the drafter proposed."""
    drafted, own, plain = (DRAFTED, OWN, PLAIN) if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else [""] * 3
    for piece in engine.stream([prompt], params):
        shown = ((drafted, piece.text[: piece.accepted_text]), (own, piece.text[piece.accepted_text :]))
        if not as_json:
            show("".join(f"{colour}{text}{plain}" for colour, text in shown if text))
        if done := piece.generation:
            show("" if as_json else "\n")
            accepted = sum(done.stats.accepted_at_depth)
            note(
                f"[{name}: tokens {len(done.tokens)}, {drafted}{accepted} drafted{plain}, "
                f"{done.tokens_per_second:.1f} tokens/s, {done.tokens_per_step:.2f} tokens/step, "
                f"ended by {done.finish_reason}, seed {done.seed}]"
            )
            return done
    raise AssertionError("the stream ended without a generation")


def _as_json(name: str, generation: Generation) -> dict:
    return {
        "drafter": name,
        "text": generation.text,
        "tokens": generation.tokens,
        "finish_reason": generation.finish_reason,
        "statistics": dict(generation.summary()),
    }
