"""The whole preparation, from sources to a folder with `train/` and `heldout/` shards.

sources.py lists the files, records.py hashes them and cuts them into segments, `plan_tasks` divides the segments into
tasks, tasks.py runs these in processes, shard_task.py makes the shards of a task (formats.py, then tokenize.py or
chat.py, then pack.py), and WorkFolder keeps a record of each task. `_write_manifests` adds up the records.

The tasks depend only on the sources' content and the settings, so the number of workers cannot change the result.
After a kill, only the tasks without a record are repeated.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from longdraft.data_prep.documents import BadDocument
from longdraft.data_prep.recipe import PrepareConfig
from longdraft.data_prep.records import SEGMENT_BYTES, Segment, read_documents, scan
from longdraft.data_prep.shard_task import Reader, ShardTask, empty_record, make_readers, make_shards_of, uniform
from longdraft.data_prep.shards import FORMAT_VERSION, MANIFEST, SPLITS, read_manifest
from longdraft.data_prep.sources import list_files
from longdraft.data_prep.tasks import add_up, failures_described, run_in_processes
from longdraft.data_prep.tokenize import Encoder
from longdraft.models.files import PLAN, WorkFolder, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PLAN_VERSION = 2  # increased whenever the same settings and sources would give other tasks
OWN_FILES = rf"(?:{'|'.join(SPLITS)})/(?:shard-[\d-]+\.arrow|manifest\.json)|manifest\.json"
SHARD_TEXT_BYTES = (1 << 20, 16 << 20)  # minimum and maximum text of a shard
# Bytes of records that are read for each token of a budget. A token of text has 4 or 5 bytes; the rest allows for what
# a record holds besides its text.
BYTES_A_TOKEN = 8
LOOKED_AT = 5  # segments per source, and records per segment, that are checked before anything is written


def prepare(
    config: PrepareConfig,
    tokenizer: "PreTrainedTokenizerFast",
    tokenizer_hash: str,
    tokenizers: "Mapping[str, PreTrainedTokenizerFast] | None" = None,
    log: Callable[[str], object] = print,
) -> dict:
    """Prepare `config.out`, resume it, or find it finished. Returns the folder's manifest and logs a summary of it.

    Args:
        tokenizer_hash: identifies the tokenizer in the manifest; training compares it with the target's.
        tokenizers: by name, the tokenizers that sources of token ids refer to.
    Raises:
        ValueError: a source does not exist, the folder was made with other settings, tokenizer or sources, a split is
            empty, or the disk is full. Finished shards stay on disk, and the same call resumes.
    """
    with failures_described(config.out):
        files = list_files(tuple(config.sources.values()))
        readers = make_readers(config, tokenizer, tokenizer_hash, tokenizers or {})
        with tqdm(files, desc="reading sources", unit="file", leave=False, mininterval=1) as to_read:
            digests, segments = scan(to_read, SEGMENT_BYTES)
        tasks = plan_tasks(config, segments)
        if not (config.out / PLAN).exists():
            check_fields([segment for task in tasks for segment in task.segments], readers)
        folder = WorkFolder(config.out, _make_plan(config, readers, tokenizer_hash, digests), OWN_FILES)
        with folder.opened():
            was_finished = (config.out / MANIFEST).exists()
            if not was_finished:
                _make_shards(tasks, config, readers, folder)
                _write_manifests(tasks, config, folder)
            folder.remove_progress()
        manifest = read_manifest(config.out / MANIFEST)
        log(f"{'Already prepared' if was_finished else 'Prepared'}: {_summary(manifest, config.out)}")
        return manifest


def check_fields(segments: Sequence[Segment], readers: Sequence[Reader]) -> None:
    """Raises ValueError if the first records of a source's first segments all lack a field."""
    for number, reader in enumerate(readers):
        own = list(islice((segment for segment in segments if segment.file.source == number), LOOKED_AT))
        documents = (islice(read_documents(one, reader.record_format), LOOKED_AT) for one in own)
        head = list(chain.from_iterable(documents))
        lacking = [one for one in head if isinstance(one, BadDocument) and one.why == "missing_field"]
        if head and len(lacking) == len(head):
            raise ValueError(f"{lacking[0].name} {lacking[0].detail}")


