"""The manifest of a folder of regenerated answers, made from its tasks' completion records, and a summary line."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longdraft.data_prep.manifest import NAMED_BAD, add_up, count_and_hash
from longdraft.data_prep.responses import ERRORS, OpenConversation
from longdraft.data_prep.shards import MANIFEST, write_json

# The fields of a task's completion record and of the manifest, with their values for no conversation. hints: for each
# reason why conversations were left out, what is wrong with one of them.
EMPTY_RECORD = {
    **{"input": 0, "success": 0, "error": {}, "skipped": {}, "named": []},
    **{"answers": 0, "answer_tokens": 0, "reread": 0, "hints": {}, "parts": []},
}


def conversations_record(conversations: Sequence[OpenConversation]) -> dict:
    """The record of conversations that are complete or left out."""
    return _total([_conversation_record(conversation) for conversation in conversations])


def _conversation_record(conversation: OpenConversation) -> dict:
    if conversation.why is None:
        counts = {"answers": conversation.turn, "answer_tokens": conversation.generated, "reread": conversation.reread}
        return EMPTY_RECORD | {"input": 1, "success": 1, **counts}
    kind = "error" if conversation.why in ERRORS else "skipped"
    hints = {conversation.why: f"{conversation.name} {conversation.detail}"} if conversation.detail else {}
    named = [{"conversation": conversation.name, "why": conversation.why}]
    return EMPTY_RECORD | {"input": 1, kind: {conversation.why: 1}, "named": named, "hints": hints}


def _total(records: Sequence[dict]) -> dict:
    total = add_up([EMPTY_RECORD, *records])
    left_out = sum(total["error"].values()) + sum(total["skipped"].values())
    assert total["input"] == total["success"] + left_out, total
    return total | {"named": total["named"][:NAMED_BAD]}


def write_manifest(out: Path, plan: dict, records: Sequence[dict]) -> None:
    """Write the folder's manifest. records: of all tasks. Raises ValueError if no conversation was answered."""
    total = _total(records)
    hints = total.pop("hints")
    if not total["success"]:
        raise ValueError(
            f"none of {total['input']} conversations is answered ({_counts(total)}); the first left out: "
            f"{total['named'][0]['conversation'] if total['named'] else 'none'}. "
            + "".join(f"{hints[why]}. " for why in sorted(hints))
            + "Change the sources or the settings (for unfinished answers --max-new-tokens) and choose another folder"
        )
    described = {"made_by": plan["made_by"], **plan["tokenizer"], **plan["settings"], **plan["mix"]}
    write_json(out / MANIFEST, {**described, "sources": count_and_hash(plan["sources"]), **total})


def summary(manifest: dict) -> str:
    """The counts of a finished folder, for its line in the log."""
    reread = f", {manifest['reread']:,} of them read back as other tokens" if manifest["reread"] else ""
    return (
        f"{manifest['success']:,} of {manifest['input']:,} conversations with {manifest['answers']:,} answers of "
        f"{manifest['answer_tokens']:,} tokens{reread}; {_counts(manifest)}"
    )


def _counts(record: Mapping[str, Any]) -> str:
    """How many conversations were errors, and how many were skipped, with the reasons."""
    counts = []
    for field, noun in (("error", "errors"), ("skipped", "skipped")):
        reasons = ", ".join(f"{reason}: {count:,}" for reason, count in record[field].items())
        counts.append(f"{sum(record[field].values()):,} {noun}" + (f" ({reasons})" if reasons else ""))
    return ", ".join(counts)
