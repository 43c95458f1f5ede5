"""The Python versions that setup.py admits: all files agree on them, and all of them can parse the code."""

import ast
import re
import subprocess
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def admitted() -> list[str]:
    found = re.search(r'python_requires=">=3\.(\d+),<3\.(\d+)"', (ROOT / "setup.py").read_text())
    assert found is not None
    return [f"3.{minor}" for minor in range(int(found[1]), int(found[2]))]


def test_all_tell_the_same():
    shown = subprocess.run(
        ["make", "-s", "--eval", "show: ; @echo $(PYTHONS)", "show"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    assert shown.stdout.split() == admitted()
    *most, last = admitted()
    assert f"Python {', '.join(most)} or {last}" in (ROOT / "README.md").read_text()
    oldest = admitted()[0]
    settings = (ROOT / "pyproject.toml").read_text()  # the versions that ruff and basedpyright check against
    assert f'pythonVersion = "{oldest}"' in settings and f'target-version = "py{oldest.replace(".", "")}"' in settings


def test_another_python_is_refused_by_name(tmp_path):
    old = tmp_path / "python"
    code = "import sys; sys.version_info = (3, 10, 2); exec(sys.argv[2])"
    old.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{code}' \"$@\"\n")
    old.chmod(0o755)
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    for name in ("setup.py", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    done = subprocess.run(["make", "setup", f"PYTHON={old}"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and not (tmp_path / ".venv").exists()
    assert f"longdraft needs Python {' or '.join(admitted())}, and " in done.stderr, done.stderr
    assert f"is 3.10; set PYTHON=python{admitted()[0]}" in done.stderr


def test_every_file_is_read_by_all_of_them():
    """The oldest version's grammar parses it, and no version warns of syntax that is an error in the next."""
    oldest = tuple(int(part) for part in admitted()[0].split("."))
    names = subprocess.run(["git", "-C", ROOT, "ls-files", "*.py"], check=True, capture_output=True, text=True).stdout
    files = [ROOT / name for name in names.split() if (ROOT / name).exists()]
    assert len(files) > 100
    for file in files:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            text = file.read_text(encoding="utf-8")
            compile(text, str(file), "exec", dont_inherit=True)
            ast.parse(text, str(file), feature_version=oldest)
