"""The C kernels' threads: the same bits for any number of threads, on a busy machine and in forked processes."""

import multiprocessing
import os
import threading
import time

import pytest
import torch

from longdraft.kernels.choice import gumbel_noise
from longdraft.kernels.cpu import library, rows, tokens
from longdraft.kernels.cpu.layers import LayerTable, LayerWeights
from longdraft.kernels.linear import linear

pytestmark = pytest.mark.skipif(rows.library() is None, reason="no C compiler: PyTorch serves, nothing to test here")
FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def as_many_threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def spin():
    while True:
        pass


@pytest.fixture
def busy():
    """More processes that only spin than there are processors."""
    processes = [FORK.Process(target=spin, daemon=True) for _ in range((os.cpu_count() or 1) + 1)]
    for process in processes:
        process.start()
    yield
    for process in processes:
        process.kill()
        process.join()


def some_layers(dtype: torch.dtype, n_tokens: int = 3):
    """A function that runs all kinds of stages, some of which read results of earlier ones."""
    generator = torch.Generator().manual_seed(n_tokens)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype) * 0.3

    x, qkv, out = draw(1, n_tokens, 64), draw(6 * 16, 64), draw(64, 4 * 16)
    gate, down, norm = draw(192, 64), draw(64, 96), draw(64)
    # Small enough for PyTorch to use one thread: a forked process has no others.
    cache = draw(2, 1, 700, 1, 16), draw(2, 1, 700, 1, 16), torch.tensor([690 - n_tokens])
    angle = torch.randn(1, n_tokens, 1, 1, 8, generator=generator)
    cos, sin = angle.cos().to(dtype), torch.cat([-angle.sin(), angle.sin()], 3).to(dtype)
    heads = draw(16), draw(16)
    layer = LayerWeights(norm, qkv, None, *heads, out, None, norm, gate, None, down, None, window=None)

    def work():
        return LayerTable([layer] * 2, 4, 1, 1e-5).run(x, cos, sin, cache, None, False).hidden_BTD

    return work


def best_of_some(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(1, 5, 9001, generator=torch.Generator().manual_seed(1)).to(dtype)
    return tokens.best_tokens(logits, 16, None, None, None)


def results(dtype: torch.dtype) -> list[torch.Tensor]:
    with library.decoding():
        return [
            *(some_layers(dtype, n)() for n in (1, 3, 17)),
            gumbel_noise(torch.tensor([5]), torch.tensor([[9]]), 9001),
            *best_of_some(dtype),
        ]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", rows.SUFFIXES)
def test_the_same_bits_by_any_number_of_threads(dtype):
    torch.set_num_threads(1)
    wanted = results(dtype)
    for n_threads in (2, 3, 7, 16):
        torch.set_num_threads(n_threads)
        assert same(results(dtype), wanted), n_threads


@pytest.mark.parametrize("dtype", rows.SUFFIXES)
def test_the_same_bits_beside_processes_that_only_spin(dtype, busy):
    """Threads are preempted in the middle of a chunk, which others then compute once more."""
    torch.set_num_threads(1)
    with library.decoding():
        wanted, best = some_layers(dtype)().clone(), best_of_some(dtype)
    torch.set_num_threads(5)
    with library.decoding():
        work = some_layers(dtype)
        assert all(torch.equal(work(), wanted) for _ in range(150))
        assert all(same(list(best_of_some(dtype)), list(best)) for _ in range(600))


def test_two_callers_at_once():
    torch.set_num_threads(1)
    wanted = results(torch.bfloat16)
    torch.set_num_threads(2)
    found: list[bool] = []

    def call():
        torch.set_num_threads(2)
        found.extend(same(results(torch.bfloat16), wanted) for _ in range(10))

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == [True] * 30


def _in_child(wanted, answer):
    answer.put(torch.equal(some_layers(torch.bfloat16)(), wanted))


def test_a_forked_process_has_threads_of_its_own():
    """The C kernels alone: OpenMP's threads, which PyTorch's logarithms need, do not exist in a child."""
    torch.set_num_threads(2)
    wanted = some_layers(torch.bfloat16)()
    answer = FORK.SimpleQueue()
    child = FORK.Process(target=_in_child, args=(wanted, answer))
    child.start()
    assert answer.get()
    child.join()
    assert child.exitcode == 0 and torch.equal(some_layers(torch.bfloat16)(), wanted)


def test_pytorch_has_one_thread_while_decoding_and_its_own_number_afterwards():
    torch.set_num_threads(3)
    with library.decoding():
        assert torch.get_num_threads() == 1
        with library.decoding(), library.free_processors():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3
    with pytest.raises(KeyError), library.decoding():
        raise KeyError
    assert torch.get_num_threads() == 3 and not rows.serves(torch.float32)
    with library.decoding(enabled=False):
        assert torch.get_num_threads() == 3


def test_prompts_take_the_processors_that_are_free(monkeypatch):
    torch.set_num_threads(4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    for elsewhere, n_threads in ((0, 4), (1, 3), (3, 1), (9, 1)):
        monkeypatch.setattr(library, "running_elsewhere", lambda count=elsewhere: count)
        with library.free_processors():
            assert torch.get_num_threads() == n_threads
        assert torch.get_num_threads() == 4


def test_other_processes_that_run_are_seen(busy):
    """At least as many as spin; other work on the machine may add to them."""
    time.sleep(0.2)
    seen = max(library.running_elsewhere() for _ in range(20))
    assert seen >= (os.cpu_count() or 1)


def test_fp32_goes_through_the_kernels_while_decoding_alone():
    x, weight = torch.randn(7, 64), torch.randn(33, 64)
    assert torch.equal(linear(x, weight), torch.nn.functional.linear(x, weight))
    with library.decoding():
        together = linear(x, weight)
        assert torch.equal(together, torch.cat([linear(row[None], weight) for row in x]))
    torch.testing.assert_close(together, linear(x, weight), rtol=1e-5, atol=1e-5)


def test_the_clock_of_work_stands_still_while_nothing_is_done():
    before = library.work_seconds()
    time.sleep(0.3)
    assert library.work_seconds() - before < 0.1


def test_the_clock_of_work_counts_what_all_threads_do():
    """An even share of it: two threads take about half of the time of one, however they have divided the work."""
    x, weight = torch.randn(64, 1024).bfloat16(), torch.randn(4096, 1024).bfloat16()

    def work(n_threads):
        torch.set_num_threads(n_threads)
        linear(x, weight)
        before = library.work_seconds()
        for _ in range(5):
            linear(x, weight)
        return library.work_seconds() - before

    assert 0.25 < work(2) / work(1) < 1.5
