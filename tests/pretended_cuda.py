"""A simulated CUDA device: its tensors report cuda:0 but hold their values on the CPU, and every operation on them is
observed. Code for GPUs then runs on any machine, and a test can tell where the host would wait.

    with PretendedCuda() as gpu:
        gpu.put(target.model)  # its weights and buffers
        gpu.forget()
        Engine(target, drafter).generate(...)  # records its steps, as on CUDA
        assert not gpu.waits

What it shows:

- `waits`: where the host would wait for queued work: reads of values (`item`, `tolist`, a branch, an index), results
  whose size depends on values (`nonzero`, a mask as index), copies between host and device that are not queued (from or
  to memory that is not pinned, a number assigned to one element, a list as index), `torch.cuda.synchronize`, a wait for
  an event before anything is queued after it.
- `late`: waits for events after later work was queued, as in `HostCopy`. `queued`: copies without a wait.
- An operation on tensors of two devices raises, as in PyTorch.
- The first replay of recorded work (infer/graphs.py) runs it with all waits and copies banned. Later replays do what a
  CUDA graph does: the same operations on the same memory, whatever the host's values are by then. After each, the
  memory that the work allocated holds something else, as other recorded work may have it.
- `calls`: how often each operation is called, views included; kernels by their function, as "triton: choose".
- `launches`: what the host launches outside recorded work, replays included, by operation and place.

What it does not show: speed; a kernel's arithmetic, memory or launch, because references replace Triton's and Liger's
kernels and flash-attention (segment_attention.py); what CUDA's libraries would choose. There is one device and one
stream, so no races. Every operation accepts a host tensor without dimensions, which is wrong for some (`cat`). A tensor
that PyTorch makes in C++ with another tensor's options is on the host.

The fixture `pretended_cuda` is this module.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from longdraft.infer import graphs
from longdraft.kernels import (
    backend,
    gate,
    linear_loss,
    rms_norm,
    segment_attention,
    tree_attention,
)

DEVICE = torch.device("cuda:0")
MEMORY = 80 * 2**30
PEAK = 3 * 2**30  # peak bytes of tensors
# Operations that need a value on the host, for the result or its size.
READS = {
    "_local_scalar_dense": "a value",
    "equal": "whether all is equal",
    "nonzero": "places",
    "masked_select": "chosen values",
    "_unique2": "different values",
    "unique_dim": "different values",
    "bincount": "counts",
}  # fmt: skip
# Besides views.
NO_LAUNCHES = ("empty", "empty_like", "new_empty", "empty_strided", "detach", "alias", "_unsafe_view")
INDEXING = ("index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_")


class Pretended(Tensor):
    """A tensor on the device. `value`: the CPU tensor with the same memory."""

    value: Tensor
    # The device watches functions; otherwise every result would become an instance of this class.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, value: Tensor) -> "Pretended":
        # PyTorch itself takes it for a CPU tensor: for a missing device it refuses even views.
        made = value.as_subclass(cls)  # takes less than half the time of `_make_wrapper_subclass`
        made.value = value
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} outside of `with PretendedCuda()`")

    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        return self.value.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.value.untyped_storage()

    def __deepcopy__(self, memo: dict) -> "Pretended":
        copied = Pretended(self.value.detach().clone()).requires_grad_(self.requires_grad)
        return nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied

    def __repr__(self, **_: Any) -> str:
        return f"Pretended({self.value!r})"


def value_of(x: Any) -> Any:
    """The CPU tensor of a device's tensor, in the same memory; anything else unchanged."""
    return x.value if isinstance(x, Pretended) else x


def _taken(x: Any, hosts: list[Tensor]) -> Any:
    """An operation's arguments with the device's tensors replaced by their values. `hosts` collects all other
    tensors."""
    if isinstance(x, Pretended):
        return x.value
    if isinstance(x, Tensor):
        hosts.append(x)
    elif isinstance(x, (list, tuple)):
        return type(x)([_taken(one, hosts) for one in x])
    return x


def _map(change: Callable[[Tensor], Any], x: Any) -> Any:
    """An operation's results with `change` applied to each tensor: like `tree_map`, in a quarter of the time."""
    if isinstance(x, Tensor):
        return change(x)
    return type(x)([_map(change, one) for one in x]) if isinstance(x, (list, tuple)) else x


def _on_device(x: Any) -> Any:
    return Pretended(x) if isinstance(x, Tensor) and not isinstance(x, Pretended) else x


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


