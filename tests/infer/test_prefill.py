"""A prompt in chunks gives what it gives in one pass. No pass makes a mask of chunk x context, a GPU's chunks are
large, and a pass allocates what is estimated, also at 128K tokens of context."""

import weakref
from collections import defaultdict
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.infer.slot_pool import SPARE_ROWS, SlotPool
from longdraft.kernels import backend, chain_attention, linear
from longdraft.kernels.cpu import delta
from longdraft.models.decoder import Decoder
from longdraft.models.decoder_config import DecoderConfig, DeltaConfig, ExpertsConfig
from longdraft.models.footprint import estimate_memory, pass_bytes
from longdraft.models.passes import Pass
from longdraft.models.rope import RopeConfig

LLAMA = DecoderConfig(128256, 4096, 14336, 32, 32, 8, 128, 1e-5, 140_000, RopeConfig(128, 140_000))
QWEN = DecoderConfig(152064, 5120, 27648, 64, 40, 8, 128, 1e-5, 140_000, RopeConfig(128, 140_000), attention_bias=True)
QWEN3_5 = DecoderConfig(
    248320, 2560, 9216, 2, 16, 4, 256, 1e-6, 140_000, RopeConfig(256, 140_000), qk_norm=True, gated=True,
    delta=DeltaConfig((0,), key_heads=16, value_heads=32, key_dim=128, value_dim=128, kernel=4),
)  # fmt: skip
NARROW = DecoderConfig(640, 512, 256, 2, 32, 32, 16, 1e-5, 8192, RopeConfig(16, 8192))


