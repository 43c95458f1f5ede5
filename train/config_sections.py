"""The sections of a training config: their fields, defaults and meaning.

Not here: which values are valid (config_checks.py), reading and overriding (config.py), what the networks' own fields
mean (models/drafts/).
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.drafts.longspec import LongSpecConfig
from longdraft.models.drafts.medusa import MedusaConfig
from longdraft.models.drafts.tokenswift import TokenSwiftConfig
from longdraft.models.files import from_home

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# The first tokens of a piece that keep their positions, in LongSpec's paper.
SINKS = 4


@dataclass(frozen=True)
class TargetSection:
    """The frozen model: a Hugging Face folder or hub name, a .gguf file, or a bundled name (models/hf.py).

    `max_positions`: the number of positions that it was trained for, where its config.json says otherwise. None: what
    its RoPE with the scaling gives. `zero_stage`: 0 keeps a whole copy in each process, 3 shards it over them.
    `loader`: whose classes compute it, ours or those of transformers, which know more families.
    """

    path: str
    gguf_file: str | None = None
    max_positions: int | None = None
    zero_stage: int = 0
    loader: str = "longdraft"

    def __post_init__(self):
        object.__setattr__(self, "path", from_home(self.path))


@dataclass(frozen=True)
class TokenSwiftSection:
    """TokenSwift's heads. The fields after `start_from` are those of TokenSwiftConfig.

    For every method: `start_from` is a draft folder whose weights training starts from, and with `draft_vocab_size` the
    draft proposes only that many tokens, the most frequent ones of the training data.
    """

    method: str = "tokenswift"
    start_from: str | None = None
    n_heads: int = 3
    kind: str = "linear_chain"
    out_norm_init: str = "ones"
    init_std: float = 0.02
    draft_vocab_size: int | None = None

    def network(self, target: DecoderConfig) -> TokenSwiftConfig:
        return TokenSwiftConfig(target.hidden_size, target.rms_norm_eps, **_network_fields(self))


@dataclass(frozen=True)
class MedusaSection:
    """Medusa-1's heads. The fields after `start_from` are those of MedusaConfig."""

    method: str = "medusa"
    start_from: str | None = None
    n_heads: int = 3
    init_std: float = 0.0
    draft_vocab_size: int | None = None

    def network(self, target: DecoderConfig) -> MedusaConfig:
        return MedusaConfig(target.hidden_size, **_network_fields(self))


@dataclass(frozen=True)
class LongSpecSection:
    """LongSpec's block. The fields after `start_from` are those of LongSpecConfig."""

    method: str = "longspec"
    start_from: str | None = None
    window: int = 512
    noise: int = 5
    final_norm: bool = False
    warm_start: bool = False
    draft_vocab_size: int | None = None

    def network(self, target: DecoderConfig) -> LongSpecConfig:
        return LongSpecConfig.for_target(target, **_network_fields(self))


DraftSection = TokenSwiftSection | MedusaSection | LongSpecSection
DRAFT_SECTIONS = {section().method: section for section in (TokenSwiftSection, MedusaSection, LongSpecSection)}


def _network_fields(section: Any) -> dict[str, Any]:
    return {name: value for name, value in asdict(section).items() if name not in ("method", "start_from")}


@dataclass(frozen=True)
class DataSection:
    """`path`: a prepared folder with train/ and heldout/ (launch/prepare.py). `seq_len`: tokens a row, which must be
    the prepared folder's own.

    `positions`: plain, or anchor_offset (LongSpec, 3.2), where the first `sinks` positions of each document piece stay
    (4 by default) and the others move on by a random offset, to at most `max_position`.
    `query_share`: the share of each piece's tokens, in blocks, that the draft runs for, which bounds its memory at any
    length. The target always reads all tokens.
    `max_dropped_share`: the largest share of documents that the preparation may have left out as bad or unfit (those
    left out by `--max-tokens` do not count). Above it, training is refused.
    """

    path: str
    seq_len: int
    positions: str = "plain"
    max_position: int | None = None
    sinks: int | None = None
    query_share: float = 1.0
    max_dropped_share: float = 0.5

    def __post_init__(self):
        object.__setattr__(self, "path", from_home(self.path))
        if self.positions == "anchor_offset" and self.sinks is None:
            object.__setattr__(self, "sinks", SINKS)
        elif self.positions == "plain" and self.sinks == SINKS:  # as the configs of shipped drafts have it
            object.__setattr__(self, "sinks", None)


