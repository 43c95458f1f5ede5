"""A tiny real checkpoint for the commands that decode."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A random model whose tokenizer splits many characters into bytes, in Hugging Face's form."""
    folder = tmp_path_factory.mktemp("generate")
    text = "the cat sat on the mat and the dog sat on the log. " * 40 + "naïve 世界 🙂 "
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([text], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=TEMPLATE)
    fast.save_pretrained(folder)
    torch.manual_seed(3)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(fast), num_key_value_heads=2, eos_token_id=0, initializer_range=0.3, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
