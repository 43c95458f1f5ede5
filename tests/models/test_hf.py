"""Loading: the real small target, what is refused and how, and what a fingerprint covers."""

import argparse
import json
from io import BytesIO
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.models import hf
from longdraft.models.checkpoint import halves_from_pairs, places
from longdraft.models.fingerprint import config_hash, tokenizer_hash
from longdraft.models.hf import (
    BUNDLED,
    _locate,
    decoder_config,
    lasting_name,
    load_target,
    read_target_config,
    refresh,
    target_from_transformers,
)
from longdraft.models.passes import Pass

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
NAME = "smollm2-135m"


def error(ours, theirs) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.fixture(scope="module")
def smollm2():
    return load_target(NAME, dtype=torch.float32)


@torch.no_grad()
def test_smollm2_on_real_text(smollm2, tmp_path):
    """transformers with the same tensors gives the same states on real text, and the text is likely."""
    parameters = dict(smollm2.model.named_parameters())
    tensors = {name: parameters[p.parameter][p.start : p.stop] for name, p in places(smollm2.model.config).items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    smollm2.hf_config.save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.tensor([smollm2.tokenizer(argparse.ArgumentParser.__doc__ + argparse.__doc__).input_ids])
    assert 100 < ids.shape[1] < 1500
    expected = theirs(ids, output_hidden_states=True)
    out = smollm2.model(Pass(ids, needs={"logits", "post_norm", "last_kv"}))
    assert error(out.logits, expected.logits) < 1e-5
    assert error(out.post_norm, expected.hidden_states[-1]) < 1e-5
    for index, of_layer in enumerate(out.last_kv):
        stored = expected.past_key_values.layers[-1]
        assert error(of_layer.transpose(1, 2), (stored.keys, stored.values)[index]) < 1e-5
    loss = torch.nn.functional.cross_entropy(out.logits[0, :-1], ids[0, 1:])
    assert loss < 3.5, f"{loss:.2f} nats a token: the weights are not in their places"


@torch.no_grad()
def test_smollm2_knows_what_it_should(smollm2):
    """Wrongly ordered q and k rows would still load, in transformers too; they would not answer this."""
    cache, piece, words = smollm2.model.new_cache(1, 32), smollm2.tokenizer("The capital of France is").input_ids, []
    for _ in range(2):
        logits = smollm2.model(Pass(torch.tensor([piece]), cache=cache)).logits
        cache.commit(None, torch.tensor([len(piece)]))
        piece = [int(logits[0, -1].argmax())]
        words += piece
    assert smollm2.tokenizer.decode(words).startswith(" Paris")
    assert smollm2.eos_token_ids == (smollm2.tokenizer.eos_token_id,) and smollm2.name == NAME


def test_bundled_target_can_be_named_by_its_file(smollm2):
    _, path = _locate(NAME, None)
    assert path.suffix == ".gguf"
    assert _locate(path, None)[1] == _locate(path.parent, None)[1] == _locate(path.parent, path.name)[1] == path
    with pytest.raises(ValueError, match=r"no\.gguf"):
        _locate(path.parent, "no.gguf")


@pytest.mark.parametrize("twin", ["original/model--00001-of-00007.safetensors", "consolidated.safetensors"])
def test_a_hub_target_comes_once(tmp_path, monkeypatch, twin):
    needed = ["config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json", "tokenizer.json"]
    fetched = []

    def snapshot(name, allow_patterns=None, ignore_patterns=None):
        found = filter_repo_objects(
            [*needed, twin, "metal/model.bin"], allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        for file in found:
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).touch()
            fetched.append(file)
        return str(tmp_path)

    monkeypatch.setattr(hf, "snapshot_download", snapshot)
    assert _locate("some/target", None) == ("some/target", tmp_path)
    assert fetched == needed


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(BUNDLED, "absent-1b", "package_that_is_not_there")
    with pytest.raises(ValueError, match=r"absent-1b.*package_that_is_not_there"):
        load_target("absent-1b")


def test_llamacpp_row_order():
    """halves_from_pairs undoes llama.cpp's conversion: rows (0, h, 1, h + 1, ...) of each head back to 0, 1, 2, ..."""
    head = torch.tensor([0, 3, 1, 4, 2, 5])
    rows = torch.cat((head, head + 6)).float()
    assert halves_from_pairs(rows, 2).tolist() == list(range(12))
    assert torch.equal(halves_from_pairs(rows[:, None].repeat(1, 3), 2)[:, 2], torch.arange(12).float())


@pytest.fixture
def folder(tmp_path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE)).save_pretrained(tmp_path)
    return tmp_path


