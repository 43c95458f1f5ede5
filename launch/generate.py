"""Decode a prompt with one drafter or several: `longdraft generate --target smollm2-135m --prompt "..."`.

The work is in infer/engine.py. Standard output has only the generated text (with a heading for each of several
drafters, or as one JSON object), everything else goes to standard error.
"""

import argparse
import json
import os
import sys
import threading
from dataclasses import replace
from functools import partial

from longdraft.infer.engine import Engine
from longdraft.infer.generation import Generation, Piece
from longdraft.infer.requests import Prompt, prompt_tokens
from longdraft.infer.sampling import SamplingParams, draw_seed
from longdraft.launch import cli
from longdraft.launch.arguments import LISTS, OF_ONE_TEXT, SAMPLING, given_sampling
from longdraft.launch.console import INTERRUPTED, at_ctrl_c, note, read_text, show
from longdraft.launch.runtime import Drafting, check_rows, heldout_rows, used_tokens

DIM, DRAFTED, OWN, PLAIN = "\033[2m", "\033[32m", "\033[36m", "\033[0m"
SHOWN_PROMPT = 600  # characters at its end
main = partial(cli.run, "generate")


def run(args: argparse.Namespace) -> int:
    """Decode with each drafter. Returns the exit status: 130 after Ctrl-C."""
    # What can be wrong is checked before the model is loaded, as far as it does not take the model.
    drafting, params = Drafting(args), SamplingParams(**given_sampling(args, (*OF_ONE_TEXT, *SAMPLING, *LISTS)))
    params = replace(params, seed=draw_seed()) if params.seed is None else params
    given = _prompt(args)
    # A lower bound of the positions, for the memory check: how many tokens a text has is not known yet.
    positions = params.max_new_tokens + (1 if isinstance(given, str) else len(given))
    target = drafting.open_target(min(positions, args.max_length or positions))
    if target.tokenizer is None:
        raise ValueError(f"{target.name} has no tokenizer files, so no text can be shown; add them")
    if args.heldout is not None:
        check_rows(heldout_rows(args.heldout), target)
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    asked = [*system, {"role": "user", "content": given}] if args.chat else given
    tokens = prompt_tokens(target, asked, "--chat" if args.chat else "--prompt")[: args.prompt_tokens]
    # A prompt that is given to the engine as text gets a text that continues it.
    prompt = given if isinstance(given, str) and not args.chat and args.prompt_tokens is None else tokens
    screen = Screen(args.json, several=len(drafting.names) > 1)
    if not args.chat:
        screen.prompt(target.tokenizer.decode(tokens))
    # All engines are opened first, so that an error of the last one comes before any output.
    engines = drafting.open_engines(target)
    done: dict[str, Generation] = {}
    for name, engine in engines.items():
        screen.begin(name)
        done[name] = _decode(screen, engine, name, prompt, params)
        if done[name].finish_reason == "cancelled":
            break
    screen.end(done, args.dtype, complete=len(done) == len(engines))
    return INTERRUPTED if any(generation.finish_reason == "cancelled" for generation in done.values()) else 0


def _prompt(args: argparse.Namespace) -> str | list[int]:
    """The text that was given or read from a file or standard input, or a held-out row's tokens."""
    if args.heldout is not None:
        rows = heldout_rows(args.heldout)
        if (row := args.row or 0) >= len(rows):
            raise ValueError(f"--row: {row}, but {rows.folder} has rows 0 to {len(rows) - 1}")
        return used_tokens(rows[row])
    if args.prompt_file is None and args.prompt not in (None, "-"):
        return args.prompt
    if args.prompt_file is None and sys.stdin is not None and sys.stdin.isatty():
        note("Reading the prompt from the terminal; end it with Ctrl-D")
    return read_text(args.prompt_file, "--prompt" if args.prompt_file is None else "--prompt-file")


def _decode(screen: "Screen", engine: Engine, name: str, prompt: Prompt, params: SamplingParams) -> Generation:
    """Decode with one drafter and print the text as it comes.

    The first Ctrl-C cancels the generation after the running step; what was generated so far is returned.
    """
    interrupted = threading.Event()

    def cancel() -> None:
        interrupted.set()
        engine.cancel(0)

    with at_ctrl_c(cancel):
        for piece in engine.stream([prompt], params):
            screen.show(piece)
            if piece.generation:
                screen.finish(name, piece.generation)
                return piece.generation
            if interrupted.is_set():  # cancelled again: at the signal the engine may not have started the request yet
                engine.cancel(0)
    raise AssertionError("the stream ended without a generation")


class Screen:
    """Prints generations: as they come, coloured on a terminal unless NO_COLOR is set, or as JSON at the end."""

    def __init__(self, as_json: bool, several: bool):
        self._json, self._several = as_json, several
        self._terminal = sys.stdout.isatty() and not as_json
        self._colour = self._terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def prompt(self, text: str) -> None:
        """Show the end of the prompt, on a terminal only."""
        if self._terminal:
            self._write(text[-SHOWN_PROMPT:], DIM)

    def begin(self, name: str) -> None:
        """Start the next drafter's text."""
        if self._several:
            self._write(f"\n--- {name} ---\n")

    def show(self, piece: Piece) -> None:
        """Show the text that a piece adds. Its colour says whether a drafter had proposed the tokens."""
        self._write(piece.text[: piece.accepted_text], DRAFTED)
        self._write(piece.text[piece.accepted_text :], OWN)

    def finish(self, name: str, generation: Generation) -> None:
        """Show the figures."""
        self._write("\n")
        accepted = sum(generation.stats.accepted_at_depth)
        colours = f" ({DRAFTED}{accepted} drafted{PLAIN}, {OWN}the target's own{PLAIN})" if self._colour else ""
        note(
            f"[{name}: {len(generation.tokens)} tokens{colours}, {generation.tokens_per_second:.1f} tokens/s, "
            f"{generation.tokens_per_step:.2f} tokens/step, ended by {generation.finish_reason}, "
            f"seed {generation.seed}]"
        )

    def end(self, done: dict[str, Generation], dtype: str, complete: bool) -> None:
        """Say whether several drafters gave the same tokens, and print the JSON."""
        outputs = [generation.tokens for generation in done.values()]
        same = all(tokens == outputs[0] for tokens in outputs)
        if self._several and complete:
            note(f"\nSame tokens from {', '.join(done)} ({dtype}): {'yes' if same else 'NO'}")
        if self._json:
            objects = [_as_json(name, generation) for name, generation in done.items()]
            shown = {"generations": objects, "same_tokens": same if complete else None} if self._several else objects[0]
            show(json.dumps(shown) + "\n")

    def _write(self, text: str, colour: str = "") -> None:
        if text and not self._json:
            show(f"{colour}{text}{PLAIN}" if colour and self._colour else text)


def _as_json(name: str, generation: Generation) -> dict:
    return {
        "drafter": name,
        "text": generation.text,
        "tokens": generation.tokens,
        "finish_reason": generation.finish_reason,
        "statistics": dict(generation.summary()),
    }


if __name__ == "__main__":
    sys.exit(main())
