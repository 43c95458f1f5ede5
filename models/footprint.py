"""How much memory decoding takes, computed before anything is allocated: weights, caches and the largest pass.

A drafter names what it will allocate by shape and dtype (`Drafter.allocations`), and infer/slot_pool.py adds that to
the target's. Shapes: L layers, B slots, K key/value heads, d head width.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod

import torch

from longdraft.kernels import backend
from longdraft.kernels.cpu import delta as cpu_delta
from longdraft.kernels.cpu import rows
from longdraft.kernels.cpu.layers import MOST_TOKENS
from longdraft.kernels.delta_chunks import CHUNK
from longdraft.kernels.tree import MOST_ROWS
from longdraft.models.decoder import Decoder
from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.gated_delta_net import BLOCK

# A tensor to be allocated: its shape and dtype. Lists of them, by purpose.
Buffer = tuple[Sequence[int], torch.dtype]
Allocations = Mapping[str, Sequence[Buffer]]


def size_of(buffers: Iterable[Buffer]) -> int:
    """Bytes of these tensors together."""
    return sum(prod(shape) * dtype.itemsize for shape, dtype in buffers)


def sizes(allocations: Allocations) -> dict[str, int]:
    """Bytes by name."""
    return {name: size_of(buffers) for name, buffers in allocations.items()}


def cache_rows(config: DecoderConfig, n_rows: int, dtype: torch.dtype) -> list[Buffer]:
    """Keys and values in all layers of `n_rows` tokens, counted over all slots."""
    return [((2, len(config.attention_layers), n_rows, config.n_kv_heads, config.head_dim), dtype)]


def delta_states(config: DecoderConfig, batch: int, dtype: torch.dtype) -> list[Buffer]:
    """What a cache keeps of linear attention (models/delta_states.py)."""
    if (delta := config.delta) is None:
        return []
    of_slots = len(delta.layers) * batch
    return [((of_slots, *delta.memory_shape), torch.float32), ((of_slots, delta.kernel - 1, delta.channels), dtype)]


def estimate_memory(
    model: Decoder,
    batch: int,
    capacity: int,
    widths: Sequence[int],
    chunk: int,
    recorded: Collection[str] | None = None,
    prompt_rows: Sequence[int] = (),
    kinds: int = 1,
) -> dict[str, int]:
    """Bytes by name: the target's weights (already allocated), its cache, and its passes with their outputs.

    Args:
        batch: slots.
        capacity: rows of the cache in each slot.
        widths: query tokens that a verification may have in each slot.
        chunk: query tokens of a prefill pass, counted over all slots.
        recorded: names of the outputs that are kept for each width when a GPU records steps; None: nothing is recorded.
        prompt_rows: query tokens of each prompt pass that is recorded, once per slot.
        kinds: how often each width is recorded.
    """
    config, weight, width, n_ranks = model.config, model.embed_tokens.weight, max(widths), model.ranks.size
    dtype, device, last = weight.dtype, weight.device, min(chunk, MOST_ROWS)  # a prompt's last pass may be narrow
    shared = model.lm_head.weight.nbytes if config.tie_embeddings and n_ranks > 1 else 0
    verification = pass_bytes(config, batch * width, dtype, device)
    verification += exact_bytes(model, batch, min(width, MOST_ROWS), capacity)
    verification = max(verification, commit_bytes(config, batch, device))
    summed = n_ranks * config.hidden_size if n_ranks > 1 else 0
    # Of several ranks: all logits as they come and joined, and the parts of a sum.
    verification += batch * width * (min(2, n_ranks) * config.vocab_size + summed) * dtype.itemsize
    verification += pending_bytes(config, batch * width, dtype, device)
    short = pass_bytes(config, last, dtype, device) + exact_bytes(model, 1, last, capacity)
    short += last * summed * dtype.itemsize
    passes, steps = max(pass_bytes(config, chunk, dtype, device), short, verification), 0
    if recorded is not None:  # a pool of memory for the passes, and the outputs of each width
        outputs = {"logits": config.vocab_size, "pre_norm": config.hidden_size, "post_norm": config.hidden_size}
        kept = sum(outputs.get(name, 0) for name in recorded)
        of_prompts = sum(outputs.get(name, 0) for name in recorded if name != "logits")
        numbers = batch * (kinds * sum(widths) * kept + sum(prompt_rows) * of_prompts)
        steps = passes + numbers * dtype.itemsize
    elif device.type == "cpu" and dtype in rows.SUFFIXES:  # all layers of a narrow pass are one C call
        narrow = [batch * n_rows for n_rows in widths if batch * n_rows <= MOST_TOKENS]
        passes = max(passes, c_layers_bytes(config, max(narrow, default=0), dtype))
    return {
        "weights": sum(p.nbytes for p in model.parameters()) - shared,
        # States twice: those that are kept for later prompts too (infer/kept_prompts.py).
        "cache": size_of([*cache_rows(config, batch * capacity, dtype), *delta_states(config, 2 * batch, dtype)]),
        "passes": passes,
        **({"recorded steps": steps} if steps else {}),
    }


def pass_bytes(config: DecoderConfig, n_rows: int, dtype: torch.dtype, device: torch.device) -> int:
    """The most bytes that a pass allocates for `n_rows` tokens, counted over all slots, without its logits.

    The peak is in a layer's feed-forward, or in its projection or attention where the feed-forward is narrow. No mask
    is counted, because chains have none (kernels/chain_attention.py).
    """
    heads, kv = config.n_heads * config.head_dim, 2 * config.n_kv_heads * config.head_dim
    qkv, qk = heads + kv, heads + kv // 2
    stages = (
        qkv + 3 * qk,  # the previous layer's q, k and v are alive too; rotation has two temporaries of the size of q, k
        6 * heads,  # on a CPU: two parts of the keys, with fp32 copies of their outputs
        # The heads' outputs stay alive during the feed-forward, before and after their gate.
        heads * (2 if config.gated else 1) + feed_forward_numbers(config),
    )
    tables = (2 if config.window_rope is None else 4) * config.head_dim
    of_attention = n_rows * (qkv + qk + max(stages)) * dtype.itemsize
    stream = n_rows * (config.hidden_size + tables) * dtype.itemsize
    in_triton = backend.triton_kernels("delta_chunks", device.type) is not None
    return stream + max(of_attention, delta_bytes(config, n_rows, dtype.itemsize, in_triton))


def delta_bytes(config: DecoderConfig, n_rows: int, size: int, in_triton: bool) -> int:
    """The most bytes that linear attention (models/gated_delta_net.py) allocates for `n_rows` tokens, beside the
    stream, in a dtype of `size` bytes; in_triton: by Triton's kernels. 0 without it."""
    if (delta := config.delta) is None:
        return 0
    heads, block = delta.value_heads, min(n_rows, BLOCK)
    values, keys = heads * delta.value_dim, heads * delta.key_dim
    projected, read = delta.channels + values + 2 * heads, n_rows * values * size
    # What the tokens before the last block read in fp32, a block's, and the memory after them.
    others = n_rows - block
    of_others = 4 * (min(others, BLOCK) * values + keys * delta.value_dim * bool(others))
    if in_triton:  # of a block, fp32: its tokens, what they have of each other, what they read; and the memory after it
        of_block = 4 * block * (3 * keys + 3 * values + heads * (CHUNK + 4)) + 4 * keys * delta.value_dim
        return n_rows * projected * size + read + max(of_block + of_others, read)  # or the norm's output
    # Of a block's tokens, fp32: q and k, and the convolution's outputs, whose part is v; all three in chunks; the
    # system's sides and its solution; copies of q and k for their product; three squares, and a few numbers a head.
    of_block = 4 * block * (8 * keys + 3 * values + delta.channels + heads * (3 * CHUNK + 8))
    at_end = values * (size + 12)  # normed; the gate, its silu and the product in fp32
    return n_rows * projected * size + read + max(of_block + of_others, n_rows * at_end)


