"""Plans a preparation: which files it reads, its tasks, and the plan that identifies it.

All of it follows from the sources' content and the settings. Nothing here reads a document, or depends on the number of
workers or machines.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence

from longdraft.data_prep.manifest import SPLITS
from longdraft.data_prep.readers import Reader
from longdraft.data_prep.record_formats import TokenIdsFormat
from longdraft.data_prep.segments import Segment
from longdraft.data_prep.settings import PrepareConfig
from longdraft.data_prep.shard_task import ShardTask, uniform
from longdraft.data_prep.shards import FORMAT_VERSION
from longdraft.data_prep.sources import SourceFile
from longdraft.data_prep.tokenize import Encoder
from longdraft.data_prep.work_folder import with_address

SHARD_TEXT_BYTES = (1 << 20, 16 << 20)  # least and most text of a shard
# A budget chooses this many bytes of records for each token it keeps, and stops reading once it is full. A token of
# text has 4 or 5 bytes; the rest allows for what a record holds besides its text.
BYTES_A_TOKEN = 8
DOCUMENTS_A_TASK = 32  # a task has text for at least this many long documents, so that its part of a budget fits some
HELDOUT_READS = 32  # a held-out shard is gathered from at most this many shards' worth of text


def make_plan(
    config: PrepareConfig,
    readers: Sequence[Reader],
    tokenizer_hash: str,
    sources: Mapping[str, dict],
    tasks: Sequence[ShardTask],
) -> dict:
    """Everything that decides the content of the folder: calls with the same plan write the same bytes.

    sources: {"bytes", "sha256"} of each file, by name. The plan's `address` is a hash over sources, tokenizer, settings
    and how they are divided into tasks; streaming, or another version of this program, may divide them differently."""
    settings = "seq_len documents heldout_share max_tokens seed shard_bytes"
    encoders = sorted((reader.encoder for reader in readers), key=lambda encoder: isinstance(encoder, Encoder))
    described = {key: value for encoder in encoders for key, value in encoder.describe().items()}
    mix = {name: source.describe() for name, source in config.sources.items()}
    for reader in readers:
        if isinstance(reader.record_format, TokenIdsFormat):
            mix[reader.name]["tokenizer_sha256"] = hashlib.sha256(reader.record_format.serialised.encode()).hexdigest()
    plan = {
        "format_version": FORMAT_VERSION,
        "settings": {name: getattr(config, name) for name in settings.split()},
        "mix": mix,
        "tokenizer": {"tokenizer_sha256": tokenizer_hash, **described},
        "sources": dict(sources),
    }
    contents = [
        (task.split, task.budgets, [(one.file.name, one.offset, one.length, one.n_documents) for one in task.segments])
        for task in tasks
    ]
    counts = {split: sum(task.split == split for task in tasks) for split in SPLITS}
    # "units" are the tasks. plan.json has called them so since the first version, and the address depends on it.
    plan["units"] = {"sha256": hashlib.sha256(json.dumps(contents).encode()).hexdigest(), **counts}
    return with_address(plan)


def choose_files(config: PrepareConfig, files: Sequence[SourceFile]) -> tuple[list[SourceFile], list[float]]:
    """Choose whole files of each source until they hold the fraction of its bytes that its `share` asks for.

    Returns the files, and for each source the fraction of the documents in them to keep. Files that are not chosen are
    not read, and remote ones are not fetched."""
    chosen, kept = set(files), [1.0] * len(config.sources)
    for number, (name, source) in enumerate(config.sources.items()):
        if source.share == 1:
            continue
        of_source = [file for file in files if file.source == number]
        of_source.sort(key=lambda file: uniform(config.seed, f"{name}:{file.name}".encode()))
        sizes = [file.size for file in of_source]
        n_chosen = _count_until(sizes, source.share * sum(sizes))
        chosen -= set(of_source[n_chosen:])
        kept[number] = min(1.0, source.share * sum(sizes) / max(1, sum(sizes[:n_chosen])))
    return [file for file in files if file in chosen], kept


def plan_tasks(config: PrepareConfig, segments: Sequence[Segment], kept: Sequence[float]) -> list[ShardTask]:
    """Divide the sources into tasks. Segments are taken in the order of a seeded hash, so that a budget samples all
    files and a shard mixes them. Without weights all sources share one budget of `max_tokens`; with weights each source
    has its own.

    kept: for each source, the fraction of its documents to keep.
    """
    budgets = _budgets(config)
    segments = sorted(segments, key=lambda one: uniform(config.seed, f"{one.file.name}:{one.offset}".encode()))
    usable = {segment: _usable_bytes(segment, config) * kept[segment.file.source] for segment in segments}
    by_budget = []  # for each budget, the segments that it reads
    for number, budget in enumerate(budgets):
        eligible = [segment for segment in segments if config.budget_of(segment.file.source) == number]
        if budget is not None:
            usable_bytes = [usable[segment] for segment in eligible]
            eligible = eligible[: _count_until(usable_bytes, budget * BYTES_A_TOKEN)]
        by_budget.append(eligible)
    chosen = {segment for of_budget in by_budget for segment in of_budget}
    segments = [segment for segment in segments if segment in chosen]
    usable_total = [sum(usable[segment] for segment in of_budget) for of_budget in by_budget]
    sizes = [int(segment.length * kept[segment.file.source]) for segment in segments]
    shard_bytes = _shard_bytes(config, segments, sizes)
    tasks = []
    for split, fraction in zip(SPLITS, (1 - config.heldout_share, config.heldout_share), strict=True):
        start, number = 0, 0
        while fraction and start < len(segments):
            stop = start + _count_until(sizes, min(shard_bytes / fraction, HELDOUT_READS * shard_bytes), start)
            of_task = segments[start:stop]
            limits = []
            for i, budget in enumerate(budgets):
                here = sum(usable[segment] for segment in of_task if config.budget_of(segment.file.source) == i)
                limits.append(None if budget is None else int(budget * fraction * here / max(1, usable_total[i])))
            size = int(fraction * sum(sizes[start:stop]))
            tasks.append(ShardTask(split, number, tuple(of_task), tuple(limits), size))
            start, number = stop, number + 1
    return tasks


def _shard_bytes(config: PrepareConfig, segments: Sequence[Segment], sizes: Sequence[int]) -> int:
    """Text of a shard: as the settings say, or 1/16 of all text within limits, with room for long documents."""
    if config.shard_bytes:
        return config.shard_bytes
    least, most = SHARD_TEXT_BYTES
    shard_bytes = min(most, max(least, sum(sizes) // 16))
    if config.max_tokens is not None:
        # An archive is one segment with an unknown number of documents.
        counted = [segment for segment in segments if segment.file.kind != "archive"]
        longest = max((segment.length // max(1, segment.n_documents) for segment in counted), default=0)
        shard_bytes = max(shard_bytes, DOCUMENTS_A_TASK * longest)
    return shard_bytes


def _budgets(config: PrepareConfig) -> list[int | None]:
    """Tokens of each budget."""
    weights = [source.weight for source in config.sources.values() if source.weight is not None]
    if not weights or config.max_tokens is None:
        return [config.max_tokens]
    return [int(config.max_tokens * weight / math.fsum(weights)) for weight in weights]


def _usable_bytes(segment: Segment, config: PrepareConfig) -> int:
    """Bytes of the segment that can become tokens of a row. The mode "first" uses only the head of each document."""
    if config.documents == "first":
        return min(segment.length, segment.n_documents * config.seq_len * BYTES_A_TOKEN)
    return segment.length


def _count_until(sizes: Sequence[float], enough: float, start: int = 0) -> int:
    """How many sizes, from index `start` on, sum to `enough`: at least one, and all of them if they fall short."""
    total = 0.0
    for i in range(start, len(sizes)):
        total += sizes[i]
        if total >= enough:
            return i - start + 1
    return len(sizes) - start
