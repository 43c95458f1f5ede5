"""Forced acceptance: exact with any drafter, as many tokens a step as asked for, and marked wherever it is shown."""

import json
import math
from dataclasses import replace

import pytest
import torch

from longdraft.benchmarks.drafters.forced import LABEL, Blank, Forced, at_rates, at_tokens_per_step, replaying
from longdraft.benchmarks.drafters.record import read_record
from longdraft.infer.drafters.build import build_drafter
from longdraft.infer.drafters.prompt_lookup import PromptLookup
from longdraft.infer.drafters.small_model import SmallModelDrafter
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.launch import cli

PROMPTS = [list(range(1, 30)), list(range(40, 52)) * 2, [7]]
GREEDY = SamplingParams(seed=3, ignore_eos=True, max_new_tokens=40)


@pytest.fixture
def target(tiny_target):
    return tiny_target(vocab_size=199)


def inner_of(name: str, target, tiny_target):
    if name.startswith("blank"):
        return Blank(4, siblings=int(name[-1]))
    if name == "small_model":
        return SmallModelDrafter(target, tiny_target(vocab_size=199, seed=1), gamma=4)
    return build_drafter(name, target)


def step_lengths(engine: Engine, prompts, params: SamplingParams) -> list[int]:
    """How many tokens each step brings, without a prompt's last two, which its end cuts. What is drawn depends on the
    prompt and the position alone, so all prompts are decoded together."""
    lengths = [[] for _ in prompts]
    for piece in engine.stream(prompts, params):
        lengths[piece.index].append(len(piece.tokens))
    return [length for one in lengths for length in one[:-2]]


NAMES = ["blank 0", "blank 2", "small_model", "prompt_lookup", "token_recycling+prompt_lookup"]


@pytest.mark.parametrize("name", NAMES)
def test_the_text_is_plain_decodings(name, target, tiny_target):
    inner = inner_of(name, target, tiny_target)
    forced = Forced(inner, target, at_rates([0.8, 0.6], inner.max_depth), seed=5)
    short = replace(GREEDY, max_new_tokens=20)
    for params in (short, replace(short, temperature=1.0, top_p=0.95)):
        plain = [one.tokens for one in Engine(target).generate(PROMPTS, params)]
        for nodes, slots in (("auto", 2), (3, 1), (None, 2)):
            found = Engine(target, forced, nodes=nodes, slots=slots).generate(PROMPTS, params)
            assert [one.tokens for one in found] == plain


@pytest.mark.parametrize(("name", "asked"), [("blank 0", 1.0), ("small_model", 3.3), ("blank 2", 5.0)])
def test_as_many_tokens_a_step_as_asked_for(name, asked, target, tiny_target):
    params = replace(GREEDY, max_new_tokens=120, temperature=1.0)
    forced = Forced(inner_of(name, target, tiny_target), target, at_tokens_per_step(asked, 4), seed=1)
    prompts = [[token] for token in range(5)]
    engine = Engine(target, forced, nodes=None)
    lengths = step_lengths(engine, prompts, params)
    mean, error = sum(lengths) / len(lengths), torch.tensor(lengths).float().std() / math.sqrt(len(lengths))
    assert abs(mean - asked) <= 3.5 * error + 1e-3
    again = Engine(target, Forced(Blank(4), target, forced.rates, seed=1), nodes=None)
    assert lengths == step_lengths(again, prompts, params)


def test_each_level_has_its_rate(target):
    rates, params = [0.9, 0.3, 0.8], replace(GREEDY, max_new_tokens=220)
    engine = Engine(target, Forced(Blank(3, siblings=1), target, rates, seed=2), nodes=None)
    accepted = [length - 1 for length in step_lengths(engine, [[token] for token in range(6)], params)]
    for level, rate in enumerate(rates):
        reached = [count for count in accepted if count >= level]
        right = sum(count > level for count in reached) / len(reached)
        assert abs(right - rate) <= 3.5 * math.sqrt(rate * (1 - rate) / len(reached))


def test_near_ties_that_turn_are_followed(target, monkeypatch):
    """In bf16 a wide pass may choose another token than plain decoding; it is then asked again with the text since. A
    prompt that plain decoding has read is not read again."""
    wrong = Engine(target).generate([PROMPTS[0]], replace(GREEDY, temperature=1.0))[0].tokens
    plain, kept = Engine(target, prefill_chunk=7), []
    forced = Forced(Blank(4), target, [1.0] * 4, plain=plain)
    answer = replaying({"plain": Engine(target), "forced": Engine(target, forced, nodes=None)})[0]["forced"]
    forced.keep(PROMPTS[0], GREEDY, wrong)
    want, real = plain.generate([PROMPTS[0]], GREEDY)[0].tokens, plain.generate

    def generate(prompts, params):
        (found,) = real(prompts, params)
        kept.append(found.stats.cached_tokens)
        return [found]

    monkeypatch.setattr(plain, "generate", generate)
    found = answer(PROMPTS[0], GREEDY)
    assert found.tokens == want and found.steps == 8
    assert kept == [28]


