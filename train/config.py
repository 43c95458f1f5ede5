"""The one typed configuration of a training run: read, overridden, checked, printed whole.

A YAML file has flat sections, one dataclass each; `a.b=c` on the command line overrides. What DeepSpeed is told is
derived here and nowhere else. Not here: what the networks' own fields mean (models/drafts/), several stages in one file
(stages.py), how a mapping becomes dataclasses (typed.py).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.drafts.longspec import LongSpecConfig
from longdraft.models.drafts.medusa import MedusaConfig
from longdraft.models.drafts.tokenswift import TokenSwiftConfig
from longdraft.models.files import from_home
from longdraft.models.rope import RopeConfig
from longdraft.train.typed import build, lay_over, read_overrides, read_yaml, resolve

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CHOICES: dict[str, tuple[Any, ...]] = {
    "target.zero_stage": (0, 3),
    "target.loader": ("longdraft", "transformers"),
    "train.precision": tuple(DTYPES),
    "train.zero_stage": (1, 2, 3),
    "train.device": ("auto", "cuda", "cpu"),
    "train.loss": ("cross_entropy", "kl", "mix", "overlap", "acceptance"),
    "data.positions": ("plain", "anchor_offset"),
    "optimizer.name": ("adamw", "adamuon"),
    "log.wandb": ("auto", "online", "offline", "disabled"),
}
POSITIVE = (
    "target.max_positions", "data.seq_len", "data.max_position", "train.steps", "train.epochs", "train.global_batch",
    "train.micro_batch", "train.sequence_parallel", "train.save_every", "train.keep_checkpoints", "optimizer.peak_lr",
    "optimizer.eps", "optimizer.clip", "heldout.every", "heldout.rows", "heldout.choices", "decoding.prompts",
    "decoding.new_tokens", "log.every",
)  # fmt: skip
# Each with what is true of a valid value, and the rest of the message.
RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    **dict.fromkeys(POSITIVE, (lambda value: value > 0, " is not positive; give a value above 0")),
    "train.max_skipped": (lambda value: value >= 0, " is negative; give 0 or more"),
    "train.seed": (lambda value: 0 <= value < 2**63, " is out of range; give 0 to 2^63 - 1"),
    "optimizer.weight_decay": (lambda value: not value < 0, " is negative; give 0 or more"),  # NaN has its own message
    "optimizer.warmup_share": (lambda value: 0 <= value < 1, "; give a share from 0 to below 1"),
    "data.sinks": (lambda value: value >= 0, " is negative; give 0 or more, the paper's is 4"),
    "data.max_dropped_share": (lambda value: 0 <= value <= 1, " is no share; give 0 to 1"),
    "data.query_share": (lambda value: 0 < value <= 1, "; give a share above 0 and up to 1"),
    "decoding.every": (lambda value: value >= 0, " is negative; give a number of steps, or 0 for never"),
    "decoding.share": (lambda value: 0 < value <= 1, "; give a share above 0 and up to 1"),
}
# How long, and how long the warm-up: one of the two is given.
EITHER = {"train": ("steps", "epochs"), "optimizer": ("warmup_steps", "warmup_share")}
# The largest value that makes sense; of every other number, MAX_NUMBER.
MAXIMA = {
    "train.seed": 2**63 - 1,
    "train.epochs": 1e6,
    "optimizer.peak_lr": 1.0,  # of AdamW, which moves every weight by about so much a step
    "optimizer.eps": 1.0,
    "optimizer.clip": 1e9,
    "optimizer.weight_decay": 10.0,
    "draft.init_std": 10.0,
}
MAX_NUMBER = 2**31 - 1
# Of W&B.
NOT_IN_PROJECTS, MOST_OF_PROJECT = r"/\#?%:", 128
# First tokens of a piece whose positions stay, in LongSpec's paper.
SINKS = 4
# Numbers in DeepSpeed's buffer for sums over ranks, at most.
MAX_BUCKET = 500_000_000


@dataclass(frozen=True)
class TargetSection:
    """The frozen model: a Hugging Face folder or hub name, a .gguf file, or a bundled name (models/hf.py).
    `max_positions`: how many it takes, where its config.json says another number than it was trained for; None: what
    its RoPE with the scaling gives. `zero_stage`: 0 keeps a whole copy in each process, 3 shards it over them.
    `loader`: whose classes compute it, ours or transformers', which know more families."""

    path: str
    gguf_file: str | None = None
    max_positions: int | None = None
    zero_stage: int = 0
    loader: str = "longdraft"

    def __post_init__(self):
        object.__setattr__(self, "path", from_home(self.path))


