"""Recorded steps on a pretended CUDA device (tests/pretended_cuda.py): what is recorded and what cannot be, what it
keeps, and what a failed recording leaves. Tokens of recorded steps: test_pretended_cuda.py."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import count

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from longdraft.benchmarks.drafters import timing
from longdraft.infer import graphs as graphs_module
from longdraft.infer.drafters.base import Plain
from longdraft.infer.drafters.token_recycling import TokenRecycling
from longdraft.infer.engine import Engine
from longdraft.infer.graphs import Graphs
from longdraft.infer.runner import Runner
from longdraft.infer.sampling import SamplingParams
from longdraft.infer.slot_pool import memory_parts
from longdraft.models.target import Target
from longdraft.models.transformers_model import TransformersModel, check_against
from longdraft.train.evaluate import Task, decode

VOCAB, NEW = 61, 8


@pytest.fixture
def gpu(pretended_cuda):
    with pretended_cuda.PretendedCuda() as device:
        yield device


def test_recorded_steps_read_each_requests_own_biases(made, pretended_cuda):
    """Biases, and ends that are held back, are numbers of the recorded work."""
    prompts, ends = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3], [5, 8, 9], [7]], [5, 10, 15, 20, 25]
    params = [
        SamplingParams(logit_bias={end: 40.0}, stop_token_ids=(end,), min_new_tokens=n, max_new_tokens=NEW)
        for n, end in enumerate(ends, 1)
    ]
    want = [one.tokens for one in Engine(made("plain")[0]).generate(prompts, params)]
    assert [tokens.index(end) for tokens, end in zip(want, ends, strict=True)] == [1, 2, 3, 4, 5]
    with pretended_cuda.PretendedCuda() as gpu:
        engine = Engine(*made("medusa", gpu.put), slots=2, nodes=8)
        assert [one.tokens for one in engine.generate(prompts, params)] == want
        assert len(engine.runner.graphs) > 0


@pytest.mark.parametrize("possible", [True, False])
@pytest.mark.parametrize("family", ["olmo2", "gpt2"])
def test_transformers_own_classes_are_recorded_where_their_code_can_be(pretended_cuda, monkeypatch, family, possible):
    """Drafts reach beyond the last position, where GPT-2's table of positions ends."""
    torch.manual_seed(0)
    shape = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"pad_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(family, **shape, **ids, intermediate_size=48, max_position_embeddings=32)
    model = TransformersModel(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())
    target = Target(model, None, family, config, check_against(model), (), "transformers")
    prompts = [[*range(3, 15)] * 2, [7, 8, 9] * 8]
    params = [SamplingParams(seed=seed, max_new_tokens=8, ignore_eos=True, temperature=seed) for seed in range(2)]
    expected = [one.tokens for one in Engine(target).generate(prompts, params)]

    def refused(work):
        work()
        raise RuntimeError("operation not permitted when stream is capturing")

    said = []
    with pretended_cuda.PretendedCuda() as gpu, monkeypatch.context() as patch:
        if not possible:
            patch.setattr(graphs_module, "cuda_graphs", lambda device: Graphs(refused))
        gpu.put(model)
        engine = Engine(target, "prompt_lookup", slots=2, nodes=4, log=said.append)
        for _ in range(2):
            assert [one.tokens for one in engine.generate(prompts, params)] == expected
        assert engine.runner.graphs.recording == possible == bool(len(engine.runner.graphs))
        assert any("nothing is recorded" in line and "capturing" in line for line in said) != possible
        if not possible:
            with pytest.raises(ValueError, match=r"graphs=True.*capturing"):
                Engine(target, graphs=True).generate(prompts, params)


