"""A training run to a draft folder: `python launch/export.py RUN_DIR [--out FOLDER] [--format vllm-medusa]`.

Argument parsing and nothing else; the work is in train/export.py.
"""

import argparse
import sys
from collections.abc import Sequence

from longdraft.launch.console import framed


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2 after an error, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="longdraft export", description="A run's weights to a draft folder.")
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
        help="let the draft propose only so many tokens, the most frequent of the run's training data",
    )
    parser.add_argument(
        "--best", action="store_true", help="the weights that decoded best while training (default: the newest)"
    )
    parser.add_argument("--card", action="store_true", help="also a model card, and generate.py for transformers")
    parser.add_argument("--push", metavar="OWNER/NAME", help="upload it, with its card, to the hub's repository")

    def work() -> None:
        args = parser.parse_args(argv)
        # Here, not above: --help and a wrong argument should not wait for torch.
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

    return framed(parser.prog, work, shows=False)


if __name__ == "__main__":
    sys.exit(main())
