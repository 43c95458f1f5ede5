"""The memory and the time that a run needs, counted before anything is loaded.

A step's peak is the largest of a few moments, each of which adds to what is there all the time. What is counted is what
the code allocates: models/decoder.py in the target's pass, models/drafts/ in the draft's, kernels/ for attention and
loss, DeepSpeed 0.19.8 for the optimizer (ZeRO, arXiv 1910.02054). tests/train/test_memory.py holds it to 15 % of what
runs on a CPU take. For a GPU it is arithmetic: bf16 with flash attention, fused norms and the loss's Triton kernel,
without the allocator's fragmentation.
Shapes: N tokens of a pass, end to end; n of them a rank's where ranks share rows; Q queries of the draft; L tokens of a
row; D hidden, F the query heads' width, V vocabulary.
"""

import sys
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
from longdraft.models.footprint import feed_forward_numbers, pass_bytes
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
# fp32 values beside each pair of logits in a distillation (kernels/linear_distillation.py).
BESIDE_DISTILLED = {"kl": 6, "overlap": 7, "acceptance": 13}
# Multiprocessors of an H100: flash attention's deterministic backward pass has a copy of a gradient for each.
PROCESSORS = 132
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
    train, bf16 = config.train, config.train.precision == "bf16"
    n_passes = train.n_passes(n_ranks)
    check_heads(target, train.sequence_parallel)
    sizes = _Sizes(config, target, gpu)
    with torch.device("meta"):
        draft = [weight.numel() for weight in DRAFTS[config.draft.method][1](sizes.shape).parameters()]
        model = Decoder(target)
    zero = zero_bytes(
        sum(draft), max(draft), bf16=bf16, stage=train.zero_stage, offload=train.offload_optimizer, n_ranks=n_ranks,
        gpu=gpu, adamuon=config.optimizer.name == "adamuon",
    )  # fmt: skip
    whole, gathered = _count(model), 0
    if config.target.zero_stage == 3:  # a pass gathers a layer and the next one
        layers = [_count(layer) for layer in model.layers]
        whole, gathered = whole - sum(layers) + sum(layers) / n_ranks, 2 * sizes.size * max(layers)
    n_tokens = train.pass_rows * config.data.seq_len
    between = zero.between if n_passes > 1 else 0
    seen, activations, top = sizes.seen(n_tokens), *sizes.draft(n_tokens)
    moments = {
        "target's pass": gathered + sizes.target_pass(n_tokens) + between,
        "draft's pass and loss": seen + activations + zero.forward + sizes.loss(sizes.queries(n_tokens)) + between,
        "draft's backward pass": seen + activations + top + zero.backward,
        "sums over ranks, and the step": seen + zero.update,
        "held-out row": sizes.heldout(gathered) + zero.forward,
    }
    if config.decoding.every:
        moments["decoding"] = gathered + sizes.decoding(sum(draft))
    kept = {"target's weights": sizes.size * whole, **zero.kept} | ({} if gpu else {"optimizer on the host": zero.host})
    return Estimate(
        {name: round(n_bytes) for name, n_bytes in kept.items() if n_bytes},
        {name: round(n_bytes) for name, n_bytes in moments.items()},
        PROCESS_GPU if gpu else PROCESS_CPU,
        round(zero.host) if gpu else 0,
    )


