"""The runtime on a GPU. In fp32 without TF32 plain decoding gives the CPU's tokens, and every drafter gives those of
plain decoding. In bf16 a drafter's tokens differ from plain decoding's at near-ties alone.

As in tests/infer, a comparison of tokens in fp32 also asserts that no decision of plain decoding was closer than ten
times the measured difference, here between passes on the CPU and on the GPU, of one row and of all. In bf16 the gap at
each token that differs is compared with the measured difference between passes of one row and of many.
"""

import importlib.util
import os
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from longdraft.benchmarks.drafters.exactness import count_flips
from longdraft.infer.engine import Engine
from longdraft.infer.graphs import cuda_graphs
from longdraft.infer.sampling import SamplingParams
from longdraft.kernels.cpu import library
from longdraft.models.passes import Pass

if "LONGDRAFT_TEST_DEVICE" not in os.environ and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device; LONGDRAFT_TEST_DEVICE=cpu runs the same on the CPU", allow_module_level=True)


def _shared(name: str):
    path = Path(__file__).parent.parent / "infer" / f"test_{name}.py"
    spec = importlib.util.spec_from_file_location(f"shared_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


exactness, grammars = _shared("exactness"), _shared("grammar")

# Those with wide margins in plain decoding; the other processors are in EVERY.
SAMPLINGS = ("greedy", "T1_top_p", "greedy_penalty")
CASES = [("gqa", "overflow"), ("mha", "short")]
CASE_NAMES = ["-".join(case) for case in CASES]
# All processors at once. Each is off in some request, and one request is greedy.
EVERY = [
    SamplingParams(temperature=0.8, top_k=20, top_p=0.95, seed=1, max_new_tokens=12, banned_token_ids=(3, 9)),
    SamplingParams(max_new_tokens=12, repetition_penalty=1.2, presence_penalty=0.3, seed=2),
    SamplingParams(temperature=1.0, min_p=0.02, eta_cutoff=0.01, frequency_penalty=0.2, seed=3, max_new_tokens=12),
    SamplingParams(temperature=1.3, top_k=30, contextual_penalty=1.2, contextual_window=8, seed=4, max_new_tokens=12),
]
_expected: dict = {}


@pytest.fixture
def models(tiny_target, device, monkeypatch):
    """(kind, dtype) -> a target and a smaller model on the device; drafts for them are moved there too."""
    made = exactness.randomised
    monkeypatch.setattr(exactness, "randomised", lambda draft, target, std=0.3: made(draft, target, std).to(device))

    def build(kind: str, dtype: torch.dtype = torch.float32):
        target = tiny_target(vocab_size=exactness.VOCAB, n_kv_heads=exactness.HEADS[kind], dtype=dtype)
        pair = target, tiny_target(vocab_size=exactness.VOCAB, n_layers=1, n_kv_heads=1, seed=5, dtype=dtype)
        for one in pair:
            one.model.to(device)
        return pair

    return build


@torch.no_grad()
def logits_of(target, prompt: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """A prompt's logits from one pass of all rows and from passes of one row, on the CPU."""
    model, device = target.model, target.model.embed_tokens.weight.device
    tokens, one = torch.tensor([prompt], device=device), torch.tensor([1], device=device)
    whole, single = model.new_cache(1, len(prompt) + 1), model.new_cache(1, len(prompt) + 1)
    rows = []
    for i in range(len(prompt)):
        rows.append(model(Pass(tokens[:, i : i + 1], cache=single)).logits)
        single.commit(None, one)
    return model(Pass(tokens, cache=whole)).logits.cpu(), torch.cat(rows, 1).cpu()


def difference(target, moved, prompt: list[int]) -> float:
    """The largest difference of a logit between the two, for passes of one row and of all rows."""
    (_, here), there = logits_of(target, prompt), logits_of(moved, prompt)
    return float(max((here - logits).abs().max() for logits in there))


@pytest.fixture
def expected(tiny_target, models, plain_tokens, seeded, margins):
    """(kind, length, sampling, batch) -> prompts, their params, and plain decoding's tokens on the CPU."""

    def of(kind: str, length: str, sampling: str, batch: int):
        prompts = exactness.prompts(kind, length)[: 1 if batch == 1 else None]
        params = seeded(exactness.SAMPLINGS[sampling], len(prompts), exactness.NEW)
        key = kind, length, sampling, batch
        if key not in _expected:
            target = tiny_target(vocab_size=exactness.VOCAB, n_kv_heads=exactness.HEADS[kind])
            tokens = plain_tokens(target, prompts, params)
            found = difference(target, models(kind)[0], max(prompts, key=len))
            assert margins.smallest > 10 * found, (margins.smallest, found)
            _expected[key] = tokens
        return prompts, params, _expected[key]

    return of


def late(engine: Engine) -> Engine:
    """The engine with the host reading one step behind, as it does on a GPU; on the CPU it is made to."""
    assert engine.runner.lag == (0 if engine.runner.device.type == "cpu" else 1)
    engine.runner.lag = 1
    return engine


def decode(engine: Engine, prompts, params) -> list[list[int]]:
    return [generation.tokens for generation in engine.generate(prompts, params)]


@pytest.mark.parametrize("sampling", [*SAMPLINGS, "T0.7"])
@pytest.mark.parametrize(("kind", "length"), CASES, ids=CASE_NAMES)
def test_plain_decoding_gives_the_cpus_tokens(models, expected, kind, length, sampling):
    for batch in (1, 3):
        prompts, params, want = expected(kind, length, sampling, batch)
        target, _ = models(kind)
        for chunk in (512, 7):
            engine = late(Engine(target, slots=batch, prefill_chunk=chunk))
            assert decode(engine, prompts, params) == want, (batch, chunk)


@pytest.mark.parametrize(("kind", "length"), CASES, ids=CASE_NAMES)
@pytest.mark.parametrize("name", [*exactness.DRAFTERS, *map("+".join, exactness.PAIRS)])
def test_a_drafter_gives_plain_decodings_tokens(models, expected, name, kind, length):
    target, small = models(kind)
    build = exactness.combined(tuple(name.split("+"))) if "+" in name else exactness.DRAFTERS[name]
    for batch in (1, 3) if length == "overflow" else (3,):
        # First all nodes are verified without graphs; then the nodes the engine picks, with graphs where possible.
        ways = (None, False), ("auto", None)
        engines = [
            late(Engine(target, build(target, small), slots=batch, nodes=nodes, graphs=graphs))
            for nodes, graphs in ways
        ]
        for index, sampling in enumerate(SAMPLINGS):
            prompts, params, want = expected(kind, length, sampling, batch)
            assert decode(engines[index % 2], prompts, params) == want, (sampling, batch)


@pytest.mark.parametrize("name", [*exactness.DRAFTERS, *map("+".join, exactness.PAIRS)])
@pytest.mark.parametrize("exact", ["0", "1"])
def test_a_drafter_in_bf16_differs_at_near_ties_alone(models, device, monkeypatch, name, exact):
    """bf16 is the default dtype. On a CPU with the C kernels a row has the same bits in every pass, and on a GPU if
    LONGDRAFT_EXACT asks for it: nothing differs."""
    monkeypatch.setenv("LONGDRAFT_EXACT", exact)
    target, small = models("gqa", torch.bfloat16)
    build = exactness.combined(tuple(name.split("+"))) if "+" in name else exactness.DRAFTERS[name]
    plain, prompts = late(Engine(target, slots=3)), exactness.prompts("gqa", "overflow")
    # First all nodes are verified without graphs; then the nodes the engine picks, with graphs where possible.
    for sampling, nodes, graphs in (("greedy", None, False), ("T0.7", "auto", None)):
        engine = late(Engine(target, build(target, small), slots=3, nodes=nodes, graphs=graphs))
        params = replace(exactness.SAMPLINGS[sampling], seed=1500, max_new_tokens=exactness.NEW)
        found = count_flips(plain, engine, name, prompts, [params])
        assert found["tokens"] == len(prompts) * exactness.NEW
        if library.obstacle() is None if device.type == "cpu" else exact == "1":
            assert found["flips"] == 0


FILLED = [0, 300, 37]  # the lengths of three slots


@torch.no_grad()
def wide_logits(target, tokens_BT: torch.Tensor, mask_TT: torch.Tensor | None, width: int) -> torch.Tensor:
    """Logits on the CPU of rows after FILLED committed ones, from passes of `width` rows, or of all under a mask."""
    model, device = target.model, target.model.embed_tokens.weight.device
    cache, n_rows = model.new_cache(len(FILLED), max(FILLED) + tokens_BT.shape[1]), tokens_BT.shape[1] - max(FILLED)
    cache.keys.fill_(float("nan"))
    cache.values.fill_(torch.finfo(cache.values.dtype).max)  # finite: flash kernels multiply such rows by 0
    tokens_BT, lengths = tokens_BT.to(device), torch.tensor(FILLED, device=device)
    for part in tokens_BT[:, : max(FILLED)].split(width, dim=1):
        before = cache.lengths
        model(Pass(part, cache=cache, needs={"last_kv"}))
        cache.commit(None, (lengths - before).clamp(0, part.shape[1]))
    own = tokens_BT[:, max(FILLED) :]
    if mask_TT is not None:
        mask = mask_TT.to(device)
        positions = cache.lengths[:, None] + (mask.sum(-1) - 1).clamp(min=0)
        return model(
            Pass(own, cache=cache, positions_BT=positions, tree_mask_BTT=mask.expand(len(FILLED), -1, -1))
        ).logits.cpu()
    logits = []
    for part in own.split(min(width, n_rows), dim=1):
        logits.append(model(Pass(part, cache=cache)).logits.cpu())
        cache.commit(None, torch.full_like(lengths, part.shape[1]))
    return torch.cat(logits, 1)


@pytest.mark.parametrize("windows", [None, (64, None)], ids=["all", "windows"])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_pass_of_many_rows_on_a_filled_cache(tiny_target, device, shared, dtype, tree, windows):
    """150 rows after ragged lengths, with NaN after what is written, against the CPU in fp32. In bf16 the error is at
    most twice that of passes of few rows."""
    options = {"vocab_size": exactness.VOCAB, "max_positions": 512, "sliding_windows": windows, "dtype": dtype}
    target = tiny_target(**options)
    truth = replace(target, model=deepcopy(target.model).float())
    target.model.to(device)
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(exactness.VOCAB, (len(FILLED), max(FILLED) + 150), generator=generator)
    mask = shared("kernels/test_tree_attention.py").random_tree(151, 3)[:150, :150] if tree else None
    exact, wide = (wide_logits(one, tokens, mask, 150) for one in (truth, target))
    assert bool(wide.isfinite().all())
    if not tree:  # a tree has only the one pass
        few = wide_logits(truth, tokens, None, 11)
        torch.testing.assert_close(exact, few, rtol=0, atol=1e-4 * float(exact.abs().max()))
    allowed = 1e-4 * float(exact.abs().max())
    if dtype == torch.bfloat16:
        narrow = wide_logits(target, tokens, None, 11)
        few = exact if not tree else wide_logits(truth, tokens, None, 11)
        allowed = 2 * float((narrow.float() - few).abs().max())
    assert float((wide.float() - exact).abs().max()) <= allowed


@pytest.mark.parametrize("graphs", [None, False], ids=["recorded", "launched"])
@pytest.mark.parametrize("name", ["plain", "longspec", "token_recycling"])
def test_linear_attention_gives_the_cpus_tokens(tiny_target, models, plain_tokens, margins, device, name, graphs):
    fields = {"vocab_size": exactness.VOCAB, "max_positions": exactness.POSITIONS, **exactness.QWEN3_5}
    here, there = tiny_target(**fields), tiny_target(**fields)
    there.model.to(device)
    prompts = exactness.prompts("qwen3_5", "overflow")
    params = [replace(SamplingParams(), seed=i, max_new_tokens=exactness.NEW) for i in range(len(prompts))]
    want = plain_tokens(here, prompts, params)
    found = difference(here, there, max(prompts, key=len))
    assert margins.smallest > 10 * found, (margins.smallest, found)
    drafter = name if name == "plain" else exactness.DRAFTERS[name](there, None)
    for chunk in (512, 7):
        engine = late(Engine(there, drafter, slots=3, graphs=graphs, prefill_chunk=chunk))
        assert decode(engine, prompts, params) == want, chunk


@pytest.mark.parametrize("name", ["plain", "longspec", "medusa", "tokenswift", "token_recycling", "triforce"])
def test_recorded_steps_go_on_in_the_next_call(models, expected, name, device):
    """Greedy and sampled requests in turns, twice: the second time all steps are replayed."""
    target, small = models("gqa")
    drafter = name if name == "plain" else exactness.DRAFTERS[name](target, small)
    engine = late(Engine(target, drafter, slots=3, nodes=6, graphs=device.type == "cuda"))
    for _ in range(2):
        for sampling in ("greedy", "T0.7", "greedy_penalty"):
            prompts, params, want = expected("gqa", "short", sampling, 3)
            assert decode(engine, prompts, params) == want, sampling
    assert engine.runner.graphs.recording == (device.type == "cuda")


def test_after_a_recording_that_failed_others_succeed(device):
    """Work that waits cannot be recorded, and PyTorch's allocator must not stay with it."""
    if device.type != "cuda":
        pytest.skip("needs a CUDA device; tests/infer/test_graphs.py has the same of a pretended one")
    x, out_23 = torch.ones(3, device=device), torch.zeros(2, 3, device=device)
    record = cuda_graphs(x.device)._recorder
    kept = [record(lambda: torch.add(x, 1, out=out_23[0]))]
    with pytest.raises(RuntimeError, match="could not be recorded"):
        record(lambda: x * float(x.sum()))
    kept.append(record(lambda: torch.add(x, 2, out=out_23[1])))
    for replay in kept:
        replay()
    assert out_23.tolist() == [[2.0] * 3, [3.0] * 3]


def test_every_processor_beside_others_in_a_batch(tiny_target, models, plain_tokens, margins):
    straight = tiny_target(vocab_size=exactness.VOCAB)
    target, small = models("gqa")
    prompts = exactness.prompts("gqa", "short")[:4]
    want = plain_tokens(straight, prompts, EVERY)
    assert margins.smallest > 10 * difference(straight, target, max(prompts, key=len))
    assert decode(late(Engine(target, slots=3)), prompts, EVERY) == want
    for name in ("tokenswift", "longspec", "token_recycling"):
        drafter = exactness.DRAFTERS[name](target, small)
        assert decode(late(Engine(target, drafter, slots=3)), prompts, EVERY) == want, name


@pytest.mark.parametrize("name", ["plain", "tokenswift", "prompt_lookup"])
def test_texts_with_a_grammar_beside_others(tiny_target, device, plain_tokens, margins, monkeypatch, name):
    sizes = dict(vocab_size=grammars.VOCAB, max_positions=grammars.POSITIONS)
    here = replace(tiny_target(**sizes), tokenizer=grammars.byte_tokenizer(), eos_token_ids=(grammars.END,))
    there = replace(here, model=deepcopy(here.model).to(device))
    prompts, params = grammars.prompts(), grammars.params()
    want = plain_tokens(here, prompts, params)
    assert margins.smallest > 10 * difference(here, there, max(prompts, key=len))
    made = exactness.randomised
    monkeypatch.setattr(exactness, "randomised", lambda draft, target, std=0.3: made(draft, target, std).to(device))
    drafter = name if name == "plain" else exactness.DRAFTERS[name](there, None)
    engine = late(Engine(there, drafter, slots=3))
    for _ in range(2):  # the second time all steps are replayed
        assert decode(engine, prompts, params) == want


FACTORS = [1.0, 1.1, 1.2, 1.3]
ROPES = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "longrope": {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 24,
        "short_factor": FACTORS, "long_factor": [2 * factor for factor in FACTORS],
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", [*ROPES, "windows"])
def test_logits_of_every_kind_of_rope_and_with_windows(tiny_target, device, kind):
    options = {"sliding_windows": (5, None)} if kind == "windows" else {"rope": ROPES[kind]}
    options["max_positions"] = 32 if kind == "dynamic" else 96
    prompt = torch.randint(97, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    target, moved = tiny_target(**options), tiny_target(**options)
    moved.model.to(device)
    scale = float(logits_of(target, prompt)[1].abs().max())
    assert difference(target, moved, prompt) < 1e-4 * scale
