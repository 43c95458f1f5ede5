"""Decode a prompt with one drafter or several: `longdraft generate --target smollm2-135m --prompt "..."`.

Only arguments and printing are here; the work is in infer/engine.py. Standard output has only the generated text (with
a heading for each of several drafters, or as one JSON object), everything else goes to standard error.
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

from longdraft.launch.console import INTERRUPTED, leave, note, on_ctrl_c, read_text, run_command, show
from longdraft.launch.shared_options import add_drafting, add_model, add_numbers, add_sampling, given_sampling

if TYPE_CHECKING:
    from longdraft.infer.engine import Engine
    from longdraft.infer.generation import Generation, Piece
    from longdraft.infer.requests import Prompt
    from longdraft.infer.sampling import SamplingParams
    from longdraft.launch.runtime import Drafting
    from longdraft.models.target import Target

DIM, DRAFTED, OWN, PLAIN = "\033[2m", "\033[32m", "\033[36m", "\033[0m"
SHOWN_PROMPT = 600  # characters at its end
# Fields of SamplingParams besides those of shared_options.py: (type, help).
NUMBERS = {
    "max_new_tokens": (int, "default: 256"),
    "temperature": (float, "0, the default, is greedy"),
    "seed": (int, "the same seed gives the same text with any drafter (default: a random one, which is shown)"),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="longdraft generate", description="Decode a prompt with any drafter.")
    add_model(parser)
    add = parser.add_argument_group("prompt").add_argument
    add("--prompt", help="the text (default, or -: read it from standard input)")
    add("--prompt-file", type=Path, help="a text file")
    add("--heldout", type=Path, metavar="DATA", help="take the prompt from the held-out rows of a prepared folder")
    add("--row", type=int, help="with --heldout: which row (default: 0, the first)")
    add("--prompt-tokens", type=int, metavar="N", help="use only the first N tokens of the prompt")
    add("--chat", action="store_true", help="put the prompt into the target's chat template, as a user's message")
    add("--system", help="with --chat: the system message")
    add_drafting(parser, several=True)
    add = parser.add_argument_group("sampling").add_argument
    add_numbers(add, NUMBERS)
    add_sampling(add)
    add = parser.add_argument_group("output").add_argument
    help = "print one JSON object instead of the text: text, tokens, finish reason, statistics"
    add("--json", action="store_true", help=help)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 2 after an error, 130 after Ctrl-C."""
    parser = _parser()
    return run_command(parser.prog, lambda: _generate(parser.parse_args(argv)), by_force=True)


def _generate(args: argparse.Namespace) -> int:
    # Imported here so that --help and a wrong argument need not wait for torch.
    from longdraft.launch.runtime import Drafting

    # Everything that can be wrong is checked before the model is loaded.
    drafting, params = Drafting(args), _sampling(args)
    drafting.check_sampling(params)
    _check_prompt(args)
    given = _prompt(args)
    target = drafting.open_target(_least_positions(drafting, given, params))
    tokens = _prompt_tokens(args, target, given)
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
        done[name] = _run(screen, engine, name, prompt, params)
        if done[name].finish_reason == "cancelled":
            break
    screen.end(done, args.dtype, complete=len(done) == len(engines))
    return INTERRUPTED if any(generation.finish_reason == "cancelled" for generation in done.values()) else 0


def _sampling(args: argparse.Namespace) -> "SamplingParams":
    from longdraft.infer.sampling import SamplingParams, draw_seed

    given = {name: getattr(args, name) for name in NUMBERS if getattr(args, name) is not None}
    params = SamplingParams(**given_sampling(args) | given)
    return replace(params, seed=draw_seed()) if params.seed is None else params


def _check_prompt(args: argparse.Namespace) -> None:
    """Raise ValueError for options of the prompt that do not go together."""
    if sum(source is not None for source in (args.prompt, args.prompt_file, args.heldout)) > 1:
        raise ValueError("give one of --prompt, --prompt-file and --heldout")
    if args.row is not None and args.heldout is None:
        raise ValueError("--row: it selects a row of --heldout, which is not given")
    if args.system is not None and not args.chat:
        raise ValueError("--system: it is part of a --chat; give both or leave it out")
    if args.chat and (args.heldout is not None or args.prompt_tokens is not None):
        raise ValueError("--chat: it takes a whole message; leave out --heldout and --prompt-tokens")
    if args.prompt_tokens is not None and args.prompt_tokens < 1:
        raise ValueError(f"--prompt-tokens: {args.prompt_tokens}; a prompt has at least 1")


