"""DeepSpeed around the draft: the ranks, the optimizer, one step. The frozen target never enters the engine.

Not here: what a step computes (train/loop.py), checkpoint folders (train/state.py).
"""

import logging
import math
import os
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from io import StringIO
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from longdraft.train.config import Config, OptimizerSection, deepspeed_dict
from longdraft.train.launcher import free_port

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else its import warns, in every rank, that it found no GPU
import deepspeed

# Long enough for a rank that loads a large target from a slow disk while the others wait.
TIMEOUT = timedelta(minutes=60)


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

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Element-wise sum over the ranks."""
        values = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(values, group=self.control)
        return values.tolist()

    def barrier(self) -> None:
        dist.barrier(group=self.control)


def join_ranks() -> Ranks:
    """Enters the process group that the launcher describes in the environment; without a launcher, a group of one.

    CPU threads are shared out among the ranks of a machine unless OMP_NUM_THREADS says otherwise.
    """
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # DeepSpeed's calls
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    local_rank = int(os.environ["LOCAL_RANK"])
    if "OMP_NUM_THREADS" not in os.environ:
        local_size = int(os.environ.get("LOCAL_SIZE", os.environ["WORLD_SIZE"]))
        torch.set_num_threads(
            max(1, min(psutil.cpu_count(logical=False) or 1, len(os.sched_getaffinity(0))) // local_size)
        )
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(local_rank)
    # On a CPU DeepSpeed would compile a shared-memory all-reduce for a minute at the first launch; training does not
    # use it (only its inference engine does).
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if cuda else "gloo", timeout=TIMEOUT, verbose=False)
    return Ranks(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=local_rank,
        device=torch.device("cuda", local_rank) if cuda else torch.device("cpu"),
        control=dist.new_group(backend="gloo", timeout=TIMEOUT) if cuda else None,  # pyright: ignore[reportArgumentType]
    )


def leave_ranks(ranks: Ranks) -> None:
    """The last thing every rank does: a process group left standing may abort the process at its exit."""
    ranks.barrier()
    dist.destroy_process_group()


def make_deterministic() -> None:
    """PyTorch's deterministic algorithms, for `train.deterministic`; raises where an operation has none."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def learning_rate(step: int, steps: int, optimizer: OptimizerSection) -> float:
    """Of step 0, 1, ...: (step + 1) / warmup of the peak, then a cosine that would reach 0 at `steps`."""
    if step < optimizer.warmup_steps:
        return optimizer.peak_lr * (step + 1) / optimizer.warmup_steps
    progress = (step - optimizer.warmup_steps) / (steps - optimizer.warmup_steps)
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
        with redirect_stdout(StringIO()):  # its bf16 optimizer prints tables of memory
            self.deepspeed, *_ = deepspeed.initialize(
                model=draft, optimizer=adam, config=deepspeed_dict(config, ranks.world_size), dist_init_required=False
            )
        self.draft = draft

    def __call__(self, *args: Any) -> Any:
        return self.deepspeed(*args)

    def begin_step(self, step: int) -> float:
        """Sets and returns the step's learning rate."""
        rate = learning_rate(step, self.config.train.steps, self.config.optimizer)
        for group in self.deepspeed.optimizer.param_groups:  # pyright: ignore
            group["lr"] = rate
        return rate

    def backward(self, part: Tensor) -> None:
        """Adds one pass's share of the step's loss; the shares of all passes and ranks sum to the loss. DeepSpeed
        averages over both, hence the factors; the weights move after the step's last pass."""
        passes = self.deepspeed.gradient_accumulation_steps()
        self.deepspeed.backward(part * (passes * self.ranks.world_size))
        self.deepspeed.step()

    def grad_norm(self) -> float:
        """Of the last step's whole gradient, before clipping."""
        norm = self.deepspeed.get_global_grad_norm()
        return float(norm) if norm is not None else math.nan

    def weights(self) -> dict[str, Tensor]:
        """The draft's whole state on the CPU in its training dtype, on every rank; all ranks must call it."""
        sharded = self.config.train.zero_stage == 3
        with deepspeed.zero.GatheredParameters(list(self.draft.parameters()), enabled=sharded):
            return {name: p.detach().to("cpu", copy=True) for name, p in self.draft.named_parameters()}