def pending_bytes(config: DecoderConfig, n_rows: int, dtype: torch.dtype, device: torch.device) -> int:
    """Bytes of what a verification of `n_rows` tokens leaves for the commit in all layers of linear attention, and on a
    CPU without C of the memories after each of its tokens in one layer."""
    if (delta := config.delta) is None:
        return 0
    heads, width = delta.value_heads, delta.value_dim
    inputs = (delta.channels + heads * width + 2 * heads) * dtype.itemsize
    pending = len(delta.layers) * (inputs + 4 * (2 * heads * delta.key_dim + delta.channels + 2 * heads))
    in_torch = backend.is_host(device) and not cpu_delta.serves(width)
    # fp32, and half as much again for temporaries of a token in each slot.
    memories = 6 * heads * delta.key_dim * width if in_torch else 0
    return n_rows * (pending + memories)


def commit_bytes(config: DecoderConfig, batch: int, device: torch.device) -> int:
    """Bytes that the commit of a verification takes beside what is pending: the new memories of all layers of linear
    attention, and three temporaries of their size on a CPU without C."""
    if (delta := config.delta) is None:
        return 0
    memories = delta_states(config, batch, torch.float32)[:1]
    in_torch = backend.is_host(device) and not cpu_delta.serves(delta.value_dim)
    return size_of(memories) * (4 if in_torch else 1)


