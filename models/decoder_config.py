"""The shape and arithmetic of a decoder."""

from dataclasses import dataclass

from longdraft.models.rope import RopeConfig


@dataclass(frozen=True)
class DecoderConfig:
    """Shape and arithmetic of a target; `head_dim` stands alone, it is not hidden_size / n_heads everywhere."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    rope: RopeConfig
    attention_bias: bool = False  # on q, k and v
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    sliding_windows: tuple[int | None, ...] | None = None  # one a layer: tokens a query sees, None for all

    def __post_init__(self) -> None:
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads is {self.n_heads}; it must be a multiple of n_kv_heads ({self.n_kv_heads})")
        if self.sliding_windows is not None and len(self.sliding_windows) != self.n_layers:
            raise ValueError(f"sliding_windows has {len(self.sliding_windows)} entries for {self.n_layers} layers")
