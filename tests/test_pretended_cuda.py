"""The simulated device itself: values equal the CPU's, and every way to wait for a device is counted or raises."""

import pytest
import torch

from longdraft.kernels.choice import choose
from longdraft.kernels.transfer import HostCopy, from_host


@pytest.fixture
def gpu(pretended_cuda):
    with pretended_cuda.PretendedCuda() as device:
        yield device


WAITS = {
    "item": lambda x: x[0].item(),
    "a branch": lambda x: 1 if x[0] > 0 else 0,
    "an index": lambda x: range(9)[x[2].long()],
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "into the host's memory": lambda x: torch.empty(4).copy_(x),
    "into memory that is not pinned": lambda x: torch.empty(4).copy_(x, non_blocking=True),
    "a new tensor": lambda x: torch.tensor([1, 2], device=x.device),
    "from memory that is not pinned": lambda x: torch.ones(2).to(x.device, non_blocking=True),
    "a number put in": lambda x: x.__setitem__(1, 5.0),
    "a list as index": lambda x: x[[0, 1]],
    "a tensor of the host as index": lambda x: x[torch.tensor([0, 1])],
    "a tensor's number as index": lambda x: x[torch.ones((), dtype=torch.int64, device=x.device)],
    "a mask as index": lambda x: x[x > 1],
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 1),
    "equal": lambda x: torch.equal(x, x),
    "unique": lambda x: x.unique(),
    "repeat": lambda x: x.repeat_interleave(x.long()),
    "synchronize": lambda x: torch.cuda.synchronize(x.device),
    "an event at once": lambda x: HostCopy(x).lists(),
}
FREE = {
    "a view": lambda x: x[:, None][1:].T,
    "arithmetic": lambda x: (x * 2 + torch.tensor(3.0)).sum().clamp(min=1),
    "a slice filled": lambda x: x[1:].fill_(0),
    "places of a mask filled": lambda x: x.masked_fill_(x > 1, 0.0),
    "an index of its own": lambda x: x[torch.arange(2, device=x.device)],
    "repeats of a known number": lambda x: x.repeat_interleave(x.long(), output_size=6),
    "made there": lambda x: torch.zeros(3, device=x.device).to(x.device),
    "from pinned memory": lambda x: from_host(torch.ones(3), x.device),
}


@pytest.mark.parametrize("how", WAITS)
def test_what_waits_is_counted_and_banned_in_recorded_work(gpu, how):
    x = torch.arange(4.0).to("cuda")
    gpu.forget()
    WAITS[how](x)
    assert gpu.waits.total() == 1, gpu.waits
    with pytest.raises(AssertionError, match="in recorded work"):
        gpu.record(lambda: WAITS[how](x))()


@pytest.mark.parametrize("how", FREE)
def test_what_does_not_wait_is_not_counted(gpu, how):
    x = torch.arange(4.0).to("cuda")
    gpu.forget()
    found = FREE[how](x)
    assert not gpu.waits and gpu.calls and found.device == torch.device("cuda:0")


def test_two_devices_do_not_mix(gpu):
    x, y = torch.ones(3).to("cuda"), torch.ones(3)
    for mixed in (lambda: x + y, lambda: torch.cat([x, y]), lambda: y[x.long()], lambda: x.index_put_((x.long(),), y)):
        with pytest.raises(RuntimeError, match="host"):
            mixed()
    with pytest.raises(RuntimeError, match="choose is given a tensor of the host"):
        choose(torch.ones(1, 2, 8).to("cuda"), torch.ones(1), torch.ones(1, 2), torch.ones(1))


def test_a_copy_read_after_other_work_is_late_and_no_wait(gpu):
    x = torch.arange(4.0).to("cuda")
    gpu.forget()
    copy = HostCopy(x[:3] > 1, x[::3], x[None] + 1)
    x += 1
    assert copy.lists() == [[False, False, True], [0.0, 3.0], [[1.0, 2.0, 3.0, 4.0]]]
    assert (gpu.waits.total(), gpu.late.total(), gpu.queued.total()) == (0, 1, 1)


def test_a_replay_does_the_same_operations_on_the_same_memory_whatever_the_host_holds(gpu, pretended_cuda):
    x, out, factor = torch.arange(4.0).to("cuda"), torch.zeros(2, device="cuda"), 2

    def work():
        low, high = (x * factor).chunk(2)
        out.copy_(low + high)

    replay = gpu.record(work)
    assert pretended_cuda.value_of(out).tolist() == [0, 0]
    gpu.forget()
    replay()
    once, factor = gpu.calls.copy(), 5
    assert pretended_cuda.value_of(out).tolist() == [4, 8]
    x += 1
    gpu.forget()
    replay()
    assert pretended_cuda.value_of(out).tolist() == [8, 12] and gpu.calls == once and once["mul"] == 1


def test_gradients_and_changes_in_place_are_those_of_the_cpu(gpu, pretended_cuda):
    def work(layer, x):
        y = layer(x)
        part = y[:, :2]
        part *= 3
        (y.softmax(-1) * torch.arange(4.0, device=x.device)).sum().backward()
        return y, layer.weight.grad

    torch.manual_seed(0)
    layer, x = torch.nn.Linear(3, 4), torch.randn(5, 3)
    want = work(layer, x)
    layer.weight.grad = None
    found = work(gpu.put(layer), x.to("cuda"))
    for one, other in zip(want, found, strict=True):
        assert other.is_cuda and torch.equal(one, pretended_cuda.value_of(other))
