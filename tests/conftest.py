"""Fixtures for all test folders. Packages that take seconds to import are imported where they are used: the process
that only distributes the tests to others does not need them."""

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
    # A shell ignores SIGINT in background jobs, and the processes that tests interrupt would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if not any(Path("/dev").glob("nvidia*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # runs Triton's kernels on a CPU; read when Triton is imported

# Slow files. They must start early, or one process works alone at the end.
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
    """No garbage collection until all tests are collected: everything made until then stays alive."""
    if session.config.getoption("numprocesses", None) and not hasattr(session.config, "workerinput"):
        return  # pytest-xdist's other processes run the tests
    gc.disable()
    import torch

    if not torch.cuda.is_available():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # use the CPU, even if there is a GPU that PyTorch cannot use


def pytest_collection_finish() -> None:
    """Freeze all objects made so far: garbage collection need not scan all tests and libraries again."""
    gc.collect()
    gc.freeze()
    gc.enable()
    if (interpreter := sys.modules.get("triton.runtime.interpreter")) is not None:
        patched = set()

        def call(function, *args, **kwargs):
            """Call a device function. Triton's own version patches all names of the language at each call, not once."""
            if function.fn.__module__ not in patched:
                patched.add(function.fn.__module__)
                interpreter._patch_lang(function.fn)
            return function.rewrite()(*args, **kwargs)

        interpreter.InterpretedFunction.__call__ = call
        # Otherwise nearly half of the time goes into overflow checks of sums. An overflow shows in the results anyway.
        interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """benchmarks/checks/gpu_check.py sets a time after which no test starts."""
    if time.time() > UNTIL:
        pytest.skip("no time was left")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """With a time limit a failure is shown at once, because a killed process prints no summary."""
    if report.failed and math.isfinite(UNTIL):
        print(f"\n{report.nodeid}\n{report.longreprtext[-1500:]}", flush=True)


def pytest_sessionfinish() -> None:
    """Shut down W&B's service if tests started it in this process: at exit W&B would print a traceback if it had
    already ended."""
    if (wandb := sys.modules.get("wandb")) is not None:
        with suppress(ConnectionError):
            wandb.teardown()


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks at the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several workers a file's tests stay together, and so do all files that use the trained `runs`. Those cost
    most, so they come first; then the trainer's files, then the LONG ones. If there is a time limit, the order is
    random."""
    sharing = {item.path for item in items if "runs" in getattr(item, "fixturenames", ())}
    for item in items:
        item.add_marker(pytest.mark.xdist_group("runs" if item.path in sharing else str(item.path)))
    if math.isfinite(UNTIL):
        random.Random(0).shuffle(items)  # the same in all processes; the tests that fit are then a sample
        return
    items.sort(key=lambda item: (item.path not in sharing, "train" not in item.path.parts, item.path.name not in LONG))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory, shared) -> Path:
    """A random chat model in Hugging Face's format, whose tokenizer splits many characters into bytes."""
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    text = "the cat sat on the mat and the dog sat on the log. " * 40 + "naïve 世界 🙂 "
    return shared("tiny_checkpoint.py").save(tmp_path_factory.mktemp("tiny"), text, 290, seed=3, chat_template=template)


@pytest.fixture(scope="session")
def shared() -> Callable[[str], ModuleType]:
    """(file of tests/) -> the builders in it, as a module of its own."""
    return load


def of_file(file: str, name: str = "") -> Any:
    """A fixture: a file of tests/ as a module, or the object `name` in it."""
    return pytest.fixture(scope="session")(lambda shared: getattr(shared(file), name) if name else shared(file))


tiny_target = of_file("tiny_target.py", "make_tiny_target")  # `tiny_target(n_layers=3, dtype=torch.bfloat16, ...)`
plain = of_file("plain.py")  # the yardstick for kernels' errors
trees = of_file("kernels/test_tree_attention.py")  # its builders: `draw`, `random_tree`, `poisoned`, `row_by_row`
pretended_cuda = of_file("pretended_cuda.py")  # a simulated CUDA device
serving = of_file("hub.py", "serving")  # (folder of folders OWNER/NAME) -> context with a local hub of them
authors = of_file("authors.py")  # drafts in their authors' published formats
no_masks = of_file("no_masks.py", "NoMasks")  # a check of the masks of a pass


@pytest.fixture(scope="session")
def files_of() -> Callable[[Path], dict[str, bytes]]:
    """(folder) -> relative path -> bytes of its files, without locks."""

    def read(folder: Path) -> dict[str, bytes]:
        files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}

    return read


@pytest.fixture(scope="session")
def no_file_above() -> Callable:
    """(bytes) -> context in which this process and its children cannot write a larger file, as on a full disk."""

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
    """In Triton's interpreter, merge tree attention's runs for all rows at once; one program per row is slow."""
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
    """For tests of the C kernels: skips where they cannot be used; elsewhere they must build."""
    from longdraft.kernels.cpu import library

    if (why := library.obstacle()) is not None:
        pytest.skip(f"needs the C kernels: {why}")
    assert library.library() is not None


@pytest.fixture(scope="session")
def exact_dtype() -> "torch.dtype":
    """The dtype in which tokens are compared without checking how close decisions were: bf16 with the C kernels,
    because a row then has the same bits in a pass of any width; else fp32, where the rounding of passes changes few
    decisions."""
    import torch

    from longdraft.kernels.cpu import library

    return torch.float32 if library.obstacle() is not None else torch.bfloat16
