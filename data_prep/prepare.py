"""The whole preparation: sources to a folder with `train/` and `heldout/` shards (folder.py draws it).

The sources are cut into units, a function of their content and the settings alone (plan.py). A unit is read, tokenised,
packed and written as one shard by one process, which then leaves a record; so the number of workers, and of machines,
cannot change the result, and after a kill the units without a record are done again, the others never.

Why not `datasets.Dataset.map(num_proc=...)`: its files depend on the number of processes, and a killed one begins anew.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING

from longdraft.data_prep import folder, hub
from longdraft.data_prep.bars import bar
from longdraft.data_prep.chat import ChatEncoder, make_chat_encoder
from longdraft.data_prep.folder import SPLITS
from longdraft.data_prep.plan import SEGMENT_BYTES, choose_files, make_plan, plan_units
from longdraft.data_prep.record_formats import record_format_of
from longdraft.data_prep.settings import PrepareConfig, Source
from longdraft.data_prep.shards import MANIFEST, ShardSet, read_manifest
from longdraft.data_prep.sources import STDLIB_CHAT, SourceFile, list_files, scan
from longdraft.data_prep.tokenize import make_encoder
from longdraft.data_prep.unit import Reader, Unit, make_shard

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WHOLE = ("text", "docstrings")  # kinds of files in which no field is looked for
WORKER_BYTES = 4 << 20  # of text, at least: less is tokenised sooner (2 s) than a process starts


@dataclass(frozen=True)
class Part:
    """The part of the work that one machine of several does: `number` counts from 1 to `of`."""

    number: int
    of: int

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.of:
            raise ValueError(f"shard is {self.number}/{self.of}, valid: 1/n to n/n")


def prepare(
    config: PrepareConfig,
    tokenizer: "PreTrainedTokenizerFast",
    tokenizer_hash: str,
    tokenizers: "Mapping[str, PreTrainedTokenizerFast] | None" = None,
    part: Part | None = None,
    say: Callable[[str], object] = print,
) -> dict | None:
    """Prepare `config.out`, go on with it, or say that it is done; returns its manifest and says one line.

    tokenizer_hash: identifies the tokenizer in the manifest, which training compares with the target's. tokenizers: by
    name, those that sources of token ids name. part: make these shards only; the folder is not finished (None is
    returned) before a call without, or `merge`.
    Raises ValueError: no such source, a folder made with other settings, tokenizer or sources, too many bad documents,
    an empty split, no room on the disk. What is finished stays on disk, so the same call goes on.
    """
    folder.check_out(Path(str(config.out).replace("{address}", "0" * 12)))
    with _said(config.out):
        folder.check_outside(config.out, (source.path for source in config.sources.values()))
        files, kept = choose_files(config, list_files(tuple(config.sources.values())))
        readers = make_readers(config, files, kept, tokenizer, tokenizers or {})
        scanned = []
        with bar(total=len(files), desc="reading sources", unit="file", leave=False) as progress:
            for file in files:
                scanned.append(scan(file, SEGMENT_BYTES))
                progress.update()
    units = plan_units(config, scanned, kept)
    plan = make_plan(config, readers, tokenizer_hash, scanned, units)
    config = replace(config, out=Path(str(config.out).replace("{address}", plan["address"][:12])))
    out = config.out
    with _said(out):
        folder.make_out(out)
        with folder.locked(out, f"{part.number}-{part.of}" if part else None):
            folder.settle(out, plan, config.overwrite, alone=part is None)
            finished = (out / MANIFEST).exists()
            mine = units if part is None else units[part.number - 1 :: part.of]
            if not finished:
                run_units(config, readers, mine, plan["address"])
            if not finished and part is None:
                folder.finish(out, plan, config.max_bad_share)
            if finished or part is None:
                folder.remove_progress(out)
    if part is not None and not finished:
        say(f"Prepared {len(mine)} of {len(units)} shards, {part.number}/{part.of} -> {out}")
        return None
    return _report(out, "Already prepared" if finished else "Prepared", say)


def merge(out: Path, max_bad_share: float = PrepareConfig.max_bad_share, say: Callable[[str], object] = print) -> dict:
    """Finish a folder whose shards were made by several calls with a part; writes manifests and nothing else.

    Raises ValueError where shards are missing, and as `prepare` does.
    """
    with _said(out):
        if not (out / folder.PLAN).exists():
            raise ValueError(
                f"{out} was not begun by prepare ({folder.PLAN} is missing); give the folder of --shard's --out"
            )
        plan = folder.read_plan(out)
        if not {"address", "units"} <= plan.keys():
            raise ValueError(f"{out / folder.PLAN} is of an older version, which made no parts; prepare {out} anew")
        with folder.locked(out):
            finished = (out / MANIFEST).exists()
            if not finished:
                folder.clean(out)
                folder.finish(out, plan, max_bad_share)
            folder.remove_progress(out)
    return _report(out, "Already merged" if finished else "Merged", say)


def _report(out: Path, what: str, say: Callable[[str], object]) -> dict:
    for split in SPLITS:
        ShardSet(out / split)  # every shard is there with its size
    manifest = read_manifest(out / MANIFEST)
    lines = [f"{what}: {folder.summary(manifest)} -> {out}", *(f"  {line}" for line in folder.shortfalls(manifest))]
    say("\n".join(lines))
    return manifest


@contextmanager
def _said(out: Path) -> Iterator[None]:
    """A full disk and a lost connection are the user's to mend, not faults of the program."""
    try:
        with folder.said_of_room(out):
            yield
    except Exception as error:
        if not hub.is_network_error(error):
            raise
        raise ValueError(
            f"the hub could not be read to the end ({error}); finished shards are kept: call again"
        ) from error


