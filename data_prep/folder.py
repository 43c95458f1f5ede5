"""A prepared folder as a whole: what was asked, what is done, what came out.

plan.json     settings, mix, tokenizer and source files by hash, written first: who comes back is compared with it
progress/     one record a finished shard, gone at the end; locks of calls that make a part of the shards
train/, heldout/   shards and, at the end, a manifest each (shards.py)
manifest.json written last: its presence says "finished"
lengths.png   drawn by --inspect

Only what has one of these names is ever removed.

Nothing here depends on the clock, on paths or on the order in which shards were made.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from longdraft.data_prep.hub import is_network_error
from longdraft.data_prep.shards import FORMAT_VERSION, MANIFEST, write_json

SPLITS = ("train", "heldout")
NAMED_BAD = 20  # bad documents named in a manifest; all are counted
ENOUGH_OF_A_WEIGHT = 0.9  # documents are whole, so a budget is not met to the token
PLAN = "plan.json"
PROGRESS = "progress"
LENGTHS_PNG = "lengths.png"
FOLDERS = (PROGRESS, *SPLITS)
# Every file that a prepared folder can hold, and those of a half written one: .NAME.PID.tmp
OWN = re.compile(
    rf"{re.escape(PLAN)}|{re.escape(MANIFEST)}|{re.escape(LENGTHS_PNG)}"
    rf"|{PROGRESS}/(?:(?:{'|'.join(SPLITS)})-\d+\.json|\d+-\d+\.lock)"
    rf"|(?:{'|'.join(SPLITS)})/(?:shard-\d+\.arrow|{re.escape(MANIFEST)})"
)
HALF_WRITTEN = re.compile(r"\.(?P<name>[^/]+)\.\d+\.tmp")
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def locked(out: Path, part: str | None = None) -> Iterator[None]:
    """Only one process at a time, or one of each part; a killed one holds nothing. Raises ValueError when another is
    at it."""
    held = []

    def hold(path: Path, how: int, flags: int) -> None:
        held.append(os.open(path, flags))
        try:
            fcntl.flock(held[-1], how | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is preparing {out}; wait for it or choose another folder") from None

    try:
        hold(out, fcntl.LOCK_EX if part is None else fcntl.LOCK_SH, os.O_RDONLY)
        if part is not None:
            (out / PROGRESS).mkdir(exist_ok=True)
            hold(out / PROGRESS / f"{part}.lock", fcntl.LOCK_EX, os.O_RDWR | os.O_CREAT)
        yield
    finally:
        for file in held:
            os.close(file)


def settle(out: Path, plan: dict, overwrite: bool, alone: bool = True) -> None:
    """Leave `out` made by this plan: new, to be gone on with, or finished.

    Raises ValueError, which names the differences, for a folder made by another plan, and for one that holds other
    things. `overwrite` clears a prepared folder, never another one. alone: no other process writes to the folder.
    """
    if overwrite and not alone:
        raise ValueError("overwrite would take the other shards' work away; leave it out, and choose another folder")
    if overwrite and (out / PLAN).exists():
        _clear(out)
    if alone:
        clean(out)
    if not (out / PLAN).exists():
        # The plan and the folder of locks may be another part's, of this moment.
        known = (PROGRESS, LENGTHS_PNG, *(split for split in SPLITS if _is_empty_folder(out / split)))
        names = (entry.name for entry in out.iterdir())
        foreign = sorted(name for name in names if name not in known and _whole_name(name) != PLAN)
        if not (out / PLAN).exists():  # another part may have begun meanwhile
            if foreign:
                raise ValueError(f"{out} was not made by prepare (it holds {foreign[0]}); choose a new or empty folder")
            write_json(out / PLAN, plan)
    found = differences(read_plan(out), plan)
    if found:
        raise ValueError(
            f"{out} was prepared with something else: {'; '.join(found)}. "
            "Choose another folder, or --overwrite to prepare this one anew"
        )
    for folder in FOLDERS:
        if (out / folder).exists() and not (out / folder).is_dir():
            raise ValueError(f"{out / folder} is no folder, and prepare keeps its files there; move it away")
        (out / folder).mkdir(exist_ok=True)


def read_plan(out: Path, made_by: str | None = None) -> dict:
    """The folder's plan. made_by: of another command than prepare. Raises ValueError where it is not one of its own."""
    whose = made_by or "prepare"
    try:
        plan = json.loads((out / PLAN).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{out / PLAN} cannot be read ({error}); choose another folder, or remove this one") from error
    sections = ("settings", "mix", "tokenizer", "sources")
    if not isinstance(plan, dict) or not all(isinstance(plan.get(name), dict) for name in sections):
        raise ValueError(f"{out} was not made by {whose} ({PLAN} is another's); choose a new or empty folder")
    if plan.get("made_by") != made_by:
        other = plan.get("made_by", "prepare")
        raise ValueError(f"{out} was not made by {whose} (its plan is that of {other}); choose a new or empty folder")
    return plan


def _clear(out: Path) -> None:
    """Remove all that was prepared. Raises ValueError, before anything is removed, where other things lie among it."""
    read_plan(out)
    entries = list(_entries(out))
    foreign = sorted(name for name, path in entries if not (name in FOLDERS if path.is_dir() else _is_own(name)))
    if foreign:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise ValueError(
            f"{out} holds {foreign[0]}{more}, which prepare did not make, so --overwrite removes nothing; move that "
            "away, or choose another folder"
        )
    # The plan last: until then a kill leaves a folder that another overwrite clears.
    (out / MANIFEST).unlink(missing_ok=True)
    for name, path in entries:
        if name not in (PLAN, *FOLDERS):
            path.unlink(missing_ok=True)
    (out / PLAN).unlink()


def clean(out: Path, own: re.Pattern[str] = OWN) -> None:
    """Remove what killed calls left half written; only where nobody else writes. own: names of the files."""
    for name, path in list(_entries(out)):
        begun = (out / PLAN).exists() or _whole_name(path.name) == PLAN
        if begun and HALF_WRITTEN.fullmatch(path.name) and _is_own(name, own) and not path.is_dir():
            path.unlink()


def remove_progress(out: Path, own: re.Pattern[str] = OWN) -> None:
    """Remove the records and locks of finished work, and their folder if nothing else lies in it."""
    if not (out / PROGRESS).is_dir():
        return
    for path in (out / PROGRESS).iterdir():
        if _is_own(f"{PROGRESS}/{path.name}", own) and not path.is_dir():
            path.unlink()
    if _is_empty_folder(out / PROGRESS) and not (out / PROGRESS).is_symlink():
        (out / PROGRESS).rmdir()


def _entries(out: Path) -> Iterator[tuple[str, Path]]:
    """(name within the folder, path) of what lies in it and in the folders that it has."""
    for path in out.iterdir():
        yield path.name, path
        if path.name in FOLDERS and path.is_dir():
            yield from ((f"{path.name}/{inner.name}", inner) for inner in path.iterdir())


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _is_own(name: str, own: re.Pattern[str] = OWN) -> bool:
    folder, slash, last = name.rpartition("/")
    return own.fullmatch(f"{folder}{slash}{_whole_name(last)}") is not None


def _whole_name(name: str) -> str:
    """Of a half written file the name that it was to have; of another its own."""
    half = HALF_WRITTEN.fullmatch(name)
    return half["name"] if half else name


@contextmanager
def said_of_room(out: Path) -> Iterator[None]:
    """A full disk, and what the system does not let us read or write, are the user's to mend, not faults of the
    program."""
    try:
        yield
    except OSError as error:
        if is_network_error(error) or isinstance(error, BrokenPipeError):
            raise
        if error.errno in NO_ROOM:
            raise ValueError(
                f"no room for {out} ({error.strerror}); what is finished is kept: make room, call again"
            ) from error
        raise ValueError(
            f"{error.filename or out}: {error.strerror or error}; mend its rights or its place and call again: what is "
            "finished is kept"
        ) from error


def make_out(out: Path) -> None:
    """Make the folder, with those above it. Raises ValueError where it cannot be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ValueError(f"out {out} is a file; give the folder to make") from None
    except OSError as error:
        if error.errno in NO_ROOM:
            raise
        raise ValueError(
            f"out {_short(out)} cannot be made ({error.strerror}); give another folder by --out"
        ) from error


def check_out(out: Path) -> None:
    """Raises ValueError, before any work, where `make_out` will fail for what can be seen now."""
    try:
        there = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    except OSError as error:  # a name too long, or no right to look
        raise ValueError(f"out {_short(out)} cannot be made ({error.strerror}); give another by --out") from error
    if there == out and not out.is_dir():
        raise ValueError(f"out {out} is a file; give the folder to make")
    if not there.is_dir():
        raise ValueError(f"out {out} cannot be made: {there} is a file; give another folder by --out")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"out {out} cannot be written: {there} allows no writing; give another folder by --out")


def _short(path: Path) -> str:
    text = str(path)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"


def check_outside(out: Path, sources: Iterable[str]) -> None:
    """Raises ValueError where the folder to make lies within a source, and would be read as one."""
    for source in map(Path, sources):
        if source.is_dir() and out.resolve().is_relative_to(source.resolve()):
            raise ValueError(f"out {out} lies in the source {source}, and would be read as one; choose another")


def differences(there: dict, asked: dict) -> list[str]:
    """What the plan of a folder and the one asked for do not agree in, in words."""
    found = []
    for section in ("settings", "mix", "tokenizer"):
        before, now = there.get(section, {}), asked[section]
        for name in before.keys() | now.keys():
            old, new = before.get(name), now.get(name)
            if old != new:
                found.append(f"{name} is {old} there and {new} here")
    old, new = there["sources"], asked["sources"]
    changes = {
        "changed": sorted(name for name in old.keys() & new.keys() if old[name] != new[name]),
        "new": sorted(new.keys() - old.keys()),
        "gone": sorted(old.keys() - new.keys()),
    }
    found += [f"source files {what}: {len(names)} (first: {names[0]})" for what, names in changes.items() if names]
    if not found and there.get("units") != asked.get("units"):
        found.append("what goes into which shard is another: one of the two streams, or another version made it")
    return sorted(found)


def record_path(out: Path, split: str, number: int) -> Path:
    return out / PROGRESS / f"{split}-{number:05d}.json"


def is_done(out: Path, split: str, number: int, address: str) -> bool:
    """Whether the shard's record of this plan is there and the shard, if it has one, has the recorded size."""
    path = record_path(out, split, number)
    try:
        record = read_json(path) if path.exists() else None
    except ValueError:  # damaged: the shard is made again
        return False
    if not isinstance(record, dict) or record.get("address") != address:
        return False
    return is_whole(out / split, record["shard"])


def is_whole(folder: Path, written: dict | None) -> bool:
    """Whether a file that a record describes (`file`, `bytes`), if it describes one, is there with its size."""
    if written is None:
        return True
    path = folder / written["file"]
    return path.exists() and path.stat().st_size == written["bytes"]


def sources_in_short(sources: Mapping[str, dict]) -> dict:
    """Of a plan's source files: how many, and the hash of their names and hashes."""
    files = hashlib.sha256(json.dumps(sources, sort_keys=True).encode()).hexdigest()
    return {"files": len(sources), "sha256": files}


def finish(out: Path, plan: dict, max_bad_share: float) -> None:
    """Merge each split's records, check the whole, write the splits' manifests and, last, the folder's.

    Raises ValueError for shards that are not there, for more bad documents than allowed and for a split without a row.
    """
    numbers = [(split, number) for split in SPLITS for number in range(plan["units"][split])]
    missing = [number for number in numbers if not is_done(out, *number, plan["address"])]
    others = [f"{split} {number}" for split, number in missing if record_path(out, split, number).exists()]
    if others:
        raise ValueError(
            f"{len(others)} of {len(numbers)} shards of {out} are of another plan (other settings, tokenizer or "
            f"sources) or damaged (first: {others[0]}); make them again by the call that made the others"
        )
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(numbers)} shards of {out} are not there (first: {missing[0][0]} {missing[0][1]}); "
            "put the folders of all --shard calls together, or call prepare without --shard to make them here"
        )
    records = {
        split: [read_json(record_path(out, split, number)) for number in range(plan["units"][split])]
        for split in SPLITS
    }
    splits = {split: _merge(records[split]) for split in SPLITS}
    hints: dict[str, str] = {}
    for record in (record for split in SPLITS for record in records[split]):
        hints = record.get("hints", {}) | hints
    _check_bad(splits, hints, max_bad_share)
    _check_rows(splits, plan["settings"])
    settings = {**plan["settings"], "documents_mode": plan["settings"]["documents"]}
    del settings["documents"]  # in a manifest `documents` is their number
    described = {
        "format_version": FORMAT_VERSION,
        "address": plan["address"],
        **plan["tokenizer"],
        **settings,
        "sources": {
            **sources_in_short(plan["sources"]),
            "bytes": sum(file["bytes"] for file in plan["sources"].values()),
            "read_as": plan["mix"],
        },
        "versions": {name: version(name) for name in ("tokenizers", "datasets", "pyarrow")},
    }
    for name, split in splits.items():
        write_json(out / name / MANIFEST, {"split": name, **described, **split})
    short = {name: {key: split[key] for key in split if key != "shards"} for name, split in splits.items()}
    write_json(out / MANIFEST, {**described, "splits": short})


