"""Writes a record as other benchmarks' files, so that their programs can compare our answers with others'.

| files | their reader |
|---|---|
| `spec_bench/DRAFTER.jsonl` | Spec-Bench's `evaluation/speed.py` |
| `vllm/DRAFTER.jsonl` | AIPerf's `VLLMSpecDecodeAdapter`; the fields are those of a response of vLLM 0.32 |
| `specdec_bench/DRAFTER/` | `acceptance_rate.json`, `timing.json`, `responses.jsonl` of NVIDIA's specdec_bench |
| `aiperf/DRAFTER/TASK/` | `aiperf speed-bench-report` (0.13) |

Not here: our own figures (figures.py).
"""

import itertools
import json
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from longdraft.benchmarks.answers import Answer, Entry, Record
from longdraft.models.files import write_atomically

AIPERF_SCHEMA = "1.1"


def write_files(record: Record, folder: Path, asked: Mapping[int | str, list[str]]) -> list[Path]:
    """Write all files for each drafter and temperature, and return their folders.

    asked: the texts of each question's turns, for the responses.
    """
    # AIPerf's matrix of categories knows dataset formats by these prefixes.
    prefix = "speed_bench_" if record.settings.get("suite") == "speed-bench" else "spec_al_"
    runs, files = record.by_drafter(), dict[str, str]()
    for temperature, drafters in runs.items():
        for drafter, entries in drafters.items():
            name = f"{drafter}-temperature-{temperature:g}" if len(runs) > 1 else drafter
            model = f"{record.machine.get('target', 'target')}-{name}"
            files[f"spec_bench/{name}.jsonl"] = _lines(spec_bench(entry, model) for entry in entries)
            for file, text in specdec_bench(entries, asked).items():
                files[f"specdec_bench/{name}/{file}"] = text
            if drafter in ("plain", "transformers"):
                continue
            files[f"vllm/{name}.jsonl"] = _lines(line for entry in entries for line in vllm(entry))
            for task in dict.fromkeys(entry.task for entry in entries):
                task_entries = [entry for entry in entries if entry.task == task]
                for file, text in aiperf(task_entries, model, prefix + task).items():
                    files[f"aiperf/{name}/{task.replace('/', '-')}/{file}"] = text
    for file, text in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / file, lambda partial, text=text: partial.write_text(text))
    return [folder / name for name in ("spec_bench", "vllm", "specdec_bench", "aiperf") if (folder / name).exists()]