@dataclass(frozen=True)
class TokenSwiftSection:
    """TokenSwift's heads; the fields after `start_from` are TokenSwiftConfig's. With `draft_vocab_size` the draft
    proposes the tokens alone that are most frequent in the training data (as of every method).
    `start_from`: a draft folder whose weights the training starts from (as of every method)."""

    method: str = "tokenswift"
    start_from: str | None = None
    n_heads: int = 3
    kind: str = "linear_chain"
    out_norm_init: str = "ones"
    init_std: float = 0.02
    draft_vocab_size: int | None = None

    def network(self, target: DecoderConfig) -> TokenSwiftConfig:
        return TokenSwiftConfig(target.hidden_size, target.rms_norm_eps, **_shape(self))


@dataclass(frozen=True)
class MedusaSection:
    """Medusa-1's heads; the fields after `start_from` are MedusaConfig's."""

    method: str = "medusa"
    start_from: str | None = None
    n_heads: int = 3
    init_std: float = 0.0
    draft_vocab_size: int | None = None

    def network(self, target: DecoderConfig) -> MedusaConfig:
        return MedusaConfig(target.hidden_size, **_shape(self))


@dataclass(frozen=True)
class LongSpecSection:
    """LongSpec's block; the fields after `start_from` are LongSpecConfig's."""

    method: str = "longspec"
    start_from: str | None = None
    window: int = 512
    noise: int = 5
    final_norm: bool = False
    warm_start: bool = False
    draft_vocab_size: int | None = None

    def network(self, target: DecoderConfig) -> LongSpecConfig:
        return LongSpecConfig.for_target(target, **_shape(self))


DraftSection = TokenSwiftSection | MedusaSection | LongSpecSection
DRAFT_SECTIONS = {kind().method: kind for kind in (TokenSwiftSection, MedusaSection, LongSpecSection)}
# Stands for any target where only a section's own fields are looked at.
_ANY_TARGET = DecoderConfig(1 << 40, 2, 2, 1, 1, 1, 2, 1e-6, 1 << 40, RopeConfig(2, 1 << 40))


def _shape(section: Any) -> dict[str, Any]:
    return {name: value for name, value in asdict(section).items() if name not in ("method", "start_from")}


