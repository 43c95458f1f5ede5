"""Estimates what a run needs before anything is loaded: the memory of a rank, its operations and its hours.
`longdraft train --estimate` prints this.

The memory counts the large items: weights, masters and moments, gradients with DeepSpeed's buffers (ZeRO, arXiv
1910.02054), the target's pass, and the draft's with the chunk of logits in its loss. tests/train/test_memory.py checks
it to 15 % of measured CPU runs. For a GPU it is only arithmetic, without the allocator's fragmentation.

r is the operations of a step divided by those of the target's pass up to what the method reads (for LongSpec, the last
layer's keys and values). No step can be faster than that pass; with all parts equally fast it takes r times as long. A
multiplication and an addition count as two operations; norms, rotations and the optimizer are not counted.
Shapes: N tokens of a pass, end to end; n of them a rank's where ranks share rows; Q queries of the draft; D hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch

from longdraft.data_prep.shards import ShardSet
from longdraft.kernels.chain_attention import BLOCK
from longdraft.kernels.delta_chunks import CHUNK
from longdraft.kernels.linear_loss import rows_per_block, rows_per_chunk
from longdraft.models.decoder import Decoder
from longdraft.models.decoder_config import DecoderConfig, DeltaConfig
from longdraft.models.draft_folder import DRAFTS
from longdraft.models.drafts.longspec import LongSpecConfig
from longdraft.models.footprint import delta_bytes, feed_forward_numbers
from longdraft.models.hf import read_target_config
from longdraft.train.config import DTYPES, Config, DataSection, DraftSection, TrainSection
from longdraft.train.config_file import Stage
from longdraft.train.sequence_parallel import check_heads
from longdraft.train.teacher import ROW_CHUNK
from longdraft.train.tracking import read_metrics

# Bytes of a process beside its tensors. On a CPU, after the imports: the tokenizer, libraries' buffers, freed memory
# that the allocator keeps. On a GPU: CUDA's context, NCCL, cuBLAS workspaces; a guess.
PROCESS_CPU, PROCESS_GPU = 120 * 2**20, 1536 * 2**20
HOST = "optimizer on the host"
# The most fp32 values that are held beside each logit of a block (kernels/distillation.py). On a GPU only acceptance
# holds any.
BESIDE_LOGITS = {"cross_entropy": 1, "kl": 6, "mix": 6, "overlap": 7, "acceptance": 13}
# Operations of a backward pass over those of its forward pass. A matmul: the gradients of its input and its weight.
# Attention: the scores once more, and the gradients of weights, queries, keys and values.
BACKWARD_PRODUCT, BACKWARD_ATTENTION = 2.0, 2.5
# 10^12 operations a second of an H100 that trained LongSpec's block for an 8B target on rows of 32,768 tokens, 21,000
# tokens/s (docs/gpus.md). Assumed for a GPU if no rate is given or measured.
H100_TFLOPS = 556.0


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. `kept`: permanently on its device, by category. `passes`: in addition during each kind of
    pass. `process`: beside all tensors. `host`: what a GPU's offloaded optimizer keeps on the host."""

    kept: dict[str, int]
    passes: dict[str, int]
    process: int
    host: int

    @property
    def peak(self) -> int:
        return self.process + sum(self.kept.values()) + max(self.passes.values())

    def table(self) -> str:
        """A printable table, in GiB."""
        largest = max(self.passes, key=self.passes.__getitem__)
        lines = {**self.kept, "the process itself": self.process, f"the {largest}": self.passes[largest]}
        lines |= {"at most": self.peak} | ({"and on the host": self.host} if self.host else {})
        return "\n".join([f"{'':30}       GiB", *(f"{title:30}{n / 2**30:10,.2f}" for title, n in lines.items())])


