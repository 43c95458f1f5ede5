"""The `longdraft` command, which runs the launch script that its first argument names."""

import importlib
import sys

from longdraft.launch.console import leave, note, run_command, show

COMMANDS = {
    "prepare": "pack text into shards of tokens",
    "train": "train a draft on these shards, on every GPU through DeepSpeed's launcher",
    "export": "make a draft folder of a training checkpoint, reload it and compare",
    "convert": "make a draft folder of a draft that its authors published",
    "generate": "decode a prompt with any drafter",
    "serve": "serve OpenAI's interface with any drafter",
    "bench": "measure drafters against plain decoding",
    "report": "show the records of several benches on one page",
}


def main(argv: list[str] | None = None) -> int:
    """Run `longdraft COMMAND ...`; returns the exit status."""
    if argv is None:
        leave(_run(sys.argv[1:]))
    return _run(argv)


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        commands = "\n".join(f"  {name:10}{what}" for name, what in COMMANDS.items())
        usage = f"usage: longdraft COMMAND ...   (longdraft COMMAND --help lists its options)\n\n{commands}\n"
        return run_command("longdraft", lambda: show(usage))
    if argv[0] not in COMMANDS:
        note(f"longdraft: unknown command {argv[0]!r}; known: {', '.join(COMMANDS)}")
        return 2
    try:
        module = importlib.import_module(f"longdraft.launch.{argv[0]}")
        # `train.main` is a single rank; `train.start` starts DeepSpeed's launcher.
        return (module.start if argv[0] == "train" else module.main)(argv[1:]) or 0
    except KeyboardInterrupt:  # while the module is imported; later the command handles it
        print(f"longdraft {argv[0]}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
