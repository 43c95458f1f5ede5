"""Shapes of named models, and how many bytes and FLOPs a step on them takes at least."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Work(NamedTuple):
    """The least number of bytes to move, and the floating-point operations to do."""

    bytes: int
    flops: int


@dataclass(frozen=True)
class Profile:
    """The shape of a model. `qkv_bias`: as in Qwen2; `tied`: the LM head is the embedding."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope_theta: float
    qkv_bias: bool = False
    tied: bool = False

    @property
    def layer_parameters(self) -> int:
        """The number of weights in one layer."""
        qkv_rows = (self.n_heads + 2 * self.n_kv_heads) * self.head_dim
        attention = (qkv_rows + self.n_heads * self.head_dim) * self.hidden_size + self.qkv_bias * qkv_rows
        return attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size

    @property
    def embedding_parameters(self) -> int:
        """The number of weights in the embedding, which is also that in the LM head."""
        return self.vocab_size * self.hidden_size

    def parameters(self, n_layers: int | None = None) -> int:
        """The number of weights in a model of this many layers (None: its own)."""
        layers = self.n_layers if n_layers is None else n_layers
        both = self.embedding_parameters * (1 if self.tied else 2)
        return both + layers * self.layer_parameters + self.hidden_size

    def transformers_config(self, n_layers: int, max_positions: int) -> "PretrainedConfig":
        """The config of transformers' own class for the family, with `n_layers` layers."""
        from transformers import LlamaConfig, Qwen2Config

        return (Qwen2Config if self.qkv_bias else LlamaConfig)(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=n_layers,
            num_attention_heads=self.n_heads,
            num_key_value_heads=self.n_kv_heads,
            max_position_embeddings=max_positions,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            tie_word_embeddings=self.tied,
        )

    def attention_work(self, context: int, nodes: int, itemsize: int, tree_entries: int | None = None) -> Work:
        """One layer's attention in a pass of `nodes` rows after `context` rows: K and V read once, queries read,
        output written; both products over all pairs that are not masked.

        Args:
            tree_entries: number of pairs among the pass's own rows that are not masked; None: that of a chain.
        """
        tree_pairs = nodes * (nodes + 1) // 2 if tree_entries is None else tree_entries
        keys_and_values = 2 * (context + nodes) * self.n_kv_heads * self.head_dim
        rows = 2 * nodes * self.n_heads * self.head_dim
        pairs = nodes * context + tree_pairs
        return Work((keys_and_values + rows) * itemsize, 4 * self.n_heads * self.head_dim * pairs)

    def step_work(self, context: int, nodes: int, itemsize: int, n_layers: int) -> Work:
        """A target pass of `nodes` rows with the logits of all: every weight and the cache are read once. Only the
        embeddings that are looked up count."""
        weights = n_layers * self.layer_parameters + self.hidden_size + self.embedding_parameters
        cached = n_layers * 2 * (context + nodes) * self.n_kv_heads * self.head_dim
        layer, attention = self.layer_parameters, self.attention_work(context, nodes, itemsize)
        flops = 2 * nodes * (n_layers * layer + self.embedding_parameters) + n_layers * attention.flops
        return Work((weights + cached + nodes * self.hidden_size) * itemsize, flops)

    def loss_work(self, rows: int, heads: int, itemsize: int) -> Work:
        """Loss and hidden gradients of `heads` heads on one LM head: a product each for logits and gradients; the head
        is read once, hidden states are read, gradients written."""
        moved = self.embedding_parameters + 2 * heads * rows * self.hidden_size
        return Work(moved * itemsize, 4 * heads * rows * self.embedding_parameters)


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("llama3.1-8b", 128256, 4096, 14336, 32, 32, 8, 128, 5e5),
        Profile("llama2-7b", 32000, 4096, 11008, 32, 32, 32, 128, 1e4),
        Profile("qwen2.5-7b", 152064, 3584, 18944, 28, 28, 4, 128, 1e6, qkv_bias=True),
        Profile("qwq-32b", 152064, 5120, 27648, 64, 40, 8, 128, 1e6, qkv_bias=True),
        Profile("smollm2-135m", 49152, 576, 1536, 30, 9, 3, 64, 1e5, tied=True),
        # Not a model, only for checks of the benchmarks themselves.
        Profile("tiny", 512, 64, 128, 2, 4, 2, 16, 1e4),
    )
}