def summary(manifest: dict) -> str:
    """One line on a finished folder: rows, tokens, documents, what was left out."""
    kind = "documents" if manifest.get("chat_template_sha256") is None else "conversations"
    train, heldout = (manifest["splits"][split] for split in SPLITS)
    rows, tokens, documents = (train[key] + heldout[key] for key in ("rows", "tokens", "documents"))
    # Of plain text every token is supervised, and older manifests do not count them.
    supervised = sum(split.get("supervised_tokens", split["tokens"]) for split in (train, heldout))
    share = "" if supervised == tokens else f", {supervised:,} of them supervised"
    bad, dropped = (sum((*train[key].values(), *heldout[key].values())) for key in ("bad", "dropped"))
    return (
        f"{train['rows']:,} train and {heldout['rows']:,} held-out rows of {manifest['seq_len']:,} tokens "
        f"({tokens:,} tokens of {documents:,} {kind}{share}, {1 - tokens / (rows * manifest['seq_len']):.1%} filler; "
        f"{bad:,} bad and {dropped:,} dropped {kind})"
    )


def shortfalls(manifest: dict) -> list[str]:
    """A line for each source of a mix that had clearly less than its weight asks for; the others are as asked."""
    weights = {name: how["weight"] for name, how in manifest["sources"]["read_as"].items() if "weight" in how}
    lines = []
    for name, weight in weights.items():
        asked = int(manifest["max_tokens"] * weight / sum(weights.values()))
        has = sum(split["mix"].get(name, {}).get("tokens", 0) for split in manifest["splits"].values())
        if has < ENOUGH_OF_A_WEIGHT * asked:
            lines.append(
                f"{name} has {has:,} of the {asked:,} tokens that its weight asks for: it holds no more text, or much "
                "besides its text; lower max_tokens or its weight, and the mix is as asked"
            )
    return lines


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def _merge(records: Sequence[dict]) -> dict:
    def counts(key: str) -> dict[str, int]:
        return dict(sorted(sum((Counter(record[key]) for record in records), Counter()).items()))

    sums = ("rows", "tokens", "supervised_tokens", "documents", "split_by_turn", "pieces", "text_bytes")
    mix: dict[str, Counter[str]] = {}
    for record in records:
        for name, counted in record["mix"].items():
            mix.setdefault(name, Counter()).update(counted)
    return {
        **{key: sum(record[key] for record in records) for key in sums},
        "mix": {name: dict(mix[name]) for name in sorted(mix)},
        "bad": counts("bad"),
        "bad_named": [entry for record in records for entry in record["bad_named"]][:NAMED_BAD],
        "dropped": counts("dropped"),
        "shards": [record["shard"] for record in records if record["shard"]],
    }


