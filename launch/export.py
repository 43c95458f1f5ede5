"""A training run to a draft folder: `python launch/export.py RUN_DIR [--out FOLDER]`.

Argument parsing and nothing else; the work is in train/export.py.
"""

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="longdraft export", description="The newest checkpoint to a draft folder.")
    parser.add_argument("run_dir", help="the run's folder (train.run_dir)")
    parser.add_argument("--out", help="folder to write (default: RUN_DIR/draft)")
    args = parser.parse_args(argv)
    # Here, not above: --help and a wrong argument should not wait for torch.
    from longdraft.train.export import export

    try:
        export(args.run_dir, args.out)
    except ValueError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
