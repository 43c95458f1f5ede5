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
    add("--draft", help="draft folder that `longdraft export` wrote; without it plain decoding alone is measured")
    add("--data", help="prepared folder; prompts are the beginnings of its held-out rows")
    add("--prompts", type=int, default=4, help="how many, evenly spaced over the held-out rows")
    add("--prompt-tokens", type=int, default=256)
    add("--new-tokens", type=int, default=128)
    add("--nodes", type=int, help="size of the tree (default: what pays by the measured width curve)")
    add("--dtype", choices=("fp32", "bf16"), default="bf16", help="of the speeds; exactness is always shown in fp32")
    add("--device", help="default: cuda where there is one")
    add("--temperature", type=float, default=0.0)
    add("--seed", type=int, default=0)
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
    if args.nodes is not None and args.draft is None:
        parser.error("--nodes: the size of a draft's tree; give --draft too")
    if args.data is None:
        parser.error("--data: name a prepared folder, whose held-out rows give the prompts")
    # Here, not above: --help and a wrong argument should not wait for torch.
    from longdraft.infer.report import draw, table
    from longdraft.train.tracking import read_metrics

    try:
        result = _bench(args)
    except (ValueError, RuntimeError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    metrics = read_metrics(args.run) if args.run else []
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
    from longdraft.launch.runtime import DTYPES, heldout_prompts, open_target, rates, target_source, tree_of
    from longdraft.models.draft_folder import load_draft
    from longdraft.models.hf import load_transformers

    prompts = heldout_prompts(args.data, args.prompts, args.prompt_tokens)
    source = target_source(args.target, args.gguf_file, args.draft)
    target = open_target(*source, "fp32", args.device)
    settings = BenchSettings(
        new_tokens=args.new_tokens,
        dtype=DTYPES[args.dtype],
        temperature=args.temperature,
        seed=args.seed,
        shape=tree_of(args.draft, args.nodes) if args.draft and args.nodes is not None else None,
        rates=rates(args.draft) if args.draft else None,
    )
    draft = load_draft(args.draft, target) if args.draft else None
    place = target.model.embed_tokens.weight.device
    theirs = load_transformers(source[0], settings.dtype, source[1]).to(place) if args.transformers else None
    with tqdm(desc="bench", unit="part", leave=False) as bar:

        def step(what: str) -> None:
            bar.set_postfix_str(what, refresh=False)
            bar.update()

        return bench(target, draft, prompts, settings, theirs, step)


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
