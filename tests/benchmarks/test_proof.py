"""The forms of a proof of exactness: what fits where, arithmetic in fp32 of weights in bf16, flips that are counted."""

from dataclasses import replace

import pytest
import torch

from longdraft.benchmarks.drafters.bench import BenchSettings, bench
from longdraft.benchmarks.drafters.exactness import (
    FORMS,
    TOKENS,
    NotExact,
    Room,
    choose_form,
    describe_form,
    fp32_layer_by_layer,
    needed_bytes,
    prove,
)
from longdraft.benchmarks.drafters.prompts import Asked, Question
from longdraft.benchmarks.drafters.text_report import table
from longdraft.infer.drafters.build import build_drafter
from longdraft.infer.drafters.prompt_lookup import PromptLookup
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.footprint import weight_count
from longdraft.models.passes import Pass
from longdraft.models.rope import RopeConfig

BF16, GREEDY = torch.bfloat16, SamplingParams(seed=3, ignore_eos=True)
PROMPTS = [list(range(1, 30)), list(range(40, 52)) * 2]
# Qwen2.5-32B and Llama-2-13B.
QWEN = DecoderConfig(152064, 5120, 27648, 64, 40, 8, 128, 1e-5, 32768, RopeConfig(128, 32768), attention_bias=True)
LLAMA = DecoderConfig(32000, 5120, 13824, 40, 40, 40, 128, 1e-5, 4096, RopeConfig(128, 4096))
GIB = 2**30


@pytest.mark.parametrize(
    ("config", "free", "form"),
    [
        (QWEN, 139, "fp32"),
        (QWEN, 78, "layerwise"),
        (QWEN, 70, "serving"),
        (LLAMA, 78, "fp32"),
        (LLAMA, 47, "layerwise"),
    ],
)
def test_the_first_form_that_fits_is_taken(config, free, form):
    room = Room(free * GIB, 512, 640)
    assert choose_form(None, config, BF16, room)[0] == choose_form(form, config, BF16, room)[0] == form
    assert choose_form(None, config, BF16, replace(room, free=None))[0] == "fp32"
    assert choose_form(None, config, BF16, replace(room, beside=200 * GIB, free=(200 + free) * GIB))[0] == form
    needed = [needed_bytes(one, config, BF16, room) for one in FORMS]
    assert needed[0] > 4 * weight_count(config) and needed[1] > needed[2] > 2 * weight_count(config)


@pytest.mark.parametrize(
    ("asked", "config", "dtype", "free", "message"),
    [
        ("fp32", QWEN, BF16, 78, r"--exactness: fp32 does not fit .* layerwise takes \d\d"),
        ("layerwise", QWEN, BF16, 70, r"--exactness: layerwise does not fit .* serving takes \d\d"),
        (None, QWEN, BF16, 60, "--target"),
        ("serving", QWEN, BF16, 60, "--target"),
        ("layerwise", LLAMA, torch.float32, 78, "--exactness: layerwise"),
        (None, QWEN, torch.float32, 78, "--target"),
    ],
)
def test_what_does_not_fit_is_refused(asked, config, dtype, free, message):
    with pytest.raises(ValueError, match=message):
        choose_form(asked, config, dtype, Room(free * GIB, 512, 640))
    assert choose_form(None, LLAMA, torch.float32, Room(78 * GIB, 512, 640))[0] == "fp32"


def test_layer_by_layer_is_fp32_of_the_same_weights(tiny_target):
    """Bit for bit what a copy in fp32 gives; one layer at a time is in fp32, and none stays so, nor after an error."""
    target = tiny_target(vocab_size=61, n_layers=3, tie_embeddings=True, dtype=BF16)
    before = {name: weight.clone() for name, weight in target.model.named_parameters()}
    whole = replace(target, model=tiny_target(vocab_size=61, n_layers=3, tie_embeddings=True).model)
    for name, weight in whole.model.named_parameters():
        weight.data = before[name].float()
    tokens, wide = torch.tensor(PROMPTS[:1]), []
    layers = target.model.layers
    for layer in layers:
        layer.mlp.register_forward_pre_hook(
            lambda *_: wide.append(sum(one.mlp.down_proj.weight.dtype == torch.float32 for one in layers))
        )
    with fp32_layer_by_layer(target.model):
        assert torch.equal(target.model(Pass(tokens)).logits, whole.model(Pass(tokens)).logits)
        params = replace(GREEDY, max_new_tokens=20)
        found, wanted = (Engine(one).generate(PROMPTS, params) for one in (target, whole))
        assert [g.tokens for g in found] == [g.tokens for g in wanted]
    with pytest.raises(IndexError), fp32_layer_by_layer(target.model):
        target.model(Pass(torch.tensor([[10**6]])))
    assert set(wide) == {1}
    after = dict(target.model.named_parameters())
    assert all(torch.equal(after[name], weight) and after[name].dtype == BF16 for name, weight in before.items())
    assert target.model.lm_head.weight is target.model.embed_tokens.weight