@dataclass(frozen=True)
class DataSection:
    """`path`: a prepared folder with train/ and heldout/ (launch/prepare.py). `seq_len`: tokens a row, which must be
    the prepared folder's own.

    `positions`: plain, or anchor_offset (LongSpec, 3.2): of each document piece the first `sinks` positions stay, the
    others move on by a random offset, to at most `max_position`; `sinks` is 4 where it is not given. `query_share`: of
    each piece's tokens, in blocks, that the draft runs for; the target always reads all. It bounds the draft's memory
    at any length. `max_dropped_share`: of the documents, how many the preparation may have left out as bad or unfit
    (not for `--max-tokens`); above it, an error.
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
        elif self.positions == "plain" and self.sinks == SINKS:  # as earlier versions wrote it for any positions
            object.__setattr__(self, "sinks", None)


@dataclass(frozen=True)
class TrainSection:
    """`global_batch` rows make one step, whatever the number of ranks, in passes of `micro_batch` rows (the last one of
    what is left), which the ranks make in turns. `steps` or `epochs` says how long. `precision`: fp32, or bf16 with
    fp32 master weights; the target is loaded in the same. `zero_stage`: the draft's; `offload_optimizer` keeps the
    optimizer's state and step on the host. `sequence_parallel`: ranks that share one long row; the others are
    data-parallel.
    `loss`: cross_entropy of the text; kl, from the target's own distribution to the draft's; mix, of both, with the
    share `text_weight` of cross-entropy; overlap, -log of the sum of both distributions' minima; acceptance, -log of
    how often both choose the same token under the same noise (kernels/linear_distillation.py). The last two begin after
    `kl_steps` steps of kl. `level_weights`: how often each of LongSpec's noise shifts 1 to J is drawn, as often as
    serving reaches its level; None: all alike.
    `device`: auto takes the GPUs, and the CPU only where there is none; cuda and cpu say what is meant.
    `deterministic`: the same bytes again on the same hardware and number of ranks, on a GPU at some cost in speed.
    `max_skipped`: what has a loss (a pass) or a gradient (a step) that is no number is left out and counted; with more
    of them the run stops, a step later at most and before anything is logged or saved."""

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
        """Of the largest pass."""
        return min(self.micro_batch, self.global_batch)

    def distillation(self, step: int) -> tuple[str, float] | None:
        """The objective and `text_weight` of step 0, 1, ... (see `linear_distillation`); None for cross-entropy."""
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
    """`name`: adamw, or adamuon, which moves matrices by their momentum made orthogonal and the rest as adamw does
    (train/adamuon.py); its best rates are some three times as high, and the first of `betas` is of norms and biases
    alone, for its momentum of matrices is 0.95. The rate rises linearly over `warmup_steps` or
    `warmup_share` of the steps, then falls along a cosine to 0 at the last step. Weight decay leaves norms and biases
    alone. `clip`: largest norm of the gradient."""

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
    """Every `every` steps, and after the last, the loss on `rows` held-out rows, evenly spread; on about `choices` of
    their positions the draft is also compared with the target's own argmax."""

    every: int = 50
    rows: int = 16
    choices: int = 512


@dataclass(frozen=True)
class DecodingSection:
    """Every `every` steps (0: never), and after the last, real decoding with the current weights: of `prompts` held-out
    prompts of each length of `contexts`, `new_tokens` each at each of `temperatures` (train/evaluate.py). At most
    `share` of the training's time goes into it: what would take more is put off; only the last is made in any case."""

    every: int = 0
    prompts: int = 8
    contexts: tuple[int, ...] = ()
    new_tokens: int = 64
    temperatures: tuple[float, ...] = (0.0,)
    share: float = 0.1


@dataclass(frozen=True)
class LogSection:
    """Every `every` steps a line in the run's metrics.jsonl and in W&B. wandb: online, offline, disabled, or auto:
    online with a key in the environment or a login, else offline."""

    every: int = 1
    wandb: str = "auto"
    wandb_project: str = "longdraft"


@dataclass(frozen=True)
class Config:
    target: TargetSection
    data: DataSection
    train: TrainSection
    optimizer: OptimizerSection
    draft: DraftSection = field(default_factory=TokenSwiftSection)
    heldout: HeldoutSection = field(default_factory=HeldoutSection)
    decoding: DecodingSection = field(default_factory=DecodingSection)
    log: LogSection = field(default_factory=LogSection)

    def __post_init__(self):
        _check(self)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a YAML file of one run, applies overrides of the form `section.field=value` and resolves `${...}`.

    Raises:
        ValueError: the file is missing or no YAML, a key is unknown (the nearest known one is named), a value has the
            wrong type or is out of range, or overrides set both of two fields in EITHER.
    """
    layers = read_overrides(overrides)
    check_either(layers)
    return config_from_layers([read_layer(path), *layers])


def read_layer(path: str | Path) -> dict[str, Any]:
    """The sections that a YAML file gives, with `${...}` as written."""
    return OmegaConf.to_container(read_yaml(path), resolve=False)  # pyright: ignore[reportReturnType]


def config_from_layers(layers: Sequence[Mapping[str, Any]]) -> Config:
    """Sections each laid over those before them: who sets one of two fields in EITHER unsets the other."""
    raw = OmegaConf.create()
    for layer in layers:
        for section, pair in EITHER.items():
            given = _given(layer, section)
            if len(given) == 1:
                raw = lay_over(raw, {section: {name: None for name in pair if name not in given}})
        raw = lay_over(raw, layer)
    return config_from_dict(resolve(raw))


def check_either(layers: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError where overrides that stand side by side end with both of two fields in EITHER set."""
    raw = OmegaConf.create()
    for layer in layers:
        raw = lay_over(raw, layer)
    merged: Any = OmegaConf.to_container(raw, resolve=False)
    for section, (one, other) in EITHER.items():
        if len(_given(merged, section)) == 2:
            raise ValueError(f"{section}.{one}, {section}.{other}: both are given; set one of them")


