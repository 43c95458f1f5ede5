"""Wraps the draft in DeepSpeed: settings, the optimizer and its state, one step. The frozen target stays outside."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, redirect_stdout
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn

from longdraft.train.adamuon import AdaMuon
from longdraft.train.config import DTYPES, OptimizerSection, TrainSection
from longdraft.train.ranks import Ranks  # before DeepSpeed: it names the accelerator

# isort: split
import deepspeed

# The largest bucket in which DeepSpeed reduces gradients over ranks, in elements.
MAX_BUCKET = 500_000_000
# What a checkpoint holds of each parameter: the fp32 master weights that the optimizer updates, and its moments.
MASTER, MOMENTS = "master", ("exp_avg", "exp_avg_sq")


def deepspeed_dict(train: TrainSection, clip: float, world_size: int, n_weights: int) -> dict[str, Any]:
    """The config for `deepspeed.initialize`, for a draft of `n_weights` weights. It lacks optimizer and learning rate,
    which DraftEngine sets."""
    # Memory-efficient linear layers would replace F.linear in the whole process, also for the frozen target.
    zero: dict[str, Any] = {"stage": train.zero_stage, "memory_efficient_linear": False}
    zero["reduce_bucket_size"] = min(n_weights, MAX_BUCKET)
    if train.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": train.micro_batch,
        "gradient_accumulation_steps": train.n_passes(world_size),
        "gradient_clipping": clip,
        "bf16": {"enabled": train.precision == "bf16"},
        # Gradients are accumulated over passes in fp32 too: a bf16 sum of ten would lose small ones.
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        # Our optimizers are plain PyTorch. DeepSpeed has tested only its own, which it compiles at the first launch.
        "zero_allow_untested_optimizer": True,
        # Sums of bf16 gradients would depend on the number of ranks far more than sums in fp32.
        "communication_data_type": "fp32",
        "steps_per_print": 10**9,
        "timers": {"throughput": {"enabled": False}},  # it would synchronise with the device twice a pass
    }


def parameter_groups(draft: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups of the optimizer: matrices decay, norms and biases do not. No group is empty."""
    matrices = [p for p in draft.parameters() if p.ndim > 1]
    others = [p for p in draft.parameters() if p.ndim <= 1]
    groups = [(matrices, weight_decay), (others, 0.0)]
    return [{"params": parameters, "weight_decay": decay} for parameters, decay in groups if parameters]


