"""A row on two ranks, and another on two others, by Ulysses against the same rows on one: real processes over gloo."""

from pathlib import Path

import pytest
import torch
from transformers import GptOssConfig, LlamaConfig, MistralConfig

from longdraft.models.hf_config import decoder_config
from longdraft.train.sequence_parallel import check_heads

VOCAB, DEGREE, N_RANKS = 89, 2, 4
SIZES = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=16, tie_word_embeddings=False,
)  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SINKS = GptOssConfig(num_local_experts=3, num_experts_per_tok=2, sliding_window=6, rope_parameters=ROPE, **SIZES)
TARGETS = {
    "plain": LlamaConfig(**SIZES),
    "window": MistralConfig(sliding_window=6, **SIZES),
    "dynamic": LlamaConfig(rope_parameters=DYNAMIC, **SIZES),
    "sinks": SINKS,
}


def row(n: int, borders: list[int], positions: list[int] | None = None, chunk: int | None = None) -> dict:
    tokens = [i * 37 % VOCAB for i in range(n)]
    return {"tokens": tokens, "borders": borders, "positions": positions, "chunk": chunk}


ROWS = {
    "pieces across the split": row(24, [0, 5, 16, 24]),  # rows 12 and 13 are one piece's
    "uneven, with jumps, in chunks": row(23, [0, 9, 23], [*range(9), *range(4), *range(40, 50)], chunk=5),
    "one piece": row(33, [0, 33]),
    "pieces that end at the split": row(10, [0, 5, 10], chunk=3),
    "one token": row(1, [0, 1]),
}
CASES = {
    "plain": {"folder": "plain", "stage": 0, "sequence": DEGREE},
    "window": {"folder": "window", "stage": 0, "sequence": DEGREE},
    "dynamic": {"folder": "dynamic", "stage": 0, "sequence": DEGREE},
    "sinks": {"folder": "sinks", "stage": 0, "sequence": DEGREE},
    "sharded": {"folder": "window", "stage": 3, "sequence": DEGREE},
    "alone": {"folder": "window", "stage": 0, "sequence": 1},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory, saved_model, start_ranks, finish_ranks) -> dict[str, list]:
    """What each rank got, by case."""
    out: Path = tmp_path_factory.mktemp("sequence")
    for name, config in TARGETS.items():
        saved_model(out / name, config, 5)
    shared = {"dtype": "fp32", "rows": list(ROWS.values())}
    actions = [
        case | shared | {"folder": str(out / case["folder"]), "out": str(out / f"case-{name}")}
        for name, case in CASES.items()
    ]
    finish_ranks(start_ranks(N_RANKS, actions, "ranks_target.py"))
    return {name: [torch.load(out / f"case-{name}-{rank}.pt") for rank in range(N_RANKS)] for name in CASES}


def assert_same(got, expected, name: str) -> None:
    """Equal to within 1e-6 of the largest value: a product of fewer rows is summed in another order."""
    if isinstance(expected, tuple):
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other, name)
    elif expected is None:
        assert got is None, name
    else:
        assert got.shape == expected.shape, name
        if expected.numel():
            error, largest = (got - expected).abs().max().item(), expected.abs().max().item()
            assert error <= 1e-6 * max(1, largest), f"{name}: {error} of {largest}"


@pytest.mark.parametrize("case", CASES)
def test_ranks_together_give_what_one_gives(results, case):
    """K and V of all tokens on every rank; hidden states and logits of each rank's own tokens."""
    degree = CASES[case]["sequence"]
    for rank, result in enumerate(results[case]):
        assert (result["rank"], result["size"]) == (rank % degree, degree)
        assert len(result["passes"]) == 3 * len(ROWS)
        for (start, stop), got, expected, gathered in result["passes"]:
            for name, field in expected.items():
                if name != "last_kv" and field is not None:
                    field = field[:, start:stop]
                assert_same(got[name], field, name)
            if gathered is not None:
                assert_same(gathered, expected["post_norm"], "post_norm, gathered")


def test_a_wrong_neighbour_would_be_seen(results):
    """The compared values depend on the other rank's tokens: the window and the borders matter."""
    plain, window = (results[case][1]["passes"][0][1]["pre_norm"] for case in ("plain", "window"))
    assert (plain - window).abs().max() > 1e-2


def test_heads_that_do_not_divide_are_named():
    config = decoder_config(LlamaConfig(**SIZES))
    with pytest.raises(ValueError, match=r"^train\.sequence_parallel: 4 ranks .*n_heads = 4 and n_kv_heads = 2"):
        check_heads(config, 4)
    check_heads(config, 2)
