"""Parameters, the filters against those of transformers, and the choice rule."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation.logits_process import (
    EtaLogitsWarper,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from longdraft.infer.choice.slots import KEPT_ROWS, SlotSampling
from longdraft.infer.history import History
from longdraft.infer.sampling import SamplingParams
from longdraft.kernels import choice
from longdraft.kernels.choice import gumbel_noise

CPU = torch.device("cpu")
NONE = History(8, 64)  # without penalties the history does not matter


THEIRS = {
    "top_k": lambda value, least: TopKLogitsWarper(value),
    "top_p": lambda value, least: TopPLogitsWarper(value),
    "min_p": lambda value, least: MinPLogitsWarper(value, min_tokens_to_keep=least),
    "eta_cutoff": lambda value, least: EtaLogitsWarper(value, min_tokens_to_keep=least),
}


@pytest.mark.parametrize(
    "values",
    [
        *({name: value} for name, some in [
            ("top_k", (1, 7, 300, 5000)), ("top_p", (0.05, 0.5, 0.9, 0.99)), ("min_p", (0.01, 0.3)),
            ("eta_cutoff", (3e-4, 0.01, 0.6)),
        ] for value in some),
        {"top_k": 400, "top_p": 0.97, "min_p": 0.002, "eta_cutoff": 0.001},
        {"min_p": 0.1, "min_tokens_to_keep": 20}, {"eta_cutoff": 0.6, "min_tokens_to_keep": 20},
        {"top_k": 7, "min_p": 0.5, "eta_cutoff": 0.9, "min_tokens_to_keep": 5},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("temperature", [0.6, 1.0, 3.0])
def test_kept_tokens_are_those_of_transformers(values, temperature):
    """Theirs run in fp64, so that only one rounding differs; no border here lies within fp32's 1e-6 of mass."""
    torch.manual_seed(3)
    logits = torch.randn(4, 5000) * torch.tensor([0.5, 1.0, 2.0, 4.0])[:, None]
    params = SamplingParams(temperature=temperature, **values)
    scaled = logits / temperature
    theirs = scaled.double()
    for name, make in THEIRS.items():  # transformers applies them in this order
        if name in values:
            theirs = make(values[name], params.min_tokens_to_keep)(None, theirs)
    assert torch.equal(
        SlotSampling([params] * 4, CPU).filtered(logits[:, None])[:, 0], scaled.where(theirs.isfinite(), -torch.inf)
    )


def rows_with_ties():
    """Logits in fp32 and bf16: peaked, flat, all equal, with -inf. The last two need the whole vocabulary."""
    torch.manual_seed(4)
    rows = torch.randn(7, 3000) * torch.tensor([6.0, 3, 1, 4, 0, 2, 0.1])[:, None]
    rows[3] = rows[3].bfloat16().float()
    rows[5, ::2] = -torch.inf
    return rows


@pytest.mark.parametrize("top_p", [0.1, 0.9, 0.99, 1 - 2.0**-24, 1.0])
def test_top_p_is_the_same_by_a_part_and_by_the_whole_vocabulary(monkeypatch, top_p):
    rows = rows_with_ties()
    sampling = SlotSampling([SamplingParams(temperature=0.9, top_p=p) for p in [top_p] * 6 + [0.3]], CPU)
    results = []
    for likeliest in (1, 17, 256, 2999, 3000):
        monkeypatch.setattr(choice, "LIKELIEST", likeliest)
        results.append(sampling.filtered(rows[:, None])[:, 0])
    assert all(torch.equal(result, results[0]) for result in results)
    assert results[0][:6].isfinite().any(-1).all()


def test_filters_do_not_depend_on_ids_nor_on_the_batch():
    """Permuting the vocabulary permutes what is kept, also with ties. A row has the same bits alone and among
    others."""
    rows, order = rows_with_ties(), torch.randperm(3000)
    for values in ({"top_k": 40}, {"top_p": 0.7}, {"min_p": 0.1}, {"eta_cutoff": 0.002}, {"top_k": 900, "top_p": 0.9}):
        params = SamplingParams(temperature=1.1, **values)
        many = SlotSampling([params] * 7, CPU)
        kept = many.filtered(rows[:, None])[:, 0]
        assert torch.equal(many.filtered(rows[:, None, order])[:, 0].isfinite(), kept.isfinite()[:, order]), values
        for b in range(7):
            assert torch.equal(SlotSampling([params], CPU).filtered(rows[b : b + 1, None])[0, 0], kept[b]), values


@pytest.mark.parametrize("vocab", [60, 61, 64])
def test_on_a_gpu_all_rows_that_filters_add_up_are_aligned_alike(pretended_cuda, vocab):
    """PyTorch adds up a row in an order that depends on its address; a vocabulary that is aligned costs no copy."""
    torch.manual_seed(3)
    params, logits, places = [SamplingParams(temperature=0.7, eta_cutoff=0.01)] * 2, torch.randn(2, 5, vocab), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._softmax.default:
                assert args[0].is_contiguous() and args[0].dtype == torch.float32
                places.extend(args[0].data_ptr() + 4 * args[0].shape[-1] * row for row in range(10))
            return func(*args, **(kwargs or {}))

    with pretended_cuda.PretendedCuda() as gpu, Watch():
        found = SlotSampling(params, torch.device("cuda")).filtered(logits.cuda()).cpu()
    assert len(places) == 10 and not any(place % 32 for place in places)
    assert (gpu.calls["constant_pad_nd"] > 0) == (vocab % 8 > 0)
    assert torch.equal(found, SlotSampling(params, CPU).filtered(logits))