def change_config(folder: Path, **values) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def change_weights(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_tiny_folder_loads_without_a_tokenizer(folder):
    change_config(folder, eos_token_id=[3, 4])
    (folder / "generation_config.json").unlink()
    target = load_target(folder)
    assert target.tokenizer is None and target.fingerprint["tokenizer"] == "none"
    assert target.eos_token_ids == (3, 4) and target.name == folder.name
    parameters = list(target.model.parameters())
    assert all(p.dtype == torch.bfloat16 and not p.requires_grad for p in parameters)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load_target(folder).eos_token_ids == (7, 9)


def test_a_sentencepiece_model_alone_is_a_tokenizer(folder):
    """As lmsys publish Vicuna and LongChat: ids are those of sentencepiece itself."""
    texts, model = (argparse.__doc__ + argparse.ArgumentParser.__doc__).splitlines(), BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, vocab_size=400, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    said = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(said | {"add_bos_token": True, "legacy": True}))
    theirs, ours = SentencePieceProcessor(model_proto=model.getvalue()), load_target(folder).tokenizer
    for text in ("The parser's  options,\nand usage", "naïve 中文 🙂"):
        assert ours(text).input_ids == [ours.bos_token_id, *theirs.encode(text)]
        assert ours.decode(theirs.encode(text)) == text


def test_pytorch_bin_files_load(folder):
    expected = load_target(folder, dtype=torch.float32).model.state_dict()
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    half = len(tensors) // 2
    parts = {"a.bin": dict(list(tensors.items())[:half]), "b.bin": dict(list(tensors.items())[half:])}
    for name, part in parts.items():
        torch.save(part, folder / name)
    index = {"weight_map": {key: name for name, part in parts.items() for key in part}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    got = load_target(folder, dtype=torch.float32).model.state_dict()
    assert got.keys() == expected.keys() and all(torch.equal(got[key], expected[key]) for key in got)
    (folder / "b.bin").unlink()
    with pytest.raises(ValueError, match=r"lacks shards.*: b\.bin"):
        load_target(folder)


def test_weights_that_do_not_fit_are_named(folder):
    def change(tensors):
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(16)
        del tensors["model.norm.weight"]
        tensors["lm_head.weight"] = torch.zeros(49, 16)

    change_weights(folder, change)
    with pytest.raises(ValueError) as caught:
        load_target(folder)
    message = str(caught.value)
    assert "unexpected model.layers.0.self_attn.q_proj.bias [16]" in message
    assert "missing model.norm.weight" in message
    assert "lm_head.weight has shape [49, 16], the configuration says [50, 16]" in message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "gpt2"}, "gpt2.*supported: llama .*mistral .*qwen2 .*qwen3"),
        ({"model_type": "made-up"}, "made-up.*supported: llama"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "rope_type is 'proportional'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rot"),
        ({"rope_condense_ratio": 4, "rope_parameters": {"rope_type": "linear", "factor": 8.0}}, "rope_condense_ratio"),
    ],
)
def test_unsupported_is_refused_by_name(folder, values, message):
    change_config(folder, **values)
    with pytest.raises(ValueError, match=message):
        load_target(folder)


def test_unknown_layer_types_are_refused():
    config = Qwen3Config(**SHAPE)
    config.sliding_window, config.layer_types = 8, ["full_attention", "chunked_attention"]
    with pytest.raises(ValueError, match="chunked_attention"):
        decoder_config(config)
    with pytest.raises(ValueError, match="gpt2"):
        decoder_config(GPT2Config())


