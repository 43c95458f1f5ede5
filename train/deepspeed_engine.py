"""DeepSpeed around the draft: its settings, the optimizer, one step, files to resume from. The frozen target stays
outside the engine.

Not here: what a step computes (step.py), checkpoint folders (checkpoint.py), other numbers of ranks (elastic.py).
"""

import math
from collections.abc import Mapping
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longdraft.train.adamuon import AdaMuon
from longdraft.train.config import DTYPES, Config, OptimizerSection
from longdraft.train.ranks import Ranks  # before DeepSpeed: it names the accelerator

# isort: split
import deepspeed
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_local_fp32_param,
)

# The largest number of values in DeepSpeed's buffer for sums over ranks.
MAX_BUCKET = 500_000_000


def deepspeed_dict(config: Config, world_size: int, n_weights: int) -> dict[str, Any]:
    """What `deepspeed.initialize` is told for a draft of `n_weights` weights, apart from optimizer and learning rate,
    which DraftEngine sets."""
    bf16, passes = config.train.precision == "bf16", config.train.n_passes(world_size)
    # Memory-efficient linear layers would replace F.linear in the whole process, under the frozen target too.
    zero: dict[str, Any] = {"stage": config.train.zero_stage, "memory_efficient_linear": False}
    # The default is half a billion values, however few there are to sum.
    zero["reduce_bucket_size"] = min(n_weights, MAX_BUCKET)
    if config.train.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return {
        # As DeepSpeed counts: all passes full, and shared rows once on each rank. It only checks the product.
        "train_batch_size": config.train.micro_batch * passes * world_size,
        "train_micro_batch_size_per_gpu": config.train.micro_batch,
        "gradient_accumulation_steps": passes,
        "gradient_clipping": config.optimizer.clip,
        "bf16": {"enabled": bf16},
        # Gradients of passes are summed in fp32 too: a sum of ten bf16 ones would lose the small ones.
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        # Ours are plain PyTorch: DeepSpeed's own, the only ones it has tested, are compiled at the first launch.
        "zero_allow_untested_optimizer": True,
        # Sums of bf16 gradients would depend on the number of ranks far more than sums in fp32.
        "communication_data_type": "fp32",
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }


def learning_rate(step: int, steps: int, optimizer: OptimizerSection) -> float:
    """The rate of step 0, 1, ...: (step + 1) / warmup of the peak, then a cosine that would reach 0 at `steps`."""
    warmup = optimizer.warmup_steps or 0
    if step < warmup:
        return optimizer.peak_lr * (step + 1) / warmup
    progress = (step - warmup) / (steps - warmup)
    return optimizer.peak_lr * (1 + math.cos(math.pi * progress)) / 2


