"""The whole preparation: sources to a folder with `train/` and `heldout/` shards (folder.py draws it).

The sources are cut into units, a function of their content and the settings alone. A unit is read, tokenised, packed
and written as one shard by one process, which then leaves a record; so the number of workers cannot change the result,
and after a kill the units without a record are done again, the others never.
"""

import hashlib
import multiprocessing
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from longdraft.data_prep import folder
from longdraft.data_prep.folder import NAMED_BAD, PROGRESS, SPLITS, record_path
from longdraft.data_prep.pack import MODES, Piece
from longdraft.data_prep.shards import FORMAT_VERSION, MANIFEST, Row, ShardSet, write_json, write_shard
from longdraft.data_prep.sources import (
    JSONL_SUFFIXES,
    TEXT_SUFFIXES,
    BadDocument,
    Document,
    ScannedFile,
    Segment,
    list_files,
    read_documents,
    scan,
)
from longdraft.data_prep.tokenize import Encoder, make_encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SEGMENT_BYTES = 1 << 20
SHARD_TEXT_BYTES = (1 << 20, 16 << 20)  # least and most text of a shard
WORKER_BYTES = 4 << 20  # of text, at least: less is tokenised sooner (2 s) than a process starts
BYTES_A_TOKEN = 5  # more than code and most prose have: `max_tokens` may read this much text for each token it keeps


