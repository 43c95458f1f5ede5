"""The whole preparation: sources to a folder with `train/` and `heldout/` shards.

The sources are cut into tasks, a function of their content and the settings alone (plan.py). A task is read, tokenised,
packed and written as one shard by one process (shard_task.py), which then leaves a completion record. So the number of
workers, and of machines, cannot change the result, and after a kill the tasks without a record are done again, the
others never (tasks.py).

Why not `datasets.Dataset.map(num_proc=...)`: its files depend on the number of processes, and a killed one begins anew.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from longdraft.data_prep.bars import bar
from longdraft.data_prep.chat import PLAIN, ChatEncoder, make_chat_encoder
from longdraft.data_prep.failures import check_out, check_outside, failures_described
from longdraft.data_prep.manifest import SPLITS, shortfalls, summary, write_manifests
from longdraft.data_prep.plan import choose_files, make_plan, plan_tasks
from longdraft.data_prep.record_formats import record_format_of
from longdraft.data_prep.segments import SEGMENT_BYTES, scan
from longdraft.data_prep.settings import PrepareConfig, Source
from longdraft.data_prep.shard_task import Reader, ShardTask, make_shard, task_name
from longdraft.data_prep.shards import MANIFEST, ShardSet, read_manifest
from longdraft.data_prep.sources import STDLIB_CHAT, SourceFile, list_files
from longdraft.data_prep.tasks import PLAN, Machine, WorkFolder, read_plan, tasks_of
from longdraft.data_prep.tokenize import make_encoder
from longdraft.data_prep.workers import run_in_processes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

COMMAND = "prepare"
LENGTHS_PNG = "lengths.png"  # drawn by --inspect
OWN_FILES = rf"(?:{'|'.join(SPLITS)})/(?:shard-\d+\.arrow|manifest\.json)|lengths\.png"
WITHOUT_FIELDS = ("text", "docstrings")  # kinds of files in which no field is looked for
WORKER_BYTES = 4 << 20  # of text, at least: less is tokenised sooner (2 s) than a process starts


def prepare(
    config: PrepareConfig,
    tokenizer: "PreTrainedTokenizerFast",
    tokenizer_hash: str,
    tokenizers: "Mapping[str, PreTrainedTokenizerFast] | None" = None,
    machine: Machine | None = None,
    log: Callable[[str], object] = print,
) -> dict | None:
    """Prepare `config.out`, go on with it, or say that it is done. Returns its manifest and logs one line.

    Args:
        tokenizer_hash: identifies the tokenizer in the manifest, which training compares with the target's.
        tokenizers: by name, those that sources of token ids name.
        machine: make this machine's shards only. The folder is not finished (None is returned) before a call without,
            or `merge`.
    Raises:
        ValueError: no such source, a folder made with other settings, tokenizer or sources, too many bad documents, an
            empty split, no room on the disk. What is finished stays on disk, so the same call goes on.
    """
    check_out(Path(str(config.out).replace("{address}", "0" * 12)))
    with failures_described(config.out):
        check_outside(config.out, (source.path for source in config.sources.values()))
        files, kept = choose_files(config, list_files(tuple(config.sources.values())))
        readers = make_readers(config, files, kept, tokenizer, tokenizers or {})
        with bar(iterable=files, desc="reading sources", unit="file", leave=False) as to_read:
            described, segments = scan(to_read, SEGMENT_BYTES)
    tasks = plan_tasks(config, segments, kept)
    plan = make_plan(config, readers, tokenizer_hash, described, tasks)
    config = replace(config, out=Path(str(config.out).replace("{address}", plan["address"][:12])))
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

    Raises ValueError where shards are missing, and as `prepare` does.
    """
    with failures_described(out):
        if not (out / PLAN).exists():
            raise ValueError(f"{out} was not begun by prepare ({PLAN} is missing); give the folder of --shard's --out")
        plan = read_plan(out, COMMAND)
        if not {"address", "units"} <= plan.keys():
            raise ValueError(f"{out / PLAN} is of an older version, which made no parts; prepare {out} anew")
        folder = work_folder(out, plan)
        with folder.opened(plan):
            was_finished = folder.is_finished
            if not was_finished:
                _finish(folder, plan, max_bad_share)
    return _report(out, "Already merged" if was_finished else "Merged", log)


def work_folder(out: Path, plan: dict) -> WorkFolder:
    """The folder `out` as a preparation by this plan has it."""
    return WorkFolder(out, plan["address"], COMMAND, "prepared", "shards", OWN_FILES, SPLITS)