def test_after_a_recording_that_failed_others_succeed(monkeypatch):
    """PyTorch's allocator records to one pool at a time, and ends only with a recording that is valid."""
    recording, invalid, pools = set(), [], count()

    class CUDAGraph:
        def capture_begin(self, pool, **_):
            assert pool not in recording
            recording.add(pool)
            self.pool = pool

        def capture_end(self):
            if invalid:
                raise RuntimeError("operation failed due to a previous error during capture")
            recording.remove(self.pool)

        def replay(self):
            """Nothing."""

    def waits():
        invalid.append(1)
        raise RuntimeError("operation not permitted when stream is capturing")

    here = lambda *_: nullcontext()  # noqa: E731
    cuda = {"CUDAGraph": CUDAGraph, "graph_pool_handle": lambda: next(pools), "device": here, "stream": here}
    for name, stand_in in {**cuda, "synchronize": lambda *_: None}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda _, pool: recording.remove(pool))
    monkeypatch.setattr(graphs_module, "_capture_stream", lambda _: None)
    recorder = graphs_module.cuda_graphs(torch.device("cuda", 0))._recorder
    kept = [recorder(lambda: None)]  # without a graph there would be another pool
    with pytest.raises(RuntimeError, match="not permitted"):
        recorder(waits)
    invalid.clear()
    kept.append(recorder(lambda: None))
    assert len(kept) == 2 and not recording


def test_what_is_given_to_recorded_work_stays_the_callers(gpu):
    graphs, first, second = Graphs(gpu.record), torch.arange(3).cuda(), torch.ones(3, dtype=torch.int64).cuda()
    found = [graphs.run(("double",), (), lambda x: 2 * x, x).tolist() for x in (first, second, first)]
    assert found == [[0, 2, 4], [2, 2, 2], [0, 2, 4]]


def test_what_is_kept_takes_the_memory_of_the_estimate(made, gpu):
    """The outputs of each width, for a kind of sampling; a kind that comes again has its own recording still."""
    target, drafter = made("token_recycling", gpu.put)
    engine, prompts = Engine(target, drafter, slots=2, nodes=8), [[3, 1, 4, 1, 5], [9, 2, 6]]
    engine.generate(prompts, SamplingParams(seed=3, max_new_tokens=12, ignore_eos=True))
    known = engine.runner.graphs._known
    large = [x for one in known.values() for x in graphs_module._tensors((*one.inputs, one.outputs))]
    kept = {x.data_ptr(): x for x in large if x.shape[-1] == VOCAB}.values()
    widths = {x.shape[1] for x in kept}
    plain, own = (
        memory_parts(target.model, one, 2, 100, sorted(widths), 8, prompt_rows=[8])["recorded steps"]
        for one in (Plain(), drafter)
    )
    # What is learned from is read where it is.
    assert own - plain == sum(x.nbytes for x in kept) == 2 * sum(widths) * VOCAB * 4
    for kind in (SamplingParams(), SamplingParams(1.0, top_p=0.9), SamplingParams(presence_penalty=0.2)):
        engine.generate(prompts, replace(kind, seed=3, max_new_tokens=12, ignore_eos=True))
    recorded = len(engine.runner.graphs)
    engine.generate(prompts, SamplingParams(seed=3, max_new_tokens=12, ignore_eos=True))
    assert len(engine.runner.graphs) == recorded


def test_engines_that_share_a_drafter_by_turns_keep_no_work_of_its_former_buffers(made, gpu):
    """For one of them it is a part of a combination."""
    target, drafter = made("triforce+prompt_lookup", gpu.put)
    engines, kept = [Engine(target, one, slots=2, nodes=None) for one in (drafter, drafter.parts[0])], []
    for _ in range(3):
        for engine in engines:
            engine.generate([[3, 1, 4, 1, 5], [9, 2, 6]], SamplingParams(max_new_tokens=3, ignore_eos=True))
        kept.append([len(engine.runner.graphs._known) for engine in engines])
    assert kept[0] == kept[-1], kept


class OneRank:
    """`Ranks` with a single rank; `announced` counts the passes that it announces to the others."""

    rank, world_size, announced = 0, 1, 0

    def sum(self, numbers: list[float]) -> list[float]:
        self.announced += numbers == [1.0]
        return list(numbers)


