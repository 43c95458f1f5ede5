"""The whole preparation, from sources to a folder with `train/` and `heldout/` shards.

sources.py lists the files, records.py hashes them and cuts them into segments, `plan_tasks` divides the segments into
tasks, tasks.py runs these in processes, shard_task.py makes the shards of a task (formats.py, then tokenize.py or
chat.py, then pack.py), and WorkFolder keeps a record of each task, which `_write_manifests` adds up.

The tasks depend on the sources' content and the settings alone, so the number of workers or machines cannot change the
result. After a kill only the tasks without a record are done again. (`datasets.Dataset.map(num_proc=...)` makes files
that depend on the number of processes, and a kill loses all.)
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from longdraft.data_prep.failures import failures_described
from longdraft.data_prep.formats import TokenIdsFormat
from longdraft.data_prep.recipe import PrepareConfig, changed
from longdraft.data_prep.records import SEGMENT_BYTES, Segment, scan
from longdraft.data_prep.shard_task import (
    Reader,
    ShardTask,
    empty_record,
    make_readers,
    make_shards_of,
    task_name,
    uniform,
)
from longdraft.data_prep.shards import FORMAT_VERSION, MANIFEST, SPLITS, ShardSet, read_manifest
from longdraft.data_prep.sources import SourceFile, list_files
from longdraft.data_prep.tasks import NAMED_BAD, Machine, add_up, count_and_hash, run_in_processes, tasks_of
from longdraft.data_prep.tokenize import Encoder
from longdraft.models.files import WorkFolder, read_plan, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# An older --inspect drew lengths.png.
OWN_FILES = rf"(?:{'|'.join(SPLITS)})/(?:shard-[\d-]+\.arrow|manifest\.json)|manifest\.json|lengths\.png"
WORKER_BYTES = 4 << 20  # least text of a worker process: less is tokenised (2 s) before another process has started
SHARD_TEXT_BYTES = (1 << 20, 16 << 20)  # least and most text of a shard
# A budget chooses this many bytes of records for each token it keeps, and stops reading once it is full. A token of
# text has 4 or 5 bytes; the rest allows for what a record holds besides its text.
BYTES_A_TOKEN = 8
DOCUMENTS_A_TASK = 32  # a task has text for at least this many long documents, so that its part of a budget fits some
HELDOUT_READS = 32  # a held-out shard is gathered from at most this many shards' worth of text


def prepare(
    config: PrepareConfig,
    tokenizer: "PreTrainedTokenizerFast",
    tokenizer_hash: str,
    tokenizers: "Mapping[str, PreTrainedTokenizerFast] | None" = None,
    machine: Machine | None = None,
    log: Callable[[str], object] = print,
) -> dict | None:
    """Prepare `config.out`, resume it, or find it finished. Returns the folder's manifest and logs one line.

    Args:
        tokenizer_hash: identifies the tokenizer in the manifest; training compares it with the target's.
        tokenizers: the tokenizers that sources of token ids name, by name.
        machine: make only this machine's shards. The folder then stays unfinished, and None is returned, until a call
            without `machine`, or `merge`, finishes it.
    Raises:
        ValueError: a source does not exist, the folder was made with other settings, tokenizer or sources, too many
            documents are bad, a split is empty, or the disk is full. Finished shards stay on disk, and the same call
            resumes.
    """
    with failures_described(config.out):
        files, kept = _choose_files(config, list_files(tuple(config.sources.values())))
        readers = make_readers(config, files, kept, tokenizer, tokenizers or {})
        with tqdm(files, desc="reading sources", unit="file", leave=False, mininterval=1) as to_read:
            described, segments = scan(to_read, SEGMENT_BYTES)
        tasks = plan_tasks(config, segments, kept)
        plan = _make_plan(config, readers, tokenizer_hash, described, tasks)
        address = WorkFolder(config.out, plan).address
        config = changed(config, out=Path(str(config.out).replace("{address}", address[:12])))
        folder, mine = WorkFolder(config.out, plan, OWN_FILES), tasks_of(machine, tasks)
        with folder.opened("" if machine is None else f"{machine.number}-of-{machine.of}", config.overwrite):
            if not (config.out / MANIFEST).exists():
                make_shards(mine, config, readers, folder)
                if machine is not None:
                    log(f"Prepared {len(mine)} of {len(tasks)} shards, {machine.number}/{machine.of} -> {config.out}")
                    return None
            return _finish(folder, config.max_bad_share, "Prepared", log)


def merge(out: Path, max_bad_share: float = 0.01, log: Callable[[str], object] = print) -> dict:
    """Finish a folder whose shards were made by several machines. Only manifests are written.

    Raises ValueError if shards are missing, and for the reasons that `prepare` gives.
    """
    with failures_described(out):
        folder = WorkFolder(out, read_plan(out), OWN_FILES)
        with folder.opened():
            return _finish(folder, max_bad_share, "Merged", log)


def _finish(folder: WorkFolder, max_bad_share: float, done: str, log: Callable[[str], object]) -> dict:
    """Write the manifests if they are not there yet, and log one line. Returns the folder's manifest."""
    if (folder.path / MANIFEST).exists():
        done = f"Already {done.lower()}"
    else:
        _write_manifests(folder, max_bad_share)
    folder.remove_progress()
    for split in SPLITS:
        ShardSet(folder.path / split)  # checks that every shard is there and has its size
    manifest = read_manifest(folder.path / MANIFEST)
    lines = [f"{done}: {_summary(manifest)} -> {folder.path}", *(f"  {line}" for line in _of_weights(manifest))]
    log("\n".join(lines))
    return manifest