class PretendedCuda:
    """The device, as a context: inside, operations are watched, `torch.cuda` has the functions that decoding and
    training call, Triton's kernels are their references, and `infer/graphs.py` records without CUDA.

    Attributes:
        waits, late, queued, launches: counts of what happened, with its place in the project. See above.
        calls: counts of operations on the device.
    """

    def __init__(self):
        self.waits, self.late, self.queued, self.calls = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
        self.launches = Counter[str]()
        self._stack, self._pinned = ExitStack(), dict[int, torch.UntypedStorage]()
        self._banned, self._counting = "", True
        self._tape: list[tuple[Callable[..., Any], Any, dict, list[tuple[int, Tensor]]]] | None = None

    def __enter__(self) -> "PretendedCuda":
        torch._C._ensureCUDADeviceGuardSet()
        enter, patch = self._stack.enter_context, mock.patch.object
        for name, stand_in in self._torch_cuda().items():
            enter(patch(torch.cuda, name, stand_in))
        enter(patch(backend, "triton_kernels", self.triton_kernels))
        enter(patch(backend, "liger_layers", self.liger_layers))
        enter(patch(backend, "varlen_attention", lambda: self.varlen_attention))
        enter(patch(graphs, "cuda_graphs", lambda _: graphs.Graphs(self.record)))
        for (owner, name), stand_in in FUNCTIONS.items():
            enter(patch(owner, name, _instead(self, getattr(owner, name), stand_in)))
        enter(_Operations(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def put(self, module: nn.Module) -> nn.Module:
        """Move the module's weights and buffers to the device."""
        for part in module.modules():
            for name, weight in part._parameters.items():
                if weight is not None and not isinstance(weight, Pretended):
                    part._parameters[name] = nn.Parameter(Pretended(weight.data), weight.requires_grad)
            for name, buffer in part._buffers.items():
                part._buffers[name] = _on_device(buffer)
        if getattr(getattr(module, "config", None), "tie_embeddings", False):
            module.tie()
        return module

    def forget(self) -> None:
        """Count from zero."""
        for counted in (self.waits, self.late, self.queued, self.calls, self.launches):
            counted.clear()

    def count(self, owner: type, name: str) -> None:
        """From now on count this method of the project in `calls`, too; calls in recorded work count at each replay."""
        function = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return function(*args, **kwargs)

        self._stack.enter_context(mock.patch.object(owner, name, call))

    @contextmanager
    def no_waits(self, why: str) -> Iterator[None]:
        """Inside, waits and copies between host and device raise; `why` names the context."""
        before, self._banned = self._banned, why
        try:
            yield
        finally:
            self._banned = before

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Inside, waits and copies are not counted: they are not the project's."""
        before, self._counting = self._counting, False
        try:
            yield
        finally:
            self._counting = before

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Like CUDA's recorder (`Graphs`): runs `work` at every replay and not before."""
        tape, calls = [], Counter[str]()

        def replay() -> None:
            self._launch("replay")
            assert self._tape is None, "a replay in recorded work"
            if calls:
                self.calls.update(calls)
                with _disable_current_modes():
                    for function, args, kwargs, own in tape:
                        made = function(*args, **kwargs)
                        if own:
                            made = tree_leaves(made)
                            for place, still in own:
                                still.copy_(made[place])
            else:
                tape.clear()  # left by a first replay that failed
                before, self._tape = self.calls.copy(), tape
                try:
                    with self.no_waits("in recorded work"):
                        work()
                finally:
                    self._tape = None
                calls.update(self.calls - before)
            for *_, own in tape:
                for _, made in own:
                    made.untyped_storage().fill_(113)

        return replay

    def _done(self, function: Callable[..., Any], args: Any, kwargs: dict, made: Any) -> Any:
        """`made`, the function's result; a replay computes it again in the same memory."""
        if self._tape is not None:
            given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
            found = [x if isinstance(x, Tensor) else None for x in tree_leaves(made)]
            own = [(n, x) for n, x in enumerate(found) if x is not None and x.untyped_storage().data_ptr() not in given]
            self._tape.append((function, args, kwargs, own))
        return made

    # Counting.

    def _launch(self, what: str) -> None:
        self.calls[what] += 1
        if not self._banned:
            self.launches[f"{what} at {place()}"] += 1

    def wait(self, what: str) -> None:
        """The host waits for the device."""
        self._see(self.waits, f"wait: {what}")

    def _copy(self, host: Tensor, to: str, non_blocking: bool) -> None:
        """A copy between the device and this host tensor."""
        pinned = host.untyped_storage()._cdata in self._pinned
        self._see(
            *((self.queued, f"copy to the {to}") if non_blocking and pinned else (self.waits, f"copy to the {to}"))
        )

    def _see(self, where: Counter[str], what: str) -> None:
        if self._counting:
            what = f"{what} at {place()}"
            assert not self._banned, f"{self._banned}: {what}"
            where[what] += 1

    def _pin(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        self._pinned[storage._cdata] = storage  # kept alive, so that no other memory gets its address
        return x

    # Replacements of CUDA and its kernels.

    def _torch_cuda(self) -> dict[str, Any]:
        gpu = self

        class Event:
            def __init__(self, *_: Any, **__: Any):
                self._calls = -1

            def record(self, *_: Any) -> None:
                self._calls = gpu.calls.total()

            def query(self) -> bool:
                return self._calls != gpu.calls.total()

            def synchronize(self) -> None:
                if self._calls >= 0 and not self.query():
                    gpu.wait("an event that nothing is queued after")
                else:
                    gpu._see(gpu.late, "event")

            def elapsed_time(self, later: Any) -> float:
                return 1.0 + later._calls - self._calls  # as if every operation took a millisecond

        @contextmanager
        def entered(*_: Any) -> Iterator[None]:
            yield

        one = SimpleNamespace(multi_processor_count=132, total_memory=MEMORY, major=9, minor=0)
        return {
            "Event": Event,
            "Stream": lambda *_, **__: SimpleNamespace(synchronize=lambda: gpu.wait("a stream")),
            "current_stream": lambda *_: SimpleNamespace(synchronize=lambda: gpu.wait("a stream")),
            "stream": entered,
            "device": entered,
            "synchronize": lambda *_: gpu.wait("torch.cuda.synchronize"),
            "current_device": lambda: 0,
            "get_device_properties": lambda *_: one,
            "get_device_capability": lambda *_: (one.major, one.minor),
            "mem_get_info": lambda *_: (MEMORY, MEMORY),
            "memory_reserved": lambda *_: 0,
            "memory_allocated": lambda *_: 0,
            "reset_peak_memory_stats": lambda *_: None,
            "max_memory_allocated": lambda *_: PEAK,
            "_lazy_init": lambda: None,
        }

    def triton_kernels(self, name: str, device_type: str) -> Any | None:
        """Replaces `backend.triton_kernels`: each function is the reference of the same name, if there is one."""
        if device_type != "cuda":
            return None
        functions = OTHERWISE.get(name)
        if functions is None:
            names = vars(import_module(f"longdraft.kernels.{name}"))
            functions = {key.removesuffix("_reference"): x for key, x in names.items() if key.endswith("_reference")}
        return SimpleNamespace(**{key: self._kernel(key, reference) for key, reference in functions.items()})

    def liger_layers(self, device_type: str) -> backend.LigerLayers | None:
        """Replaces `backend.liger_layers`; with gradients, the operations of a kernel's reference run one by one."""
        if device_type != "cuda":
            return None
        own = backend.LigerLayers(rms_norm.rms_norm_reference, rms_norm.add_rms_norm_reference, gate.gate_reference)
        return backend.LigerLayers(*map(self._with_gradients, own._fields, own))

    def _with_gradients(self, name: str, reference: Callable[..., Any]) -> Callable[..., Any]:
        kernel = self._kernel(name, reference)

        def launch(*args: Any) -> Any:
            wanted = any(isinstance(x, Tensor) and x.requires_grad for x in args)
            return (reference if wanted and torch.is_grad_enabled() else kernel)(*args)

        return launch

    def _kernel(self, name: str, reference: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            for x in tree_leaves((args, kwargs)):
                if isinstance(x, Tensor) and not isinstance(x, Pretended):
                    raise RuntimeError(f"triton: {name} is given a tensor of the host, {tuple(x.shape)}, at {place()}")
            self._launch(f"triton: {name}")
            return self._unwatched(reference, args, kwargs)

        return launch

    def _unwatched(self, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Run the function on the CPU tensors. Watching its operations would take longer than everything else."""
        args, kwargs = tree_map(value_of, args), tree_map(value_of, kwargs)
        with _disable_current_modes():
            return tree_map(_on_device, self._done(function, args, kwargs, function(*args, **kwargs)))

    def varlen_attention(
        self, q, k, v, q_borders, k_borders, most_queries, most_keys, window, with_lse: bool = False
    ) -> Any:
        """Replaces flash-attention's (see `backend.varlen_attention`), with gradients."""
        self._launch("varlen attention")
        args = q, k, v, q_borders, k_borders, most_queries, most_keys, window, with_lse
        if not torch.is_grad_enabled():
            return self._unwatched(varlen, args, {})
        with self.uncounted():
            return varlen(*args)

    # Handling of operations.

    def operation(self, func: Any, mine: bool, args: tuple, kwargs: dict) -> Any:
        """Run a PyTorch operation as the device would. mine: an argument is, or contains, a tensor of the device."""
        call, name, free = KNOWN.get(func) or _known(func)
        hosts, device, pinned, named = list[Tensor](), None, False, kwargs
        values = [x.value if type(x) is Pretended else _taken(x, hosts) for x in args]
        if kwargs:
            device, pinned = kwargs.get("device"), bool(kwargs.get("pin_memory"))
            kwargs = {key: x for key, x in kwargs.items() if key not in ("device", "pin_memory")}
            named = {key: _taken(x, hosts) for key, x in kwargs.items()}
        if name == "_to_copy" and hosts:
            return self._move(func(*args, **kwargs), _is_cuda(device), bool(kwargs.get("non_blocking")))
        if not mine and not _is_cuda(device):
            made = call(*args, **kwargs) if device is None else call(*args, **kwargs, device=device)
            return _map(self._pin, made) if pinned else made
        if free:
            self.calls[name] += 1
        else:
            self._launch(name)
        if name == "copy_":
            self._watch_copy(*args[:2], bool(args[2] if len(args) > 2 else kwargs.get("non_blocking")))
        elif name in INDEXING:
            self._watch_index(name, args)
        else:
            self._watch(name, args, kwargs, hosts)
        made = call(*values, **named)
        if self._tape is not None and not func.is_view:
            self._done(call, values, named, made)
        return Pretended(made) if type(made) is Tensor else _map(Pretended, made)

    def _watch(self, name: str, args: tuple, kwargs: dict, hosts: list[Tensor]) -> None:
        if name in READS:
            self.wait(READS[name])
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            self.wait("how often to repeat")
        if name.startswith("masked_fill") and len(args) > 2 and isinstance(args[2], Pretended):
            self.wait("what to fill with")
        if wrong := [tuple(x.shape) for x in hosts if x.dim()]:
            raise RuntimeError(f"{name}: tensors of the host, {wrong}, meet the device's at {place()}")

    def _watch_copy(self, to: Tensor, given: Tensor, non_blocking: bool) -> None:
        if isinstance(to, Pretended) and not isinstance(given, Pretended):
            self._copy(given, "device", non_blocking)
        elif isinstance(given, Pretended) and not isinstance(to, Pretended):
            self._copy(to, "host", non_blocking)

    def _watch_index(self, name: str, args: tuple) -> None:
        if not isinstance(args[0], Pretended):
            raise RuntimeError(f"{name}: the host's tensor is indexed with the device's at {place()}")
        indices = [index for index in args[1] if index is not None]
        masks = [index for index in indices if index.dtype in (torch.bool, torch.uint8)]
        value = args[2] if len(args) > 2 else None
        number = value is not None and not isinstance(value, Pretended)
        if number and value.dim():
            raise RuntimeError(f"{name}: the host's tensor is put into the device's at {place()}")
        if any(not isinstance(index, Pretended) for index in indices):
            self.wait("an index of the host")
        # Assigning a number through a mask is a fill, which needs no list of places.
        if masks and not (number and len(masks) == len(indices)):
            self.wait("places of a mask")
        elif number and not masks:
            self.wait("a number of the host")

    def _move(self, x: Tensor, to_cuda: bool, non_blocking: bool) -> Tensor:
        """A copy on the other device, or the tensor itself."""
        if isinstance(x, Pretended) == to_cuda:
            return x
        assert not (x.requires_grad and torch.is_grad_enabled()), "gradients do not go between devices here"
        if to_cuda:
            self._copy(x, "device", non_blocking)
            self._launch("copy to the device")
            return Pretended(x.detach().clone())
        made = value_of(x).detach().clone()
        self._copy(self._pin(made) if non_blocking else made, "host", non_blocking)
        return made


class _Operations(TorchDispatchMode):
    def __init__(self, gpu: PretendedCuda):
        super().__init__()
        self._gpu = gpu

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and disabling dynamo at each operation takes as long as the operation

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self._gpu.operation(func, Pretended in types, args, kwargs or {})


KNOWN: dict[Any, tuple[Callable[..., Any], str, bool]] = {}


def _known(func: Any) -> tuple[Callable[..., Any], str, bool]:
    """A PyTorch operation's function, its name, and whether it launches nothing."""
    name = func.overloadpacket.__name__
    return KNOWN.setdefault(func, (func._op, name, func.is_view or name in NO_LAUNCHES))


def place(frames: int = 3) -> str:
    """The project's innermost lines on the stack, innermost first."""
    found, frame = list[str](), sys._getframe(1)
    while frame is not None and len(found) < frames:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("longdraft."):
            found.append(f"{module.removeprefix('longdraft.')}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(found) or "a test"


# Calls that PyTorch handles before they become operations of a device.


def _to(gpu: PretendedCuda, func: Callable, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    like = next((one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)), None)
    if like is not None:
        return _to(gpu, func, x, like.device, like.dtype)
    copy = kwargs.pop("copy", False)
    device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
    to_cuda = isinstance(x, Pretended) if device is None else device.type == "cuda"
    moved = gpu._move(x, to_cuda, non_blocking)
    if dtype is not None and dtype != moved.dtype:
        return func(moved, dtype)
    return moved.clone() if copy and moved is x else moved


def _tensor(gpu: PretendedCuda, func: Callable, data: Any, *args: Any, **kwargs: Any) -> Tensor:
    device, pinned = kwargs.pop("device", None), kwargs.pop("pin_memory", False)
    if isinstance(data, Pretended):
        to_cuda = device is None or _is_cuda(device)
        return gpu._move(data if func is not torch.tensor else data.clone(), to_cuda, False)
    made = func(data, *args, **kwargs)
    return gpu._move(gpu._pin(made) if pinned else made, _is_cuda(device), False)


def _tolist(gpu: PretendedCuda, func: Callable, x: Tensor) -> Any:
    if isinstance(x, Pretended):
        gpu.wait("values")
    return func(value_of(x))


def _numpy(gpu: PretendedCuda, func: Callable, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    if isinstance(x, Pretended):
        raise TypeError(f"numpy: a tensor of the device at {place()}; copy it to the host first")
    return func(x, *args, **kwargs)


def _pin_memory(gpu: PretendedCuda, func: Callable, x: Tensor, *_: Any) -> Tensor:
    assert not isinstance(x, Pretended), "only the host's memory can be pinned"
    return gpu._pin(x.clone())


def _instead(gpu: PretendedCuda, func: Callable, stand_in: Callable) -> Callable:
    return lambda *args, **kwargs: stand_in(gpu, func, *args, **kwargs)


FUNCTIONS: dict[tuple[Any, str], Callable[..., Any]] = {
    (Tensor, "to"): _to,
    (Tensor, "cpu"): lambda gpu, func, x, **_: gpu._move(x, False, False),
    (Tensor, "cuda"): lambda gpu, func, x, *_, non_blocking=False: gpu._move(x, True, non_blocking),
    (Tensor, "tolist"): _tolist,
    (Tensor, "numpy"): _numpy,
    (Tensor, "pin_memory"): _pin_memory,
    (torch, "tensor"): _tensor,
    (torch, "as_tensor"): _tensor,
    (torch, "asarray"): _tensor,
}


# References whose signature differs from their kernel's.


def dense(q, keys, values, lengths, bits, depths, window=None) -> tuple[Tensor, Tensor]:
    rows = torch.arange(q.shape[1])
    tree = None if bits is None else (bits[:, :, rows // 64] >> rows % 64 & 1) == 1
    return tree_attention.tree_attention_reference(q, keys, values, lengths, tree, window)


def _cross(q, keys, values, lengths, n_splits=None) -> tuple[Tensor, Tensor]:
    return tree_attention.cross_attention_reference(q, keys, values, lengths)


def varlen(q, k, v, q_borders, k_borders, most_queries, most_keys, window, with_lse) -> Any:
    borders = zip(pairwise(value_of(q_borders).tolist()), pairwise(value_of(k_borders).tolist()), strict=True)
    segments = [(*queries, *keys) for queries, keys in borders]
    assert most_queries == max(s[1] - s[0] for s in segments)
    assert most_keys >= max(s[3] - s[2] for s in segments)  # may be all rows of a cache
    out, lse_NH = segment_attention.segment_attention_reference(q, k, v, segments, window)
    return (out, lse_NH.detach().T) if with_lse else out


OTHERWISE: dict[str, dict[str, Callable[..., Any]]] = {
    "tree_attention": {"tree_attention": dense, "cross_attention": _cross, "tune": lambda *_: None},
    "linear_loss": {"chunk_losses": linear_loss.chunk_losses},
}
