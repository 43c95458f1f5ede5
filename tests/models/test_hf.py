"""Loading: the real small target, what is refused and how, and what a fingerprint covers."""

import argparse
import json
from io import BytesIO
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from transformers import AutoModelForCausalLM, LlamaConfig

from longdraft.models.fingerprint import json_hash, tokenizer_hash, weights_hash
from longdraft.models.hf import lasting_name, load_target, read_target_config
from longdraft.models.hf_weights import places
from longdraft.models.passes import Pass

NAME = "smollm2-135m"


@pytest.fixture(scope="module")
def smollm2():
    return load_target(NAME, dtype=torch.float32)


@torch.no_grad()
def test_smollm2_on_real_text(smollm2, tmp_path, error):
    """transformers with the same tensors gives the same states on real text, and the text is likely. Of a GGUF file and
    safetensors, in fp32 and bf16, the hash of the weights is the same."""
    parameters = dict(smollm2.model.named_parameters())
    tensors = {name: parameters[p.parameter][p.start : p.stop] for name, p in places(smollm2.model.config).items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    smollm2.hf_config.save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert weights_hash(load_target(tmp_path, torch.bfloat16).model) == weights_hash(smollm2.model)
    ids = torch.tensor([smollm2.tokenizer(argparse.ArgumentParser.__doc__ + argparse.__doc__).input_ids[:400]])
    assert ids.shape[1] == 400
    expected = theirs(ids, output_hidden_states=True)
    out = smollm2.model(Pass(ids, needs={"logits", "post_norm", "last_kv"}))
    assert error(out.logits, expected.logits) < 1e-5
    assert error(out.post_norm, expected.hidden_states[-1]) < 1e-5
    for index, of_layer in enumerate(out.last_kv):
        stored = expected.past_key_values.layers[-1]
        assert error(of_layer.transpose(1, 2), (stored.keys, stored.values)[index]) < 1e-5
    loss = torch.nn.functional.cross_entropy(out.logits[0, :-1], ids[0, 1:])
    assert loss < 3.5, f"{loss:.2f} nats a token: the weights are not in their places"


@pytest.fixture
def folder(sizes, tmp_path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**sizes)).save_pretrained(tmp_path)
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
    """lmsys publish Vicuna and LongChat so; the ids are those of sentencepiece itself."""
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
    assert ours.chat_template is None
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "a processor's"}))
    assert load_target(folder).tokenizer.chat_template == "a processor's"
    (folder / "chat_template.jinja").write_text("the tokenizer's")
    assert load_target(folder).tokenizer.chat_template == "the tokenizer's"


def test_pytorch_bin_files_load(folder):
    expected = load_target(folder, dtype=torch.float32).model.state_dict()
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    half = len(tensors) // 2
    parts = {"a.bin": dict(list(tensors.items())[:half]), "b.bin": dict(list(tensors.items())[half:])}
    for name, part in parts.items():  # one in the form before PyTorch 1.6
        torch.save(part, folder / name, _use_new_zipfile_serialization=name == "a.bin")
    index = {"weight_map": {key: name for name, part in parts.items() for key in part}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    got = load_target(folder, dtype=torch.float32).model.state_dict()
    assert got.keys() == expected.keys() and all(torch.equal(got[key], expected[key]) for key in got)


def test_weights_that_do_not_fit_are_named(folder):
    def change(tensors):
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(16)
        del tensors["model.norm.weight"]
        tensors["lm_head.weight"] = torch.zeros(49, 16)

    change_weights(folder, change)
    with pytest.raises(ValueError) as caught:
        load_target(folder)
    message = str(caught.value)
    assert "unexpected model.layers.0.self_attn.q_proj.bias [16]" in message
    assert "missing model.norm.weight" in message
    assert "lm_head.weight has shape [49, 16], the configuration says [50, 16]" in message


def test_an_unknown_family_is_refused_by_name(folder):
    change_config(folder, model_type="made-up")
    with pytest.raises(ValueError, match=r"config\.json.*made-up"):
        load_target(folder)


def test_folder_without_weights_or_config(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no weights"):
        load_target(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json or exactly one \.gguf"):
        load_target(folder)


def test_positions_can_be_overridden(folder):
    own, more = load_target(folder), load_target(folder, max_positions=1000)
    assert (own.model.config.max_positions, more.model.config.max_positions) == (64, 1000)
    assert read_target_config(folder, max_positions=1000) == more.model.config
    assert own.fingerprint == more.fingerprint  # it computes the same, and drafts serve both
    with pytest.raises(ValueError, match="max_positions: 0"):
        load_target(folder, max_positions=0)


def test_fingerprint_covers_configuration_and_tokenizer(folder, smollm2):
    before = load_target(folder).fingerprint
    assert load_target(folder).fingerprint == before
    change_config(folder, rms_norm_eps=1e-4)
    assert load_target(folder).fingerprint["config"] != before["config"]
    assert json_hash({"a": 1, "b": [2]}) == json_hash({"b": [2], "a": 1}) != json_hash({"a": 1, "b": [3]})
    tokenizer, recorded = smollm2.tokenizer, smollm2.fingerprint["tokenizer"]
    tokenizer(["a", "a longer text"], padding=True, truncation=True, max_length=2)
    assert tokenizer_hash(tokenizer) == recorded, "a padded call must not change the fingerprint"
    tokenizer.add_tokens(["<new>"])
    assert tokenizer_hash(tokenizer) != recorded


def test_a_targets_place_is_found_from_every_folder(tmp_path, monkeypatch):
    """A bundled name stays a name, even if a folder is called so."""
    monkeypatch.chdir(tmp_path)
    for folder in ("models/tiny", "smollm2-135m"):
        (tmp_path / folder).mkdir(parents=True)
    assert lasting_name("models/tiny") == str(tmp_path.resolve() / "models" / "tiny")
    assert [lasting_name(name) for name in ("smollm2-135m", "org/name")] == ["smollm2-135m", "org/name"]
