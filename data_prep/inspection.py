"""Reports on a prepared folder as text: what its manifests count, and samples."""

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from longdraft.data_prep.shards import MANIFEST, SPLITS, ShardSet, read_manifest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

N_SAMPLES, SAMPLE_TOKENS = 3, 160
# The fields of a split's manifest that are shown; shard_task.py describes them.
COUNTS = ("rows", "tokens", "supervised_tokens", "documents", "pieces", "mix", "bad", "dropped", "examples")


def inspect(folder: Path, tokenizer: "PreTrainedTokenizerFast | None" = None) -> str:
    """Inspect a finished folder. Its shards are compared with their hashes.

    tokenizer: the one that made the folder; it decodes the samples. None: no samples. The tokens of a sample that the
    loss counts are between 《 and 》. Raises ValueError if the folder is not finished, or a shard is damaged.
    """
    read_manifest(folder / MANIFEST)  # which is written last, also by `longdraft prepare regenerate`
    lines = [f"{folder}: rows of {ShardSet(folder / SPLITS[0]).manifest['seq_len']:,} tokens"]
    for split in SPLITS:
        rows = ShardSet(folder / split)
        rows.verify()
        lines += [f"  {split}:", *(f"    {name}: {rows.manifest[name]}" for name in COUNTS if rows.manifest.get(name))]
    if tokenizer is not None:
        lines += _samples(ShardSet(folder / "train"), tokenizer)
    return "\n".join(lines)


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
