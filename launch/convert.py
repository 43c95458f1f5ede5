"""Make a draft folder of a published draft: `longdraft convert SOURCE --out FOLDER`. The work is in
models/published.py."""

import argparse
import shlex
import sys
import warnings
from functools import partial

from longdraft.launch import cli
from longdraft.launch.console import note, show
from longdraft.models.published import convert

main = partial(cli.run, "convert")


def run(args: argparse.Namespace) -> None:
    warnings.showwarning = lambda message, *_, **__: note(f"warning: {message}")
    draft, info = convert(args.source, args.out, args.target)
    size = sum(parameter.numel() for parameter in draft.parameters()) / 1e6
    method, target = type(draft).__name__.lower(), info.train_config["target"]["path"]
    show(
        f"Converted {args.source} to {args.out}: {method} ({size:.1f} M parameters) for {target}; next: longdraft "
        f"bench --draft {shlex.quote(str(args.out))} --data DATA\n"
    )


if __name__ == "__main__":
    sys.exit(main())
