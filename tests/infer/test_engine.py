"""The engine: slots and refill, streams, stops, limits, node budgets; and that plain decoding has the target's own
distribution. The exactness of every drafter is test_exactness.py's.
"""

import time
import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
from scipy import stats

from longdraft.infer import runner as runner_module
from longdraft.infer import slot_pool as slot_pool_module
from longdraft.infer.choice.slots import SlotSampling
from longdraft.infer.drafters import build as build_module
from longdraft.infer.drafters.small_model import SmallModelDrafter
from longdraft.infer.drafters.triforce import TriForceDrafter
from longdraft.infer.engine import Engine
from longdraft.infer.history import History
from longdraft.infer.requests import read_requests
from longdraft.infer.runner import Runner
from longdraft.infer.sampling import SamplingParams
from longdraft.infer.slot_pool import SlotPool
from longdraft.infer.tree import TokenTree
from longdraft.models import decoder as decoder_module
from longdraft.models.decoder_config import ExpertsConfig
from longdraft.models.passes import Pass

SAMPLINGS = {
    "greedy": SamplingParams(),
    "T1_top_p": SamplingParams(temperature=1.0, top_p=0.9),
    "T1_top_k": SamplingParams(temperature=1.0, top_k=8),
}
PROMPTS = [[5, 9, 2, 7, 11, 30, 2, 9, 4, 4, 1], [3], [8, 8, 21, 0, 6]]
NEW = 40


@pytest.fixture
def target(tiny_target):
    return tiny_target(vocab_size=61)


@pytest.fixture
def proposers(proposer):
    """By name: (plain decoding's tokens by prompt) -> a drafter that is right at random, always, never or sometimes."""

    def at_random(request, tokens, max_nodes):
        generator = torch.Generator().manual_seed(hash((request.index, len(tokens))) % 2**31)
        shape = (int(torch.randint(1, 5, (), generator=generator)), int(torch.randint(1, 4, (), generator=generator)))
        return torch.randint(61, shape, generator=generator).tolist()

    def ahead(plain, request, tokens):
        return plain[request.index][len(tokens) - len(request.prompt) :]

    return {
        "random_trees": lambda plain: proposer(at_random),
        "always_right": lambda plain: proposer(lambda r, tokens, max_nodes: [ahead(plain, r, tokens)[:4]]),
        "never_right": lambda plain: proposer(
            lambda r, tokens, max_nodes: [[(token + 1) % 61] for token in ahead(plain, r, tokens)[:1]]
        ),
        "sometimes_right": lambda plain: proposer(
            lambda r, tokens, max_nodes: [ahead(plain, r, tokens)[: len(tokens) % 4], [1, 2]]
        ),
    }


