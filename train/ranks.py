"""The processes of a training: how they meet, what they agree on, how they end.

Ranks wait for one another in `Ranks.control`, on the CPU and as long as TIMEOUT. gloo and NCCL listen on one network
interface each. gloo takes the one that the machine's own name stands for, which on many machines is the loopback
(127.0.1.1 in /etc/hosts): ranks on several machines would then not find each other, so it is checked first.
Not here: DeepSpeed's engine (deepspeed_engine.py), how the processes are started (launcher.py).
"""

import logging
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from tqdm import tqdm

from longdraft.models.device import start
from longdraft.models.files import DISK_FULL
from longdraft.train.checkpoint import wrong_files
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
# In what gloo and NCCL say when the other side of a collective is gone.
LOST = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
GOES_ON = "from the newest checkpoint, or from the beginning where there is none"
# DeepSpeed's launcher looks once a second, and of the ranks that have ended by then names any: in so much time it has
# seen the one whose end ends the others.
SEEN_S = 2.0
# As long as NFS keeps what it knows of a folder.
LAG_S = 60.0
T = TypeVar("T")


class TrainingError(RuntimeError):
    """Training cannot go on; what is saved is good."""


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks. `control` is a CPU group for small agreements: they never wait for a GPU."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    control: dist.ProcessGroup | None

    @property
    def first(self) -> bool:
        return self.rank == 0

    def log(self, line: str) -> None:
        """Prints a line once, whichever rank has it to say."""
        if self.first:
            log(line)

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Element-wise sum over the ranks."""
        return self.begin_sum(numbers)()

    def begin_sum(self, numbers: Sequence[float]) -> Callable[[], list[float]]:
        """The same, under way while this rank goes on; what is returned waits for it and gives it. All ranks begin
        their sums in the same order."""
        values = torch.tensor(numbers, dtype=torch.float64)
        under_way: Any = dist.all_reduce(values, group=self.control, async_op=True)

        def finish() -> list[float]:
            under_way.wait()
            return values.tolist()

        return finish

    def barrier(self) -> None:
        dist.barrier(group=self.control)

    def gather(self, own: Any) -> list[Any]:
        """What each rank gives, in the order of ranks."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, own, group=self.control)
        return values

    def from_first(self, work: Callable[[], T]) -> T:
        """What `work` gives on the first rank, on all of them: what one alone may look at or do, the others wait for.
        A ValueError or TrainingError there is raised on all alike."""
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
        """Does the work on all ranks, or on the first alone, and gives `failures` of it."""
        error: Exception | None = None
        try:
            if by_all or self.first:
                work()
        except errors as raised:
            error = raised
        return self.failures(error)

    def failures(self, error: BaseException | None) -> str:
        """What went wrong on which ranks, in one line that all get; empty where nothing did."""
        errors = self.gather(None if error is None else f"{type(error).__name__}: {error}".splitlines()[0])
        return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(errors) if text is not None)

    def unseen(self, folder: Path, sizes: Mapping[str, int], patience_s: float = LAG_S) -> str:
        """Which rank does not see which of a folder's files in full, in one line that all get; empty where all see
        them. Waits for a network file system, which may keep what it knew of a folder for a while."""
        deadline = time.monotonic() + patience_s
        while (missing := wrong_files(folder, sizes)) and time.monotonic() < deadline:
            time.sleep(0.5)
        return self.failures(FileNotFoundError(", ".join(missing)) if missing else None)

    def place_on_machine(self) -> tuple[int, int]:
        """This rank's place among the ranks of its machine, and their number."""
        names = self.gather(socket.gethostname())
        return names[: self.rank].count(names[self.rank]), names.count(names[self.rank])


