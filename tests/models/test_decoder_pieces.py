"""The decoder over packed pieces: each gives what it gives alone, and all of them run in bounded memory.

Unless a test says otherwise, the tolerance is 1e-5 of the largest magnitude, in fp32.
"""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from longdraft.models.passes import Pass

FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}
KINDS = {
    "gqa": {},
    "mha": {"n_kv_heads": 4},
    "dynamic": {"rope": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}, "max_positions": 24},
    "longrope": {
        "rope": {
            "rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 24,
            **FACTORS,
        },
        "max_positions": 96,
    },
    "sliding": {"sliding_windows": (5, None, 9), "n_layers": 3},
    "qwen3-like": {"qk_norm": True, "head_dim": 12},
}  # fmt: skip
# Pieces shorter and longer than the length at which dynamic and longrope change their table; one has a single token.
BORDERS = [0, 7, 8, 41, 60]
EVERYTHING = frozenset({"logits", "pre_norm", "post_norm", "last_kv"})


def tokens(count: int = BORDERS[-1], seed: int = 0) -> Tensor:
    return torch.randint(0, 97, (1, count), generator=torch.Generator().manual_seed(seed))


def anchor_offset(sinks: int = 3, offset: int = 40) -> Tensor:
    """Positions with a jump: the first ones of each piece stay, the rest move on, in each piece by more."""
    parts = [torch.arange(stop - start) for start, stop in pairwise(BORDERS)]
    return torch.cat([part + (part >= sinks) * offset * (i + 1) for i, part in enumerate(parts)])[None]


def parts_of(output) -> dict[str, Tensor]:
    fields = {name: getattr(output, name) for name in ("logits", "pre_norm", "post_norm")}
    return fields | {"keys": output.last_kv[0], "values": output.last_kv[1]}


@pytest.mark.parametrize("jump", [False, True], ids=["plain", "anchor_offset"])
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_are_each_alone(tiny_target, kind, jump, error):
    model, ids = tiny_target(**KINDS[kind]).model, tokens()
    positions = anchor_offset() if jump else None
    packed = parts_of(model(Pass(ids, positions_BT=positions, borders=BORDERS, needs=EVERYTHING)))
    for start, stop in pairwise(BORDERS):
        own = None if positions is None else positions[:, start:stop]
        alone = parts_of(model(Pass(ids[:, start:stop], positions_BT=own, needs=EVERYTHING)))
        for name, expected in alone.items():
            assert error(packed[name][:, start:stop], expected) < 1e-5, (name, start)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 25, 60])
def test_chunks_of_rows_change_nothing(tiny_target, kind, chunk, error):
    model, ids = tiny_target(**KINDS[kind]).model, tokens()
    for borders in (None, BORDERS):
        whole, chunked = (
            parts_of(model(Pass(ids, borders=borders, chunk=size, needs=EVERYTHING))) for size in (None, chunk)
        )
        for name, expected in whole.items():
            assert error(chunked[name], expected) < 1e-5, name
    two = torch.cat([ids, tokens(seed=1)])
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
    model, ids = tiny_target(intermediate_size=512).model, tokens()
    n_rows, wide, hidden = ids.shape[1], 2 * 512, 32
    with Largest() as whole:
        model(Pass(ids, borders=BORDERS, needs={"pre_norm"}))
    assert whole.numbers == n_rows * wide
    for chunk in (1, 7, 25):
        with Largest() as chunked:
            model(Pass(ids, borders=BORDERS, chunk=chunk, needs={"pre_norm"}))
        assert chunked.numbers == max(chunk * wide, n_rows * hidden)