class Allocations(TorchDispatchMode):
    """Measures the most bytes that new tensors took at a time."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for x in tree_leaves((args, kwargs)):
            self._see(x, 0)
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            self._see(x, 1)
        return found

    def _see(self, x: object, new: int) -> None:
        if isinstance(x, Tensor) and (key := (storage := x.untyped_storage())._cdata) not in self._known:
            size = new * storage.nbytes()
            self._known.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.remove(key)
        self.now -= size


NEW = SamplingParams(max_new_tokens=3, ignore_eos=True)
PROMPT = torch.randint(97, (700,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize(
    ("dtype", "windows", "size"),
    [(torch.float32, None, 20), (torch.float32, (5, None), 20), *((torch.bfloat16, None, n) for n in (1, 20, 128))],
)
def test_a_prompt_gives_what_it_gives_in_chunks(request, tiny_target, dtype, windows, size):
    """Up to rounding; with the C kernels in bf16 to the last bit."""
    if dtype == torch.bfloat16:
        request.getfixturevalue("c_kernels")
    model = tiny_target(dtype=dtype, sliding_windows=windows, max_positions=256).model
    tokens = torch.randint(97, (1, size), generator=torch.Generator().manual_seed(size))
    whole, parts = model.new_cache(1, size), model.new_cache(1, size)
    model(Pass(tokens, cache=whole, needs={"last_kv"}))
    for chunk in tokens.split(3, dim=1):
        model(Pass(chunk, cache=parts, needs={"last_kv"}))
        parts.commit(None, torch.tensor([chunk.shape[1]]))
    allowed = 1e-5 if dtype == torch.float32 else 0
    torch.testing.assert_close(whole.keys, parts.keys, rtol=allowed, atol=allowed)
    torch.testing.assert_close(whole.values, parts.values, rtol=allowed, atol=allowed)


def test_prompts_go_through_the_target_one_by_one_in_chunks(tiny_target):
    """A prompt of one token needs no pass."""
    prompts = [[1] * 11, [3], [2] * 13, [5] * 30]
    target = tiny_target()
    alone = [Engine(target).generate([prompt], NEW)[0].tokens for prompt in prompts]
    engine, shapes = Engine(target, prefill_chunk=16), []
    target.model.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].tokens_BT.shape)))
    assert [generation.tokens for generation in engine.generate(prompts, NEW)] == alone
    assert shapes == [(1, 10), (1, 12), (1, 16), (1, 13), *[(4, 1)] * NEW.max_new_tokens]


@pytest.mark.parametrize("windows", [None, (200, None)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prompt_in_chunks_has_the_tokens_of_small_chunks(no_masks, tiny_target, monkeypatch, windows, dtype):
    """Three chunks of over 128 rows, or one pass for the whole prompt; without masks, or with those of a window and a
    block of rows."""
    monkeypatch.setattr(chain_attention, "BLOCK", 256)
    target = tiny_target(dtype=dtype, sliding_windows=windows, max_positions=1024, std=0.2)
    few = Engine(target, prefill_chunk=100).generate([PROMPT], NEW)[0].tokens
    with no_masks(128 if windows is None else 256 + 200 - 1):
        found = [Engine(target, prefill_chunk=chunk).generate([PROMPT], NEW)[0].tokens for chunk in (256, 1024)]
    if dtype == torch.float32:  # in bf16 such close decisions may fall either way
        assert found == [few, few]


@pytest.mark.parametrize(
    ("name", "windows"),
    [*((name, None) for name in ("plain", "token_recycling", "triforce", "small_model")), ("plain", (200, None))],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_neither(no_masks, pretended_cuda, tiny_target, name, windows, dtype):
    """Nor does the host read a length for it, whatever the chunks are."""
    target = tiny_target(dtype=dtype, sliding_windows=windows, max_positions=1024)
    small = tiny_target(dtype=dtype, n_layers=1, max_positions=512, seed=5)
    with pretended_cuda.PretendedCuda() as gpu:
        gpu.put(target.model), gpu.put(small.model)
        options = {"small": small} if name == "small_model" else {}
        engine = Engine(target, name, prefill_chunk=256, options=options)
        with no_masks():
            engine.generate([PROMPT], NEW)
        if name == "plain":
            assert not [what for what in gpu.waits if "chain_attention" in what]
            # A rehearsal and three chunks of 256 rows, for which the last layer only writes keys and values.
            assert gpu.calls["varlen attention"] == (4 if dtype == torch.bfloat16 else 0)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Meta tensors, which no code mistakes for a CPU's, a flash kernel that allocates only its output, and Triton's
    functions of linear attention without their kernels."""
    monkeypatch.setattr(backend, "varlen_attention_for", lambda _: lambda q, *_: torch.empty_like(q))
    triton = {name: import_module(f"longdraft.kernels.triton.{name}") for name in ("delta_chunks", "delta_layer")}
    for module, kernels in (("delta_chunks", ("_solve", "_carry")), ("delta_layer", ("_delta_tokens", "_gated_norm"))):
        for kernel in kernels:
            monkeypatch.setattr(triton[module], kernel, defaultdict(lambda: lambda *_, **__: None))
    monkeypatch.setattr(backend, "triton_kernels", lambda name, _: triton.get(name))


def counted(config: DecoderConfig, dtype: torch.dtype, chunk: int, context: int, device: str, needs: set[str]) -> int:
    """The most bytes that a chunk allocates at a time after this context, beyond weights and cache."""
    with torch.device(device):
        model, tokens = Decoder(config).to(dtype), torch.zeros(1, chunk, dtype=torch.int64)
        commits_B = torch.full((1,), chunk)
    cache = model.new_cache(1, context + chunk)
    cache.lengths.fill_(context)
    with Allocations() as seen:
        model(Pass(tokens, cache=cache, needs=needs, commits_B=commits_B))
    return seen.most


