"""CUDA graphs: device work that is recorded once and then replayed in one call.

A step of decoding is hundreds of small kernels, and launching them one by one takes the host longer than a GPU takes to
run them. A function of tensors is recorded; its key has their shapes and everything else on the host that the work
depends on. The runner records the target's pass and what follows it, for every width (infer/runner.py); drafters record
their networks (`SlotState.run`).
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from longdraft.kernels import backend
from longdraft.kernels.experts import waits_for_host
from longdraft.kernels.tree import MOST_ROWS
from longdraft.models.decoder import Decoder

T = TypeVar("T")
# Records work without running it. Returns a function that runs it on the same memory.
Recorder = Callable[[Callable[[], None]], Callable[[], None]]


@dataclass
class _Recorded:
    """The recorded work of one key.

    Outputs are outside the recording's memory pool. Inputs are copies, or outputs of other recorded work, which are
    read in place. None of them moves. `owners` keeps alive whatever else the work reads and writes, so that a key
    always means the same memory.
    """

    owners: tuple
    inputs: tuple
    outputs: Any
    replay: Callable[[], None] | None = None


class Graphs:
    """Recorded work, by key. A key's first call queues the work normally, which compiles and allocates; the second call
    records it; later calls replay it. While `rehearsing`, the first call does both.

    Args:
        recorder: None records nothing, and `run` calls the work every time.

    Attributes:
        recording: False if nothing is ever recorded.
        fresh: set to True by a key's first and second call; the code that times steps sets it back to False.
    """

    rehearsing = False

    def __init__(self, recorder: Recorder | None = None):
        self._recorder, self.recording, self.fresh = recorder, recorder is not None, False
        self._known: dict[tuple, _Recorded] = {}
        self._outputs: dict[int, Tensor] = {}  # of all recorded work, by id

    def run(
        self,
        key: tuple,
        owners: tuple,
        work: Callable[..., T],
        *inputs: Any,
        widest: int = 1,
    ) -> T:
        """Queue `work(*inputs)`.

        Args:
            key: the name of the work, and everything else on the host that it depends on.
            owners: objects whose memory the work reads or writes besides its inputs; each keeps that memory in place as
                long as it lives.
            work: only queues. It must not read a tensor on the host, copy from the host, or change anything on the host
                that is read later. It returns tensors, a tuple or dataclass of them, or None.
            inputs: tensors whose memory may differ in the next call, or tuples or dataclasses of them.
            widest: rows of the widest pass in the work; above MOST_ROWS attention reads lengths on the host, so it
                cannot be recorded.

        Returns: what the work returned. If it is recorded, the next call with this key overwrites the result.
        """
        if self._recorder is None or widest > MOST_ROWS:
            return work(*inputs)
        key = (*key, *map(id, owners), *((x.shape, x.dtype) for x in _tensors(inputs)))
        known = self._known.get(key)
        if known is None:
            # Work on copies of the inputs, which each call refills, because a drafter's static tree must not be
            # overwritten. The first call uses them too, because kernels are compiled for strides and alignment.
            copies = _twin(inputs, lambda x: x if id(x) in self._outputs else x.clone())
            known = self._known[key] = _Recorded(owners, copies, _twin(work(*_twin(copies)), Tensor.clone))
            self._outputs |= {id(x): x for x in _tensors(known.outputs)}
            self.fresh = True
            if not self.rehearsing:
                return _twin(known.outputs)
        elif not self.rehearsing:
            fill(known.inputs, inputs)
        if known.replay is None:
            # The work gets a twin of its inputs, so that what it caches in them does not stay there.
            known.replay = self._recorder(lambda: fill(known.outputs, work(*_twin(known.inputs))))
            self.fresh = True
        if not self.rehearsing:
            known.replay()
        return _twin(known.outputs)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """In this context a key's first call records it; recorded work is not replayed but returns its last outputs."""
        self.rehearsing = True
        try:
            yield
        finally:
            self.rehearsing = self.fresh = False

    def __len__(self) -> int:
        """How many pieces of work have been recorded."""
        return sum(known.replay is not None for known in self._known.values())

    def forget(self, owner: object) -> None:
        """Forget the work that reads or writes the memory of this owner."""
        self._known = {
            key: known for key, known in self._known.items() if all(one is not owner for one in known.owners)
        }
        self._outputs = {id(x): x for known in self._known.values() for x in _tensors(known.outputs)}

    def stop(self) -> None:
        """Record nothing from now on, and forget what is recorded."""
        self.clear()
        self._recorder, self.recording = None, False

    def clear(self) -> None:
        """Forget all recorded work and free its memory."""
        self._known.clear()
        self._outputs.clear()


