"""DeepSpeed around the draft: the optimizer, one step, files to resume from. The frozen target never enters the engine.

Not here: what a step computes (train/step.py), checkpoint folders (train/checkpoint.py), other numbers of ranks
(train/elastic.py).
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
from longdraft.train.config import DTYPES, Config, OptimizerSection, deepspeed_dict
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
    """A draft under ZeRO with its optimizer, clipping and accumulation. `optimizer`: what DeepSpeed wraps in its own.

    Args:
        config: the run.
        draft: the network, its weights equal on all ranks; `deepspeed` is called like it.
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
        with redirect_stdout(StringIO()):  # its bf16 optimizer prints tables of memory
            self.deepspeed, *_ = deepspeed.initialize(
                model=draft, optimizer=self.optimizer, config=settings, dist_init_required=False
            )
        self.draft = draft
        self._left_out: Tensor | None = None
        self._hooks = [parameter.register_hook(self._counted) for parameter in draft.parameters()]
        self._files = _Files()
        self.deepspeed.checkpoint_engine = self._files
        # It copies scripts beside a checkpoint, to put sharded weights together, which `weights` does too. On a full
        # disk that would fail on the first rank alone, while the others wait; no setting leaves it out.
        self.deepspeed._copy_recovery_script = lambda save_path: None

    def begin_step(self, step: int) -> float:
        """Sets and returns the step's learning rate."""
        rate = learning_rate(step, self.config.train.n_steps, self.config.optimizer)
        for group in self.deepspeed.optimizer.param_groups:  # pyright: ignore
            group["lr"] = rate
        return rate

    def backward(self, loss: Tensor, left_out: Tensor) -> None:
        """Adds one pass's loss to the step's, which is the sum over all passes and ranks. DeepSpeed averages over both,
        hence the factors; the weights move after the step's last pass.

        left_out: bool, a number on the device that nobody reads: where it is true the pass's gradient is zero, whatever
            was computed.
        """
        passes = self.deepspeed.gradient_accumulation_steps()
        self._left_out = left_out
        self.deepspeed.backward(loss * (passes * self.ranks.world_size))
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
        self.optimizer.state.clear()

    def weights(self) -> dict[str, Tensor]:
        """The draft's whole state on the CPU in its training dtype, on every rank; all ranks must call it."""
        sharded = self.config.train.zero_stage == 3
        with deepspeed.zero.GatheredParameters(list(self.draft.parameters()), enabled=sharded):
            return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.draft.state_dict().items()}

    def masters(self) -> dict[str, Tensor]:
        """The fp32 master weights of a bf16 draft, on the CPU of the first rank; all ranks must call it, and the others
        get none. Of an fp32 draft none: its weights are them."""
        masters = {}
        for name, weight in self.draft.named_parameters() if self.config.train.precision == "bf16" else ():
            master = safe_get_full_fp32_param(weight)
            assert master is not None, "DeepSpeed keeps no fp32 master of a weight"
            if self.ranks.first:
                masters[name] = master.to("cpu", copy=True)
        return masters

    def set_masters(self, masters: Mapping[str, Tensor]) -> None:
        """Puts fp32 weights in the place of the masters that were made of their bf16 rounding; nothing for fp32."""
        for name, weight in self.draft.named_parameters() if self.config.train.precision == "bf16" else ():
            value = masters[name].to(self.ranks.device)
            if self.config.train.zero_stage == 3:  # each rank has a share of every weight, the last ones padded
                size = safe_get_local_fp32_param(weight).numel()
                padded = F.pad(value.flatten(), (0, size * self.ranks.world_size - value.numel()))
                safe_set_local_fp32_param(weight, padded[self.ranks.rank * size :][:size])
            else:
                safe_set_full_fp32_param(weight, value)

    def write(self, folder: Path) -> list[Path]:
        """DeepSpeed's files to resume from, into this folder; all ranks call it. Returns those that this rank wrote.
        What goes wrong is raised at the end: raised within DeepSpeed, it would leave the other ranks in a barrier."""
        self._files.error, self._files.written = None, []
        self.deepspeed.save_checkpoint(
            str(folder.parent), tag=folder.name, client_state={}, save_latest=False, exclude_frozen_parameters=True
        )
        if self._files.error is not None:
            raise self._files.error
        return self._files.written

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