@dataclass(frozen=True)
class PrepareConfig:
    """What to prepare; all but `workers`, `max_bad_share` and `overwrite` decide the content of the shards.

    sources, suffixes: see `sources.list_files`. out: folder. seq_len: tokens of a row. documents: "pack" or "first"
    (see pack.py). text_field: of JSONL. heldout_share: of the documents. max_tokens: of both splits together, without
    filler. max_bad_share: bad documents among those seen, above it nothing is finished. shard_bytes: of text, None:
    from the size of the sources.
    """

    sources: tuple[str, ...]
    out: Path
    seq_len: int
    documents: str = "pack"
    text_field: str = "text"
    suffixes: tuple[str, ...] = TEXT_SUFFIXES + JSONL_SUFFIXES
    heldout_share: float = 0.05
    max_tokens: int | None = None
    max_bad_share: float = 0.01
    seed: int = 0
    workers: int = 1
    shard_bytes: int | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        checks = [
            ("seq_len", self.seq_len >= 2, "at least 2"),
            ("documents", self.documents in MODES, f"one of {', '.join(MODES)}"),
            ("heldout_share", 0 <= self.heldout_share < 1, "at least 0 and below 1"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1"),
            ("max_bad_share", 0 <= self.max_bad_share <= 1, "0 to 1"),
            ("workers", self.workers >= 1, "at least 1"),
            ("shard_bytes", self.shard_bytes is None or self.shard_bytes >= 1, "at least 1"),
        ]
        for name, good, valid in checks:
            if not good:
                raise ValueError(f"{name} is {getattr(self, name)!r}, valid: {valid}")


@dataclass(frozen=True)
class Unit:
    """The work behind one shard: the documents of `split` in these segments, `max_tokens` of them at most."""

    split: str
    number: int
    segments: tuple[Segment, ...]
    max_tokens: int | None
    size: int  # bytes of text that are expected to be its split's


def prepare(config: PrepareConfig, tokenizer: "PreTrainedTokenizerFast", tokenizer_hash: str) -> dict:
    """Prepare `config.out`, go on with it, or say that it is done; returns its manifest and prints one line.

    tokenizer_hash: identifies the tokenizer in the manifest, which training compares with the target's.
    Raises ValueError: no such source, a folder made with other settings, tokenizer or sources, too many bad documents,
    an empty split. What is finished stays on disk, so the same call goes on.
    """
    out = config.out
    encoder = make_encoder(tokenizer, ends_documents=config.documents == "pack")
    files = list_files(config.sources, config.suffixes)
    scanned = [scan(file, SEGMENT_BYTES) for file in tqdm(files, desc="reading sources", unit="file", leave=False)]
    plan = make_plan(config, encoder, tokenizer_hash, scanned)
    out.mkdir(parents=True, exist_ok=True)
    with folder.locked(out):
        folder.settle(out, plan, config.overwrite)
        finished = (out / MANIFEST).exists()
        if not finished:
            units = plan_units(config, scanned)
            run_units(config, encoder, units)
            records = {
                split: [folder.read_json(record_path(out, split, unit.number)) for unit in units if unit.split == split]
                for split in SPLITS
            }
            folder.finish(out, plan, records, config.max_bad_share)
        shutil.rmtree(out / PROGRESS, ignore_errors=True)
        for split in SPLITS:
            ShardSet(out / split)  # every shard is there with its size
    manifest = folder.read_json(out / MANIFEST)
    print(f"{'Already prepared' if finished else 'Prepared'}: {folder.summary(manifest)} -> {out}", flush=True)
    return manifest


def make_plan(config: PrepareConfig, encoder: Encoder, tokenizer_hash: str, scanned: Sequence[ScannedFile]) -> dict:
    """All that decides the content of the folder; two calls with the same plan make the same bytes."""
    settings = ("seq_len", "documents", "text_field", "heldout_share", "max_tokens", "seed", "shard_bytes")
    return {
        "format_version": FORMAT_VERSION,
        "settings": {name: getattr(config, name) for name in settings},
        "tokenizer": {
            "tokenizer_sha256": tokenizer_hash,
            "vocab_size": encoder.vocab_size,
            "bos_token_ids": list(encoder.bos_ids),
            "eos_token_id": encoder.eos_id,
            "documents_end_with_eos": encoder.ends_documents,
        },
        "sources": {file.file.name: {"bytes": file.size, "sha256": file.sha256} for file in scanned},
    }


def plan_units(config: PrepareConfig, scanned: Sequence[ScannedFile]) -> list[Unit]:
    """The units, from the sources' content and the settings alone (not from the number of workers).

    Segments are taken in the order of a seeded hash, so that `max_tokens` samples all files and a shard mixes them.
    """
    segments = [segment for file in scanned for segment in file.segments]
    segments.sort(key=lambda segment: _uniform(config.seed, f"{segment.file.name}:{segment.offset}".encode()))
    if config.max_tokens is not None:
        worth = [_worth(segment, config) for segment in segments]
        segments = segments[: _count(worth, config.max_tokens * BYTES_A_TOKEN)]
    sizes = [segment.length for segment in segments]
    worth = [_worth(segment, config) for segment in segments]
    least, most = SHARD_TEXT_BYTES
    shard_bytes = config.shard_bytes or min(most, max(least, sum(sizes) // 16))
    units = []
    for split, share in zip(SPLITS, (1 - config.heldout_share, config.heldout_share), strict=True):
        start, number = 0, 0
        while share and start < len(segments):
            stop = start + _count(sizes[start:], int(shard_bytes / share))
            limit = None
            if config.max_tokens is not None:
                limit = int(config.max_tokens * share * sum(worth[start:stop]) / max(1, sum(worth)))
            size = int(share * sum(sizes[start:stop]))
            units.append(Unit(split, number, tuple(segments[start:stop]), limit, size))
            start, number = stop, number + 1
    return units


def run_units(config: PrepareConfig, encoder: Encoder, units: Sequence[Unit]) -> None:
    """Make the shards that are not there yet, in at most `config.workers` processes, under a bar."""
    todo = [unit for unit in units if not folder.is_done(config.out, unit.split, unit.number)]
    total = sum(unit.size for unit in units)
    done = total - sum(unit.size for unit in todo)
    with tqdm(total=total, initial=done, desc="tokenising", unit="B", unit_scale=True) as bar:
        n_workers = min(config.workers, len(todo), (total - done) // WORKER_BYTES)
        if n_workers <= 1:
            for unit in todo:
                make_shard(unit, config, encoder)
                bar.update(unit.size)
            return
        # spawn: a fork would copy the threads' locks of whatever the caller has loaded (torch, tokenizers).
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(n_workers, context, _begin_worker, (config, encoder))
        try:
            sizes = {pool.submit(_work, unit): unit.size for unit in todo}
            for future in as_completed(sizes):
                future.result()
                bar.update(sizes[future])
        except BrokenProcessPool:
            raise ValueError(
                "a worker was killed (out of memory?); finished shards are kept: call again, with fewer --workers"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def make_shard(unit: Unit, config: PrepareConfig, encoder: Encoder) -> None:
    """Read, tokenise, pack and write one unit; its record is written last and says that the shard is whole."""
    kept, tokens, bad, dropped = _encode_unit(unit, config, encoder)
    packed = MODES[config.documents]([len(ids) for ids in tokens], config.seq_len)
    rows = [_make_row(pieces, kept, tokens) for pieces in packed]
    shard = None
    if rows:
        path = config.out / unit.split / f"shard-{unit.number:05d}.arrow"
        shard = write_shard(path, rows, config.seq_len, fill_id=encoder.eos_id)
    record = {
        "shard": shard,
        "rows": len(rows),
        "tokens": sum(len(row.tokens) for row in rows),
        "documents": len(kept),
        "pieces": sum(len(pieces) for pieces in packed),
        "text_bytes": sum(len(document.text.encode()) for document in kept),
        "bad": dict(sorted(Counter(document.why for document in bad).items())),
        "bad_named": [{"document": document.name, "why": document.why} for document in bad[:NAMED_BAD]],
        "dropped": dict(sorted(dropped.items())),
    }
    write_json(record_path(config.out, unit.split, unit.number), record)


def _encode_unit(
    unit: Unit, config: PrepareConfig, encoder: Encoder
) -> tuple[list[Document], list[np.ndarray], list[BadDocument], Counter[str]]:
    """(documents kept, int32 tokens of each, bad documents, number of dropped ones by reason)."""
    kept: list[Document] = []
    tokens: list[np.ndarray] = []
    bad: list[BadDocument] = []
    dropped: Counter[str] = Counter()
    room = unit.max_tokens
    for document in _documents_of(unit, config):
        if isinstance(document, BadDocument):
            bad.append(document)
            continue
        ids = encoder.encode(document.text)
        cost = config.seq_len if config.documents == "first" else len(ids)
        if len(ids) < cost:
            dropped["shorter_than_seq_len"] += 1
        elif room is not None and cost > room:
            # A shorter one may still fit; the share that is left ends the search.
            dropped["beyond_max_tokens"] += 1
            if room < (unit.max_tokens or 0) // 50:
                break
        else:
            kept.append(document)
            tokens.append(ids)
            room = None if room is None else room - cost
    return kept, tokens, bad, dropped


def _documents_of(unit: Unit, config: PrepareConfig) -> Iterator[Document | BadDocument]:
    for segment in unit.segments:
        for document in read_documents(segment, config.text_field):
            # By the text's hash: two copies of one document, wherever they stand, are always on the same side.
            heldout = _uniform(config.seed, document.digest) < config.heldout_share
            if SPLITS[heldout] == unit.split:
                yield document


def _make_row(pieces: Sequence[Piece], documents: Sequence[Document], tokens: Sequence[np.ndarray]) -> Row:
    parts = [tokens[piece.document][piece.start : piece.stop] for piece in pieces]
    borders = [0, *np.cumsum([len(part) for part in parts]).tolist()]
    return Row(
        tokens=np.concatenate(parts),
        borders=borders,
        loss_spans=[0, borders[-1]],  # of plain text every token counts
        documents=[documents[piece.document].name for piece in pieces],
        pieces=[piece.number for piece in pieces],
    )


def _uniform(seed: int, key: bytes) -> float:
    """Uniform in [0, 1), a function of its arguments alone."""
    return int.from_bytes(hashlib.sha256(b"%d:" % seed + key).digest()[:6], "big") / 2**48


def _worth(segment: Segment, config: PrepareConfig) -> int:
    """Bytes of the segment that can become tokens of a row: in the mode "first" only the head of each document."""
    if config.documents == "first":
        return min(segment.length, segment.n_documents * config.seq_len * BYTES_A_TOKEN)
    return segment.length


def _count(sizes: Sequence[int], enough: int) -> int:
    """How many sizes from the first on make `enough`, at least one (all where they do not)."""
    total = 0
    for i, size in enumerate(sizes):
        total += size
        if total >= enough:
            return i + 1
    return len(sizes)


# ---- in the worker processes

_worker: tuple[PrepareConfig, Encoder] | None = None


def _begin_worker(config: PrepareConfig, encoder: Encoder) -> None:
    global _worker
    _worker = (config, encoder)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent ends its workers
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever: the pool's pipe stays open in the workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "not a worker process"
    wait([parent.sentinel])
    os._exit(1)


def _work(unit: Unit) -> None:
    assert _worker is not None, "the pool did not call _begin_worker"
    make_shard(unit, *_worker)