def make_shards(
    tasks: Sequence[ShardTask], config: PrepareConfig, readers: Sequence[Reader], folder: WorkFolder
) -> None:
    """Make the shards that do not exist yet, in at most `config.workers` processes, with a progress bar."""
    todo = [task for task in tasks if folder.read(task.name) is None]
    total_bytes, todo_bytes = (sum(task.size for task in some) for some in (tasks, todo))
    work = partial(make_shards_of, config=config, readers=readers, folder=folder)
    done_bytes = total_bytes - todo_bytes
    bar: dict[str, Any] = {"desc": "tokenising", "unit": "B", "unit_scale": True, "mininterval": 1}
    with tqdm(total=total_bytes, initial=done_bytes, **bar) as progress:
        n_workers = min(config.workers, len(todo), todo_bytes // WORKER_BYTES)
        if n_workers > 1:
            # The tasks that read most come first, so that no process is left alone with one at the end.
            todo.sort(key=lambda task: -sum(segment.n_bytes for segment in task.segments))
            run_in_processes(work, todo, n_workers, lambda task: progress.update(task.size))
        else:
            for task in todo:
                work(task)
                progress.update(task.size)


def _make_plan(
    config: PrepareConfig,
    readers: Sequence[Reader],
    tokenizer_hash: str,
    sources: Mapping[str, dict],
    tasks: Sequence[ShardTask],
) -> dict:
    """Everything that decides the content of the folder: calls with the same plan write the same bytes.

    sources: {"bytes", "sha256"} of each file, by name."""
    settings = ("seq_len", "documents", "heldout_share", "max_tokens", "seed", "shard_bytes")
    encoders = sorted((reader.encoder for reader in readers), key=lambda encoder: isinstance(encoder, Encoder))
    mix = {name: source.describe() for name, source in config.sources.items()}
    for reader in readers:
        if isinstance(reader.record_format, TokenIdsFormat):
            mix[reader.name]["tokenizer_sha256"] = hashlib.sha256(reader.record_format.serialised.encode()).hexdigest()
    described = {key: value for encoder in encoders for key, value in encoder.describe().items()}
    contents = [
        (task.split, task.budgets, [(one.file.name, one.start, one.n_bytes, one.n_documents) for one in task.segments])
        for task in tasks
    ]
    return {
        "format_version": FORMAT_VERSION,
        "settings": {name: getattr(config, name) for name in settings},
        "mix": mix,
        "tokenizer": {"tokenizer_sha256": tokenizer_hash, **described},
        "sources": dict(sources),
        # The tasks. plan.json has called them units since the first version, and the address depends on it.
        "units": {
            "sha256": hashlib.sha256(json.dumps(contents).encode()).hexdigest(),
            **{split: sum(task.split == split for task in tasks) for split in SPLITS},
        },
    }


def _choose_files(config: PrepareConfig, files: Sequence[SourceFile]) -> tuple[list[SourceFile], list[float]]:
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
    segments = sorted(segments, key=lambda one: uniform(config.seed, f"{one.file.name}:{one.start}".encode()))
    usable = {segment: _usable_bytes(segment, config) * kept[segment.file.source] for segment in segments}
    chosen = set[Segment]()
    for number, budget in enumerate(budgets):
        eligible = [segment for segment in segments if config.budget_of(segment.file.source) == number]
        if budget is not None:
            eligible = eligible[: _count_until([usable[one] for one in eligible], budget * BYTES_A_TOKEN)]
        chosen.update(eligible)
    segments = [segment for segment in segments if segment in chosen]

    def usable_by_budget(some: Sequence[Segment]) -> list[float]:
        totals = [0.0] * len(budgets)
        for segment in some:
            totals[config.budget_of(segment.file.source)] += usable[segment]
        return totals

    in_all = usable_by_budget(segments)
    sizes = [int(segment.n_bytes * kept[segment.file.source]) for segment in segments]
    shard_bytes = _shard_bytes(config, segments, sizes)
    tasks = []
    for split, fraction in zip(SPLITS, (1 - config.heldout_share, config.heldout_share), strict=True):
        start, number = 0, 0
        while fraction and start < len(segments):
            stop = start + _count_until(sizes, min(shard_bytes / fraction, HELDOUT_READS * shard_bytes), start)
            of_task = tuple(segments[start:stop])
            limits = tuple(
                None if budget is None else int(budget * fraction * here / max(1, total))
                for budget, here, total in zip(budgets, usable_by_budget(of_task), in_all, strict=True)
            )
            size = int(fraction * sum(sizes[start:stop]))
            tasks.append(ShardTask(split, number, of_task, limits, size, shard_bytes))
            start, number = stop, number + 1
    return tasks


def _shard_bytes(config: PrepareConfig, segments: Sequence[Segment], sizes: Sequence[int]) -> int:
    """Text of a shard: as the settings say, or 1/16 of all text within limits, with room for long documents."""
    if config.shard_bytes:
        return config.shard_bytes
    least, most = SHARD_TEXT_BYTES
    shard_bytes = min(most, max(least, sum(sizes) // 16))
    if config.max_tokens is not None:
        counted = ((segment.n_bytes, segment.n_documents) for segment in segments)
        longest = max((n_bytes // max(1, n) for n_bytes, n in counted if n is not None), default=0)
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
    if config.documents == "first" and segment.n_documents is not None:
        return min(segment.n_bytes, segment.n_documents * config.seq_len * BYTES_A_TOKEN)
    return segment.n_bytes


def _count_until(sizes: Sequence[float], enough: float, start: int = 0) -> int:
    """How many sizes, from index `start` on, sum to `enough`: at least one, and all of them if they fall short."""
    total = 0.0
    for i in range(start, len(sizes)):
        total += sizes[i]
        if total >= enough:
            return i - start + 1
    return len(sizes) - start


def _write_manifests(folder: WorkFolder, max_bad_share: float) -> None:
    """Write each split's manifest and, last, the folder's.

    Raises ValueError if a task is not done, if more documents are bad than allowed, or if a split has no row.
    """
    plan, splits = folder.plan, {}
    for split in SPLITS:
        records = folder.read_all([task_name(split, number) for number in range(plan["units"][split])])
        splits[split] = add_up([empty_record(), *records])
        splits[split]["bad_named"] = splits[split]["bad_named"][:NAMED_BAD]
    hints = {why: hint for split in reversed(SPLITS) for why, hint in splits[split].pop("hints").items()}
    _check_counts(splits, hints, max_bad_share, plan["settings"])
    settings = {**plan["settings"], "documents_mode": plan["settings"]["documents"]}
    del settings["documents"]  # in a manifest, `documents` is how many there are
    described = {
        "format_version": FORMAT_VERSION,
        "address": folder.address,
        **plan["tokenizer"],
        **settings,
        "sources": {
            **count_and_hash(plan["sources"]),
            "bytes": sum(file["bytes"] for file in plan["sources"].values()),
            "read_as": plan["mix"],
        },
        "versions": {name: version(name) for name in ("tokenizers", "datasets", "pyarrow")},
    }
    for name, split in splits.items():
        (folder.path / name).mkdir(exist_ok=True)
        write_json(folder.path / name / MANIFEST, {"split": name, **described, **split})
    without_shards = {name: {key: split[key] for key in split if key != "shards"} for name, split in splits.items()}
    write_json(folder.path / MANIFEST, {**described, "splits": without_shards})


def _check_counts(splits: Mapping[str, dict], hints: Mapping[str, str], max_bad_share: float, settings: dict) -> None:
    """Raises ValueError if too many documents are bad, or if a split has no row."""
    reasons = sum((Counter(split["bad"]) for split in splits.values()), Counter())
    bad, documents = reasons.total(), sum(split["documents"] for split in splits.values())
    dropped = sum((Counter(split["dropped"]) for split in splits.values()), Counter())
    if bad > max_bad_share * (seen := bad + documents + dropped.total()):
        named = [f"{entry['document']} ({entry['why']})" for split in splits.values() for entry in split["bad_named"]]
        raise ValueError(
            f"{bad} of {seen} documents are bad, more than max_bad_share {max_bad_share:g} allows "
            f"({_listed(reasons)}): {', '.join(named[:5])}. {''.join(f'{hints[reason]}. ' for reason in sorted(hints))}"
            "Correct them or raise --max-bad-share: finished shards are kept. Other settings need --overwrite"
        )
    for split, fraction in zip(SPLITS, (1.0, settings["heldout_share"]), strict=True):
        if fraction and not splits[split]["rows"]:
            shown = ", ".join(f"{name} {settings[name]}" for name in ("heldout_share", "seq_len", "max_tokens", "seed"))
            raise ValueError(
                f"no row for {split}: {documents} documents in all, {dropped.total()} dropped ({_listed(dropped)}); "
                f"give more text, or change a setting with --overwrite ({shown})"
            )


def _listed(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{reason}: {n}" for reason, n in sorted(reasons.items()))


def _summary(manifest: dict) -> str:
    """One line about a finished folder: rows, tokens, documents, and what was left out."""
    noun = "documents" if manifest.get("chat_template_sha256") is None else "conversations"
    train, heldout = (manifest["splits"][split] for split in SPLITS)
    rows, tokens, supervised, documents = (
        train[key] + heldout[key] for key in ("rows", "tokens", "supervised_tokens", "documents")
    )
    of_them = "" if supervised == tokens else f", {supervised:,} of them supervised"
    bad, dropped = (sum((*train[key].values(), *heldout[key].values())) for key in ("bad", "dropped"))
    return (
        f"{train['rows']:,} train and {heldout['rows']:,} held-out rows of {manifest['seq_len']:,} tokens "
        f"({tokens:,} tokens of {documents:,} {noun}{of_them}, {1 - tokens / (rows * manifest['seq_len']):.1%} filler; "
        f"{bad:,} bad and {dropped:,} dropped {noun})"
    )


def _of_weights(manifest: dict) -> list[str]:
    """For each source with a weight, a line that says how much of its part of `max_tokens` it has filled."""
    weights = {name: how["weight"] for name, how in manifest["sources"]["read_as"].items() if "weight" in how}
    mixes = [split["mix"] for split in manifest["splits"].values()]
    lines = []
    for name, weight in weights.items():
        filled = sum(mix[name]["tokens"] for mix in mixes if name in mix)
        wanted = int(manifest["max_tokens"] * weight / sum(weights.values()))
        lines.append(f"{name}: {filled:,} of the {wanted:,} tokens asked for")
    return lines
