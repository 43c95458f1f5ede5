"""triton/exact_attention.py in Triton's interpreter or on a GPU: its error, and the bits of plain decoding."""

from copy import deepcopy
from functools import partial
from importlib import import_module
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from longdraft.kernels import backend
from longdraft.kernels.tree import PassPlan
from longdraft.kernels.tree_attention import tree_attention_reference as reference
from longdraft.kernels.triton import exact_attention as module
from longdraft.models.decoder_config import DeltaConfig, ExpertsConfig
from longdraft.models.footprint import estimate_memory
from longdraft.models.passes import Pass

EXACT = {"linear", "exact_attention", "gated_delta", "delta_chunks", "delta_layer"}
LINEAR = DeltaConfig(layers=(0,), key_heads=2, value_heads=4, key_dim=16, value_dim=8, kernel=4)
HYBRID = {  # as Qwen3-Next: linear attention, gated attention, a shared expert
    "n_layers": 2, "delta": LINEAR, "gated": True, "qk_norm": True, "experts": ExpertsConfig(4, 2, 24, True),
    "shared_expert_size": 16,
}  # fmt: skip
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# The interpreter reads bf16 as integers.
DTYPE, ROUNDING = (torch.bfloat16, 2**-8) if ON_GPU else (torch.float16, 2**-10)


def run(q: Tensor, keys: Tensor, values: Tensor, lengths_B: Tensor, masks: Tensor | None, window: int | None):
    """(Output, log-sum-exp) of the kernel on its device, from and to tensors on the CPU."""
    plan = PassPlan(lengths_B, q.shape[1], masks)
    inputs = q, keys, values, lengths_B, plan.path_BTT, plan.depth_BT
    out, lse = module.tree_attention(*(None if x is None else x.to(DEVICE) for x in inputs), window)
    return out.cpu(), lse.cpu()


