"""kernels/chain_attention.py: every implementation, on a CPU, against the reference; masks."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from longdraft.kernels import backend, chain_attention, tree_attention
from longdraft.kernels.chain_attention import by_flash, in_slices
from longdraft.kernels.segment_attention import segment_attention_reference
from longdraft.kernels.tree import PassPlan
from longdraft.kernels.tree_attention import tree_attention_reference

LENGTHS = ([0], [40], [300], [0, 7, 300])
WINDOWS = (None, 1, 5, 64, 250, 1000)


def varlen(q, k, v, q_borders, k_borders, most_queries, most_keys, window):
    """Stands in for flash-attention's kernel."""
    pieces = [(q_borders[i : i + 2].tolist(), k_borders[i : i + 2].tolist()) for i in range(len(q_borders) - 1)]
    assert most_queries == max(b - a for (a, b), _ in pieces) and most_keys >= max(b - a for _, (a, b) in pieces)
    return segment_attention_reference(q, k, v, [(*rows, *keys) for rows, keys in pieces], window)[0]


def few_rows(q, keys, values, lengths, bits, depths, window):
    """Stands in for Triton's kernel: at most 128 rows; nothing after the pass's own rows is read."""
    assert q.shape[1] <= 128 and bits is None and depths.shape == q.shape[:2]
    return tree_attention_reference(q, keys, values, lengths, None, window)


KERNELS = SimpleNamespace(tree_attention=few_rows)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("n_rows", [2, 129, 300])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_all_ways_give_what_the_reference_gives(no_masks, trees, lengths, n_rows, window):
    keys, values = trees.poisoned(lengths, n_rows, max(lengths) + n_rows + 5, 2, 16)
    q, plan = trees.draw(len(lengths), n_rows, 6, 16, seed=7), PassPlan(torch.tensor(lengths), n_rows)
    want = tree_attention_reference(q, keys, values, plan.lengths_B, None, window)[0]
    in_one = by_flash(varlen, q, keys, values, plan, window)
    with no_masks(128 if window is None else chain_attention.BLOCK + window):
        merged = chain_attention.chain_attention(q, keys, values, plan, window)
    for found in (merged, in_one, in_slices(KERNELS, q, keys, values, plan.lengths_B, window)):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("half", [True, False])
def test_a_gpu_takes_many_rows_without_a_length_on_the_host(pretended_cuda, trees, half):
    keys, values = trees.poisoned([300, 7], 140, 450, 2, 16)
    dtype = torch.bfloat16 if half else torch.float32
    given = [x.to(dtype) for x in (trees.draw(2, 140, 6, 16, seed=7), keys, values)]
    want = tree_attention_reference(*given, torch.tensor([300, 7]))[0]
    with pretended_cuda.PretendedCuda() as gpu:
        on_gpu = [x.to("cuda") for x in (*given, torch.tensor([300, 7]))]
        gpu.forget()
        found = tree_attention.tree_attention(*on_gpu)
        assert not gpu.waits
        assert gpu.calls["varlen attention" if half else "triton: tree_attention"] == 2
        torch.testing.assert_close(found.cpu(), want, rtol=0, atol=2e-2 if half else 1e-5)


def version_3(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, causal=False, window_size=(-1, -1),
    return_attn_probs=False,
):  # fmt: skip
    """As of fa3_fwd 0.0.3, which has no windows."""
    assert causal and window_size == (-1, -1) and return_attn_probs
    return varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, None), "log-sum-exps"


def version_4(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, *, causal=False,
    window_size=(None, None), return_lse=False,
):  # fmt: skip
    """As of flash_attn.cute 4.0.0b36. `causal` is a window without a left end, and a given window counts instead."""
    assert causal == (window_size == (None, None)) and (causal or window_size[1] == 0) and return_lse
    window = None if causal else window_size[0] + 1
    return varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, window), "log-sum-exps"


VERSIONS = {"fa3_fwd": ("fa3_fwd_interface", version_3), "flash_attn": ("flash_attn.cute", version_4)}


@pytest.mark.parametrize("major, dtype, width, window, installed, chosen", [
    (9, "bf16", 128, None, {"fa3_fwd", "flash_attn"}, "fa3_fwd"),
    (9, "bf16", 256, None, {"fa3_fwd", "flash_attn"}, "fa3_fwd"),
    (9, "bf16", 128, 9, {"fa3_fwd", "flash_attn"}, "flash_attn"),
    (9, "fp16", 128, None, {"fa3_fwd", "flash_attn"}, "flash_attn"),
    (9, "bf16", 256, 9, {"fa3_fwd", "flash_attn"}, None),
    (9, "fp16", 64, None, {"fa3_fwd"}, None),
    (10, "bf16", 128, None, {"fa3_fwd", "flash_attn"}, "flash_attn"),
    (8, "bf16", 128, None, {"fa3_fwd", "flash_attn"}, None),
    (12, "bf16", 128, None, {"fa3_fwd", "flash_attn"}, None),
    (9, "bf16", 128, None, set(), None),
])  # fmt: skip
def test_the_fastest_flash_kernel_that_serves_reads_prompts(
    monkeypatch, trees, major, dtype, width, window, installed, chosen
):
    """And its package gets what it asks for, as far as a stand-in with its signature shows."""
    for package, (name, function) in VERSIONS.items():
        module = ModuleType(name)
        vars(module)["flash_attn_varlen_func"] = function
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setitem(sys.modules, package, sys.modules.get(package, ModuleType(package)))
    monkeypatch.setattr(backend, "_is_installed", lambda package, module: package in installed)
    monkeypatch.setattr(backend, "varlen_attention_for", lambda q: "version 2")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    q = torch.empty(0, width, dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[dtype])
    assert backend.prompt_attention_for(q, window) == "version 2", "only this one has gradients"
    with torch.no_grad():
        attention = backend.prompt_attention_for(q, window)
    if chosen is None:
        assert attention == "version 2"
        return
    keys, values = trees.poisoned([0, 7, 300], 140, 450, 2, 16)
    q, plan = trees.draw(3, 140, 6, 16, seed=7), PassPlan(torch.tensor([0, 7, 300]), 140)
    want = tree_attention_reference(q, keys, values, plan.lengths_B, None, window)[0]
    found = by_flash(lambda *given: attention(*given, with_lse=True)[0], q, keys, values, plan, window)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-5)