def test_folder_without_weights_or_config(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no weights"):
        load_target(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json or exactly one \.gguf"):
        load_target(folder)


def test_longchat_condense_ratio_is_linear_scaling():
    """The first LongChat releases carry `rope_condense_ratio`, the later ones linear `rope_scaling`."""
    old = decoder_config(LlamaConfig(**SHAPE, rope_condense_ratio=8))
    new = decoder_config(LlamaConfig(**SHAPE, rope_scaling={"type": "linear", "factor": 8.0}))
    assert old.rope.type == new.rope.type == "linear" and old.rope.parameters["factor"] == 8.0
    assert old.max_positions == new.max_positions == 512


LINEAR, YARN = {"type": "linear", "factor": 4.0}, {"type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("length", "scaling", "others", "positions"),
    [
        (4096, None, {}, 4096),
        (4096, None, {"max_sequence_length": 16384}, 4096),  # nothing scales to it
        (4096, LINEAR, {"max_sequence_length": 16384}, 16384),
        (4096, LINEAR, {}, 16384),
        (2048, {"type": "linear", "factor": 2.5}, {}, 5120),
        (16384, LINEAR | {"original_max_position_embeddings": 4096}, {}, 16384),
        (4096, {"type": "dynamic", "factor": 2.0}, {}, 8192),
        (131072, {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}, {}, 131072),
        (40960, YARN | {"original_max_position_embeddings": 32768}, {}, 131072),
        (32768, YARN, {}, 131072),  # its original is then max_position_embeddings, to transformers too
        (131072, YARN | {"original_max_position_embeddings": 4096}, {}, 131072),
        (131072, LLAMA3 | {"original_max_position_embeddings": 8192}, {}, 131072),
        (131072, LONGROPE | {"original_max_position_embeddings": 4096}, {}, 131072),
    ],
)
def test_positions_are_what_the_scaling_gives(length, scaling, others, positions):
    shape = SHAPE | {"max_position_embeddings": length}
    config = decoder_config(LlamaConfig(**shape, rope_scaling=scaling, **others))
    assert config.max_positions == positions
    assert config.rope.max_positions == length  # which is transformers' own for the frequencies


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_sequence_length": "16k"}, "max_sequence_length is '16k'; config.json must say a number of positions"),
        ({"max_sequence_length": 0}, "max_sequence_length is 0"),
        ({"rope_scaling": LINEAR | {"factor": 0.5}}, "factor is 0.5; config.json must say a number of at least 1"),
        ({"rope_scaling": LINEAR | {"factor": float("nan")}}, "factor is nan"),
        ({"rope_scaling": LINEAR | {"factor": "four"}}, "factor is 'four'"),
    ],
)
def test_a_scaling_without_a_number_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        decoder_config(LlamaConfig(**SHAPE | {"rope_scaling": LINEAR} | values))


def test_positions_can_be_overridden(folder):
    own, more = load_target(folder), load_target(folder, max_positions=1000)
    assert (own.model.config.max_positions, more.model.config.max_positions) == (64, 1000)
    assert read_target_config(folder, max_positions=1000) == more.model.config
    assert own.fingerprint == more.fingerprint  # it computes the same, and drafts serve both
    with pytest.raises(ValueError, match="max_positions: 0; give 1 or more"):
        load_target(folder, max_positions=0)


def test_released_rope_fields_are_understood():
    """YaRN-Llama-2 and Llama 3.1 as their config.json files write it (`type` and `rope_type`)."""
    yarn = {"factor": 32.0, "original_max_position_embeddings": 4096, "type": "yarn", "finetuned": True}
    assert decoder_config(LlamaConfig(**SHAPE, rope_scaling=yarn)).rope.parameters["factor"] == 32.0
    llama3 = {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }  # fmt: skip
    config = decoder_config(LlamaConfig(**SHAPE, rope_theta=500000.0, rope_scaling=llama3))
    assert config.rope.type == "llama3" and config.rope.parameters["rope_theta"] == 500000.0


def test_sliding_windows_follow_the_family():
    assert decoder_config(MistralConfig(**SHAPE)).sliding_windows == (4096, 4096)
    assert decoder_config(MistralConfig(**SHAPE, sliding_window=None)).sliding_windows is None
    with pytest.raises(ValueError, match="sliding_window: 0; give at least 1, or null"):
        decoder_config(MistralConfig(**SHAPE, sliding_window=0))
    assert decoder_config(Qwen2Config(**SHAPE)).sliding_windows is None
    used = Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=32, max_window_layers=1)
    assert decoder_config(used).sliding_windows == (None, 32)


