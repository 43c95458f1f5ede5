"""Reports on a prepared folder: counts, what was left out and why, copies, lengths, and a few samples as text.

Everything is counted in the shards themselves, after their hashes have been compared with the manifest's. Shards are
read one at a time.
"""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from longdraft.data_prep.shards import MANIFEST, SPLITS, ShardSet
from longdraft.models.files import write_atomically

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

N_SAMPLES, SAMPLE_TOKENS = 3, 160
QUANTILES = (0.0, 0.5, 0.9, 1.0)
# Lines of the text report, for numbers of a split that are not 0.
NOTES = {
    "rows_without_loss": "rows without a token that the loss counts",
    "copies": "documents that copy another of this split, token for token",
    "in_both": "documents that are in the other split too",
}


@dataclass(frozen=True)
class Inspection:
    """The report on a whole folder.

    splits: the numbers of each split, from `_report`. samples: some tokens of a piece, beginning with its token
    `start`, as runs of text, each with whether the loss counts it. all_lengths: tokens of every document, by split.
    """

    folder: Path
    seq_len: int
    splits: dict[str, dict[str, Any]]
    samples: list[dict[str, Any]]
    all_lengths: dict[str, np.ndarray]

    def as_json(self) -> str:
        """One JSON object, without `all_lengths`."""
        shown = {"seq_len": self.seq_len, "splits": self.splits, "samples": self.samples}
        return json.dumps(shown, ensure_ascii=False, indent=1)


def inspect(folder: Path, tokenizer: "PreTrainedTokenizerFast | None" = None, tokenizer_hash: str = "") -> Inspection:
    """Inspect a prepared folder. All shards are read once.

    Args:
        folder: a finished folder, with `train` and `heldout`.
        tokenizer: decodes the samples; with None there are none. tokenizer_hash: the tokenizer's, to compare with the
            folder's.
    Raises:
        ValueError: the folder is not finished, a shard is damaged, or another tokenizer made the folder.
    """
    sets = {split: ShardSet(folder / split) for split in SPLITS}
    train = sets[SPLITS[0]]
    if not (folder / MANIFEST).exists():
        raise ValueError(f"{folder} is not finished ({MANIFEST} is missing); call prepare again to go on with it")
    if tokenizer is not None and tokenizer_hash != train.manifest["tokenizer_sha256"]:
        raise ValueError(f"--target: {folder} was prepared with another tokenizer; give the target of that")
    documents, reports = {}, {}
    for split, rows in sets.items():
        rows.verify()
        reports[split], documents[split] = _report(rows)
    digests = {split: {digest for digest, _ in found} for split, found in documents.items()}
    for split, other in (SPLITS, SPLITS[::-1]):
        reports[split]["in_both"] = sum(digest in digests[other] for digest, _ in documents[split])
    samples = [] if tokenizer is None else _samples(train, tokenizer)
    lengths = {split: np.array([n for _, n in found], dtype=np.int64) for split, found in documents.items()}
    return Inspection(folder, train.manifest["seq_len"], reports, samples, lengths)


