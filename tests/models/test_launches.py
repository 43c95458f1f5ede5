"""How many kernels one layer launches on a GPU, counted on a pretended one."""

from collections import Counter

import pytest
import torch

from longdraft.models.decoder_config import DeltaConfig
from longdraft.models.passes import Pass

# Views and uninitialised memory launch nothing.
FREE = {
    "view", "_unsafe_view", "slice", "select", "split", "split_with_sizes", "transpose", "t", "unsqueeze", "expand",
    "alias", "detach", "empty", "empty_like", "new_empty",
}  # fmt: skip
# Triton functions that launch more than one kernel: runs of the keys, and their merge; the memory's copy, the chunks'
# systems, and what passes from chunk to chunk.
SEVERAL = {"triton: tree_attention": 2, "triton: chain": 3}
LINEAR = {
    "mm": 4, "triton: add_rms_norm": 2, "triton: gate": 1, "triton: delta_tokens": 1, "triton: tree_steps": 1,
    "triton: gated_norm": 1,
}  # fmt: skip
# Of a row of training: what the tokens read, in the dtype of the stream; the state before them.
TEXT = LINEAR | {"triton: chain": 3, "copy_": 1, "new_zeros": 2}
del TEXT["triton: tree_steps"]
LAYER = {
    "mm": 4, "triton: add_rms_norm": 2, "triton: gate": 1, "triton: rotate": 1, "triton: tree_attention": 2,
}  # fmt: skip


def launches(pretended_cuda, model, n_rows: int, tree: bool, batch: int, packed: bool = False) -> Counter[str]:
    """The launches of one pass, by kernel."""
    with pretended_cuda.PretendedCuda() as gpu, torch.no_grad():
        gpu.put(model)
        cache = None if packed else model.new_cache(batch, 40)
        tokens = torch.zeros(batch, n_rows, dtype=torch.int64, device="cuda")
        mask = positions = None
        if tree:
            mask = torch.eye(n_rows, dtype=torch.bool, device="cuda").expand(batch, -1, -1)
            positions = torch.zeros_like(tokens)
        for _ in range(2):  # the first pass brings to the device what all passes share
            gpu.forget()
            borders = [0, 30, n_rows] if packed else None
            model(Pass(tokens, cache=cache, tree_mask_BTT=mask, positions_BT=positions, borders=borders))
        assert not gpu.waits
        return Counter({name: n * SEVERAL.get(name, 1) for name, n in gpu.calls.items() if name not in FREE})


@pytest.mark.parametrize("options", [{}, {"qk_norm": True}], ids=["", "norms of heads"])
@pytest.mark.parametrize(("n_rows", "tree", "batch"), [(1, False, 1), (7, True, 1), (3, False, 2)])
def test_a_layer_is_ten_launches(tiny_target, pretended_cuda, n_rows, tree, batch, options):
    few, more = (
        launches(pretended_cuda, tiny_target(n_layers=n, dtype=torch.bfloat16, **options).model, n_rows, tree, batch)
        for n in (2, 5)
    )
    assert {name: (more[name] - few[name]) / 3 for name in more if more[name] != few[name]} == LAYER
    assert sum(LAYER.values()) == 10


@pytest.mark.parametrize(("n_rows", "tree", "wanted"), [(1, False, LINEAR), (7, True, LINEAR), (100, False, TEXT)])
def test_a_layer_of_linear_attention_is_ten_launches_and_some_for_texts(
    tiny_target, pretended_cuda, n_rows, tree, wanted
):
    heads = {"key_heads": 2, "value_heads": 4, "key_dim": 16, "value_dim": 8, "kernel": 4}
    few, more = (
        launches(
            pretended_cuda, tiny_target(n_layers=1 + n, dtype=torch.bfloat16, delta=delta).model, n_rows, tree, 1,
            packed=wanted is TEXT,
        )
        for n in (1, 4)
        for delta in [DeltaConfig(layers=tuple(range(n)), **heads)]
    )  # fmt: skip
    assert {name: (more[name] - few[name]) / 3 for name in more if more[name] != few[name]} == wanted
    assert sum(LINEAR.values()) == 10 and sum(TEXT.values()) == 15
