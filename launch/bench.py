"""Measure drafters against plain decoding: `longdraft bench --draft FOLDER --data DATA [--run RUN]`.

Argument parsing and printing; the measurements are in infer/bench.py, the table and picture in infer/report.py. The
last line of the output is one JSON object.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="longdraft bench", description="Exactness and speed of decoding.")
    add = parser.add_argument
    add("--target", help="a folder, a hub name, a .gguf file or smollm2-135m (default: the draft's own target)")
    add("--gguf-file", help="with --target: name of a .gguf file inside it")
    add("--draft", help="draft folder that `longdraft export` wrote, for the drafter that it is made for")
    add("--drafter", nargs="+", help="one or more, a+b for a combination; default: the draft's own")
    add("--option", action="append", default=[], metavar="KEY=VALUE", help="drafter option, DRAFTER.KEY=VALUE for one")
    add("--data", help="prepared folder; texts are the beginnings of its held-out rows")
    add("--text-file", nargs="+", type=Path, help="instead of --data: texts are the beginnings of these files")
    add("--tasks", nargs="+", default=["continue"], help="what to do with the texts in turn: continue, summarise, edit")
    add("--prompts", type=int, default=4, help="how many, evenly spaced over the held-out rows")
    add("--prompt-tokens", type=int, default=256, help="of a text")
    add("--new-tokens", type=int, default=128)
    add("--nodes", default="auto", help="nodes a step verifies: auto (what pays), all, or a number")
    add("--dtype", choices=("fp32", "bf16"), default="bf16", help="of the speeds; exactness is always shown in fp32")
    add("--device", help="default: cuda where there is one")
    add("--temperature", nargs="+", type=float, default=[0.0], help="one or more; 0 is greedy")
    add("--seed", type=int, default=0)
    add("--contexts", nargs="+", type=int, help="lengths for the cost of a pass by its rows (default: the prompts')")
    add("--noise", action="store_true", help="also acceptance with and without the noise in the drafters' ranking")
    add("--transformers", action="store_true", help="also time transformers' greedy generate on the same prompts")
    add("--loss-memory", action="store_true", help="only: peak memory of the heads' training loss at two lengths")
    add("--run", type=Path, metavar="RUN", help="training run's folder: bench.json, report.txt and report.png go there")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 where the draft is not exact."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.loss_memory:
        return _loss_memory()
    if (args.data is None) == (args.text_file is None):
        parser.error("--data, --text-file: name a prepared folder, whose held-out rows give the texts, or text files")
    # Here, not above: --help and a wrong argument should not wait for torch.
    from longdraft.infer.report import draw, table

    try:
        result = _bench(args)
    except (ValueError, RuntimeError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    metrics = []
    if args.run:
        from longdraft.train.tracking import read_metrics

        metrics = read_metrics(args.run)
    print(text := table(result, metrics))
    if args.run:
        (args.run / "bench.json").write_text(json.dumps(result, indent=1) + "\n")
        draw(result, metrics, args.run / "report.png")
        (args.run / "report.txt").write_text(text + "\n")
        print(f"Written to {args.run}: report.txt, report.png, bench.json")
    print(json.dumps(result))
    return 0


def _bench(args: argparse.Namespace) -> dict:
    from tqdm import tqdm

    from longdraft.infer.bench import BenchSettings, bench
    from longdraft.infer.drafters.build import build_drafter
    from longdraft.infer.tasks import make_tasks
    from longdraft.launch.runtime import (
        DTYPES,
        check_options,
        draft_for,
        drafter_names,
        file_texts,
        heldout_prompts,
        node_budget,
        open_target,
        options_for,
        read_options,
        target_source,
    )
    from longdraft.models.hf import load_transformers

    names, options = drafter_names(args.drafter, args.draft), read_options(args.option)
    check_options(names, options)
    source = target_source(args.target, args.gguf_file, args.draft)
    settings = BenchSettings(
        new_tokens=args.new_tokens,
        dtype=DTYPES[args.dtype],
        temperatures=tuple(args.temperature),
        seed=args.seed,
        nodes=node_budget(args.nodes),
        contexts=None if args.contexts is None else tuple(args.contexts),
        noise=args.noise,
    )
    target = open_target(*source, "fp32", args.device)
    if args.data is not None:
        texts = heldout_prompts(args.data, args.prompts, args.prompt_tokens)
    else:
        texts = file_texts(target, args.text_file, args.prompt_tokens)
    builders = {
        name: lambda target, name=name: build_drafter(
            name, target, draft_for(name, args.draft), options_for(name, options)
        )
        for name in names
        if name != "plain"
    }
    place = target.model.embed_tokens.weight.device
    theirs = load_transformers(source[0], settings.dtype, source[1]).to(place) if args.transformers else None
    with tqdm(desc="bench", unit="part", leave=False) as bar:

        def step(what: str) -> None:
            bar.set_postfix_str(what, refresh=False)
            bar.update()

        return bench(target, builders, make_tasks(target, texts, args.tasks), settings, theirs, step)


def _loss_memory() -> int:
    """Three heads at SmolLM2's width, two lengths: what is allocated beyond inputs, beside what the logits would be."""
    from longdraft.kernels.loss_memory import loss_peak_memory

    hidden, vocab, heads = 576, 49152, 3
    result = {}
    for tokens in (2048, 4096):
        peak, logits = loss_peak_memory(tokens, hidden, vocab, heads), heads * tokens * vocab * 4
        print(
            f"{heads} heads x {tokens} tokens x {vocab} words, fp32: peak {peak / 2**20:.0f} MiB beyond the inputs "
            f"(the logits alone would be {logits / 2**20:.0f} MiB)"
        )
        result[tokens] = {"peak_bytes": peak, "logits_bytes": logits}
    print(json.dumps({"loss_memory": result}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