class DraftEngine:
    """A draft under ZeRO with its optimizer, clipping and gradient accumulation.

    `deepspeed` is called like the draft. It reports whether the last step updated the weights (`was_step_applied`) and
    the gradient's norm before clipping (`get_global_grad_norm`). `optimizer` is the one that DeepSpeed wraps in its
    own.

    Args:
        draft: the network; its weights must be equal on all ranks.
    """

    def __init__(self, draft: nn.Module, ranks: Ranks, train: TrainSection, optimizer: OptimizerSection):
        self.ranks, self._sharded = ranks, train.zero_stage == 3
        dtype = DTYPES[train.precision]
        self.draft = draft.to(ranks.device, dtype)
        n_weights = sum(p.numel() for p in draft.parameters())
        settings = deepspeed_dict(train, optimizer.clip, ranks.world_size, n_weights)
        groups = parameter_groups(draft, optimizer.weight_decay)
        options: dict[str, Any] = {"lr": optimizer.peak_lr, "betas": optimizer.betas, "eps": optimizer.eps}
        if optimizer.name == "adamuon":
            self.optimizer = AdaMuon(groups, dtype=dtype, **options)
        else:
            self.optimizer = torch.optim.AdamW(groups, fused=True, **options)
        with redirect_stdout(StringIO()):  # DeepSpeed's bf16 optimizer prints tables of memory
            self.deepspeed, *_ = deepspeed.initialize(
                model=draft, optimizer=self.optimizer, config=settings, dist_init_required=False
            )
        self._is_skipped: Tensor | None = None
        self._hooks = [parameter.register_hook(self._zero_if_skipped) for parameter in draft.parameters()]
        # Create the optimizer's initial state here, so that a checkpoint can be loaded into it.
        zero: Any = self.deepspeed.optimizer
        groups = self.optimizer.param_groups
        for flat in zero.fp32_partitioned_groups_flat if self._sharded else [group["params"][0] for group in groups]:
            # A fused AdamW reads the step count on the weights' device, AdaMuon on the host.
            place = flat.device if self.optimizer.defaults.get("fused") else "cpu"
            state = {moment: torch.zeros_like(flat, requires_grad=False) for moment in MOMENTS}
            self.optimizer.state[flat] = {"step": torch.zeros((), dtype=torch.float32, device=place), **state}

    def set_rate(self, rate: float) -> None:
        """Set the learning rate."""
        for group in self.deepspeed.optimizer.param_groups:  # pyright: ignore
            group["lr"] = rate

    def backward(self, loss: Tensor, is_skipped: Tensor) -> None:
        """Backpropagate one pass's share of the step's loss; after the last pass, update the weights. The step's loss
        is the sum over all passes and ranks, but DeepSpeed averages over them, hence the factors.

        Args:
            is_skipped: bool scalar on the device, never read on the host. If true, the pass's gradient becomes zero,
                whatever was computed.
        """
        passes = self.deepspeed.gradient_accumulation_steps()
        self._is_skipped = is_skipped
        self.deepspeed.backward(loss * (passes * self.ranks.world_size))
        self._is_skipped = None
        self.deepspeed.step()

    def _zero_if_skipped(self, gradient: Tensor) -> Tensor:
        """Mask a weight's gradient before DeepSpeed sees it. Masking only the loss would not suffice, since NaN times
        zero is NaN."""
        return gradient if self._is_skipped is None else gradient.masked_fill(self._is_skipped, 0.0)

    def close(self) -> None:
        """Free the memory for the next run in this process: DeepSpeed's hooks keep an engine alive, ZeRO-3's even after
        they are removed."""
        for hook in self._hooks:
            hook.remove()
        self.deepspeed.destroy()
        vars(self.deepspeed.optimizer).clear()
        self.optimizer.state.clear()

    def _whole(self, modifier_rank: int | None = None) -> AbstractContextManager[object]:
        """Context in which ZeRO-3's weights are gathered. All ranks enter together."""
        parameters = list(self.draft.parameters())
        return deepspeed.zero.GatheredParameters(parameters, modifier_rank=modifier_rank, enabled=self._sharded)

    def weights(self) -> dict[str, Tensor]:
        """The draft's full state dict on the CPU in its training dtype, on every rank; all ranks must call it."""
        with self._whole():
            return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.draft.state_dict().items()}

    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace weights and buffers, as `weights` returns them; all ranks call it, with the same tensors."""
        with self._whole(modifier_rank=0):
            self.draft.load_state_dict(weights)

    def shares(self) -> dict[str, Tensor]:
        """This rank's part of the fp32 weights and of both moments: fp32 tensors [S] by `kind:start:name`, each the
        entries of a flattened parameter from `start` on, without padding. They are views of the optimizer's own
        tensors."""
        found: dict[str, Tensor] = {}
        zero: Any = self.deepspeed.optimizer
        parameters: dict[str, Any] = dict(self.draft.named_parameters())  # with the fields that DeepSpeed adds
        for name, parameter in parameters.items():
            if self._sharded:  # an equal share of each parameter, padded on the last ranks
                group, offset, padded = zero.grad_position[zero.get_param_id(parameter)]
                flat, start = zero.fp32_partitioned_groups_flat[group], self.ranks.rank * padded
                size = min(padded, parameter.ds_numel - start)
            elif (part := parameter._hp_mapping) is not None:
                (flat,) = self.optimizer.param_groups[part.param_group_index]["params"]
                own, start = part.hp_fragment_address, part.lp_fragment_address.start
                offset, size = own.start, own.numel
            else:
                continue
            if size > 0:
                states = {MASTER: flat.detach()} | {moment: self.optimizer.state[flat][moment] for moment in MOMENTS}
                found |= {f"{kind}:{start}:{name}": x.narrow(0, offset, size) for kind, x in states.items()}
        return found

    def optimizer_steps(self) -> int:
        """The number of steps that the optimizer has taken, without skipped ones."""
        return int(next(iter(self.optimizer.state.values()))["step"])

    def set_optimizer_steps(self, n: int) -> None:
        for state in self.optimizer.state.values():
            state["step"].fill_(n)