def _report(rows: ShardSet) -> tuple[dict[str, Any], list[tuple[bytes, int]]]:
    """(A split in numbers; (hash of the tokens, their number) of every document).

    All pieces of a document are in one shard, but in any of its rows."""
    counts, documents, first = Counter(), [], 0
    for shard in rows.manifest["shards"]:
        pieces: dict[str, dict[int, np.ndarray]] = {}
        for i in range(first, first + shard["rows"]):
            row = rows[i]
            with_loss = int(row["loss"].sum())
            counts.update(tokens=int(row["borders"][-1]), pieces=len(row["borders"]) - 1)
            counts.update(with_loss=with_loss, rows_without_loss=int(with_loss == 0))
            for (document, number), (start, stop) in zip(rows.pieces(i), pairwise(row["borders"]), strict=True):
                pieces.setdefault(document, {})[number] = row["tokens"][start:stop]
        for document in pieces.values():
            tokens = np.concatenate([document[number] for number in sorted(document)])
            documents.append((hashlib.sha256(tokens.tobytes()).digest(), len(tokens)))
        first += shard["rows"]
    manifest, places = rows.manifest, len(rows) * rows.manifest["seq_len"]
    lengths = [n for _, n in documents]
    return {
        "rows": len(rows),
        "tokens": counts["tokens"],
        "supervised_share": counts["with_loss"] / max(1, counts["tokens"]),  # of the tokens
        "filler_share": 1 - counts["tokens"] / places if places else 0.0,  # of the places in rows
        "documents": len(documents),
        "pieces": counts["pieces"],
        "rows_without_loss": counts["rows_without_loss"],
        "bad": manifest["bad"],  # documents left out, by reason
        "bad_named": manifest["bad_named"],
        "dropped": manifest["dropped"],
        "copies": len(documents) - len({digest for digest, _ in documents}),  # with the same tokens as an earlier one
        "in_both": 0,  # documents that are in the other split too; `inspect` counts them
        "lengths": [int(n) for n in np.quantile(lengths, QUANTILES, method="nearest")] if lengths else [],  # tokens
        "mix": manifest.get("mix", {}),  # documents and tokens of each source
    }, documents


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
        samples.append({"split": SPLITS[0], "row": i, "document": rows.pieces(i)[0][0], "start": start, "runs": runs})
    return samples


def as_text(found: Inspection) -> str:
    """The report as text for people. What the loss counts of a sample is between 《 and 》."""
    lines = [f"{found.folder}: rows of {found.seq_len:,} tokens"]
    for split, report in found.splits.items():
        low, half, most, high = report["lengths"] or (0, 0, 0, 0)
        lines += [
            f"  {split}: {report['rows']:,} rows, {report['tokens']:,} tokens, of which the loss counts "
            f"{report['supervised_share']:.1%}; {report['filler_share']:.2%} filler",
            f"    {report['documents']:,} documents in {report['pieces']:,} pieces; tokens of one: {low:,} to "
            f"{high:,}, half have at most {half:,}, nine of ten at most {most:,}",
        ]
        lines += [f"    {note}: {report[name]:,}" for name, note in NOTES.items() if report[name]]
        if len(report["mix"]) > 1:
            shares = {name: of["tokens"] / max(1, report["tokens"]) for name, of in report["mix"].items()}
            listed = [f"{name} {shares[name]:.1%} ({of['documents']:,})" for name, of in report["mix"].items()]
            lines.append(f"    share of the tokens (documents) by source: {', '.join(listed)}")
        for what in ("bad", "dropped"):
            if reasons := report[what]:
                listed = ", ".join(f"{n:,} {reason}" for reason, n in reasons.items())
                lines.append(f"    {sum(reasons.values()):,} {what}: {listed}")
        if report["bad_named"]:
            named = ", ".join(f"{entry['document']} ({entry['why']})" for entry in report["bad_named"][:5])
            lines.append(f"    bad ones, for example: {named}")
    for sample in found.samples:
        where = f"row {sample['row']}, {sample['document']}"
        where += f" from token {sample['start']:,} on" if sample["start"] else ""
        lines.append(f"  sample, {sample['split']} {where}:")
        text = "".join(f"《{run}》" if counted else run for run, counted in sample["runs"])
        lines += [f"    | {line}" for line in text.splitlines()]
    return "\n".join(lines)


def draw_lengths(found: Inspection, path: Path) -> None:
    """Draw a histogram of the documents' lengths, with both splits in one plot, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    lengths = np.concatenate([np.array([1]) if not len(n) else n for n in found.all_lengths.values()])
    bins = np.geomspace(lengths.min(), lengths.max() + 1, 40)
    for split, lengths in found.all_lengths.items():
        axes.hist(lengths, bins=bins, label=f"{split}: {len(lengths):,} documents", histtype="step")
    axes.axvline(found.seq_len, color="grey", linestyle="--", label=f"a row: {found.seq_len:,} tokens")
    axes.set(xscale="log", yscale="log", xlabel="tokens of a document", ylabel="documents", title=found.folder.name)
    axes.legend()
    write_atomically(path, lambda file: figure.savefig(file, dpi=120, format="png", metadata={"Software": None}))
