"""Writes a record's answers as Spec-Bench's `evaluation/speed.py` reads them, to compare them with other programs'."""

import json
import time
from pathlib import Path
from typing import Any

from longdraft.benchmarks.drafters.record import Entry, Record
from longdraft.models.files import write_atomically


def write_spec_bench(record: Record, folder: Path) -> Path:
    """Write a file for each drafter and temperature into `folder/spec_bench`, and return that folder."""
    runs, out = record.by_drafter(), folder / "spec_bench"
    out.mkdir(exist_ok=True)
    for temperature, drafters in runs.items():
        for drafter, entries in drafters.items():
            name = f"{drafter}-temperature-{temperature:g}" if len(runs) > 1 else drafter
            model = f"{record.machine.get('target', 'target')}-{name}"
            text = "".join(json.dumps(spec_bench(entry, model)) + "\n" for entry in entries)
            write_atomically(out / f"{name}.jsonl", lambda partial, text=text: partial.write_text(text))
    return out


def spec_bench(entry: Entry, model: str) -> dict[str, Any]:
    """A line of a model's answers (Spec-Bench, `evaluation/eval.py`)."""
    choice = {
        "index": 0,
        "turns": [turn.text or "" for turn in entry.turns],
        "decoding_steps": [turn.steps for turn in entry.turns],
        "new_tokens": [len(turn.tokens) for turn in entry.turns],
        "wall_time": [turn.prefill_seconds + turn.decode_seconds for turn in entry.turns],
        "accept_lengths": [length for turn in entry.turns for length in turn.accept_lengths],
    }
    return {
        "question_id": entry.id,
        "category": entry.category,
        "answer_id": f"{model}/{entry.id}",
        "model_id": model,
        "choices": [choice],
        "tstamp": time.time(),
    }
