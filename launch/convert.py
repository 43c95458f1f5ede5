"""Make a draft folder of a published draft: `longdraft convert SOURCE --out FOLDER [--target TARGET]`.

Only argument parsing is here; the work is in models/published.py.
"""

import argparse
import shlex
import warnings
from collections.abc import Sequence

from longdraft.launch.console import leave, note, run_command, show


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 2 after an error, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="longdraft convert",
        description="Make a draft folder of a published draft: LongSpec's blocks, TokenSwift's merged checkpoints.",
    )
    add = parser.add_argument
    add("source", help="the draft's file of weights, its folder as it was published, or its hub name")
    add("--out", required=True, help="draft folder to write")
    add(
        "--target",
        help="the model that it drafts for (default: as the authors pair them; a merged checkpoint drafts for itself, "
        "unless the base model in it is given)",
    )
    add("--gguf-file", help="with --target: name of a .gguf file inside it")
    add("--norms", nargs=3, metavar="NAME", help="for a LongSpec draft whose names do not tell: its norms, in order")

    def work() -> None:
        args = parser.parse_args(argv)
        if args.gguf_file is not None and args.target is None:
            raise ValueError("--gguf-file: it names a file inside --target, which is not given")
        # Imported here so that --help and a wrong argument need not wait for torch.
        from longdraft.models.published import convert

        warnings.showwarning = lambda message, *_, **__: note(f"warning: {message}")
        draft, info = convert(args.source, args.out, args.target, args.gguf_file, args.norms)
        size = sum(parameter.numel() for parameter in draft.parameters()) / 1e6
        method, target = type(draft).__name__.lower(), info.train_config["target"]["path"]
        show(
            f"Converted {args.source} to {args.out}: {method} ({size:.1f} M parameters) for {target}; next: longdraft "
            f"bench --draft {shlex.quote(str(args.out))} --data DATA\n"
        )

    return run_command(parser.prog, work)


if __name__ == "__main__":
    leave(main())
