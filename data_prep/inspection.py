"""Reports on a prepared folder as text: what its manifests count, and samples."""

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from longdraft.data_prep.shards import MANIFEST, SPLITS, ShardSet, read_manifest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

N_SAMPLES, SAMPLE_TOKENS = 3, 160


def inspect(folder: Path, tokenizer: "PreTrainedTokenizerFast | None" = None, tokenizer_hash: str = "") -> str:
    """Inspect a finished folder, whose shards are compared with their hashes.

    tokenizer: decodes the samples; with None there are none. tokenizer_hash: the tokenizer's, to compare with the
    folder's. What the loss counts of a sample is between 《 and 》.

    Raises ValueError if the folder is not finished, a shard is damaged, or another tokenizer made the folder.
    """
    manifest = read_manifest(folder / MANIFEST)
    lines = [f"{folder}: rows of {manifest['seq_len']:,} tokens"]
    for split in SPLITS:
        rows = ShardSet(folder / split)
        rows.verify()
        lines += _numbers(split, rows)
    if tokenizer is not None:
        if tokenizer_hash != manifest["tokenizer_sha256"]:
            raise ValueError(f"--target: {folder} was prepared with another tokenizer; give the target of that")
        lines += _samples(ShardSet(folder / "train"), tokenizer)
    return "\n".join(lines)


def _numbers(split: str, rows: ShardSet) -> list[str]:
    manifest, places = rows.manifest, len(rows) * rows.manifest["seq_len"]
    tokens = manifest["tokens"]
    # Older manifests, of plain text alone, do not count the supervised tokens: all are.
    supervised = manifest.get("supervised_tokens", tokens)
    lines = [
        f"  {split}: {len(rows):,} rows, {tokens:,} tokens, of which the loss counts {supervised / max(1, tokens):.1%}",
        f"    {1 - tokens / max(1, places):.2%} filler",
        f"    {manifest['documents']:,} documents in {manifest['pieces']:,} pieces",
    ]
    lines += [
        f"    {name}: {counts['tokens'] / max(1, tokens):.1%} of the tokens, {counts['documents']:,} documents"
        for name, counts in manifest.get("mix", {}).items()
    ]
    for what in ("bad", "dropped"):
        lines += [
            f"    {what}: {n:,} {why}, first {manifest.get('examples', {}).get(why, 'not named')}"
            for why, n in manifest[what].items()
        ]
    return lines


def _samples(rows: ShardSet, tokenizer: "PreTrainedTokenizerFast") -> list[str]:
    """The first piece of some rows across the split, from a little before the first token that the loss counts."""
    lines, n = [], min(N_SAMPLES, len(rows))
    for i in (k * len(rows) // n for k in range(n)):
        row = rows[i]
        length = int(row["borders"][1])
        start = max(0, int(row["loss"][:length].argmax()) - SAMPLE_TOKENS // 2)
        shown = slice(start, min(length, start + SAMPLE_TOKENS))
        tokens, loss = row["tokens"][shown], row["loss"][shown]
        borders = [0, *(np.flatnonzero(loss[1:] != loss[:-1]) + 1).tolist(), len(tokens)]
        runs = ((str(tokenizer.decode(tokens[a:b].tolist())), loss[a]) for a, b in pairwise(borders))
        text = "".join(f"《{run}》" if counted else run for run, counted in runs)
        lines.append(f"  sample, train row {i}, {rows.pieces(i)[0][0]} from token {start:,} on:")
        lines += [f"    | {line}" for line in text.splitlines()]
    return lines
