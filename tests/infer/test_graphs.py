"""Recorded steps, on a CPU that is treated as a GPU: nothing may be read on the host, and work is recorded op by op.

The recorder does what a CUDA graph does: recording takes no effect, and a replay does the same operations on the same
memory, whatever the host holds by then. So an address that changes between two steps, a number of the host that is not
in the key, and a read that would wait for the device all fail here.
"""

from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from longdraft.benchmarks.drafters import timing as timing_module
from longdraft.infer import graphs as graphs_module
from longdraft.infer import runner as runner_module
from longdraft.infer.drafters.base import Plain
from longdraft.infer.drafters.token_recycling import TokenRecycling
from longdraft.infer.engine import Engine
from longdraft.infer.graphs import Graphs
from longdraft.infer.runner import Runner
from longdraft.infer.sampling import SamplingParams
from longdraft.infer.slot_pool import memory_parts
from longdraft.kernels import backend, chain_attention, tree_attention
from longdraft.kernels.attention import masked_attention
from longdraft.kernels.cpu import rows
from longdraft.kernels.tree import MOST_ROWS, attended_rows
from longdraft.models.target import Target
from longdraft.models.transformers_model import TransformersModel, check_against
from longdraft.train.evaluate import Task, decode

VOCAB, NEW = 61, 8
READS = ("tolist", "item", "__bool__", "__int__", "__float__", "numpy", "__index__", "nonzero")


# Operations whose result, or its size, the host has to know.
WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount", "repeat_interleave")


class Tape(TorchDispatchMode):
    """Records every operation but views, with its input tensors and those of its outputs, by their places, that have
    memory of their own, which is `owned`."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[Callable, tuple, dict, list[tuple[int, Tensor]]]] = []
        self.owned: dict[int, torch.UntypedStorage] = {}
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        assert func.overloadpacket.__name__ not in WAITING, f"{func} waits for the device"
        given = tensors((args, kwargs))
        if func.overloadpacket.__name__ in ("index", "index_put", "index_put_"):
            assert all(x is None or x.dtype != torch.bool for x in args[1]), "places of a mask are counted on the host"
        if func._schema.is_mutable:
            for x in given:
                storage = x.untyped_storage()
                if storage.data_ptr() not in self.owned:
                    self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        out = func(*args, **kwargs)
        known, made = {x.untyped_storage().data_ptr() for x in given}, tensors(out)
        own = [(place, x) for place, x in enumerate(made) if x.untyped_storage().data_ptr() not in known]
        self.owned |= {x.untyped_storage().data_ptr(): x.untyped_storage() for _, x in own}
        if own or func._schema.is_mutable:
            self.calls.append((func, args, kwargs, own))
        return out

    def undo(self) -> None:
        """Restore all tensors, as if nothing had been done."""
        for storage, before in self.before.values():
            storage.copy_(before)

    def replay(self) -> None:
        for func, args, kwargs, own in self.calls:
            made = tensors(func(*args, **kwargs))
            for place, still in own:
                still.copy_(made[place])
        self.spoil()

    def spoil(self) -> None:
        """Overwrite what the operations made: afterwards that memory belongs to other recorded work."""
        for storage in self.owned.values():
            storage.fill_(113)


def tensors(x: Any) -> list[Tensor]:
    """All tensors in the arguments or results of an operation."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, (list, tuple)):
        return [one for part in x for one in tensors(part)]
    return tensors(list(x.values())) if isinstance(x, dict) else []


RECORDED: list[Tape] = []


def record(work):
    """Stands for CUDA's capture: refuses reads and copies from the host, and leaves everything as it was."""

    def refuse(*_, **__):
        raise AssertionError("recorded work reads or copies on the host")

    with ExitStack() as stack:
        for name in READS:
            stack.enter_context(mock.patch.object(Tensor, name, refuse))
        for name in ("tensor", "as_tensor", "from_numpy"):
            stack.enter_context(mock.patch.object(torch, name, refuse))
        tape = stack.enter_context(Tape())
        work()
    tape.undo()
    RECORDED.append(tape)
    return tape.replay