class Rounding(PromptLookup):
    """Makes of the target what a GPU's passes are: their width shows in the logits, by up to `error`."""

    def __init__(self, target, error: float):
        super().__init__()
        head = target.model.lm_head
        generator = torch.Generator().manual_seed(0)
        noise = torch.rand(head.weight.shape[0], generator=generator) * 2 - 1

        def by_width(module, given, logits):
            return logits + (error * noise if given[0].shape[1] > 1 else 0.0)

        self.hook = head.register_forward_hook(by_width)


@pytest.mark.parametrize("error", [0.0, 1.0])
def test_flips_in_the_serving_dtype_are_counted(tiny_target, error):
    target = tiny_target(vocab_size=61)
    found = prove(target, {"rounding": lambda one: Rounding(one, error)}, PROMPTS, GREEDY, "serving", BF16)
    assert found["exact"] is None
    flips = found["proof"]["flips"]["rounding"]
    assert flips["tokens"] == 96 and (flips["flips"] > 0) == (error > 0)
    if error:
        assert flips["flips"] > 2 * len(PROMPTS)  # the text goes on behind a flip
        assert 0 < flips["largest_gap"] <= 2 * error * 1.001 and flips["near_tie"] <= 4 * error * 1.001
    else:
        assert flips["near_tie"] is None


@pytest.mark.parametrize("form", ["fp32", "layerwise", "serving"])
def test_a_drafter_that_changes_tokens_is_found_in_every_form(tiny_target, form):
    """It leads verification astray: what it wants is said to be the target's choice."""
    target = tiny_target(vocab_size=61, dtype=torch.float32 if form == "fp32" else BF16)

    class Astray(PromptLookup):
        def on_step(self, state, tree, accepted, output):
            state.roots.fill_(5)  # goes on behind another token than was committed

    said = "has a token instead" if form == "serving" else "differs from plain decoding in fp32 at prompt 0, token"
    with pytest.raises(NotExact, match=f"exact: NO, astray {said}"):
        prove(target, {"astray": lambda _: Astray()}, PROMPTS, GREEDY, form, BF16)


@pytest.mark.parametrize("form", ["fp32", "serving"])
def test_tokens_that_were_compared_are_counted(tiny_target, form):
    """A prompt that ends near the last position leaves room for fewer."""
    target = tiny_target(vocab_size=61)
    long = [7] * (target.model.config.max_positions - 5)
    found = prove(target, {"lookup": lambda _: PromptLookup()}, [long, PROMPTS[0]], GREEDY, form, BF16)
    tokens = len(Engine(target).generate([long], replace(GREEDY, max_new_tokens=TOKENS))[0].tokens)
    assert tokens < TOKENS and found["exact_checked"].startswith(f"{2 * (tokens + TOKENS)} tokens a drafter in ")


def test_on_a_gpu_memory_is_that_of_the_speeds_and_a_steps_time_is_its_wholes(tiny_target, pretended_cuda, monkeypatch):
    target, events = tiny_target(vocab_size=61), []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    asked = [Asked(Question(0, "continue", (PROMPTS[0],)), len(PROMPTS[0]))]
    settings = BenchSettings(new_tokens=4, dtype=torch.float32, passes=False)
    with pretended_cuda.PretendedCuda() as gpu, monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: events.append("reset"))
        patch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2**20)
        gpu.put(target.model)
        result = bench(target, {"lookup": lambda _: PromptLookup()}, asked, settings, log=events.append)
    assert [event.partition(" ")[0] for event in events[:3]] == ["proof", "reset", "timing"]
    shown = table(result, [])
    assert "peak memory 1 MiB\n" in shown and "step, ms " in shown and "verify" not in shown and "host" not in shown


@pytest.mark.parametrize("form", ["fp32", "layerwise", "serving"])
def test_the_table_says_which_form_it_was(c_kernels, tiny_target, form):
    target = tiny_target(dtype=torch.float32 if form == "fp32" else BF16)
    asked = [Asked(Question(i, "continue", (prompt,)), len(prompt)) for i, prompt in enumerate(PROMPTS)]
    builders = {"token_recycling": lambda one: build_drafter("token_recycling", one)}
    result = bench(target, builders, asked, BenchSettings(new_tokens=4, proof=form))
    said = {"fp32": "yes (96 tokens", "layerwise": "yes (96 tokens", "serving": "not proved in fp32 (96 tokens"}
    assert f"exact: {said[form]} a drafter in {describe_form(form, BF16)}" in table(result, [])
    assert result["exact"] is (None if form == "serving" else True)
    assert result["proof"]["form"] == form
    assert {weight.dtype for weight in target.model.parameters()} == {BF16}
