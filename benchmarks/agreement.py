"""How often a trained draft is right, on as many rows as the figure wants.

`python benchmarks/agreement.py configs/longspec/smollm2.yaml --stage onward --draft smollm2-135m-longspec
train.precision=bf16` reads the stage's data and prints Markdown: for each part of the draft, how often its first
candidate and one of its first three are the target's own choice, the overlap of both distributions, and how often the
first candidate is the text's token; held out, and in training, which says what more of such text could bring at most.
A training looks at `heldout.choices` of them, 256 as a rule, which is right within 3 points; 6,400 within 0.6.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from longdraft.benchmarks.report import markdown
from longdraft.train.launcher import settle_device
from longdraft.train.ranks import join_ranks, leave_ranks
from longdraft.train.setup import open_run
from longdraft.train.stages import load_stages
from longdraft.train.validation import validate


def lines(split: str, part_names: Sequence[str], found: Mapping[str, Any], choices: int) -> list[list[str]]:
    """A line for each part, of what `validate` found; the choice with its standard error."""
    columns = found["choice_rates"], found["overlaps"], found["rank_rates"]
    return [
        [
            split, name, f"{100 * chosen[0]:.1f} ± {100 * (chosen[0] * (1 - chosen[0]) / choices) ** 0.5:.1f}",
            f"{100 * sum(chosen):.1f}", f"{100 * overlap:.1f}", f"{100 * text[0]:.1f}",
        ]
        for name, chosen, overlap, text in zip(part_names, *columns, strict=True)
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="How often a trained draft is right, held out and in training.")
    parser.add_argument("config", help="a YAML file of configs/")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    parser.add_argument("--stage", help="of a file with stages: the one whose data is read (default: the first)")
    parser.add_argument("--draft", required=True, help="a draft folder, or the name of one that comes along")
    parser.add_argument("--rows", type=int, default=100, help="of each split, evenly spread (default: 100)")
    parser.add_argument("--choices", type=int, default=6400, help="of each split (default: 6400)")
    args = parser.parse_intermixed_args(argv)
    overrides = [*args.overrides, f"heldout.rows={args.rows}", f"heldout.choices={args.choices}"]
    settle_device(args.config, overrides)
    config = load_stages(args.config, overrides, args.stage, args.draft)[0].config
    ranks = join_ranks()
    run = open_run(config, ranks)
    table = list[list[str]]()
    for split, rows in (("held out", run.heldout_rows), ("training", run.rows)):
        found = validate(run, rows)
        table += lines(split, run.method.part_names, found, args.choices)
    leave_ranks(ranks)
    if ranks.first:
        print(markdown(["rows", "part", "choice, %", "among three, %", "overlap, %", "text, %"], table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
