"""What a preparation is going to do, from the sources' content and the settings alone: its identity and its tasks.

Nothing here reads a document or depends on the number of workers or machines.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence

from longdraft.data_prep.manifest import SPLITS
from longdraft.data_prep.record_formats import TokenIdsFormat
from longdraft.data_prep.segments import Segment
from longdraft.data_prep.settings import PrepareConfig
from longdraft.data_prep.shard_task import Reader, ShardTask, uniform
from longdraft.data_prep.shards import FORMAT_VERSION
from longdraft.data_prep.sources import SourceFile
from longdraft.data_prep.tasks import with_address
from longdraft.data_prep.tokenize import Encoder

SHARD_TEXT_BYTES = (1 << 20, 16 << 20)  # least and most text of a shard
# More of a record than its text's tokens have (4 or 5): a budget may choose this much for each token it keeps, and
# stops reading once it is full.
BYTES_A_TOKEN = 8
DOCUMENTS_A_TASK = 32  # of a budget, at least: what a task has of it must hold long documents too
HELDOUT_READS = 32  # shards' worth of text, at most, that one held-out shard is gathered from


def make_plan(
    config: PrepareConfig,
    readers: Sequence[Reader],
    tokenizer_hash: str,
    sources: Mapping[str, dict],
    tasks: Sequence[ShardTask],
) -> dict:
    """All that decides the content of the folder; two calls with the same plan make the same bytes. sources: {"bytes",
    "sha256"} of each file.

    Its `address` is the hash of it all: of sources, tokenizer, settings and the cut into tasks, in which streaming and
    other versions of this program may differ."""
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
    cuts = [
        (task.split, task.budgets, [(one.file.name, one.offset, one.length, one.n_documents) for one in task.segments])
        for task in tasks
    ]
    counts = {split: sum(task.split == split for task in tasks) for split in SPLITS}
    # Tasks, by the name that they have in plan.json since the first version: the address hangs on it.
    plan["units"] = {"sha256": hashlib.sha256(json.dumps(cuts).encode()).hexdigest(), **counts}
    return with_address(plan)


def choose_files(config: PrepareConfig, files: Sequence[SourceFile]) -> tuple[list[SourceFile], list[float]]:
    """Choose whole files of each source until they hold the fraction of its bytes that its `share` asks for.

    Returns the files, and for each source the fraction of the documents in them that is wanted. Files that are not
    chosen are not read, and remote ones not fetched."""
    chosen, kept = set(files), [1.0] * len(config.sources)
    for number, (name, source) in enumerate(config.sources.items()):
        if source.share == 1:
            continue
        mine = [file for file in files if file.source == number]
        mine.sort(key=lambda file: uniform(config.seed, f"{name}:{file.name}".encode()))
        sizes = [file.size for file in mine]
        n_chosen = _count(sizes, source.share * sum(sizes))
        chosen -= set(mine[n_chosen:])
        kept[number] = min(1.0, source.share * sum(sizes) / max(1, sum(sizes[:n_chosen])))
    return [file for file in files if file in chosen], kept


def plan_tasks(config: PrepareConfig, segments: Sequence[Segment], kept: Sequence[float]) -> list[ShardTask]:
    """Cut the sources into tasks. Segments are taken in the order of a seeded hash, so that a budget samples all files
    and a shard mixes them. Without weights all sources have one budget of `max_tokens`; with them each has its own.

    kept: of each source's documents, the fraction that is wanted.
    """
    budgets = _budgets(config)
    segments = sorted(segments, key=lambda one: uniform(config.seed, f"{one.file.name}:{one.offset}".encode()))
    worth = {segment: _worth(segment, config) * kept[segment.file.source] for segment in segments}
    wanted = []
    for number, budget in enumerate(budgets):
        mine = [segment for segment in segments if config.budget_of(segment.file.source) == number]
        enough = None if budget is None else _count([worth[segment] for segment in mine], budget * BYTES_A_TOKEN)
        wanted.append(mine[:enough])
    chosen = {segment for of_budget in wanted for segment in of_budget}
    segments = [segment for segment in segments if segment in chosen]
    total = [sum(worth[segment] for segment in of_budget) for of_budget in wanted]
    sizes = [int(segment.length * kept[segment.file.source]) for segment in segments]
    least, most = SHARD_TEXT_BYTES
    shard_bytes = config.shard_bytes or min(most, max(least, sum(sizes) // 16))
    if config.max_tokens is not None and config.shard_bytes is None:
        known = [segment for segment in segments if segment.file.kind != "archive"]  # one segment, of many documents
        longest = max((segment.length // max(1, segment.n_documents) for segment in known), default=0)
        shard_bytes = max(shard_bytes, DOCUMENTS_A_TASK * longest)
    tasks = []
    for split, fraction in zip(SPLITS, (1 - config.heldout_share, config.heldout_share), strict=True):
        start, number = 0, 0
        while fraction and start < len(segments):
            stop = start + _count(sizes, min(shard_bytes / fraction, HELDOUT_READS * shard_bytes), start)
            taken = segments[start:stop]
            limits = []
            for i, budget in enumerate(budgets):
                here = sum(worth[segment] for segment in taken if config.budget_of(segment.file.source) == i)
                limits.append(None if budget is None else int(budget * fraction * here / max(1, total[i])))
            size = int(fraction * sum(sizes[start:stop]))
            tasks.append(ShardTask(split, number, tuple(taken), tuple(limits), size))
            start, number = stop, number + 1
    return tasks


def _budgets(config: PrepareConfig) -> list[int | None]:
    """Tokens of each budget."""
    weights = [source.weight for source in config.sources.values() if source.weight is not None]
    if not weights or config.max_tokens is None:
        return [config.max_tokens]
    return [int(config.max_tokens * weight / math.fsum(weights)) for weight in weights]


def _worth(segment: Segment, config: PrepareConfig) -> int:
    """Bytes of the segment that can become tokens of a row: in the mode "first" only the head of each document."""
    if config.documents == "first":
        return min(segment.length, segment.n_documents * config.seq_len * BYTES_A_TOKEN)
    return segment.length


def _count(sizes: Sequence[float], enough: float, start: int = 0) -> int:
    """How many sizes from `start` on make `enough`, at least one (all where they do not)."""
    total = 0.0
    for i in range(start, len(sizes)):
        total += sizes[i]
        if total >= enough:
            return i - start + 1
    return len(sizes) - start
