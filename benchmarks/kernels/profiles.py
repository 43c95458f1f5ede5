"""Shapes of named models, and how many bytes and FLOPs a step on them takes at least."""

from typing import Any, NamedTuple

from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.footprint import layer_weights
from longdraft.models.rope import RopeConfig

POSITIONS = 2**20  # at most, of a context


class Work(NamedTuple):
    """The least number of bytes to move, and the floating-point operations to do."""

    bytes: int
    flops: int


def _profile(
    vocab: int, width: int, feed_forward: int, layers: int, heads: int, kv_heads: int, head_dim: int, **more: Any
) -> DecoderConfig:
    rope = RopeConfig(head_dim, POSITIONS)
    sizes = vocab, width, feed_forward, layers, heads, kv_heads, head_dim
    return DecoderConfig(*sizes, rms_norm_eps=1e-5, max_positions=POSITIONS, rope=rope, **more)


PROFILES = {
    "llama3.1-8b": _profile(128256, 4096, 14336, 32, 32, 8, 128),
    "llama2-7b": _profile(32000, 4096, 11008, 32, 32, 32, 128),
    "qwen2.5-7b": _profile(152064, 3584, 18944, 28, 28, 4, 128, attention_bias=True),
    "qwq-32b": _profile(152064, 5120, 27648, 64, 40, 8, 128, attention_bias=True),
    "smollm2-135m": _profile(49152, 576, 1536, 30, 9, 3, 64, tie_embeddings=True),
    # Not a model, only for checks of the benchmarks themselves.
    "tiny": _profile(512, 64, 128, 2, 4, 2, 16),
}


def attention_work(config: DecoderConfig, context: int, nodes: int, itemsize: int, tree_pairs: int) -> Work:
    """One layer's attention in a pass of `nodes` rows after `context` rows: K and V read once, queries read, output
    written; both products over all pairs that are not masked. tree_pairs: those among the pass's own rows."""
    keys_and_values = 2 * (context + nodes) * config.n_kv_heads * config.head_dim
    rows = 2 * nodes * config.n_heads * config.head_dim
    return Work(
        (keys_and_values + rows) * itemsize,
        4 * config.n_heads * config.head_dim * (nodes * context + tree_pairs),
    )


def step_work(config: DecoderConfig, context: int, nodes: int, itemsize: int) -> Work:
    """A target pass of a chain of `nodes` rows with the logits of all: every weight and the cache are read once. Only
    the embeddings that are looked up count."""
    layer, _ = layer_weights(config)
    head = config.vocab_size * config.hidden_size
    weights = config.n_layers * layer + config.hidden_size + head
    cached = config.n_layers * 2 * (context + nodes) * config.n_kv_heads * config.head_dim
    attention = attention_work(config, context, nodes, itemsize, nodes * (nodes + 1) // 2)
    flops = 2 * nodes * (config.n_layers * layer + head) + config.n_layers * attention.flops
    return Work((weights + cached + nodes * config.hidden_size) * itemsize, flops)


def loss_work(config: DecoderConfig, rows: int, heads: int, itemsize: int) -> Work:
    """Loss and hidden gradients of `heads` heads on one LM head: a product each for logits and gradients; the head is
    read once, hidden states are read, gradients written."""
    head = config.vocab_size * config.hidden_size
    return Work((head + 2 * heads * rows * config.hidden_size) * itemsize, 4 * heads * rows * head)