def _given(layer: Mapping[str, Any], section: str) -> list[str]:
    """Those of a section's fields in EITHER that a layer sets."""
    values = layer.get(section)
    return [name for name in EITHER[section] if isinstance(values, Mapping) and values.get(name) is not None]


def config_from_dict(values: Any) -> Config:
    """The inverse of `to_dict`; the same errors as load_config."""
    return build(Config, values, {"draft": _draft_section})


def to_dict(config: Config) -> dict[str, Any]:
    """Plain dicts, lists and scalars: for JSON and W&B."""
    return _plain(asdict(config))


def to_flat_dict(config: Config) -> dict[str, Any]:
    """`to_dict` with keys `section.field`."""
    return {f"{section}.{name}": value for section, fields in to_dict(config).items() for name, value in fields.items()}


def to_yaml(config: Config) -> str:
    """For load_config to read again: what is `${` in a value is no reference."""
    return OmegaConf.to_yaml(OmegaConf.create(_plain(asdict(config), lambda text: text.replace("${", "\\${"))))


def _plain(value: Any, text: Callable[[str], str] = str) -> Any:
    """Tuples as lists, and strings as `text` gives them."""
    if isinstance(value, dict):
        return {key: _plain(inner, text) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner, text) for inner in value]
    return text(value) if isinstance(value, str) else value


