"""Writes the manifests of a prepared folder from its tasks' completion records, and the lines that report on it."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

from longdraft.data_prep.shards import FORMAT_VERSION, MANIFEST, write_json

SPLITS = ("train", "heldout")
NAMED_BAD = 20  # bad documents named in a manifest; all are counted
MIN_OF_BUDGET = 0.9  # documents are whole, so a budget is not met to the token
# The fields of a task's completion record, with their values for a task without documents. hints: for each reason why
# documents are bad, what is wrong with one of them.
EMPTY_RECORD = {
    **dict.fromkeys(("rows", "tokens", "supervised_tokens", "documents", "split_by_turn", "pieces", "text_bytes"), 0),
    **{"mix": {}, "bad": {}, "bad_named": [], "dropped": {}, "hints": {}, "shards": []},
}


def write_manifests(out: Path, plan: dict, records: Mapping[str, Sequence[dict]], max_bad_share: float) -> None:
    """Write each split's manifest and, last, the folder's. records: the completion records of all tasks, by split.

    Raises ValueError if more documents are bad than allowed, or if a split has no row.
    """
    splits = {split: add_up([EMPTY_RECORD, *records[split]]) for split in SPLITS}
    hints = {why: hint for split in reversed(SPLITS) for why, hint in splits[split].pop("hints").items()}
    for split in splits.values():
        split["bad_named"] = split["bad_named"][:NAMED_BAD]
    _check_bad(splits, hints, max_bad_share)
    _check_rows(splits, plan["settings"])
    settings = {**plan["settings"], "documents_mode": plan["settings"]["documents"]}
    del settings["documents"]  # in a manifest, `documents` is how many there are
    described = {
        "format_version": FORMAT_VERSION,
        "address": plan["address"],
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
        write_json(out / name / MANIFEST, {"split": name, **described, **split})
    without_shards = {name: {key: split[key] for key in split if key != "shards"} for name, split in splits.items()}
    write_json(out / MANIFEST, {**described, "splits": without_shards})


def count_and_hash(sources: Mapping[str, dict]) -> dict:
    """The number of a plan's source files, and one hash over their names and hashes."""
    return {"files": len(sources), "sha256": hashlib.sha256(json.dumps(sources, sort_keys=True).encode()).hexdigest()}


def summary(manifest: dict) -> str:
    """One line about a finished folder: rows, tokens, documents, and what was left out."""
    noun = "documents" if manifest.get("chat_template_sha256") is None else "conversations"
    train, heldout = (manifest["splits"][split] for split in SPLITS)
    rows, tokens, documents = (train[key] + heldout[key] for key in ("rows", "tokens", "documents"))
    # In plain text every token is supervised, and older manifests do not count them.
    supervised = sum(split.get("supervised_tokens", split["tokens"]) for split in (train, heldout))
    of_them = "" if supervised == tokens else f", {supervised:,} of them supervised"
    bad, dropped = (sum((*train[key].values(), *heldout[key].values())) for key in ("bad", "dropped"))
    return (
        f"{train['rows']:,} train and {heldout['rows']:,} held-out rows of {manifest['seq_len']:,} tokens "
        f"({tokens:,} tokens of {documents:,} {noun}{of_them}, {1 - tokens / (rows * manifest['seq_len']):.1%} filler; "
        f"{bad:,} bad and {dropped:,} dropped {noun})"
    )


def shortfalls(manifest: dict) -> list[str]:
    """A line for each source of a mix that gave clearly fewer tokens than its weight asks for. Without weights, one
    line if all sources together gave clearly fewer than `max_tokens`."""
    weights = {name: how["weight"] for name, how in manifest["sources"]["read_as"].items() if "weight" in how}
    lines = []
    for name, weight in weights.items():
        budget = int(manifest["max_tokens"] * weight / sum(weights.values()))
        has = sum(split["mix"].get(name, {}).get("tokens", 0) for split in manifest["splits"].values())
        if has < MIN_OF_BUDGET * budget:
            lines.append(
                f"{name} has {has:,} of the {budget:,} tokens that its weight asks for: it holds no more text, or much "
                "besides its text; lower max_tokens or its weight, and the mix is as asked"
            )
    budget, has = manifest.get("max_tokens"), sum(split["tokens"] for split in manifest["splits"].values())
    if not weights and budget is not None and has < MIN_OF_BUDGET * budget:
        lines.append(
            f"the folder has {has:,} of the {budget:,} tokens asked for: the sources hold no more text, or much besides"
            " their text (then a larger max_tokens reads more of them), or documents that are long beside max_tokens"
        )
    return lines


def _check_bad(splits: Mapping[str, dict], hints: Mapping[str, str], max_bad_share: float) -> None:
    reasons = sum((Counter(split["bad"]) for split in splits.values()), Counter())
    bad = reasons.total()
    seen = bad + sum(split["documents"] + sum(split["dropped"].values()) for split in splits.values())
    if bad <= max_bad_share * seen:
        return
    named = [f"{entry['document']} ({entry['why']})" for split in splits.values() for entry in split["bad_named"]]
    remedy = "Mend them, or raise --max-bad-share and call again: finished shards are kept"
    # If most bad documents lack the field, its name is wrong, and allowing more bad documents would not help.
    if reasons["missing_field"] > bad / 2:
        remedy = "Call again with the field's right name and --overwrite"
    raise ValueError(
        f"{bad} of {seen} documents are bad, more than max_bad_share {max_bad_share:g} allows ("
        + ", ".join(f"{reason}: {n}" for reason, n in sorted(reasons.items()))
        + f"): {', '.join(named[:5])}{' ...' if bad > 5 else ''}. "
        + "".join(f"{hints[reason]}. " for reason in sorted(hints))
        + remedy
    )


def _check_rows(splits: Mapping[str, dict], settings: dict) -> None:
    for split, fraction in zip(SPLITS, (1.0, settings["heldout_share"]), strict=True):
        if not fraction or splits[split]["rows"]:
            continue
        shown = ", ".join(f"{name} {settings[name]}" for name in ("heldout_share", "seq_len", "max_tokens", "seed"))
        dropped = "".join(f", {n} dropped as {why}" for why, n in splits[split]["dropped"].items())
        raise ValueError(
            f"no row for {split}: {sum(s['documents'] for s in splits.values())} documents in all{dropped} ({shown}). "
            "Give more text, or change one of these with --overwrite"
        )


def add_up(records: Sequence[dict]) -> dict:
    """Combine records that have the same fields into one. Numbers are added, lists are concatenated, dicts are combined
    key by key with their keys sorted, and of texts the first is taken."""

    def added(values: list[Any]) -> Any:
        if isinstance(values[0], dict):
            names = sorted(set().union(*values))
            return {name: added([value[name] for value in values if name in value]) for name in names}
        if isinstance(values[0], list):
            return [*chain.from_iterable(values)]
        return values[0] if isinstance(values[0], str) else sum(values)

    return {name: added([record[name] for record in records]) for name in records[0]}