CONFIGS = {
    "llama": LLAMA,
    "qwen": QWEN,
    "gelu": replace(LLAMA, activation="gelu_tanh"),
    "gelu, post norms": replace(LLAMA, activation="gelu_tanh", post_norms=True),
    "mixtral": replace(LLAMA, experts=ExpertsConfig(8, 2, 14336, True)),
    "qwen3-moe": replace(LLAMA, hidden_size=2048, intermediate_size=6144, experts=ExpertsConfig(128, 8, 768, True)),
    "gpt-oss": replace(
        LLAMA,
        hidden_size=2880,
        intermediate_size=2880,
        experts=ExpertsConfig(32, 4, 2880, True, bias=True, clamped_gate=(1.702, 7.0)),
    ),
    "gated": replace(LLAMA, gated=True),
    "qwen3.5-4b": QWEN3_5,
    "qwen3-next": replace(
        QWEN3_5, hidden_size=2048, intermediate_size=5120, experts=ExpertsConfig(512, 10, 512, True),
        shared_expert_size=512,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("chunk", "context"), [(512, 4096), (2048, 131_072 - 2048)])
def test_on_a_gpu_a_pass_takes_what_is_estimated(as_on_a_gpu, name, chunk, context):
    """Whatever the context is, it takes no more."""
    config = CONFIGS[name] if CONFIGS[name].experts is None else replace(CONFIGS[name], n_layers=2)
    found = counted(config, torch.bfloat16, chunk, context, "meta", {"post_norm"})
    assert found <= pass_bytes(config, chunk, torch.bfloat16, torch.device("meta")) <= 1.05 * found


CPU = torch.device("cpu")
SMALL = DecoderConfig(640, 576, 1536, 2, 9, 3, 64, 1e-5, 8192, RopeConfig(64, 8192))


GELU = replace(SMALL, activation="gelu_tanh")
HYBRID = replace(SMALL, gated=True, delta=DeltaConfig((0,), 4, 8, key_dim=64, value_dim=64, kernel=4))
FEW_EXPERTS = replace(SMALL, intermediate_size=576, experts=ExpertsConfig(8, 2, 1536, True))


@pytest.mark.parametrize(
    "config",
    [SMALL, NARROW, GELU, replace(GELU, post_norms=True), FEW_EXPERTS, HYBRID],
    ids=["smollm2", "narrow", "gelu", "gelu, post norms", "experts", "hybrid"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("context", [0, 600])
def test_on_a_cpu_a_pass_takes_no_more_than_is_estimated(monkeypatch, config, dtype, context):
    monkeypatch.setattr(linear, "emulates_bf16", lambda: False)
    found, estimated = counted(config, dtype, 512, context, "cpu", {"post_norm"}), pass_bytes(config, 512, dtype, CPU)
    assert 0.5 * estimated <= found <= estimated


@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize(("batch", "width"), [(1, 16), (2, 60), (8, 6)])
def test_linear_attentions_verification_and_commit_take_no_more_than_is_estimated(
    c_kernels, monkeypatch, in_c, batch, width
):
    """Of a chain, of which half is accepted."""
    monkeypatch.setattr(linear, "emulates_bf16", lambda: False)
    if not in_c:
        monkeypatch.setattr(delta, "serves", lambda width: False)
    model, tokens = Decoder(HYBRID).to(torch.bfloat16), torch.zeros(batch, width, dtype=torch.int64)
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    cache, positions = model.new_cache(batch, width), torch.arange(width).expand(batch, -1)
    mask = torch.ones(width, width, dtype=torch.bool).tril().expand(batch, -1, -1)
    with Allocations() as seen:
        _output = model(Pass(tokens, cache=cache, positions_BT=positions, tree_mask_BTT=mask))
        cache.commit(positions[:, : width // 2], torch.full((batch,), width // 2))
    expected = estimate_memory(model, batch, width, [width], chunk=1)["passes"]
    assert 0.5 * expected <= seen.most <= expected


def test_the_engine_takes_large_chunks_on_a_gpu(pretended_cuda, tiny_target):
    assert Engine(tiny_target()).pool.prefill_chunk == 512
    target = tiny_target()
    with pretended_cuda.PretendedCuda() as gpu:
        gpu.put(target.model)
        assert Engine(target).pool.prefill_chunk == 2048
        assert Engine(target, prefill_chunk=100).pool.prefill_chunk == 100


@pytest.mark.parametrize("length, rows", [
    (1, [128]), (129, [256]), (511, [512]), (600, [512, 128]), (1100, [512, 512, 128]), (1900, [2048]),
    (2048, [2048]), (2304, [2048, 256]), (5000, [2048, 2048, 512, 512]),
])  # fmt: skip
def test_recorded_passes_waste_few_rows(length, rows):
    pool, passes, left = SimpleNamespace(_row_counts=[128, 256, 512, 2048], prefill_chunk=2048), [], length
    while left > 0:
        passes.append(SlotPool._rows_of_pass(pool, left))
        left -= passes[-1]
    assert passes == rows and -left < SPARE_ROWS
