"""How many rows a pass over a prompt has, and what a pass through a cache holds beside it. Not here: training's passes
(train/memory.py)."""

import torch

from longdraft.models.decoder import DecoderConfig

# A GPU reads all weights and the whole context once a pass, so many rows share them there; a CPU's caches want fewer.
ROWS_GPU, ROWS_CPU = 2048, 512


def prompt_rows(device_type: str) -> int:
    """Rows of a pass over a prompt, where nobody says how many."""
    return ROWS_CPU if device_type == "cpu" else ROWS_GPU


def pass_bytes(config: DecoderConfig, n_rows: int, dtype: torch.dtype) -> int:
    """Bytes that a pass of `n_rows` rows, of all slots together, allocates at most, logits not counted.

    That is in a layer's feed-forward, or where that is narrow in its projection or its attention. There is no mask
    among it, for chains have none (kernels/chain_attention.py).
    """
    heads, kv = config.n_heads * config.head_dim, 2 * config.n_kv_heads * config.head_dim
    qkv, qk = heads + kv, heads + kv // 2
    stages = (
        qkv + 3 * qk,  # beside q, k and v of the layer before; the rotation makes two more of its size on the way
        6 * heads,  # on a CPU two parts of the keys with fp32 copies of what they give
        # The heads' outputs, the normed copy of the stream behind them, gate and up, and what becomes of gate.
        heads + config.hidden_size + 3 * config.intermediate_size,
    )
    tables = 2 * config.head_dim
    return n_rows * (config.hidden_size + qkv + qk + max(stages) + tables) * dtype.itemsize
