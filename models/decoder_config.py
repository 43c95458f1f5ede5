"""The configuration of a decoder. models/hf_config.py reads it from a Hugging Face one."""

from typing import Annotated, Literal

from pydantic import Field

from longdraft.models.rope import RopeConfig
from longdraft.models.schema import Bool, Float, Int, validated_dataclass

Size = Annotated[Int, Field(ge=1)]


@validated_dataclass
class ExpertsConfig:
    """A mixture-of-experts feed-forward: `number` experts of width `size` per layer, `per_token` of them per token.

    normalised: whether the weights of a token's experts are divided by their sum. dense_layers: layers that have one
    plain feed-forward instead. bias: on router and experts. clamped_gate: (slope, limit) of gpt-oss's gate
    (kernels/gate.py), or None for silu.
    """

    number: Size
    per_token: Size
    size: Size
    normalised: Bool
    dense_layers: tuple[Int, ...] = ()
    bias: Bool = False
    clamped_gate: tuple[Float, Float] | None = None

    def __post_init__(self) -> None:
        if self.per_token > self.number:
            raise ValueError(f"per_token: {self.per_token} experts per token, but there are only {self.number}")


@validated_dataclass
class DeltaConfig:
    """Layers with linear attention (models/gated_delta_net.py) instead of attention: their indices, the heads of
    queries and keys and those of values with their widths, and the width of the convolution."""

    layers: tuple[Int, ...]
    key_heads: Size
    value_heads: Size
    key_dim: Size
    value_dim: Size
    kernel: Annotated[Int, Field(ge=2)]

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ValueError(f"value_heads: {self.value_heads} is not a multiple of key_heads, {self.key_heads}")

    @property
    def memory_shape(self) -> tuple[int, int, int]:
        """Of a layer's memory: a matrix for each head of the values."""
        return self.value_heads, self.key_dim, self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution: all queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@validated_dataclass
class DecoderConfig:
    """Shape and arithmetic of a target. `head_dim` is a field because it is not hidden_size / n_heads in all models."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    n_layers: Size
    n_heads: Size
    n_kv_heads: Size
    head_dim: Size
    rms_norm_eps: Float
    max_positions: Size
    rope: RopeConfig
    attention_bias: Bool = False  # of q, k and v
    o_bias: Bool = False  # of the attention's output projection
    mlp_bias: Bool = False
    qk_norm: Bool = False  # RMSNorm of each head of q and k
    tie_embeddings: Bool = False
    sliding_windows: tuple[Size | None, ...] | None = None  # per layer: how many keys a query reads; None: all
    experts: ExpertsConfig | None = None
    activation: Literal["silu", "gelu_tanh"] = "silu"  # of the feed-forward's gate
    embedding_scale: Float = 1.0
    post_norms: Bool = False  # whether each sub-layer's output is normed before it is added to the stream
    attention_sinks: Bool = False  # a learned score per head that every query reads (kernels/attention.py)
    window_rope: RopeConfig | None = None  # of the layers with a sliding window, if not `rope`
    # Our norm weights are the published ones plus `norm_offset`; the q norm's are then multiplied by `query_factor`.
    norm_offset: Float = 0.0
    query_factor: Float = 1.0
    shared_expert_size: Size | None = None  # the width of an expert that all tokens go through, gated (models/layer.py)
    gated: Bool = False  # whether attention's output is gated (models/layer.py)
    delta: DeltaConfig | None = None
    joined: Bool = False  # in checkpoints q, k and v are one tensor, and so are gate and up

    def __post_init__(self) -> None:
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads: {self.n_heads} is not a multiple of n_kv_heads, {self.n_kv_heads}")
        if self.sliding_windows is not None and len(self.sliding_windows) != self.n_layers:
            raise ValueError(f"sliding_windows: {len(self.sliding_windows)} for {self.n_layers} layers")
        if self.n_layers - 1 not in self.attention_layers:
            raise ValueError("layer_types: the last layer must have attention, whose keys and values drafts read")

    @property
    def attention_layers(self) -> list[int]:
        """The layers with keys and values, in the order of the cache."""
        linear = () if self.delta is None else self.delta.layers
        return [layer for layer in range(self.n_layers) if layer not in linear]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """`sliding_windows` without those that hold every text."""
        given = self.sliding_windows or (None,) * self.n_layers
        return tuple(None if window is None or window >= self.max_positions else window for window in given)

    @property
    def cache_windows(self) -> list[int | None]:
        """The windows of `attention_layers`."""
        windows = self.windows
        return [windows[layer] for layer in self.attention_layers]

    def rope_of(self, layer: int) -> RopeConfig:
        """The RoPE of a layer; -1 is the last one."""
        windowed = self.sliding_windows is not None and self.sliding_windows[layer] is not None
        return self.window_rope if windowed and self.window_rope is not None else self.rope

    def has_experts(self, layer: int) -> bool:
        """Whether this layer's feed-forward is a mixture of experts."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def feed_forward_size(self, layer: int) -> int:
        """The feed-forward width that one token goes through: with experts, the sum over the token's experts."""
        if self.experts is None or not self.has_experts(layer):
            return self.intermediate_size
        return self.experts.per_token * self.experts.size + (self.shared_expert_size or 0)
