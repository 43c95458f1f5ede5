"""Classical rejection's acceptance at the first place: against the formula, and against chains that are drawn."""

import json

import pytest
import torch

from longdraft.benchmarks.drafters.rejection_sampling import first_places, shares
from longdraft.infer.choice.slots import SlotSampling
from longdraft.infer.drafters.small_model import SmallModelDrafter
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.launch import bench
from longdraft.models.passes import Pass

PROMPTS = [[5, 9, 2, 40, 17], [3, 3, 8]]


def distributions(model, text, start, params):
    """p of every position from `start` on, filtered as a request would."""
    cache = model.new_cache(1, len(text) + 1)
    logits = model(Pass(torch.tensor([text]), cache=cache)).logits[0, start - 1 : -1]
    return SlotSampling([params] * len(logits), torch.device("cpu")).filtered(logits).softmax(-1)


@pytest.mark.parametrize("more", [{}, {"top_p": 0.8}])
def test_the_overlap_is_the_formula_s(tiny_target, more):
    """A chain of one node: every place is a first one, where the step before ended."""
    target, small = tiny_target(), tiny_target(seed=1, std=0.22)
    params = SamplingParams(temperature=1.0, seed=4, max_new_tokens=40, ignore_eos=True, **more)
    engine = Engine(target, SmallModelDrafter(target, small, gamma=1), nodes=None, graphs=False)
    seen = first_places(engine, PROMPTS[:1], params)
    (plain,) = Engine(target).generate(PROMPTS[:1], params)
    p, q = (distributions(each.model, PROMPTS[0] + plain.tokens, 5, params) for each in (target, small))
    every = torch.minimum(p, q).sum(-1).tolist()
    overlaps = [one["classical"] for one in seen]
    assert 20 < len(overlaps) <= 40 and overlaps[0] == pytest.approx(every[0], abs=1e-5)
    at = 0
    for overlap in overlaps:  # the steps' places, in order
        while at < len(every) and abs(every[at] - overlap) > 1e-5:
            at += 1
        assert at < len(every), "an overlap of no place"
        at += 1
    assert all(0 <= share <= 1 for share in shares(seen).values())


def test_a_draft_that_is_the_target_overlaps_wholly_and_knows_the_choice(tiny_target):
    target = tiny_target()
    params = SamplingParams(temperature=1.0, seed=4, max_new_tokens=30, ignore_eos=True)
    engine = Engine(target, SmallModelDrafter(target, tiny_target(), gamma=1), nodes=None, graphs=False)
    found = shares(first_places(engine, PROMPTS, params))
    assert found["classical"] == pytest.approx(1) and found["with"] == 1 and found["without"] < 1


def test_lookups_rank_nothing(tiny_target):
    params = SamplingParams(temperature=1.0, seed=4, max_new_tokens=8)
    engine = Engine(tiny_target(), "prompt_lookup", nodes=None, graphs=False)
    assert shares(first_places(engine, PROMPTS, params)) is None


def test_bench_says_what_was_asked_for(tiny, tmp_path, capsys):
    """Exactness that was not looked at, half precision, penalties, end tokens, ranking, and acceptance side by side."""
    (tmp_path / "a.txt").write_text("the cat sat on the mat and the dog sat on the log. " * 4)
    asked = f"--target {tiny} --text-file {tmp_path}/a.txt --prompt-tokens 24 --new-tokens 6 --drafter small_model "
    asked += f"--option small={tiny} --temperature 1 --seed 3 "
    more = "--exactness off --dtype fp16 --min-p 0.05 --contextual-penalty 1.2 --eos stop --no-noise --noise"
    assert bench.main((asked + more).split()) == 0
    shown = capsys.readouterr().out
    result = json.loads(shown.splitlines()[-1])
    assert result["exact"] is None and result["proof"]["form"] == "off" and result["dtype"] == "float16"
    assert "exact: not shown (nothing: --exactness off)" in shown
    assert "min_p 0.05, contextual_penalty 1.2, stop at end tokens, ranked without the noise" in shown
    first = result["noise"]["small_model"]["1.0"]["first_place"]
    assert first["classical"] > 0.95 and first["with"] > first["without"]
    assert "by classical rejection " in shown
    assert bench.main((asked + "--transformers --ban 3").split()) == 2
    assert "--transformers: " in capsys.readouterr().err
