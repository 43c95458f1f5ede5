"""What a draft is best trained for: one draft for each `train.loss`, everything else alike, in one table.

`python benchmarks/objectives.py configs/longspec/smollm2.yaml --stage short --out runs/objectives
stages.short.train.steps=200 decoding.prompts=4 'decoding.contexts=[512]'` trains one after another, from the same seed
on the same rows, and prints Markdown: of the draft's first part and of its last, how often its first candidate is the
target's own choice and the overlap of both distributions on held-out rows; tokens a step on held-out prompts, greedy
and at temperature 1, all nodes verified; seconds of a step of training. A command that was stopped goes on.

`--data text=FOLDER own=FOLDER` trains for each on each prepared folder, whose own held-out rows its shares are of.
`--decode 512 2048` then asks all of them for the continuations of benchmarks/contexts.py, which are the same for all,
beside the look-ups and together with them, and prints a table of speeds for each temperature.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from longdraft.benchmarks.answers import Record
from longdraft.benchmarks.contexts import questions
from longdraft.benchmarks.contexts import table as speeds
from longdraft.benchmarks.drafters import BenchSettings, bench
from longdraft.benchmarks.report import markdown
from longdraft.infer.drafters.build import build_drafter
from longdraft.models.draft_files import WEIGHTS
from longdraft.models.files import file_digest
from longdraft.train.config import CHOICES, Config
from longdraft.train.export import export
from longdraft.train.launcher import settle_device
from longdraft.train.loop import train
from longdraft.train.ranks import join_ranks, leave_ranks
from longdraft.train.setup import open_target, whole_target
from longdraft.train.stages import load_stages
from longdraft.train.tracking import read_metrics

LOSSES = CHOICES["train.loss"]
LOOK_UPS = ("prompt_lookup", "token_recycling")  # the first of them also together with each draft
NEW_TOKENS = 64


def variant(config: Config, loss: str, kl_share: float, text_weight: float, out: Path) -> Config:
    """The config that trains for `loss`, in a folder of its own, decoding after its last step."""
    steps = config.train.steps
    if steps is None:
        raise ValueError("train.steps: none, and these trainings are compared after as many steps; give a number")
    kl_steps = int(kl_share * steps) if loss in ("overlap", "acceptance") else None
    weight = text_weight if loss == "mix" else None
    own = replace(config.train, loss=loss, kl_steps=kl_steps, text_weight=weight, run_dir=str(out / loss))
    decoding = replace(config.decoding, every=steps, temperatures=(0.0, 1.0))
    return replace(config, train=own, decoding=decoding)


def decode(trained: Mapping[str, Config], contexts: Sequence[int], each: int, out: Path) -> str:
    """Speed over plain decoding and tokens a step of the drafts, the look-ups, and both together, in bf16: Markdown."""
    target = whole_target(next(iter(trained.values())))
    drafters: dict[str, tuple[str, Path | None]] = {name: (name, None) for name in LOOK_UPS}
    for name, config in trained.items():
        folder, method = export(config.train.run_dir, target=target), config.draft.method
        drafters |= {name: (method, folder), f"{name}, {LOOK_UPS[0]}": (f"{method}+{LOOK_UPS[0]}", folder)}
    target.model.to(torch.bfloat16)
    asked = questions(target, contexts, each)
    builders = {
        name: lambda target, drafter=drafter, draft=draft: build_drafter(drafter, target, draft)
        for name, (drafter, draft) in drafters.items()
    }
    settings = BenchSettings(NEW_TOKENS, temperatures=(0.0, 1.0), proof="off", passes=False)
    weights = {name: None if draft is None else file_digest(draft / WEIGHTS) for name, (_, draft) in drafters.items()}
    given = {"weights": weights, "new_tokens": NEW_TOKENS, "questions": [one.question.turns for one in asked]}
    return speeds(bench(target, builders, asked, settings, record=Record(out / "decoded", given)))


def row(loss: str, records: Sequence[Mapping[str, Any]], contexts: Sequence[int]) -> list[str]:
    last = {key: value for record in records for key, value in record.items()}
    cells = [loss]
    for part in (0, -1):
        cells += [f"{100 * last['heldout_choice_rates'][part][0]:.1f}", f"{100 * last['heldout_overlaps'][part]:.1f}"]
    cells += [f"{last[f'decode_tokens_per_step/ctx{c}.T{t}']:.2f}" for c in contexts for t in (0, 1)]
    times = sorted(record["step_s"] for record in records if "step_s" in record)
    return [*cells, f"{times[len(times) // 2]:.2f}"]


def table(rows: Sequence[Sequence[str]], contexts: Sequence[int]) -> str:
    places = [f"{what}, {part} %" for part in ("first", "last") for what in ("choice", "overlap")]
    speeds = [f"tokens/step at {c}, T {t}" for c in contexts for t in (0, 1)]
    return markdown(["train.loss", *places, *speeds, "step, s"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What a draft is best trained for, in one table.")
    parser.add_argument("config", help="a YAML file of configs/")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="for all of them")
    parser.add_argument("--stage", help="of a file with stages: this one alone")
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--data", nargs="+", default=[], metavar="NAME=FOLDER", help="in place of the recipe's")
    parser.add_argument("--decode", nargs="+", type=int, default=[], metavar="TOKENS", help="lengths of prompts")
    parser.add_argument("--each", type=int, default=2, help="prompts of every kind at every length")
    parser.add_argument("--kl-share", type=float, default=0.4, help="of the steps, before overlap and acceptance")
    parser.add_argument("--text-weight", type=float, default=0.5, help="of mix")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    args = parser.parse_intermixed_args(argv)
    settle_device(args.config, args.overrides)
    # In the place of the recipe's own objective, whose warm-up may be longer than these trainings.
    plain = ["train.loss=cross_entropy", "train.kl_steps=null", "train.text_weight=null"]
    config = load_stages(args.config, [*plain, *args.overrides], args.stage)[0].config
    trained = {loss: variant(config, loss, args.kl_share, args.text_weight, args.out) for loss in args.losses}
    if args.data:
        trained = {
            f"{loss}, {data}": replace(
                variant(config, loss, args.kl_share, args.text_weight, args.out / data),
                data=replace(config.data, path=folder),
            )
            for data, folder in _folders(args.data).items()
            for loss in args.losses
        }
    ranks = join_ranks()
    target = open_target(config, ranks)
    for own in trained.values():
        if not train(own, ranks, target):
            return 1
    leave_ranks(ranks)
    if ranks.rank:
        return 0
    contexts = config.decoding.contexts
    print(table([row(name, read_metrics(own.train.run_dir), contexts) for name, own in trained.items()], contexts))
    if args.decode:
        print(f"\n{decode(trained, args.decode, args.each, args.out)}")
    return 0


def _folders(given: Sequence[str]) -> dict[str, str]:
    found = {name: folder for name, _, folder in (one.partition("=") for one in given)}
    for name, folder in found.items():
        if not (name and folder and (Path(folder) / "train").is_dir()):
            raise ValueError(f"--data: {name}={folder}; give a name and a folder that `longdraft prepare` made")
    if len(found) < len(given):
        raise ValueError(f"--data: {' '.join(given)}; give each a name of its own")
    return found


if __name__ == "__main__":
    sys.exit(main())
