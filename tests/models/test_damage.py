"""A file of a target or draft that is damaged is named, whichever it is and whoever reads it."""

import argparse
import errno
import json
import shutil
from io import BytesIO

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentencepiece import SentencePieceTrainer

from longdraft.models.files import damage_named
from longdraft.models.hf import load_target, load_through_transformers, load_tokenizer

TEXT = argparse.__doc__ + argparse.ArgumentParser.__doc__
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345678\n"
DAMAGES = {
    "pointer": lambda content: POINTER,
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
# By form: the files that are read of a target.
READ = {
    "safetensors": (
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ),
    "sharded": ("model.safetensors.index.json", *SHARDS),
    "bin": ("pytorch_model.bin",),
    "sentencepiece": ("tokenizer.model", "tokenizer_config.json"),
    "gguf": ("model.gguf",),
}  # fmt: skip
CASES = [(form, file, damage) for form, files in READ.items() for file in files for damage in ("pointer", "half")]
CASES += [("safetensors", "model.safetensors", "empty")]


@pytest.fixture(scope="module")
def whole(shared, tmp_path_factory):
    """A folder of each form."""
    root = tmp_path_factory.mktemp("whole")
    first = shared("tiny_checkpoint.py").save(root / "safetensors", TEXT, 290)
    tensors = load_file(first / "model.safetensors")
    for form in ("sharded", "bin", "sentencepiece"):
        shutil.copytree(first, root / form)
    for form in ("sharded", "bin"):
        (root / form / "model.safetensors").unlink()
    torch.save(tensors, root / "bin" / "pytorch_model.bin")
    index = {name: SHARDS[i % 2] for i, name in enumerate(tensors)}
    (root / "sharded" / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    for shard in SHARDS:
        save_file({name: tensors[name] for name in tensors if index[name] == shard}, root / "sharded" / shard)
    (root / "sentencepiece" / "tokenizer.json").unlink()
    model = BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()), model_writer=model, vocab_size=330, model_type="bpe",
        byte_fallback=True, minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    (root / "sentencepiece" / "tokenizer.model").write_bytes(model.getvalue())
    (root / "sentencepiece" / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    (root / "gguf").mkdir()
    writer = gguf.GGUFWriter(root / "gguf" / "model.gguf", "llama")
    writer.add_token_list(["a"] * 500)
    writer.add_tensor("token_embd.weight", tensors["model.embed_tokens.weight"].numpy())
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return root


@pytest.mark.parametrize(("form", "file", "damage"), CASES)
def test_a_damaged_file_is_named(whole, tmp_path, form, file, damage):
    folder = shutil.copytree(whole / form, tmp_path / "model")
    path = folder / file
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    if damage == "half" and file == "tokenizer_config.json":
        path.write_bytes(b'{"tokenizer_class"')
    for read in (load_target, load_through_transformers, *([load_tokenizer] if "tokenizer" in file else [])):
        with pytest.raises(ValueError, match="fetch it again") as caught:
            read(folder)
        weights = read is load_through_transformers and "model" in file and "tokenizer" not in file
        assert str(folder if weights else path) in str(caught.value) and "\n" not in str(caught.value)
        assert weights or "weights_only" not in str(caught.value)


@pytest.mark.parametrize("form", ["safetensors", "sharded", "bin", "sentencepiece"])
def test_whole_ones_load(whole, form):
    for load in (load_target, load_through_transformers):
        assert load(whole / form, torch.float32).tokenizer is not None


def test_what_is_not_there_is_named(whole, tmp_path):
    """As a download that was broken off leaves it."""
    folder = shutil.copytree(whole / "sharded", tmp_path / "model")
    (folder / SHARDS[1]).rename(folder / f"{SHARDS[1]}.incomplete")
    for load in (load_target, load_through_transformers):
        with pytest.raises(ValueError, match=SHARDS[1]):
            load(folder)
    (folder / SHARDS[1]).mkdir()  # nor can it be read
    with pytest.raises(ValueError, match=SHARDS[1]):
        load_target(folder)


@pytest.mark.parametrize(
    ("error", "expected", "is_damage"),
    [
        (ImportError("no package tiktoken"), ImportError, False),
        (MemoryError(), MemoryError, False),
        (PermissionError(errno.EACCES, "Permission denied"), ValueError, False),
        (OSError(errno.EMFILE, "Too many open files"), ValueError, False),
        (FileNotFoundError(errno.ENOENT, "No such file"), ValueError, True),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory"), ValueError, True),
        (OSError("not a valid JSON file"), ValueError, True),
    ],
)
def test_only_damage_is_to_be_fetched_again(tmp_path, error, expected, is_damage):
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(expected) as caught, damage_named(tmp_path / "a.json"):
        raise error
    assert (caught.value is error) == (expected is not ValueError)
    assert ("fetch it again" in str(caught.value)) == is_damage
    assert expected is not ValueError or (str(error.args[-1]) in str(caught.value) and "a.json" in str(caught.value))


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_in_a_folder_is_not_run(whole, tmp_path, file):
    folder = shutil.copytree(whole / "safetensors", tmp_path / "model")
    (folder / "own.py").write_text(f"open({str(tmp_path / 'proof')!r}, 'w')\n")
    of_config = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    of_tokenizer = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    content = json.loads((folder / file).read_text()) | (of_config if file == "config.json" else of_tokenizer)
    (folder / file).write_text(json.dumps(content))
    for load in (load_target, load_through_transformers):
        with pytest.raises(ValueError, match=f"{file}|model_type 'own'"):
            load(folder)
    assert not (tmp_path / "proof").exists()
