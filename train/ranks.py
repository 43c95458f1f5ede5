"""The processes of a training: how they meet, what they agree on, how they end.

Ranks wait for one another in `Ranks.control`, on the CPU, for at most TIMEOUT. How they are started: launcher.py.
"""

import logging
import os
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from ipaddress import ip_address
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from tqdm import tqdm

from longdraft.models.device import start
from longdraft.models.files import DISK_FULL
from longdraft.train.launcher import free_port

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else its import warns, in every rank, that it found no GPU
import deepspeed

INTERFACE = "GLOO_SOCKET_IFNAME"
REMEDY = (
    f"set {INTERFACE} and NCCL_SOCKET_IFNAME, in every rank's environment, to the interface between the machines, as "
    "eth0 or ib0 (ip -br addr lists them)"
)
# Long enough for a rank that loads a large target from a slow disk while the others wait.
TIMEOUT = timedelta(minutes=60)
# Parts of gloo's and NCCL's messages when the other side of a collective is gone.
LOST = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
T = TypeVar("T")


class TrainingError(RuntimeError):
    """Training cannot go on; what was saved is good."""


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks. `control`: a CPU group for small agreements, which never wait for a GPU."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    control: dist.ProcessGroup | None

    @property
    def first(self) -> bool:
        return self.rank == 0

    def log(self, line: str) -> None:
        """Print a line on the first rank alone."""
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

    def from_first(self, work: Callable[[], T]) -> T:
        """The result of `work` on the first rank, on all ranks: for what one rank alone may read or do while the others
        wait. A ValueError or TrainingError there is raised on all ranks."""
        outcome: list[Any] = [None, None]
        if self.first:
            try:
                outcome[0] = work()
            except (ValueError, TrainingError) as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0, group=self.control)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def attempt(self, work: Callable[[], object], errors: tuple[type[Exception], ...], by_all: bool = True) -> str:
        """Do the work on all ranks, or on the first one alone, and return `failures` of it."""
        error: Exception | None = None
        try:
            if by_all or self.first:
                work()
        except errors as raised:
            error = raised
        return self.failures(error)

    def failures(self, error: BaseException | None) -> str:
        """One line, the same on all ranks, with what went wrong on which of them; empty where nothing did."""
        errors = self.gather(None if error is None else f"{type(error).__name__}: {error}".splitlines()[0])
        return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(errors) if text is not None)

    def place_on_machine(self) -> tuple[int, int]:
        """This rank's index among the ranks of its machine, and their number."""
        names = self.gather(socket.gethostname())
        return names[: self.rank].count(names[self.rank]), names.count(names[self.rank])


