"""Where figures come from: date, commit, hardware and package versions, in the same form for every benchmark."""

import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def date() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def commit() -> str | None:
    """Return LONGDRAFT_COMMIT if it is set, otherwise git's commit, with a + if tracked files differ from it. None for
    files that git does not track, such as installed ones."""
    if named := os.environ.get("LONGDRAFT_COMMIT"):
        return named
    here = Path(__file__).resolve()

    def git(*command: str) -> str:
        done = subprocess.run(["git", "-C", here.parent, *command], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)
        return git("describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+")
    except (OSError, subprocess.CalledProcessError):
        return None


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Map each package to its installed version, or None."""
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def hardware(device: torch.device) -> str:
    """The name of the GPU or of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = (line.split(":")[1].strip() for line in lines if "model name" in line)
    return next(named, platform.processor() or platform.machine())


def provenance(dtype: torch.dtype, packages: Iterable[str]) -> dict:
    """What every benchmark reports beside its device."""
    return {
        "date": date(),
        "commit": commit(),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "versions": versions(packages),
    }
