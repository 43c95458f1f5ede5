"""What is installed: only `longdraft/...`, and a third-party package called `kernels` stays visible from the root."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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
    folders = ("benchmarks", "data_prep", "infer", "kernels", "launch", "models", "train")
    tracked = subprocess.run(["git", "-C", ROOT, "ls-files"], check=True, capture_output=True, text=True).stdout.split()
    wanted = {f for f in tracked if f.split("/")[0] in folders and f.endswith(".py") and (ROOT / f).exists()}
    wanted |= {
        f for f in tracked if f.startswith("configs/") and f.endswith((".yaml", ".jinja")) and (ROOT / f).exists()
    }
    assert {f"longdraft/{name}" for name in wanted} <= names


def test_wheel_runs_the_command(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = "import longdraft.launch.cli as cli, sys; print(cli.__file__); sys.exit(cli.main(['--help']))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path)) and "prepare" in done.stdout


def test_third_party_kernels_is_found_from_the_root(tmp_path):
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("WHO = 'third party'\n")
    code = (
        f"import sys; sys.path.append({str(tmp_path)!r}); import kernels, longdraft.kernels.gumbel as ours; "
        "print(kernels.WHO, ours.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split("\n")[0] == "third party longdraft.kernels.gumbel", done.stderr