def make_shards(
    tasks: Sequence[ShardTask], config: PrepareConfig, readers: Sequence[Reader], folder: WorkFolder
) -> None:
    """Make the shards that are not there yet, in at most `config.workers` processes, under a bar."""
    todo = [task for task in tasks if folder.record(task.name) is None]
    total, missing = (sum(task.size for task in some) for some in (tasks, todo))
    work = partial(make_shard, config=config, readers=readers, folder=folder)
    with bar(total=total, initial=total - missing, desc="tokenising", unit="B", unit_scale=True) as progress:
        n_workers = min(config.workers, len(todo), missing // WORKER_BYTES)
        if n_workers > 1:
            # What reads most comes first, so that no process is left alone with it at the end.
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
        ShardSet(out / split)  # every shard is there with its size
    manifest = read_manifest(out / MANIFEST)
    log("\n".join([f"{what}: {summary(manifest)} -> {out}", *(f"  {line}" for line in shortfalls(manifest))]))
    return manifest


def make_readers(
    config: PrepareConfig,
    files: Sequence[SourceFile],
    kept: Sequence[float],
    tokenizer: "PreTrainedTokenizerFast",
    tokenizers: "Mapping[str, PreTrainedTokenizerFast]",
) -> list[Reader]:
    """How each source is read; kept: the fraction of its documents that is wanted.

    Raises ValueError where what a source holds does not go with how it is to be read."""
    is_chat = [_is_chat(source, number, files) for number, source in enumerate(config.sources.values())]
    _check_mix(config, is_chat)
    chat = _chat_encoder(config, tokenizer) if any(is_chat) else None
    text = None if all(is_chat) else make_encoder(tokenizer, ends_documents=config.documents == "pack")
    readers = []
    for number, (name, source) in enumerate(config.sources.items()):
        encoder = chat if is_chat[number] else text
        assert encoder is not None
        readers.append(Reader(name, record_format_of(source, tokenizers), encoder, kept[number]))
    return readers


def _is_chat(source: Source, number: int, files: Sequence[SourceFile]) -> bool:
    """Whether a source holds conversations; text files among them, of which every token would count, are an error."""
    mine = [file for file in files if file.source == number]  # none where all belong to a source before it
    text = [file.name for file in mine if file.kind == "text"]
    if source.is_chat and text:
        raise ValueError(
            f"source {source.path!r} holds {len(text)} files of plain text beside its conversations (first: {text[0]})"
            "; name the files to take (--files '*.jsonl'), and prepare the texts as another source"
        )
    if source.field_named and mine and all(file.kind in WITHOUT_FIELDS for file in mine):
        raise ValueError(
            f"source {source.path!r} holds no records, so its {source.field_named} would not be read; leave it out, or "
            "name files of records (JSONL, CSV, Parquet, ...)"
        )
    return source.is_chat or source.path == STDLIB_CHAT


def _check_mix(config: PrepareConfig, is_chat: Sequence[bool]) -> None:
    if not any(is_chat):
        if config.chat_template is not None:
            raise ValueError(
                "chat_template is for conversations, and there are none; give --chat-field, or leave it out"
            )
        return
    if config.documents != "pack":
        raise ValueError(f"documents is {config.documents!r}, which cuts answers off; conversations take 'pack'")
    for chats, (name, source) in zip(is_chat, config.sources.items(), strict=True):
        if not chats and source.text_field is None and source.tokens_field is None:
            raise ValueError(
                f"source {name!r} is read as plain text, of which every token counts, beside conversations; name the "
                "field of its conversations (--chat-field), or in a recipe its text_field to mix text in"
            )


def _chat_encoder(config: PrepareConfig, tokenizer: "PreTrainedTokenizerFast") -> ChatEncoder:
    if config.chat_template is None:
        return make_chat_encoder(tokenizer)
    if str(config.chat_template) == PLAIN:
        return make_chat_encoder(tokenizer, PLAIN)
    if not config.chat_template.is_file():
        raise ValueError(
            f"chat_template {str(config.chat_template)!r} does not exist; give a Jinja file, or {PLAIN} for texts that "
            "the target has continued"
        )
    try:
        template = config.chat_template.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"chat_template {config.chat_template} is no UTF-8 ({error}); convert it") from error
    return make_chat_encoder(tokenizer, template)