def join_ranks() -> Ranks:
    """Enter the process group that the launcher describes in the environment; without a launcher, a group of one.

    CPU threads are divided among the ranks of a machine, unless OMP_NUM_THREADS says how many each rank has.

    Raises:
        ValueError: there are more ranks than GPUs on this machine, CUDA does not start on this rank's, or other
            machines cannot reach this one by its name.
        TrainingError: the ranks do not find each other.
    """
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    local_rank, world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    # DeepSpeed's name and torchrun's for the number of ranks on this machine.
    local_size = int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or world_size)
    cores = min(psutil.cpu_count(logical=False) or 1, len(os.sched_getaffinity(0)))
    n_threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]  # the others of a list are for nested regions
    torch.set_num_threads(int(n_threads) if n_threads.isdigit() else max(1, cores // local_size))
    cuda = torch.cuda.is_available()
    device = _open_device(local_rank, local_size) if cuda else torch.device("cpu")
    _set_up_deepspeed()
    check_own_name(world_size, local_size)
    with rendezvous_errors():  # a faulty interface is every rank's of a machine: it is enough that the first logs it
        deepspeed.init_distributed(dist_backend="nccl" if cuda else "gloo", timeout=TIMEOUT, verbose=False)
        control: Any = dist.new_group(backend="gloo", timeout=TIMEOUT) if cuda else None
    if cuda and world_size > 1:
        with _own_failure_logged(local_rank), rendezvous_errors():
            dist.all_reduce(torch.zeros(1, device=device))  # NCCL connects at its first collective
            torch.cuda.synchronize(device)
    return Ranks(dist.get_rank(), dist.get_world_size(), local_rank, device, control)


def _open_device(local_rank: int, local_size: int) -> torch.device:
    """This rank's GPU."""
    n_gpus = torch.cuda.device_count()
    if local_size > n_gpus:
        raise ValueError(f"num_gpus: {local_size} ranks, but this machine has {n_gpus} GPUs; start at most {n_gpus}")
    device = torch.device("cuda", local_rank)
    with _own_failure_logged(local_rank):
        start(device, "train.device")
    torch.cuda.set_device(local_rank)
    return device


def _set_up_deepspeed() -> None:
    """Keep DeepSpeed from printing, and from compiling operations that no rank uses."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # DeepSpeed's calls
    # DeepSpeed imports its Muon to check the type of each optimizer. That takes seconds where PyTorch's compiler is on;
    # it is turned off for this import alone.
    if "TORCHDYNAMO_DISABLE" not in os.environ:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        with suppress(ImportError):  # another version may not have it
            import_module("deepspeed.runtime.zero.muon.muon_optimizer")
        del os.environ["TORCHDYNAMO_DISABLE"]
    # No setting turns DeepSpeed's compiled operations off. On a CPU it would compile a shared-memory all-reduce for its
    # inference engine, which takes a minute at the first launch. On a GPU without a CUDA toolkit, every rank would
    # print what is missing to compile them.
    deepspeed.ops.__dict__["__compatible_ops__"] = {"deepspeed_shm_comm": False}


@contextmanager
def _own_failure_logged(local_rank: int) -> Iterator[None]:
    """Inside, an error that ends this rank is logged: otherwise only the first rank of a machine logs its own."""
    try:
        yield
    except (ValueError, TrainingError) as error:
        if local_rank:
            log(f"rank {os.environ['RANK']} on {socket.gethostname()}: {error}")
        raise


def log(line: str) -> None:
    """Print a line on standard output, above a progress bar if there is one."""
    tqdm.write(line)
    sys.stdout.flush()


@contextmanager
def failures_named(ranks: Ranks) -> Iterator[None]:
    """Inside, a full disk, and the errors of collectives because another rank is gone, become TrainingErrors that say
    so. The other ranks of a machine log theirs here, since only the first one prints what ends it."""
    try:
        yield
    except TrainingError:
        raise
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        if getattr(error, "errno", None) in DISK_FULL or any(f"os error {number}" in reason for number in DISK_FULL):
            message = f"a file cannot be written ({reason}); make room, then the same command goes on"
        elif isinstance(error, dist.DistError) or (
            not isinstance(error, OSError) and any(word in reason for word in LOST)
        ):
            message = f"another rank is gone, it failed or was killed ({reason}); the same command goes on"
        else:
            raise
        message = f"rank {ranks.rank}: {message} from the newest checkpoint, or from the beginning where there is none"
        if ranks.local_rank:
            log(message)
        raise TrainingError(message) from error


def leave_ranks(ranks: Ranks) -> None:
    """Destroy the process group, as every rank's last act: one that is left may abort the process at exit."""
    ranks.barrier()
    deepspeed.comm.destroy_process_group()  # with DeepSpeed's own record of the groups: the process may join again


def check_own_name(world_size: int, local_size: int) -> None:
    """Raises ValueError where there are ranks on other machines and this one's name resolves to an address that they
    cannot reach. gloo listens on the interface of that address, which in many an /etc/hosts is 127.0.1.1."""
    if world_size <= local_size or os.environ.get(INTERFACE):
        return
    name = socket.gethostname()
    try:
        address = str(socket.getaddrinfo(name, None)[0][4][0])
    except socket.gaierror:
        address = "no address"
    if address == "no address" or ip_address(address.partition("%")[0]).is_loopback:
        raise ValueError(
            f"{INTERFACE}: not set, and this machine's name {name} stands for {address} (/etc/hosts), which no other "
            f"machine reaches: {REMEDY}"
        )


@contextmanager
def rendezvous_errors() -> Iterator[None]:
    """Inside, where the ranks meet, a RuntimeError becomes a TrainingError that names the address and a remedy."""
    try:
        yield
    except RuntimeError as error:
        env, reason = os.environ, str(error).strip().partition("\n")[0] or type(error).__name__
        set_to = "".join(f", {name}={env[name]}" for name in (INTERFACE, "NCCL_SOCKET_IFNAME") if name in env)
        raise TrainingError(
            f"rank {env['RANK']} of {env['WORLD_SIZE']} on {socket.gethostname()} does not find the others at "
            f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}{set_to}: {reason}; where they are on several machines, "
            f"{REMEDY}"
        ) from error
