"""The configuration of a decoder. Not here: reading it from a Hugging Face one (models/hf_config.py)."""

from dataclasses import dataclass

from longdraft.models.rope import RopeConfig


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture-of-experts feed-forward: `number` experts of width `size` per layer, `per_token` of them per token.

    normalised: whether the weights of a token's experts are divided by their sum. dense_layers: layers that have one
    plain feed-forward instead. bias: on router and experts. clamped_gate: (slope, limit) of gpt-oss's gate
    (kernels/gate.py), or None for silu.
    """

    number: int
    per_token: int
    size: int
    normalised: bool
    dense_layers: tuple[int, ...] = ()
    bias: bool = False
    clamped_gate: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.number:
            raise ValueError(f"experts per token is {self.per_token}; it must be 1 to {self.number}")


@dataclass(frozen=True)
class DecoderConfig:
    """Shape and arithmetic of a target. `head_dim` is a field because it is not hidden_size / n_heads in all models."""

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
    attention_bias: bool = False  # of q, k and v
    o_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm of each head of q and k
    tie_embeddings: bool = False
    sliding_windows: tuple[int | None, ...] | None = None  # per layer: how many keys a query reads; None: all
    experts: ExpertsConfig | None = None
    activation: str = "silu"  # of the feed-forward's gate: "silu" or "gelu_tanh"
    embedding_scale: float = 1.0
    post_norms: bool = False  # whether each sub-layer's output is normed before it is added to the stream
    attention_sinks: bool = False  # a learned score per head that every query reads (kernels/sinks.py)
    window_rope: RopeConfig | None = None  # of the layers with a sliding window, if not `rope`
    # Our norm weights are the published ones plus `norm_offset`; the q norm's are then multiplied by `query_factor`.
    norm_offset: float = 0.0
    query_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads is {self.n_heads}; it must be a multiple of n_kv_heads ({self.n_kv_heads})")
        if self.sliding_windows is not None and len(self.sliding_windows) != self.n_layers:
            raise ValueError(f"sliding_windows has {len(self.sliding_windows)} entries for {self.n_layers} layers")

    def rope_of(self, layer: int) -> RopeConfig:
        """The RoPE of a layer; -1 is the last one."""
        windowed = self.sliding_windows is not None and self.sliding_windows[layer] is not None
        return self.window_rope if windowed and self.window_rope is not None else self.rope

    def has_experts(self, layer: int) -> bool:
        """Whether this layer's feed-forward is a mixture of experts."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def feed_forward_size(self, layer: int) -> int:
        """The feed-forward width that one token goes through: with experts, the sum over those it takes."""
        if self.experts is None or not self.has_experts(layer):
            return self.intermediate_size
        return self.experts.per_token * self.experts.size
