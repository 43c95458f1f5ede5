"""Work on a device that is queued once, recorded, and then replayed in one call: CUDA graphs.

A step of decoding is hundreds of small kernels, and launching them one by one takes the host longer than a GPU takes to
run them. What is recorded is a function of tensors whose shapes, and everything else that steers it on the host, are in
its key: the loop records the target's pass and what follows it for every width (infer/step.py), drafters their networks
(`SlotState.graphs`). Not here: copies between host and device (infer/transfer.py).
"""

import gc
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
# Runs work without effect and remembers it: (what the work returned, a function that does it again on the same memory).
Recorder = Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]


@dataclass
class _Recorded:
    """One key's work: None of it yet, or its inputs and outputs, which stay where they are, and how to do it again.

    `owners` keeps what the work reads and writes besides its inputs alive, so that no key ever means other memory.
    """

    owners: tuple
    inputs: list[Tensor] = field(default_factory=list)
    outputs: Any = None
    replay: Callable[[], None] | None = None


class Graphs:
    """Recorded work, by key. The first time a key comes its work is queued as it stands, which compiles and allocates;
    the second time it is recorded; from then on it is replayed.

    Args:
        recorder: None records nothing, and `run` calls the work every time.

    Attributes:
        recording: False where nothing is recorded.
        fresh: True since a key came for the first or second time; whoever times steps takes it back to False.
    """

    def __init__(self, recorder: Recorder | None = None):
        self._recorder, self.recording, self.fresh = recorder, recorder is not None, False
        self._known: dict[Hashable, _Recorded] = {}
        self._outputs: set[int] = set()

    def run(self, key: tuple, owners: tuple, work: Callable[..., T], *inputs: Tensor) -> T:
        """`work(*inputs)`, queued.

        Args:
            key: name of the work, and what else on the host steers it.
            owners: objects whose memory it reads or writes besides its inputs; each keeps that memory where it is for
                as long as it lives.
            work: does nothing but queue: it must not read a tensor on the host, copy from the host, or change
                anything on the host. It returns tensors, a tuple of such, or a dataclass of such, or None.
            inputs: tensors that may lie elsewhere the next time.
        Returns: what the work returned. Where work is recorded its memory is overwritten when this key runs again.
        """
        if self._recorder is None:
            return work(*inputs)
        shapes = tuple((x.shape, x.dtype) for x in inputs)
        key = (*key, *map(id, owners), shapes)
        known = self._known.get(key)
        if known is None:
            self._known[key], self.fresh = _Recorded(owners), True
            return work(*inputs)
        if known.replay is None:
            # What another recorded work leaves lies still, and is read where it lies.
            known.inputs = [x if id(x) in self._outputs else x.clone() for x in inputs]
            known.outputs, known.replay = self._recorder(lambda: work(*known.inputs))
            self._outputs.update(map(id, _tensors(known.outputs)))
            self.fresh = True
        for still, given in zip(known.inputs, inputs, strict=True):
            if still is not given:
                still.copy_(given)
        known.replay()
        return known.outputs

    def forget(self, owner: object) -> None:
        """Let go of the work that reads or writes the memory of this owner."""
        others = {key: known for key, known in self._known.items() if all(one is not owner for one in known.owners)}
        self._known, self._outputs = others, {id(x) for known in others.values() for x in _tensors(known.outputs)}

    def clear(self) -> None:
        """Forget all recorded work, and let go of its memory."""
        self._known.clear()
        self._outputs.clear()


def cuda_graphs() -> Graphs:
    """Recorded by CUDA, all in one pool of memory: what one graph needs only while it runs serves the others too."""
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def record(work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        # As torch.cuda.graph, which also collects garbage and empties the cache of memory every time: a tenth of a
        # second, for each width. Garbage must not be collected meanwhile, for freeing memory ends a recording.
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        torch.cuda.synchronize()
        gc.disable()
        try:
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    outputs = work()
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        return outputs, graph.replay

    return Graphs(record)


def _tensors(found: Any) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        yield found
    elif is_dataclass(found):
        for part in fields(found):
            yield from _tensors(getattr(found, part.name))
    elif isinstance(found, tuple):
        for part in found:
            yield from _tensors(part)
