"""What DeepSpeed keeps of a draft that trains under ZeRO (arXiv 1910.02054), in bytes.

Read in DeepSpeed 0.19.8, and measured over steps of two passes with torch's AdamW on one, two and four ranks: what its
optimizers hold at rest, and what they take on top in a backward pass and when the weights move. Not here: activations
and the target (memory.py).
Shapes: P weights of the draft, R ranks.
"""

from typing import NamedTuple

# Numbers in a buffer for sums over ranks, however few there are to sum (DeepSpeed's `reduce_bucket_size`).
BUCKET = 500_000_000


class DraftStates(NamedTuple):
    """Bytes on one rank's device. `kept`, by name: all the time. On top of that, `between`: from one pass of a step to
    the next; `forward`: while the draft runs; `backward`: in a backward pass; `update`: when gradients are summed over
    ranks and weights move. `host`: on the host, all the time."""

    kept: dict[str, int]
    between: int
    forward: int
    backward: int
    update: int
    host: int


def draft_states(
    n_weights: int, largest: int, *, bf16: bool, stage: int, offload: bool, n_ranks: int, gpu: bool
) -> DraftStates:
    """For a draft of P = `n_weights` parameters, of which the largest tensor has `largest`.

    Args:
        bf16: weights in bf16 with fp32 masters; else all in fp32, where DeepSpeed keeps masters of their own too.
        stage: 1, 2 or 3. offload: masters, moments and the gradients that move them lie on the host.
        n_ranks: R, among which ZeRO shares out.
        gpu: buffers for sums count whole; on a CPU what of them is never written takes no memory.
    """
    size, share = (2 if bf16 else 4), n_weights / n_ranks
    kept = {"draft's weights": size * (share if stage == 3 else n_weights)}
    if not offload:
        kept["masters and moments"] = 12 * share
    # What stages 1 and 2 sum in is made by a step's first backward pass, and goes with its last (1) or its own (2);
    # stage 3 keeps it.
    bucket = BUCKET * (size if stage == 2 else 4) if gpu else 0
    copies = 2 if bf16 else 0  # of the gradients, in bf16, before they are added up in fp32
    if stage == 3:
        # A gradient of the largest tensor is there from the start; in fp32 the weights as they came are not let go.
        kept["gradients and buffers"] = (0 if offload else 4 * share) + 4 * largest + bucket
        if not bf16:
            kept["gradients and buffers"] += 4 * (n_weights - largest)
        gathered = 2 * size * n_weights if n_ranks > 1 else 0
        between, forward, backward, update = 0, gathered, 8 * n_weights, 4 * share
    elif bf16 and stage == 1 and not offload:  # another optimizer of DeepSpeed's, with all gradients in fp32
        kept["gradients and buffers"] = 4 * n_weights
        between, forward, backward, update = copies * n_weights, 0, copies * n_weights + 4 * largest, 6 * n_weights
    else:
        kept["gradients and buffers"] = size * largest if offload else 0
        between = 4 * n_weights + bucket if stage == 1 else (0 if offload else 4 * share)
        forward = 0
        if stage == 1:
            backward = 4 * n_weights + size * largest + bucket
            update = max(4 * n_weights + 4 * share + bucket, 8 * share)
        else:
            # On a CPU the part of the bucket that gradients are written to is memory, too.
            backward = 4 * share + size * n_weights + bucket
            update = max(4 * share + (4 + copies) * n_weights + (bucket or size * n_weights), 8 * share)
    host = _offloaded(stage, size, share, largest) if offload else 0
    sizes = {name: round(n_bytes) for name, n_bytes in kept.items() if n_bytes}
    return DraftStates(sizes, *map(round, (between, forward, backward, update, host)))


def _offloaded(stage: int, size: int, share: float, largest: int) -> float:
    """Masters, moments and gradients; what weights are copied through (1, 2); gradients a second time (2, 3)."""
    if stage == 3:
        return 20 * share
    return (16 + size + (4 if stage == 2 else 0)) * share + size * largest
