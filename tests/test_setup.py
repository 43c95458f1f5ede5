"""`make setup` where PyTorch sees a GPU but there is no CUDA toolkit: DeepSpeed's setup.py must not need one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# What DeepSpeed's setup.py does with each of its operations before it builds none of them. The installed package has
# the modules that setup.py imports from its own folder.
ASKS = """
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.utils.cpp_extension as extension

torch.version.cuda, extension.CUDA_HOME = "13.0", None
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0, name="pretended")
torch.cuda.get_device_capability = lambda *_: (9, 0)
package = Path(find_spec("deepspeed").origin).parent
sys.path += [str(package / "ops"), str(package)]
from op_builder.all_ops import ALL_OPS

for operation in ALL_OPS.values():
    operation.is_compatible()
print(f"{len(ALL_OPS)} operations asked")
"""
# Replaces the interpreter: a pip in .venv that installs nothing, but runs ASKS in the step that installs DeepSpeed, and
# a python that only records what it should import.
PYTHON = """#!/bin/sh
case "$1 $2" in
    "-m venv") mkdir -p .venv/bin && cp pip .venv/bin/pip && cp imports .venv/bin/python ;;
    *) exec {python} "$@" ;;
esac
"""
PIP = """#!/bin/sh
echo "$*" >> installed
case "$*" in *" -e "*) exec {python} asks.py > asked ;; esac
"""
IMPORTS = """#!/bin/sh
echo "$*" > imported
"""


@pytest.fixture
def checkout(tmp_path) -> Path:
    for name in ("Makefile", "setup.py", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "asks.py").write_text(ASKS)
    for name, script in (("python", PYTHON), ("pip", PIP), ("imports", IMPORTS)):
        (tmp_path / name).write_text(script.format(python=sys.executable))
        (tmp_path / name).chmod(0o755)
    return tmp_path


def test_a_driver_is_enough(checkout):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DS_", "CUDA"))}
    make = ["make", "setup", f"PYTHON={checkout / 'python'}"]
    done = subprocess.run(make, cwd=checkout, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (checkout / "asked").read_text().endswith("operations asked\n")
    assert "import datasets, longdraft.train.loop" in (checkout / "imported").read_text()
    *_, torch, own = (checkout / "installed").read_text().splitlines()
    # DeepSpeed's setup.py imports torch, whose CUDA builds need their own libraries.
    assert "-e .[dev]" in own and torch.split()[-1].startswith("torch==") and "--no-deps" not in torch
