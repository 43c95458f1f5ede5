"""`longdraft train --estimate`: what each stage of a config needs on one rank, printed before anything is loaded.

Beside memory (memory.py), a step's operations: r is those of the whole step over those of the target's pass, as far as
the method reads that (for LongSpec, up to the last layer's keys and values). No step can be faster than that pass; with
all parts equally fast it takes r times as long. A multiplication and an addition count as two operations; norms,
rotations and the optimizer count as none.
Shapes: L tokens of a row, one piece; D hidden, F the query heads' width, I feed-forward, V tokens that can be proposed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

import torch

from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.drafts.longspec import LongSpecConfig
from longdraft.models.hf import read_target_config
from longdraft.train.config import DataSection, DraftSection, TrainSection
from longdraft.train.config_file import Stage
from longdraft.train.memory import Estimate, estimate
from longdraft.train.tracking import read_metrics

# Operations of a backward pass over those of its forward pass. A product: the gradients of its input and its weight.
# Attention: the scores once more, and the gradients of weights, queries, keys and values.
BACKWARD_PRODUCT, BACKWARD_ATTENTION = 2.0, 2.5


@dataclass(frozen=True)
class Operations:
    """Operations for each token of a row: the target's pass as far as it is read, the draft's two passes. `head`: those
    of the LM head and the loss for each label. `labels`: how many of them a token has."""

    target: float
    forward: float
    backward: float
    head: float
    labels: float

    @property
    def r(self) -> float:
        return self.of_step(1, self.labels) / self.target

    def of_step(self, n_tokens: int, n_labels: float) -> float:
        """Operations of a step of so many tokens, in rows of one piece each, with so many labels."""
        return n_tokens * (self.target + self.forward + self.backward) + n_labels * self.head


def operations(draft: DraftSection, data: DataSection, loss: str, target: DecoderConfig) -> Operations:
    """The operations of a row whose data.seq_len tokens are one piece, with a label for every query. Short pieces have
    less attention, and conversations, where only answers are labels, have less of the LM head. `loss`: train.loss."""
    t, length, share = target, data.seq_len, data.query_share
    shape: Any = draft.network(target)
    is_block, distils = isinstance(shape, LongSpecConfig), loss != "cross_entropy"
    d, heads, kv = t.hidden_size, t.n_heads * t.head_dim, 2 * t.n_kv_heads * t.head_dim
    project, output = 2 * d * (heads + kv), 2 * heads * d
    seen = 0.0
    for layer, window in enumerate(t.sliding_windows or (None,) * t.n_layers):
        finish = output + 6 * d * t.feed_forward_size(layer) + 4 * heads * mean_keys(length, window)
        # LongSpec reads the last layer's keys and values; a distillation finishes that layer for the queries.
        partly = share * distils if is_block and layer == t.n_layers - 1 else 1.0
        seen += project + partly * finish
    if is_block:
        # With a subset of queries, keys and values are computed for all tokens, in a projection of their own.
        products = share * (project + 3 * output + 6 * d * t.intermediate_size) + (2 * d * kv if share < 1 else 0)
        later = mean_keys(length, None) - (1 + shape.noise) / 2  # a query reads up to its noise shift before it
        attention = share * 4 * heads * (mean_keys(length, shape.window + 1) + max(later, 0.0))
    else:
        products, attention = 2 * d * d * shape.n_heads, 0.0  # for all tokens, labels or not
    return Operations(
        target=seen,
        forward=products + attention,
        backward=BACKWARD_PRODUCT * products + BACKWARD_ATTENTION * attention,
        # Logits and the gradient of their input (the LM head is frozen), and the target's logits in a distillation.
        head=(6 if distils else 4) * d * (shape.draft_vocab_size or t.vocab_size),
        labels=share * (1 if is_block else shape.n_heads),
    )


def mean_keys(length: int, window: int | None) -> float:
    """The mean number of keys that a token of a piece reads: itself and the tokens before it within the window."""
    seen = min(length, window or length)
    return (seen * (seen + 1) / 2 + (length - seen) * seen) / length


def report(
    stages: Sequence[Stage], n_ranks: int | None = None, gpu: bool | None = None, tflops: float | None = None
) -> str:
    """For each stage, a table of bytes, the operations and the hours that they take, for one of `n_ranks` ranks.

    Args:
        n_ranks: the ranks on all machines. None: one for each GPU of this machine, or a single one without GPUs.
        gpu: a rank is a GPU, here or elsewhere, unless train.device says cpu; else it is a process on a CPU. None: as
            on this machine.
        tflops: operations that a rank makes, in 10^12 a second. None: as the run in the stage's folder measured, if
            there is one; else no hours are given.

    Raises ValueError where a target cannot be read, is not for our decoder or has too few positions, or that number of
    ranks cannot share rows.
    """
    gpu = torch.cuda.is_available() if gpu is None else gpu
    gpu = gpu and all(stage.config.train.device != "cpu" for stage in stages)
    n_ranks = (torch.cuda.device_count() if gpu else 1) if n_ranks is None else n_ranks
    for name, given in (("num_gpus", n_ranks), ("tflops", tflops)):
        if given is not None and not given > 0:
            raise ValueError(f"{name}: {given}; give a number above 0")
    read = cache(read_target_config)  # reading the metadata of a .gguf file takes seconds
    parts = []
    for stage in stages:
        config, section, train = stage.config, stage.config.target, stage.config.train
        if section.loader != "longdraft":
            raise ValueError(f"target.loader: {section.loader}, but --estimate counts what our decoder allocates")
        target = read(section.path, section.max_positions)
        config.data.check_positions(section.path, target.max_positions)
        title = "" if stage.name is None else f"Stage {stage.name}: "
        shared = f", {train.sequence_parallel} ranks a row" if train.sequence_parallel > 1 else ""
        found = operations(config.draft, config.data, train.loss, target)
        parts += [
            f"{title}{config.draft.method} for {section.path} in {train.precision} on {n_ranks} "
            f"{'GPUs' if gpu else 'CPU processes'}{shared}; a pass of {train.pass_rows} x {config.data.seq_len:,} "
            f"tokens, {train.n_passes(n_ranks)} a step",
            memory_table(estimate(config, target, n_ranks, gpu)),
            f"Millions of operations a token: target {found.target / 1e6:,.1f}, draft {found.forward / 1e6:,.1f} "
            f"forward and {found.backward / 1e6:,.1f} backward, LM head and loss {found.labels * found.head / 1e6:,.1f}"
            f"\nr, a step over the target's pass: {found.r:.3f}" + _hours(found, train, config.data, n_ranks, tflops),
        ]
    return "\n\n".join(parts)


def memory_table(found: Estimate) -> str:
    """A table for people, in GiB: what is there all the time, and what each moment of a step adds."""
    name, peak = found.peak
    lines = {**found.kept, "the process itself": found.process}
    lines |= {f"+ {moment}": n_bytes for moment, n_bytes in found.moments.items()}
    lines |= {f"at most, in: {name}": peak} | ({"and on the host": found.host} if found.host else {})
    return "\n".join([f"{'':50}       GiB", *(f"{title:50}{n / 2**30:10,.2f}" for title, n in lines.items())])


def _hours(found: Operations, train: TrainSection, data: DataSection, n_ranks: int, tflops: float | None) -> str:
    """The time of all steps, or of a thousand where their number is not known before the data."""
    source = "as given"
    if tflops is None:
        measured = [record["tflops_per_rank"] for record in read_metrics(train.run_dir) if "tflops_per_rank" in record]
        if not measured:
            return ""
        tflops, source = float(median(measured)), f"as the run in {train.run_dir} measured"
    n_tokens, n_steps = train.global_batch * data.seq_len, train.steps or 1000
    hours = n_steps * found.of_step(n_tokens, n_tokens * found.labels) / (tflops * 1e12 * n_ranks) / 3600
    return f"\n{hours:,.2f} hours for {n_steps:,} steps at {tflops:g} TFLOP/s a rank, {source}"
