"""Writes a record in two other programs' formats, so that our answers can be compared with others'.

| files | what they hold |
|---|---|
| `spec_bench/DRAFTER.jsonl` | answers as Spec-Bench's `evaluation/speed.py` reads them |
| `vllm/DRAFTER.jsonl` | `usage` and `metrics.speculative_decoding` of a response of vLLM 0.32 |
"""

import json
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

from longdraft.benchmarks.drafters.record import Answer, Entry, Record
from longdraft.models.files import write_atomically


def write_files(record: Record, folder: Path) -> list[Path]:
    """Write both files for each drafter and temperature, and return their folders."""
    runs, written = record.by_drafter(), list[Path]()
    for temperature, drafters in runs.items():
        for drafter, entries in drafters.items():
            name = f"{drafter}-temperature-{temperature:g}" if len(runs) > 1 else drafter
            model = f"{record.machine.get('target', 'target')}-{name}"
            formats = {"spec_bench": [spec_bench(entry, model) for entry in entries]}
            if drafter not in ("plain", "transformers"):
                formats["vllm"] = [line for entry in entries for line in vllm(entry)]
            for form, values in formats.items():
                file, text = folder / form / f"{name}.jsonl", "".join(json.dumps(value) + "\n" for value in values)
                file.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(file, lambda partial, text=text: partial.write_text(text))
                written.append(file.parent)
    return sorted({*written})


def _wall_seconds(answer: Answer) -> float:
    """Seconds from the start of a request to its last token, including the prefill."""
    return answer.arrivals[-1] if answer.arrivals else answer.prefill_seconds + answer.decode_seconds


def spec_bench(entry: Entry, model: str) -> dict[str, Any]:
    """A line of a model's answers (Spec-Bench, `evaluation/eval.py`)."""
    choice = {
        "index": 0,
        "turns": [turn.text or "" for turn in entry.turns],
        "decoding_steps": [turn.steps for turn in entry.turns],
        "new_tokens": [len(turn.tokens) for turn in entry.turns],
        "wall_time": [_wall_seconds(turn) for turn in entry.turns],
        "accept_lengths": [length for turn in entry.turns for length in turn.accept_lengths],
    }
    return {
        "question_id": entry.id,
        "category": entry.category,
        "answer_id": uuid.uuid5(uuid.NAMESPACE_OID, f"{model}/{entry.id}").hex,
        "model_id": model,
        "choices": [choice],
        "tstamp": time.time(),
    }


def vllm(entry: Entry) -> list[dict[str, Any]]:
    """What vLLM's server reports for each turn with `--per-request-spec-decode-metrics detailed`.

    `num_spec_tokens` is the depth of the tree, because a step accepts no more; `num_draft_tokens` counts all nodes.
    """
    return [
        {
            "id": f"{entry.id}-{number}",
            "usage": {
                "prompt_tokens": turn.prompt_tokens,
                "completion_tokens": len(turn.tokens),
                "total_tokens": turn.prompt_tokens + len(turn.tokens),
            },
            "metrics": {"speculative_decoding": speculative_decoding(turn, entry.max_depth)},
        }
        for number, turn in enumerate(entry.turns)
    ]


def speculative_decoding(answer: Answer, max_depth: int) -> dict[str, Any]:
    accepted = [length - 1 for length in answer.accept_lengths]
    counts = Counter(accepted)
    return {
        "mean_acceptance_length": 1 + sum(accepted) / len(accepted),
        "draft_acceptance_rate": sum(accepted) / answer.drafted if answer.drafted else 0.0,
        "acceptance_histogram": [counts[count] for count in range(max_depth + 1)],
        "num_spec_steps": len(accepted),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": answer.drafted,
        "num_spec_tokens": max_depth,
        "per_step_accepted": accepted,
    }