def _lines(values: Iterable[Any]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


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


def specdec_bench(entries: Sequence[Entry], asked: Mapping[int | str, list[str]]) -> dict[str, str]:
    """The three files of a run, as `metrics/acceptance_rate.py` and `metrics/timing.py` write them."""
    responses = [
        {
            "question_id": number,
            "turns": asked.get(entry.id, [])[: len(entry.turns)],
            "choices": [{"index": 0, "turns": [turn.text or "" for turn in entry.turns]}],
        }
        for number, entry in enumerate(entries)
    ]
    return {
        "acceptance_rate.json": json.dumps([_acceptance(entries)], indent=4),
        "timing.json": json.dumps([_timing([turn for entry in entries for turn in entry.turns])], indent=4),
        "responses.jsonl": _lines(responses),
    }


def _acceptance(entries: Sequence[Entry]) -> dict[str, Any]:
    """Lengths include the target's own token here, so the rate at length 1 is 1."""
    by_request = [[len(turn.tokens) / turn.steps for turn in entry.turns] for entry in entries]
    means = [mean for turns in by_request for mean in turns]
    histogram = Counter(length for entry in entries for turn in entry.turns for length in turn.accept_lengths)
    steps, left, before = histogram.total(), histogram.total(), 1.0
    conditional, joint, product = {}, {}, 1.0
    for length, count in sorted(histogram.items()):
        conditional[length] = left / steps / before
        product *= conditional[length]
        joint[length] = product
        before, left = left / steps, left - count
    return {
        "Request_AL": {number: dict(enumerate(turns)) for number, turns in enumerate(by_request)},
        "Average_AL": sum(means) / len(means),
        "Acceptance_Length_Histogram": dict(sorted(histogram.items())),
        "Conditional_Acceptance_Rate": conditional,
        "Joint_Acceptance_Rate": joint,
    }


def _timing(answers: Sequence[Answer]) -> dict[str, Any]:
    """Timing of requests that ran one after the other on one device."""
    wall = [_wall_seconds(answer) for answer in answers]
    counts = [len(answer.tokens) for answer in answers]
    speed = sum(counts) / sum(wall)
    found: dict[str, Any] = {"Output TPS": speed, "Output TPS/gpu": speed, "E2E Request Time": _statistics(wall)}
    if times := [[0.0, *answer.arrivals] for answer in answers if answer.arrivals]:
        found["TTFT Time"] = _statistics([arrivals[1] for arrivals in times])
        steps = [b - a for arrivals in times if len(arrivals) > 2 for a, b in itertools.pairwise(arrivals)]
        speeds = [
            (len(answer.tokens) - 1) / (answer.arrivals[-1] - answer.arrivals[0])
            for answer in answers
            if len(answer.arrivals) > 1
        ]
        if steps:
            found["Request Generation Step Time"] = _statistics(steps)
            found["Request Generation Tokens Per Second"] = _statistics(speeds)
    return found | {"Number of Output Tokens": _statistics(counts)}


def _statistics(values: Sequence[float]) -> dict[str, Any]:
    quantiles = {str(q): f"{np.quantile(values, q):.4f}" for q in (0.25, 0.5, 0.75)}
    figures = {name: getattr(np, name)(values) for name in ("min", "max", "mean", "std")}
    return {**{name: f"{value:.4f}" for name, value in figures.items()}, "quantiles": quantiles}


def aiperf(entries: Sequence[Entry], model: str, dataset: str) -> dict[str, str]:
    """The files of an AIPerf run: the profile, and the server's counters under vLLM's names."""
    answers = [turn for entry in entries for turn in entry.turns]
    seconds = sum(_wall_seconds(answer) for answer in answers)
    accepted, steps = sum(a.accepted for a in answers), sum(a.steps for a in answers)
    drafted, tokens = sum(a.drafted for a in answers), sum(len(a.tokens) for a in answers)
    pooled = Counter(length - 1 for answer in answers for length in answer.accept_lengths)
    scalars = {
        "output_token_throughput": ("tokens/sec", tokens / seconds),
        "request_count": ("requests", len(answers)),
        "total_output_tokens": ("tokens", tokens),
        "spec_decode_token_weighted_acceptance_length": ("ratio", 1 + accepted / steps),
        "spec_decode_overall_draft_acceptance_rate": ("%", 100 * accepted / max(drafted, 1)),
        "total_spec_decode_steps": ("count", steps),
        "total_accepted_draft_tokens": ("tokens", accepted),
        "total_draft_tokens": ("tokens", drafted),
    }
    profile = {
        "schema_version": AIPERF_SCHEMA,
        "input_config": {"models": {"items": [{"name": model}]}, "datasets": [{"name": "main", "format": dataset}]},
        **{name: {"unit": unit, "avg": value} for name, (unit, value) in scalars.items()},
        "pooled_spec_decode_acceptance_histogram": {str(count): pooled[count] for count in sorted(pooled)},
    }
    counters = {"num_drafts": steps, "num_draft_tokens": drafted, "num_accepted_tokens": accepted}
    now = datetime.now(UTC).isoformat()
    server = {
        "schema_version": AIPERF_SCHEMA,
        "summary": {"endpoints_configured": [], "endpoints_successful": [], "start_time": now, "end_time": now},
        "metrics": {
            f"vllm:spec_decode_{name}": {
                "type": "counter",
                "description": name.replace("_", " "),
                "unit": "count",
                "series": [{"stats": {"total": float(count), "rate": count / seconds}}],
            }
            for name, count in counters.items()
        },
    }
    return {
        "profile_export_aiperf.json": json.dumps(profile, indent=1),
        "server_metrics_export.json": json.dumps(server, indent=1),
    }