def exact_bytes(model: Decoder, batch: int, n_rows: int, capacity: int) -> int:
    """Bytes of the partial results of attention or of a linear layer, whichever is larger, in a pass of `n_rows` rows
    per slot (at most MOST_ROWS). 0 unless LONGDRAFT_EXACT=1 selects kernels/triton."""
    config, weight = model.config, model.embed_tokens.weight
    attention, linear = (backend.exact_kernels(name, weight) for name in ("exact_attention", "linear"))
    if attention is None or linear is None:
        return 0
    queries = batch, n_rows, config.n_heads, config.head_dim
    n_tokens, most = batch * n_rows, 0
    for windowed in {window is not None for window in config.windows}:
        shapes = attention.partial_shapes(queries, config.n_kv_heads, capacity, windowed)
        most = max(most, size_of((shape, torch.float32) for shape in shapes))
    for shape in {p.shape for p in model.parameters() if p.dim() > 1}:
        rows_of_weight = n_tokens * (config.experts.per_token if config.experts and len(shape) == 3 else 1)
        splits = linear.partial_shape(rows_of_weight, *shape[-2:], weight.device)
        most = max(most, size_of([(splits, torch.float32)]) if splits[0] > 1 else 0)
    return most


def feed_forward_numbers(config: DecoderConfig) -> int:
    """How many numbers per token a layer's feed-forward has alive at once.

    Gate and up, the activated gate and the normed copy of the stream (freed before GELU's gate); with post norms, if
    that is more, the activated gate and the layer's output, which a CPU norms in fp32. With experts
    (kernels/experts.py): the normed copy, the router's order, and the largest of: the experts' inputs with gate and up;
    gate and up with the activated gate; the experts' outputs in two orders; the outputs with their fp32 sum; on a CPU,
    the outputs with one expert's temporaries.
    """
    width, experts = config.hidden_size, config.experts
    dense = 3 * config.intermediate_size + (width if config.activation == "silu" else 0)
    if config.post_norms:
        dense = max(dense, config.intermediate_size + 7 * width)
    if experts is None:
        return dense
    per_token, size, gate = experts.per_token, experts.size, 7 if experts.clamped_gate else 3
    outputs = per_token * width
    of_experts = per_token * max(width + 2 * size, gate * size), 2 * outputs, outputs + 6 * width
    shared = width + 3 * (config.shared_expert_size or 0)  # beside the sum
    largest = max(*of_experts, outputs + 2 * width + gate * size, shared)
    return max(dense, width + 6 * experts.number + largest)


def c_layers_bytes(config: DecoderConfig, n_tokens: int, dtype: torch.dtype) -> int:
    """Bytes that one C call for all layers (kernels/cpu/layers.py) allocates, for `n_tokens` counted over all slots."""
    heads, kv_heads, width = config.n_heads, config.n_kv_heads, config.head_dim
    attention_heads = (heads + 2 * kv_heads) + (heads + kv_heads) + heads  # projected, rotated, attended
    per_layer = attention_heads * width + config.intermediate_size + 2 * config.hidden_size
    return n_tokens * config.n_layers * per_layer * dtype.itemsize


def text_of(parts: Mapping[str, int]) -> str:
    """An estimate in one line."""
    return ", ".join(f"{name} {size(count)}" for name, count in parts.items())


def size(count: int) -> str:
    """Bytes as text with a unit."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def check_memory(parts: Mapping[str, int], batch: int, capacity: int, model: Decoder) -> None:
    """Raise ValueError if an estimate exceeds the free memory. The weights are already allocated."""
    free, needed = model.ranks.free_bytes(model.embed_tokens.weight.device), sum(parts.values()) - parts["weights"]
    if free is not None and needed > free:
        raise ValueError(
            f"memory: a batch of {batch} with {capacity} positions needs {size(needed)} besides the weights "
            f"({text_of(parts)}), and {size(free)} is free; lower max_length, max_new_tokens or slots"
        )