def memory(config: Config, target: DecoderConfig, n_ranks: int, gpu: bool) -> Memory:
    """The memory of one of `n_ranks` ranks if every row is full and a single piece.

    Args:
        gpu: whether a rank is a GPU or a process on a CPU.

    Raises ValueError if that number of ranks cannot share rows.
    """
    train, size = config.train, DTYPES[config.train.precision].itemsize
    check_heads(target, train.sequence_parallel)
    with torch.device("meta"):
        draft = DRAFTS[config.draft.method][1](config.draft.network(target))  # pyright: ignore[reportArgumentType]
        model = Decoder(target)
    n, whole, *layers = (sum(p.numel() for p in one.parameters()) for one in (draft, model, *model.layers))
    own_tokens = -(-train.pass_rows * config.data.seq_len // train.sequence_parallel)
    passes = {
        "target's pass": target_pass(target, own_tokens, size, gpu),
        "draft's pass": draft_pass(config.draft, config.data, train, target, gpu),
    }
    if config.target.zero_stage == 3:  # a pass gathers a layer and the next one
        whole += sum(layers) // n_ranks - sum(layers)
        passes["target's pass"] += 2 * size * max(layers)
    kept = {"target's weights": size * whole, **zero_bytes(n, train, config.optimizer.name, n_ranks)}
    host = kept.pop(HOST, 0) if gpu else 0
    return Memory(kept, passes, PROCESS_GPU if gpu else PROCESS_CPU, host)


def zero_bytes(n: int, train: TrainSection, optimizer: str, n_ranks: int) -> dict[str, int]:
    """Bytes of a draft with n weights on one rank, by category, as measured with DeepSpeed 0.19.8."""
    size = DTYPES[train.precision].itemsize
    gradients = (14 if train.zero_stage == 3 else 10) + (6 if optimizer == "adamuon" else 0)
    return {
        "draft's weights": size * n // (n_ranks if train.zero_stage == 3 else 1),
        "gradients and buffers": gradients * n,
        **({HOST: 20 * n // n_ranks} if train.offload_optimizer else {"masters and moments": 12 * n // n_ranks}),
    }


def target_pass(target: DecoderConfig, n: int, size: int, gpu: bool) -> int:
    """Peak bytes of the target's pass over n tokens, in a layer's projections or in its feed-forward of a chunk."""
    heads, kv = target.n_heads * target.head_dim, target.n_kv_heads * target.head_dim
    qkv, qk = heads + 2 * kv, heads + kv
    chunk = min(n, ROW_CHUNK)
    feed_forward = heads * (n + chunk * target.gated) + feed_forward_numbers(target) * chunk
    of_attention = size * ((qkv + qk) * n + max((qkv + 2 * qk) * n, feed_forward))
    return size * target.hidden_size * n + max(of_attention, delta_bytes(target, n, size, gpu))


def draft_pass(draft: DraftSection, data: DataSection, train: TrainSection, target: DecoderConfig, gpu: bool) -> int:
    """Bytes of what the draft reads from the target, what it keeps for its backward pass, and its loss."""
    shape: Any = draft.network(target)
    d, heads, kv = target.hidden_size, target.n_heads * target.head_dim, target.n_kv_heads * target.head_dim
    size, norm = DTYPES[train.precision].itemsize, 1 if gpu else 2  # the copies that a norm keeps
    n_tokens, distils = train.pass_rows * data.seq_len, train.loss != "cross_entropy"
    n = -(-n_tokens // train.sequence_parallel)
    n_labels = q = round(data.query_share * n)
    kept = d * (n + distils * n_tokens)  # states of the target or embeddings, and states for the target's distribution
    if isinstance(shape, LongSpecConfig):
        kept += 2 * kv * n_tokens + (7 * heads + 3 * kv + 4 * target.intermediate_size + (4 * norm + 3) * d) * q
        n_masked = min(q, BLOCK * train.pass_rows)
        if q < n_tokens:  # the block has keys and values of all tokens
            kept += (norm * d + 2 * kv) * n_tokens
            n_masked = q
        if not gpu:
            kept += n_masked * (data.seq_len // 2 + min(data.seq_len, BLOCK + shape.window))
    else:
        n_labels *= shape.n_heads
        kept += (2 * norm + 1 if getattr(shape, "kind", "") == "linear_chain" else 2) * d * shape.n_heads * n
    # A chunk of logits, of both models in a distillation, and the fp32 values of one block.
    n_words, of_logits = shape.draft_vocab_size or target.vocab_size, size * (1 + distils)
    rows = min(n_labels, rows_per_chunk(n_words, of_logits, gpu))
    block = min(rows, rows_per_block(n_words, gpu, distils)) * 4 * BESIDE_LOGITS[train.loss]
    if gpu and train.loss != "acceptance":
        block = 0
    return size * (kept + d * n_labels) + (rows * of_logits + block) * n_words


@dataclass(frozen=True)
class Operations:
    """Operations per token of a row. `target`: its pass, up to what the method reads. `draft`: the draft's forward and
    backward pass. `head`: LM head and loss, per label. `labels`: labels per token."""

    target: float
    draft: float
    head: float
    labels: float

    @property
    def r(self) -> float:
        return self.of_step(1, self.labels) / self.target

    def of_step(self, n_tokens: int, n_labels: float) -> float:
        """Operations of a step with so many tokens and labels, in rows of one piece each."""
        return n_tokens * (self.target + self.draft) + n_labels * self.head


def operations(draft: DraftSection, data: DataSection, loss: str, target: DecoderConfig) -> Operations:
    """The operations of a row whose data.seq_len tokens are one piece, with a label for every query. Short pieces have
    less attention, and conversations, where only answers are labels, have less of the LM head. `loss`: train.loss."""
    t, length, share = target, data.seq_len, data.query_share
    shape: Any = draft.network(target)
    is_block, distils = isinstance(shape, LongSpecConfig), loss != "cross_entropy"
    d, heads, kv = t.hidden_size, t.n_heads * t.head_dim, 2 * t.n_kv_heads * t.head_dim
    project, output = 2 * d * (heads + kv), 2 * heads * d * (2 if t.gated else 1)
    seen = 0.0
    for layer, window in enumerate(t.windows):
        if t.delta is not None and layer in t.delta.layers:
            seen += _linear_attention(t.delta, d) + 6 * d * t.feed_forward_size(layer)
            continue
        finish = output + 6 * d * t.feed_forward_size(layer) + 4 * heads * mean_keys(length, window)
        # LongSpec reads the last layer's keys and values, and only a distillation finishes that layer.
        is_finished = distils or not is_block or layer < t.n_layers - 1
        seen += project + is_finished * finish
    if is_block:
        # With a subset of queries, keys and values are computed for all tokens, in a projection of their own.
        products = share * (project + 3 * output + 6 * d * t.intermediate_size) + (2 * d * kv if share < 1 else 0)
        later = mean_keys(length, None) - (1 + shape.noise) / 2  # a query reads keys up to its noise shift before it
        attention = share * 4 * heads * (mean_keys(length, shape.window + 1) + max(later, 0.0))
    else:
        products, attention = 2 * d * d * shape.n_heads, 0.0  # for all tokens, labels or not
    return Operations(
        target=seen,
        draft=(1 + BACKWARD_PRODUCT) * products + (1 + BACKWARD_ATTENTION) * attention,
        # Logits and the gradient of their input (the LM head is frozen), and the target's logits in a distillation.
        head=(6 if distils else 4) * d * (shape.draft_vocab_size or t.vocab_size),
        labels=share * (1 if is_block else shape.n_heads),
    )


def _linear_attention(delta: DeltaConfig, width: int) -> float:
    """Operations per token of a layer's linear attention: its products, and the rule in chunks, where a head's token
    meets half a chunk's keys three times (overlaps, scores, solution) and the memory three times."""
    values = delta.value_heads * delta.value_dim
    products = 2 * width * (delta.channels + 2 * values + 2 * delta.value_heads)
    within = 2 * CHUNK * (delta.key_dim + delta.value_dim)
    return products + delta.value_heads * (within + 6 * delta.key_dim * delta.value_dim)


def mean_keys(length: int, window: int | None) -> float:
    """The mean number of keys that a token of a piece reads: itself and the tokens before it within the window."""
    seen = min(length, window or length)
    return (seen * (seen + 1) / 2 + (length - seen) * seen) / length


def report(
    stages: Sequence[Stage], n_ranks: int | None = None, gpu: bool | None = None, tflops: float | None = None
) -> str:
    """For each stage, the memory of one of `n_ranks` ranks, r, and the hours.

    Args:
        n_ranks: the ranks on all machines. None: one for each GPU of this machine, or a single one without GPUs.
        gpu: whether a rank is a GPU, here or on another machine, or a process on a CPU; train.device=cpu overrides it.
            None: as on this machine.
        tflops: a rank's speed in 10^12 operations a second. None: as the run in the stage's folder measured it on such
            a rank; without such a run, as measured on one H100, and for a CPU no hours are given.

    Raises ValueError if a target cannot be read, is not for our decoder or has too few positions, that number of ranks
    cannot share rows, or prepared rows cannot be read.
    """
    gpu = (torch.cuda.is_available() if gpu is None else gpu) and stages[0].config.train.device != "cpu"
    n_ranks = n_ranks or (torch.cuda.device_count() if gpu else 1)
    unit, hours, parts = "GPU" if gpu else "process", list[float | None](), list[str]()
    read = cache(read_target_config)  # reading the metadata of a .gguf file takes seconds
    for stage in stages:
        config, section, train = stage.config, stage.config.target, stage.config.train
        if section.loader != "longdraft":
            raise ValueError(f"target.loader: {section.loader}, but --estimate counts what our decoder allocates")
        target = read(section.path, section.max_positions)
        config.data.check_positions(section.path, target.max_positions)
        counted = operations(config.draft, config.data, train.loss, target)
        parts += [
            f"{'' if stage.name is None else f'Stage {stage.name}: '}{config.draft.method} for {section.path} in "
            f"{train.precision}, {'GPUs' if gpu else 'CPU processes'}: {n_ranks}; a pass of {train.pass_rows} x "
            f"{config.data.seq_len:,} tokens, {train.n_passes(n_ranks)} a step",
            memory(config, target, n_ranks, gpu).table(),
        ]
        stage_hours, described = _hours(counted, config, n_ranks, unit, tflops)
        hours.append(stage_hours)
        parts.append(f"r, a step over the target's pass: {counted.r:.3f}{described}")
    known = [stage_hours for stage_hours in hours if stage_hours is not None]
    if len(known) == len(stages) > 1:
        parts.append(f"All stages: {sum(known):,.1f} {unit}-hours: {sum(known) / n_ranks:,.2f} hours")
    return "\n\n".join(parts)


def _hours(
    counted: Operations, config: Config, n_ranks: int, unit: str, tflops: float | None
) -> tuple[float | None, str]:
    """The sum of all ranks' hours, and a line about it. If the number of steps is unknown, as for epochs of rows that
    are not prepared yet, the line is for a billion tokens and the sum is None."""
    rows, source = Path(config.data.path) / "train", "as given"
    if tflops is None:
        records = read_metrics(config.train.run_dir)
        # A run in this folder may have run on a CPU: its records then lack peak_memory_gib.
        measured = [
            record["tflops_per_rank"]
            for record in records
            if "tflops_per_rank" in record and ("peak_memory_gib" in record) == (unit == "GPU")
        ]
        if not measured and unit != "GPU":
            return None, ""
        tflops = float(median(measured)) if measured else H100_TFLOPS
        source = "as measured by the run" if measured else "as measured on one H100"
    if config.train.steps is None and rows.exists():
        config = config.resolved(len(ShardSet(rows)))
    speed, n_steps = tflops * 1e12 / counted.of_step(1, counted.labels), config.train.steps
    n_tokens = n_steps * config.train.global_batch * config.data.seq_len if n_steps else 10**9
    hours = n_tokens / speed / 3600
    line = f"\n{hours:,.1f} {unit}-hours for {f'{n_steps:,} steps' if n_steps else 'a billion tokens'}, {speed:,.0f} "
    line += f"tokens/s a {unit} at {tflops:.3g} TFLOP/s {source}"
    return (hours, f"{line}: {hours / n_ranks:,.2f} hours") if n_steps else (None, line)
