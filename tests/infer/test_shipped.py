"""The drafts that come with longdraft: found by name, exact with the real target, and worth their place."""

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.launch import cli
from longdraft.models.draft_folder import draft_method, local_folder, read_info, shipped_drafts
from longdraft.models.hf import load_target

TOKENS = 20
# Written for this test: none of it is in a draft's training text.
PROMPTS = (
    'def median_of_three(first, second, third):\n    """The middle one of three numbers."""\n',
    "<|im_start|>user\nHow do I keep bread fresh for a few days?<|im_end|>\n<|im_start|>assistant\n",
)


@pytest.fixture(scope="module")
def target():
    return load_target("smollm2-135m", torch.float32)


@pytest.fixture(scope="module")
def plain(target):
    return {temperature: answers(Engine(target, "plain"), temperature)[0] for temperature in (0.0, 1.0)}


def answers(engine: Engine, temperature: float) -> tuple[list[list[int]], float]:
    """The tokens of all prompts, and of all of them together, tokens a step."""
    assert isinstance(engine.target.tokenizer, PreTrainedTokenizerBase)
    ids = [engine.target.tokenizer(prompt, add_special_tokens=False).input_ids for prompt in PROMPTS]
    params = [SamplingParams(temperature=temperature, seed=5, max_new_tokens=TOKENS, ignore_eos=True) for _ in PROMPTS]
    found = engine.generate(ids, params)
    return [one.tokens for one in found], sum(len(one.tokens) for one in found) / sum(one.stats.steps for one in found)


@pytest.mark.parametrize("name", shipped_drafts())
def test_decodes_exactly_and_in_fewer_steps(name, target, plain):
    engine = Engine(target, draft_method(name), draft=name, nodes=16)
    for temperature, least in ((0.0, 1.3), (1.0, 1.2)):
        tokens, tokens_per_step = answers(engine, temperature)
        assert tokens == plain[temperature]
        assert tokens_per_step > least


@pytest.mark.parametrize("name", shipped_drafts())
def test_says_where_it_comes_from(name):
    card = (local_folder(name) / "README.md").read_text()
    assert read_info(name).target["name"] == "smollm2-135m"
    assert f"--draft {name}" in card and "longdraft prepare" in card and "longdraft train" in card


def test_several_at_once(capsys):
    """Each goes to the drafter of its method."""
    asked = ["--draft", *shipped_drafts(), "--prompt", PROMPTS[0], "--max-new-tokens", "12", "--dtype", "fp32"]
    assert (
        cli.run("generate", [*asked, "--drafter", "plain", "tokenswift+prompt_lookup", "longspec", "--device", "cpu"])
        == 0
    )
    assert "Same tokens from plain, tokenswift+prompt_lookup, longspec (fp32): yes" in capsys.readouterr().err