def make_readers(
    config: PrepareConfig,
    files: Sequence[SourceFile],
    kept: Sequence[float],
    tokenizer: "PreTrainedTokenizerFast",
    tokenizers: "Mapping[str, PreTrainedTokenizerFast]",
) -> list[Reader]:
    """How each source is read; kept: the share of its documents.

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
    text = [file.name for file in files if file.source == number and file.kind == "text"]
    if source.is_chat and text:
        raise ValueError(
            f"source {source.path!r} holds {len(text)} files of plain text beside its conversations (first: {text[0]})"
            "; name the files to take (--files '*.jsonl'), and prepare the texts as another source"
        )
    if source.reads_records and not any(file.source == number and file.kind not in WHOLE for file in files):
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
    if not config.chat_template.is_file():
        raise ValueError(f"chat_template {str(config.chat_template)!r} does not exist; give a Jinja file")
    try:
        template = config.chat_template.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"chat_template {config.chat_template} is no UTF-8 ({error}); convert it") from error
    return make_chat_encoder(tokenizer, template)


def run_units(config: PrepareConfig, readers: Sequence[Reader], units: Sequence[Unit], address: str) -> None:
    """Make the shards that are not there yet, in at most `config.workers` processes, under a bar."""
    todo = [unit for unit in units if not folder.is_done(config.out, unit.split, unit.number, address)]
    total = sum(unit.size for unit in units)
    done = total - sum(unit.size for unit in todo)
    with bar(total=total, initial=done, desc="tokenising", unit="B", unit_scale=True) as progress:
        n_workers = min(config.workers, len(todo), (total - done) // WORKER_BYTES)
        if n_workers <= 1:
            for unit in todo:
                make_shard(unit, config, readers, address)
                progress.update(unit.size)
            return
        # spawn: a fork would copy the threads' locks of whatever the caller has loaded (torch, tokenizers).
        context = multiprocessing.get_context("spawn")
        others = set(multiprocessing.active_children())
        pool = ProcessPoolExecutor(n_workers, context, _begin_worker, (config, readers, address))
        try:
            # What reads most comes first, so that no process is left alone with it at the end.
            todo.sort(key=lambda unit: -sum(segment.length for segment in unit.segments))
            with _no_ctrl_c():  # the workers start at the first of these, and keep it so
                sizes = {pool.submit(_work, unit): unit.size for unit in todo}
            for future in as_completed(sizes):
                future.result()
                progress.update(sizes[future])
        except BrokenProcessPool:
            raise ValueError(
                "a worker was killed (out of memory?); finished shards are kept: call again, with fewer --workers"
            ) from None
        except KeyboardInterrupt:
            # A shard takes seconds, and half of one is nothing that is kept.
            for worker in set(multiprocessing.active_children()) - others:
                worker.kill()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def _no_ctrl_c() -> Iterator[None]:
    """Ctrl-C waits until the end; processes started inside never get it, from their first instruction on."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---- in the worker processes

_worker: tuple[PrepareConfig, Sequence[Reader], str] | None = None


def _begin_worker(config: PrepareConfig, readers: Sequence[Reader], address: str) -> None:
    global _worker
    _worker = (config, readers, address)
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