def join_ranks() -> Ranks:
    """Enters the process group that the launcher describes in the environment; without a launcher, a group of one.

    CPU threads are shared out among the ranks of a machine unless OMP_NUM_THREADS says how many a rank has.

    Raises:
        ValueError: there are more ranks than GPUs on this machine, CUDA does not start on this rank's, or other
            machines cannot reach this one by its name.
        TrainingError: the ranks do not find each other.
    """
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    local_rank = int(os.environ["LOCAL_RANK"])
    given = os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE")  # DeepSpeed's name, torchrun's
    local_size = int(given or os.environ["WORLD_SIZE"])
    cores = min(psutil.cpu_count(logical=False) or 1, len(os.sched_getaffinity(0)))
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]  # a list is for nested regions
    torch.set_num_threads(int(wanted) if wanted.isdigit() else max(1, cores // local_size))
    device = _open_device(local_rank, local_size)
    _set_up_deepspeed()
    check_own_name(int(os.environ["WORLD_SIZE"]), local_size)
    cuda = device.type == "cuda"
    with failures_to_meet():  # an interface's fault is every rank's of a machine: its first one tells it
        deepspeed.init_distributed(dist_backend="nccl" if cuda else "gloo", timeout=TIMEOUT, verbose=False)
        control: Any = dist.new_group(backend="gloo", timeout=TIMEOUT) if cuda else None
    if cuda and dist.get_world_size() > 1:
        with _own_failure_logged(local_rank), failures_to_meet():
            dist.all_reduce(torch.zeros(1, device=device))  # NCCL looks for the others at its first collective
            torch.cuda.synchronize(device)
    return Ranks(dist.get_rank(), dist.get_world_size(), local_rank, device, control)


def _open_device(local_rank: int, local_size: int) -> torch.device:
    """This rank's GPU, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    n_gpus = torch.cuda.device_count()
    if local_size > n_gpus:
        raise ValueError(f"num_gpus: {local_size} ranks, but this machine has {n_gpus} GPUs; start at most {n_gpus}")
    device = torch.device("cuda", local_rank)
    with _own_failure_logged(local_rank):
        start(device, "train.device")
    torch.cuda.set_device(local_rank)
    return device


def _import_without_compiler(module: str) -> None:
    """DeepSpeed asks of each optimizer whether it is its Muon, whose functions are wrapped for PyTorch's compiler. That
    takes two seconds to import. The compiler is off here alone, for the process may compile things of its own."""
    name, before = "TORCHDYNAMO_DISABLE", os.environ.get("TORCHDYNAMO_DISABLE")
    os.environ[name] = "1"
    try:
        with suppress(ImportError):  # another version of DeepSpeed may not have it
            import_module(module)
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _set_up_deepspeed() -> None:
    """Keeps DeepSpeed from printing, and from compiling what no rank uses."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # DeepSpeed's calls
    _import_without_compiler("deepspeed.runtime.zero.muon.muon_optimizer")
    # No setting turns its own compiled operations off. On a CPU it would compile a shared-memory all-reduce (for its
    # inference engine), a minute at the first launch; on a GPU without a CUDA toolkit, finding out which of them could
    # be compiled prints what is missing, in every rank.
    deepspeed.ops.__dict__["__compatible_ops__"] = {"deepspeed_shm_comm": False}


@contextmanager
def _own_failure_logged(local_rank: int) -> Iterator[None]:
    """Inside, what ends this rank alone is logged, for only the first of a machine logs what ends it."""
    try:
        yield
    except (ValueError, TrainingError) as error:
        if local_rank:
            log(f"rank {os.environ['RANK']} on {socket.gethostname()}: {error}")
        raise


def log(line: str) -> None:
    """Prints a line on standard output, above a progress bar if there is one."""
    tqdm.write(line)
    sys.stdout.flush()


@contextmanager
def failures_named(ranks: Ranks) -> Iterator[None]:
    """Inside, a full disk, and what a collective raises because another rank is gone, become TrainingErrors that say
    so. They are printed here, for only the first rank of a machine prints what ends it."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        full = getattr(error, "errno", None) in DISK_FULL or any(f"os error {number}" in reason for number in DISK_FULL)
        own = isinstance(error, OSError)  # of a file or a stream of this rank
        if full:
            message = f"a file cannot be written ({reason}); make room, then the same command goes on"
        elif isinstance(error, dist.DistError) or (not own and any(word in reason for word in LOST)):
            message = f"another rank is gone, it failed or was killed ({reason}); the same command goes on"
        else:
            raise
        message = f"rank {ranks.rank}: {message} {GOES_ON}"
        if ranks.local_rank:
            log(message)
        if not full:
            time.sleep(SEEN_S)
        raise TrainingError(message) from error


def leave_ranks(ranks: Ranks) -> None:
    """The last thing every rank does: a process group left standing may abort the process at its exit."""
    ranks.barrier()
    deepspeed.comm.destroy_process_group()  # with what it keeps of the groups: the process may join again


def check_own_name(world_size: int, local_size: int) -> None:
    """Raises ValueError where there are ranks on other machines, and this one's name stands for an address that only it
    can reach."""
    if world_size <= local_size or os.environ.get(INTERFACE):
        return
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except socket.gaierror:
        found = "stands for no address"
    else:
        if not ip_address(str(address).partition("%")[0]).is_loopback:
            return
        found = f"stands for {address} (/etc/hosts), which no other machine reaches"
    raise ValueError(f"{INTERFACE}: not set, and this machine's name {name} {found}: {REMEDY}")


@contextmanager
def failures_to_meet() -> Iterator[None]:
    """Inside, where the ranks meet, what goes wrong becomes a TrainingError that names place and remedy."""
    try:
        yield
    except RuntimeError as error:
        given = os.environ
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        set_to = "".join(f", {name}={given[name]}" for name in (INTERFACE, "NCCL_SOCKET_IFNAME") if name in given)
        raise TrainingError(
            f"rank {given['RANK']} of {given['WORLD_SIZE']} on {socket.gethostname()} does not find the others at "
            f"{given['MASTER_ADDR']}:{given['MASTER_PORT']}{set_to}: {reason}; where they are on several machines, "
            f"{REMEDY}"
        ) from error
