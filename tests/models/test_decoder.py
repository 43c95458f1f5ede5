"""The decoder against itself: a tree pass, ragged batches, chunks, early stops and packed pieces must not change a
single state, and pieces run in bounded memory.

Different widths of one computation differ by rounding; the tolerance is 1e-5 of the largest magnitude, in fp32.
"""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from longdraft.kernels.cpu.library import decoding
from longdraft.models import gated_delta_net
from longdraft.models.decoder_config import DeltaConfig, ExpertsConfig
from longdraft.models.kv_cache import KVCache
from longdraft.models.passes import Pass

KINDS = {
    "gqa": {},
    "mha": {"n_kv_heads": 4},
    "dynamic": {"rope": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}, "max_positions": 24},
    "longrope": {
        "rope": {
            "rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 24,
            "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0],
        },
        "max_positions": 96,
    },
    "sliding": {"sliding_windows": (5, None, 9), "n_layers": 3},
    "qwen3-like": {"qk_norm": True, "head_dim": 12},
}  # fmt: skip
# Widths that PyTorch's vectors do not divide.
HYBRID = {
    "n_layers": 3, "gated": True, "qk_norm": True, "shared_expert_size": 16,
    "delta": DeltaConfig(layers=(0, 1), key_heads=2, value_heads=4, key_dim=16, value_dim=12, kernel=4),
    "experts": ExpertsConfig(number=5, per_token=2, size=16, normalised=True),
}  # fmt: skip
WITHOUT_REWIND = {**KINDS, "hybrid": HYBRID}
# A tree under the root with two padding nodes at the end: parents as in TokenTree (-1 root, -2 padding).
PARENTS = [-1, 0, 0, 0, 1, 1, 2, 4, 4, 7, -2, -2]


def tokens(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 97, (rows, columns), generator=torch.Generator().manual_seed(seed))