def plan_tasks(config: PrepareConfig, segments: Sequence[Segment]) -> list[ShardTask]:
    """Divide the segments into tasks, in the order of a seeded hash, so that a budget samples all files and a shard
    mixes them. A source's weight decides its part of `max_tokens`; each task gets a part of that in proportion to the
    source's text in its segments."""
    total_weight = math.fsum(source.weight for source in config.sources.values())
    budgets = [
        math.inf if config.max_tokens is None else config.max_tokens * source.weight / total_weight
        for source in config.sources.values()
    ]
    usable, chosen = [0] * len(budgets), list[Segment]()
    for segment in sorted(segments, key=lambda one: uniform(config.seed, f"{one.file.name}:{one.start}".encode())):
        source = segment.file.source
        if usable[source] < budgets[source] * BYTES_A_TOKEN:
            usable[source] += _usable_bytes(segment, config)
            chosen.append(segment)
    least, most = SHARD_TEXT_BYTES
    shard_bytes = min(most, max(least, sum(segment.n_bytes for segment in chosen) // 16))
    tasks = []
    for split, fraction in zip(SPLITS, (1 - config.heldout_share, config.heldout_share), strict=True):
        first, size, number = 0, 0, 0
        for i, segment in enumerate(chosen if fraction else (), start=1):
            size += segment.n_bytes
            if size >= shard_bytes / fraction or i == len(chosen):
                here = [0] * len(budgets)
                for one in chosen[first:i]:
                    here[one.file.source] += _usable_bytes(one, config)
                limits = (
                    math.inf if config.max_tokens is None else int(budget * fraction * part / max(1, total))
                    for budget, part, total in zip(budgets, here, usable, strict=True)
                )
                tasks.append(ShardTask(split, number, tuple(chosen[first:i]), tuple(limits)))
                first, size, number = i, 0, number + 1
    return tasks


def _usable_bytes(segment: Segment, config: PrepareConfig) -> int:
    """Bytes of the segment that can become tokens of a row. The mode "first" uses only the beginning of a document."""
    if config.documents == "first" and segment.n_documents is not None:
        return min(segment.n_bytes, segment.n_documents * config.seq_len * BYTES_A_TOKEN)
    return segment.n_bytes


def _make_plan(
    config: PrepareConfig, readers: Sequence[Reader], tokenizer_hash: str, digests: Mapping[str, str]
) -> dict:
    """Everything that affects the content of the folder: calls with the same plan write the same bytes."""
    settings = {name: getattr(config, name) for name in ("seq_len", "heldout_share", "max_tokens", "seed")}
    encoders = sorted((reader.encoder for reader in readers), key=lambda encoder: isinstance(encoder, Encoder))
    described = {key: value for encoder in encoders for key, value in encoder.describe().items()}
    return {
        "plan_version": PLAN_VERSION,
        "settings": {**settings, "documents_mode": config.documents},
        "mix": {
            name: source.model_dump(mode="json", exclude={"path", "files", "streaming"}, exclude_none=True)
            for name, source in config.sources.items()
        },
        "tokenizer": {"tokenizer_sha256": tokenizer_hash, **described},
        "sources": dict(digests),
    }


def _make_shards(
    tasks: Sequence[ShardTask], config: PrepareConfig, readers: Sequence[Reader], folder: WorkFolder
) -> None:
    """Make the shards that do not exist yet, in at most `config.workers` processes, with a progress bar."""
    todo = [task for task in tasks if folder.read(task.name) is None]
    work = partial(make_shards_of, config=config, readers=readers, folder=folder)
    n_workers = min(config.workers, len(todo))
    with tqdm(total=len(todo), desc="tokenising", unit="shard", mininterval=1) as progress:
        if n_workers > 1:
            # The largest tasks come first, so that no process is left with a large one at the end.
            todo.sort(key=lambda task: -sum(segment.n_bytes for segment in task.segments))
            run_in_processes(work, todo, n_workers, progress.update)
        else:
            for task in todo:
                work(task)
                progress.update()


def _write_manifests(tasks: Sequence[ShardTask], config: PrepareConfig, folder: WorkFolder) -> None:
    """Write each split's manifest and, last, the folder's. Raises ValueError if a split has no row."""
    described = {"format_version": FORMAT_VERSION, **folder.plan["tokenizer"], **folder.plan["settings"]}
    described["sources"], splits = folder.plan["mix"], {}
    for name, fraction in zip(SPLITS, (1.0, config.heldout_share), strict=True):
        records = folder.read_all([task.name for task in tasks if task.split == name])
        splits[name] = split = add_up([empty_record(), *records])
        if fraction and not split["rows"]:
            folder.clear()  # so that other settings may use it
            raise ValueError(
                f"no row for {name}; bad or dropped documents: {'; '.join(_omitted(split)) or 'none'}; give more or "
                "other ones, or change heldout_share, seq_len, max_tokens or seed"
            )
    for name, split in splits.items():
        (folder.path / name).mkdir(exist_ok=True)
        write_json(folder.path / name / MANIFEST, {"split": name, **described, **split})
        del split["shards"]
    write_json(folder.path / MANIFEST, {**described, "splits": splits})


def _summary(manifest: dict, out: Path) -> str:
    """What a finished folder holds: rows, tokens and documents, omitted documents by reason, and tokens by source."""
    train, heldout = (manifest["splits"][split] for split in SPLITS)
    total = add_up([train, heldout])
    rows, tokens, supervised = (total[name] for name in ("rows", "tokens", "supervised_tokens"))
    of_them = "" if supervised == tokens else f", supervised: {supervised:,}"
    bad, dropped = (sum(total[what].values()) for what in ("bad", "dropped"))
    lines = [
        f"{train['rows']:,} train and {heldout['rows']:,} held-out rows of {manifest['seq_len']:,} tokens "
        f"(tokens: {tokens:,}{of_them}, documents: {total['documents']:,}, "
        f"{1 - tokens / (rows * manifest['seq_len']):.1%} padding; {bad:,} bad and {dropped:,} dropped documents) "
        f"-> {out}",
        *_omitted(total),
    ]
    if len(total["mix"]) > 1:
        mix = (f"{name} {counts['tokens']:,}" for name, counts in total["mix"].items())
        lines.append(f"tokens by source: {', '.join(mix)}")
    return "\n  ".join(lines)


def _omitted(counts: Mapping[str, dict]) -> list[str]:
    """For each reason, the number of documents that were bad or dropped, and the first of them."""
    reasons = [(why, n) for what in ("bad", "dropped") for why, n in counts[what].items()]
    return [f"{n:,} {why}, first {counts['examples'][why]}" for why, n in reasons]
