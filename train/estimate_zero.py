"""The bytes that DeepSpeed takes for a draft that trains under ZeRO (arXiv 1910.02054).

Read in DeepSpeed 0.19.8, and measured over steps of two passes with torch's AdamW on one, two and four ranks: what its
optimizers hold at rest, and what they take in addition in a backward pass and when the weights move. Not here:
activations and the target (estimate_memory.py).
"""

from typing import NamedTuple

from longdraft.train.deepspeed_engine import MAX_BUCKET


class DraftStates(NamedTuple):
    """Bytes on one rank's device: `kept` by name, all the time; in addition, `between` from one pass of a step to the
    next, `forward` while the draft runs, `backward` in a backward pass, and `update` when gradients are summed over the
    ranks and the weights move. `host`: bytes on the host, all the time."""

    kept: dict[str, int]
    between: int
    forward: int
    backward: int
    update: int
    host: int


def draft_states(
    n_weights: int,
    largest: int,
    *,
    bf16: bool,
    stage: int,
    offload: bool,
    n_ranks: int,
    gpu: bool,
    adamuon: bool = False,
) -> DraftStates:
    """The bytes of a draft with `n_weights` weights, `largest` of them in its largest tensor.

    Args:
        bf16: weights in bf16 with fp32 masters; else all in fp32, where DeepSpeed keeps separate masters too.
        stage: 1, 2 or 3. offload: masters, moments and the gradients that move them lie on the host.
        n_ranks: the ranks that ZeRO shards over.
        gpu: buffers for sums count in full; on a CPU only the part that is written does.
        adamuon: the optimizer makes each matrix orthogonal from all ranks' momentum.
    """
    size, share = (2 if bf16 else 4), n_weights / n_ranks
    kept = {"draft's weights": size * (share if stage == 3 else n_weights)}
    if not offload:
        kept["masters and moments"] = 12 * share
    # Stages 1 and 2 allocate their buffer in the backward pass; 2 frees it there, 1 at the end of the step.
    bucket = min(n_weights, MAX_BUCKET) * (size if stage == 2 else 4) if gpu else 0
    forward = 0
    if stage == 3:
        buffers = (0 if offload else 4 * share) + 4 * largest + bucket
        if not (gpu and bf16):  # the weights as they were given, or the part of the buffer that is written
            buffers += 4 * (n_weights - largest)
        forward = 2 * size * n_weights if n_ranks > 1 else 0
        between, backward, update = 0, 8 * n_weights, 4 * share
    elif stage == 2:
        buffers = size * largest if offload else 0
        between = 0 if offload else 4 * share
        backward = between + size * n_weights + bucket
        # A bf16 gradient, its sum in fp32, and the buffer it came from.
        update = between + (6 if bf16 else 4) * n_weights + (bucket or size * n_weights)
    elif bf16 and not offload:  # DeepSpeed's BF16 optimizer: all gradients in fp32, and no buffer
        buffers = 4 * n_weights
        between, backward, update = 2 * n_weights, 2 * n_weights + 4 * largest, 6 * n_weights
    else:
        buffers = size * largest if offload else 0
        between = 4 * n_weights + bucket
        backward = 4 * n_weights + size * largest + bucket
        update = (4 * n_weights + bucket if gpu else 8 * n_weights) + (4 * share if bf16 else 0)
    if adamuon:  # Nesterov's momentum, that of all ranks, and a matrix's products (the last one, in bf16, also in fp32)
        whole = 4 * share + (4 * n_weights if n_ranks > 1 else 0)
        if stage == 2 and not bf16:  # a flat copy of this rank's share of the gradients
            whole += 4 * share
        update = max(update, between + whole + (5 * size + (4 if bf16 else 0)) * largest)
    if buffers:
        kept["gradients and buffers"] = buffers
    host = _on_host(stage, size, share, largest) if offload else 0
    sizes = {name: round(n_bytes) for name, n_bytes in kept.items()}
    return DraftStates(sizes, *map(round, (between, forward, backward, update, host)))


def _on_host(stage: int, size: int, share: float, largest: int) -> float:
    """Masters, moments, gradients; weights' copy buffer in stages 1 and 2; the gradients a second time in 2 and 3."""
    if stage == 3:
        return 20 * share
    return (16 + size + (4 if stage == 2 else 0)) * share + size * largest
