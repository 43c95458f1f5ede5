"""The forms of a proof of exactness: arithmetic in fp32 of weights in bf16, flips that are counted."""

from dataclasses import replace

import pytest
import torch

from longdraft.benchmarks.drafters.bench import BenchSettings, bench
from longdraft.benchmarks.drafters.exactness import TOKENS, NotExact, in_fp32, prove
from longdraft.benchmarks.drafters.questions import questions_of
from longdraft.benchmarks.drafters.report import table
from longdraft.infer.drafters.prompt_lookup import PromptLookup
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.models.passes import Pass

BF16, GREEDY = torch.bfloat16, SamplingParams(seed=3, ignore_eos=True)
PROMPTS = [list(range(1, 30)), list(range(40, 52)) * 2]


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
    with in_fp32(target.model):
        assert torch.equal(target.model(Pass(tokens)).logits, whole.model(Pass(tokens)).logits)
        params = replace(GREEDY, max_new_tokens=20)
        found, wanted = (Engine(one).generate(PROMPTS, params) for one in (target, whole))
        assert [g.tokens for g in found] == [g.tokens for g in wanted]
    with pytest.raises(IndexError), in_fp32(target.model):
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
    found = prove(target, {"rounding": lambda one: Rounding(one, error)}, PROMPTS, GREEDY, "serving")
    assert found["exact"] is None
    flips = found["proof"]["flips"]["rounding"]
    assert flips["tokens"] == 96 and (flips["flips"] > 0) == (error > 0)
    if error:
        assert flips["flips"] > 2 * len(PROMPTS)  # the text goes on after a flip


@pytest.mark.parametrize("form", ["fp32", "serving"])
def test_a_drafter_that_changes_tokens_is_found_in_every_form(tiny_target, form):
    """It leads verification astray: what it wants is said to be the target's choice."""
    target = tiny_target(vocab_size=61)

    class Astray(PromptLookup):
        def on_step(self, state, tree, accepted, output):
            state.roots.fill_(5)  # goes on after another token than was committed

    said = "chose another token than plain decoding" if form == "serving" else r"has \d+ instead of \d+ in fp32"
    with pytest.raises(NotExact, match=f"exact: NO, astray {said}"):
        prove(target, {"astray": lambda _: Astray()}, PROMPTS, GREEDY, form)


@pytest.mark.parametrize("form", ["fp32", "serving"])
def test_tokens_that_were_compared_are_counted(tiny_target, form):
    """A prompt that ends near the last position leaves room for fewer."""
    target = tiny_target(vocab_size=61)
    long = [7] * (target.model.config.max_positions - 5)
    found = prove(target, {"lookup": lambda _: PromptLookup()}, [long, PROMPTS[0]], GREEDY, form)
    tokens = len(Engine(target).generate([long], replace(GREEDY, max_new_tokens=TOKENS))[0].tokens)
    assert tokens < TOKENS and found["exact_checked"].startswith(f"{2 * (tokens + TOKENS)} tokens a drafter in ")


def test_on_a_gpu_memory_is_the_gpus_and_a_steps_time_is_its_wholes(tiny_target, pretended_cuda, monkeypatch):
    target, settings = tiny_target(vocab_size=61), BenchSettings(new_tokens=4, contexts=())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    with pretended_cuda.PretendedCuda() as gpu, monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2**20)
        gpu.put(target.model)
        result = bench(target, {"lookup": lambda _: PromptLookup()}, questions_of(PROMPTS[:1]), settings)
    shown = table(result)
    assert "peak memory 1 MiB\n" in shown and "step, ms " in shown and "verify" not in shown and "host" not in shown