@pytest.mark.parametrize("gathered", [True, False])
def test_every_pass_of_a_sharded_target_is_announced_and_gathers_its_layers(tiny_target, gpu, monkeypatch, gathered):
    """A replayed pass would do neither, and the other ranks would wait for this one forever."""
    target, ranks, gathers, steps = tiny_target(vocab_size=VOCAB, max_positions=120), OneRank(), [], []
    gpu.put(target.model)

    @contextmanager
    def around(layer):
        gathers.append(layer)
        yield

    def counted(runner):
        steps.append(runner)
        return real(runner)

    real = Runner.step
    monkeypatch.setattr(Runner, "step", counted)
    if gathered:
        target.model.around_layer = around
    drafter = TokenRecycling(target, nodes=8)
    params = [SamplingParams(temperature, max_new_tokens=NEW, ignore_eos=True) for temperature in (0.0, 1.0)]
    tasks = [Task(f"T{one.temperature}", list(range(1, 10)), one) for one in params]
    assert decode(target, drafter, tasks, ranks) is not None
    assert len(steps) > 8
    if gathered:
        passes = len(steps) + len(tasks)  # and a pass over each prompt
        assert ranks.announced == passes and len(steps[0].graphs) == 0
        # A pass over a prompt ends with the last layer's keys and values, inside that layer.
        assert len(gathers) == passes * target.model.config.n_layers
        with pytest.raises(ValueError, match="graphs=True"):
            Engine(target, graphs=True)
    else:  # as is not done with the sharded target
        assert ranks.announced == 0 and len(steps[0].graphs) > 0


def test_the_width_curve_times_passes_as_they_will_run(made, gpu):
    """Each width is launched once, recorded once, and replayed in every turn that counts."""
    target, _ = made("plain", gpu.put)
    launched = []
    target.model.embed_tokens.register_forward_hook(lambda module, given, out: launched.append(out.shape[1]))
    curve = timing.width_curve(target.model, context=9, widths=(1, 5), repeats=3)
    assert launched == [1, 5, 1, 5] and gpu.calls["replay"] == 8
    assert set(curve) == {1, 5} and min(curve.values()) > 0


def test_kinds_of_sampling_are_counted_by_their_work(made, gpu, monkeypatch):
    """Seeds, lengths and temperatures make no kind, nor do a top_k up to the same power of two, other biases or bans,
    or other slots that have them; greedy decoding, a filter, any bias, and log-probabilities do."""
    target, drafter = made("medusa", gpu.put)
    engine, counted = Engine(target, drafter, slots=2, nodes=8), []
    monkeypatch.setattr(Runner, "rehearse", lambda runner, lengths: counted.append(runner.state.logprobs))
    allocate = engine.pool._allocate
    engine.pool._allocate = lambda *given: counted.append(given[2]) or allocate(*given)
    kinds = [SamplingParams(0.5), SamplingParams(2.0), SamplingParams(), SamplingParams(1.0, top_k=3)]
    kinds += [SamplingParams(1.0, top_k=4), SamplingParams(1.0, logprobs=1)]
    params = [replace(one, seed=i, max_new_tokens=1 + i) for i, one in enumerate(kinds)]
    engine.generate([[1, 2, 3]] * len(params), params)
    engine.generate([[1, 2, 3] * 3] * len(params), params)  # a longer text fits into the same cache
    assert counted == [4, False, False, False, True]
    for bias in {3: 1.0}, {5: -2.0, 8: 0.5}:
        engine.generate([[1, 2, 3]] * 2, SamplingParams(1.0, logit_bias=bias, max_new_tokens=2))
    engine.generate([[1, 2, 3]] * 2, SamplingParams(1.0, banned_token_ids=(7,), max_new_tokens=2))
    assert counted[5:] == [False]
