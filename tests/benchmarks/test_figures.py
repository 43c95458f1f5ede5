"""Every formula on an example small enough to work out by hand."""

import numpy as np
import pytest

from longdraft.benchmarks.drafters.metrics import bucket, compared, ms_per_token, run_figures, same_tokens, totals
from longdraft.benchmarks.drafters.record import Answer, Entry


def answer(*accept_lengths: int, seconds: float = 1.0, prompt: int = 100, drafted: int = 8, **more) -> Answer:
    """Of so many tokens a step, all of them 7."""
    tokens = [7] * sum(accept_lengths)
    arrivals = [seconds * (i + 1) / len(accept_lengths) for i in range(len(accept_lengths))]
    return Answer(
        prompt, tokens, "", "stop", list(accept_lengths), arrivals, drafted=drafted, decode_seconds=seconds, **more
    )


# 9 tokens in 3 steps, 3 tokens in 2: 12 tokens, 5 steps, 7 accepted of 16.
TWO = [answer(3, 1, 5, seconds=2.0), answer(2, 1, seconds=1.0)]


def test_the_definitions_of_acceptance_length_and_the_papers_figures():
    found = totals(TWO)["lengths"]
    assert found["per_step"] == (3 + 1 + 5 + 2 + 1) / 5  # Spec-Bench, vLLM
    assert found["alpha"] == 7 / (4 * 5)  # TokenSwift
    assert 4 * found["alpha"] + 1 == pytest.approx(found["per_step"])
    assert found["tau"] == (7 + 5 + 2) / (5 + 2)  # LongSpec: two prefills are two calls of a token each


def test_totals_count_the_depths_that_steps_reached_and_the_parts_of_their_time():
    found = totals(TWO)
    assert found["acceptance_by_depth"] == [3 / 5, 2 / 5, 1 / 5, 1 / 5]
    assert (found["acceptance"], found["nodes_per_step"]) == (7 / 16, 16 / 5)
    assert (found["tokens_per_second"], found["tokens_per_step"]) == (12 / 3, 12 / 5)
    found = totals([answer(2, 2, seconds=1.0, draft_seconds=0.2, target_seconds=0.5, commit_seconds=0.1)])
    assert [found[f"{part}_ms"] for part in ("draft", "target", "commit", "host")] == pytest.approx([100, 250, 50, 150])
    assert found["host_share"] == pytest.approx(0.3)


def entry(id: int, *turns: Answer, drafter: str = "d", task: str = "t") -> Entry:
    return Entry(id, task, task, drafter, 0.0, list(turns))


def test_speed_is_over_plain_decodings_on_the_same_prompts():
    pairs = [(entry(1, answer(4, 4, seconds=1.0)), entry(1, answer(*[1] * 8, seconds=4.0, drafted=0)))]
    pairs.append((entry(2, answer(2, 2, seconds=1.0)), entry(2, answer(*[1] * 4, seconds=2.0, drafted=0))))
    found = compared(pairs)
    assert found["speedup"] == (12 / 2) / (12 / 6) and found["prompts"] == 2
    # Of two prompts one, the other or both are drawn: the middle 95 % reaches from the slower to the faster.
    assert found["intervals"]["speedup"] == [2, 4] and found["intervals"]["per_step"] == [2, 4]


def test_an_interval_is_the_means_of_prompts_drawn_with_replacement():
    """Of many prompts it is the normal one: 1.96 standard errors to each side."""
    lengths = np.random.default_rng(1).integers(1, 6, 400)
    found = compared([(entry(i, answer(n)), entry(i, answer(*[1] * n))) for i, n in enumerate(lengths.tolist())])
    low, high = found["intervals"]["per_step"]
    error = lengths.std() / 20
    assert low == pytest.approx(lengths.mean() - 1.96 * error, abs=0.03)
    assert high == pytest.approx(lengths.mean() + 1.96 * error, abs=0.03)


def test_contexts_lie_between_powers_of_two():
    sizes = (1, 511, 512, 4095, 4096)
    assert [bucket(n) for n in sizes] == ["1-2", "256-512", "512-1024", "2048-4096", "4096-8192"]
    entries = [entry(i, answer(i, prompt=n), answer(i, prompt=9 * n)) for i, n in ((1, 600), (2, 70))]
    found = run_figures({"plain": entries})["plain"]["contexts"]
    assert [(name, one["tokens"]) for name, one in found.items()] == [("64-128", 4), ("512-1024", 2)]


def test_a_long_generation_has_its_pace_at_every_mark():
    """Seven tokens with marks at every 3, one a tenth of a second, the later half slower."""
    one = Answer(5, [7] * 8, "", "length", [2, 1, 1, 2, 1, 1], [1.0, 1.1, 1.2, 1.4, 1.8, 2.2])
    assert ms_per_token(one, every=3) == [
        {"tokens": 3, "ms": pytest.approx(100)},
        {"tokens": 6, "ms": pytest.approx(100)},
        {"tokens": 8, "ms": pytest.approx(400)},
    ]
    assert ms_per_token(answer(5)) == []


def test_tokens_are_compared_one_by_one():
    assert same_tokens([[1, 2, 3], [4]], [[1, 9, 3, 4], [4]]) == (3, 5)
    assert same_tokens([[1]], [[1], [2]]) == (1, 2)


def test_a_runs_figures_are_by_drafter_task_and_context():
    plain = [entry(1, answer(1, 1), drafter="plain"), entry(2, answer(1, prompt=300), drafter="plain", task="u")]
    ours = [entry(1, answer(2, seconds=0.5)), entry(2, answer(1, prompt=300), task="u")]
    found = run_figures({"plain": plain, "d": ours})
    assert found["plain"]["speedup"] == 1 and found["d"]["speedup"] == pytest.approx((3 / 1.5) / (3 / 2), abs=1e-4)
    assert {task: one["speedup"] for task, one in found["d"]["tasks"].items()} == {"t": 2, "u": 1}
    assert list(found["d"]["contexts"]) == ["64-128", "256-512"] and found["d"]["prompt_speedups"] == [2, 1]
    assert found["d"]["same_tokens"] == [3, 3]
