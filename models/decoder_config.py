"""The shape and arithmetic of a decoder."""

from dataclasses import dataclass

from longdraft.models.rope import RopeConfig


@dataclass(frozen=True)
class ExpertsConfig:
    """Feed-forwards of many experts. number: of experts; per_token: how many of them a token takes; size: an expert's
    width; normalised: a token's shares add up to 1; dense_layers: those that have one plain feed-forward instead; bias:
    on router and experts; clamped_gate: (slope, limit) of gpt-oss's gate (kernels/gate.py), None for silu's."""

    number: int
    per_token: int
    size: int
    normalised: bool
    dense_layers: tuple[int, ...] = ()
    bias: bool = False
    clamped_gate: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.number:
            raise ValueError(f"experts a token is {self.per_token}; it must be 1 to {self.number}")


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
    experts: ExpertsConfig | None = None
    activation: str = "silu"  # of the feed-forward's gate; the other is "gelu_tanh"
    embedding_scale: float = 1.0
    post_norms: bool = False  # a norm of what each sub-layer adds to the stream
    attention_sinks: bool = False  # a learned score a head that every query reads (kernels/sinks.py)
    window_rope: RopeConfig | None = None  # of the layers with a window, where they have one of their own
    # What our weights are of published ones: all norms plus `norm_offset`, and then the queries' times `query_factor`.
    norm_offset: float = 0.0
    query_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads is {self.n_heads}; it must be a multiple of n_kv_heads ({self.n_kv_heads})")
        if self.sliding_windows is not None and len(self.sliding_windows) != self.n_layers:
            raise ValueError(f"sliding_windows has {len(self.sliding_windows)} entries for {self.n_layers} layers")

    def rope_of(self, layer: int) -> RopeConfig:
        """RoPE of this layer; -1 is the last."""
        windowed = self.sliding_windows is not None and self.sliding_windows[layer] is not None
        return self.window_rope if windowed and self.window_rope is not None else self.rope

    def has_experts(self, layer: int) -> bool:
        """Whether this layer's feed-forward is one of experts."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def feed_forward_size(self, layer: int) -> int:
        """The width of the feed-forward that a token takes, of its experts together."""
        if self.experts is None or not self.has_experts(layer):
            return self.intermediate_size
        return self.experts.per_token * self.experts.size
