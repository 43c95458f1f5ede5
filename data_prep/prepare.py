"""The whole preparation: sources to a folder with `train/` and `heldout/` shards (folder.py draws it).

The sources are cut into units, a function of their content and the settings alone. A unit is read, tokenised, packed
and written as one shard by one process, which then leaves a record; so the number of workers cannot change the result,
and after a kill the units without a record are done again, the others never.
"""

import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

from tqdm import tqdm

from longdraft.data_prep import folder
from longdraft.data_prep.chat import ChatEncoder, make_chat_encoder
from longdraft.data_prep.folder import PROGRESS, SPLITS, record_path
from longdraft.data_prep.settings import PrepareConfig
from longdraft.data_prep.shards import FORMAT_VERSION, MANIFEST, ShardSet
from longdraft.data_prep.sources import RECORDS, ScannedFile, Segment, SourceFile, list_files, scan
from longdraft.data_prep.tokenize import Encoder, make_encoder
from longdraft.data_prep.unit import Unit, make_shard, uniform

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SEGMENT_BYTES = 1 << 20
SHARD_TEXT_BYTES = (1 << 20, 16 << 20)  # least and most text of a shard
WORKER_BYTES = 4 << 20  # of text, at least: less is tokenised sooner (2 s) than a process starts
BYTES_A_TOKEN = 5  # more than code and most prose have: `max_tokens` may read this much text for each token it keeps


def prepare(config: PrepareConfig, tokenizer: "PreTrainedTokenizerFast", tokenizer_hash: str) -> dict:
    """Prepare `config.out`, go on with it, or say that it is done; returns its manifest and prints one line.

    tokenizer_hash: identifies the tokenizer in the manifest, which training compares with the target's.
    Raises ValueError: no such source, a folder made with other settings, tokenizer or sources, too many bad documents,
    an empty split. What is finished stays on disk, so the same call goes on.
    """
    out = config.out
    files = list_files(config.sources, config.suffixes)
    encoder = choose_encoder(config, files, tokenizer)
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


def choose_encoder(
    config: PrepareConfig, files: Sequence[SourceFile], tokenizer: "PreTrainedTokenizerFast"
) -> Encoder | ChatEncoder:
    """For conversations, if there are any; text beside them, of which every token would count, is a ValueError."""
    if config.chat_field is None and all(file.kind != "docstrings" for file in files):
        if config.chat_template is not None:
            raise ValueError(
                "chat_template is for conversations, and there are none; give --chat-field, or leave it out"
            )
        return make_encoder(tokenizer, ends_documents=config.documents == "pack")
    text = [file.name for file in files if file.kind == "text" or (file.kind in RECORDS and config.chat_field is None)]
    if text:
        raise ValueError(
            f"{len(text)} sources beside the conversations hold plain text (first: {text[0]}); prepare them into a "
            "folder of their own (--suffixes .jsonl takes no others of a folder), or name the field of records that "
            "holds conversations by --chat-field"
        )
    if config.documents != "pack":
        raise ValueError(f"documents is {config.documents!r}, which cuts answers off; conversations take 'pack'")
    if config.chat_template is None:
        return make_chat_encoder(tokenizer)
    if not config.chat_template.is_file():
        raise ValueError(f"chat_template {str(config.chat_template)!r} does not exist; give a Jinja file")
    return make_chat_encoder(tokenizer, config.chat_template.read_text(encoding="utf-8"))


def make_plan(
    config: PrepareConfig, encoder: Encoder | ChatEncoder, tokenizer_hash: str, scanned: Sequence[ScannedFile]
) -> dict:
    """All that decides the content of the folder; two calls with the same plan make the same bytes."""
    settings = "seq_len documents text_field chat_field heldout_share max_tokens seed shard_bytes"
    return {
        "format_version": FORMAT_VERSION,
        "settings": {name: getattr(config, name) for name in settings.split()},
        "tokenizer": {"tokenizer_sha256": tokenizer_hash, **encoder.describe()},
        "sources": {file.file.name: {"bytes": file.size, "sha256": file.sha256} for file in scanned},
    }


def plan_units(config: PrepareConfig, scanned: Sequence[ScannedFile]) -> list[Unit]:
    """The units, from the sources' content and the settings alone (not from the number of workers).

    Segments are taken in the order of a seeded hash, so that `max_tokens` samples all files and a shard mixes them.
    """
    segments = [segment for file in scanned for segment in file.segments]
    segments.sort(key=lambda segment: uniform(config.seed, f"{segment.file.name}:{segment.offset}".encode()))
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


def run_units(config: PrepareConfig, encoder: Encoder | ChatEncoder, units: Sequence[Unit]) -> None:
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

_worker: tuple[PrepareConfig, Encoder | ChatEncoder] | None = None


def _begin_worker(config: PrepareConfig, encoder: Encoder | ChatEncoder) -> None:
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
