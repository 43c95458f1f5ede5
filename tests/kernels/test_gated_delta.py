"""The gated delta rule by steps, in chunks and as one block, against transformers' recurrence and the definition.

Tolerance: 1e-5 of the largest magnitude.
"""

from importlib import import_module
from types import ModuleType

import pytest
import torch
from torch.nn.functional import normalize
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from longdraft.kernels import backend
from longdraft.kernels.cpu import delta
from longdraft.kernels.delta_chunks import chain
from longdraft.kernels.gated_delta import DeltaTokens, advance, tree
from longdraft.kernels.tree import PassPlan

BATCH, HEADS, KEY, VALUE = 2, 3, 40, 48


def drawn(n_tokens: int, strongest: float = 2.0) -> tuple[DeltaTokens, torch.Tensor]:
    """Tokens whose decays' logarithms lie between 0 and -`strongest`, and a memory."""
    generator = torch.Generator().manual_seed(n_tokens)
    q, k = (normalize(torch.randn(BATCH, n_tokens, HEADS, KEY, generator=generator), dim=-1) for _ in "qk")
    v = torch.randn(BATCH, n_tokens, HEADS, VALUE, generator=generator)
    g, beta = (torch.rand(BATCH, n_tokens, HEADS, generator=generator) for _ in "gb")
    memory = torch.randn(BATCH, HEADS, KEY, VALUE, generator=generator)
    return DeltaTokens(q * KEY**-0.5, k, v, -strongest * g, beta), memory


def exact(tokens: DeltaTokens, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the tokens of a text read, and the memory after them, by the definition in fp64."""
    q, k, v, g, beta = (x.double() for x in tokens)
    memory, reads = memory.double(), []
    for t in range(q.shape[1]):
        memory = memory * g[:, t].exp()[..., None, None]
        u = (v[:, t] - (memory * k[:, t, ..., None]).sum(-2)) * beta[:, t, :, None]
        memory = memory + k[:, t, ..., None] * u[..., None, :]
        reads.append((memory * q[:, t, ..., None]).sum(-2))
    return torch.stack(reads, 1), memory


def close(ours: torch.Tensor, other: torch.Tensor) -> bool:
    return float((ours - other).abs().max() / other.abs().max()) < 1e-5


def plan_of(mask=None, n_rows: int = 1, batch: int = BATCH) -> PassPlan:
    return PassPlan(torch.zeros(batch, dtype=torch.int64), n_rows if mask is None else mask.shape[1], mask)


def in_triton(name: str, device_type: str) -> ModuleType:
    return import_module(f"longdraft.kernels.triton.{name}")


@pytest.fixture(params=["C", "PyTorch", "Triton"])
def steps(request, monkeypatch, c_kernels):
    """All forms of the steps; Triton's in its interpreter."""
    if request.param == "PyTorch":
        monkeypatch.setattr(delta, "serves", lambda width: False)
    if request.param == "Triton":
        monkeypatch.setattr(backend, "triton_kernels", in_triton)
    assert delta.serves(VALUE) == (request.param != "PyTorch")


@pytest.mark.parametrize("length", [1, 5, 64])
def test_steps_are_transformers_recurrence(steps, length):
    tokens, memory = drawn(length)
    q, *others = tokens
    read, after = torch_recurrent_gated_delta_rule(
        q * KEY**0.5, *others[:2], g=others[2], beta=others[3], initial_state=memory, output_final_state=True
    )
    assert close(tree(tokens, memory, plan_of(n_rows=length)), read)
    assert close(advance(tokens, memory, torch.tensor([length] * BATCH)), after)


@pytest.fixture(params=["PyTorch", "Triton"])
def chunks(request, monkeypatch):
    """Both forms of `chain`; Triton's in its interpreter."""
    if request.param == "Triton":
        monkeypatch.setattr(backend, "triton_kernels", in_triton)


@pytest.mark.parametrize("strongest", [0.01, 2.0, 40.0])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 150])
def test_chunks_read_what_steps_read(chunks, length, strongest):
    """Decays of e^-40 a token too: their sum leaves no digits of fp32 for the neighbours that still see each other."""
    tokens, memory = drawn(length, strongest)
    tokens.g_BTV[:, 1::2] *= 0.01
    read, after = exact(tokens, memory)
    ours, ours_after = chain(tokens, memory)
    assert close(ours, read) and close(ours_after, after)
    assert close(tree(tokens, memory, plan_of(n_rows=length)), read)


@pytest.mark.parametrize("sizes", [(1,), (3, 61), (64, 64), (30, 3, 70, 47), (1, 1, 1, 62, 2, 64, 5)])
def test_pieces_do_not_read_each_other(chunks, sizes):
    tokens, memory = drawn(sum(sizes))
    pieces = torch.arange(len(sizes)).repeat_interleave(torch.tensor((1 + sizes[0], *sizes[1:])))
    ours, ours_after = chain(tokens, memory, pieces)
    start, state = 0, memory
    for size in sizes:
        read, after = exact(tokens.at((slice(None), slice(start, start + size))), state)
        assert close(ours[:, start : start + size], read), start
        start, state = start + size, torch.zeros_like(memory)
    assert close(ours_after, after)


@pytest.mark.parametrize("n_nodes", [1, 2, 13, 64, 100])
def test_a_node_reads_what_its_path_reads(steps, trees, n_nodes):
    tokens, memory = drawn(n_nodes)
    mask = trees.chain_and_tree(n_nodes)
    read = tree(tokens, memory, plan_of(mask))
    for slot, node in ((0, n_nodes - 1), (1, n_nodes - 1), (1, n_nodes // 2)):
        path = mask[slot, node].nonzero()[:, 0]
        want, _ = exact(tokens.at((slice(slot, slot + 1), path)), memory[slot : slot + 1])
        assert close(read[slot, node], want[0, -1])


def test_a_nodes_bits_depend_on_its_path_alone(steps, trees):
    """A node in a tree reads, in every bit, what its path reads token by token. So decoding is exact on a CPU."""
    tokens, memory = drawn(40)
    mask = trees.chain_and_tree(40)
    read = tree(tokens, memory, plan_of(mask))
    for slot in range(BATCH):
        after = {-1: memory[slot : slot + 1]}
        for node in range(40):
            parent = [-1, *mask[slot, node].nonzero()[:, 0].tolist()][-2]
            one = tokens.at((slice(slot, slot + 1), slice(node, node + 1)))
            alone = tree(one, after[parent], plan_of(n_rows=1, batch=1))
            after[node] = advance(one, after[parent], torch.tensor([1]))
            assert torch.equal(alone[0, 0], read[slot, node]), (slot, node)


def test_tokens_beyond_the_count_change_no_memory(steps):
    tokens, memory = drawn(9)
    counts = torch.tensor([0, 4])
    after = advance(tokens, memory, counts)
    assert torch.equal(after[0], memory[0])
    assert torch.equal(after[1], advance(tokens.at((slice(1, 2), slice(4))), memory[1:], counts[1:])[0])
    assert close(chain(tokens.only(counts), memory)[1], after)