PLAIN = {}  # plain decoding's tokens by sampling and batch


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["B1", "B3"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", ["random_trees", "always_right", "never_right", "sometimes_right"])
def test_any_tree_gives_plain_decodings_tokens(target, name, sampling, prompts, proposers, seeded, plain_tokens):
    params, key = seeded(SAMPLINGS[sampling], len(prompts), NEW), (sampling, len(prompts))
    if key not in PLAIN:
        PLAIN[key] = plain_tokens(target, prompts, params)
    plain = PLAIN[key]
    result = Engine(target, proposers[name](plain), nodes=None).generate(prompts, params)
    assert [generation.tokens for generation in result] == plain
    steps = [generation.stats.steps for generation in result]
    if name == "always_right":
        assert steps == [NEW // 5] * len(prompts)
    if name == "never_right":
        assert steps == [NEW] * len(prompts)
    if name == "sometimes_right":
        assert all(NEW // 5 < count < NEW for count in steps)
    picked = Engine(target, proposers[name](plain)).generate(prompts, params)
    assert [generation.tokens for generation in picked] == plain


@pytest.mark.parametrize("drafter", ["plain", "token_recycling", "prompt_lookup"])
def test_calls_in_inference_mode_and_outside_it(target, drafter):
    """What an engine or a call allocates inside serves the next call outside, and inside."""
    with torch.inference_mode():
        engine = Engine(target, drafter)
    params, found = [SamplingParams(max_new_tokens=count) for count in (16, 9, 40, 9)], []
    for i, one in enumerate(params):
        with torch.inference_mode(i % 2 == 0):
            found.append(engine.generate(PROMPTS, one)[0].tokens)
    assert found == [Engine(target).generate(PROMPTS, one)[0].tokens for one in params]


def test_the_wait_for_a_request_is_no_time_of_its_decoding(target):
    """Also after a step that nobody read, as its only request was cancelled."""
    engine, turns = Engine(target, slots=1, max_length=20), iter(range(4))
    engine.runner.lag = 1

    def request(index):
        (one,) = read_requests(target, [[3, 4]], SamplingParams(max_new_tokens=3), 20, first=index)
        return [one]

    def arrivals(idle):
        if (turn := next(turns)) == 1:
            engine.cancel(0)
        elif turn == 2:
            assert idle
            time.sleep(0.5)
        return {0: request(0), 1: [], 2: request(2)}.get(turn)

    *_, last = engine.serve(arrivals)
    assert last.index == 2 and last.generation.stats.decode_seconds < 0.4


def test_a_prompt_whose_caller_left_is_not_read_to_its_end(target, monkeypatch):
    """Although nobody decodes: after each pass the engine looks who came and who left."""
    engine, passes, turns = Engine(target, slots=2, max_length=90, prefill_chunk=16), list[int](), iter(range(9))
    monkeypatch.setattr(engine.pool, "_prefill_pass", lambda slot, *_, real=engine.pool._prefill_pass: (
        passes.append(slot), real(slot, *_)
    ))  # fmt: skip
    requests = read_requests(target, [[3, 4] * 40, [5, 6] * 40, [7, 8]], SamplingParams(max_new_tokens=2), 90)

    def arrivals(idle):
        turn = next(turns)
        if turn == 1:
            engine.cancel(0)
            engine.cancel(1)
        return {0: requests[:2], 1: requests[2:]}.get(turn, None if idle else [])

    done = [piece.generation for piece in engine.serve(arrivals) if piece.generation]
    assert [one.finish_reason for one in done] == ["cancelled", "cancelled", "length"] and len(passes) == 2


def test_steps_are_timed_end_to_end_where_the_host_runs_ahead(target, monkeypatch):
    """What the host does between two steps, 10 ms here, is in their time. A GPU's pass over the prompt, for which the
    host waits half a second when it reads the first step, is not, and that step teaches the policy."""
    engine, works = Engine(target, "prompt_lookup"), list[float]()
    runner, lists = engine.runner, runner_module.HostCopy.lists
    runner.lag, runner.work_clock, record = 1, time.perf_counter, runner.policy.record

    def recorded(width, work, *given):
        works.append(work)
        assert given[-1], "typical"
        record(width, work, *given)

    def waited(copy):
        time.sleep(0.0 if works else 0.5)
        return lists(copy)

    monkeypatch.setattr(runner.policy, "record", recorded)
    monkeypatch.setattr(runner_module.HostCopy, "lists", waited)
    pieces = engine.stream([[3, 4, 5]], SamplingParams(max_new_tokens=9, ignore_eos=True))
    found = [(piece, time.sleep(0.01)) for piece in pieces][-1][0].generation.stats
    assert works[0] < 0.4 and found.decode_seconds > 0.01 * (found.steps - 2)


def test_engine_arguments_that_cannot_be(target):
    for arguments, message in [
        ({"drafter": "tokenswyft"}, "unknown name 'tokenswyft'; known: plain, tokenswift, .* or several as a\\+b"),
        ({"drafter": "plain+tokenswyft"}, "unknown name 'tokenswyft'"),
        ({"drafter": "tokenswift"}, "draft: tokenswift needs a trained draft"),
        ({"draft": "folder"}, "^draft: plain takes none"),
        ({"drafter": "token_recycling+prompt_lookup", "options": {"nodes": 8}}, "'s, as in token_recycling.nodes"),
        ({"nodes": 0}, r"^nodes\b"),
        ({"prefill_chunk": 0}, "^prefill_chunk: 0"),
        ({"options": {"levels": 3}}, "options: plain does not know levels; it knows none"),
        ({"slots": 0}, "^slots: 0"),
        ({"graphs": True}, "^graphs=True"),
        ({"max_length": 1}, "^max_length: 1 is not valid, .* 2"),  # no prompt would fit
        ({"max_length": 1000}, "^max_length: 1000, but the target has 256 positions"),
    ]:
        with pytest.raises(ValueError, match=message):
            Engine(target, **arguments)


@pytest.mark.parametrize(
    ("fields", "loader", "n_nodes", "dtype", "device", "refused"),
    [
        ({}, "transformers", 8, torch.float16, "cuda", "LONGDRAFT_EXACT=1"),
        ({"experts": ExpertsConfig(4, 2, 24, True)}, "longdraft", 127, torch.bfloat16, "cuda", None),
        ({}, "longdraft", 128, torch.bfloat16, "cuda", "nodes"),
        ({}, "transformers", 128, torch.float32, "cuda", None),
        ({}, "transformers", 128, torch.bfloat16, "cpu", None),
    ],
)
def test_exact_decoding_is_refused_where_it_is_not_to_be_had(
    monkeypatch, pretended_cuda, tiny_target, fields, loader, n_nodes, dtype, device, refused
):
    monkeypatch.setenv("LONGDRAFT_EXACT", "1")
    target = replace(tiny_target(dtype=dtype, **fields), loader=loader)
    with pretended_cuda.PretendedCuda() as gpu:
        if device == "cuda":
            gpu.put(target.model)
        with pytest.raises(ValueError, match=f"^{refused}: ") if refused else nullcontext():
            Engine(target, "prompt_lookup", nodes=n_nodes, options={"length": 64})


def logits_of_all_prefixes(target, prompt):
    """After the prompt, after it and each token, and after it and each pair of tokens: [1, V], [V, V], [V * V, V]."""
    vocab, prefixes, found = target.model.config.vocab_size, torch.tensor([prompt]), []
    for _ in range(3):
        found.append(target.model(Pass(prefixes)).logits[:, -1])
        rows = prefixes.repeat_interleave(vocab, 0)
        prefixes = torch.cat([rows, torch.arange(vocab).repeat(len(prefixes))[:, None]], 1)
    return found


def count_tokens(inner: SmallModelDrafter) -> dict[str, int]:
    """Counts what this drafter inside TriForce drafts, and what of it the inner level accepts."""
    counts, on_step = {"drafted": 0, "accepted": 0}, inner.on_step

    def watched(state, tree, accepted, output):
        took_part_B = accepted.counts > 0
        counts["drafted"] += int(((tree.parents >= 0).sum(1) * took_part_B).sum())
        counts["accepted"] += int((accepted.counts - 1).clamp(min=0).sum())
        on_step(state, tree, accepted, output)

    inner.on_step = watched
    return counts


def test_first_three_tokens_have_the_computed_distribution(tiny_target, shared):
    """A chi-square test of the choice rule over all triples of a vocabulary of 6, with 20,000 seeds. The tokens of the
    engine are the rule's: plain, with trees, and with two levels that both reject."""
    target, prompt, count, vocab = tiny_target(vocab_size=6, std=0.15), [2, 0, 5, 3, 1, 4], 20_000, 6
    sampling = SlotSampling([SamplingParams(temperature=1.0)] * count, torch.device("cpu"))
    sampling.seeds = torch.arange(count)
    prefix_S, tokens, history = torch.zeros(count, dtype=torch.int64), [], History(count, 4)
    probability = torch.ones(1, dtype=torch.float64)
    for place, logits in enumerate(logits_of_all_prefixes(target, prompt)):
        probability = (probability[:, None] * logits.double().softmax(-1)).flatten()
        tokens.append(sampling.choose(logits[prefix_S], history, torch.full((count,), len(prompt) - 1 + place)))
        prefix_S = prefix_S * vocab + tokens[-1]
    expected, observed = count * probability, prefix_S.bincount(minlength=vocab**3).double()
    common = expected >= 5
    seen, want = (torch.cat([x[common], x[~common].sum()[None]]) for x in (observed, expected))
    assert stats.chisquare(seen[want > 0].numpy(), want[want > 0].numpy()).pvalue > 1e-3
    params = [SamplingParams(temperature=1.0, seed=seed, max_new_tokens=3) for seed in range(200)]
    small = tiny_target(vocab_size=6, std=0.5, n_layers=1, seed=5)
    triforce = TriForceDrafter(target, small, chain=2, budget=2, chunk=1)
    counts = count_tokens(triforce.inner)
    medusa = shared("infer/test_exactness.py").DRAFTERS["medusa"](target, small)
    for drafter in ("plain", medusa, triforce):
        found = Engine(target, drafter, slots=100, nodes=None).generate([prompt] * 200, params)
        assert [one.tokens for one in found] == torch.stack(tokens, 1)[:200].tolist()
    assert 0.1 < counts["accepted"] / counts["drafted"] < 0.7
    assert 20 < sum(one.stats.steps == 1 for one in found) < 180  # both of the chain's tokens accepted at once


def test_drafters_that_break_their_word_are_named(target, proposer):
    wide = proposer(lambda request, tokens, max_nodes: [[1], [2], [3]], max_nodes=2)
    wrong = proposer(lambda request, tokens, max_nodes: [])
    wrong.propose = lambda state, budget: TokenTree.roots(state.roots + 1)
    for drafter, error in ((wide, "proposed 3 nodes"), (wrong, "not the root")):
        with pytest.raises(AssertionError, match=error):
            Engine(target, drafter).generate([PROMPTS[0]])


def test_a_cache_that_is_too_small_is_freed_before_a_larger_one_is_allocated(target, monkeypatch):
    engine = Engine(target, "token_recycling", slots=1, keep_prompts=False)
    engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=5))
    old, real, freed = weakref.ref(engine.runner.cache.keys), target.model.new_cache, []

    def new_cache(*given):
        freed.append(old() is None)
        return real(*given)

    monkeypatch.setattr(target.model, "new_cache", new_cache)
    engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=50))
    assert freed == [True]