def parameter_groups(draft: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups of the optimizer: matrices decay, norms and biases do not. No group is empty."""
    decayed = [p for p in draft.parameters() if p.ndim > 1]
    others = [p for p in draft.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


class DraftEngine:
    """A draft under ZeRO with its optimizer, clipping and gradient accumulation.

    `deepspeed` is called like the draft. `optimizer` is the one that DeepSpeed wraps in its own.

    Args:
        draft: the network, its weights equal on all ranks.
    """

    def __init__(self, config: Config, draft: nn.Module, ranks: Ranks):
        self.config, self.ranks = config, ranks
        dtype = DTYPES[config.train.precision]
        draft = draft.to(ranks.device, dtype)
        section = config.optimizer
        groups = parameter_groups(draft, section.weight_decay)
        options: dict[str, Any] = {"lr": section.peak_lr, "betas": section.betas, "eps": section.eps}
        if section.name == "adamuon":
            self.optimizer = AdaMuon(groups, dtype=dtype, **options)
        else:
            self.optimizer = torch.optim.AdamW(groups, fused=True, **options)
        settings = deepspeed_dict(config, ranks.world_size, sum(p.numel() for p in draft.parameters()))
        with redirect_stdout(StringIO()):  # DeepSpeed's bf16 optimizer prints tables of memory
            self.deepspeed, *_ = deepspeed.initialize(
                model=draft, optimizer=self.optimizer, config=settings, dist_init_required=False
            )
        self.draft = draft
        self._left_out: Tensor | None = None
        self._hooks = [parameter.register_hook(self._zero_if_left_out) for parameter in draft.parameters()]
        self._files = _Files()
        self.deepspeed.checkpoint_engine = self._files
        # DeepSpeed copies a script beside a checkpoint that merges sharded weights, as `weights` does. On a full disk
        # that would fail on the first rank alone, while the others wait; no setting turns it off.
        self.deepspeed._copy_recovery_script = lambda save_path: None

    def begin_step(self, step: int) -> float:
        """Set and return the step's learning rate."""
        rate = learning_rate(step, self.config.train.n_steps, self.config.optimizer)
        for group in self.deepspeed.optimizer.param_groups:  # pyright: ignore
            group["lr"] = rate
        return rate

    def backward(self, loss: Tensor, left_out: Tensor) -> None:
        """Add one pass's loss to the step's, which is the sum over all passes and ranks. DeepSpeed averages over both,
        hence the factors. The weights move after the step's last pass.

        Args:
            left_out: bool scalar on the device, which the host does not read: where it is true, the pass's gradient is
                zero, whatever was computed.
        """
        passes = self.deepspeed.gradient_accumulation_steps()
        self._left_out = left_out
        self.deepspeed.backward(loss * (passes * self.ranks.world_size))
        self._left_out = None
        self.deepspeed.step()

    def _zero_if_left_out(self, gradient: Tensor) -> Tensor:
        """Applied to a weight's gradient of a pass before DeepSpeed sees it. Masking the loss would not do, since NaN
        times zero is NaN."""
        return gradient if self._left_out is None else gradient.masked_fill(self._left_out, 0.0)

    def stepped(self) -> bool:
        """Whether the last step moved the weights; the same on all ranks. Where the norm of the whole gradient is not
        finite, DeepSpeed skips the step and leaves weights and optimizer untouched."""
        return self.deepspeed.was_step_applied()

    def grad_norm(self) -> float:
        """The norm of the last step's whole gradient before clipping; infinite where the step was left out."""
        norm = self.deepspeed.get_global_grad_norm()
        return float(norm) if norm is not None else math.nan

    def close(self) -> None:
        """Free the memory for the next run in this process: DeepSpeed's hooks keep an engine alive, ZeRO-3's even after
        they are removed."""
        for hook in self._hooks:
            hook.remove()
        self.deepspeed.destroy()
        vars(self.deepspeed.optimizer).clear()
        self.optimizer.state.clear()

    def weights(self) -> dict[str, Tensor]:
        """The draft's whole state dict on the CPU in its training dtype, on every rank; all ranks must call it."""
        sharded = self.config.train.zero_stage == 3
        with deepspeed.zero.GatheredParameters(list(self.draft.parameters()), enabled=sharded):
            return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.draft.state_dict().items()}

    def masters(self) -> dict[str, Tensor]:
        """The fp32 master weights of a bf16 draft, on the CPU of the first rank; all ranks must call it. Empty on other
        ranks, and for an fp32 draft, whose weights are its masters."""
        masters = {}
        for name, weight in self.draft.named_parameters() if self.config.train.precision == "bf16" else ():
            master = safe_get_full_fp32_param(weight)
            assert master is not None, "DeepSpeed keeps no fp32 master of a weight"
            if self.ranks.first:
                masters[name] = master.to("cpu", copy=True)
        return masters

    def set_masters(self, masters: Mapping[str, Tensor]) -> None:
        """Replace the masters, which were made from bf16 weights, by these fp32 weights; nothing for an fp32 draft."""
        for name, weight in self.draft.named_parameters() if self.config.train.precision == "bf16" else ():
            value = masters[name].to(self.ranks.device)
            if self.config.train.zero_stage == 3:  # each rank has a share of every weight, padded on the last ranks
                size = safe_get_local_fp32_param(weight).numel()
                padded = F.pad(value.flatten(), (0, size * self.ranks.world_size - value.numel()))
                safe_set_local_fp32_param(weight, padded[self.ranks.rank * size :][:size])
            else:
                safe_set_full_fp32_param(weight, value)

    def write(self, folder: Path) -> list[Path]:
        """Write DeepSpeed's files to resume from into this folder; all ranks call it. Returns the files of this rank.
        An error is raised at the end: raised inside DeepSpeed, it would leave the other ranks in a barrier."""
        self._files.error, self._files.written = None, []
        self.deepspeed.save_checkpoint(
            str(folder.parent), tag=folder.name, client_state={}, save_latest=False, exclude_frozen_parameters=True
        )
        if self._files.error is not None:
            raise self._files.error
        return self._files.written

    def read(self, folder: Path) -> None:
        """Read the files that `write` made on the same number of ranks."""
        with chdir(folder.parent):  # DeepSpeed takes the path as a pattern, and a folder's name may hold * or [
            loaded, _ = self.deepspeed.load_checkpoint(".", tag=folder.name)
        assert loaded is not None, f"DeepSpeed found nothing in {folder}"


class _Files(TorchCheckpointEngine):
    """How DeepSpeed writes files: the first error is kept instead of raised, and the files written are recorded."""

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
