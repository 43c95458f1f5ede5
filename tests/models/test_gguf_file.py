"""GGUF files, written here as llama.cpp writes them, against transformers with the same weights."""

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from longdraft.models import gguf_file as module
from longdraft.models.hf import load_target, load_through_transformers, read_target_config
from longdraft.models.hf_config import decoder_config
from longdraft.models.passes import Pass

# Llama 3.1's scaling, with small heads.
SCALING = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
CONFIG = LlamaConfig(
    vocab_size=50, hidden_size=64, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=16384, rms_norm_eps=2**-17, rope_parameters=SCALING,
    bos_token_id=0, eos_token_id=1, tie_word_embeddings=True,
)  # fmt: skip
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "model.layers.0": "blk.0",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def divisors() -> np.ndarray:
    """As convert_hf_to_gguf.py computes them, one frequency after the other."""
    found = []
    for i in range(0, 32, 2):
        wavelength = 2 * np.pi * 500000.0 ** (i / 32)
        smooth = (8192 / wavelength - 1) / 3
        between = 1 / ((1 - smooth) / 8 + smooth)
        found.append(1 if wavelength < 8192 / 4 else 8 if wavelength > 8192 else between)
    assert 1 < found[8] < 8, found
    return np.array(found, np.float32)


def write(path, model, extra, token_types=None, scores=None):
    writer, config = gguf.GGUFWriter(path, "llama"), model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(500000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([*(chr(65 + i) for i in range(config.vocab_size - 1)), "AB"])
    writer.add_token_merges(["A B"])
    if token_types is not None:
        writer.add_token_types(token_types)
        writer.add_token_scores(scores)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        if "q_proj" in name or "k_proj" in name:  # llama.cpp rotates neighbours
            tensor = tensor.unflatten(0, (-1, 2, 16)).transpose(1, 2).flatten(0, 2)
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        writer.add_tensor(name, tensor.contiguous().numpy())
    for name, array in extra.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def model():
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIG).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.3)
    return model


@torch.no_grad()
def test_llama_3_scaling_is_read_from_the_divisors_of_its_frequencies(tmp_path, model):
    path, ids = write(tmp_path / "a.gguf", model, {"rope_freqs.weight": divisors()}), torch.arange(40)[None]
    target, expected = load_target(path, torch.float32), model(ids).logits
    assert target.model.config == decoder_config(CONFIG), "and so its drafts are the folder's"
    for loaded in (target, load_through_transformers(path, torch.float32)):
        found = loaded.model(Pass(ids)).logits
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
        assert loaded.fingerprint["config"] == target.fingerprint["config"]


@pytest.mark.parametrize("other", [divisors() * np.linspace(1, 0.9, 16, dtype=np.float32), divisors()[:8]])
def test_other_divisors_are_refused(tmp_path, model, other):
    path = write(tmp_path / "a.gguf", model, {"rope_freqs.weight": other})
    for read in (read_target_config, load_target, load_through_transformers):
        with pytest.raises(ValueError, match=r"rope_freqs\.weight is not Llama 3's RoPE scaling; use the Hugging Face"):
            read(path)


@pytest.mark.parametrize("key", ["scaling.factor", "scale_linear"])
def test_scaling_without_a_type_is_refused_as_linear(tmp_path, model, monkeypatch, key):
    """llama.cpp takes both for linear scaling."""
    add = gguf.GGUFWriter.add_rope_freq_base

    def add_both(writer, base):
        add(writer, base)
        writer.add_float32(f"llama.rope.{key}", 4.0)

    monkeypatch.setattr(gguf.GGUFWriter, "add_rope_freq_base", add_both)
    with pytest.raises(ValueError, match="RoPE scaling 'linear' is not supported"):
        load_target(write(tmp_path / "a.gguf", model, {}))


def test_a_tensor_that_has_no_place_is_named(tmp_path, model):
    path = write(tmp_path / "a.gguf", model, {"blk.0.unknown.weight": np.ones(4, np.float32)})
    for load in (load_target, load_through_transformers):
        with pytest.raises(ValueError, match=r"blk\.0\.unknown\.weight"):
            load(path)


def test_fields_are_as_ggufs_own_reader_has_them_but_for_words(tmp_path, model):
    path = write(tmp_path / "a.gguf", model, {}, token_types=[1] * 50, scores=[-0.5 * i for i in range(50)])
    own, found = gguf.GGUFReader(path), module._open(path)
    assert list(found.fields) == list(own.fields)
    for name, field in own.fields.items():
        is_words = field.types == [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING]
        assert found.fields[name].contents() == ([] if is_words else field.contents()), name
        assert len(found.fields[name].parts) <= 6
    assert [entry.name for entry in found.tensors] == [entry.name for entry in own.tensors]


def test_a_file_that_is_cut_is_named(tmp_path, model):
    whole = write(tmp_path / "a.gguf", model, {}).read_bytes()
    words = whole.index(b"tokenizer.ggml.tokens")
    for length in (3, 30, words + 40, words + 60, words + 600, len(whole) - 9):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"cut\.gguf"):
            load_target(tmp_path / "cut.gguf")
