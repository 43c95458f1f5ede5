"""A decoder's layers as one call, for passes of few rows on a CPU (kernels/cpu_impl/program.py).

The layers are those of decoder.py: their calls are recorded the first time that a cache meets a shape of pass, and made
again from then on. Not here: a step's recordings on a GPU (infer/graphs.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from longdraft.kernels import backend
from longdraft.kernels.cpu_impl import rows
from longdraft.kernels.cpu_impl.program import Program, Unrecordable
from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.kv_cache import KVCache

T = TypeVar("T")
# Above this the calls take so long that Python's part does not count, and their buffers take memory.
MOST_ROWS = 32


@dataclass
class _Known(Generic[T]):
    """One shape of pass; `program` is None where it cannot be recorded."""

    inputs: list[Tensor]
    weights: list[tuple[Tensor, int]]
    program: Program[T] | None

    def stale(self) -> bool:
        """Whether weights lie elsewhere by now."""
        return any(weight.data_ptr() != address for weight, address in self.weights)


class RecordedLayers:
    """What one decoder has recorded, by cache and shape of pass; it goes with the cache.

    Attributes:
        fresh: True since something was recorded, which takes as long as the calls one by one; whoever times passes
            takes it back to False.
    """

    def __init__(self):
        self.fresh = False
        self._known: WeakKeyDictionary[KVCache, dict[tuple, _Known]] = WeakKeyDictionary()

    def __reduce__(self) -> tuple:  # a copy of the decoder begins anew
        return RecordedLayers, ()

    def run(
        self,
        layers: Callable[..., T],
        cache: KVCache,
        key: object,
        inputs: Sequence[Tensor],
        weights: Callable[[], Sequence[Tensor]],
    ) -> T | None:
        """`layers(*inputs)` from its recording, or None: then the caller calls it itself.

        Args:
            layers: has no effect but on the memory of its inputs, of the cache and of what it returns; of the host it
                reads nothing that `key` and the shapes of the inputs do not tell.
            inputs: [B, T, ...], the pass's rows first, as many as `can_record` takes.
            weights: what it reads besides, asked for when something is recorded.

        Returns: what it returned when it was recorded, in memory that the next pass of the key overwrites.
        """
        of_cache = self._known.setdefault(cache, {})
        memory = cache.keys.data_ptr(), cache.values.data_ptr(), cache.lengths.data_ptr()
        key = key, memory, *((x.shape, x.dtype) for x in inputs)
        known = of_cache.get(key)
        if known is None or known.stale():
            known = of_cache[key] = self._record(layers, inputs, weights)
            return None if known.program is None else known.program.outputs
        if known.program is None:
            return None
        cache.check_room(inputs[0].shape[1])
        for still, given in zip(known.inputs, inputs, strict=True):
            still.copy_(given)
        return known.program.run()

    def _record(
        self, layers: Callable[..., T], inputs: Sequence[Tensor], weights: Callable[[], Sequence[Tensor]]
    ) -> _Known[T]:
        """The first pass of a shape, made."""
        copies = [x.clone(memory_format=torch.contiguous_format) for x in inputs]
        try:
            program = Program(lambda: layers(*copies))
        except Unrecordable:
            return _Known([], [], None)
        self.fresh = True
        return _Known(copies, [(weight, weight.data_ptr()) for weight in weights()], program)


def recorded_bytes(config: DecoderConfig, n_rows: int, weight: Tensor) -> int:
    """What the recording of a pass of so many rows, all slots together, keeps; 0 where there is none.

    weight: one of the model's, for device and dtype.
    """
    if n_rows > MOST_ROWS or not _in_c(weight) or config.qk_norm:
        return 0
    heads, kv_heads, width = config.n_heads, config.n_kv_heads, config.head_dim
    of_attention = (heads + 2 * kv_heads) + (heads + kv_heads) + heads  # projected, rotated, attended
    of_layer = of_attention * width + config.intermediate_size + 2 * config.hidden_size
    return n_rows * config.n_layers * of_layer * weight.element_size()


def can_record(n_rows: int, weight: Tensor) -> bool:
    """Whether passes of so many rows, all slots together, of a model with such weights may be recorded now."""
    return n_rows <= MOST_ROWS and rows.serves(weight.dtype) and _in_c(weight)


def _in_c(weight: Tensor) -> bool:
    return weight.dtype in rows.SUFFIXES and backend.is_host(weight.device) and rows.library() is not None