class ZeroBytes(NamedTuple):
    """Bytes of a draft on one rank's device: `kept` all the time; in addition, `between` from one pass of a step to the
    next, `forward` while the draft runs, `backward` in a backward pass, and `update` when gradients are summed over the
    ranks and the weights move. `host`: on the host, all the time."""

    kept: dict[str, float]
    between: float
    forward: float
    backward: float
    update: float
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
    bucket = min(n, MAX_BUCKET) * (size if stage == 2 else 4) if gpu else 0
    buffers, forward = (size * largest if offload else 0), 0
    if stage == 3:
        # The weights as they were given, or the part of the buffer that is written.
        buffers = (0 if offload else 4 * share) + 4 * largest + bucket + (0 if gpu and bf16 else 4 * (n - largest))
        forward = 2 * size * n if n_ranks > 1 else 0
        between, backward, update = 0, 8 * n, 4 * share
    elif stage == 2:
        between = 0 if offload else 4 * share
        backward = between + size * n + bucket
        update = between + (6 if bf16 else 4) * n + (bucket or size * n)
    elif bf16 and not offload:  # DeepSpeed's BF16 optimizer: all gradients in fp32, and no buffer
        buffers = 4 * n
        between, backward, update = 2 * n, 2 * n + 4 * largest, 6 * n
    else:
        between = 4 * n + bucket
        backward = between + size * largest
        update = (between if gpu else 8 * n) + (4 * share if bf16 else 0)
    if adamuon:  # Nesterov's momentum, that of all ranks, a flat copy of the gradients, and a matrix's products
        whole = 4 * share + (4 * n if n_ranks > 1 else 0) + (4 * share if stage == 2 and not bf16 else 0)
        update = max(update, between + whole + (14 if bf16 else 20) * largest)
    kept = {"draft's weights": size * (share if stage == 3 else n), "gradients and buffers": buffers}
    host = 0
    if not offload:
        kept["masters and moments"] = 12 * share
    elif stage == 3:
        host = 20 * share
    else:
        host = (16 + size + (4 if stage == 2 else 0)) * share + size * largest
    return ZeroBytes(kept, between, forward, backward, update, host)


