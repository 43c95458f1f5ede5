"""Fixtures for every folder of tests. What takes seconds to import is imported where it is used: the process that only
shares the tests out among others needs none of it."""

import gc
import math
import os
import random
import resource
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager, suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As of whatever a shell starts in the background; the processes that tests interrupt would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if not any(Path("/dev").glob("nvidia*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton's kernels then run on a CPU; read when Triton is imported

# Files that take long. They must not begin late, or one process works alone in the end.
LONG = {
    "test_packaging.py", "test_triton_compiles.py", "test_long_context.py", "test_engine.py", "test_exactness.py",
    "test_console.py", "test_gpu_check.py",
}  # fmt: skip

UNTIL = float(os.environ.get("LONGDRAFT_TESTS_UNTIL", "inf"))  # in `time.time()`


def load(file: str) -> ModuleType:
    """A file of tests/ as a module of its own."""
    path = Path(__file__).parent / file
    spec = spec_from_file_location(f"shared_{path.parent.name}_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pytest_sessionstart(session: pytest.Session) -> None:
    """Until all tests are collected nothing is searched for garbage: what is made by then stays."""
    if session.config.getoption("numprocesses", None) and not hasattr(session.config, "workerinput"):
        return  # pytest-xdist's other processes run the tests
    gc.disable()
    import torch

    if not torch.cuda.is_available():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the CPU is meant, also where there is a GPU that PyTorch cannot use


def pytest_collection_finish() -> None:
    """What is there by now stays to the end: a search for garbage need not look at all tests and libraries again."""
    gc.collect()
    gc.freeze()
    gc.enable()
    if (interpreter := sys.modules.get("triton.runtime.interpreter")) is not None:
        patched = set()

        def call(function, *args, **kwargs):
            """A device function's call. Triton's own goes through all names of the language each time, not once."""
            if function.fn.__module__ not in patched:
                patched.add(function.fn.__module__)
                interpreter._patch_lang(function.fn)
            return function.rewrite()(*args, **kwargs)

        interpreter.InterpretedFunction.__call__ = call
        # Else nearly half of its time goes into looking for sums that are too large. Their results differ anyway.
        interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """benchmarks/checks/gpu_check.py gives tests a time after which none begins."""
    if time.time() > UNTIL:
        pytest.skip("no time was left")


def pytest_sessionfinish() -> None:
    """Where tests started W&B's service in this process it is let go of here: at exit W&B would print a traceback where
    it has ended already."""
    if (wandb := sys.modules.get("wandb")) is not None:
        with suppress(ConnectionError):
            wandb.teardown()


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks at the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several workers a file's tests stay together, and so do all files that ask for the trained `runs`, which
    cost most and so come first; then the trainer's, then the LONG ones. Where there is a time after which none begins
    their order is of chance."""
    sharing = {item.path for item in items if "runs" in getattr(item, "fixturenames", ())}
    for item in items:
        item.add_marker(pytest.mark.xdist_group("runs" if item.path in sharing else str(item.path)))
    if math.isfinite(UNTIL):
        random.Random(0).shuffle(items)  # alike in all processes; what fits is then a sample
        return
    items.sort(key=lambda item: (item.path not in sharing, "train" not in item.path.parts, item.path.name not in LONG))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory, shared) -> Path:
    """A random model that chats, in Hugging Face's form, whose tokenizer splits many characters into bytes."""
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    text = "the cat sat on the mat and the dog sat on the log. " * 40 + "naïve 世界 🙂 "
    return shared("tiny_checkpoint.py").save(tmp_path_factory.mktemp("tiny"), text, 290, seed=3, chat_template=template)


@pytest.fixture(scope="session")
def shared() -> Callable[[str], ModuleType]:
    """(file of tests/) -> the builders in it, as a module of its own."""
    return load


def of_file(file: str, name: str = "") -> Any:
    """A fixture: a file of tests/ as a module, or what has this name in it."""
    return pytest.fixture(scope="session")(lambda shared: getattr(shared(file), name) if name else shared(file))


tiny_target = of_file("tiny_target.py", "make_tiny_target")  # `tiny_target(n_layers=3, dtype=torch.bfloat16, ...)`
plain = of_file("plain.py")  # what a kernel's error is measured by
trees = of_file("kernels/test_tree_attention.py")  # its builders: `draw`, `random_tree`, `poisoned`, `row_by_row`
pretended_cuda = of_file("pretended_cuda.py")  # a CUDA device that is not there
serving = of_file("hub.py", "serving")  # (folder of folders OWNER/NAME) -> context of a hub of them on this machine
authors = of_file("authors.py")  # drafts in the forms in which their authors publish them
no_masks = of_file("no_masks.py", "NoMasks")  # a watch over the masks of a pass


@pytest.fixture(scope="session")
def files_of() -> Callable[[Path], dict[str, bytes]]:
    """(folder) -> its files by their paths in it, without locks."""

    def read(folder: Path) -> dict[str, bytes]:
        files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}

    return read


@pytest.fixture(scope="session")
def no_file_above() -> Callable:
    """(bytes) -> context in which a larger file cannot be written by this process and its children, as on a full
    disk."""

    @contextmanager
    def limited(n_bytes: int):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited


@pytest.fixture
def merged(monkeypatch) -> None:
    """Tree attention's runs are merged for all rows at once in Triton's interpreter; a program for each takes long."""
    import torch

    from longdraft.kernels.triton import tree_attention

    def merge(runs, lses, out, lse, n_rows, group, n_kv, *_, **__):
        natural = lses * math.log(2)
        for to, x in ((out, (runs * natural.softmax(1)[..., None]).sum(1)), (lse, natural.logsumexp(1))):
            to.copy_(x.view(-1, n_kv, group, n_rows, *x.shape[2:]).movedim(3, 1).reshape(to.shape))

    if not torch.cuda.is_available():
        monkeypatch.setattr(tree_attention, "_merge", defaultdict(lambda: merge))


@pytest.fixture
def c_kernels() -> None:
    """For tests of the C kernels: skips where they cannot be had. Where nothing stands against them they must build."""
    from longdraft.kernels.cpu import library

    if (why := library.obstacle()) is not None:
        pytest.skip(f"needs the C kernels: {why}")
    assert library.library() is not None


@pytest.fixture(scope="session")
def exact_dtype() -> "torch.dtype":
    """What tokens are compared in without a look at how close decisions were: bf16 where the C kernels serve, as a row
    then has the same bits in a pass of any width; else fp32, where few decisions see how passes differ."""
    import torch

    from longdraft.kernels.cpu import library

    return torch.float32 if library.obstacle() is not None else torch.bfloat16
