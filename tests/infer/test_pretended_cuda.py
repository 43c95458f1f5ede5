"""Decoding on a CUDA device that is pretended (tests/pretended_cuda.py): every drafter gives plain decoding's tokens
there and accepts what it accepts on a CPU, mixes no devices, waits for nothing inside recorded work, and keeps a budget
of waits: so many a step, none at a request's begin and end."""

from dataclasses import replace

import pytest
import torch

from longdraft.infer import slot_pool
from longdraft.infer.choice.filters import Filters
from longdraft.infer.drafters.longspec import LongSpecDrafter
from longdraft.infer.drafters.prompt_lookup import PromptLookup
from longdraft.infer.drafters.tokenswift import TokenSwiftDrafter
from longdraft.infer.drafters.triforce import TriForceDrafter
from longdraft.infer.engine import Engine
from longdraft.infer.partial_cache import SelectedCache
from longdraft.infer.runner import Runner
from longdraft.infer.sampling import SamplingParams

VOCAB, NEW = 61, 5
SAMPLINGS = {
    "greedy": SamplingParams(),
    "T1": SamplingParams(temperature=1.0),
    "all": SamplingParams(
        temperature=1.0, top_k=20, top_p=0.9, min_p=0.02, eta_cutoff=0.001, min_tokens_to_keep=3,
        contextual_penalty=1.2, contextual_window=8, presence_penalty=0.2, logit_bias={3: 1.0}, stop_token_ids=(11,),
        min_new_tokens=3, logprobs=2,
    ),
}  # fmt: skip
# Waits a step: none but for tables of the host, and in TriForce for how far its inner level is: where each inner pass
# commits one token, three times in six passes, and never where that is known.
BUDGETS = {
    "plain": 0, "medusa": 0, "tokenswift": 0, "tokenswift_5": 0, "tokenswift_draft_pass": 0, "draft_pass_alone": 0,
    "longspec": 0, "token_recycling": 0, "prompt_lookup": 1, "small_model": 0, "triforce": 3, "triforce_self": 0,
    "token_recycling+prompt_lookup": 1, "tokenswift_5+prompt_lookup": 1, "longspec+token_recycling": 1,
    "triforce+prompt_lookup": 4,
}  # fmt: skip
# The most that the host launches in a step, replays and copies among it: with log-probabilities, a few more.
LAUNCHES = {
    "plain": 4, "medusa": 9, "tokenswift": 9, "longspec": 9, "token_recycling": 9, "small_model": 9,
    "prompt_lookup": 6, "token_recycling+prompt_lookup": 10,
    "triforce_for_all": 42,  # five in each of at most six inner passes
}  # fmt: skip

# Whose drafts do not depend on when a slot takes its next prompt, nor on what the host knows of a cache.
SAME_DRAFTS = (
    "medusa", "tokenswift", "tokenswift_5", "longspec", "prompt_lookup", "tokenswift_5+prompt_lookup"
)  # fmt: skip


def others(exactness):
    """Drafters beside those of test_exactness.py."""
    return {
        # As many extended on a CPU as on a device.
        "longspec": lambda target, _: LongSpecDrafter(target, exactness.block(target, noise=5), extended=16),
        "prompt_lookup": lambda *_: PromptLookup(length=6),
        # A budget for all, so that nothing is selected anew.
        "triforce_for_all": lambda target, small: TriForceDrafter(target, small, budget=400),
        "draft_pass_alone": lambda target, _: TokenSwiftDrafter(target, exactness.heads(target), (1,), "always", 20, 0),
    }


PLAIN = {}  # plain decoding's tokens by sampling, filled when first needed


@pytest.fixture
def plain(made, plain_tokens):
    """(sampling, prompts, params) -> plain decoding's tokens, on a CPU."""

    def tokens(kind, prompts, params):
        if kind not in PLAIN:
            PLAIN[kind] = plain_tokens(made("plain")[0], prompts, params)
        return PLAIN[kind]

    return tokens


@pytest.fixture
def counted(monkeypatch):
    """(owner, name) -> a list that grows with each call of it."""

    def count(owner, name):
        calls, function = [], getattr(owner, name)

        def call(*args, **kwargs):
            calls.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)
        return calls

    return count


def accepted(generations):
    return [one.stats.accepted_at_depth for one in generations]


