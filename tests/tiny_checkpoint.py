"""A tiny real checkpoint in Hugging Face's format, for tests that load a folder."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|end|>"


def save(
    folder: Path,
    text: str,
    vocab_size: int,
    *,
    seed: int = 0,
    chat_template: str | None = None,
    ends: float = 1.0,
    positions: int = 2048,
    ascii: bool = False,
) -> Path:
    """Save a random model of two layers and a byte-level BPE tokenizer trained on the text. Token 0 ends a text; a
    larger `ends` makes it more likely. ascii: no token holds a part of a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = [
        letter for letter in pre_tokenizers.ByteLevel.alphabet() if not ascii or letter.isascii() or letter == "Ġ"
    ]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([text], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, chat_template=chat_template)
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "max_position_embeddings": positions}
    config = LlamaConfig(vocab_size=len(fast), eos_token_id=0, initializer_range=0.3, **shape)
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data[0] *= ends
    model.save_pretrained(folder)
    return folder
