"""The memory and the time that a run needs, counted before anything is loaded.

A step's peak is the largest of a few moments, each of which adds to what is there all the time. What is counted is what
the code allocates: models/decoder.py in the target's pass, models/drafts/ in the draft's, kernels/ for attention and
loss, DeepSpeed 0.19.8 for the optimizer (ZeRO, arXiv 1910.02054). tests/train/test_memory.py holds it to 15 % of what
runs on a CPU take. For a GPU it is arithmetic: bf16 with flash attention, fused norms and the loss's Triton kernel,
without the allocator's fragmentation.
Shapes: N tokens of a pass, end to end; n of them a rank's where ranks share rows; Q queries of the draft; L tokens of a
row; D hidden, F the query heads' width, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from longdraft.kernels.chain_attention import BLOCK
from longdraft.kernels.linear_cross_entropy import rows_per_block, rows_per_chunk
from longdraft.kernels.linear_distillation import block_rows
from longdraft.models.decoder import Decoder
from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.draft_folder import DRAFTS
from longdraft.models.drafts.longspec import LongSpecConfig
from longdraft.models.footprint import cache_rows, feed_forward_numbers, pass_bytes, size_of
from longdraft.models.passes import prompt_rows
from longdraft.train.config import DTYPES, Config
from longdraft.train.deepspeed_engine import MAX_BUCKET
from longdraft.train.methods.base import QUERY_BLOCK
from longdraft.train.sequence_parallel import check_heads
from longdraft.train.teacher import ROW_CHUNK

MIB = 2**20
# What a process has beside tensors. On a CPU, after the imports: the tokenizer, libraries' buffers, freed memory that
# the allocator keeps. On a GPU: CUDA's context, NCCL, cuBLAS workspaces; a guess.
PROCESS_CPU, PROCESS_GPU = 120 * MIB, 1536 * MIB
# fp32 values beside each pair of logits in a distillation (kernels/linear_distillation.py), at most: kl comes first.
BESIDE_LOGITS = {"cross_entropy": 0, "kl": 6, "mix": 6, "overlap": 7, "acceptance": 13}
# Rows of the cache beyond the text, when decoding.
SLACK = 256


@dataclass(frozen=True)
class Estimate:
    """Bytes on one rank's device: `kept` all the time, by what holds them, and what each of `moments` adds. `process`:
    beside all tensors. `host`: what the optimizer of a GPU keeps on the host."""

    kept: dict[str, int]
    moments: dict[str, int]
    process: int
    host: int

    @property
    def peak(self) -> tuple[str, int]:
        """The largest moment, and the bytes of everything that is there then."""
        name = max(self.moments, key=self.moments.__getitem__)
        return name, self.process + sum(self.kept.values()) + self.moments[name]


def estimate(config: Config, target: DecoderConfig, n_ranks: int, gpu: bool) -> Estimate:
    """The memory of one of `n_ranks` ranks, where every row is full and a single piece.

    Args:
        gpu: a rank is a GPU; else it is a process on a CPU.

    Raises ValueError where that number of ranks cannot share rows.
    """
    train, data, bf16 = config.train, config.data, config.train.precision == "bf16"
    check_heads(target, train.sequence_parallel)
    row, passed = _Pass(config, target, gpu, 1, 1.0), _Pass(config, target, gpu, train.pass_rows, data.query_share)
    with torch.device("meta"):
        draft = [weight.numel() for weight in DRAFTS[config.draft.method][1](passed.shape).parameters()]
        model = Decoder(target)
    zero = zero_bytes(
        sum(draft), max(draft), bf16=bf16, stage=train.zero_stage, offload=train.offload_optimizer, n_ranks=n_ranks,
        gpu=gpu, adamuon=config.optimizer.name == "adamuon",
    )  # fmt: skip
    whole, gathered = _count(model), 0
    if config.target.zero_stage == 3:  # a pass gathers a layer and the next one
        layers = [_count(layer) for layer in model.layers]
        whole, gathered = whole - sum(layers) + sum(layers) / n_ranks, 2 * passed.size * max(layers)
    between = zero.between if train.n_passes(n_ranks) > 1 else 0
    seen, (activations, top) = passed.seen(), passed.draft()
    moments = {
        "target's pass": gathered + passed.of_target() + between,
        "draft's pass and loss": seen + activations + zero.forward + passed.loss() + between,
        "draft's backward pass and the step": seen + activations + top + zero.backward,
        "held-out row": max(gathered + row.of_target(), row.draft_without_gradient()) + zero.forward,
    }
    if config.decoding.every:  # one prompt of the longest context, with a copy of the draft (evaluate.py)
        n_rows = max(config.decoding.contexts) + config.decoding.new_tokens + SLACK
        at_once = pass_bytes(target, min(n_rows, prompt_rows("cuda" if gpu else "cpu")), DTYPES[train.precision])
        cache = size_of(cache_rows(target, n_rows, DTYPES[train.precision]))
        moments["decoding"] = gathered + passed.size * sum(draft) + cache + at_once
    kept = {"target's weights": passed.size * whole, **zero.kept} | (
        {} if gpu else {"optimizer on the host": zero.host}
    )
    return Estimate(
        {name: round(n_bytes) for name, n_bytes in kept.items() if n_bytes},
        {name: round(n_bytes) for name, n_bytes in moments.items()},
        PROCESS_GPU if gpu else PROCESS_CPU,
        round(zero.host) if gpu else 0,
    )


class ZeroBytes(NamedTuple):
    """Bytes of a draft on one rank's device: `kept` all the time; in addition, `between` from one pass of a step to the
    next, `forward` while the draft runs, and at most `backward` from a backward pass to the weights' update. `host`: on
    the host, all the time."""

    kept: dict[str, float]
    between: float
    forward: float
    backward: float
    host: float


def zero_bytes(
    n: int, largest: int, *, bf16: bool, stage: int, offload: bool, n_ranks: int, gpu: bool, adamuon: bool = False
) -> ZeroBytes:
    """The bytes of a draft with `n` weights, `largest` of them in its largest tensor, under ZeRO.

    Args:
        bf16: weights in bf16 with fp32 masters; else all in fp32, where DeepSpeed keeps separate masters too.
        stage: 1, 2 or 3. offload: masters, moments and the gradients that move them lie on the host.
        n_ranks: the ranks that ZeRO shards over.
        gpu: buffers for sums count in full; on a CPU only the part that is written does.
        adamuon: the optimizer makes each matrix orthogonal from all ranks' momentum.
    """
    size, share = (2 if bf16 else 4), n / n_ranks
    bucket = 4 * min(n, MAX_BUCKET) if gpu else 0
    buffers, forward = (size * largest if offload else 0), 0
    if stage == 3:  # the weights as they were given, or the part of the buffer that is written
        buffers = (0 if offload else 4 * share) + bucket + 4 * (largest if gpu and bf16 else n)
        forward = 2 * size * n if n_ranks > 1 else 0
        between, backward = 0, 8 * n
    elif stage == 2:
        between = 0 if offload else 4 * share
        backward = between + 8 * n
    elif bf16 and not offload:  # DeepSpeed's BF16 optimizer: all gradients in fp32, and no buffer
        buffers = 4 * n
        between, backward = 2 * n, 6 * n
    else:
        between = 4 * n + bucket
        backward = 8 * n + (4 * share if bf16 else 0)
    if adamuon:  # Nesterov's momentum, that of all ranks, a flat copy of the gradients, and a matrix's products
        whole = 4 * share + (4 * n if n_ranks > 1 else 0) + (4 * share if stage == 2 and not bf16 else 0)
        backward = max(backward, between + whole + (14 if bf16 else 20) * largest)
    kept = {"draft's weights": size * (share if stage == 3 else n), "gradients and buffers": buffers}
    host = 0
    if not offload:
        kept["masters and moments"] = 12 * share
    elif stage == 3:
        host = 20 * share
    else:
        host = (16 + size + (4 if stage == 2 else 0)) * share + size * largest
    return ZeroBytes(kept, between, forward, backward, host)


class _Pass:
    """The bytes of a pass over full rows, beside weights.

    Attributes: n_tokens (N), those of all rows; n, a rank's; q, those that the draft runs for; taught, those after
    which the loss needs the target's distribution.
    """

    def __init__(self, config: Config, target: DecoderConfig, gpu: bool, n_rows: int, query_share: float):
        self.target, self.gpu, self.data, self.train, self.n_rows = target, gpu, config.data, config.train, n_rows
        self.size = DTYPES[config.train.precision].itemsize
        self.shape: Any = config.draft.network(target)
        self.is_block = isinstance(self.shape, LongSpecConfig)
        self.n_tokens = n_rows * config.data.seq_len
        self.n = -(-self.n_tokens // config.train.sequence_parallel)
        self.q = round(query_share * self.n)
        self.taught = 0 if config.train.loss == "cross_entropy" else self.q
        self.is_chunked = self.n > ROW_CHUNK  # else q, k and v are views of what was projected and rotated, not copies
        t, d = target, target.head_dim
        self.heads, self.qk, self.kv = t.n_heads * d, (t.n_heads + t.n_kv_heads) * d, 2 * t.n_kv_heads * d
        self.qkv = self.heads + self.kv
        self.norm = 1 if gpu else 2  # copies that a norm keeps for its gradient: on a CPU also before its weight

    def of_target(self) -> int:
        """The largest stage of one layer: projections, attention or feed-forward; or what ranks exchange at the end."""
        t, n = self.target, self.n
        held = self.qkv if self.is_chunked else self.qkv + self.qk
        made = 2 * self.qkv + self.qk if self.is_chunked else self.qkv + 3 * self.qk
        feed_forward = self.heads * n + min(n, ROW_CHUNK) * feed_forward_numbers(t)
        attention, exchanged = self.heads * (1 if self.gpu else 2) * n, 0
        if n < self.n_tokens:
            attention += 2 * self.qkv * n
            exchanged = t.hidden_size * (self.n_tokens + n + self.taught)
        largest = max(made * n, attention, feed_forward, exchanged)
        return self.size * ((t.hidden_size + 3 * t.head_dim // 2 + held) * n + largest)

    def seen(self) -> int:
        """What the draft reads of the target, and the tokens' embeddings."""
        d = self.target.hidden_size
        if not self.is_block:
            return self.size * d * (self.n + self.taught)
        is_whole = self.n == self.n_tokens and not self.is_chunked
        return self.size * (((self.qkv + self.qk if is_whole else self.kv) + d) * self.n_tokens + d * self.taught)

    def draft(self) -> tuple[int, int]:
        """What the draft keeps for its gradient, and what the largest step of its backward pass adds."""
        t, n, q = self.target, self.n, self.q
        d, size = t.hidden_size, self.size
        if not self.is_block:
            kept = 2 * self.norm + 1 if getattr(self.shape, "kind", "") == "linear_chain" else 2
            return size * kept * d * self.shape.n_heads * n, size * 4 * d * n
        kept = (self.qk + self.heads * (4 if self.gpu else 5) + 4 * t.intermediate_size + (4 * self.norm + 3) * d) * q
        # With a subset of queries, the block has its own keys and values of all tokens.
        is_subset = q < self.n_tokens
        kept += d * q + (self.norm * d + 3 * self.kv // 2) * self.n_tokens if is_subset else self.qkv * q
        if not self.gpu:
            kept += self._masks(is_subset)
        top = size * 2 * q * (d + t.intermediate_size)
        if self.gpu:  # the flash kernel's gradients, when what the feed-forward kept is free again
            by_head = 2 * self.heads * n if t.n_kv_heads < t.n_heads else 0
            flash = 4 * self.heads * q + size * (2 * self.heads * q + self.kv * n + by_head)
            top = max(top, flash - size * 4 * t.intermediate_size * q)
        return size * kept, top

    def _masks(self, is_subset: bool) -> int:
        """Numbers in the masks that attention keeps on a CPU (kernels/chain_attention.py)."""
        length, window = self.data.seq_len, self.shape.window
        if is_subset:
            return self.q * (min(length, QUERY_BLOCK + window) + length // 2)
        if length <= window + 1:
            return 0
        return self.n_rows * BLOCK * (min(length, BLOCK) + min(length, BLOCK + window))

    def loss(self) -> int:
        """The states' gradient, a restricted LM head, and a chunk's logits."""
        d, restricted = self.target.hidden_size, self.shape.draft_vocab_size or 0
        n_labels = self.q if self.is_block else self.q * self.shape.n_heads
        n_words = restricted or self.target.vocab_size
        logits = loss_chunk(n_labels, d, n_words, self.size, self.gpu, BESIDE_LOGITS[self.train.loss])
        return self.size * (n_labels + restricted) * d + logits

    def draft_without_gradient(self) -> int:
        """A held-out row in the draft."""
        d = self.target.hidden_size
        block = self.qkv + self.qk + 4 * self.heads + 3 * d + 4 * self.target.intermediate_size
        width = block if self.is_block else (self.shape.n_heads + 3) * d
        return self.seen() + self.size * d * self.n_tokens + max(self.size * width * self.n, self.loss())


def loss_chunk(n_labels: int, hidden_size: int, n_words: int, size: int, gpu: bool, distilled: int = 0) -> int:
    """Bytes of one chunk in the loss over the labels of all parts, with ranks counted: states, logits, and what is
    computed from them (kernels/linear_cross_entropy.py). A CPU works on blocks of a chunk, which it converts from bf16
    to fp32. `distilled`: fp32 values beside each pair of logits in a distillation; else 0."""
    converted = 4 if size == 2 else 0
    if distilled:
        rows = min(n_labels, rows_per_chunk(n_words, 2 * size, gpu))
        block = min(rows, block_rows(n_words, gpu)) * (4 * distilled + 2 * converted)
        return rows * (2 * n_words + hidden_size) * size + block * n_words
    rows = min(n_labels, rows_per_chunk(n_words, size, gpu))
    block = (
        0 if gpu else min(rows, rows_per_block(n_words)) * (5 + converted)
    )  # an fp32 value and a bool to count ranks
    return rows * (n_words + hidden_size) * size + block * n_words


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
