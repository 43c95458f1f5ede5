"""The `longdraft` command: parses the arguments of a subcommand, then imports and runs its work.

A subcommand whose work is one call is a function here; each other one has a file of its name.
"""

import argparse
import importlib
import shlex
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version

from longdraft.launch.arguments import PARSERS
from longdraft.launch.console import end_process, note, run_command, show

COMMANDS = {
    "prepare": "pack text into shards of tokens (prepare regenerate: have the target answer it first)",
    "train": "train a draft on these shards, on every GPU of this machine",
    "export": "make a draft folder from a training checkpoint, reload and verify it",
    "convert": "make a draft folder from a draft that its authors published",
    "generate": "decode a prompt with any drafter",
    "serve": "serve OpenAI's interface with any drafter",
    "bench": "measure drafters against plain decoding",
    "report": "show the records of several benches on one page",
}
# Commands whose result is not their output, and commands that Ctrl-C may end at any point.
WORK_WITHOUT_OUTPUT, LEAVE_NOTHING_HALF_DONE = ("train", "export", "serve"), ("generate", "bench")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `longdraft COMMAND ...`; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        commands = "\n".join(f"  {name:10}{what}" for name, what in COMMANDS.items())
        usage = f"usage: longdraft COMMAND ...   (longdraft COMMAND --help lists its options)\n\n{commands}\n"
        return run_command("longdraft", lambda: show(usage))
    if argv[0] == "--version":
        return run_command("longdraft", lambda: show(f"longdraft {version('longdraft')}\n"))
    if argv[0] not in COMMANDS:
        note(f"longdraft: unknown command {argv[0]!r}; known: {', '.join(COMMANDS)}")
        return 2
    return run(argv[0], argv[1:])


def export(args: argparse.Namespace) -> None:
    from longdraft.train.export import export

    export(**vars(args))


def convert(args: argparse.Namespace) -> None:
    from longdraft.models.published import convert

    warnings.showwarning = lambda message, *_, **__: note(f"warning: {message}")
    draft, info = convert(args.source, args.out, args.target)
    size = sum(parameter.numel() for parameter in draft.parameters()) / 1e6
    method, target = type(draft).__name__.lower(), info.train_config["target"]["path"]
    show(
        f"Converted {args.source} to {args.out}: {method} ({size:.1f} M parameters) for {target}; next: longdraft "
        f"bench --draft {shlex.quote(str(args.out))} --data DATA\n"
    )


def report(args: argparse.Namespace) -> None:
    from longdraft.benchmarks.drafters.report import write_report

    write_report(args.runs, args.out, "--out")
    show(f"Written to {args.out}\n")


HERE = {command.__name__: command for command in (export, convert, report)}


def run(command: str, argv: Sequence[str]) -> int:
    """Run a command with these arguments. Returns the exit status: what the command returns, 2 after an error, 130
    after Ctrl-C."""
    load = partial(importlib.import_module, f"longdraft.launch.{command}")
    if command not in PARSERS:
        return load().main(argv) or 0

    def work() -> int | None:
        args = PARSERS[command]().parse_intermixed_args(argv)
        if command in HERE:
            return HERE[command](args)
        if getattr(args, "tensor_parallel", 1) == 1:
            return load().run(args)
        from longdraft.launch.ranks import run_on_ranks

        return run_on_ranks(command, argv, args, lambda: load().run(args))

    needs_output, by_force = command not in WORK_WITHOUT_OUTPUT, command in LEAVE_NOTHING_HALF_DONE
    # The estimate is printed; argparse takes beginnings of the option, too.
    needs_output |= command == "train" and any("--estimate".startswith(word) for word in argv if word > "--")
    return run_command(f"longdraft {command}", work, needs_output=needs_output, by_force=by_force)


if __name__ == "__main__":
    end_process(main())
