"""A chat's end token that only the tokenizer or only the chat template names ends answers."""

import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from longdraft.launch.generate import main as generate
from longdraft.launch.regenerate import main as regenerate

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ANSWER = ["so", "it", "is"]


def chat_model(folder, eos: str, template: str | None):
    """A model that answers "so it is", then its chat's end token, and after that the same again. Its configuration
    still has the end token of the base model."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*SPECIAL, *letters, *(f"Ġ{word}" for word in ANSWER)]
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, chat_template=template)
    fast.save_pretrained(folder)
    heads = {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 64}
    shape = {"hidden_size": 320, "intermediate_size": 32, "num_hidden_layers": 1, "tie_word_embeddings": False}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(fast), eos_token_id=0, **shape, **heads))
    so, it, is_ = fast.convert_tokens_to_ids([f"Ġ{word}" for word in ANSWER])
    follows = {so: it, it: is_, is_: 2}
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            weight.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight[:, : len(fast)] = torch.eye(len(fast))
        for token in range(len(fast)):
            model.lm_head.weight[follows.get(token, so), token] = 1.0
    model.save_pretrained(folder)


@pytest.mark.parametrize(
    ("eos", "template", "given"),
    [("<|im_end|>", TEMPLATE, None), ("<|endoftext|>", TEMPLATE, None), ("<|endoftext|>", None, TEMPLATE)],
)
def test_an_answer_ends_with_its_chats_end_token(tmp_path, capsys, eos, template, given):
    chat_model(tmp_path / "target", eos, template)
    target = ["--target", str(tmp_path / "target"), "--dtype", "fp32", "--device", "cpu"]
    if template is not None:
        assert generate([*target, "--chat", "--prompt", "well?", "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert (answer["text"], len(answer["tokens"]), answer["finish_reason"]) == (" so it is", 4, "stop")
    if given is not None:
        (tmp_path / "template.jinja").write_text(given)
        target += ["--chat-template", str(tmp_path / "template.jinja")]
    (tmp_path / "asked.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "well?"}]}))
    asked = ["--source", str(tmp_path / "asked.jsonl"), "--out", str(tmp_path / "out")]
    assert regenerate([*target, *asked, "--max-new-tokens", "20"]) == 0
    (part,) = (tmp_path / "out").rglob("*.jsonl")
    assert json.loads(part.read_text())["messages"][-1] == {"role": "assistant", "content": "so it is"}
