"""Work on a device that is queued once, recorded, and then replayed in one call: CUDA graphs.

A step of decoding is hundreds of small kernels, and launching them one by one takes the host longer than a GPU takes to
run them. What is recorded is a function of tensors whose shapes, and everything else that steers it on the host, are in
its key: the runner records the target's pass and what follows it for every width (infer/runner.py), drafters
their networks (`SlotState.run`). Not here: copies between host and device (kernels/transfer.py).
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from longdraft.kernels import backend
from longdraft.kernels.experts import waits_for_host
from longdraft.kernels.reference.tree_attention import MOST_ROWS
from longdraft.models.decoder import Decoder

T = TypeVar("T")
# Runs work without effect and remembers it: (what the work returned, a function that does it again on the same memory).
Recorder = Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]


@dataclass
class _Recorded:
    """One key's work. Its inputs are copies and its outputs lie outside of the recording's memory, both for good, and
    the same for all variants; `owners` keeps what else it reads and writes alive, so that no key ever means other
    memory."""

    owners: tuple
    inputs: tuple
    outputs: Any
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
        self._known: dict[tuple, _Recorded] = {}

    def run(
        self,
        key: tuple,
        owners: tuple,
        work: Callable[..., T],
        *inputs: Any,
        widest: int = 1,
        variant: object = None,
    ) -> T:
        """`work(*inputs)`, queued.

        Args:
            key: name of the work, and what else on the host steers it.
            owners: objects whose memory it reads or writes besides its inputs; each keeps that memory where it is for
                as long as it lives.
            work: does nothing but queue: it must not read a tensor on the host, copy from the host, or change
                anything on the host that is read later. It returns tensors, a tuple of such, a dataclass of such, or
                None.
            inputs: tensors that may lie elsewhere the next time, tuples of such or dataclasses of such.
            widest: rows of the widest pass in it; above MOST_ROWS attention reads lengths on the host, so that it
                cannot be recorded.
            variant: one more owner, of which several take turns (samplings): no two of them are at work in one step.
        Returns: what the work returned; where work is recorded, memory that is overwritten when this key runs again.
        """
        if self._recorder is None or widest > MOST_ROWS:
            return work(*inputs)
        of_all = (*key, *map(id, owners), tuple(map(_form, _tensors(inputs))))
        key = (*of_all, id(variant))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._first(of_all, (*owners, variant), work, inputs)
            self.fresh = True
            return _twin(known.outputs)
        _fill(known.inputs, inputs)
        if known.replay is None:
            _, known.replay = self._recorder(lambda: _fill(known.outputs, work(*known.inputs)))
            self.fresh = True
        known.replay()
        return _twin(known.outputs)

    def _first(self, of_all: tuple, owners: tuple, work: Callable[..., Any], inputs: tuple) -> _Recorded:
        """The first run of a key, on the memory of another variant where it had the same forms."""
        other = next((known for key, known in self._known.items() if key[:-1] == of_all), None)
        # The inputs' copies from the first run on: kernels are compiled for how tensors lie.
        if other is None:
            copies = _twin(inputs, Tensor.clone)
            return _Recorded(owners, copies, _twin(work(*copies), Tensor.clone))
        _fill(other.inputs, inputs)
        outputs = work(*other.inputs)
        if _twin(outputs, _form) != _twin(other.outputs, _form):
            return _Recorded(owners, other.inputs, _twin(outputs, Tensor.clone))
        _fill(other.outputs, outputs)
        return _Recorded(owners, other.inputs, other.outputs)

    def forget(self, owner: object) -> None:
        """Let go of the work that reads or writes the memory of this owner."""
        self._known = {
            key: known for key, known in self._known.items() if all(one is not owner for one in known.owners)
        }

    def clear(self) -> None:
        """Forget all recorded work, and let go of its memory."""
        self._known.clear()


def graphs_for(wanted: bool | None, model: Decoder) -> Graphs:
    """What records an engine's steps with this target, if anything; wanted=None: where it can be. A rotary table
    that is made anew for every length cannot be recorded; nor can a pass whose layers are gathered from other ranks:
    replayed, it would read weights that are gone, while the others wait for this rank; nor experts whose
    products wait for the host (kernels/experts.py); nor the classes of transformers.

    Raises: ValueError where it is wanted and cannot be.
    """
    device, rope_type = model.embed_tokens.weight.device, model.config.rope.type
    on_device = backend.triton_kernels("tree_attention", device.type) is not None
    waits = model.config.experts is not None and waits_for_host(model.embed_tokens.weight)
    possible = on_device and model.records and rope_type != "dynamic" and model.weights_stay and not waits
    if wanted and not possible:
        foreign = "" if model.records else ", and a model of transformers"
        weights = "stay" if model.weights_stay else "are shared out among ranks"
        experts = ", and experts whose products wait for the host" if waits else ""
        raise ValueError(
            "graphs=True: needs CUDA, triton, no rope_type 'dynamic' and weights that stay on the device; here "
            f"{device}, {rope_type!r}, and weights that {weights}{experts}{foreign}; leave graphs out"
        )
    return cuda_graphs(device) if possible and wanted is not False else Graphs()


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all engines of a device: cuBLAS keeps memory for each stream that it was ever called on."""
    return torch.cuda.Stream(device)


def cuda_graphs(device: torch.device) -> Graphs:
    """Recorded by CUDA, all in one pool of memory, which is each graph's own only while it runs: what is read later has
    been copied out of it."""
    stream, alive = _capture_stream(device), WeakSet[torch.cuda.CUDAGraph]()
    pool = torch.cuda.graph_pool_handle()

    def record(work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        # As torch.cuda.graph, which also collects garbage and empties the cache of memory every time: a tenth of a
        # second, for each width. Garbage must not be collected meanwhile, for freeing memory ends a recording.
        nonlocal pool
        if not alive:  # a pool ends with the last graph in it
            pool = torch.cuda.graph_pool_handle()
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        torch.cuda.synchronize(device)
        gc.disable()
        try:
            with torch.cuda.device(device), torch.cuda.stream(stream):
                outputs = _captured(graph, pool, work)
        except Exception as error:
            raise RuntimeError(f"a step could not be recorded ({error}); Engine(graphs=False) does without") from error
        finally:
            if collects:
                gc.enable()
        alive.add(graph)
        return outputs, graph.replay

    return Graphs(record)


def _captured(graph: torch.cuda.CUDAGraph, pool: Any, work: Callable[[], Any]) -> Any:
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        outputs = work()
    except BaseException:
        with suppress(RuntimeError):  # the first error is the one to tell
            graph.capture_end()
        raise
    graph.capture_end()
    return outputs


def _tensors(found: Any) -> Iterator[Tensor]:
    """Those that `_twin` makes anew, in their order."""
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, tuple) or is_dataclass(found):
        for part in found if isinstance(found, tuple) else vars(found).values():
            yield from _tensors(part)


def _twin(found: Any, of_tensor: Callable[[Tensor], Tensor] = lambda x: x) -> Any:
    """The same tensors, tuples and dataclasses anew. Of a dataclass's cached properties those that are tensors stay;
    what was read of it on the host does not."""
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


def _form(tensor: Tensor) -> Any:
    return tensor.shape, tensor.dtype


def _fill(still: Any, found: Any) -> None:
    """Copy the tensors of `found` into those of its twin."""
    if isinstance(still, Tensor):
        still.copy_(found)
    elif isinstance(still, tuple):
        for one, other in zip(still, found, strict=True):
            _fill(one, other)
    elif is_dataclass(still):
        for name, part in vars(still).items():
            _fill(part, getattr(found, name))
