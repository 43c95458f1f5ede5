"""Files for other benchmarks' programs, against the fields those read and the identities they check.

The lists of fields are copies, with their source named. What they were read with for real stands in docs/log.
"""

import json
from pathlib import Path

import pytest

from longdraft.benchmarks.drafters.other_formats import speculative_decoding, write_files
from longdraft.benchmarks.drafters.record import Answer, Entry, Record

# Spec-Bench, evaluation/eval.py: what an answer's line holds; evaluation/speed.py reads the last four of a choice.
ANSWER = ["question_id", "category", "answer_id", "model_id", "choices", "tstamp"]
CHOICE = ["index", "turns", "decoding_steps", "new_tokens", "wall_time", "accept_lengths"]
# AIPerf 0.13, spec_decode/vllm_adapter.py: required of vLLM's object, and optional.
VLLM = {"mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "num_spec_steps"}
VLLM |= {"num_accepted_draft_tokens", "num_draft_tokens"}
VLLM_MORE = {"num_spec_tokens", "per_step_accepted", "per_step_drafted"}


def answer(accept_lengths: list[int], arrivals: list[float], drafted: int = 10) -> Answer:
    tokens = [5] * sum(accept_lengths)
    return Answer(40, tokens, "text", "stop", accept_lengths, arrivals, drafted=drafted, decode_seconds=arrivals[-1])


ONE = Entry("a", "coding", "coding", "d+e", 0.0, [answer([3, 1, 2], [0.5, 0.6, 0.8])], max_depth=4)
TWO = Entry("b", "math", "math", "d+e", 0.0, [answer([1, 3], [0.2, 0.4]), answer([2, 2], [0.1, 0.5], 4)], max_depth=4)


@pytest.fixture
def folder(tmp_path) -> Path:
    record = Record({"suite": "speed-bench"})
    record.machine = {"target": "t"}
    for entry in (ONE, TWO):
        record.add("entry", entry)
        plain = [
            answer([1] * len(turn.tokens), [0.1 * i for i in range(1, len(turn.tokens) + 1)], 0) for turn in entry.turns
        ]
        record.add("entry", Entry(entry.id, entry.task, entry.category, "plain", 0.0, plain))
    assert write_files(record, tmp_path) == [tmp_path / "spec_bench", tmp_path / "vllm"] == sorted(tmp_path.iterdir())
    return tmp_path


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_spec_benchs_answers(folder):
    first, second = lines(folder / "spec_bench" / "d+e.jsonl")
    assert list(first) == ANSWER and list(first["choices"][0]) == CHOICE
    assert (first["question_id"], first["category"], first["model_id"]) == ("a", "coding", "t-d+e")
    assert second["choices"][0] | {"turns": 0} == {
        "index": 0,
        "turns": 0,
        "decoding_steps": [2, 2],
        "new_tokens": [4, 4],
        "wall_time": [0.4, 0.5],
        "accept_lengths": [1, 3, 2, 2],
    }
    # evaluation/speed.py: mean of accept_lengths; mean over questions of new tokens / wall time.
    both = [one["choices"][0] for one in (first, second)]
    assert sum(sum(one["accept_lengths"]) for one in both) / sum(len(one["accept_lengths"]) for one in both) == 14 / 7
    assert [sum(one["new_tokens"]) / sum(one["wall_time"]) for one in both] == pytest.approx([6 / 0.8, 8 / 0.9])
    assert len(lines(folder / "spec_bench" / "plain.jsonl")) == 2


def test_vllms_object_of_each_response(folder):
    found = lines(folder / "vllm" / "d+e.jsonl")
    assert [one["id"] for one in found] == ["a-0", "b-0", "b-1"] and not (folder / "vllm" / "plain.jsonl").exists()
    assert found[0]["metrics"]["speculative_decoding"] == {
        "mean_acceptance_length": 1 + 3 / 3,
        "draft_acceptance_rate": 3 / 10,
        "acceptance_histogram": [1, 1, 1, 0, 0],
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 3,
        "num_draft_tokens": 10,
        "num_spec_tokens": 4,
        "per_step_accepted": [2, 0, 1],
    }
    for one in found:
        stats = one["metrics"]["speculative_decoding"]
        assert set(stats) >= VLLM and set(stats) <= VLLM | VLLM_MORE
        # SpecDecodeAcceptanceRecord's own checks.
        histogram = stats["acceptance_histogram"]
        assert len(histogram) == stats["num_spec_tokens"] + 1 and sum(histogram) == stats["num_spec_steps"]
        assert sum(j * count for j, count in enumerate(histogram)) == stats["num_accepted_draft_tokens"]
        assert stats["num_accepted_draft_tokens"] <= stats["num_draft_tokens"]
        assert one["usage"]["completion_tokens"] == stats["num_accepted_draft_tokens"] + stats["num_spec_steps"]
    assert speculative_decoding(answer([1], [0.1], 0), 2)["draft_acceptance_rate"] == 0