def test_a_greedy_slot_ignores_filters_whoever_stands_beside_it():
    """Two logits one step apart have equal probabilities in fp32; top-p must not decide between them."""
    low = torch.tensor(0.1)
    logits = torch.stack([low, low.nextafter(torch.tensor(1.0)), torch.tensor(-5.0)])[None]
    greedy = SamplingParams(top_p=0.3, min_p=0.9, top_k=1)
    beside = SlotSampling([greedy, SamplingParams(temperature=1.0, top_p=0.5, seed=1)], CPU)
    alone = SlotSampling([greedy], CPU)
    positions = torch.tensor([3, 3])
    assert beside.choose(logits.repeat(2, 1), NONE, positions)[0] == alone.choose(logits, NONE, positions[:1])[0] == 1


def test_choice_is_the_argmax_of_filtered_logits_and_noise():
    torch.manual_seed(2)
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=11)
    sampling, logits = SlotSampling([params], CPU), torch.randn(1, 64) * 2
    noise = gumbel_noise(torch.tensor([11]), torch.tensor([[31]]), 64)[0, 0]
    kept = sampling.filtered(logits[:, None])[0, 0].isfinite()
    by_hand = (logits[0] / 0.8 + noise).where(kept, -torch.inf).argmax()
    assert sampling.choose(logits, NONE, torch.tensor([30])) == by_hand and not kept.all()


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_best_are_those_with_the_largest_logits_and_noise(temperature, restricted, mixed):
    """Of the position `offset` after the root, whatever filters there are."""
    torch.manual_seed(6)
    params = [SamplingParams(temperature=temperature, seed=3, top_k=2), SamplingParams(temperature=0.7 * mixed, seed=4)]
    params = params if mixed else params[:1] * 2
    ids = torch.randperm(500)[:300] if restricted else torch.arange(500)
    logits, positions = torch.randn(2, 3, len(ids)).bfloat16(), torch.tensor([9, 3])
    ranked = logits.float()
    for b, p in enumerate(params):
        if p.temperature:
            noise = gumbel_noise(torch.tensor([p.seed]), positions[b : b + 1, None] + 2, 500)[0, 0, ids]
            ranked[b] = ranked[b] / p.temperature + noise
    log_probs, words = SlotSampling(params, CPU).best(logits, NONE, positions, 2, 6, ids if restricted else None)
    torch.testing.assert_close(ranked.gather(2, words), ranked.topk(6).values, rtol=0, atol=0)
    torch.testing.assert_close(log_probs, ranked.log_softmax(-1).gather(2, words))


def test_noise_is_kept_and_does_not_grow():
    """Rows are the same whatever position or width was asked for before, and no row is computed twice."""
    sampling = SlotSampling([SamplingParams(temperature=1.0, seed=2**64 - 3), SamplingParams(seed=6)], CPU)
    seeds = torch.tensor([-3, 6])
    for start in [*range(0, 300, 7), 50, 0, 299]:
        positions = torch.tensor([start, 2 * start])
        for vocab in (30, 61, 10):
            noise = gumbel_noise(seeds, positions[:, None], vocab)[:, 0]
            assert torch.equal(sampling.noise(positions, vocab), torch.stack([noise[0], torch.zeros(vocab)]))
    assert max(len(rows) for rows in sampling._noise_rows) <= KEPT_ROWS
    one = SlotSampling([SamplingParams(temperature=1.0, seed=5)], CPU)
    first, again = (one.noise(torch.tensor([12]), vocab) for vocab in (61, 50))
    assert first.data_ptr() == again.data_ptr()


HUGE = 10**400
WRONG = {
    "temperature": (-1, math.nan, 1e-9, 1e300, HUGE, "warm", True),
    "top_p": (0, 1.5, HUGE),
    "top_k": (-3, 2.5, math.inf, HUGE),
    "min_p": (1.0, "0.1"),
    "eta_cutoff": (1.0,),
    "max_new_tokens": (0, 2.5, True),
    "min_new_tokens": (-1,),
    "min_tokens_to_keep": (0,),
    "contextual_penalty": (0, 1e-20),
    "contextual_window": (0,),
    "repetition_penalty": (-1.2, 1e20),
    "presence_penalty": (math.nan, HUGE),
    "frequency_penalty": (math.inf,),
    "banned_token_ids": ((3, -1), 3, b"ab"),
    "stop_token_ids": ("3", [True]),
    "stop_strings": ("stop", ["a", ""], ["\ud800"]),
    "seed": (2**64, -(2**63) - 1, True),
    "ignore_eos": ("yes", 1),
    "logit_bias": ([1], {-1: 1.0}, {3: 1e40}),
    "logprobs": (21, -1),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_parameters_out_of_range_name_the_field(name, value):
    with pytest.raises(ValueError, match=rf"^{name}\b.*: "):
        SamplingParams(**{name: value})