# Of several together one is enough one by one.
ONE_BY_ONE = [name for name in BUDGETS if "+" not in name] + ["token_recycling+prompt_lookup"]


@pytest.mark.parametrize(
    ("name", "recorded"),
    [(name, True) for name in BUDGETS] + [(name, False) for name in ONE_BY_ONE],
    ids=[f"{name}-recorded" for name in BUDGETS] + [f"{name}-one by one" for name in ONE_BY_ONE],
)
def test_a_drafter_decodes_on_a_device_and_keeps_its_budget(
    made, pretended_cuda, plain, seeded, counted, name, recorded
):
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(VOCAB, (count,), generator=generator).tolist() for count in (9, 30, 3)]
    calls = {kind: seeded(one, 3, NEW) for kind, one in SAMPLINGS.items()}
    want, on_cpu = {kind: plain(kind, prompts, params) for kind, params in calls.items()}, {}
    if name in SAME_DRAFTS and recorded:
        engine = Engine(*made(name, others=others), slots=2, nodes=None)
        on_cpu = {kind: accepted(engine.generate(prompts, params)) for kind, params in calls.items()}
    if not recorded:  # what steers the work is the same
        del calls["greedy"], calls["T1"]
    elif name not in ("plain", "triforce"):  # with all there is more to do, and two show what sampling alone does
        del calls["T1"]
    with pretended_cuda.PretendedCuda() as gpu:
        for owner, method in ((Runner, "step"), (Filters, "apply"), (SelectedCache, "build")):
            gpu.count(owner, method)
        target, drafter = made(name, gpu.put, others)
        engine = Engine(target, drafter, slots=2, nodes=None, graphs=None if recorded else False)
        steps = counted(engine.runner, "step")
        for kind, params in calls.items():
            engine.generate([prompts[0]], replace(params[0], max_new_tokens=NEW))  # what is made once
            gpu.forget()
            steps.clear()
            found = engine.generate(prompts, params)
            assert [one.tokens for one in found] == want[kind], kind
            assert kind not in on_cpu or accepted(found) == on_cpu[kind], kind
            passes, builds = gpu.calls["step"], gpu.calls["build"]  # passes of runners inside a drafter among them
            allowed = BUDGETS[name] * len(steps) + builds
            assert gpu.waits.total() <= allowed, (kind, len(steps), passes, gpu.waits)
            assert builds or name != "draft_pass_alone"
            # Once a step and an inner pass, not once a level.
            assert gpu.calls["apply"] == (passes if calls[kind][0].top_p < 1 else 0), kind
            # A step's tokens, and what a drafter counts.
            assert gpu.late.total() <= 2 * len(steps)


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_request_waits_for_no_recording_and_a_step_launches_little(made, pretended_cuda, name):
    """With the policy, which chooses widths and stages; the steps of each kind of sampling are there before the first
    request."""
    prompt, steps = list(range(1, 31)), []
    with pretended_cuda.PretendedCuda() as gpu:
        engine = Engine(*made(name, gpu.put, others), slots=2)
        step = engine.runner.step

        def counted():
            before = gpu.launches.copy()
            taken = step()
            if all(request is not None for request in engine.pool.sequences):
                steps.append((gpu.launches - before).total())
            return taken

        engine.runner.step = counted
        for kind in ("greedy", "all"):  # with the least to launch and with the most
            params = [replace(SAMPLINGS[kind], seed=seed, max_new_tokens=NEW * 4) for seed in (1, 2)]
            recorded = 0
            for _ in engine.stream([prompt, prompt[::-1]], params):
                recorded = recorded or len(engine.runner.graphs)
            assert len(engine.runner.graphs) == recorded
    assert max(steps) <= LAUNCHES[name], sorted(steps)


def test_passes_over_prompts_are_measured_like_steps(made, pretended_cuda, monkeypatch):
    """What tree attention was launched with first holds for all engines of the process."""
    asked = list[object]()
    monkeypatch.setattr(slot_pool, "MOST_ROWS", 32)
    monkeypatch.setattr(slot_pool, "tune", lambda *given: asked.append(given[7:9]))
    with pretended_cuda.PretendedCuda() as gpu:
        target, *rest = made("plain", gpu.put, others)
        next(iter(Engine(target, *rest, slots=2).stream([[1, 2, 3]], SamplingParams(max_new_tokens=70))))
    assert asked == [(2, (1,)), (1, [32])]
