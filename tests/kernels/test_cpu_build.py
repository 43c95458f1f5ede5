"""Without the C kernels one line says why, and PyTorch serves with the same tokens."""

import os
import re

import pytest
import torch

from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.kernels.cpu import library


@pytest.fixture(autouse=True)
def nothing_known():
    """Forget the loaded library before and after the test."""
    library.library.cache_clear()
    yield
    library.library.cache_clear()


def without_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setenv("LONGDRAFT_CPU_KERNELS", "1")
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    monkeypatch.setenv("PATH", str(tmp_path))


def without_avx2(monkeypatch, tmp_path):
    monkeypatch.setenv("LONGDRAFT_CPU_KERNELS", "1")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("torch.cpu._is_avx2_supported", lambda: False)


def turned_off(monkeypatch, tmp_path):
    monkeypatch.setenv("LONGDRAFT_CPU_KERNELS", "0")


def with_a_broken_compiler(monkeypatch, tmp_path, works_for="--version"):
    without_a_compiler(monkeypatch, tmp_path)
    (tmp_path / "cc").write_text(f"#!/bin/sh\necho no such target >&2\n[ $1 = {works_for} ]\n")
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def with_a_compiler_that_does_not_start(monkeypatch, tmp_path):
    with_a_broken_compiler(monkeypatch, tmp_path, works_for="nothing")


SAID = {
    without_a_compiler: "no C compiler found, decoding on the CPU is slower; install gcc or set CC",
    without_avx2: "the CPU kernels need AVX2, which this processor lacks; decoding is slower",
    with_a_broken_compiler: "the CPU kernels could not be built, .* The compiler said: no such target",
    with_a_compiler_that_does_not_start: "the CPU kernels could not be built, .* The compiler said: no such target",
    turned_off: None,
}


@pytest.mark.parametrize("absence", SAID)
def test_pytorch_serves_and_one_line_says_why(absence, monkeypatch, tmp_path, capfd, tiny_target):
    absence(monkeypatch, tmp_path)
    outputs = []
    for drafter in ("plain", "token_recycling+prompt_lookup"):
        engine = Engine(tiny_target(), drafter=drafter)
        outputs.append(engine.generate([[5, 6, 7, 5, 6]], SamplingParams(max_new_tokens=20))[0].tokens)
        low = Engine(tiny_target(dtype=torch.bfloat16), drafter=drafter)
        assert len(low.generate([[5, 6, 7]], SamplingParams(max_new_tokens=9))[0].tokens) == 9
    assert library.library() is None and outputs[0] == outputs[1]
    said = [line for line in capfd.readouterr().err.splitlines() if line]
    expected = SAID[absence]
    assert len(said) == (expected is not None), said
    assert expected is None or re.match(f"longdraft: {expected}", said[0]), said


@pytest.mark.parametrize("home", ["none", "not there", "not to be written"])
def test_without_a_cache_folder_of_its_own_a_user_has_one_among_the_temporary(home, monkeypatch, tmp_path):
    """As in a container with an arbitrary user id. A library that is already built is used where it is."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    own, other = tmp_path / "home" / ".cache" / "longdraft", tmp_path / f"longdraft-{os.getuid()}"
    monkeypatch.setenv("HOME", "/proc/nohome" if home == "not there" else str(tmp_path / "home"))
    if home == "none":
        monkeypatch.delenv("HOME")
        monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    if home == "not to be written":
        monkeypatch.setattr("os.access", lambda path, mode: False)
    assert library.cache_path("rows.so") == other / "rows.so" and other.stat().st_mode & 0o777 == 0o700
    if home == "not to be written":
        (own / "rows.so").touch()
        assert library.cache_path("rows.so") == own / "rows.so"


def test_another_users_folder_is_not_trusted(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("LONGDRAFT_CPU_KERNELS", "1")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nothing")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"longdraft-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    assert library.library() is None
    assert re.search(r"set XDG_CACHE_HOME to a folder .* is another user's", capfd.readouterr().err)