def dense(q_BTHd, keys_BSKd, values_BSKd, lengths_B, bits_BT2, depth_BT, window):
    """Stands for Triton's kernel: attends to all rows of the cache under one mask and reads nothing on the host."""
    n_slots, n_rows, n_heads, width = q_BTHd.shape
    n_keys, n_kv = keys_BSKd.shape[1:3]
    places_T = torch.arange(n_rows)
    tree_BTT = None if bits_BT2 is None else (bits_BT2[:, :, places_T // 64] >> places_T % 64 & 1) == 1
    open_BTS = attended_rows(lengths_B, n_rows, n_keys, tree_BTT, window)
    there_BS = torch.arange(n_keys) < lengths_B[:, None] + n_rows
    keys_BSKd, values_BSKd = (x.where(there_BS[:, :, None, None], 0.0) for x in (keys_BSKd, values_BSKd))
    q_BTKGd = q_BTHd.reshape(n_slots, n_rows, n_kv, n_heads // n_kv, width)
    scores = torch.einsum("btkgd,bskd->bkgts", q_BTKGd, keys_BSKd) * width**-0.5
    weights = scores.masked_fill(~open_BTS[:, None, None], -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("bkgts,bskd->btkgd", weights, values_BSKd).reshape(q_BTHd.shape), None


def cross(q_BTHd, keys_BSKd, values_BSKd, lengths_B):
    """As `dense`, over the committed rows alone."""
    there_BS = torch.arange(keys_BSKd.shape[1]) < lengths_B[:, None]
    return masked_attention(q_BTHd, keys_BSKd, values_BSKd, there_BS[:, None].expand(-1, q_BTHd.shape[1], -1))


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Reads cost a wait, there are no C kernels, attention needs no host, and engines record with `record` where they
    would on CUDA."""
    monkeypatch.setattr(backend, "is_host", lambda device: False)
    monkeypatch.setattr(rows, "library", lambda: None)
    kernels = SimpleNamespace(tree_attention=dense, cross_attention=cross)
    monkeypatch.setattr(tree_attention, "triton_for", lambda q: kernels if q.shape[1] <= MOST_ROWS else None)
    gpu = SimpleNamespace(
        triton_kernels=lambda *_: kernels, varlen_attention_for=lambda _: None, prompt_attention_for=lambda *_: None
    )
    for module in (graphs_module, chain_attention):
        monkeypatch.setattr(module, "backend", gpu)
    monkeypatch.setattr(graphs_module, "cuda_graphs", lambda device: Graphs(record))
    RECORDED.clear()


SAMPLINGS = {
    "greedy": SamplingParams(),
    "T1": SamplingParams(temperature=1.0),
    "filters": SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, eta_cutoff=0.001, min_tokens_to_keep=3),
    "penalties": SamplingParams(contextual_penalty=1.2, contextual_window=16, presence_penalty=0.2),
}


DRAFTERS = (
    "longspec", "medusa", "tokenswift", "tokenswift_draft_pass", "triforce", "token_recycling", "small_model",
)  # fmt: skip
CASES = [*(("plain", name) for name in SAMPLINGS), *((name, "T1") for name in DRAFTERS)]
CASES += [("longspec", "penalties"), ("longspec+token_recycling", "greedy")]


@pytest.mark.parametrize(("drafter", "sampling"), CASES)
def test_recorded_steps_give_plain_tokens(made, plain_tokens, seeded, as_on_a_gpu, drafter, sampling):
    target, proposing = made(drafter)
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(VOCAB, (count,), generator=generator).tolist() for count in (9, 3, 30)]
    params = seeded(SAMPLINGS[sampling], len(prompts), NEW)
    with mock.patch.object(runner_module, "graphs_for", lambda *_: Graphs()):
        expected = plain_tokens(target, prompts, params)
    engine = Engine(target, proposing, slots=2, nodes=8 if drafter != "plain" else "auto")
    recorded = 0
    for _ in range(2):  # the second call reuses what the first one has recorded
        found = {}
        for piece in engine.stream(prompts, params):
            recorded = recorded or len(RECORDED)
            if piece.generation:
                found[piece.generation.index] = piece.generation.tokens
        assert list(map(found.get, range(3))) == expected
    assert len(RECORDED) == recorded > 0, "recorded while a request waited"


def test_recorded_steps_read_each_requests_own_biases(made, as_on_a_gpu):
    """Biases, and ends that are held back, are numbers of the recorded work."""
    target, drafter = made("medusa")
    prompts, ends = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3], [5, 8, 9], [7]], [5, 10, 15, 20, 25]
    params = [
        SamplingParams(logit_bias={end: 40.0}, stop_token_ids=(end,), min_new_tokens=n, max_new_tokens=NEW)
        for n, end in enumerate(ends, 1)
    ]
    found = Engine(target, drafter, slots=2, nodes=8).generate(prompts, params)
    assert RECORDED and [one.tokens.index(end) for one, end in zip(found, ends, strict=True)] == [1, 2, 3, 4, 5]
    with mock.patch.object(runner_module, "graphs_for", lambda *_: Graphs()):
        assert [one.tokens for one in Engine(target).generate(prompts, params)] == [one.tokens for one in found]


@pytest.mark.parametrize("possible", [True, False])
@pytest.mark.parametrize("family", ["olmo2", "gpt2"])
def test_transformers_own_classes_are_recorded_where_their_code_can_be(as_on_a_gpu, monkeypatch, family, possible):
    """Drafts reach beyond the last position, where GPT-2's table of positions ends."""
    torch.manual_seed(0)
    shape = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"pad_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(family, **shape, **ids, intermediate_size=48, max_position_embeddings=32)
    model = TransformersModel(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())
    target = Target(model, None, family, config, check_against(model), (), "transformers")
    prompts = [[*range(3, 15)] * 2, [7, 8, 9] * 8]
    params = [SamplingParams(seed=seed, max_new_tokens=8, ignore_eos=True, temperature=seed) for seed in range(2)]
    with mock.patch.object(runner_module, "graphs_for", lambda *_: Graphs()):
        expected = [one.tokens for one in Engine(target).generate(prompts, params)]

    def refused(work):
        work()
        raise RuntimeError("operation not permitted when stream is capturing")

    if not possible:
        monkeypatch.setattr(graphs_module, "cuda_graphs", lambda device: Graphs(refused))
    said = []
    engine = Engine(target, "prompt_lookup", slots=2, nodes=4, log=said.append)
    for _ in range(2):
        assert [one.tokens for one in engine.generate(prompts, params)] == expected
    assert engine.runner.graphs.recording == possible == bool(RECORDED)
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


def test_what_is_given_to_recorded_work_stays_the_callers():
    graphs, first, second = Graphs(record), torch.arange(3), torch.ones(3, dtype=torch.int64)
    found = [graphs.run(("double",), (), lambda x: 2 * x, x).tolist() for x in (first, second, first)]
    assert found == [[0, 2, 4], [2, 2, 2], [0, 2, 4]]


def test_what_is_kept_takes_the_memory_of_the_estimate(made, as_on_a_gpu):
    """The outputs of each width, for a kind of sampling; a kind that comes again has its own recording still."""
    target, drafter = made("token_recycling")
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
    for kind in SAMPLINGS.values():
        engine.generate(prompts, replace(kind, seed=3, max_new_tokens=12, ignore_eos=True))
    recorded = len(RECORDED)
    engine.generate(prompts, SamplingParams(seed=3, max_new_tokens=12, ignore_eos=True))
    assert len(RECORDED) == recorded


def test_engines_that_share_a_drafter_by_turns_keep_no_work_of_its_former_buffers(made, as_on_a_gpu):
    """For one of them it is a part of a combination."""
    target, drafter = made("triforce+prompt_lookup")
    engines, kept = [Engine(target, one, slots=2, nodes=None) for one in (drafter, drafter.parts[0])], []
    for _ in range(3):
        for engine in engines:
            engine.generate([[3, 1, 4, 1, 5], [9, 2, 6]], SamplingParams(max_new_tokens=NEW, ignore_eos=True))
        kept.append([len(engine.runner.graphs._known) for engine in engines])
    assert kept[0] == kept[-1], kept


class OneRank:
    """`Ranks` with a single rank; `announced` counts the passes that it announces to the others."""

    rank, world_size, announced = 0, 1, 0

    def sum(self, numbers: list[float]) -> list[float]:
        self.announced += numbers == [1.0]
        return list(numbers)


@pytest.mark.parametrize("gathered", [True, False])
def test_every_pass_of_a_sharded_target_is_announced_and_gathers_its_layers(
    tiny_target, as_on_a_gpu, monkeypatch, gathered
):
    """A replayed pass would do neither, and the other ranks would wait for this one forever."""
    target, ranks, gathers, steps = tiny_target(vocab_size=VOCAB, max_positions=120), OneRank(), [], []

    @contextmanager
    def around(layer):
        gathers.append(layer)
        yield

    def counted(*given):
        steps.append(1)
        return real(*given)

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
        assert ranks.announced == passes and not RECORDED
        # A pass over a prompt ends with the last layer's keys and values, inside that layer.
        assert len(gathers) == passes * target.model.config.n_layers
        with pytest.raises(ValueError, match="graphs=True"):
            Engine(target, graphs=True)
    else:  # as is not done with the sharded target
        assert ranks.announced == 0 and RECORDED


def test_the_width_curve_times_passes_as_they_will_run(made, as_on_a_gpu, monkeypatch):
    """Each width is launched once, recorded once, and replayed in every turn that counts."""
    monkeypatch.setattr(timing_module, "graphs_for", lambda *_: Graphs(record))
    target, _ = made("plain")
    launched = []
    target.model.embed_tokens.register_forward_hook(lambda module, given, out: launched.append(out.shape[1]))
    curve = timing_module.width_curve(target.model, context=9, widths=(1, 5), repeats=3)
    assert launched == [1, 5, 1, 5] and len(RECORDED) == 2
    assert set(curve) == {1, 5} and min(curve.values()) > 0


def test_kinds_of_sampling_are_counted_by_their_work(made, as_on_a_gpu, monkeypatch):
    """Seeds, lengths and temperatures make no kind, nor do a top_k up to the same power of two, other biases or bans,
    or other slots that have them; greedy decoding, a filter, any bias, and log-probabilities do."""
    target, drafter = made("medusa")
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
