"""Which tokens end a text: what files, tokenizer and chat template say, and where they say nothing."""

from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from longdraft.models.hf import load_target, load_through_transformers, target_from_transformers
from longdraft.models.special_tokens import chat_end, end_tokens, special_tokens

TEMPLATES = Path(__file__).resolve().parents[2] / "configs" / "chat_templates"
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>"]
SPECIAL += ["<|return|>", "<|end|>", "<|end|>!", "<\uff5cend▁of▁sentence\uff5c>"]
WORDS = ["a", "<stop>", "<plain>"]
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
GEMMA = (
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
)
# An earlier answer ends otherwise than the last one, as gpt-oss's.
HARMONY = "{% for m in messages %}{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}{% endfor %}"
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}"


def tokenizer_of(template: str | None = None, eos: str | None = "</s>") -> PreTrainedTokenizerFast:
    """A tokenizer with ids in the order of SPECIAL and WORDS, of which <plain> is added without being special."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*SPECIAL, *WORDS])}, unk_token="a"))
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    backend.add_tokens([AddedToken("<plain>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, bos_token="<s>", chat_template=template)


def test_special_tokens_are_those_that_are_no_text():
    assert special_tokens(tokenizer_of()) == dict(enumerate(SPECIAL))


@pytest.mark.parametrize(
    ("template", "end"),
    [
        ("llama-3", "<|eot_id|>"),
        ("llama-3.1", "<|eot_id|>"),
        ("qwen2.5", "<|im_end|>"),
        ("qwen3", "<|im_end|>"),
        ("qwq", "<|im_end|>"),
        ("smollm2", "<|im_end|>"),
        ("vicuna", "</s>"),
        ("deepseek-r1", "<\uff5cend▁of▁sentence\uff5c>"),
        (CHATML, "<|im_end|>"),
        (GEMMA, "<end_of_turn>"),
        (HARMONY, "<|return|>"),
        (PLAIN + " </s>{% endfor %}", "</s>"),
        (PLAIN + "<|end|>!{% endfor %}", "<|end|>!"),  # the longer of two tokens
        (PLAIN + "<stop>\n</s>{% endfor %}", "</s>"),
        (PLAIN + "<stop>{% endfor %}", None),  # ordinary text
        (PLAIN + "<plain>{% endfor %}", None),  # added, but text
        (PLAIN + "\n{% endfor %}", None),
        ("<s>{% for m in messages %}{{ m.role }}</s>{% endfor %}", None),  # no content
        ("{{ raise_exception('no') }}", None),
        ("{{ messages[7].content }}", None),
        ("{% if %}", None),
        (None, None),
    ],
)
def test_the_end_of_a_chats_answer(template, end):
    if template is not None and (file := TEMPLATES / f"{template}.jinja").exists():
        template = file.read_text()
    tokenizer = tokenizer_of(template)
    expected = None if end is None else SPECIAL.index(end)
    assert chat_end(tokenizer) == expected
    if template:
        assert chat_end(tokenizer_of(), template) == expected, "another template in place of its own"


@pytest.mark.parametrize(
    ("generation", "config", "eos", "template", "ends"),
    [
        (None, 1, None, None, (1,)),
        (None, [1, 4], None, None, (1, 4)),
        ([7, 4], None, None, None, (4, 7)),
        (4, 1, "<|im_end|>", None, (1, 3, 4)),
        (1, [1, 4, 8], "</s>", None, (1, 4, 8)),
        (0, 0, "<|im_end|>", CHATML, (0, 3)),  # a fine-tuned chat model
        (1, 1, "</s>", GEMMA, (1, 6)),
        (1, 1, "</s>", PLAIN + "<plain>{% endfor %}", (1,)),
        (1, [12, 11], "</s>", None, (1,)),  # words, such as a configuration class's default
        (None, 12, "</s>", None, (1,)),
        (None, 12, None, None, (12,)),  # nothing else is known
        ([12], None, None, None, (12,)),
        ([99, -1], 98, "</s>", None, (1,)),  # no tokens of this model
        (None, None, None, None, ()),
    ],
)
def test_ends_are_those_of_all_sources(generation, config, eos, template, ends):
    hf_config = LlamaConfig(vocab_size=20, eos_token_id=config)
    assert end_tokens(hf_config, generation, tokenizer_of(template, eos)) == ends


def test_every_way_to_a_target_finds_them(sizes, tmp_path):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=0))
    model.generation_config.eos_token_id = [0, 4]
    model.save_pretrained(tmp_path)
    tokenizer_of(eos="<|im_end|>").save_pretrained(tmp_path)
    before = load_target(tmp_path).fingerprint
    tokenizer_of(GEMMA, eos="<|im_end|>").save_pretrained(tmp_path)
    targets = [load(tmp_path) for load in (load_target, load_through_transformers)]
    targets.append(target_from_transformers(model, targets[0].tokenizer))
    for target in targets:
        assert target.eos_token_ids == (0, 3, 4, 6)
        assert {key: target.fingerprint[key] for key in before} == before, "a draft's target stays the same"
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    assert load_target(tmp_path).eos_token_ids == (0, 4)
