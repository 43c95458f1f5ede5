"""The memory that a run needs, before anything is loaded: bytes on each rank's device, by what holds them and when.

A step's peak is the largest of a few moments, each of which adds to what is there all the time. What is counted is what
the code allocates: models/decoder.py in the target's pass, models/drafts/ in the draft's, kernels/ for attention and
loss, estimate_zero.py for DeepSpeed. On a CPU in fp32 this is measured (tests/train/test_memory.py). For a GPU it is
arithmetic: bf16 with flash attention, fused norms and the loss's Triton kernel, without the allocator's fragmentation.
Why not a step under PyTorch's fake tensors: they have no CUDA without a CUDA build, DeepSpeed's optimizers do not run
on them, and the sizes of some tensors of a pass follow from values. Not here: operations (estimate_operations.py), what
reading files takes while the target is loaded.
Shapes: N tokens of a pass, end to end; n of them a rank's where ranks share rows; Q queries of the draft, M labels of a
part, L tokens of a row; D hidden, F = H d the query heads' width, V vocabulary, E draft vocabulary.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from longdraft.kernels.causal_attention import BLOCK
from longdraft.kernels.linear_cross_entropy import rows_per_block, rows_per_chunk
from longdraft.kernels.linear_distillation import block_rows
from longdraft.kernels.segment_attention import MOST_COPIES
from longdraft.models.decoder import Decoder
from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.draft_folder import DRAFTS
from longdraft.models.drafts.longspec import LongSpecConfig
from longdraft.models.drafts.tokenswift import TokenSwiftConfig
from longdraft.models.footprint import feed_forward_numbers, pass_bytes
from longdraft.models.passes import prompt_rows
from longdraft.train.config import DTYPES, Config
from longdraft.train.estimate_zero import DraftStates, draft_states
from longdraft.train.methods.base import QUERY_BLOCK
from longdraft.train.sequence_parallel import check_heads
from longdraft.train.teacher import ROW_CHUNK

MIB = 2**20
# What a process has beside tensors. On a CPU, after the imports: the tokenizer, libraries' buffers, freed memory that
# the allocator keeps (110 to 132 MiB with SmolLM2). On a GPU: CUDA's context, NCCL, cuBLAS workspaces; a guess.
PROCESS_CPU, PROCESS_GPU = 120 * MIB, 1536 * MIB
# Bytes beside each logit that a CPU's loss works on while it counts ranks: one fp32 value and one bool.
BESIDE_LOGIT = 5
# The same for distillation, in fp32 values (kernels/linear_distillation.py).
BESIDE_DISTILLED = {"kl": 6, "overlap": 7, "acceptance": 13}
# Multiprocessors of a GPU, on which some buffers depend: an H100's.
PROCESSORS = 132
# Rows of the cache beyond the text, when decoding.
SLACK = 256


@dataclass(frozen=True)
class Estimate:
    """Bytes on one rank's device, by what holds them: `kept` all the time, and what each of `moments` adds. `process`:
    bytes beside all tensors. `host`: what the optimizer of a GPU keeps on the host."""

    kept: dict[str, int]
    moments: dict[str, dict[str, int]]
    process: int
    host: int

    @property
    def peak(self) -> tuple[str, int]:
        """The largest moment, and the bytes of everything that is there then."""
        name = max(self.moments, key=lambda name: sum(self.moments[name].values()))
        return name, self.process + sum(self.kept.values()) + sum(self.moments[name].values())


def estimate(config: Config, target: DecoderConfig, n_ranks: int, gpu: bool) -> Estimate:
    """The memory of one of `n_ranks` ranks, where every row is full and a single piece.

    Args:
        gpu: a rank is a GPU; else it is a process on a CPU.
    Raises ValueError where that number of ranks cannot share rows.
    """
    passes = config.train.n_passes(n_ranks)
    check_heads(target, config.train.sequence_parallel)
    sizes = _Sizes(config, target, gpu)
    states = sizes.states(n_ranks)
    between = {"gradients so far": states.between if passes > 1 else 0}
    weights, gathered = sizes.target_weights(n_ranks)
    n_tokens = config.train.pass_rows * config.data.seq_len
    seen, kept, top, loss = sizes.seen(n_tokens), *sizes.draft(n_tokens)
    whole = {"whole weights": states.forward}
    moments = {
        "target's pass": gathered | sizes.target_pass(n_tokens) | between,
        "draft's pass and loss": seen | kept | whole | loss | between,
        "draft's backward pass": seen | kept | {"gradients of activations": top, "gradients": states.backward},
        "sums over ranks, and the step": seen | {"gradients": states.update},
        "held-out row": sizes.heldout(gathered) | whole,
    }
    if attention := sizes.flash_backward(n_tokens):
        activations = kept["draft's activations"] - sizes.feed_forward(n_tokens)
        moments["backward pass of its attention"] = seen | {"draft's activations": activations} | attention
        moments["backward pass of its attention"]["gradients"] = states.backward
    if config.decoding.every:
        moments["decoding"] = gathered | sizes.decoding()
    host = {"optimizer": states.host} if not gpu and states.host else {}
    moments = {name: {part: n for part, n in parts.items() if n} for name, parts in moments.items()}
    return Estimate(
        {"target's weights": weights} | states.kept | host,
        moments,
        PROCESS_GPU if gpu else PROCESS_CPU,
        states.host if gpu else 0,
    )


class _Sizes:
    """The sizes of a run's tensors: in bytes, or in numbers where a method says so."""

    def __init__(self, config: Config, target: DecoderConfig, gpu: bool):
        self.config, self.target, self.gpu = config, target, gpu
        self.dtype = DTYPES[config.train.precision]
        self.size = self.dtype.itemsize
        self.shape: Any = config.draft.network(target)
        with torch.device("meta"):
            draft = DRAFTS[config.draft.method][1](self.shape)
        self.draft_sizes = [parameter.numel() for parameter in draft.parameters()]
        t, d = target, target.head_dim
        self.heads, self.qk, self.kv = t.n_heads * d, (t.n_heads + t.n_kv_heads) * d, 2 * t.n_kv_heads * d
        self.qkv = self.heads + self.kv
        self.norm = 1 if gpu else 2  # copies that a norm keeps for its gradient: on a CPU also before its weight

    def own(self, n_tokens: int) -> int:
        """n of N: the tokens of a rank."""
        return -(-n_tokens // self.config.train.sequence_parallel)

    def states(self, n_ranks: int) -> DraftStates:
        train = self.config.train
        return draft_states(
            sum(self.draft_sizes), max(self.draft_sizes),
            bf16=train.precision == "bf16", stage=train.zero_stage, offload=train.offload_optimizer,
            n_ranks=n_ranks, gpu=self.gpu, adamuon=self.config.optimizer.name == "adamuon",
        )  # fmt: skip

    def target_weights(self, n_ranks: int) -> tuple[int, dict[str, int]]:
        """What is there all the time, and what a pass gathers of a sharded target: a layer and the next one."""
        with torch.device("meta"):
            model = Decoder(self.target)
        whole, of_layers = _count(model), [_count(layer) for layer in model.layers]
        if self.config.target.zero_stage != 3:
            return self.size * whole, {}
        layers, layer = sum(of_layers), max(of_layers)
        return round(self.size * (whole - layers + layers / n_ranks)), {"gathered layers": 2 * self.size * layer}

    def target_pass(self, n_tokens: int) -> dict[str, int]:
        """The largest stage of the pass: projections, attention or feed-forward of one layer, or the exchange of what
        the ranks computed."""
        t, n = self.target, self.own(n_tokens)
        shared = n < n_tokens
        # In a pass of one chunk, q, k and v are views of the projection's and the rotation's outputs; else copies.
        single = n <= ROW_CHUNK
        held = self.qkv + self.qk if single else self.qkv
        made = self.qkv + 3 * self.qk if single else 2 * self.qkv + self.qk
        exchanged = 2 * self.qkv if shared else 0
        stages = [
            {"q, k, v": (held + made) * n},  # the previous layer's are still there
            {"q, k, v": held * n, "attention": (self.heads * (1 if self.gpu else 2) + exchanged) * n},
            {"q, k, v": held * n} | self._finish(n, single),
        ]
        n_distilled, block = self._distilled(n_tokens), isinstance(self.shape, LongSpecConfig)
        if shared:  # after the layers, a copy of each rank's results is gathered on all ranks
            left = {"q, k, v": (held if single else self.kv) * n} if block else {"target's states": t.hidden_size * n}
            if n_distilled:
                stages.append(left | {"states of all ranks": t.hidden_size * (n_tokens + n + n_distilled)})
            if block:
                stages.append(left | {"keys and values of all ranks": self.kv * n_tokens + self.kv // 2 * n})
        elif block and n_distilled > 0 and (n_distilled < n or self.config.train.pass_rows > 1):
            # The last layer goes on with copies of the tokens that the distillation needs, instead of all tokens.
            copies = {"q, k, v": held * n, "rows with a loss": (self.heads + 2 * t.head_dim) * n_distilled}
            stages.append(copies | {"attention": self.heads * (1 if self.gpu else 2) * n_distilled})
            stages.append(copies | self._finish(n_distilled, single))
        largest = max(stages, key=lambda stage: sum(stage.values()))
        base = {"hidden states": t.hidden_size * n, "positions": 3 * t.head_dim * n // 2}
        return self._bytes(base | largest)

    def _finish(self, n: int, single: bool) -> dict[str, int]:
        """Numbers in the rest of a layer, for n tokens: attention's output, and the feed-forward's normed input, gate,
        up, and their product. With several chunks, a chunk also has a residual stream of its own."""
        t = self.target
        width = (0 if single else 1) * t.hidden_size + feed_forward_numbers(t)
        return {"attention": self.heads * n, "feed-forward": min(n, ROW_CHUNK) * width}

    def _distilled(self, n_tokens: int) -> int:
        """The number of tokens after which the loss needs the target's distribution."""
        return 0 if self.config.train.loss == "cross_entropy" else self._queries(n_tokens)

    def seen(self, n_tokens: int) -> dict[str, int]:
        """What the draft reads of the target, and the tokens' embeddings."""
        t = self.target
        taught = self._bytes({"target's states of the loss": t.hidden_size * self._distilled(n_tokens)})
        if not isinstance(self.shape, LongSpecConfig):
            return taught | self._bytes({"target's states": t.hidden_size * self.own(n_tokens)})
        whole = self.config.train.sequence_parallel == 1 and n_tokens <= ROW_CHUNK  # see `target_pass`
        kv = (self.qkv + self.qk if whole else self.kv) * n_tokens
        return taught | self._bytes({"last keys and values": kv, "embeddings": t.hidden_size * n_tokens})

    def draft(self, n_tokens: int) -> tuple[dict[str, int], int, dict[str, int]]:
        """What the draft keeps for its gradient, what the first steps of its backward pass add, and what the loss
        adds."""
        d = self.target.hidden_size
        n, n_queries = self.own(n_tokens), self._queries(n_tokens)
        if isinstance(self.shape, LongSpecConfig):
            kept, n_parts = self._longspec(n_tokens, n_queries), 1
            top = n_queries * (2 * d + 2 * self.target.intermediate_size)
        else:
            kept, n_parts = {"draft's activations": self._head() * self.shape.n_heads * n}, self.shape.n_heads
            top = 4 * d * n
        return self._bytes(kept), self.size * top, self._loss("states' gradient", n_queries, n_parts)

    def _longspec(self, n_tokens: int, n_queries: int) -> dict[str, int]:
        t, n_all = self.target, 0
        subset = n_queries < n_tokens
        per_query = self.qk + t.hidden_size if subset else self.qkv + self.qk
        if subset:  # the block's own keys and values of all tokens
            n_all = self.norm * t.hidden_size + self.kv + self.kv // 2
        norms = 3 + self.shape.final_norm
        outputs = self.heads * (3 if self.gpu else 4)
        per_query += (norms * self.norm + 3) * t.hidden_size + self.heads + outputs + 4 * t.intermediate_size
        masks = 0 if self.gpu else self._masks(n_queries, subset)
        return {"draft's activations": n_all * n_tokens + per_query * n_queries, "attention masks": masks}

    def feed_forward(self, n_tokens: int) -> int:
        """Bytes that LongSpec's feed-forward keeps; they are free again when its attention's gradient is computed."""
        return self.size * 4 * self.target.intermediate_size * self._queries(n_tokens)

    def flash_backward(self, n_tokens: int) -> dict[str, int]:
        """What the flash kernel allocates on a GPU in the backward pass of LongSpec's self-attention, with the
        gradient of its output. The queries' gradient is also there in fp32, in deterministic order once for each run
        of blocks; those of keys and values also once for each query head, where heads share them. The
        cross-attention adds nothing: its keys are frozen, and its queries' gradient is computed in place
        (kernels/triton/segment_attention.py)."""
        if not (self.gpu and isinstance(self.shape, LongSpecConfig)):
            return {}
        t, train, n_queries = self.target, self.config.train, self._queries(n_tokens)
        n_keys = self.own(n_tokens)
        if n_queries < n_keys:  # each run of queries has a copy of the keys that it reads
            n_keys = min(n_queries * (QUERY_BLOCK + self.shape.window) // QUERY_BLOCK, MOST_COPIES * n_keys)
        runs = -(-PROCESSORS // (train.pass_rows * t.n_heads)) if train.deterministic else 1
        heads = 2 * n_keys * self.heads if t.n_kv_heads < t.n_heads else 0
        gradients = self._bytes(
            {"gradients of q, k, v": 2 * self.heads * n_queries + self.kv * n_keys, "by head": heads}
        )
        return {"queries' gradient in fp32": runs * 4 * self.heads * n_queries} | gradients

    def _queries(self, n_tokens: int) -> int:
        return round(self.config.data.query_share * self.own(n_tokens))

    def _masks(self, n_queries: int, subset: bool) -> int:
        """Numbers in the masks that attention keeps on a CPU (kernels/causal_attention.py)."""
        length, window = self.config.data.seq_len, self.shape.window
        if subset:
            return n_queries * (min(length, QUERY_BLOCK + window) + length // 2)
        if length <= window + 1:
            return 0
        return self.config.train.pass_rows * BLOCK * (min(length, BLOCK) + min(length, BLOCK + window))

    def _head(self) -> int:
        """Numbers that one head keeps for each token."""
        d = self.target.hidden_size
        linear = isinstance(self.shape, TokenSwiftConfig) and self.shape.kind == "linear_chain"
        return (2 * self.norm + 1) * d if linear else 2 * d

    def _loss(self, name: str, n_labels: int, n_parts: int) -> dict[str, int]:
        """A tensor the size of the labels' states, called `name`; a restricted LM head; a chunk's logits."""
        d, restricted = self.target.hidden_size, self.shape.draft_vocab_size
        n_all, n_words = n_parts * n_labels, restricted or self.target.vocab_size
        parts = self._bytes({name: n_all * d, "LM head": (restricted or 0) * d})
        train = self.config.train
        # The first step's objective and the last one's; the number of steps may not be known before the data.
        losses = train.distillation(0), train.distillation((train.steps or sys.maxsize) - 1)
        beside = max((BESIDE_DISTILLED[objective] for objective, _ in filter(None, losses)), default=0)
        return parts | {"logits": loss_chunk(n_all, d, n_words, self.size, self.gpu, beside)}

    def heldout(self, gathered: Mapping[str, int]) -> dict[str, int]:
        """One whole row without gradient: the larger of the target's pass and the draft's."""
        t, length = self.target, self.config.data.seq_len
        n = self.own(length)
        first = dict(gathered) | self.target_pass(length)
        if isinstance(self.shape, LongSpecConfig):
            n_parts, block = 1, self.qkv + self.qk + 4 * self.heads + 3 * t.hidden_size + 4 * t.intermediate_size
        else:
            n_parts, block = self.shape.n_heads, (self.shape.n_heads + 3) * t.hidden_size
        second = self.seen(length) | self._bytes({"post-norm states": t.hidden_size * length})
        loss = self._loss("draft's states", n, n_parts)
        inner = max({"draft's activations": self.size * block * n}, loss, key=lambda parts: sum(parts.values()))
        return max(first, second | inner, key=lambda parts: sum(parts.values()))

    def decoding(self) -> dict[str, int]:
        """One prompt of the longest context, with a copy of the draft (train/evaluate.py)."""
        t, section = self.target, self.config.decoding
        rows = max(section.contexts) + section.new_tokens + SLACK
        stored = self._bytes({"draft's copy": sum(self.draft_sizes), "KV cache": t.n_layers * self.kv * rows})
        return stored | {"passes": pass_bytes(t, min(rows, prompt_rows("cuda" if self.gpu else "cpu")), self.dtype)}

    def _bytes(self, numbers: dict[str, int]) -> dict[str, int]:
        return {name: self.size * n for name, n in numbers.items()}


def loss_chunk(n_labels: int, hidden_size: int, n_words: int, size: int, gpu: bool, distilled: int = 0) -> int:
    """Bytes of one chunk in the loss over the labels of all parts, with ranks counted: states, logits, and what is
    computed from them (kernels/linear_cross_entropy.py). A CPU works on blocks of a chunk, which it converts from bf16
    to fp32. `distilled`: fp32 values beside each pair of logits in a distillation; else 0."""
    if distilled:
        rows = min(n_labels, rows_per_chunk(n_words, 2 * size, gpu))
        numbers = 4 * (distilled + (2 if size == 2 else 0))
        return rows * (2 * n_words + hidden_size) * size + min(rows, block_rows(n_words, gpu)) * n_words * numbers
    rows = min(n_labels, rows_per_chunk(n_words, size, gpu))
    chunk = rows * (n_words + hidden_size) * size
    if gpu:
        return chunk
    return chunk + min(rows, rows_per_block(n_words)) * n_words * (BESIDE_LOGIT + (4 if size == 2 else 0))


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
