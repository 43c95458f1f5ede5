"""The checkpoint for vLLM's `method: medusa`: names, shapes and values as its reader takes them.

vLLM (models/medusa.py, transformers_utils/configs/medusa.py, config/speculative.py of its 2024-2026 versions) reads:
- config.json through a PretrainedConfig with hidden_size, vocab_size, num_heads, num_hidden_layers,
  truncated_vocab_size; before that, every key with "num" and "heads" in it becomes num_heads, with "num" and "layers"
  num_hidden_layers; original_lm_head, medusa_fc_bias and logit_scale (1) by getattr; n_predict as the default of
  num_speculative_tokens;
- every tensor whose name is a parameter's: blocks.{i}.layers.{j}.weight [hidden, hidden], with a bias where
  medusa_fc_bias; with original_lm_head one LM head, called lm_heads.0.weight [vocab, hidden]; a token_map where
  truncated_vocab_size < vocab_size. Names that it does not know it passes over.
Its forward: each head's layers are x + SiLU(W x) on the target's post-norm state, then the LM head.
"""

import json
from dataclasses import replace
from hashlib import sha256

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import silu
from transformers import PretrainedConfig

from longdraft.models.draft_files import CONFIG, WEIGHTS
from longdraft.models.drafts.medusa import Medusa, MedusaConfig
from longdraft.models.drafts.tokenswift import TokenSwift, TokenSwiftConfig
from longdraft.models.passes import Pass
from longdraft.train.config_sections import LongSpecSection, MedusaSection, TokenSwiftSection
from longdraft.train.vllm_medusa import VllmMedusa, check_section, save

WIDTH, VOCAB = 32, 97
LAYERS = {"silu_chain": 4, "medusa": 1}
HEADS = 4


def heads(kind, dtype=torch.float32):
    generator = torch.Generator().manual_seed(2)
    if kind == "medusa":
        draft = Medusa(MedusaConfig(WIDTH, HEADS, init_std=0.2), generator)
    else:
        draft = TokenSwift(TokenSwiftConfig(WIDTH, 1e-6, HEADS, kind, init_std=0.2), generator)
    return draft.to(dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", LAYERS)
def test_names_shapes_and_config(tiny_target, tmp_path, kind, dtype):
    target = tiny_target(dtype=getattr(torch, dtype), tie_embeddings=kind == "medusa")
    draft = heads(kind, getattr(torch, dtype))
    save(tmp_path, draft, target, {"method": "ours"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]

    names = {f"blocks.{i}.layers.{j}.weight": (WIDTH, WIDTH) for i in range(HEADS) for j in range(LAYERS[kind])}
    weights = load_file(tmp_path / WEIGHTS)
    assert {name: tuple(w.shape) for name, w in weights.items()} == names | {"lm_heads.0.weight": (VOCAB, WIDTH)}
    assert {w.dtype for w in weights.values()} == {getattr(torch, dtype)}
    assert torch.equal(weights["lm_heads.0.weight"], target.model.lm_head.weight)

    content = json.loads((tmp_path / CONFIG).read_text())
    digest = sha256((tmp_path / WEIGHTS).read_bytes()).hexdigest()
    assert content.pop("longdraft") == {"method": "ours", "weights_sha256": digest}
    assert content == {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": WIDTH,
        "vocab_size": VOCAB,
        "truncated_vocab_size": VOCAB,
        "num_heads": HEADS,
        "num_hidden_layers": LAYERS[kind],
        "n_predict": HEADS,
        "original_lm_head": True,
        "medusa_fc_bias": False,
        "torch_dtype": dtype,
    }
    folded = [key for key in content if "num" in key and ("heads" in key or "layers" in key)]
    assert folded == ["num_heads", "num_hidden_layers"]
    read, _ = PretrainedConfig.get_config_dict(tmp_path)
    config = PretrainedConfig.from_dict(read)
    assert (config.num_heads, config.num_hidden_layers, config.original_lm_head) == (HEADS, LAYERS[kind], True)


@pytest.mark.parametrize("kind", LAYERS)
def test_logits_from_the_files_alone(tiny_target, tmp_path, kind):
    """Computed as in vLLM, from states that the target gives and from large ones."""
    target, draft = tiny_target(), heads(kind)
    save(tmp_path, draft, target, {})
    tokens = torch.randint(VOCAB, (1, 40), generator=torch.Generator().manual_seed(0))
    hidden_ND = target.model(Pass(tokens, needs={"post_norm"})).post_norm[0]
    hidden_ND = torch.cat([hidden_ND, hidden_ND * 30])
    ours = torch.stack(draft.states(hidden_ND)) @ target.model.lm_head.weight.T

    config, weights = json.loads((tmp_path / CONFIG).read_text()), load_file(tmp_path / WEIGHTS)
    theirs = []
    for i in range(config["num_heads"]):
        x = hidden_ND
        for j in range(config["num_hidden_layers"]):
            x = x + silu(x @ weights[f"blocks.{i}.layers.{j}.weight"].T)
        theirs.append(x @ weights["lm_heads.0.weight"].T)
    torch.testing.assert_close(torch.stack(theirs), ours, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(theirs[0], theirs[1], atol=0.1)  # the heads differ

    read = VllmMedusa(tmp_path, torch.device("cpu"))
    assert torch.equal(torch.stack(read.states(hidden_ND)) @ read.lm_head.T, ours)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_restricted_vocabulary_is_its_token_map(tiny_target, tmp_path, kind):
    """vLLM's reader puts the logits of the file's rows at these places of a vector [V] of -inf."""
    target, ids = tiny_target(), torch.tensor([5, 3, 90, 41, 96])
    whole = heads(kind)
    with torch.device("meta"):
        draft = type(whole)(replace(whole.config, draft_vocab_size=5))
    draft.load_state_dict(whole.state_dict() | {"token_ids": ids}, assign=True)
    save(tmp_path, draft, target, {})
    content, weights = json.loads((tmp_path / CONFIG).read_text()), load_file(tmp_path / WEIGHTS)
    assert (content["vocab_size"], content["truncated_vocab_size"]) == (VOCAB, 5)
    assert torch.equal(weights["token_map"], ids)
    assert torch.equal(weights["lm_heads.0.weight"], target.model.lm_head.weight[ids])


def test_idle_layers_of_a_chain_are_zero(tiny_target, tmp_path):
    draft = heads("silu_chain")
    save(tmp_path, draft, tiny_target(), {})
    weights = load_file(tmp_path / WEIGHTS)
    for i in range(HEADS):
        for j in range(HEADS):
            expected = draft.proj[j].weight if j <= i else torch.zeros(WIDTH, WIDTH)
            assert torch.equal(weights[f"blocks.{i}.layers.{j}.weight"], expected)


def test_what_has_no_such_form_is_refused():
    check_section(MedusaSection())
    check_section(TokenSwiftSection(kind="silu_chain"))
    with pytest.raises(
        ValueError, match=r"cannot hold tokenswift's linear_chain: its heads have norms, .* as longdraft"
    ):
        check_section(TokenSwiftSection())
    with pytest.raises(ValueError, match=r"cannot hold longspec: its block reads tokens and the target's cache"):
        check_section(LongSpecSection())
