"""Each rank's share of a target: what it loads, and that all shares together are the target. Decoding with them is in
tests/infer/test_exactness.py and tests/launch/test_ranks.py.
"""

import weakref

import pytest
import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from longdraft.models import tensor_parallel
from longdraft.models.footprint import estimate_memory
from longdraft.models.hf import load_target
from longdraft.models.passes import Pass
from longdraft.models.stream import Stream
from longdraft.models.tensor_parallel import TensorParallel, join, leave

SIZES = dict(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=4, head_dim=8, max_position_embeddings=64, pad_token_id=None, bos_token_id=None,
    eos_token_id=None,
)  # fmt: skip
LINEAR = dict(
    layer_types=["linear_attention", "full_attention"], linear_num_key_heads=4, linear_num_value_heads=8,
    linear_key_head_dim=8, linear_value_head_dim=8,
)  # fmt: skip
EXPERTS = dict(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=16)
FAMILIES = {
    "llama": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    "tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "joined": Phi3Config(**SIZES, tie_word_embeddings=False),
    "gemma": Gemma3TextConfig(**SIZES, sliding_window=6),
    "experts": Qwen3MoeConfig(**SIZES, **EXPERTS, tie_word_embeddings=False),
    "gpt_oss": GptOssConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2, tie_word_embeddings=False),
    "shared expert": Qwen3NextConfig(**SIZES, **LINEAR, **EXPERTS, shared_expert_intermediate_size=16),
    "linear attention": Qwen3_5TextConfig(**SIZES, **LINEAR, tie_word_embeddings=False),
}


@pytest.fixture
def saved(tmp_path):
    """(family) -> a folder with random weights of it, none of which is like another."""

    def save(family):
        model = AutoModelForCausalLM.from_config(FAMILIES[family])
        generator = torch.Generator().manual_seed(3)
        for parameter in model.parameters():
            parameter.data.normal_(0.0, 0.5, generator=generator)
        model.save_pretrained(tmp_path)
        return tmp_path

    return save


@pytest.fixture(autouse=True)
def unlimited(monkeypatch):
    """Ranks that need not ask each other how much memory is free."""
    monkeypatch.setattr(tensor_parallel, "available_bytes", lambda device: None)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_shares_together_are_the_target(saved, family, size):
    """Summed over the ranks, each sub-layer gives what the whole one gives, and so does the LM head, part by part."""
    folder = saved(family)
    whole = load_target(folder, torch.float32)
    shares = [load_target(folder, torch.float32, ranks=TensorParallel(rank, size)) for rank in range(size)]
    assert all(one.fingerprint == whole.fingerprint for one in shares)
    x = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(4))
    for i, layer in enumerate(whole.model.layers):
        for module in ("attention", "mlp"):
            summed = sum(added(one.model, i, module, x) for one in shares)
            torch.testing.assert_close(summed, added(whole.model, i, module, x), rtol=1e-5, atol=1e-5)
        names = [name for name, _ in layer.named_parameters() if "norm" in name and "attention.norm" not in name]
        for one, name in ((one, name) for one in shares for name in names):
            assert torch.equal(one.model.layers[i].get_parameter(name), layer.get_parameter(name))
    head = torch.cat([one.model.lm_head.weight for one in shares])
    assert torch.equal(head, whole.model.lm_head.weight)
    counted = sum(estimate_memory(one.model, 1, 8, [1], 8)["weights"] for one in shares)
    stored = estimate_memory(whole.model, 1, 8, [1], 8)["weights"]
    copied = whole.model.embed_tokens.weight.nbytes - (whole.model.lm_head.weight.nbytes if family == "tied" else 0)
    assert stored < counted < 1.3 * stored + (size - 1) * copied


def added(model, layer, module, x):
    """What a sub-layer of one rank adds to a stream that is zero behind the norm's input x."""
    stream, kept = Stream(x.clone()), x.clone()
    context = model._context(Pass(torch.zeros(1, x.shape[1], dtype=torch.int64)))
    one = model.layers[layer]
    if module == "mlp":
        one.mlp(stream, one.mlp_norm)
        return stream.rows - kept
    heads = one.attention.attend(one.attention.project(stream, one.attention_norm, context), context)
    gate = getattr(one.attention, "gate_proj", None)
    if gate is not None:
        heads = heads * stream.read(gate, one.attention_norm).sigmoid()
    stream.add(one.attention.o_proj, heads)
    return stream.rows - kept


@pytest.mark.parametrize(
    ("family", "size", "field"),
    [("llama", 3, "n_heads"), ("llama", 8, "n_kv_heads")],
)
def test_what_ranks_cannot_share_is_named(saved, family, size, field):
    folder = saved(family)
    with pytest.raises(ValueError, match=f"tensor_parallel: {size} ranks cannot share the target's {field}, "):
        load_target(folder, ranks=TensorParallel(0, size))


def test_ranks_must_be_as_many_as_were_started(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="tensor_parallel: 2, but WORLD_SIZE is 4"):
        join(2, torch.device("cpu"))
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(ValueError, match="tensor_parallel: 2, but WORLD_SIZE is None"):
        join(2, torch.device("cpu"))


def test_recorded_work_is_freed_before_the_group_ends(monkeypatch):
    """Engines have cycles, and NCCL would wait for their graphs."""

    class Engine:
        def __init__(self):
            self.runner = self

    alive, ended = weakref.ref(Engine()), []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: ended.append(alive()))
    leave()
    assert ended == [None]
