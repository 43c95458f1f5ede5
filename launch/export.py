"""Make a draft folder of a training run: `python launch/export.py RUN_DIR [--out FOLDER] [--format vllm-medusa]`.

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
    parser.add_argument("--out", help="folder to write (default: RUN_DIR/draft, or RUN_DIR/FORMAT for another format)")
    parser.add_argument(
        "--format",
        default="longdraft",
        help="longdraft (default), or vllm-medusa: Medusa heads or silu_chain for vLLM's `method: medusa`, which vLLM "
        "has up to 0.32 (0.33 removed it)",
    )
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
        # Imported here so that --help and a wrong argument need not wait for torch.
        from longdraft.train.export import export

        export(
            args.run_dir,
            args.out,
            form=args.format,
            draft_vocab_size=args.draft_vocab_size,
            best=args.best,
            card=args.card,
            push=args.push,
        )

    return run_command(parser.prog, work, needs_output=False)


if __name__ == "__main__":
    sys.exit(main())