def test_fingerprint_covers_configuration_and_tokenizer(folder, smollm2):
    before = load_target(folder).fingerprint
    assert load_target(folder).fingerprint == before
    change_config(folder, rms_norm_eps=1e-4)
    assert load_target(folder).fingerprint["config"] != before["config"]
    assert config_hash({"a": 1, "b": [2]}) == config_hash({"b": [2], "a": 1}) != config_hash({"a": 1, "b": [3]})
    tokenizer, recorded = smollm2.tokenizer, smollm2.fingerprint["tokenizer"]
    tokenizer(["a", "a longer text"], padding=True, truncation=True, max_length=2)
    assert tokenizer_hash(tokenizer) == recorded, "a padded call must not change the fingerprint"
    tokenizer.add_tokens(["<new>"])
    assert tokenizer_hash(tokenizer) != recorded


def tiny_model(kind: str, **values):
    """A random transformers model whose tensors are all far from their initial values."""
    config = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}[kind]
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config(**SHAPE | values)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.3)
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@torch.no_grad()
def test_a_loaded_transformers_model_becomes_a_target(kind, tied, tmp_path):
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


def test_memory_is_shared_but_for_the_fused_tensors():
    model = tiny_model("llama").to(torch.bfloat16)
    target = target_from_transformers(model)
    theirs = {p.data_ptr() for p in model.parameters()}
    copied = [name for name, p in target.model.named_parameters() if p.data_ptr() not in theirs]
    assert {name.split(".", 2)[-1] for name in copied} == {"attention.qkv_proj.weight", "mlp.gate_up_proj.weight"}
    assert {p.dtype for p in target.model.parameters()} == {torch.bfloat16}


@torch.no_grad()
def test_refresh_takes_over_every_way_of_writing_weights():
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
def test_after_a_refresh_a_prompt_of_one_token_reads_the_new_weights():
    """It has no wide pass, before which addresses are looked up anew."""
    model, params = tiny_model("llama"), SamplingParams(max_new_tokens=12, ignore_eos=True)
    target = target_from_transformers(model)
    engine = Engine(target)
    before = engine.generate([[5]], params)[0].tokens
    for layer in model.model.layers:
        for product in (layer.self_attn.o_proj, layer.mlp.down_proj):
            product.weight = torch.nn.Parameter(torch.randn_like(product.weight))
    refresh(target, model)
    after = engine.generate([[5]], params)[0].tokens
    assert after == Engine(target_from_transformers(model)).generate([[5]], params)[0].tokens != before


@torch.no_grad()
def test_a_tied_checkpoint_may_carry_the_embedding_twice_and_no_other_head(tmp_path):
    model = tiny_model("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    for name in ("lm_head.weight", "language_model.lm_head.weight"):
        save_file(tensors | {name: embedding.clone()}, tmp_path / "model.safetensors", {"format": "pt"})
        ids = torch.arange(10)[None]
        assert error(load_target(tmp_path, torch.float32).model(Pass(ids)).logits, model(ids).logits) < 1e-5
        save_file(tensors | {name: embedding + 0.01}, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=r"lm_head.weight is not the embedding: tie_word_embeddings must be false"):
            load_target(tmp_path, torch.float32)


@torch.no_grad()
def test_transformers_models_that_cannot_be_targets_are_refused():
    with pytest.raises(ValueError, match="gpt2"):
        target_from_transformers(AutoModelForCausalLM.from_config(GPT2Config(n_embd=8, n_layer=1, n_head=1)))
    model = tiny_model("llama")
    model.model.norm.to(torch.float64)
    with pytest.raises(ValueError, match=r"float32 on cpu, torch.float64 on cpu; bring them to one dtype"):
        target_from_transformers(model)
    with pytest.raises(ValueError, match="meta; bring them to one dtype and device"):
        target_from_transformers(tiny_model("llama").to("meta"))
    with pytest.raises(ValueError, match=r"missing model\.layers\.0"):
        target_from_transformers(tiny_model("llama").model)
    model = tiny_model("llama", tie_word_embeddings=True)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight + 1)
    with pytest.raises(ValueError, match="tie_word_embeddings is True, but"):
        target_from_transformers(model)


def test_a_targets_place_is_found_from_every_folder(tmp_path, monkeypatch):
    """And its name stays one, whatever folder is called so."""
    monkeypatch.chdir(tmp_path)
    for folder in ("models/tiny", "smollm2-135m"):
        (tmp_path / folder).mkdir(parents=True)
    assert lasting_name("models/tiny") == str(tmp_path.resolve() / "models" / "tiny")
    assert [lasting_name(name) for name in ("smollm2-135m", "org/name")] == ["smollm2-135m", "org/name"]
