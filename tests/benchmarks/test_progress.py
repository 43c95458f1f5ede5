"""Every phase of a benchmark is planned and watched."""

from longdraft.benchmarks.drafters.bench import BenchSettings, bench
from longdraft.benchmarks.drafters.prompts import Asked, Question
from longdraft.infer.drafters.build import build_drafter


class Recorder:
    """A Watch that keeps how much of each phase was done, as a fraction."""

    def plan(self, phases):
        self.phases, self.done = {phase.name: phase for phase in phases}, {}
        assert len(self.phases) == len(phases), "two phases have one name"

    def begin(self, name):
        self.name, self.done[name] = name, 0.0

    def advance(self, cost):
        self.done[self.name] += cost / self.phases[self.name].cost


def test_every_part_of_a_benchmark_is_planned_and_watched(tiny_target):
    settings = BenchSettings(new_tokens=12, temperatures=(0.0, 1.0), contexts=(5, 9), noise=True)
    prompts = list(range(1, 20)), list(range(30, 50))
    asked = [Asked(Question(i, "continue", (prompt,)), len(prompt)) for i, prompt in enumerate(prompts)]
    names = ["token_recycling", "prompt_lookup"]
    builders = {name: lambda target, name=name: build_drafter(name, target) for name in names}
    bench(tiny_target(), builders, asked, settings, watch=(watch := Recorder()))
    planned = list(watch.phases)
    assert list(watch.done) == planned
    assert [name for name in planned[:-1] if watch.done[name] < 0.9] == []
    assert planned[1] == "proof in fp32 that token_recycling is exact, sampled, 2 prompts together"
    assert "timing at T 1: prompt_lookup, prompt 2 of 2" in planned
