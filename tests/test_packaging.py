"""What is installed: only `longdraft/...`, and a third-party package called `kernels` stays visible from the root."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from longdraft.launch.console import EXTRAS

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], check=True, stdout=(folder / "files").open("wb"))
    for name in (folder / "files").read_text().split("\0"):
        if name and (ROOT / name).is_file() and not name.startswith((".imports", "tests")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source]
    subprocess.run(command, check=True)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_only_the_namespace(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    outside = [name for name in names if not name.startswith("longdraft/") and ".dist-info/" not in name]
    assert outside == []
    assert not [name for name in names if name.startswith("longdraft/") and name.endswith("__init__.py")]


def test_wheel_holds_every_module_and_recipe(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    folders = ("data_prep", "infer", "kernels", "launch", "models", "train")
    tracked = subprocess.run(["git", "-C", ROOT, "ls-files"], check=True, capture_output=True, text=True).stdout.split()
    wanted = {f for f in tracked if f.split("/")[0] in folders and f.endswith(".py") and (ROOT / f).exists()}
    wanted |= {f for f in tracked if f.startswith("benchmarks/drafters/") and (ROOT / f).exists()}
    wanted |= {
        f for f in tracked if f.startswith("configs/") and f.endswith((".yaml", ".jinja")) and (ROOT / f).exists()
    }
    wanted.add("infer/server/page.html")
    # The C kernels are installed as source and compiled where they run.
    wanted |= {f for f in tracked if f.startswith("kernels/cpu/") and (ROOT / f).exists()}
    assert {f"longdraft/{name}" for name in wanted} <= names
    assert not [
        name for name in names if name.startswith(("longdraft/benchmarks/kernels", "longdraft/benchmarks/checks"))
    ]


@pytest.mark.parametrize("extra", EXTRAS)
def test_who_only_decodes_need_not_install_what_trains_or_serves(wheel, extra):
    files = zipfile.ZipFile(wheel)
    metadata = files.read(next(name for name in files.namelist() if name.endswith("METADATA"))).decode()
    needed = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:")]
    assert needed
    for name in EXTRAS[extra]:
        assert all("extra ==" in line for line in needed if name in line), name
        assert any(f'extra == "{extra}"' in line for line in needed if name in line), name


def without_extras(installed: Path, folder: Path, command: str, *others: str) -> subprocess.CompletedProcess:
    """Run `longdraft` with the packages of all extras, and `others`, made unimportable."""
    (folder / "hidden").mkdir()
    hide = f"import sys\nsys.modules.update(dict.fromkeys({sum(EXTRAS.values(), others)!r}))\n"
    (folder / "hidden" / "sitecustomize.py").write_text(hide)
    environment = {"PYTHONPATH": f"{folder / 'hidden'}:{installed}", "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    words = [installed / "bin" / "longdraft", *command.split()]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    "command, extra",
    [("train run.yaml", "train"), ("export runs/none", "train"), ("serve --target smollm2-135m", "serve")],
)
def test_what_is_missing_is_named_with_the_remedy(command, extra, installed, tmp_path):
    (tmp_path / "run.yaml").write_text("target:\n  path: smollm2-135m\n")
    done = without_extras(installed, tmp_path, command)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert re.search(rf"error: \w+ is not installed; pip install 'longdraft\[{extra}\]'", done.stderr)


def test_a_draft_decodes_where_no_extra_is_installed(installed, tmp_path):
    """It also works without packages that take a second or two to import and are not needed here."""
    options = "--prompt def --max-new-tokens 4 --target smollm2-135m --draft smollm2-135m-tokenswift"
    slow = "torch._dynamo", "transformers.modeling_utils", "scipy.optimize"
    done = without_extras(installed, tmp_path, f"generate {options}", *slow)
    assert done.returncode == 0, done.stderr


BENCH = """
import sys
from longdraft.launch import cli
status = cli.main(sys.argv[1:])
modules = [module for name, module in sys.modules.items() if name.startswith("longdraft.")]
print(*sorted(getattr(module, "__file__", None) or list(module.__path__)[0] for module in modules), sep="\\n")
sys.exit(status)
"""


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The wheel's files, installed by hand; their dependencies come from the interpreter."""
    folder = tmp_path_factory.mktemp("site")
    options = ["--no-deps", "--no-index", "--no-compile", "--target", folder]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *options, wheel], check=True)
    return folder


def run_outside(command: list, installed: Path, cwd: Path) -> subprocess.CompletedProcess:
    environment = {"PYTHONPATH": str(installed), "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def test_wheel_measures_a_drafter(installed, tmp_path, shared):
    """A full `longdraft bench` outside the checkout, from which it loads nothing."""
    text = "the cat sat on the mat and the dog sat on the log. " * 8
    (tmp_path / "text.txt").write_text(text)
    target = shared("tiny_checkpoint.py").save(tmp_path / "target", text, 290)
    options = "--drafter prompt_lookup --prompt-tokens 12 --new-tokens 4 --dtype fp32 --device cpu"
    command = ["bench", "--target", target, "--text-file", "text.txt", *options.split()]
    shown = run_outside([sys.executable, "-c", BENCH, *command], installed, tmp_path).stdout.splitlines()
    (result,) = (json.loads(line) for line in shown if line.startswith("{"))
    assert result["exact"] is True and set(result["runs"][0]["drafters"]) == {"plain", "prompt_lookup"}
    loaded = shown[shown.index(json.dumps(result)) + 1 :]
    assert f"{installed}/longdraft/benchmarks/drafters/bench.py" in loaded
    assert [path for path in loaded if not path.startswith(f"{installed}/")] == []


def test_third_party_kernels_is_found_from_the_root(tmp_path):
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("WHO = 'third party'\n")
    code = (
        f"import sys; sys.path.append({str(tmp_path)!r}); import kernels, longdraft.kernels.choice as ours; "
        "print(kernels.WHO, ours.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split("\n")[0] == "third party longdraft.kernels.choice", done.stderr
