"""DeepSpeed around the draft: the ranks, the optimizer, one step. The frozen target never enters the engine.

Ranks wait for one another in `Ranks.control`, on the CPU and as long as TIMEOUT. Not here: what a step computes
(train/step.py), checkpoint folders (train/state.py), other numbers of ranks (train/elastic.py).
"""

import errno
import importlib
import logging
import math
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from tqdm import tqdm

from longdraft.models.device import start
from longdraft.train.config import Config, OptimizerSection, deepspeed_dict
from longdraft.train.launcher import free_port
from longdraft.train.meeting import check_own_name, failures_told

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else its import warns, in every rank, that it found no GPU
import deepspeed
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

# Long enough for a rank that loads a large target from a slow disk while the others wait.
TIMEOUT = timedelta(minutes=60)
# What the system says of a full disk, of a quota and of too large a file.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# In what gloo and NCCL say when the other side of a collective is gone.
LOST = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
GOES_ON = "from the newest checkpoint, or from the beginning where there is none"
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

    def say(self, line: str) -> None:
        """Prints a line once, whichever rank has it to say."""
        if self.first:
            say(line)

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

    def share_of_machine(self) -> tuple[int, int]:
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
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # DeepSpeed's calls
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    local_rank = int(os.environ["LOCAL_RANK"])
    local_size = int(os.environ.get("LOCAL_SIZE", os.environ["WORLD_SIZE"]))
    cores = min(psutil.cpu_count(logical=False) or 1, len(os.sched_getaffinity(0)))
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]  # a list is for nested regions
    torch.set_num_threads(int(wanted) if wanted.isdigit() else max(1, cores // local_size))
    cuda = torch.cuda.is_available()
    if cuda:
        if local_size > torch.cuda.device_count():
            n_gpus = torch.cuda.device_count()
            raise ValueError(
                f"num_gpus: {local_size} ranks, but this machine has {n_gpus} GPUs; start at most {n_gpus}"
            )
        with _own_failure_said(local_rank):
            start(torch.device("cuda", local_rank), "train.device")
        torch.cuda.set_device(local_rank)
    _import_without_compiler("deepspeed.runtime.zero.muon.muon_optimizer")
    # None of DeepSpeed's compiled operations is used. On a CPU it would compile a shared-memory all-reduce for a minute
    # at the first launch (for its inference engine); on a GPU without a CUDA toolkit, looking which of them could be
    # compiled prints what is missing, in every rank.
    deepspeed.ops.__dict__["__compatible_ops__"] = {"deepspeed_shm_comm": False}
    check_own_name(int(os.environ["WORLD_SIZE"]), local_size)
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    with failures_told(TrainingError):  # an interface's fault is every rank's of a machine: its first one tells it
        deepspeed.init_distributed(dist_backend="nccl" if cuda else "gloo", timeout=TIMEOUT, verbose=False)
        control = dist.new_group(backend="gloo", timeout=TIMEOUT) if cuda else None
    if cuda and dist.get_world_size() > 1:
        with _own_failure_said(local_rank), failures_told(TrainingError):
            dist.all_reduce(torch.zeros(1, device=device))  # NCCL looks for the others at its first collective
            torch.cuda.synchronize(device)
    return Ranks(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=local_rank,
        device=device,
        control=control,  # pyright: ignore[reportArgumentType]
    )


@contextmanager
def _own_failure_said(local_rank: int) -> Iterator[None]:
    """Inside, what ends this rank alone is printed, for only the first of a machine prints what ends it."""
    try:
        yield
    except (ValueError, TrainingError) as error:
        if local_rank:
            say(f"rank {os.environ['RANK']} on {socket.gethostname()}: {error}")
        raise


def _import_without_compiler(name: str) -> None:
    """DeepSpeed asks of each optimizer whether it is its Muon, the import of which decorates functions by
    `torch.compile`: seconds for PyTorch's whole compiler, in every process, for what never runs here."""
    compiler, torch.compile = torch.compile, lambda function: function
    try:
        with suppress(ImportError):  # another version of DeepSpeed may not have it
            importlib.import_module(name)
    finally:
        torch.compile = compiler


def wrong_files(folder: Path, sizes: Mapping[str, int]) -> list[str]:
    """Those of the named files that are missing or have another size in bytes."""
    return [
        name for name, size in sizes.items() if not (folder / name).is_file() or (folder / name).stat().st_size != size
    ]


def say(line: str) -> None:
    """A line on standard output, above a bar that stands on the terminal."""
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
        if getattr(error, "errno", None) in FULL or any(f"os error {number}" in reason for number in FULL):
            message = f"a file cannot be written ({reason}); make room, then the same command goes on"
        elif isinstance(error, dist.DistError) or any(word in reason for word in LOST):
            message = f"another rank is gone, it failed or was killed ({reason}); the same command goes on"
        else:
            raise
        message = f"rank {ranks.rank}: {message} {GOES_ON}"
        if ranks.local_rank:
            say(message)
        raise TrainingError(message) from error


def leave_ranks(ranks: Ranks) -> None:
    """The last thing every rank does: a process group left standing may abort the process at its exit."""
    ranks.barrier()
    deepspeed.comm.destroy_process_group()  # with what it keeps of the groups: the process may join again


def make_deterministic() -> None:
    """PyTorch's deterministic algorithms, for `train.deterministic`; raises where an operation has none."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def learning_rate(step: int, steps: int, optimizer: OptimizerSection) -> float:
    """Of step 0, 1, ...: (step + 1) / warmup of the peak, then a cosine that would reach 0 at `steps`."""
    warmup = optimizer.warmup_steps or 0
    if step < warmup:
        return optimizer.peak_lr * (step + 1) / warmup
    progress = (step - warmup) / (steps - warmup)
    return optimizer.peak_lr * (1 + math.cos(math.pi * progress)) / 2


def parameter_groups(draft: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """For the optimizer: matrices decay, norms and biases do not; no group is empty."""
    decayed = [p for p in draft.parameters() if p.ndim > 1]
    others = [p for p in draft.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


class DraftEngine:
    """A draft under ZeRO with AdamW, clipping and accumulation.

    Args:
        config: the run.
        draft: the network, its weights equal on all ranks; call the engine like it.
    """

    def __init__(self, config: Config, draft: nn.Module, ranks: Ranks):
        self.config, self.ranks = config, ranks
        dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
        draft = draft.to(ranks.device, dtype)
        optimizer = config.optimizer
        groups = parameter_groups(draft, optimizer.weight_decay)
        adam = torch.optim.AdamW(groups, lr=optimizer.peak_lr, betas=optimizer.betas, eps=optimizer.eps, fused=True)
        settings = deepspeed_dict(config, ranks.world_size, sum(p.numel() for p in draft.parameters()))
        with redirect_stdout(StringIO()):  # its bf16 optimizer prints tables of memory
            self.deepspeed, *_ = deepspeed.initialize(
                model=draft, optimizer=adam, config=settings, dist_init_required=False
            )
        self.draft = draft
        self._left_out: Tensor | None = None
        self._hooks = [parameter.register_hook(self._counted) for parameter in draft.parameters()]
        self.adam, self._files = adam, _Files()
        self.deepspeed.checkpoint_engine = self._files
        # It copies scripts beside a checkpoint, to put sharded weights together, which `weights` does too; on a full
        # disk that would fail on the first rank alone, while the others wait.
        self.deepspeed._copy_recovery_script = lambda save_path: None

    def __call__(self, *args: Any) -> Any:
        return self.deepspeed(*args)

    def begin_step(self, step: int) -> float:
        """Sets and returns the step's learning rate."""
        rate = learning_rate(step, self.config.train.n_steps, self.config.optimizer)
        for group in self.deepspeed.optimizer.param_groups:  # pyright: ignore
            group["lr"] = rate
        return rate

    def backward(self, part: Tensor, left_out: Tensor) -> None:
        """Adds one pass's share of the step's loss; the shares of all passes and ranks sum to the loss. DeepSpeed
        averages over both, hence the factors; the weights move after the step's last pass.

        left_out: bool, a number on the device that nobody reads: where it is true the pass's gradient is zero, whatever
            was computed.
        """
        passes = self.deepspeed.gradient_accumulation_steps()
        self._left_out = left_out
        self.deepspeed.backward(part * (passes * self.ranks.world_size))
        self._left_out = None
        self.deepspeed.step()

    def _counted(self, gradient: Tensor) -> Tensor:
        """A weight's whole gradient of a pass, before DeepSpeed sees it. Here, not in the loss, as NaN times zero is
        NaN."""
        return gradient if self._left_out is None else gradient.masked_fill(self._left_out, 0.0)

    def stepped(self) -> bool:
        """Whether the last step moved the weights; the same on all ranks. DeepSpeed leaves a step out, weights and
        optimizer untouched, whose whole gradient has no finite norm."""
        return self.deepspeed.was_step_applied()

    def grad_norm(self) -> float:
        """Of the last step's whole gradient, before clipping; infinite where it was left out."""
        norm = self.deepspeed.get_global_grad_norm()
        return float(norm) if norm is not None else math.nan

    def close(self) -> None:
        """Lets go of the memory, for the next run in this process: DeepSpeed's hooks keep an engine alive, and ZeRO-3's
        even once they are removed."""
        for hook in self._hooks:
            hook.remove()
        self.deepspeed.destroy()
        vars(self.deepspeed.optimizer).clear()
        self.adam.state.clear()

    def weights(self) -> dict[str, Tensor]:
        """The draft's whole state on the CPU in its training dtype, on every rank; all ranks must call it."""
        sharded = self.config.train.zero_stage == 3
        with deepspeed.zero.GatheredParameters(list(self.draft.parameters()), enabled=sharded):
            return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.draft.state_dict().items()}

    def write(self, folder: Path) -> BaseException | None:
        """DeepSpeed's files to resume from, into this folder; all ranks call it. Returns what went wrong on this rank:
        raised within DeepSpeed, it would leave the other ranks in a barrier."""
        self._files.error, self._files.written = None, []
        self.deepspeed.save_checkpoint(
            str(folder.parent), tag=folder.name, client_state={}, save_latest=False, exclude_frozen_parameters=True
        )
        return self._files.error

    def written(self) -> list[Path]:
        """The files that the last `write` made on this rank."""
        return list(self._files.written)

    def read(self, folder: Path) -> None:
        """The files that `write` made on as many ranks."""
        with chdir(folder.parent):  # DeepSpeed makes a pattern of the path, and a folder's name may hold * or [
            loaded, _ = self.deepspeed.load_checkpoint(".", tag=folder.name)
        assert loaded is not None, f"DeepSpeed found nothing in {folder}"


class _Files(TorchCheckpointEngine):
    """How DeepSpeed writes a file; keeps the first error instead of raising it, and which files it wrote."""

    def __init__(self):
        super().__init__()
        self.zipfile_serialization = True
        self.error: BaseException | None = None
        self.written: list[Path] = []

    def save(self, state_dict: Any, path: str) -> None:
        try:
            super().save(state_dict, path)
            self.written.append(Path(path))
        except (OSError, RuntimeError) as error:
            self.error = self.error or error
