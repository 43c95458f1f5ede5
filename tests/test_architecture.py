"""The house's rules, checked on the syntax trees: who may import whom, full names only, no package markers."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT = {
    "kernels": {"kernels"},
    "models": {"models", "kernels"},
    "data_prep": {"data_prep", "models.files"},
    "infer": {"infer", "models", "kernels"},
    "train": {"train", "models", "kernels", "data_prep.shards"},
    "benchmarks": {"benchmarks", "train", "infer", "models", "kernels", "data_prep"},
    "launch": {"launch", "benchmarks", "train", "infer", "models", "kernels", "data_prep"},
}
OPTIONAL = {"triton", "flash_attn", "liger_kernel"}
# Of torch.cuda, what asks or waits for the current device where none is named.
OF_A_DEVICE = {
    "synchronize", "current_stream", "default_stream", "Stream", "mem_get_info", "memory_allocated", "memory_reserved",
    "max_memory_allocated", "max_memory_reserved", "reset_peak_memory_stats", "memory_stats", "get_device_name",
    "get_device_properties", "get_device_capability", "utilization",
}  # fmt: skip
FILES = sorted(path for folder in MAY_IMPORT for path in (ROOT / folder).rglob("*.py"))
NAMES = [str(path.relative_to(ROOT)) for path in FILES]


def imported(path: Path) -> list[str]:
    """Every module that a file imports, with `from a import b` as both `a` and `a.b`."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the full name"
            found += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def test_there_is_code_to_check():
    assert len(FILES) > 20


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_imports_follow_the_design(path):
    folder = path.relative_to(ROOT).parts[0]
    allowed = set(MAY_IMPORT[folder])
    if path == ROOT / "train" / "evaluate.py":
        allowed.add("infer")  # decodes for real during training
    for name in imported(path):
        top = name.split(".")[0]
        assert top not in MAY_IMPORT and top not in {"tests", "configs"}, (
            f"{path.name} imports {name!r}; write longdraft.{name}, and never tests or configs"
        )
        if top == "longdraft":
            ours = name.removeprefix("longdraft").lstrip(".")
            assert any(ours == a or ours.startswith(a + ".") for a in allowed), (
                f"{folder}/ may import {sorted(allowed)}, but {path.name} imports {name}"
            )


def test_imports_have_no_circles():
    """Imports for type checking and inside functions count too."""
    modules = {".".join(("longdraft", *path.relative_to(ROOT).with_suffix("").parts)): path for path in FILES}
    TopologicalSorter({name: modules.keys() & imported(path) for name, path in modules.items()}).prepare()


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_only_the_backend_and_triton_kernels_know_optional_packages(path):
    ours = path.relative_to(ROOT)
    if ours == Path("kernels/backend.py") or ours.parts[:2] == ("kernels", "triton_impl"):
        return
    if ours.parts[0] == "benchmarks":  # which measures these packages themselves, and says where one is absent
        return
    found = OPTIONAL & {name.split(".")[0] for name in imported(path)}
    assert not found, f"{ours} imports {sorted(found)}; ask kernels/backend.py"


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_safetensors_are_written_by_our_own_helper(path):
    """Its own `save_file` gives a file that nobody but its owner may read."""
    if path != ROOT / "models" / "files.py":
        assert not {"safetensors.torch.save_file", "safetensors.torch.save_model"} & set(imported(path))


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_no_handler_swallows_every_error(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler):
            name = ast.unparse(node.type) if node.type else "everything"
            swallows = name in {"everything", "Exception", "BaseException"}
            assert not swallows or any(isinstance(inner, ast.Raise) for inner in ast.walk(node)), (
                f"{path.name}:{node.lineno} catches {name} and does not raise again"
            )


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_every_question_to_cuda_names_its_device(path):
    """Without one it is the current device that answers, which is GPU 0 whatever a target is on; an event without a
    stream is that of the current device."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and not node.args and isinstance(node.func, ast.Attribute):
            called, named = ast.unparse(node.func), {keyword.arg for keyword in node.keywords}
            asks = called.startswith("torch.cuda.") and node.func.attr in OF_A_DEVICE
            assert not (asks or node.func.attr == "record") or named & {"device", "stream"}, (
                f"{path.name}:{node.lineno}: {called}() asks the current device; name one"
            )


def test_no_folder_is_a_regular_package():
    markers = [p for folder in (*MAY_IMPORT, "tests", "configs") for p in (ROOT / folder).rglob("__init__.py")]
    assert markers == [], "an __init__.py here would shadow installed packages of the same name"


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_every_file_says_what_it_is_for(path):
    assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"
