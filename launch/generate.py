"""Decode a prompt: `longdraft generate --target smollm2-135m --prompt "..."`, streamed; or drafters side by side.

Argument parsing and printing; the work is in infer/engine.py. Standard output carries the generated text alone (with a
heading for each of several drafters, or one JSON object), everything else goes to standard error.
"""

import argparse
import json
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from longdraft.launch.console import (
    INTERRUPTED,
    ends_on_ctrl_c,
    framed,
    leave,
    note,
    on_ctrl_c,
    read_stdin,
    read_text,
    show,
)
from longdraft.launch.shared_options import add_drafting, add_model, add_numbers, add_sampling, given_sampling

if TYPE_CHECKING:
    from longdraft.infer.engine import Engine
    from longdraft.infer.requests import Prompt
    from longdraft.infer.results import Generation, Piece
    from longdraft.infer.sampling import SamplingParams
    from longdraft.launch.runtime import Drafting
    from longdraft.models.target import Target

DIM, DRAFTED, OWN, PLAIN = "\033[2m", "\033[32m", "\033[36m", "\033[0m"
SHOWN_PROMPT = 600  # characters of its end
# Options of SamplingParams beside those that bench has as well, by their names there.
NUMBERS = {
    "max_new_tokens": (int, "default: 256"),
    "temperature": (float, "0, the default, is greedy"),
    "seed": (int, "same seed, same text, whichever drafter; drawn and shown when left out"),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="longdraft generate", description="Decode a prompt with any drafter.")
    add_model(parser)
    add = parser.add_argument_group("prompt").add_argument
    add("--prompt", help="text; - or nothing reads standard input")
    add("--prompt-file", type=Path, help="a text file")
    add("--heldout", type=Path, metavar="DATA", help="take the prompt from the held-out rows of a prepared folder")
    add("--row", type=int, help="with --heldout: which row (default: the first)")
    add("--prompt-tokens", type=int, help="use only the first so many tokens of the prompt")
    add("--chat", action="store_true", help="the prompt is a user's message in the target's chat template")
    add("--system", help="with --chat: the system message")
    add_drafting(parser, several=True)
    add = parser.add_argument_group("sampling").add_argument
    add_numbers(add, NUMBERS)
    add_sampling(add)
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="instead of the text one JSON object: text, tokens, reason, statistics")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2 after an error, 130 after Ctrl-C."""
    parser = _parser()

    def work() -> int:
        args = parser.parse_args(argv)
        with ends_on_ctrl_c(parser.prog):
            return _generate(args)

    return framed(parser.prog, work)


def _generate(args: argparse.Namespace) -> int:
    # Here, not above: --help and a wrong argument should not wait for torch.
    from longdraft.launch.runtime import Drafting

    # What can be wrong is found before the model is loaded.
    asked, params = Drafting(args), _sampling(args)
    asked.check_sampling(params)
    given, names = _prompt(args), asked.names
    target = asked.open_target(_least_positions(asked, given, params))
    tokens = _prompt_tokens(args, target, given)
    # A text is gone on with.
    prompt = given if isinstance(given, str) and not args.chat and args.prompt_tokens is None else tokens
    screen = Screen(args.json, several=len(names) > 1)
    if not args.chat:
        screen.prompt(target.tokenizer.decode(tokens))
    # All of them first: what is wrong with the last one is said before the first one writes.
    engines = asked.open_engines(target)
    done: dict[str, Generation] = {}
    for name, engine in engines.items():
        screen.begin(name, target, params, tokens if prompt is given else ())
        done[name] = _run(screen, engine, name, prompt, params)
        if done[name].finish_reason == "cancelled":
            break
    screen.end(done, args.dtype, complete=len(done) == len(names))
    return INTERRUPTED if any(generation.finish_reason == "cancelled" for generation in done.values()) else 0


def _sampling(args: argparse.Namespace) -> "SamplingParams":
    from longdraft.infer.sampling import SamplingParams, draw_seed

    given = {name: getattr(args, name) for name in NUMBERS if getattr(args, name) is not None}
    params = SamplingParams(**given_sampling(args) | given)
    return replace(params, seed=draw_seed()) if params.seed is None else params


def _prompt(args: argparse.Namespace) -> str | list[int]:
    """The text that was given or is read from a file or standard input, or a held-out row's tokens."""
    from longdraft.infer.values import check_text
    from longdraft.launch.runtime import heldout_rows, used_tokens

    if sum(given is not None for given in (args.prompt, args.prompt_file, args.heldout)) > 1:
        raise ValueError("give one of --prompt, --prompt-file and --heldout")
    if args.row is not None and args.heldout is None:
        raise ValueError("--row: a row of --heldout, which is not given")
    if args.system is not None and not args.chat:
        raise ValueError("--system: the system message of a --chat, which is not asked for")
    if args.chat and (args.heldout is not None or args.prompt_tokens is not None):
        raise ValueError("--chat: a whole message; not with --heldout or --prompt-tokens")
    if args.prompt_tokens is not None and args.prompt_tokens < 1:
        raise ValueError(f"--prompt-tokens: {args.prompt_tokens}; a prompt has at least 1")
    if args.heldout is not None:
        rows = heldout_rows(args.heldout)
        if not 0 <= (args.row or 0) < len(rows):
            raise ValueError(f"--row: {args.row}, but {rows.folder} has rows 0 to {len(rows) - 1}")
        return used_tokens(rows[args.row or 0])
    if args.prompt_file is not None:
        text, source = read_text(args.prompt_file, "--prompt-file"), f"--prompt-file: {args.prompt_file}"
    elif args.prompt in (None, "-"):
        if sys.stdin is not None and sys.stdin.isatty():
            note("Reading the prompt from the terminal, to its end (Ctrl-D)")
        text, source = read_stdin(), "standard input"
    else:
        text, source = args.prompt, "--prompt"
    if not text:
        raise ValueError(f"{source} is empty; a prompt has at least one token")
    check_text(source, text)
    if args.system is not None:
        check_text("--system", args.system)
    return text


