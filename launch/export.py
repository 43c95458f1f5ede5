"""Make a draft folder of a training run: `longdraft export RUN_DIR [--out FOLDER]`. The work is in train/export.py."""

import argparse
import sys
from functools import partial

from longdraft.launch import cli

main = partial(cli.run, "export")


def run(args: argparse.Namespace) -> None:
    from longdraft.train.export import export

    export(**vars(args))


if __name__ == "__main__":
    sys.exit(main())
