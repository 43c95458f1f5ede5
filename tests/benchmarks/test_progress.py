"""What is left, from what was measured; every part of a benchmark is planned."""

import pytest

from longdraft.benchmarks.drafters import BenchSettings, bench
from longdraft.benchmarks.progress import Phase, TimeLeft, duration
from longdraft.benchmarks.questions import Asked, Question
from longdraft.infer.drafters.build import build_drafter


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_what_is_left_follows_what_was_measured(clock):
    left = TimeLeft([Phase("a", "x", 10), Phase("b", "y", 20), Phase("c", "x", 30)], clock)
    left.begin("a")
    assert left.seconds() is None and left.fraction == 0
    clock.now += 5
    left.advance(5)  # a second each
    assert left.seconds() == pytest.approx(5 + 20 + 30) and left.fraction == 0.5
    clock.now += 5
    left.begin("b")  # the rest of a counts as done
    assert left.seconds() == pytest.approx(20 + 30)
    clock.now += 30
    left.advance(10)  # b is slower: three seconds each
    assert left.seconds() == pytest.approx(30 + 30)
    clock.now += 600
    left.advance(5)  # neighbours came: the recent speed counts
    assert left.seconds() > 5 * 100 + 30
    before = left.seconds()
    clock.now += 100
    assert left.seconds() > before + 50  # as it waits, not only when it goes on
    left.begin("c")
    clock.now += 3
    left.advance(30)
    assert left.fraction == 1 and left.seconds() == 0


def test_a_slow_kind_tells_little_of_a_fast_one(clock):
    left = TimeLeft([Phase("proof", "proof", 10, slow=5.0), Phase("speed", "speed", 10)], clock)
    left.begin("proof")
    clock.now += 20
    left.advance(4)  # five seconds a unit, of which a fast one takes one
    assert left.seconds() == pytest.approx(6 * 5 + 10)


def test_a_part_that_says_nothing_about_speed(clock):
    left = TimeLeft([Phase("a", "a", 20), Phase("b", "b", 20)], clock)
    left.begin("a")
    clock.now += 1
    left.begin("b", measured=False)
    assert left.seconds() is None


@pytest.mark.parametrize(("seconds", "words"), [(0.1, "1 s"), (59, "59 s"), (61, "1 min 01 s"), (3780, "1 h 03 min")])
def test_durations(seconds, words):
    assert duration(seconds) == words


class Recorder:
    """A Watch that keeps the account."""

    def plan(self, parts):
        self.left, self.begun = TimeLeft(parts), []

    def begin(self, words):
        if self.left.phase is not None:
            self.begun.append((self.left.phase.name, self.left.fraction))
        self.left.begin(words)

    def advance(self, cost):
        self.left.advance(cost)


def test_every_part_of_a_benchmark_is_planned_and_watched(tiny_target):
    settings = BenchSettings(new_tokens=12, temperatures=(0.0, 1.0), contexts=(5, 9), noise=True)
    prompts = list(range(1, 20)), list(range(30, 50))
    asked = [Asked(Question(i, "continue", (prompt,)), len(prompt)) for i, prompt in enumerate(prompts)]
    names = ["token_recycling", "prompt_lookup"]
    builders = {name: lambda target, name=name: build_drafter(name, target) for name in names}
    bench(tiny_target(), builders, asked, settings, watch=(watch := Recorder()))
    planned = [phase.name for phase in watch.left.phases]
    assert [words for words, _ in watch.begun] == planned[:-1] and len(set(planned)) == len(planned)
    unseen = [words for words, share in watch.begun if share < 0.9]
    assert unseen == []
    assert planned[1] == "proof in fp32 that token_recycling is exact, sampled, 2 prompts together"
    assert "timing at T 1: prompt_lookup, prompt 2 of 2" in planned
