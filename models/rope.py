"""Rotary position tables: cos and sin for every token of a pass, for all RoPE types of transformers.

Frequencies come from transformers' own `ROPE_INIT_FUNCTIONS`; this file decides which length a token's table depends
on, and kernels/rotate.py applies the rotation. Shapes: B slots, T tokens, N tokens of a packed sequence, P pieces of
it, d head width, F = d / 2 frequencies.
"""

from collections.abc import Sequence
from dataclasses import field
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import pad
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from longdraft.kernels.transfer import from_host
from longdraft.models.schema import Int, validated_dataclass

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
LENGTH_DEPENDENT = ("dynamic", "longrope")
GROWTH = "llama_4_scaling_beta"


@validated_dataclass
class RopeConfig:
    """transformers' `max_position_embeddings` and `rope_parameters`: rope_theta, rope_type and the type's options."""

    head_dim: Annotated[Int, Field(multiple_of=2)]
    max_positions: Int
    parameters: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})

    def __post_init__(self) -> None:
        if self.parameters.get("rope_type") not in ROPE_TYPES:
            given = self.parameters.get("rope_type")
            raise ValueError(f"rope_type: {given!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
        if not 0 < self.rotated <= self.head_dim or self.rotated % 2:
            share = self.parameters["partial_rotary_factor"]
            raise ValueError(
                f"partial_rotary_factor: {share} rotates {self.rotated} of a head's {self.head_dim} numbers; give a "
                "share that rotates an even number of them, at least 2"
            )

    @property
    def type(self) -> str:
        return self.parameters["rope_type"]

    @property
    def query_growth(self) -> tuple[float, int] | None:
        """Llama 4's and Ministral 3's: (b, n) multiplies the queries at position p by 1 + b log(1 + floor(p / n))."""
        growth = self.parameters.get(GROWTH)
        return (growth, self.parameters["original_max_position_embeddings"]) if growth else None

    @property
    def rotated(self) -> int:
        """How many of a head's numbers are rotated. The others have frequency 0: where they are fewer than all, our
        heads have the first half of the rotated ones in their first half (models/hf_weights.py)."""
        share = self.parameters.get("partial_rotary_factor")
        return self.head_dim if share is None else int(self.head_dim * share)


class Rope:
    """Computes the tables. Not an nn.Module, so that frequencies stay in fp32 when the model changes its dtype."""

    def __init__(self, config: RopeConfig):
        self.config = config
        self.length_dependent = config.type in LENGTH_DEPENDENT
        with torch.device("cpu"):  # frequencies are real even in a model on the meta device
            self._frequencies, self.scaling = self._compute(None)
            self._long = self._compute(self._switch_length + 1)[0] if config.type == "longrope" else None
        self._on_device: dict[torch.device, tuple[Tensor, Tensor | None]] = {}

    @property
    def _switch_length(self) -> int:
        """The longest sequence that uses the original frequencies."""
        if self.config.type == "longrope":
            return self.config.parameters["original_max_position_embeddings"]
        return self.config.max_positions

    def _compute(self, length: int | Tensor | None) -> tuple[Tensor, float]:
        """Frequencies in fp32, [F] (broadcast with a tensor of lengths), and the factor on cos and sin."""
        config = self.config
        parameters = {key: value for key, value in config.parameters.items() if key != GROWTH}  # transformers warns
        device = length.device if isinstance(length, Tensor) else "cpu"
        if config.type == "default":
            exponents_F = torch.arange(0, config.rotated, 2, dtype=torch.float32) / config.rotated
            return 1.0 / (parameters["rope_theta"] ** exponents_F), 1.0
        fields: dict[str, Any] = {
            "hidden_size": config.head_dim,
            "num_attention_heads": 1,
            "head_dim": config.head_dim,
            "max_position_embeddings": config.max_positions,
            "rope_parameters": parameters,
        }
        hf_config = PretrainedConfig(**fields)  # a family's own class takes a second to import
        return ROPE_INIT_FUNCTIONS[config.type](hf_config, device, seq_len=length)  # type: ignore[arg-type]

    def _tables_on(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        if device not in self._on_device:
            long = None if self._long is None else self._long.to(device)
            self._on_device[device] = self._frequencies.to(device), long
        return self._on_device[device]

    def _frequencies_for(self, positions_BT: Tensor, lengths: Tensor | None) -> Tensor:
        """[F], or [B, T, F] (T may be 1) for types whose table depends on the length.

        With a cache, the token at position t uses the length max(prompt, t + 1) in a pass of any width, so that a tree
        pass rotates as token-by-token decoding does. Without one, a sequence uses its last position + 1.
        """
        frequencies_F, long_F = self._tables_on(positions_BT.device)
        if not self.length_dependent:
            return frequencies_F
        if lengths is None:
            lengths_BT = positions_BT.amax(-1, keepdim=True) + 1
        else:
            lengths_BT = torch.maximum(positions_BT + 1, lengths[:, None] if lengths.dim() == 1 else lengths)
        lengths_BT1 = lengths_BT[..., None]
        grown = self._compute(lengths_BT1)[0] if long_F is None else long_F
        return torch.where(lengths_BT1 > self._switch_length, grown, frequencies_F)

    def __call__(self, positions_BT: Tensor, lengths: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Tables for `rotate`: cos [B, T, 1, 1, F] and signed sin [B, T, 1, 2, F], in `dtype`.

        Args:
            positions_BT: int64, any values, jumps allowed.
            lengths: int64, the least length that a token's table is computed for: prompt lengths [B] of a cache's
                slots, or lengths [B, T] of packed pieces (`piece_lengths`). None: each slot is one whole sequence.
        """
        angles_BTF = positions_BT[..., None].float() * self._frequencies_for(positions_BT, lengths)
        cos_BTF, sin_BTF = angles_BTF.cos(), angles_BTF.sin()
        if self.scaling != 1.0:
            cos_BTF, sin_BTF = cos_BTF * self.scaling, sin_BTF * self.scaling
        if still := (self.config.head_dim - self.config.rotated) // 2:
            cos_BTF, sin_BTF = pad(cos_BTF, (0, still), value=1.0), pad(sin_BTF, (0, still))
        cos_BTF, sin_BTF = cos_BTF.to(dtype), sin_BTF.to(dtype)
        return cos_BTF[:, :, None, None], torch.stack((-sin_BTF, sin_BTF), 2)[:, :, None]


def query_factors(config: RopeConfig, positions_BT: Tensor, dtype: torch.dtype) -> Tensor | None:
    """What `RopeConfig.query_growth` multiplies each token's queries by, [B, T, 1, 1]; None for 1."""
    if config.query_growth is None:
        return None
    growth, length = config.query_growth
    factors_BT = 1 + growth * (1 + positions_BT.div(length, rounding_mode="floor").float()).log()
    return factors_BT.to(dtype)[..., None, None]


def piece_ids(borders: Sequence[int], device: torch.device) -> Tensor:
    """The index of each token's piece, int64 [N]. borders: where each piece starts, then N."""
    sizes_P = torch.tensor(borders).diff()
    return from_host(torch.arange(len(sizes_P)).repeat_interleave(sizes_P), device)


def piece_lengths(positions_1N: Tensor, borders: Sequence[int]) -> Tensor:
    """The length of each token's piece, which is its largest position + 1: int64 [1, N].

    borders: where each piece starts, then N.
    """
    piece_N = piece_ids(borders, positions_1N.device)
    largest_P = positions_1N.new_zeros(len(borders) - 1).scatter_reduce(0, piece_N, positions_1N[0], "amax")
    return largest_P[piece_N][None] + 1
