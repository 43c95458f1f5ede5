"""What generate and bench share: opening the target that was asked for, prompts, the tree's size from the arguments."""

import argparse
import sys
from pathlib import Path

import torch

from longdraft.data_prep.shards import ShardSet
from longdraft.infer.measure import paying_tree, width_curve
from longdraft.infer.shape import TreeShape, likeliest_nodes
from longdraft.models.draft_folder import load_draft, read_info
from longdraft.models.hf import Target, load_target

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def target_source(path: str | None, gguf_file: str | None, draft: str | None) -> tuple[str, str | None]:
    """Path and .gguf file of the target that was named, or of the one that the draft was trained for."""
    if path is not None:
        return path, gguf_file
    if gguf_file is not None:
        raise ValueError("--gguf-file: a file of --target, which is not given")
    if draft is None:
        raise ValueError("--target: name a model, or give --draft, whose own target is then loaded")
    trained = read_info(draft).train_config["target"]
    return trained["path"], trained["gguf_file"]


def open_target(path: str, gguf_file: str | None, dtype: str, device: str | None) -> Target:
    """Load it, and say so."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    print(f"Loading {path} in {dtype} on {device}", file=sys.stderr, flush=True)
    return load_target(path, DTYPES[dtype], device, gguf_file)


def rates(draft: str) -> list[list[float]]:
    """How often each head's ranks were the target's own choice on held-out text, as the draft folder says."""
    tree = read_info(draft).tree
    found = tree.get("choice_rates")
    if not found:
        raise ValueError(
            f"{draft}: exported before its run's first held-out evaluation, so no tree can be chosen; train on to a "
            "step that heldout.every divides, and export again"
        )
    return found


def tree_of(draft: str, nodes: int) -> TreeShape:
    """The tree of the `nodes` likeliest nodes for this draft folder."""
    if nodes < 1:
        raise ValueError(f"--nodes: {nodes}, but a tree has at least 1 node; for none, use the plain drafter")
    return likeliest_nodes(rates(draft), nodes)


def paying_tree_of(target: Target, draft: str, context: int) -> TreeShape:
    """The tree that pays on this machine, from a short width curve; says so."""
    curve = width_curve(target, context, widths=(1, 2, 3, 4, 6, 8, 16, 40), repeats=2)
    shape, expected = paying_tree(target, load_draft(draft, target), rates(draft), curve)
    print(
        f"Tree of {len(shape.nodes)} nodes, which pays best by this machine's pass times: {expected:.2f}x plain "
        "decoding expected (--nodes sets another)",
        file=sys.stderr,
    )
    return shape


def heldout_rows(data: str | Path) -> ShardSet:
    """The held-out rows of a prepared folder."""
    return ShardSet(Path(data) / "heldout")


def heldout_prompts(data: str, count: int, length: int) -> list[list[int]]:
    """The first `length` tokens of `count` held-out rows that have as many, evenly spaced."""
    rows = heldout_rows(data)
    long = [i for i in range(len(rows)) if rows[i]["borders"][-1] >= length]
    if not (1 <= count <= len(long) and length >= 2):
        raise ValueError(
            f"{rows.folder} has {len(long)} rows of {length} tokens or more: --prompts {count} must lie in "
            f"1..{len(long)} and --prompt-tokens {length} in 2..{rows.manifest['seq_len']}"
        )
    return [used_tokens(rows[long[i * len(long) // count]])[:length] for i in range(count)]


def used_tokens(row: dict) -> list[int]:
    """A row's tokens without the filler behind them."""
    return row["tokens"][: row["borders"][-1]].tolist()


def prompt_tokens(args: argparse.Namespace, target: Target) -> list[int]:
    """The one prompt that the arguments name, as token ids."""
    if sum(given is not None for given in (args.prompt, args.prompt_file, args.heldout)) > 1:
        raise ValueError("give one of --prompt, --prompt-file and --heldout")
    if args.heldout is not None:
        rows = heldout_rows(args.heldout)
        if not 0 <= (args.row or 0) < len(rows):
            raise ValueError(f"--row: {args.row}, but {rows.folder} has rows 0 to {len(rows) - 1}")
        tokens = used_tokens(rows[args.row or 0])
    else:
        if args.prompt_file is not None:
            text = args.prompt_file.read_text(encoding="utf-8")
        else:
            text = sys.stdin.read() if args.prompt in (None, "-") else args.prompt
        tokens = target.tokenizer(text).input_ids
    return tokens[: args.prompt_tokens]
