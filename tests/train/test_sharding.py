"""The target under ZeRO-3 against the replicated one, on two ranks and on one: real processes over gloo."""

import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
)

from longdraft.models.hf import load_target

N_LAYERS, VOCAB = 3, 97
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CASES = [(1, "fp32"), (2, "fp32"), (2, "bf16")]
ROWS = [
    {"tokens": [i * 31 % VOCAB for i in range(24)], "borders": [0, 5, 16, 24], "positions": None, "chunk": None},
    {
        "tokens": [i * 17 % VOCAB for i in range(19)],
        "borders": [0, 19],
        "positions": [*range(4), *range(50, 65)],
        "chunk": 7,
    },
]
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
GEMMA = {"sliding_window": 6, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
GPT_OSS = {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 6, "rope_parameters": {
    "rope_type": "default", "rope_theta": 1e4,
}}  # fmt: skip
QWEN3_5 = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5,
}  # fmt: skip
OTHERS = {
    "experts": (Qwen3MoeConfig, EXPERTS), "gemma3": (Gemma3TextConfig, GEMMA), "gpt_oss": (GptOssConfig, GPT_OSS),
    "qwen3_5": (Qwen3_5TextConfig, QWEN3_5),
}  # fmt: skip
SLACK = 4096  # bytes beside the weights: RoPE's tables


def model_folder(saved_model, folder: Path, family=LlamaConfig, **options) -> Path:
    """A Llama whose weights do not divide by two: norms of 33 values, so that shares are padded."""
    sizes = dict(hidden_size=33, intermediate_size=96, num_attention_heads=3, num_key_value_heads=1, head_dim=8)
    config = family(vocab_size=VOCAB, num_hidden_layers=N_LAYERS, tie_word_embeddings=False, **sizes, **options)
    saved_model(folder, config, 11)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory, saved_model) -> Path:
    return model_folder(saved_model, tmp_path_factory.mktemp("sharding") / "target")


@pytest.fixture(scope="module")
def results(folder, saved_model, start_ranks, finish_ranks):
    """`results(name, n_ranks)`: what each rank saved under that name."""
    out = folder.parent
    started = []
    for n_ranks, dtypes in ((1, ["fp32"]), (2, ["fp32", "bf16"])):
        actions = [
            {kind: str(folder), "dtype": dtype, "out": str(out / f"{kind}-{dtype}-{n_ranks}"), "rows": ROWS}
            for dtype in dtypes
            for kind in ("weights", "pass")
        ]
        if n_ranks == 2:
            for name, (family, fields) in OTHERS.items():
                other = str(model_folder(saved_model, out / name, family, **fields))
                for kind in ("weights", "pass"):
                    to = str(out / f"{kind}-{name}-2")
                    actions.append({kind: other, "dtype": "fp32", "out": to, "rows": ROWS})
        started.append(start_ranks(n_ranks, actions, "ranks_target.py"))
    for processes in started:
        finish_ranks(processes)

    def load(name: str, n_ranks: int) -> list:
        return [torch.load(out / f"{name}-{n_ranks}-{rank}.pt") for rank in range(n_ranks)]

    return load


ALL = [*CASES, *((2, name) for name in OTHERS)]


@pytest.mark.parametrize(("n_ranks", "name"), ALL)
def test_gathered_weights_are_the_files(results, folder, n_ranks, name):
    place, dtype = (folder.parent / name, torch.float32) if name in OTHERS else (folder, DTYPES[name])
    expected = dict(load_target(place, dtype).model.named_parameters())
    for rank in results(f"weights-{name}", n_ranks):
        assert rank["weights"].keys() == expected.keys()
        for key, weight in expected.items():
            assert torch.equal(rank["weights"][key], weight), key
            assert rank["between"][key] == (0 if key.startswith("layers.") else weight.numel()), key


@pytest.mark.parametrize(("n_ranks", "name"), ALL)
def test_a_pass_gives_what_the_replicated_target_gives(results, n_ranks, name):
    for rank in results(f"pass-{name}", n_ranks):
        assert len(rank["outputs"]) == len(rank["expected"]) == 6
        for got, expected in zip(rank["outputs"], rank["expected"], strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=0)
        sharded, replicated = rank["fingerprints"]
        assert sharded == replicated and sharded["tokenizer"] != "none" and len(sharded["weights"]) == 64


@pytest.mark.parametrize(("n_ranks", "dtype"), CASES)
def test_no_rank_holds_more_than_its_share(results, folder, n_ranks, dtype):
    """Before and after passes. During one, also one whole layer and the next one on its way."""
    model = load_target(folder, DTYPES[dtype]).model
    size = DTYPES[dtype].itemsize
    whole = size * sum(p.numel() for name, p in model.named_parameters() if not name.startswith("layers."))
    layers = [[p.numel() for p in layer.parameters()] for layer in model.layers]
    share = size * sum(math.ceil(n / n_ranks) for layer in layers for n in layer)
    for rank in results(f"pass-{dtype}", n_ranks):
        assert share + whole <= rank["loaded"] <= share + whole + SLACK
        assert share + whole <= rank["held"] <= share + whole + SLACK
        assert len(rank["seen"]) == N_LAYERS * 6
        for i, seen in enumerate(rank["seen"]):
            is_last = i % N_LAYERS == N_LAYERS - 1
            assert seen["AVAILABLE"] == 1 and seen.get("INFLIGHT", 0) == (0 if is_last else 1)
            assert seen["whole"] == 1 or n_ranks == 1  # one rank's share is the layer itself
