"""Make a draft folder of a training run: `python launch/export.py RUN_DIR [--out FOLDER]`.

Only argument parsing is here; the work is in train/export.py.
"""

import argparse
import sys
from collections.abc import Sequence

from longdraft.launch.console import run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 2 after an error, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="longdraft export", description="Make a draft folder of a run's weights.")
    parser.add_argument("run_dir", help="the run's folder (train.run_dir)")
    parser.add_argument("--out", help="folder to write (default: RUN_DIR/draft)")
    # It chose between two formats. It is not shown, and is read only to say what to use instead.
    parser.add_argument("--format", default="longdraft", help=argparse.SUPPRESS)
    parser.add_argument(
        "--draft-vocab-size",
        type=int,
        help="let the draft propose only this many tokens, the most frequent ones of the run's training data",
    )
    parser.add_argument(
        "--best", action="store_true", help="take the weights that decoded best during training (default: the newest)"
    )
    parser.add_argument("--card", action="store_true", help="also write a model card, and generate.py for transformers")
    parser.add_argument("--push", metavar="OWNER/NAME", help="upload it, with its card, to this repository on the hub")

    def work() -> None:
        args = parser.parse_args(argv)
        if args.format != "longdraft":
            raise ValueError(
                f"--format: give longdraft or nothing, not {args.format!r}: the file for vLLM up to 0.32 is no longer "
                "written, since longdraft's vLLM plug-in reads the draft folder itself "
                "(docs/serving.md#in-vllms-own-engine)"
            )
        # Imported here so that --help and a wrong argument need not wait for torch.
        from longdraft.train.export import export

        export(
            args.run_dir,
            args.out,
            draft_vocab_size=args.draft_vocab_size,
            best=args.best,
            card=args.card,
            push=args.push,
        )

    return run_command(parser.prog, work, needs_output=False)


if __name__ == "__main__":
    sys.exit(main())
