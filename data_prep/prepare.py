"""The whole preparation, from sources to a folder with `train/` and `heldout/` shards.

sources.py lists the files, segments.py hashes them and cuts them into segments, plan.py divides the segments into
tasks, tasks.py runs these in processes, shard_task.py makes a shard of a task (record_formats.py, then tokenize.py or
chat.py, then pack.py), work_folder.py keeps a completion record of each task, and manifest.py adds the records up.

The tasks depend on the sources' content and the settings alone, so the number of workers or machines cannot change the
result. After a kill only the tasks without a completion record are done again.

`datasets.Dataset.map(num_proc=...)` is not used: its files depend on the number of processes, and a kill loses all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from longdraft.data_prep.bars import bar
from longdraft.data_prep.failures import check_out, check_outside, failures_described
from longdraft.data_prep.manifest import SPLITS, shortfalls, summary, write_manifests
from longdraft.data_prep.plan import choose_files, make_plan, plan_tasks
from longdraft.data_prep.readers import Reader, make_readers
from longdraft.data_prep.segments import SEGMENT_BYTES, scan
from longdraft.data_prep.settings import PrepareConfig
from longdraft.data_prep.shard_task import ShardTask, make_shard, task_name
from longdraft.data_prep.shards import MANIFEST, ShardSet, read_manifest
from longdraft.data_prep.sources import list_files
from longdraft.data_prep.tasks import Machine, run_in_processes, tasks_of
from longdraft.data_prep.work_folder import PLAN, WorkFolder, read_plan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

COMMAND = "prepare"
LENGTHS_PNG = "lengths.png"  # drawn by --inspect
OWN_FILES = rf"(?:{'|'.join(SPLITS)})/(?:shard-\d+\.arrow|manifest\.json)|lengths\.png"
WORKER_BYTES = 4 << 20  # least text of a worker process: less is tokenised (2 s) before another process has started


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
    check_out(_fill_address(config.out, "0" * 12))
    with failures_described(config.out):
        check_outside(config.out, (source.path for source in config.sources.values()))
        files, kept = choose_files(config, list_files(tuple(config.sources.values())))
        readers = make_readers(config, files, kept, tokenizer, tokenizers or {})
        with bar(iterable=files, desc="reading sources", unit="file", leave=False) as to_read:
            described, segments = scan(to_read, SEGMENT_BYTES)
    tasks = plan_tasks(config, segments, kept)
    plan = make_plan(config, readers, tokenizer_hash, described, tasks)
    config = replace(config, out=_fill_address(config.out, plan["address"][:12]))
    out, mine = config.out, tasks_of(machine, tasks)
    with failures_described(out):
        folder = work_folder(out, plan)
        with folder.opened(plan, machine, config.overwrite):
            was_finished = folder.is_finished
            if not was_finished:
                make_shards(mine, config, readers, folder)
                if machine is None:
                    _finish(folder, plan, config.max_bad_share)
    if machine is not None and not was_finished:
        log(f"Prepared {len(mine)} of {len(tasks)} shards, {machine.number}/{machine.of} -> {out}")
        return None
    return _report(out, "Already prepared" if was_finished else "Prepared", log)


def merge(out: Path, max_bad_share: float = PrepareConfig.max_bad_share, log: Callable[[str], object] = print) -> dict:
    """Finish a folder whose shards were made by several machines. Only manifests are written.

    Raises ValueError if shards are missing, and for the reasons that `prepare` gives.
    """
    with failures_described(out):
        if not (out / PLAN).exists():
            raise ValueError(f"{out} was not begun by prepare ({PLAN} is missing); give the folder of --shard's --out")
        plan = read_plan(out, COMMAND)
        if not {"address", "units"} <= plan.keys():
            raise ValueError(f"{out / PLAN} was written by an older version, which made no parts; prepare {out} anew")
        folder = work_folder(out, plan)
        with folder.opened(plan):
            was_finished = folder.is_finished
            if not was_finished:
                _finish(folder, plan, max_bad_share)
    return _report(out, "Already merged" if was_finished else "Merged", log)


def _fill_address(out: Path, address: str) -> Path:
    return Path(str(out).replace("{address}", address))


def work_folder(out: Path, plan: dict) -> WorkFolder:
    """The work folder `out` of a preparation by this plan."""
    return WorkFolder(out, plan["address"], COMMAND, "prepared", "shards", OWN_FILES, SPLITS)


def make_shards(
    tasks: Sequence[ShardTask], config: PrepareConfig, readers: Sequence[Reader], folder: WorkFolder
) -> None:
    """Make the shards that do not exist yet, in at most `config.workers` processes, with a progress bar."""
    todo = [task for task in tasks if folder.record(task.name) is None]
    total_bytes, todo_bytes = (sum(task.size for task in some) for some in (tasks, todo))
    work = partial(make_shard, config=config, readers=readers, folder=folder)
    done_bytes = total_bytes - todo_bytes
    with bar(total=total_bytes, initial=done_bytes, desc="tokenising", unit="B", unit_scale=True) as progress:
        n_workers = min(config.workers, len(todo), todo_bytes // WORKER_BYTES)
        if n_workers > 1:
            # The tasks that read most come first, so that no process is left alone with one at the end.
            todo.sort(key=lambda task: -sum(segment.length for segment in task.segments))
            run_in_processes(work, todo, n_workers, lambda task: progress.update(task.size))
        else:
            for task in todo:
                work(task)
                progress.update(task.size)


def _finish(folder: WorkFolder, plan: dict, max_bad_share: float) -> None:
    names = {split: [task_name(split, number) for number in range(plan["units"][split])] for split in SPLITS}
    records = folder.records([name for split in SPLITS for name in names[split]])
    n_train = len(names["train"])
    write_manifests(folder.path, plan, {"train": records[:n_train], "heldout": records[n_train:]}, max_bad_share)


def _report(out: Path, what: str, log: Callable[[str], object]) -> dict:
    for split in SPLITS:
        ShardSet(out / split)  # checks that every shard is there and has its size
    manifest = read_manifest(out / MANIFEST)
    log("\n".join([f"{what}: {summary(manifest)} -> {out}", *(f"  {line}" for line in shortfalls(manifest))]))
    return manifest
