"""A loaded transformers model as a target: the same numbers, shared memory, and what is refused."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from longdraft.models.hf import load_target, refresh, target_from_transformers
from longdraft.models.passes import Pass


@pytest.fixture
def tiny_model(sizes):
    """(kind, other fields of its configuration) -> a random transformers model. All its tensors are far from their
    initial values."""

    def make(kind: str, **values):
        config = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}[kind]
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config(**sizes | values)).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 0.1, 0.3)
        return model

    return make


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@torch.no_grad()
def test_a_loaded_transformers_model_becomes_a_target(tiny_model, kind, tied, tmp_path, error):
    model = tiny_model(kind, tie_word_embeddings=tied, head_dim=8, eos_token_id=[3, 4])
    target = target_from_transformers(model)
    ids = torch.randint(50, (1, 20))
    assert error(target.model(Pass(ids)).logits, model(ids).logits) < 1e-5
    model.save_pretrained(tmp_path)
    loaded = load_target(tmp_path, torch.float32)
    assert target.fingerprint == loaded.fingerprint and target.eos_token_ids == loaded.eos_token_ids == (3, 4)
    assert target.model.config == loaded.model.config
    ours, theirs = target.model.state_dict(), loaded.model.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert not any(p.requires_grad for p in target.model.parameters())
    assert all(p.requires_grad for p in model.parameters()), "the model itself stays as it was"


def test_memory_is_shared_but_for_the_fused_tensors(tiny_model):
    model = tiny_model("llama").to(torch.bfloat16)
    target = target_from_transformers(model)
    theirs = {p.data_ptr() for p in model.parameters()}
    copied = [name for name, p in target.model.named_parameters() if p.data_ptr() not in theirs]
    assert {name.split(".", 2)[-1] for name in copied} == {"attention.qkv_proj.weight", "mlp.gate_up_proj.weight"}
    assert {p.dtype for p in target.model.parameters()} == {torch.bfloat16}


@torch.no_grad()
def test_refresh_takes_over_every_way_of_writing_weights(tiny_model, error):
    model = tiny_model("qwen2")
    target, ids = target_from_transformers(model), torch.randint(50, (1, 12))
    other = {name: tensor + 0.1 for name, tensor in model.state_dict().items()}

    def optimizer_step():
        for parameter in model.parameters():
            parameter.sub_(0.05)

    def behind_autograd():
        for parameter in model.parameters():
            parameter.data.mul_(0.9)

    def replaced():
        for parameter in model.parameters():
            parameter.data = parameter.data + 0.1

    def one_bias():
        model.model.layers[1].self_attn.k_proj.bias.data[3] += 0.5

    for write in (optimizer_step, behind_autograd, replaced, one_bias, lambda: model.load_state_dict(other)):
        before = model(ids).logits
        write()
        refresh(target, model)
        assert error(target.model(Pass(ids)).logits, model(ids).logits) < 1e-5
        assert not torch.equal(before, model(ids).logits)


@torch.no_grad()
def test_of_a_tied_checkpoint_no_other_head_is_read(tiny_model, tmp_path, error):
    model, ids = tiny_model("llama", tie_word_embeddings=True), torch.arange(10)[None]
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in ("lm_head.weight", "language_model.lm_head.weight"):
        other = tensors["model.embed_tokens.weight"] + 1
        save_file(tensors | {name: other}, tmp_path / "model.safetensors", {"format": "pt"})
        assert error(load_target(tmp_path, torch.float32).model(Pass(ids)).logits, model(ids).logits) < 1e-5


@torch.no_grad()
def test_transformers_models_that_cannot_be_targets_are_refused(tiny_model):
    with pytest.raises(ValueError, match="gpt2"):
        target_from_transformers(AutoModelForCausalLM.from_config(GPT2Config(n_embd=8, n_layer=1, n_head=1)))
    model = tiny_model("llama")
    model.model.norm.to(torch.float64)
    with pytest.raises(ValueError, match="several dtypes"):
        target_from_transformers(model)
    with pytest.raises(ValueError, match=r"missing model\.layers\.0"):
        target_from_transformers(tiny_model("llama").model)
    model = tiny_model("llama", tie_word_embeddings=True)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight + 1)
    with pytest.raises(ValueError, match="tie_word_embeddings is True, but"):
        target_from_transformers(model)
