"""Parameters and the choice rule, against formulas written out for one row."""

import pytest
import torch

from longdraft.infer.history import History
from longdraft.infer.sampling import SamplingParams, SlotSampling, one_each
from longdraft.kernels.gumbel import gumbel_noise

CPU = torch.device("cpu")
NONE = History(8, 64)  # what is before does not matter without penalties


def filtered_by_hand(logits, p: SamplingParams):
    """top-k, top-p, min-p on one row, each on the renormalised result of the one before; returns the kept ids."""
    probs = {v: float(x) for v, x in enumerate((logits.double() / p.temperature).softmax(0))}
    if p.top_k:
        border = sorted(probs.values(), reverse=True)[min(p.top_k, len(probs)) - 1]
        probs = {v: x for v, x in probs.items() if x >= border}
    total = sum(probs.values())
    if p.top_p < 1:
        kept, mass = {}, 0.0
        for v, x in sorted(probs.items(), key=lambda item: -item[1]):
            if mass >= p.top_p:
                break
            kept[v] = x
            mass += x / total
        probs = kept
    if p.min_p:
        probs = {v: x for v, x in probs.items() if x >= p.min_p * max(probs.values())}
    return set(probs)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.0, top_k=5),
        SamplingParams(temperature=1.3, top_k=500),
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=1.0, top_p=1e-9),
        SamplingParams(temperature=0.5, min_p=0.1),
        SamplingParams(temperature=1.5, top_k=20, top_p=0.8, min_p=0.05),
    ],
    ids=str,
)
def test_filters_equal_the_formula(params):
    torch.manual_seed(0)
    logits = torch.randn(6, 50) * 3
    kept = SlotSampling([params] * 6, CPU).filtered(logits).isfinite()
    for row in range(6):
        assert set(kept[row].nonzero().flatten().tolist()) == filtered_by_hand(logits[row], params)


def test_a_slot_is_not_touched_by_its_neighbours_parameters():
    torch.manual_seed(1)
    many = [
        SamplingParams(),
        SamplingParams(temperature=0.7, seed=1),
        SamplingParams(temperature=1.0, top_p=0.5, seed=2),
        SamplingParams(temperature=1.0, top_k=3, min_p=0.2, seed=2**64 - 1),
    ]
    logits, positions = torch.randn(4, 60) * 2, torch.tensor([3, 9, 9, 40])
    together = SlotSampling(many, CPU)
    chosen = together.choose(logits, NONE, positions)
    for b, params in enumerate(many):
        alone = SlotSampling([params], CPU)
        assert alone.choose(logits[b : b + 1], NONE, positions[b : b + 1]) == chosen[b]


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
    kept = filtered_by_hand(logits[0], params)
    by_hand = max(kept, key=lambda v: float(logits[0, v] / 0.8 + noise[v]))
    assert sampling.choose(logits, NONE, torch.tensor([30])).item() == by_hand


def test_greedy_is_the_argmax_and_asks_for_no_noise():
    logits = torch.randn(3, 20)
    sampling, positions = SlotSampling([SamplingParams()] * 3, CPU), torch.arange(3)
    assert torch.equal(sampling.choose(logits, NONE, positions), logits.argmax(1))
    assert sampling.ranking(logits, NONE, positions, 1) is logits
    assert not any(sampling._rows)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1}, r"temperature=-1 must be 0 \(greedy\) or a number above"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0}, r"top_p=0 must be above 0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"top_k": -3}, "top_k=-3"),
        ({"min_p": 1.0}, "min_p=1.0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ({"seed": 2**64}, "seed=18446744073709551616 must be None or an integer of 64 bits"),
    ],
)
def test_parameters_out_of_range_name_field_value_and_remedy(values, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**values)


def test_one_each():
    one = SamplingParams(seed=1)
    assert one_each(one, 3) == [one] * 3
    with pytest.raises(ValueError, match="2 SamplingParams for 3 prompts"):
        one_each([one, one], 3)