def _least_positions(asked: "Drafting", prompt: str | list[int], params: "SamplingParams") -> int:
    """Positions that prompt and new tokens take, about, before the target is there: what a chat template adds is left
    out, and a text is read for a GPU alone, where it can be what does not fit."""
    from longdraft.models.hf import load_tokenizer

    args = asked.args
    if not isinstance(prompt, str):
        length = len(prompt)
    else:
        length = 1 if asked.device.type == "cpu" else len(load_tokenizer(*asked.source)(prompt).input_ids)
    whole = min(length, args.prompt_tokens or length) + params.max_new_tokens
    return min(whole, args.max_length or whole)


def _prompt_tokens(args: argparse.Namespace, target: "Target", prompt: str | list[int]) -> list[int]:
    """The prompt as token ids."""
    from longdraft.infer.requests import prompt_tokens
    from longdraft.launch.runtime import check_rows, heldout_rows

    if target.tokenizer is None:
        raise ValueError(f"{target.name} has no tokenizer files, so no text can be shown; add the tokenizer's")
    if args.heldout is not None:
        check_rows(heldout_rows(args.heldout), target)
    if args.chat:
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        return prompt_tokens(target, [*system, {"role": "user", "content": prompt}], "--chat")
    return prompt_tokens(target, prompt)[: args.prompt_tokens]


def _run(screen: "Screen", engine: "Engine", name: str, prompt: "Prompt", params: "SamplingParams") -> "Generation":
    """Decode with one drafter and print the text as it comes; the first Ctrl-C ends it after its running step, with
    what there is."""
    interrupted = threading.Event()

    def cancel() -> None:
        interrupted.set()
        engine.cancel(0)

    with on_ctrl_c(cancel):
        for piece in engine.stream([prompt], params):
            screen.show(piece)
            if piece.generation:
                screen.finish(name, piece.generation)
                return piece.generation
            if interrupted.is_set():  # again: the engine may have been starting
                engine.cancel(0)
    raise AssertionError("the stream ended without a generation")


class Screen:
    """Prints generations: coloured on a terminal (NO_COLOR: without), as they come; or all at the end as JSON."""

    def __init__(self, as_json: bool, several: bool):
        self._json, self._several = as_json, several
        self._terminal = sys.stdout.isatty() and not as_json
        self._colour = self._terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def prompt(self, text: str) -> None:
        """The end of the prompt, on a terminal."""
        if self._terminal:
            self._write(text[-SHOWN_PROMPT:], DIM)

    def begin(self, name: str, target: "Target", params: "SamplingParams", before: Sequence[int]) -> None:
        """The next drafter's text comes, behind that of these tokens."""
        from longdraft.infer.text import ShownText

        self._text = ShownText(target.tokenizer, params.stop_strings, before)
        if self._several and not self._json:
            self._write(f"\n--- {name} ---\n")

    def show(self, piece: "Piece") -> None:
        """Text that a piece adds; a token's colour says whether a drafter proposed it."""
        for i, token in enumerate(piece.tokens):
            self._write(self._text.push([token]) if not self._json else "", DRAFTED if i < piece.accepted else OWN)

    def finish(self, name: str, generation: "Generation") -> None:
        """The text's rest, and the figures."""
        assert generation.text is not None
        if not self._json:
            self._write(self._text.finish(generation.text), OWN)
            self._write("\n")
        accepted = sum(generation.stats.accepted_at_depth)
        colours = f" ({DRAFTED}{accepted} drafted{PLAIN}, {OWN}the target's own{PLAIN})" if self._colour else ""
        note(
            f"[{name}: {len(generation.tokens)} tokens{colours}, {generation.tokens_per_second:.1f} tokens/s, "
            f"{generation.tokens_per_step:.2f} tokens/step, ended by {generation.finish_reason}, "
            f"seed {generation.seed}]"
        )

    def end(self, done: "dict[str, Generation]", dtype: str, complete: bool) -> None:
        """The verdict over several drafters, and the JSON."""
        texts = [generation.tokens for generation in done.values()]
        same = all(tokens == texts[0] for tokens in texts)
        if self._several and complete:
            note(f"\nSame tokens from {', '.join(done)} ({dtype}): {'yes' if same else 'NO'}")
        if self._json:
            objects = [_as_json(name, generation) for name, generation in done.items()]
            shown = {"generations": objects, "same_tokens": same if complete else None} if self._several else objects[0]
            show(json.dumps(shown) + "\n")

    def _write(self, text: str, colour: str = "") -> None:
        if text:
            show(f"{colour}{text}{PLAIN}" if colour and self._colour else text)


def _as_json(name: str, generation: "Generation") -> dict:
    return {
        "drafter": name,
        "text": generation.text,
        "tokens": generation.tokens,
        "finish_reason": generation.finish_reason,
        "statistics": dict(generation.summary()),
    }


if __name__ == "__main__":
    leave(main())
