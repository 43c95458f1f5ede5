"""A record as Spec-Bench's answers, against the fields that its program reads."""

import json

import pytest

from longdraft.benchmarks.drafters.record import Answer, Entry, Record, write_spec_bench

# Spec-Bench, evaluation/eval.py: what an answer's line holds; evaluation/speed.py reads the last four of a choice.
ANSWER = ["question_id", "category", "answer_id", "model_id", "choices", "tstamp"]
CHOICE = ["index", "turns", "decoding_steps", "new_tokens", "wall_time", "accept_lengths"]


def answer(accept_lengths: list[int], arrivals: list[float]) -> Answer:
    tokens = [5] * sum(accept_lengths)
    seconds = {"decode_seconds": arrivals[-1] - 0.1, "prefill_seconds": 0.1, "first_token_seconds": arrivals[0]}
    return Answer(40, tokens, "text", "stop", accept_lengths, arrivals, 10, **seconds)


def test_spec_benchs_answers(tmp_path):
    record = Record({"suite": "speed-bench"})
    record.add("machine", {"target": "t"})
    for id, turns in (("a", [([3, 1, 2], [0.5, 0.6, 0.8])]), ("b", [([1, 3], [0.2, 0.4]), ([2, 2], [0.1, 0.5])])):
        record.add("entry", Entry(id, "qa", "rag", "d+e", 0.0, [answer(*turn) for turn in turns]))
        record.add("entry", Entry(id, "qa", "rag", "plain", 0.0, []))
    out = write_spec_bench(record, tmp_path)
    assert out == tmp_path / "spec_bench"
    first, second = (json.loads(line) for line in (out / "d+e.jsonl").read_text().splitlines())
    assert list(first) == ANSWER and list(first["choices"][0]) == CHOICE
    assert (first["question_id"], first["category"], first["model_id"]) == ("a", "rag", "t-d+e")
    assert second["choices"][0].items() >= {
        "decoding_steps": [2, 2], "new_tokens": [4, 4], "wall_time": [pytest.approx(0.4), pytest.approx(0.5)],
        "accept_lengths": [1, 3, 2, 2],
    }.items()  # fmt: skip
    assert len((out / "plain.jsonl").read_text().splitlines()) == 2
