"""Reports on a prepared folder: counts, what was left out and why, copies, lengths, and a few samples as text.

Everything is counted in the shards themselves, not just taken from the manifest. Shards are read one at a time, after
their hashes have been compared with the manifest's.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from longdraft.data_prep.manifest import SPLITS
from longdraft.data_prep.shards import MANIFEST, ShardSet, read_manifest
from longdraft.models.files import write_atomically

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

N_SAMPLES, SAMPLE_TOKENS = 3, 160
QUANTILES = (0.0, 0.5, 0.9, 1.0)
LOSS, PLAIN, RESET = "\x1b[32m", "\x1b[2m", "\x1b[0m"


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
    _check_whole(folder, sets)
    train = sets[SPLITS[0]]
    if tokenizer is not None and tokenizer_hash != train.manifest["tokenizer_sha256"]:
        raise ValueError(
            f"{folder} was prepared with the tokenizer {train.manifest['tokenizer_sha256']}, and this target's is "
            f"{tokenizer_hash}; give the --target that it was prepared for"
        )
    counts, digests, lengths = {}, {}, {}
    for split, rows in sets.items():
        counts[split], documents = _read(rows)
        for name, manifested in (("tokens", rows.manifest["tokens"]), ("pieces", rows.manifest["pieces"])):
            if counts[split][name] != manifested:
                raise ValueError(
                    f"{folder / split} holds {counts[split][name]:,} {name}, and its {MANIFEST} says {manifested:,}: "
                    "it was changed; prepare it again with --overwrite"
                )
        digests[split] = [digest for digest, _ in documents]
        lengths[split] = np.array([n for _, n in documents], dtype=np.int64)
    reports = {}
    for split, rows in sets.items():
        others = set().union(*(digests[other] for other in SPLITS if other != split))
        reports[split] = _report(rows, counts[split], digests[split], lengths[split], others)
    samples = [] if tokenizer is None else _samples(train, tokenizer)
    return Inspection(folder, train.manifest["seq_len"], reports, samples, lengths)


def _check_whole(folder: Path, sets: dict[str, ShardSet]) -> None:
    """Raises ValueError if the folder is not finished, or its shards are not as they were written."""
    if not (folder / MANIFEST).exists():
        raise ValueError(f"{folder} is not finished ({MANIFEST} is missing); call prepare again to go on with it")
    manifest = read_manifest(folder / MANIFEST)
    for rows in sets.values():
        if rows.manifest.get("address") != manifest.get("address"):
            raise ValueError(f"{rows.folder} is of another preparation than {folder / MANIFEST}; prepare {folder} anew")
        rows.verify()


def _read(rows: ShardSet) -> tuple[Counter[str], list[tuple[bytes, int]]]:
    """(Numbers over all rows, by name; (hash of the tokens, their number) of every document).

    All pieces of a document lie in one shard, but in any of its rows."""
    counts, documents, first = Counter(), [], 0
    for shard in rows.manifest["shards"]:
        pieces: dict[str, dict[int, np.ndarray]] = {}
        for i in range(first, first + shard["rows"]):
            row = rows[i]
            counted = int(row["loss"].sum())
            counts.update(tokens=int(row["borders"][-1]), pieces=len(row["borders"]) - 1)
            counts.update(supervised=counted, without_loss=int(counted == 0))
            for (document, number), (start, stop) in zip(rows.pieces(i), pairwise(row["borders"]), strict=True):
                pieces.setdefault(document, {})[number] = row["tokens"][start:stop]
        for document in pieces.values():
            tokens = np.concatenate([document[number] for number in sorted(document)])
            documents.append((hashlib.sha256(tokens.tobytes()).digest(), len(tokens)))
        first += shard["rows"]
    return counts, documents


def _report(
    rows: ShardSet, counts: Counter[str], digests: Sequence[bytes], lengths: np.ndarray, others: set[bytes]
) -> dict[str, Any]:
    """A split in numbers. others: digests of the documents in the other split."""
    manifest, places = rows.manifest, len(rows) * rows.manifest["seq_len"]
    return {
        "rows": len(rows),
        "tokens": counts["tokens"],
        "supervised_share": counts["supervised"] / max(1, counts["tokens"]),  # of the tokens
        "filler_share": 1 - counts["tokens"] / places if places else 0.0,  # of the places in rows
        "documents": len(digests),
        "pieces": counts["pieces"],
        "rows_without_loss": counts["without_loss"],
        "bad": manifest["bad"],  # documents left out, by reason
        "bad_named": manifest["bad_named"],
        "dropped": manifest["dropped"],
        "copies": len(digests) - len(set(digests)),  # documents with the same tokens as an earlier one
        "in_both": sum(digest in others for digest in digests),  # documents that are in the other split too
        # tokens of a document
        "lengths": [int(n) for n in np.quantile(lengths, QUANTILES, method="nearest")] if len(lengths) else [],
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
        place = {"split": SPLITS[0], "row": i, "document": rows.pieces(i)[0][0], "start": start}
        samples.append({**place, "runs": runs})
    return samples


def as_text(found: Inspection, colour: bool) -> str:
    """The report as text for people. colour: show what the loss counts in green and the rest faint, instead of putting
    it into 《》."""
    lines = [f"{found.folder}: rows of {found.seq_len:,} tokens"]
    for split, report in found.splits.items():
        low, half, most, high = report["lengths"] or (0, 0, 0, 0)
        lines += [
            f"  {split}: {report['rows']:,} rows, {report['tokens']:,} tokens, of which the loss counts "
            f"{report['supervised_share']:.1%}; {report['filler_share']:.2%} filler",
            f"    {report['documents']:,} documents in {report['pieces']:,} pieces; tokens of one: {low:,} to "
            f"{high:,}, half have at most {half:,}, nine of ten at most {most:,}",
        ]
        notes = {
            "rows without a token that the loss counts": report["rows_without_loss"],
            "documents that copy another of this split, token for token": report["copies"],
            "documents that stand in the other split too": report["in_both"],
        }
        lines += [f"    {what}: {n:,}" for what, n in notes.items() if n]
        if len(report["mix"]) > 1:
            listed = ", ".join(
                f"{name} {counted['tokens'] / max(1, report['tokens']):.1%} ({counted['documents']:,})"
                for name, counted in report["mix"].items()
            )
            lines.append(f"    share of the tokens (documents) by source: {listed}")
        for what, reasons in (("bad", report["bad"]), ("dropped", report["dropped"])):
            if reasons:
                listed = ", ".join(f"{n:,} {reason}" for reason, n in reasons.items())
                lines.append(f"    {sum(reasons.values()):,} {what}: {listed}")
        if report["bad_named"]:
            named = ", ".join(f"{entry['document']} ({entry['why']})" for entry in report["bad_named"][:5])
            lines.append(f"    bad ones, for example: {named}")
    for sample in found.samples:
        where = f"row {sample['row']}, {sample['document']}"
        where += f" from token {sample['start']:,} on" if sample["start"] else ""
        lines.append(f"  sample, {sample['split']} {where}:")
        text = "".join(_marked(run, counted, colour) for run, counted in sample["runs"])
        lines += [f"    | {line}" for line in text.splitlines()]
    return "\n".join(lines)


def _marked(text: str, counted: bool, colour: bool) -> str:
    if colour:  # line by line, because the indentation of each line would be coloured too
        start = LOSS if counted else PLAIN
        return "\n".join(f"{start}{line}{RESET}" if line else "" for line in text.split("\n"))
    return f"《{text}》" if counted else text


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