def _check_bad(splits: Mapping[str, dict], hints: Mapping[str, str], max_bad_share: float) -> None:
    """hints: by reason, what is wrong with one of its documents in words."""
    why = sum((Counter(split["bad"]) for split in splits.values()), Counter())
    bad = why.total()
    seen = bad + sum(split["documents"] + sum(split["dropped"].values()) for split in splits.values())
    if bad > max_bad_share * seen:
        named = [f"{entry['document']} ({entry['why']})" for split in splits.values() for entry in split["bad_named"]]
        said = "".join(f". {hints[reason]}" for reason in sorted(hints))
        # Records without the field are no exceptions to be allowed for: another one was meant.
        mend = "Mend them, or raise --max-bad-share and call again: finished shards are kept"
        if why["missing_field"] > bad / 2:
            mend = "Call again with the field's right name and --overwrite"
        raise ValueError(
            f"{bad} of {seen} documents are bad, more than max_bad_share {max_bad_share:g} allows ("
            + ", ".join(f"{reason}: {n}" for reason, n in sorted(why.items()))
            + f"): {', '.join(named[:5])}{' ...' if bad > 5 else ''}{said}. {mend}"
        )


def _check_rows(splits: Mapping[str, dict], settings: dict) -> None:
    for split, share in zip(SPLITS, (1.0, settings["heldout_share"]), strict=True):
        if not share or splits[split]["rows"]:
            continue
        asked = ", ".join(f"{name} {settings[name]}" for name in ("heldout_share", "seq_len", "max_tokens", "seed"))
        dropped = "".join(f", {n} dropped as {why}" for why, n in splits[split]["dropped"].items())
        raise ValueError(
            f"no row for {split}: {sum(s['documents'] for s in splits.values())} documents in all{dropped} ({asked}). "
            "Give more text, or change one of these with --overwrite"
        )
