"""Fixtures for every folder of tests: a tiny random target, built in a few milliseconds."""

import gc
import os
import signal
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As of whatever a shell starts in the background; the processes that tests interrupt would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if not any(Path("/dev").glob("nvidia*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton's kernels then run on a CPU; read when Triton is imported

# ruff: isort: split
import torch
from transformers import LlamaConfig

if not torch.cuda.is_available():
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the CPU is meant, also where there is a GPU that PyTorch cannot use

from longdraft.kernels.cpu_impl import rows
from longdraft.models.decoder_config import DecoderConfig, ExpertsConfig
from longdraft.models.fingerprint import fingerprint
from longdraft.models.hf import build_decoder
from longdraft.models.rope import RopeConfig
from longdraft.models.target import Target


def make_tiny_target(
    *,
    vocab_size: int = 97,
    hidden_size: int = 32,
    intermediate_size: int = 48,
    n_layers: int = 2,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int = 8,
    max_positions: int = 256,
    dtype: torch.dtype = torch.float32,
    tie_embeddings: bool = False,
    attention_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    rope: dict | None = None,
    sliding_windows: tuple[int | None, ...] | None = None,
    experts: ExpertsConfig | None = None,
    eos_token_ids: tuple[int, ...] = (),
    std: float = 0.25,
    seed: int = 0,
    **others: Any,
) -> Target:
    """A target with random weights, a fixed seed and no tokenizer; `std` is wide, so that logits are far apart."""
    parameters = rope or {"rope_type": "default", "rope_theta": 10000.0}
    config = DecoderConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-6,
        max_positions=max_positions,
        rope=RopeConfig(head_dim, max_positions, parameters),
        attention_bias=attention_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        tie_embeddings=tie_embeddings,
        sliding_windows=sliding_windows,
        experts=experts,
        **others,
    )
    decoder = build_decoder(config, torch.float32, "cpu")
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        centre = 1.0 if "norm" in name else 0.0
        parameter.data.normal_(centre, std, generator=generator)
    hf_config = LlamaConfig(vocab_size=vocab_size, hidden_size=hidden_size, num_attention_heads=n_heads)
    return Target(decoder.to(dtype), None, f"tiny-{seed}", hf_config, fingerprint(config, None), eos_token_ids)


def pytest_collection_finish() -> None:
    """What is there by now stays to the end: a search for garbage need not look at all tests and libraries again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks at the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several workers a file's tests stay together, and so do all files that ask for the trained `runs`, which
    cost most and so come first."""
    sharing = {item.path for item in items if "runs" in getattr(item, "fixturenames", ())}
    for item in items:
        item.add_marker(pytest.mark.xdist_group("runs" if item.path in sharing else str(item.path)))
    items.sort(key=lambda item: (item.path not in sharing, "train" not in item.path.parts))


@pytest.fixture
def tiny_target() -> Callable[..., Target]:
    """Factory: `tiny_target(n_layers=3, dtype=torch.bfloat16, ...)`; see `make_tiny_target` for the fields."""
    return make_tiny_target


@pytest.fixture(scope="session")
def shared() -> Callable[[str], ModuleType]:
    """(file of tests/) -> the builders in it, as a module of its own."""

    def load(file: str) -> ModuleType:
        path = Path(__file__).parent / file
        spec = spec_from_file_location(f"shared_{path.parent.name}_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def plain(shared) -> ModuleType:
    """plain.py: what a kernel's error is measured by."""
    return shared("plain.py")


@pytest.fixture(scope="session")
def pretended_cuda(shared) -> ModuleType:
    """pretended_cuda.py: a CUDA device that is not there."""
    return shared("pretended_cuda.py")


@pytest.fixture(scope="session")
def serving(shared) -> Callable:
    """(folder of folders OWNER/NAME) -> context of a hub of them on this machine; see hub.py."""
    return shared("hub.py").serving


@pytest.fixture(scope="session")
def authors(shared) -> ModuleType:
    """authors.py: drafts in the forms in which their authors publish them."""
    return shared("authors.py")


@pytest.fixture(scope="session")
def no_masks(shared) -> type:
    """The class of no_masks.py: a watch over the masks of a pass."""
    return shared("no_masks.py").NoMasks


@pytest.fixture
def c_kernels() -> None:
    """For tests of the C kernels: skips where they cannot be had. Where nothing stands against them they must build."""
    if (why := rows.obstacle()) is not None:
        pytest.skip(f"needs the C kernels: {why}")
    assert rows.library() is not None


@pytest.fixture(scope="session")
def exact_dtype() -> torch.dtype:
    """What tokens are compared in without a look at how close decisions were: bf16 where the C kernels serve, as a row
    then has the same bits in a pass of any width; else fp32, where passes differ by roundings that few decisions see.
    """
    return torch.float32 if rows.obstacle() is not None else torch.bfloat16
