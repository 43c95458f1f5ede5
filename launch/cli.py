"""The `longdraft` command: one word for each launch script. Not here: any work."""

import importlib
import sys

from longdraft.launch.console import framed, leave, note, show

COMMANDS = {
    "prepare": "text to packed shards",
    "train": "shards to a trained draft, on every GPU through DeepSpeed's launcher",
    "export": "a training checkpoint to a draft folder, reloaded and compared",
    "convert": "a draft that its authors published to a draft folder",
    "generate": "decode a prompt with any drafter",
    "serve": "answer requests of OpenAI's interface with any drafter",
    "bench": "measure drafters against plain decoding",
    "report": "several benches' records on one page",
}


def main(argv: list[str] | None = None) -> int:
    """Run `longdraft COMMAND ...`; returns the exit status."""
    if argv is None:
        leave(_run(sys.argv[1:]))
    return _run(argv)


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        commands = "\n".join(f"  {name:10}{what}" for name, what in COMMANDS.items())
        usage = f"usage: longdraft COMMAND ...   (longdraft COMMAND --help tells more)\n\n{commands}\n"
        return framed("longdraft", lambda: show(usage))
    if argv[0] not in COMMANDS:
        note(f"longdraft: unknown command {argv[0]!r}; known: {', '.join(COMMANDS)}")
        return 2
    try:
        module = importlib.import_module(f"longdraft.launch.{argv[0]}")
        # In one process `train` would be a single rank: the command starts DeepSpeed's launcher itself.
        return (module.start if argv[0] == "train" else module.main)(argv[1:]) or 0
    except KeyboardInterrupt:  # while the command is read; from then on it says more itself
        print(f"longdraft {argv[0]}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