@pytest.mark.parametrize(
    "heads, width, lengths, n_rows, window, tree",
    [
        ((4, 2), 16, [0], 1, None, False),
        ((6, 2), 24, [180, 5], 5, None, True),
        ((2, 1), 16, [300], 40, None, False),  # rows with other tails, and more than one tile of queries
        ((2, 2), 16, [230, 129], 6, 100, True),
        ((2, 1), 16, [300, 191], 2, 128, False),  # rows whose window lies in the tail, after runs
        ((1, 1), 16, [1400], 3, 1100, True),  # a window of several runs
        ((1, 1), 16, [1354], 5, 1100, False),  # whose first key is in another block and run for the last row
        ((1, 1), 16, [3060], 2, None, False),  # more runs than are added at a time, of three lengths
    ],
)
def test_a_row_has_plain_decodings_bits(monkeypatch, trees, heads, width, lengths, n_rows, window, tree):
    """The same keys at their positions, all committed but the row's own, in a cache of another size."""
    monkeypatch.setattr(module, "RUN", 64)
    empty = torch.empty
    monkeypatch.setattr(module.torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(torch.nan))
    (n_heads, n_kv), capacity = heads, max(lengths) + n_rows + 7
    keys, values = (x.to(DTYPE) for x in trees.poisoned(lengths, n_rows, capacity, n_kv, width))
    q, lengths_B = trees.draw(len(lengths), n_rows, n_heads, width, seed=7).to(DTYPE), torch.tensor(lengths)
    masks = torch.stack([trees.random_tree(n_rows, seed) for seed in range(len(lengths))]) if tree else None
    out, lse = run(q, keys, values, lengths_B, masks, window)
    plain, plain_lse = reference(q.float(), keys.float(), values.float(), lengths_B, masks, window)
    assert bool(out.isfinite().all())
    is_read = torch.ones(out.shape[:2], dtype=torch.bool) if masks is None else masks.any(-1)
    torch.testing.assert_close(out.float()[is_read], plain[is_read], rtol=ROUNDING, atol=ROUNDING)
    torch.testing.assert_close(lse[is_read], plain_lse[is_read], rtol=1e-5, atol=1e-5)
    for slot, row in is_read.nonzero()[:: max(1, n_rows // 3)].tolist():
        history = trees.history_of(row, lengths[slot], None if masks is None else masks[slot], None)
        alone = [torch.full((1, capacity + 150, n_kv, width), torch.nan, dtype=DTYPE) for _ in range(2)]
        for one, many in zip(alone, (keys, values), strict=True):
            one[0, : len(history)] = many[slot, history]
        found = run(q[slot : slot + 1, row : row + 1], *alone, torch.tensor([len(history) - 1]), None, window)
        assert torch.equal(found[0][0, 0], out[slot, row]) and torch.equal(found[1][0, 0], lse[slot, row])


def test_runs_meet_and_cover_the_cache(monkeypatch):
    """As `_run` places them: eight each time the position doubles, or all alike with a window."""
    monkeypatch.setattr(module, "RUN", 64)
    borders = [*range(0, 1024, 64), *range(1024, 2048, 128), *range(2048, 4096, 256), 4096]
    for capacity in (1, 64, 65, 512, 513, 1024, 1025, 1100, 2048, 2049, 4096):
        assert module.count_runs(capacity, windowed=False) == sum(border < capacity for border in borders)
        assert module.count_runs(capacity, windowed=True) == -(-capacity // 256)


@pytest.fixture
def exact_on_any_device(monkeypatch) -> None:
    """The mode is on, in Triton's interpreter where there is no GPU."""
    monkeypatch.setenv("LONGDRAFT_EXACT", "1")
    if not ON_GPU:
        kernels = lambda name, _: import_module(f"longdraft.kernels.triton.{name}") if name in EXACT else None  # noqa: E731
        monkeypatch.setattr(backend, "triton_kernels", kernels)
        monkeypatch.setattr("longdraft.kernels.experts.is_host", lambda _: False)


@pytest.mark.parametrize(
    ("name", "batch", "n_rows", "widths", "chunk"),
    [
        ("recorded steps", 3, 5, (1, 5), 7),
        ("passes", 3, 5, (1, 5), 7),
        ("passes", 2, 128, (160,), 1),  # the widest pass that is computed so
        ("passes", 1, 128, (2,), 128),  # the last one of a prompt
    ],
)
def test_the_partial_results_are_in_the_estimate_of_memory(
    monkeypatch, exact_on_any_device, tiny_target, name, batch, n_rows, widths, chunk
):
    monkeypatch.setattr(module, "RUN", 64)
    model, capacity, made, empty = tiny_target(vocab_size=61, dtype=DTYPE).model.to(DEVICE), 300, [], torch.empty

    def estimates(chunk: int) -> list[int]:
        """With the mode and without it."""
        found = []
        for value in ("1", "0"):
            monkeypatch.setenv("LONGDRAFT_EXACT", value)
            found.append(estimate_memory(model, batch, capacity, widths, chunk, ())[name])
        return found

    exact, other = estimates(chunk)
    wide = estimates(4000)  # passes of a prompt that are not computed so take most
    assert wide[0] == wide[1] > exact
    q = torch.zeros(batch, n_rows, model.config.n_heads, model.config.head_dim, dtype=DTYPE, device=DEVICE)
    keys_BSKd = model.new_cache(batch, capacity).keys[0]
    for kernel in ("_parts", "_merge"):
        monkeypatch.setattr(module, kernel, MagicMock())
    monkeypatch.setattr(module.torch, "empty", lambda *args, **kwargs: made.append(empty(*args, **kwargs)) or made[-1])
    results = module.tree_attention(q, keys_BSKd, keys_BSKd, MagicMock(), None, MagicMock())
    assert exact - other == sum(x.nbytes for x in made) - sum(x.nbytes for x in results)


@torch.no_grad()
@pytest.mark.parametrize("fields", [{"intermediate_size": 2048}, {"experts": ExpertsConfig(4, 2, 2048, True)}])
def test_so_are_the_products_of_a_linear_layers_splits(monkeypatch, exact_on_any_device, tiny_target, fields):
    model, made, empty = tiny_target(vocab_size=61, n_layers=1, dtype=DTYPE, **fields).model.to(DEVICE), [], torch.empty
    tokens, cache = torch.zeros(2, 5, dtype=torch.int64, device=DEVICE), model.new_cache(2, 60)
    exact = estimate_memory(model, 2, 60, (5,), 7, ())["recorded steps"]
    with monkeypatch.context() as patch:
        patch.setenv("LONGDRAFT_EXACT", "0")
        other = estimate_memory(model, 2, 60, (5,), 7, ())["recorded steps"]
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: made.append(empty(*args, **kwargs)) or made[-1])
    model(Pass(tokens, cache=cache))
    assert exact - other == max(x.nbytes for x in made if x.dtype == torch.float32)


@torch.no_grad()
@pytest.mark.parametrize(
    "fields", [{}, {"experts": ExpertsConfig(4, 2, 24, True)}, HYBRID], ids=["dense", "experts", "linear attention"]
)
def test_a_models_logits_have_plain_decodings_bits(monkeypatch, exact_on_any_device, trees, tiny_target, fields):
    """Through linear layers, attention and LM head: 8 rows of a chain and of a tree, and each path token by token."""
    monkeypatch.setattr("longdraft.kernels.tree.pack_tree", None)  # nobody reads the bits of ancestors
    monkeypatch.setattr("torch.nn.functional.grouped_mm", None)  # nor is PyTorch's product used
    model = tiny_target(vocab_size=61, dtype=DTYPE, **{"n_layers": 1} | fields).model.to(DEVICE)
    mask = trees.random_tree(9, 3)[:8, :8]
    tokens = torch.randint(61, (1, 26), generator=torch.Generator().manual_seed(0)).to(DEVICE)

    first = model.new_cache(1, 60)
    model(Pass(tokens[:, :18], cache=first))
    first.commit(None, torch.tensor([18], device=DEVICE))
    filled = partial(deepcopy, first)

    positions = (18 + mask.sum(-1) - 1)[None].to(DEVICE)
    in_tree = Pass(tokens[:, 18:], cache=filled(), positions_BT=positions, tree_mask_BTT=mask[None].to(DEVICE))
    wide = {"chain": model(Pass(tokens[:, 18:], cache=filled())).logits[0], "tree": model(in_tree).logits[0]}
    for kind, last in (("chain", 7), ("tree", int(mask.sum(-1).argmax())), ("tree", 7)):
        path, cache = mask[last].nonzero()[:, 0].tolist() if kind == "tree" else range(8), filled()
        for row in path:
            logits = model(Pass(tokens[:, 18 + row : 19 + row], cache=cache)).logits[0, 0]
            cache.commit(None, torch.tensor([1], device=DEVICE))
            assert torch.equal(logits, wide[kind][row]), f"row {row} of the {kind}"