@dataclass(frozen=True)
class TrainSection:
    """One step takes `global_batch` rows, for any number of ranks, in passes of `micro_batch` rows (the last pass takes
    what is left) that are dealt to the ranks in turn. Either `steps` or `epochs` says how long to train.

    `precision`: fp32, or bf16 with fp32 master weights; the target is loaded in the same precision.
    `zero_stage`: the draft's. `offload_optimizer` keeps the optimizer's state and step on the host.
    `sequence_parallel`: the number of ranks that share one long row; beyond that, ranks are data-parallel.
    `device`: auto takes the GPUs, and the CPU only where there is none; cuda and cpu insist.
    `deterministic`: the same bytes again on the same hardware and number of ranks, on a GPU at some cost in speed.
    `max_skipped`: a pass whose loss, or a step whose gradient, is not a number is left out and counted. With more of
    them the run stops, at most a step later and before anything is logged or saved.

    `loss`: cross_entropy of the text; kl, from the target's own distribution to the draft's; mix, both, with
    cross-entropy weighted by `text_weight`; overlap, -log of the sum of min(p, q) over both distributions; acceptance,
    -log of how often both choose the same token under the same noise (kernels/linear_distillation.py). The last two
    begin after `kl_steps` steps of kl.
    `level_weights`: how often each of LongSpec's noise shifts 1 to J is drawn, best as often as serving reaches its
    level. None: all equally often.
    """

    run_dir: str
    global_batch: int
    micro_batch: int
    precision: str
    loss: str = "cross_entropy"
    text_weight: float | None = None
    kl_steps: int | None = None
    level_weights: tuple[float, ...] | None = None
    steps: int | None = None
    epochs: float | None = None
    zero_stage: int = 1
    offload_optimizer: bool = False
    sequence_parallel: int = 1
    seed: int = 0
    device: str = "auto"
    deterministic: bool = False
    save_every: int = 50
    keep_checkpoints: int = 2
    max_skipped: int = 10

    def __post_init__(self):
        object.__setattr__(self, "run_dir", from_home(self.run_dir))

    @property
    def pass_rows(self) -> int:
        """Rows of the largest pass."""
        return min(self.micro_batch, self.global_batch)

    def distillation(self, step: int) -> tuple[str, float] | None:
        """`objective` and `text_weight` of `linear_distillation` in step 0, 1, ...; None for cross-entropy."""
        if self.loss == "cross_entropy":
            return None
        is_kl = self.loss in ("kl", "mix") or step < (self.kl_steps or 0)
        return "kl" if is_kl else self.loss, self.text_weight or 0.0

    @property
    def n_steps(self) -> int:
        """`steps` of a resolved config."""
        assert self.steps is not None, "the config is not resolved"
        return self.steps


@dataclass(frozen=True)
class OptimizerSection:
    """`name`: adamw, or adamuon, which moves matrices by their orthogonalised momentum and everything else as adamw
    does (train/adamuon.py). AdaMuon's best rates are about three times as high; its momentum of matrices is 0.95, so
    the first of `betas` applies to norms and biases alone.

    The rate rises linearly over `warmup_steps`, or `warmup_share` of the steps, then falls along a cosine to 0 at the
    last step. Weight decay leaves norms and biases alone. `clip`: the largest norm of the gradient.
    """

    peak_lr: float
    name: str = "adamw"
    warmup_steps: int | None = None
    warmup_share: float | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0


@dataclass(frozen=True)
class HeldoutSection:
    """Every `every` steps, and after the last one, measure the loss on `rows` held-out rows, evenly spread. At about
    `choices` of their positions the draft is also compared with the target's own argmax."""

    every: int = 50
    rows: int = 16
    choices: int = 512


@dataclass(frozen=True)
class DecodingSection:
    """Every `every` steps (0: never), and after the last one, decode for real with the current weights: `prompts`
    held-out prompts of each length in `contexts`, each continued by `new_tokens` tokens at each of `temperatures`
    (train/evaluate.py). Decoding takes at most `share` of the training's time: what would exceed it is put off, except
    after the last step."""

    every: int = 0
    prompts: int = 8
    contexts: tuple[int, ...] = ()
    new_tokens: int = 64
    temperatures: tuple[float, ...] = (0.0,)
    share: float = 0.1


@dataclass(frozen=True)
class LogSection:
    """Every `every` steps, write a line to the run's metrics.jsonl and to W&B. `wandb`: online, offline, disabled, or
    auto, which is online with a key in the environment or a login, else offline."""

    every: int = 1
    wandb: str = "auto"
    wandb_project: str = "longdraft"
