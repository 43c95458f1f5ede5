"""Reports on a prepared folder: what its manifests count, lengths and copies of documents, and samples as text."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from longdraft.data_prep.shards import MANIFEST, SPLITS, ShardSet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

N_SAMPLES, SAMPLE_TOKENS = 3, 160
QUANTILES = (0.0, 0.5, 0.9, 1.0)


def inspect(
    folder: Path, tokenizer: "PreTrainedTokenizerFast | None" = None, tokenizer_hash: str = ""
) -> dict[str, Any]:
    """Inspect a finished folder, whose shards are compared with their hashes and read once.

    Args:
        tokenizer: decodes the samples; with None there are none. tokenizer_hash: the tokenizer's, to compare with the
            folder's.
    Returns:
        {"seq_len", "splits": the numbers of each split by name, "samples"}. A sample is some tokens of a piece,
        beginning with its token `start`, as runs of text, each with whether the loss counts it.
    Raises:
        ValueError: the folder is not finished, a shard is damaged, or another tokenizer made the folder.
    """
    sets = {split: ShardSet(folder / split) for split in SPLITS}
    train = sets["train"]
    if not (folder / MANIFEST).exists():
        raise ValueError(f"{folder} is not finished ({MANIFEST} is missing); call prepare again to go on with it")
    if tokenizer is not None and tokenizer_hash != train.manifest["tokenizer_sha256"]:
        raise ValueError(f"--target: {folder} was prepared with another tokenizer; give the target of that")
    for rows in sets.values():
        rows.verify()
    return {
        "seq_len": train.manifest["seq_len"],
        "splits": {split: _numbers(rows) for split, rows in sets.items()},
        "samples": [] if tokenizer is None else _samples(train, tokenizer),
    }


def _numbers(rows: ShardSet) -> dict[str, Any]:
    lengths, hashes = Counter[str](), Counter[str]()  # by document, whose pieces may be in any order
    for i in range(len(rows)):
        row = rows[i]
        for (document, number), (start, stop) in zip(rows.pieces(i), pairwise(row["borders"]), strict=True):
            lengths[document] += int(stop - start)
            hashes[document] ^= hash((number, row["tokens"][start:stop].tobytes()))
    manifest, places = rows.manifest, len(rows) * rows.manifest["seq_len"]
    tokens = manifest["tokens"]
    # Older manifests, of plain text alone, do not count the supervised tokens: all are.
    supervised = manifest.get("supervised_tokens", tokens)
    quantiles = np.quantile([*lengths.values()] or [0], QUANTILES, method="nearest")
    return {
        "rows": len(rows),
        "tokens": tokens,
        "supervised_share": supervised / max(1, tokens),  # of the tokens
        "filler_share": 1 - tokens / places if places else 0.0,  # of the places in rows
        "documents": manifest["documents"],
        "pieces": manifest["pieces"],
        "bad": manifest["bad"],  # documents left out, by reason
        "bad_named": manifest["bad_named"],
        "dropped": manifest["dropped"],
        "copies": len(hashes) - len({*hashes.values()}),  # documents with the same tokens as an earlier one
        "lengths": [int(n) for n in quantiles],  # tokens of a document
        "mix": manifest.get("mix", {}),  # documents and tokens of each source
    }


def _samples(rows: ShardSet, tokenizer: "PreTrainedTokenizerFast") -> list[dict[str, Any]]:
    """The first piece of some rows across the split, from a little before the first token that the loss counts."""
    n = min(N_SAMPLES, len(rows))
    samples = []
    for i in (k * len(rows) // n for k in range(n)):
        row = rows[i]
        length = int(row["borders"][1])
        start = max(0, int(row["loss"][:length].argmax()) - SAMPLE_TOKENS // 2)
        shown = slice(start, min(length, start + SAMPLE_TOKENS))
        tokens, loss = row["tokens"][shown], row["loss"][shown]
        borders = [0, *(np.flatnonzero(loss[1:] != loss[:-1]) + 1).tolist(), len(tokens)]
        runs = [(str(tokenizer.decode(tokens[a:b].tolist())), bool(loss[a])) for a, b in pairwise(borders)]
        samples.append({"split": "train", "row": i, "document": rows.pieces(i)[0][0], "start": start, "runs": runs})
    return samples


def as_text(folder: Path, report: dict[str, Any]) -> str:
    """The report as text for people. What the loss counts of a sample is between 《 and 》."""
    lines = [f"{folder}: rows of {report['seq_len']:,} tokens"]
    for name, split in report["splits"].items():
        low, half, most, high = split["lengths"]
        lines += [
            f"  {name}: {split['rows']:,} rows, {split['tokens']:,} tokens, of which the loss counts "
            f"{split['supervised_share']:.1%}; {split['filler_share']:.2%} filler",
            f"    {split['documents']:,} documents in {split['pieces']:,} pieces, {split['copies']:,} of them copies; "
            f"tokens of one: {low:,} to {high:,}, half have at most {half:,}, nine of ten at most {most:,}",
        ]
        if len(split["mix"]) > 1:
            shares = {source: of["tokens"] / max(1, split["tokens"]) for source, of in split["mix"].items()}
            listed = [f"{source} {shares[source]:.1%} ({of['documents']:,})" for source, of in split["mix"].items()]
            lines.append(f"    share of the tokens (documents) by source: {', '.join(listed)}")
        for what in ("bad", "dropped"):
            if reasons := split[what]:
                listed = ", ".join(f"{n:,} {reason}" for reason, n in reasons.items())
                lines.append(f"    {sum(reasons.values()):,} {what}: {listed}")
        if split["bad_named"]:
            named = ", ".join(f"{entry['document']} ({entry['why']})" for entry in split["bad_named"][:5])
            lines.append(f"    bad ones, for example: {named}")
    for sample in report["samples"]:
        lines.append(f"  sample, train row {sample['row']}, {sample['document']} from token {sample['start']:,} on:")
        text = "".join(f"《{run}》" if counted else run for run, counted in sample["runs"])
        lines += [f"    | {line}" for line in text.splitlines()]
    return "\n".join(lines)