@pytest.mark.parametrize(("make", "waits"), [(lambda: Blank(4, siblings=2), 0), (lambda: PromptLookup(4), 1)])
def test_on_a_gpu_the_tokens_are_replaced_in_recorded_work_without_a_wait(pretended_cuda, target, make, waits):
    """But for that of a look-up in each step."""
    params = [replace(GREEDY, temperature=1.0, seed=seed, max_new_tokens=16) for seed in range(3)]
    rates = at_tokens_per_step(2.5, 4)

    def found(engine: Engine) -> list[tuple]:
        return [(one.tokens, one.stats.accepted_at_depth) for one in engine.generate(PROMPTS, params)]

    on_cpu = found(Engine(target, Forced(make(), target, rates), slots=2, nodes=None))
    assert [tokens for tokens, _ in on_cpu] == [one.tokens for one in Engine(target).generate(PROMPTS, params)]
    with pretended_cuda.PretendedCuda() as gpu:
        target = replace(target, model=gpu.put(target.model))
        engine, steps = Engine(target, Forced(make(), target, rates), slots=2, nodes=None), []
        step = engine.runner.step
        engine.runner.step = lambda: steps.append(1) or step()
        assert found(engine) == on_cpu
        gpu.forget()
        steps.clear()
        assert found(engine) == on_cpu and gpu.waits.total() == waits * len(steps)


def test_the_mark_is_in_record_table_and_page(tiny, text_file, tmp_path, capsys):
    asked = f"--target {tiny} --text-file {text_file} --prompt-tokens 24 --new-tokens 30 --dtype fp32 --nodes all "
    out = f"--out {tmp_path}/out --report {tmp_path}/out.html "
    some = "--drafter oracle small_model --option oracle.depth=3 oracle.siblings=1 "
    some += f"small_model.small={tiny} small_model.gamma=2 "
    assert cli.run("bench", (asked + out + some + "--tokens-per-step 2").split()) == 0
    shown = capsys.readouterr().out
    result, names = json.loads(shown.splitlines()[-1]), {"forced-oracle", "forced-small_model"}
    assert result["exact"] and set(result["settings"][LABEL]) == names
    assert set(result["runs"][0]["drafters"]) == {"plain", *names}
    assert result["runs"][0]["drafters"]["forced-oracle"]["same_tokens"] == [30, 30]
    record, page = read_record(tmp_path / "out"), (tmp_path / "out.html").read_text()
    assert record.settings[LABEL] == dict.fromkeys(names, "--tokens-per-step=2") and LABEL in page
    for name in names:
        assert f"{name}: {LABEL} (rates 0." in shown and name in page and record.of(name, 0.0)
        assert (tmp_path / "out" / "spec_bench" / f"{name}.jsonl").exists()
    assert cli.run("bench", (asked + out + some + "--tokens-per-step 1.5").split()) == 2  # another record
    capsys.readouterr()
    assert cli.run("bench", (asked + some).split()) == 0
    shown = capsys.readouterr().out
    drafters = json.loads(shown.splitlines()[-1])["runs"][0]["drafters"]
    assert set(drafters) == {"plain", "forced-oracle", "small_model"}
    assert drafters["forced-oracle"]["tokens_per_step"] == 30 / 8 and drafters["forced-oracle"]["nodes_per_step"] > 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--tokens-per-step 2", "--tokens-per-step: plain decoding drafts nothing"),
        ("--accept-rates 0.5 --drafter plain", "--accept-rates: plain decoding drafts nothing"),
        ("--tokens-per-step 0.5 --drafter oracle", "--tokens-per-step: 0.5; a step"),
        ("--tokens-per-step 13.5 --drafter oracle", "--tokens-per-step: 13.5, but a depth of 12"),
        ("--tokens-per-step 6 --drafter oracle --nodes 4", "--tokens-per-step: 6, but a depth of 4"),
        ("--accept-rates 0.5,0.5 --drafter oracle --option depth=1", "--accept-rates: 2 rates, but"),
        ("--drafter oracle+prompt_lookup", "drafter: unknown name 'oracle'"),
        ("--drafter oracle --option gamma=1", "oracle has only depth and siblings"),
        ("--drafter oracle --option depth=0", "depth"),
        ("--drafter token_recycling --accept-rates 0.5 --paper token-recycling", "--accept-rates: "),
    ],
)
def test_what_has_no_effect_or_is_out_of_reach_is_refused(options, message, tiny, text_file, capsys):
    given = "--data x" if "--paper" in options else f"--text-file {text_file} --prompt-tokens 24 --new-tokens 4"
    assert cli.run("bench", f"--target {tiny} {given} {options}".split()) == 2
    assert message in capsys.readouterr().err