def graphs_for(wanted: bool | None, model: Decoder) -> Graphs:
    """The Graphs for an engine with this target. wanted: None records where it is possible.

    It is not possible with a rotary table that is recomputed for every length; with layers that are gathered from other
    ranks, because a replay would read freed weights while the other ranks wait for this one; and with experts whose
    products wait for the host (kernels/experts.py).

    Raises ValueError if recording is wanted and not possible.
    """
    device = model.embed_tokens.weight.device
    on_device = backend.triton_kernels("tree_attention", device.type) is not None
    waits = model.config.experts is not None and waits_for_host(model.embed_tokens.weight)
    possible = on_device and model.config.rope.type != "dynamic" and model.weights_stay and not waits
    if wanted and not possible:
        raise ValueError(
            f"graphs=True: this target on {device} cannot be recorded; that needs CUDA and triton, weights that stay "
            "on it, no rope_type 'dynamic', no experts whose products wait for the host"
        )
    return cuda_graphs(device) if possible and wanted is not False else Graphs()


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all engines of a device, because cuBLAS keeps memory for every stream it was called on."""
    return torch.cuda.Stream(device)


def cuda_graphs(device: torch.device) -> Graphs:
    """Graphs that CUDA records. All share one memory pool, which a graph owns only while it runs, so whatever is read
    later is copied out of it."""
    stream, alive = _capture_stream(device), WeakSet[torch.cuda.CUDAGraph]()
    pool = torch.cuda.graph_pool_handle()

    def record(work: Callable[[], None]) -> Callable[[], None]:
        # Like torch.cuda.graph, but without collecting garbage and emptying the memory cache every time, which is slow.
        # Garbage collection is off during a recording, because freeing memory ends it.
        nonlocal pool
        if not alive:  # a pool is freed with its last graph
            pool = torch.cuda.graph_pool_handle()
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        torch.cuda.synchronize(device)
        gc.disable()
        try:
            with torch.cuda.device(device), torch.cuda.stream(stream):
                _capture(graph, pool, work)
        except Exception as error:
            # After a failed recording, PyTorch's allocator keeps recording to its pool and refuses another one there.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(device.index, pool)
            pool = torch.cuda.graph_pool_handle()
            raise RuntimeError(f"a step could not be recorded ({error}); use Engine(graphs=False)") from error
        finally:
            if collects:
                gc.enable()
        alive.add(graph)
        return graph.replay

    return Graphs(record)


def _capture(graph: torch.cuda.CUDAGraph, pool: Any, work: Callable[[], None]) -> None:
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        work()
    except BaseException:
        with suppress(RuntimeError):  # the first error is the one to report
            graph.capture_end()
        raise
    graph.capture_end()


def _tensors(found: Any) -> Iterator[Tensor]:
    """The tensors in a tensor, tuple or dataclass, in the order in which `_twin` makes them anew."""
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, tuple) or is_dataclass(found):
        for part in found if isinstance(found, tuple) else vars(found).values():
            yield from _tensors(part)


def _twin(found: Any, of_tensor: Callable[[Tensor], Tensor] = lambda x: x) -> Any:
    """A copy of nested tuples and dataclasses, with `of_tensor` applied to their tensors. A dataclass keeps its cached
    tensors, and drops what was read of it on the host."""
    if isinstance(found, Tensor):
        return of_tensor(found)
    if isinstance(found, tuple):
        return tuple(_twin(part, of_tensor) for part in found)
    if is_dataclass(found):
        twin, names = copy(found), {part.name for part in fields(found)}
        kept = {name: part for name, part in vars(found).items() if name in names or isinstance(part, Tensor)}
        twin.__dict__.clear()
        twin.__dict__.update({name: _twin(part, of_tensor) for name, part in kept.items()})
        return twin
    return found


def fill(twin: Any, found: Any) -> None:
    """Copy the tensors of `found` into those of its twin, all of one dtype in one launch."""
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for to, given in zip(_tensors(twin), _tensors(found), strict=True):
        if to is not given:
            targets, sources = by_dtype.setdefault(to.dtype, ([], []))
            targets.append(to)
            sources.append(given)
    for targets, sources in by_dtype.values():
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
