"""A record as Spec-Bench's answers, against the fields that its program reads."""

import json
from pathlib import Path

import pytest

from longdraft.benchmarks.drafters.record import Answer, Entry, Record, write_spec_bench

# Spec-Bench, evaluation/eval.py: what an answer's line holds; evaluation/speed.py reads the last four of a choice.
ANSWER = ["question_id", "category", "answer_id", "model_id", "choices", "tstamp"]
CHOICE = ["index", "turns", "decoding_steps", "new_tokens", "wall_time", "accept_lengths"]


def answer(accept_lengths: list[int], arrivals: list[float], drafted: int = 10) -> Answer:
    tokens = [5] * sum(accept_lengths)
    seconds = {"decode_seconds": arrivals[-1] - 0.1, "prefill_seconds": 0.1, "first_token_seconds": arrivals[0]}
    return Answer(40, tokens, "text", "stop", accept_lengths, arrivals, drafted, **seconds)


@pytest.fixture
def folder(tmp_path) -> Path:
    record = Record({"suite": "speed-bench"})
    record.add("machine", {"target": "t"})
    for id, turns in (("a", [([3, 1, 2], [0.5, 0.6, 0.8])]), ("b", [([1, 3], [0.2, 0.4]), ([2, 2], [0.1, 0.5], 4)])):
        record.add("entry", Entry(id, "qa", "rag", "d+e", 0.0, [answer(*turn) for turn in turns]))
        plain = [answer([1] * sum(turn[0]), [0.1] * sum(turn[0]), 0) for turn in turns]
        record.add("entry", Entry(id, "qa", "rag", "plain", 0.0, plain))
    assert write_spec_bench(record, tmp_path) == tmp_path / "spec_bench"
    return tmp_path


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_spec_benchs_answers(folder):
    first, second = lines(folder / "spec_bench" / "d+e.jsonl")
    assert list(first) == ANSWER and list(first["choices"][0]) == CHOICE
    assert (first["question_id"], first["category"], first["model_id"]) == ("a", "rag", "t-d+e")
    assert second["choices"][0].items() >= {
        "decoding_steps": [2, 2], "new_tokens": [4, 4], "wall_time": [pytest.approx(0.4), pytest.approx(0.5)],
        "accept_lengths": [1, 3, 2, 2],
    }.items()  # fmt: skip
    assert len(lines(folder / "spec_bench" / "plain.jsonl")) == 2
