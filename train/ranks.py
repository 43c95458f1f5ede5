"""The ranks of a training: how they join, communicate and leave. launcher.py starts them.

They wait for one another in the group `Ranks.control`, on the CPU, for at most TIMEOUT.
"""

import logging
import os
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from tqdm import tqdm

from longdraft.models.device import start
from longdraft.train.launcher import free_port

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else its import warns, in every rank, that it found no GPU
import deepspeed

# Long enough for a rank that loads a large target from a slow disk while the others wait.
TIMEOUT = timedelta(minutes=60)
# Substrings of gloo's and NCCL's errors when a peer of a collective has died.
LOST = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
T = TypeVar("T")


class TrainingError(RuntimeError):
    """Training cannot continue; checkpoints are good. All ranks raise it, and each machine's first rank reports it."""


class RankError(TrainingError):
    """An error of this rank only, which reports it itself."""


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks. `local_rank` and `local_size`: its index among the ranks of its machine, and their
    number. `control`: a CPU group for small agreements, which never wait for a GPU."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    device: torch.device
    control: dist.ProcessGroup | None

    @property
    def first(self) -> bool:
        return self.rank == 0

    def log(self, line: str) -> None:
        """Print a line on the first rank only."""
        if self.first:
            log(line)

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Element-wise sum over the ranks."""
        return self.begin_sum(numbers)()

    def begin_sum(self, numbers: Sequence[float]) -> Callable[[], list[float]]:
        """Begin `sum` and return a function that waits for the result and returns it. All ranks must begin their sums
        in the same order."""
        values = torch.tensor(numbers, dtype=torch.float64)
        under_way: Any = dist.all_reduce(values, group=self.control, async_op=True)

        def finish() -> list[float]:
            under_way.wait()
            return values.tolist()

        return finish

    def barrier(self) -> None:
        dist.barrier(group=self.control)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def on_all(self, work: Callable[[], T]) -> list[T]:
        """The results of `work` on all ranks, in rank order. If it fails on some, all ranks raise the first of these
        errors: a ValueError unchanged, an error of reading or writing as a TrainingError that names the rank."""
        result, error = None, None
        try:
            result = work()
        except (ValueError, TrainingError) as raised:
            error = raised
        except (OSError, SafetensorError) as raised:
            error = TrainingError(f"rank {self.rank}: {raised}")
        outcomes = self.gather((result, error))
        for _, error in outcomes:
            if error is not None:
                raise error
        return [result for result, _ in outcomes]

    def from_first(self, work: Callable[[], T]) -> T:
        """Run `work` on the first rank only, while the others wait, and return its result on all ranks. Errors are
        raised on all ranks, as in `on_all`."""
        return self.on_all(work if self.first else lambda: None)[0]  # pyright: ignore[reportReturnType]


def join_ranks() -> Ranks:
    """Enter the process group that the launcher describes in the environment; without a launcher, a group of one.

    CPU threads are divided among the ranks of a machine, unless OMP_NUM_THREADS says how many each rank has.

    Raises:
        RankError: CUDA does not start on this rank's GPU, or the ranks do not find each other.
    """
    env = os.environ
    if "RANK" not in env:
        env |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    local_rank, world_size = int(env["LOCAL_RANK"]), int(env["WORLD_SIZE"])
    local_size = int(env.get("LOCAL_SIZE") or env.get("LOCAL_WORLD_SIZE") or world_size)  # torchrun's is the second
    cores = min(psutil.cpu_count(logical=False) or 1, len(os.sched_getaffinity(0)))
    n_threads = env.get("OMP_NUM_THREADS", "").split(",")[0]  # the others of a list are for nested regions
    torch.set_num_threads(int(n_threads or max(1, cores // local_size)))
    cuda, device = torch.cuda.is_available(), torch.device("cpu")
    _set_up_deepspeed()
    try:
        if cuda:
            device = torch.device("cuda", local_rank)
            start(device, "train.device")
            torch.cuda.set_device(local_rank)
        deepspeed.init_distributed(dist_backend="nccl" if cuda else "gloo", timeout=TIMEOUT, verbose=False)
        control: Any = dist.new_group(backend="gloo", timeout=TIMEOUT) if cuda else None
        if cuda and world_size > 1:
            dist.all_reduce(torch.zeros(1, device=device))  # NCCL connects at its first collective
            torch.cuda.synchronize(device)
    except (RuntimeError, OSError, ValueError) as error:
        raise RankError(
            f"rank {env['RANK']} of {world_size} on {socket.gethostname()} cannot join the others at "
            f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}: {_first_line(error)}; on several machines, set "
            "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface between them, such as eth0 or ib0"
        ) from error
    return Ranks(dist.get_rank(), dist.get_world_size(), local_rank, local_size, device, control)


def _set_up_deepspeed() -> None:
    """Keep DeepSpeed from printing, and from compiling operations that no rank uses."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # DeepSpeed's calls
    # DeepSpeed imports its Muon, which takes seconds where PyTorch's compiler is on.
    if "TORCHDYNAMO_DISABLE" not in os.environ:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        import_module("deepspeed.runtime.zero.muon.muon_optimizer")
        del os.environ["TORCHDYNAMO_DISABLE"]
    # No setting disables DeepSpeed's compiled operations. They take a minute at the first launch or, without a CUDA
    # toolkit, make every rank print what is missing.
    deepspeed.ops.__dict__["__compatible_ops__"] = {"deepspeed_shm_comm": False}
    # With pynvml, DeepSpeed parses CUDA_VISIBLE_DEVICES as numbers and fails on UUIDs.
    deepspeed.accelerator.get_accelerator()  # it imports pynvml
    vars(import_module("deepspeed.accelerator.cuda_accelerator"))["pynvml"] = None


def log(line: str) -> None:
    """Print a line on standard output, above a progress bar if there is one."""
    tqdm.write(line)
    sys.stdout.flush()


@contextmanager
def failures_named(ranks: Ranks) -> Iterator[None]:
    """Inside, a file that cannot be read or written (a full disk), and a collective that fails because another rank
    died, raise a RankError that says so."""
    try:
        yield
    except BrokenPipeError:  # of standard output
        raise
    except OSError as error:
        raise RankError(
            f"rank {ranks.rank}: {error}; once fixed, the same command resumes from the newest checkpoint"
        ) from error
    except RuntimeError as error:
        reason = _first_line(error)
        is_lost = type(error) is RuntimeError and any(word in reason for word in LOST)
        if not is_lost and not isinstance(error, dist.DistError):
            raise
        raise RankError(
            f"rank {ranks.rank}: another rank failed or was killed ({reason}); the same command resumes from "
            "the newest checkpoint"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def leave_ranks(ranks: Ranks) -> None:
    """Destroy the process group, as every rank's last action: otherwise the process may abort at exit."""
    ranks.barrier()
    deepspeed.comm.destroy_process_group()  # DeepSpeed's record of the groups too: the process may join again