def test_kernels_are_launched_on_the_targets_gpu(tiny_target, monkeypatch):
    """Triton launches on the current device. That is the target's while a drafter is built and while steps run, and the
    caller's own between two pieces. A pass outside of an engine sets it too."""
    current, seen = ["caller"], []

    @contextmanager
    def on(where):
        current.append(str(where))
        yield
        current.pop()

    def watched(name, real):
        def call(*given, **options):
            seen.append((name, current[-1]))
            return real(*given, **options)

        return call

    target = tiny_target()
    for module in (runner_module, slot_pool_module, build_module, decoder_module):
        monkeypatch.setattr(module, "on_device", on)
    watch = (build_module, "_build"), (SlotPool, "_prefill_pass"), (Runner, "_propose"), (Runner, "_verify")
    for owner, name in watch:
        monkeypatch.setattr(owner, name, watched(name, getattr(owner, name)))
    engine = Engine(target, "token_recycling", slots=1)
    stream = engine.stream([[1, 2, 3], [4, 5, 6]], SamplingParams(max_new_tokens=6))
    for piece in stream:
        assert current == ["caller"]
        if piece.generation:
            break
    stream.close()
    assert current == ["caller"] and engine.drafter.user is None
    names, devices = zip(*seen, strict=True)
    assert {*names} == {"_build", "_prefill_pass", "_propose", "_verify"} and {*devices} == {"cpu"}
    monkeypatch.setattr(target.model, "forward", watched("forward", target.model.forward))
    target.model(Pass(torch.tensor([[1]])))
    assert seen[-1] == ("forward", "cpu")
