"""The architecture's rules, checked on syntax trees: which folder may import which, and only by full names.

Each rule is one test of all files, which names every line that breaks it."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT = {
    "kernels": {"kernels"},
    "models": {"models", "kernels"},
    "data_prep": {"data_prep", "models.files", "models.schema"},
    "infer": {"infer", "models", "kernels"},
    "train": {"train", "models", "kernels", "data_prep.shards"},
    "benchmarks": {"benchmarks", "train", "infer", "models", "kernels", "data_prep"},
    "launch": {"launch", "benchmarks", "train", "infer", "models", "kernels", "data_prep"},
}
OPTIONAL = {"triton", "flash_attn", "liger_kernel"}
# Functions of torch.cuda that use the current device if none is given.
OF_A_DEVICE = {
    "synchronize", "current_stream", "default_stream", "Stream", "mem_get_info", "memory_allocated", "memory_reserved",
    "max_memory_allocated", "max_memory_reserved", "reset_peak_memory_stats", "memory_stats", "get_device_name",
    "get_device_properties", "get_device_capability", "utilization",
}  # fmt: skip
FILES = sorted(path for folder in MAY_IMPORT for path in (ROOT / folder).rglob("*.py"))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file's syntax tree, the module first."""
    return tuple(ast.walk(ast.parse(path.read_text())))


@pytest.fixture(scope="module", autouse=True)
def _nothing_kept() -> Iterator[None]:
    yield
    nodes.cache_clear()
    imported.cache_clear()


@cache
def imported(path: Path) -> tuple[tuple[str, int], ...]:
    """Every module that a file imports, with its line. `from a import b` counts as both `a` and `a.b`; a relative
    import keeps its dots."""
    found = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(("." * node.level + (node.module or ""), node.lineno))
            if not node.level:
                found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return tuple(found)


def place(path: Path, line: int = 1) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def none_of(offenders: list[str]) -> None:
    """Fail with one line per offender."""
    assert len(FILES) > 20 and not offenders, "\n".join([f"{len(offenders)} found:", *offenders])


def test_imports_follow_the_design():
    offenders = []
    for path in FILES:
        folder = path.relative_to(ROOT).parts[0]
        allowed = set(MAY_IMPORT[folder])
        if path == ROOT / "train" / "evaluate.py":
            allowed.add("infer")  # decodes for real during training
        for name, line in imported(path):
            here, top = place(path, line), name.split(".")[0]
            if name.startswith("."):
                offenders.append(f"{here}: relative import {name!r}; write the full name")
            elif top in MAY_IMPORT or top in {"tests", "configs"}:
                offenders.append(f"{here} imports {name!r}; write longdraft.{name}, and never tests or configs")
            elif top == "longdraft":
                ours = name.removeprefix("longdraft").lstrip(".")
                if not any(ours == a or ours.startswith(a + ".") for a in allowed):
                    offenders.append(f"{here} imports {name}, but {folder}/ may import {sorted(allowed)}")
    none_of(offenders)


def test_imports_have_no_circles():
    """Imports for type checking and inside functions count too."""
    modules = {".".join(("longdraft", *path.relative_to(ROOT).with_suffix("").parts)): path for path in FILES}
    edges = {name: modules.keys() & dict(imported(path)) for name, path in modules.items()}
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:  # each of these modules is imported by the next
        circle = error.args[1]
        lines = [f"{place(modules[b], dict(imported(modules[b]))[a])} imports {a}" for a, b in pairwise(circle)]
        pytest.fail("\n".join(["a circle:", *lines]))


def test_only_the_backend_and_triton_kernels_know_optional_packages():
    offenders = []
    for path in FILES:
        ours = path.relative_to(ROOT)
        if ours == Path("kernels/backend.py") or ours.parts[:2] == ("kernels", "triton"):
            continue
        if ours.parts[0] == "benchmarks":  # benchmarks measure these packages directly, and report absent ones
            continue
        offenders += [
            f"{place(path, line)} imports {name}; ask kernels/backend.py"
            for name, line in imported(path)
            if name.split(".")[0] in OPTIONAL
        ]
    none_of(offenders)


def test_safetensors_are_written_by_our_own_helper():
    """safetensors' own `save_file` writes a file that only its owner may read."""
    none_of(
        [
            f"{place(path, line)} imports {name}; ask models/files.py"
            for path in FILES
            if path != ROOT / "models" / "files.py"
            for name, line in imported(path)
            if name in {"safetensors.torch.save_file", "safetensors.torch.save_model"}
        ]
    )


def test_no_handler_swallows_every_error():
    offenders = []
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.ExceptHandler):
                name = ast.unparse(node.type) if node.type else "everything"
                swallows = name in {"everything", "Exception", "BaseException"}
                if swallows and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node)):
                    offenders.append(f"{place(path, node.lineno)} catches {name} and does not raise again")
    none_of(offenders)


def test_every_question_to_cuda_names_its_device():
    """Without a device the current one answers, which is GPU 0 wherever the target is; an event without a stream
    belongs to the current device."""
    offenders = []
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.Call) and not node.args and isinstance(node.func, ast.Attribute):
                called, named = ast.unparse(node.func), {keyword.arg for keyword in node.keywords}
                asks = called.startswith("torch.cuda.") and node.func.attr in OF_A_DEVICE
                if (asks or node.func.attr == "record") and not named & {"device", "stream"}:
                    offenders.append(f"{place(path, node.lineno)}: {called}() asks the current device; name one")
    none_of(offenders)


def test_every_file_says_what_it_is_for():
    offenders = []
    for path in FILES:
        module = nodes(path)[0]
        assert isinstance(module, ast.Module)
        if not ast.get_docstring(module):
            offenders.append(f"{place(path)} has no docstring")
    none_of(offenders)