def path_to(node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = PARENTS[node]
    return path[::-1]


def tree_parts() -> tuple[Tensor, Tensor]:
    """The ancestor mask [N, N] (padding rows see nothing) and the depths [N]."""
    n = len(PARENTS)
    mask, depths = torch.zeros(n, n, dtype=torch.bool), torch.zeros(n, dtype=torch.int64)
    for node, parent in enumerate(PARENTS):
        if parent != -2:
            mask[node, path_to(node)] = True
            depths[node] = len(path_to(node)) - 1
    return mask, depths


def prefilled(model, prompt: Tensor, room: int = 16, poison: bool = False):
    """A cache that holds the prompt [1, L]."""
    cache = model.new_cache(1, prompt.shape[1] + room)
    if poison:
        cache.keys.fill_(float("nan")), cache.values.fill_(float("nan"))
    cache.reset(prompt_lengths=[prompt.shape[1]])
    if prompt.shape[1]:
        model(Pass(prompt, cache=cache, needs={"last_kv"}))
        cache.commit(None, torch.tensor([prompt.shape[1]]))
    return cache


@pytest.mark.parametrize("kind", WITHOUT_REWIND)
@pytest.mark.parametrize("length", [0, 3, 21, 30])  # 21: the tree crosses the original length (24)
def test_tree_pass_equals_each_path(tiny_target, kind, length, error):
    model = tiny_target(**WITHOUT_REWIND[kind]).model
    prompt, nodes = tokens(1, length), tokens(1, len(PARENTS), 1)
    mask, depths = tree_parts()
    cache = prefilled(model, prompt, poison=True)
    positions, needs = length + depths[None], {"logits", "pre_norm"}
    out = model(Pass(nodes, cache=cache, positions_BT=positions, tree_mask_BTT=mask[None], needs=needs))
    assert bool(out.logits.isfinite().all())
    for node, parent in enumerate(PARENTS):
        if parent == -2:
            continue
        path = path_to(node)
        # Plain decoding of the path, one token per pass.
        single = prefilled(model, prompt)
        for step in path:
            expected = model(Pass(nodes[:, [step]], cache=single, needs=needs))
            single.commit(None, torch.tensor([1]))
        assert error(out.logits[:, node], expected.logits[:, 0]) < 1e-5, f"node {node}"
        assert error(out.pre_norm[:, node], expected.pre_norm[:, 0]) < 1e-5, f"node {node}"


def test_a_row_of_a_hybrid_has_the_same_bits_in_every_pass(tiny_target, c_kernels):
    model, ids = tiny_target(**HYBRID).model, tokens(1, 96)
    found = []
    for width in (1, 32, 48):
        cache = prefilled(model, ids[:, :0], room=96)
        with decoding():
            parts = []
            for part in ids.split(width, 1):
                parts.append(model(Pass(part, cache=cache)).logits)
                cache.commit(None, torch.tensor([width]))
        found.append(torch.cat(parts, 1))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("kind", KINDS)
def test_kept_path_equals_a_fresh_prefill(tiny_target, kind, error):
    model = tiny_target(**KINDS[kind]).model
    prompt, nodes = tokens(1, 20), tokens(1, len(PARENTS), 1)
    mask, depths = tree_parts()
    cache = prefilled(model, prompt, poison=True)
    model(Pass(nodes, cache=cache, positions_BT=20 + depths[None], tree_mask_BTT=mask[None]))
    path = path_to(8)
    rows = torch.tensor([[*path, 0, 11]])  # what is after the count is ignored
    cache.commit(rows, torch.tensor([len(path)]))
    fresh = prefilled(model, prompt)
    for step in path:
        model(Pass(nodes[:, [step]], cache=fresh))
        fresh.commit(None, torch.tensor([1]))
    end = 20 + len(path)
    assert cache.lengths.tolist() == fresh.lengths.tolist() == [end]
    assert error(cache.keys[:, :, :end], fresh.keys[:, :, :end]) < 1e-5
    assert error(cache.values[:, :, :end], fresh.values[:, :, :end]) < 1e-5
    # Rewind to the middle of the prompt and go on with another token; compare with a prefill of just those tokens.
    cache.rewind(torch.tensor([11]))
    again = prefilled(model, prompt[:, :11])
    again.prompt_lengths.fill_(20)
    if "rope" not in KINDS[kind]:
        theirs = model(Pass(nodes[:, :1], cache=again)).logits
        assert error(model(Pass(nodes[:, :1], cache=cache)).logits, theirs) < 1e-5
    cache.reset(prompt_lengths=[7])
    assert cache.lengths.tolist() == [0]
    other = tokens(1, 7, 5)
    assert error(model(Pass(other, cache=cache)).logits, model(Pass(other)).logits) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_ragged_batch_equals_single_runs(tiny_target, kind, error):
    model = tiny_target(**KINDS[kind]).model
    lengths = [3, 30, 0]
    prompts = [tokens(1, length, seed) for seed, length in enumerate(lengths)]
    nodes = tokens(3, len(PARENTS), 9)
    mask, depths = tree_parts()
    masks = torch.stack((mask, mask, torch.eye(len(PARENTS), dtype=torch.bool).tril()))
    places = torch.stack((depths, depths, torch.zeros_like(depths)))
    cache = model.new_cache(3, 50)
    cache.keys.fill_(float("nan")), cache.values.fill_(float("nan"))
    cache.reset(prompt_lengths=lengths)
    padded = torch.zeros(3, 30, dtype=torch.int64)
    for slot, prompt in enumerate(prompts):
        padded[slot, : lengths[slot]] = prompt
    model(Pass(padded, cache=cache))
    cache.commit(None, torch.tensor(lengths))
    positions = cache.lengths[:, None] + places
    out = model(Pass(nodes, cache=cache, positions_BT=positions, tree_mask_BTT=masks))
    chain = model(Pass(nodes, cache=cache))
    for slot, prompt in enumerate(prompts):
        single = prefilled(model, prompt)
        one = slice(slot, slot + 1)
        alone = model(Pass(nodes[one], cache=single, positions_BT=positions[one], tree_mask_BTT=masks[one]))
        assert error(out.logits[one], alone.logits) < 1e-5
        assert error(chain.logits[one], model(Pass(nodes[one], cache=single)).logits) < 1e-5
        view = cache.slot(slot)
        assert error(model(Pass(nodes[one], cache=view)).logits, chain.logits[one]) < 1e-5
        before = cache.lengths.tolist()
        view.commit(None, torch.tensor([2]))
        assert cache.lengths.tolist() == [n + 2 * (i == slot) for i, n in enumerate(before)]
        view.rewind(torch.tensor([before[slot]]))


def calls_during(model, run) -> set[str]:
    seen: set[str] = set()
    handles = [
        module.register_forward_hook(lambda *_, name=name: seen.add(name)) for name, module in model.named_modules()
    ]
    run()
    for handle in handles:
        handle.remove()
    return seen


def test_nothing_unneeded_is_computed(tiny_target):
    model = tiny_target().model
    ids, cache = tokens(1, 6), model.new_cache(1, 8)
    # A layer's norms, and the final one, are computed by the call of the projection after them.
    last = {f"layers.1.{part}" for part in ("attention.o_proj", "mlp", "mlp.gate_up_proj", "mlp.down_proj")}
    head = {"lm_head"}
    everything = calls_during(model, lambda: model(Pass(ids)))
    assert last | head < everything and "layers.1.attention.qkv_proj" in everything
    for needs in ({"last_kv"}, {"queries"}, {"last_kv", "queries"}, set()):
        for given in (None, cache):
            seen = calls_during(model, lambda given=given, needs=needs: model(Pass(ids, cache=given, needs=needs)))
            assert "layers.1.attention.qkv_proj" in seen and not seen & (last | head)
    assert not calls_during(model, lambda: model(Pass(ids, needs={"pre_norm"}))) & (head | {"norm"})
    assert "lm_head" not in calls_during(model, lambda: model(Pass(ids, needs={"post_norm"})))
    stopped, full = model(Pass(ids, needs={"last_kv"})), model(Pass(ids, needs={"last_kv", "logits"}))
    assert torch.equal(stopped.last_kv[0], full.last_kv[0]) and torch.equal(stopped.last_kv[1], full.last_kv[1])
    assert stopped.logits is stopped.pre_norm is stopped.post_norm is stopped.queries is None


def test_rows_of_logits_and_queries(tiny_target, error):
    model = tiny_target().model
    ids = tokens(2, 6)
    everything = model(Pass(ids, needs={"logits", "queries", "post_norm"}))
    rows = torch.tensor([[5, 0], [2, 2]])
    some = model(Pass(ids, logits_at_BR=rows)).logits
    assert error(some, torch.stack([everything.logits[b, rows[b]] for b in range(2)])) < 1e-5
    assert everything.queries.shape == (2, 2, 4, 8)
    shorter = model(Pass(ids[:, :3], needs={"queries"})).queries
    chosen = model(Pass(ids, needs={"queries"}, queries_at_B=torch.tensor([2, 2]))).queries
    assert error(chosen, shorter) < 1e-5


# Pieces shorter and longer than the length at which dynamic and longrope change their table; one has a single token.
BORDERS = [0, 7, 8, 41, 60]
EVERYTHING = frozenset({"logits", "pre_norm", "post_norm", "last_kv"})


def anchor_offset(sinks: int = 3, offset: int = 40) -> Tensor:
    """Positions with a jump: the first ones of each piece stay, the rest move on, in each piece by more."""
    parts = [torch.arange(stop - start) for start, stop in pairwise(BORDERS)]
    return torch.cat([part + (part >= sinks) * offset * (i + 1) for i, part in enumerate(parts)])[None]


def parts_of(output) -> dict[str, Tensor]:
    fields = {name: getattr(output, name) for name in ("logits", "pre_norm", "post_norm")}
    return fields | {"keys": output.last_kv[0], "values": output.last_kv[1]}


@pytest.mark.parametrize("jump", [False, True], ids=["plain", "anchor_offset"])
@pytest.mark.parametrize("kind", WITHOUT_REWIND)
def test_pieces_are_each_alone(tiny_target, monkeypatch, kind, jump, error):
    monkeypatch.setattr(gated_delta_net, "BLOCK", BORDERS[2])  # a piece begins where a block does
    model, ids = tiny_target(**WITHOUT_REWIND[kind]).model, tokens(1, BORDERS[-1])
    positions = anchor_offset() if jump else None
    packed = parts_of(model(Pass(ids, positions_BT=positions, borders=BORDERS, needs=EVERYTHING)))
    for start, stop in pairwise(BORDERS):
        own = None if positions is None else positions[:, start:stop]
        alone = parts_of(model(Pass(ids[:, start:stop], positions_BT=own, needs=EVERYTHING)))
        for name, expected in alone.items():
            assert error(packed[name][:, start:stop], expected) < 1e-5, (name, start)


@pytest.mark.parametrize("count", [16, 23, 40])
def test_padding_of_a_prompt_in_blocks_changes_no_state(tiny_target, monkeypatch, count, error):
    """As in a recorded prompt's pass, whose padding begins within a block of linear attention and fills others."""
    monkeypatch.setattr(gated_delta_net, "BLOCK", 16)
    model, ids = tiny_target(**HYBRID).model, tokens(1, 60)
    padded, alone = model.new_cache(1, 60), model.new_cache(1, 60)
    for cache, n_rows in ((padded, 60), (alone, count)):
        model(Pass(ids[:, :n_rows], cache, commits_B=torch.tensor([count]), needs={"last_kv"}))
    for name in ("memory", "inputs"):
        assert error(getattr(padded.delta, name), getattr(alone.delta, name)) < 1e-5, name


@pytest.mark.parametrize("kind", WITHOUT_REWIND)
@pytest.mark.parametrize("chunk", [1, 25, 60])
def test_chunks_of_rows_change_nothing(tiny_target, kind, chunk, error):
    model, ids = tiny_target(**WITHOUT_REWIND[kind]).model, tokens(1, BORDERS[-1])
    for borders in (None, BORDERS):
        whole, chunked = (
            parts_of(model(Pass(ids, borders=borders, chunk=size, needs=EVERYTHING))) for size in (None, chunk)
        )
        for name, expected in whole.items():
            assert error(chunked[name], expected) < 1e-5, name
    two = torch.cat([ids, tokens(1, BORDERS[-1], 1)])
    assert error(model(Pass(two, chunk=chunk)).logits, model(Pass(two)).logits) < 1e-5


class Largest(TorchDispatchMode):
    """Records the largest number of elements of any tensor that is created meanwhile."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor) and not func.is_view:
                self.numbers = max(self.numbers, x.numel())
        return out


def test_chunks_bound_what_a_layer_holds(tiny_target):
    """Never rows x 2 x intermediate: no tensor of all rows is wider than the residual stream."""
    model, ids = tiny_target(intermediate_size=512).model, tokens(1, BORDERS[-1])
    n_rows, wide, hidden = ids.shape[1], 2 * 512, 32
    with Largest() as whole:
        model(Pass(ids, borders=BORDERS, needs={"pre_norm"}))
    assert whole.numbers == n_rows * wide
    for chunk in (1, 7, 25):
        with Largest() as chunked:
            model(Pass(ids, borders=BORDERS, chunk=chunk, needs={"pre_norm"}))
        assert chunked.numbers == max(chunk * wide, n_rows * hidden)


@pytest.mark.parametrize(("length", "n_rows"), [(0, 5), (3, 2), (4, 1)])
def test_too_small_a_cache_says_what_it_needs(length, n_rows):
    cache = KVCache(2, 1, 4, 1, 2, torch.float32)
    cache.commit(None, torch.tensor([length]))
    cos, sin = torch.ones(1, n_rows, 1, 1, 1), torch.zeros(1, n_rows, 1, 2, 1)
    with pytest.raises(AssertionError, match="capacity of at least 5, the cache has 4"):
        cache.append(0, torch.zeros(1, n_rows, 3, 2), cos, sin)