def _prompt(args: argparse.Namespace) -> str | list[int]:
    """The text that was given or read from a file or standard input, or a held-out row's tokens."""
    from longdraft.infer.requests import check_text
    from longdraft.launch.runtime import heldout_rows, used_tokens

    if args.heldout is not None:
        rows = heldout_rows(args.heldout)
        if not 0 <= (args.row or 0) < len(rows):
            raise ValueError(f"--row: {args.row}, but {rows.folder} has rows 0 to {len(rows) - 1}")
        return used_tokens(rows[args.row or 0])
    if args.prompt_file is not None:
        text, source = read_text(args.prompt_file, "--prompt-file"), f"--prompt-file: {args.prompt_file}"
    elif args.prompt in (None, "-"):
        if sys.stdin is not None and sys.stdin.isatty():
            note("Reading the prompt from the terminal; end it with Ctrl-D")
        text, source = read_text(None, "--prompt or --prompt-file"), "standard input"
    else:
        text, source = args.prompt, "--prompt"
    if not text:
        raise ValueError(f"{source} is empty; a prompt has at least one token")
    check_text(source, text)
    if args.system is not None:
        check_text("--system", args.system)
    return text


def _least_positions(drafting: "Drafting", prompt: str | list[int], params: "SamplingParams") -> int:
    """A lower bound of the positions that prompt and new tokens take, for the memory check before the target is loaded.

    What a chat template adds is left out. A text is tokenized only for a GPU, where it may be what does not fit.
    """
    from longdraft.models.hf import load_tokenizer

    args = drafting.args
    if not isinstance(prompt, str):
        length = len(prompt)
    else:
        length = 1 if drafting.device.type == "cpu" else len(load_tokenizer(*drafting.source)(prompt).input_ids)
    positions = min(length, args.prompt_tokens or length) + params.max_new_tokens
    return min(positions, args.max_length or positions)


def _prompt_tokens(args: argparse.Namespace, target: "Target", prompt: str | list[int]) -> list[int]:
    """The prompt as token ids."""
    from longdraft.infer.requests import prompt_tokens
    from longdraft.launch.runtime import check_rows, heldout_rows

    if target.tokenizer is None:
        raise ValueError(f"{target.name} has no tokenizer files, so no text can be shown; add them")
    if args.heldout is not None:
        check_rows(heldout_rows(args.heldout), target)
    if args.chat:
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        return prompt_tokens(target, [*system, {"role": "user", "content": prompt}], "--chat")
    return prompt_tokens(target, prompt)[: args.prompt_tokens]


def _run(screen: "Screen", engine: "Engine", name: str, prompt: "Prompt", params: "SamplingParams") -> "Generation":
    """Decode with one drafter and print the text as it comes.

    The first Ctrl-C cancels the generation after the running step; what was generated so far is returned.
    """
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
        if self._several and not self._json:
            self._write(f"\n--- {name} ---\n")

    def show(self, piece: "Piece") -> None:
        """Show the text that a piece adds. Its colour says whether a drafter had proposed the tokens."""
        if not self._json:
            self._write(piece.text[: piece.accepted_text], DRAFTED)
            self._write(piece.text[piece.accepted_text :], OWN)

    def finish(self, name: str, generation: "Generation") -> None:
        """Show the figures."""
        if not self._json:
            self._write("\n")
        accepted = sum(generation.stats.accepted_at_depth)
        colours = f" ({DRAFTED}{accepted} drafted{PLAIN}, {OWN}the target's own{PLAIN})" if self._colour else ""
        note(
            f"[{name}: {len(generation.tokens)} tokens{colours}, {generation.tokens_per_second:.1f} tokens/s, "
            f"{generation.tokens_per_step:.2f} tokens/step, ended by {generation.finish_reason}, "
            f"seed {generation.seed}]"
        )

    def end(self, done: "dict[str, Generation]", dtype: str, complete: bool) -> None:
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
