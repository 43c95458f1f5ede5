"""Where and with what figures were made: date, commit, hardware and versions, the same for every benchmark.

Needs nothing but the standard library until the hardware is asked for: benchmarks/gpu_check.py starts where little is
installed.
"""

import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def date() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def commit() -> str | None:
    """LONGDRAFT_COMMIT, else git's, with a + where files differ from it; None for files that git does not track, such
    as installed ones."""
    if given := os.environ.get("LONGDRAFT_COMMIT"):
        return given
    here = Path(__file__).resolve()

    def git(*command: str) -> str:
        done = subprocess.run(["git", "-C", here.parent, *command], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """The version of each package that is installed, else None."""

    def installed(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    return {package: installed(package) for package in packages}


def hardware(device: "torch.device") -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = (line.split(":")[1].strip() for line in lines if "model name" in line)
    return next(named, platform.processor() or platform.machine())


def surroundings(dtype: "torch.dtype", packages: Iterable[str]) -> dict:
    """What every benchmark says of itself beside its device."""
    import torch

    return {
        "date": date(),
        "commit": commit(),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "versions": versions(packages),
    }