def accumulation(config: Config, world_size: int) -> int:
    """Passes a rank makes in a step; the last is empty on some ranks where the step's do not divide among them.

    Raises:
        ValueError: the ranks do not divide into groups that share a row.
    """
    train = config.train
    if world_size % train.sequence_parallel:
        raise ValueError(
            f"train.sequence_parallel: {train.sequence_parallel} does not divide {world_size} ranks; set it to a "
            "divisor, or start another number of ranks"
        )
    return -(-train.global_batch // (train.micro_batch * (world_size // train.sequence_parallel)))


def empty_passes(config: Config, world_size: int) -> int:
    """Of a step's passes on all ranks (or groups of ranks that share a row), those that have no rows."""
    train = config.train
    readers = world_size // train.sequence_parallel
    return accumulation(config, world_size) * readers - -(-train.global_batch // train.micro_batch)


def check_positions(config: Config, target: str, limit: int) -> None:
    """Raises ValueError where rows or moved positions go beyond the target's `limit`."""
    for name, value in (("data.seq_len", config.data.seq_len), ("data.max_position", config.data.max_position or 0)):
        if value > limit:
            raise ValueError(
                f"{name}: {value}, but {target} has {limit} positions; stay within them, or set "
                "target.max_positions where its config.json says less than it was trained for"
            )


def resolved(config: Config, n_rows: int) -> Config:
    """The config with epochs and shares turned into steps, for a training split of `n_rows` rows.

    Raises:
        ValueError: that leaves less than one step, or no step behind the warm-up or behind `train.kl_steps`.
    """
    train, optimizer = config.train, config.optimizer
    steps = train.steps if train.steps is not None else int((train.epochs or 0) * n_rows / train.global_batch)
    if steps < 1:
        raise ValueError(
            f"train.epochs: {train.epochs} of {n_rows} rows are less than one step of train.global_batch = "
            f"{train.global_batch}; prepare more data, or make the batch smaller"
        )
    warmup = optimizer.warmup_steps
    if warmup is None:
        warmup = int((optimizer.warmup_share or 0) * steps)
    for name, value in (("optimizer.warmup_steps", warmup), ("train.kl_steps", train.kl_steps or 0)):
        if value >= steps:
            raise ValueError(f"{name}: {value} must be below the {steps} steps of the run")
    return replace(
        config,
        train=replace(train, steps=steps, epochs=None),
        optimizer=replace(optimizer, warmup_steps=warmup, warmup_share=None),
    )


def deepspeed_dict(config: Config, world_size: int, n_weights: int) -> dict[str, Any]:
    """What deepspeed.initialize gets for a draft of so many weights; the learning rate and the optimizer are set by
    train/deepspeed_engine.py."""
    bf16, passes = config.train.precision == "bf16", accumulation(config, world_size)
    # Not memory-efficient: that replaces F.linear in the whole process, also under the frozen target.
    zero: dict[str, Any] = {"stage": config.train.zero_stage, "memory_efficient_linear": False}
    # By default half a billion numbers, however few there are to sum.
    zero["reduce_bucket_size"] = min(n_weights, MAX_BUCKET)
    if config.train.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return {
        # As DeepSpeed counts: all passes full, and rows that ranks share on each of them. Only its product matters.
        "train_batch_size": config.train.micro_batch * passes * world_size,
        "train_micro_batch_size_per_gpu": config.train.micro_batch,
        "gradient_accumulation_steps": passes,
        "gradient_clipping": config.optimizer.clip,
        "bf16": {"enabled": bf16},
        # Passes are summed in fp32 too: ten bf16 passes would lose the small ones.
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        # torch's AdamW: DeepSpeed knows its own optimizers only, and those are compiled at the first launch.
        "zero_allow_untested_optimizer": True,
        # Sums of bf16 gradients over ranks would depend on their number far more than sums in fp32.
        "communication_data_type": "fp32",
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }


def _draft_section(values: Any) -> type:
    """The section of the method that it names; what is no section is refused by `build`."""
    method = values.get("method", "tokenswift") if isinstance(values, dict) else "tokenswift"
    if not isinstance(method, str) or method not in DRAFT_SECTIONS:
        raise ValueError(f"draft.method: {method!r} is unknown; choose one of {', '.join(DRAFT_SECTIONS)}")
    return DRAFT_SECTIONS[method]


def _check(config: Config) -> None:
    """Ranges and choices; what depends on the target or the data is checked where these are opened."""
    values = to_flat_dict(config)
    for name, known in CHOICES.items():
        if values[name] not in known:
            raise ValueError(f"{name}: {values[name]!r} is unknown; choose one of {', '.join(map(str, known))}")
    config.draft.network(_ANY_TARGET)  # its own checks, before anything is loaded
    for name, (fits, remedy) in RANGES.items():
        if values[name] is not None and not fits(values[name]):
            raise ValueError(f"{name}: {values[name]}{remedy}")
    for section, (one, other) in EITHER.items():
        names = f"{section}.{one}", f"{section}.{other}"
        if (values[names[0]] is None) == (values[names[1]] is None):
            given = "neither is" if values[names[0]] is None else "both are"
            raise ValueError(f"{', '.join(names)}: {given} given; set one of them")
    _check_training(config.train, config.optimizer)
    _check_loss(config.train, config.draft)
    _check_data(config.data, getattr(config.draft, "n_heads", None))
    _check_decoding(config.decoding)
    for name, value in values.items():
        for one in value if isinstance(value, list) else [value]:
            _check_value(name, one)
    if set(config.log.wandb_project) & set(NOT_IN_PROJECTS):
        raise ValueError(
            f"log.wandb_project: {config.log.wandb_project!r} has one of {NOT_IN_PROJECTS}; W&B takes none of them"
        )
    if len(config.log.wandb_project) > MOST_OF_PROJECT:
        raise ValueError(
            f"log.wandb_project: {config.log.wandb_project!r} has {len(config.log.wandb_project)} characters; give "
            f"{MOST_OF_PROJECT} at most, as W&B takes them"
        )


def _check_value(name: str, value: Any) -> None:
    """What holds for every field: numbers are finite and not absurd, names and paths are not empty."""
    if isinstance(value, str) and (not value.strip() or "\0" in value):
        raise ValueError(f"{name}: {value!r} names nothing; give a name or path, or leave the field out")
    if isinstance(value, (int, float)):
        limit = MAXIMA.get(name, MAX_NUMBER)
        if not -inf < value <= limit:
            raise ValueError(f"{name}: {value} is out of range; give a number of at most {limit:g}")


def _check_training(train: TrainSection, optimizer: OptimizerSection) -> None:
    if optimizer.warmup_steps is not None and not 0 <= optimizer.warmup_steps < (train.steps or inf):
        raise ValueError(
            f"optimizer.warmup_steps: {optimizer.warmup_steps} must be at least 0 and below train.steps = {train.steps}"
        )
    if not all(0 <= beta < 1 for beta in optimizer.betas):
        raise ValueError(f"optimizer.betas: {list(optimizer.betas)} must lie in [0, 1); the usual pair is [0.9, 0.999]")
    if optimizer.name == "adamuon" and (train.zero_stage == 3 or train.offload_optimizer):
        raise ValueError(
            f"optimizer.name: adamuon, but train.zero_stage = {train.zero_stage} and train.offload_optimizer = "
            f"{str(train.offload_optimizer).lower()}: it takes whole matrices, on the device; set 1 or 2 and false"
        )


def _check_loss(train: TrainSection, draft: DraftSection) -> None:
    for name, losses in (("text_weight", ("mix",)), ("kl_steps", ("overlap", "acceptance"))):
        if (getattr(train, name) is None) == (train.loss in losses):
            remedy = (
                f"leave it out, or set train.loss to {' or '.join(losses)}" if train.loss not in losses else "give it"
            )
            raise ValueError(f"train.{name}: {getattr(train, name)} with train.loss = {train.loss}; {remedy}")
    if train.text_weight is not None and not 0 < train.text_weight < 1:
        raise ValueError(f"train.text_weight: {train.text_weight}; give a share above 0 and below 1")
    if train.kl_steps is not None and not 0 <= train.kl_steps < (train.steps or inf):
        raise ValueError(f"train.kl_steps: {train.kl_steps}; give 0 or more, below train.steps = {train.steps}")
    if train.level_weights is None:
        return
    n_levels = draft.noise if isinstance(draft, LongSpecSection) else None
    if n_levels is None:
        raise ValueError(f"train.level_weights: {draft.method} has no noise shifts to draw; leave it out")
    weights = train.level_weights
    if len(weights) != n_levels or min(weights) < 0 or not sum(weights) < inf or not weights[0] > 0:
        raise ValueError(
            f"train.level_weights: {list(weights)}; give draft.noise = {n_levels} numbers of 0 or more, "
            "the first above 0"
        )


def _check_data(data: DataSection, n_heads: int | None) -> None:
    if n_heads is not None and data.seq_len <= n_heads + 1:
        raise ValueError(f"data.seq_len: {data.seq_len} tokens leave no label for draft.n_heads = {n_heads}")
    if data.positions == "anchor_offset" and (data.max_position is None or data.max_position < data.seq_len):
        raise ValueError(
            f"data.max_position: {data.max_position}, but anchor_offset needs how far positions may move, at least "
            f"data.seq_len = {data.seq_len}; 30000 in the paper, at most the target's own"
        )
    for name in ("max_position", "sinks"):
        if data.positions == "plain" and getattr(data, name) is not None:
            raise ValueError(f"data.{name}: plain positions do not move; set data.positions=anchor_offset, or leave it")


def _check_decoding(decoding: DecodingSection) -> None:
    if decoding.every and not decoding.contexts:
        raise ValueError(
            f"decoding.contexts: no length is given, but decoding.every = {decoding.every}; give those of the prompts, "
            "as [512, 2048]"
        )
    for name, values in (("contexts", decoding.contexts), ("temperatures", decoding.temperatures)):
        if len(set(values)) < len(values):
            raise ValueError(f"decoding.{name}: {list(values)} has one twice; give each once")
    if any(context < 1 for context in decoding.contexts):
        raise ValueError(f"decoding.contexts: {list(decoding.contexts)}; give lengths of at least 1 token")
    # The sampler's own limits (infer/sampling.py), checked before anything is loaded.
    if not decoding.temperatures or not all(t == 0 or 1e-6 <= t < inf for t in decoding.temperatures):
        raise ValueError(
            f"decoding.temperatures: {list(decoding.temperatures)}; give one or more of 0 (greedy) or a number above, "
            "from 1e-06 on"
        )