class _Sizes:
    """The bytes of a run's tensors, beside weights."""

    def __init__(self, config: Config, target: DecoderConfig, gpu: bool):
        self.target, self.gpu, self.data, self.train = target, gpu, config.data, config.train
        self.decodes, self.dtype = config.decoding, DTYPES[config.train.precision]
        self.size = self.dtype.itemsize
        self.shape: Any = config.draft.network(target)
        self.is_block = isinstance(self.shape, LongSpecConfig)
        t, d = target, target.head_dim
        self.heads, self.qk, self.kv = t.n_heads * d, (t.n_heads + t.n_kv_heads) * d, 2 * t.n_kv_heads * d
        self.qkv = self.heads + self.kv
        self.norm = 1 if gpu else 2  # copies that a norm keeps for its gradient: on a CPU also before its weight

    def own(self, n_tokens: int) -> int:
        """n of N: the tokens of a rank."""
        return -(-n_tokens // self.train.sequence_parallel)

    def queries(self, n_tokens: int) -> int:
        return round(self.data.query_share * self.own(n_tokens))

    def distilled(self, n_tokens: int) -> int:
        """The number of tokens after which the loss needs the target's distribution."""
        return 0 if self.train.loss == "cross_entropy" else self.queries(n_tokens)

    def target_pass(self, n_tokens: int) -> int:
        """The largest stage: projections, attention or feed-forward of one layer, or what ranks exchange at the end."""
        t, n, n_taught = self.target, self.own(n_tokens), self.distilled(n_tokens)
        single = n <= ROW_CHUNK  # then q, k and v are views of the projection's and the rotation's outputs; else copies
        held = (self.qkv + self.qk if single else self.qkv) * n
        made = (self.qkv + 3 * self.qk if single else 2 * self.qkv + self.qk) * n
        feed_forward = min(n, ROW_CHUNK) * ((0 if single else t.hidden_size) + feed_forward_numbers(t))
        attention, exchanged = self.heads * (1 if self.gpu else 2) * n, 0
        if n < n_tokens:
            attention += 2 * self.qkv * n
            exchanged = t.hidden_size * (n_tokens + n + n_taught) if n_taught or not self.is_block else 0
            exchanged = max(exchanged, self.kv * n_tokens if self.is_block else 0)
        largest = held + max(made, attention, self.heads * n + feed_forward, exchanged)
        return self.size * ((t.hidden_size + 3 * t.head_dim // 2) * n + largest)

    def seen(self, n_tokens: int) -> int:
        """What the draft reads of the target, and the tokens' embeddings."""
        d = self.target.hidden_size
        if not self.is_block:
            return self.size * d * (self.own(n_tokens) + self.distilled(n_tokens))
        views = self.train.sequence_parallel == 1 and n_tokens <= ROW_CHUNK  # see `target_pass`
        kv = self.qkv + self.qk if views else self.kv
        return self.size * ((kv + d) * n_tokens + d * self.distilled(n_tokens))

    def draft(self, n_tokens: int) -> tuple[int, int]:
        """What the draft keeps for its gradient, and what the largest step of its backward pass adds."""
        t, n, q = self.target, self.own(n_tokens), self.queries(n_tokens)
        d, size = t.hidden_size, self.size
        if not self.is_block:
            kept = 2 * self.norm + 1 if getattr(self.shape, "kind", "") == "linear_chain" else 2
            return size * kept * d * self.shape.n_heads * n, size * 4 * d * n
        per_query = self.qk + self.heads * (4 if self.gpu else 5) + 4 * t.intermediate_size
        per_query += ((3 + self.shape.final_norm) * self.norm + 3) * d
        subset = q < n_tokens  # the block's own keys and values of all tokens
        kept = (per_query + (d if subset else self.qkv)) * q
        kept += (self.norm * d + 3 * self.kv // 2) * n_tokens if subset else 0
        if not self.gpu:
            kept += self.masks(q, subset)
        top = size * 2 * q * (d + t.intermediate_size)
        if self.gpu:  # the flash kernel's gradients, when what the feed-forward kept is free again
            runs = -(-PROCESSORS // (self.train.pass_rows * t.n_heads)) if self.train.deterministic else 1
            by_head = 2 * self.heads * n if t.n_kv_heads < t.n_heads else 0
            flash = 4 * runs * self.heads * q + size * (2 * self.heads * q + self.kv * n + by_head)
            top = max(top, flash - size * 4 * t.intermediate_size * q)
        return size * kept, top

    def masks(self, n_queries: int, subset: bool) -> int:
        """Numbers in the masks that attention keeps on a CPU (kernels/chain_attention.py)."""
        length, window = self.data.seq_len, self.shape.window
        if subset:
            return n_queries * (min(length, QUERY_BLOCK + window) + length // 2)
        if length <= window + 1:
            return 0
        return self.train.pass_rows * BLOCK * (min(length, BLOCK) + min(length, BLOCK + window))

    def loss(self, n_labels: int) -> int:
        """The states' gradient, a restricted LM head, and a chunk's logits."""
        d, restricted, n_all = self.target.hidden_size, self.shape.draft_vocab_size, n_labels
        if not self.is_block:
            n_all *= self.shape.n_heads
        # The first step's objective and the last one's; the number of steps may not be known before the data.
        objectives = [self.train.distillation(step) for step in (0, (self.train.steps or sys.maxsize) - 1)]
        beside = max((BESIDE_DISTILLED[found[0]] for found in objectives if found), default=0)
        logits = loss_chunk(n_all, d, restricted or self.target.vocab_size, self.size, self.gpu, beside)
        return self.size * (n_all + (restricted or 0)) * d + logits

    def heldout(self, gathered: int) -> int:
        """One whole row without gradient: the larger of the target's pass and the draft's."""
        t, length = self.target, self.data.seq_len
        block = self.qkv + self.qk + 4 * self.heads + 3 * t.hidden_size + 4 * t.intermediate_size
        width = block if self.is_block else (self.shape.n_heads + 3) * t.hidden_size
        n = self.own(length)
        draft = self.seen(length) + self.size * t.hidden_size * length + max(self.size * width * n, self.loss(n))
        return max(gathered + self.target_pass(length), draft)

    def decoding(self, n_weights: int) -> int:
        """One prompt of the longest context, with a copy of the draft (train/evaluate.py)."""
        rows = max(self.decodes.contexts) + self.decodes.new_tokens + SLACK
        passes = pass_bytes(self.target, min(rows, prompt_rows("cuda" if self.gpu else "cpu")), self.dtype)
        return self.size * (n_weights + self.target.n_layers * self.kv * rows) + passes


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
