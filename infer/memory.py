"""How much memory decoding will take, computed before anything is allocated."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from longdraft.infer.drafters.base import Drafter
from longdraft.infer.slot_sampling import MOST_SORTED, SORTED_BYTES
from longdraft.kernels import backend
from longdraft.kernels.cpu_impl import rows
from longdraft.kernels.cpu_impl.layers import MOST_TOKENS
from longdraft.models.decoder import Decoder
from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.device import free_bytes
from longdraft.models.passes import layers_bytes, pass_bytes


def estimate_memory(
    model: Decoder,
    drafter: Drafter,
    batch: int,
    capacity: int,
    widths: Sequence[int],
    chunk: int,
    graphs: bool = False,
    aside: int = 0,
) -> dict[str, int]:
    """Bytes by name: the weights, which are there already, and what decoding adds.

    Args:
        batch: slots.
        capacity: rows of the cache in each slot.
        widths: query tokens that a verification may have in each slot.
        chunk: query tokens of a prefill pass, those of all slots together.
        graphs: whether the steps are recorded on a GPU, once for each width.
        aside: rows of each slot that lie beside the cache (infer/kept_prompts.py).
    """
    config, weight, width = model.config, model.embed_tokens.weight, max(widths)
    size = weight.element_size()
    row = 2 * config.n_layers * config.n_kv_heads * config.head_dim * size
    verification = pass_bytes(config, batch * width, weight.dtype) + batch * width * config.vocab_size * size
    passes = max(pass_bytes(config, chunk, weight.dtype), verification)
    choices = batch * config.vocab_size * 8
    if not backend.is_host(weight.device):  # filters and penalties take all nodes at once there (infer/accept.py)
        choices = max(batch, min(batch * width, MOST_SORTED // config.vocab_size)) * config.vocab_size * SORTED_BYTES
    recorded = 0
    if graphs:  # a pool of memory for the passes, and for each width the outputs that drafters read and learn from
        outputs = {"logits": config.vocab_size, "pre_norm": config.hidden_size, "post_norm": config.hidden_size}
        read = [*(drafter.needs | drafter.learns_from), *drafter.learns_from]
        recorded = verification + batch * sum(widths) * sum(outputs.get(name, 0) for name in read) * size
    elif weight.device.type == "cpu" and weight.dtype in rows.SUFFIXES:  # all layers of a narrow pass are one C call
        narrow = [batch * n_rows for n_rows in widths if batch * n_rows <= MOST_TOKENS]
        passes = max(passes, layers_bytes(config, max(narrow, default=0), weight.dtype))
    return {
        "weights": sum(p.numel() * p.element_size() for p in model.parameters()),
        "cache": batch * (capacity + aside) * row,
        "passes": passes + choices,
        **({"recorded steps": recorded} if recorded else {}),
        **{f"draft {name}": count for name, count in drafter.memory_bytes(batch, capacity).items()},
    }


def available_bytes(device: torch.device) -> int | None:
    """Free memory of the device; None where the system does not tell."""
    if device.type == "cuda":
        return free_bytes(device)
    info = Path("/proc/meminfo")
    if not info.exists():
        return None
    fields = dict(line.split(":", 1) for line in info.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None


def describe(parts: Mapping[str, int]) -> str:
    """The estimate in one line."""
    return ", ".join(f"{name} {size(count)}" for name, count in parts.items())


def size(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def fits(parts: Mapping[str, int], device: torch.device) -> bool:
    """Whether the estimate fits in the memory that is free now."""
    free = available_bytes(device)
    return free is None or _needed(parts) <= free


def _needed(parts: Mapping[str, int]) -> int:
    return sum(count for name, count in parts.items() if name != "weights")


def check_memory(parts: Mapping[str, int], batch: int, capacity: int, device: torch.device) -> None:
    """Raise ValueError if the estimate exceeds what is free, with the number of positions that would fit."""
    free, needed = available_bytes(device), _needed(parts)
    if free is None or needed <= free:
        return
    fixed = needed - parts["cache"]
    fitting = max(0, int((free - fixed) // (parts["cache"] // capacity)))
    raise ValueError(
        f"memory: {batch} sequences of {capacity} positions need {size(needed)} besides the weights "
        f"({describe(parts)}), and {size(free)} is free: about {fitting} positions each would fit; lower max_length, "
        "max_new_tokens or slots"
    )


def layer_weights(config: DecoderConfig) -> tuple[int, int]:
    """The number of weights in one layer (one with experts if there are several kinds), and outside of the layers."""
    experts = None if config.experts is None else replace(config.experts, dense_layers=())
    one = replace(config, n_layers=1, sliding_windows=None, experts=experts)
    with torch.device("meta"):
        decoder = Decoder(one)
    layer = sum(weight.numel() for weight in decoder.layers.parameters())
    return layer, sum(weight.numel() for weight in decoder.parameters()) - layer


def weight_count(config: DecoderConfig) -> int:
    """The number of a target's weights."""
    with torch.device("meta"):
        return sum(weight.numel() for weight in Decoder(config).parameters())
