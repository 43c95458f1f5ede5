"""Where figures come from: date, commit, hardware and package versions, in the same form for every benchmark."""

import os
import platform
import re
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


def date() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def commit() -> str | None:
    """Return LONGDRAFT_COMMIT if it is set, otherwise git's commit, with a + if tracked files differ from it. None
    outside a checkout."""
    if (named := os.environ.get("LONGDRAFT_COMMIT")) or not (ROOT / ".git").exists():
        return named
    command = ["git", "-C", ROOT, "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Map each package to its installed version, or None."""
    found: dict[str, str | None] = dict.fromkeys(packages)
    for package in found:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def hardware(device: torch.device) -> str:
    """The name of the GPU or of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return named[1] if named else platform.processor() or platform.machine()


def provenance(dtype: torch.dtype, packages: Iterable[str]) -> dict:
    """What every benchmark reports beside its device."""
    return {
        "date": date(),
        "commit": commit(),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "versions": versions(packages),
    }
