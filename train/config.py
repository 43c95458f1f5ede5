"""The one typed configuration of a training run: read, overridden, checked, printed whole.

A YAML file has flat sections, one dataclass each; `a.b=c` on the command line overrides. What DeepSpeed is told is
derived here and nowhere else. Not here: what the heads' own fields mean (models/drafts/tokenswift.py).
"""

import difflib
import types
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from longdraft.models.drafts.tokenswift import TokenSwiftConfig

PRECISIONS = ("fp32", "bf16")
ZERO_STAGES = (1, 2, 3)
WANDB_MODES = ("auto", "online", "offline", "disabled")
METHODS = ("tokenswift",)


@dataclass(frozen=True)
class TargetSection:
    """The frozen model: a Hugging Face folder or hub name, a .gguf file, or a bundled name (models/hf.py)."""

    path: str
    gguf_file: str | None = None


@dataclass(frozen=True)
class DraftSection:
    """What is trained; the fields after `method` are TokenSwiftConfig's."""

    method: str = "tokenswift"
    n_heads: int = 3
    kind: str = "linear_chain"
    out_norm_init: str = "ones"
    init_std: float = 0.02


@dataclass(frozen=True)
class DataSection:
    """`path`: a prepared folder with train/ and heldout/ (launch/prepare.py). `seq_len`: tokens a row, which must be
    the prepared folder's own."""

    path: str
    seq_len: int


@dataclass(frozen=True)
class TrainSection:
    """`global_batch` rows make one step, whatever the number of ranks: micro_batch rows a pass, ranks and accumulation
    multiply to it. `precision`: fp32, or bf16 with fp32 master weights; the target is loaded in the same.
    `deterministic`: the same bytes again on the same hardware and number of ranks, on a GPU at some cost in speed."""

    run_dir: str
    steps: int
    global_batch: int
    micro_batch: int
    precision: str
    zero_stage: int = 1
    seed: int = 0
    deterministic: bool = False
    save_every: int = 50
    keep_checkpoints: int = 2


@dataclass(frozen=True)
class OptimizerSection:
    """AdamW; the rate rises linearly over `warmup_steps`, then falls along a cosine to 0 at the last step. Weight decay
    leaves norms and biases alone. `clip`: largest norm of the gradient."""

    peak_lr: float
    warmup_steps: int
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0


@dataclass(frozen=True)
class HeldoutSection:
    """Every `every` steps, and after the last, the loss on `rows` held-out rows, evenly spread; on about `choices` of
    their positions the heads are also compared with the target's own argmax."""

    every: int = 50
    rows: int = 16
    choices: int = 512


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
    draft: DraftSection = field(default_factory=DraftSection)
    heldout: HeldoutSection = field(default_factory=HeldoutSection)
    log: LogSection = field(default_factory=LogSection)

    def __post_init__(self):
        _check(self)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a YAML file and applies overrides of the form `section.field=value`.

    Raises:
        ValueError: the file is missing or no YAML, a key is unknown (the nearest known one is named), a value has the
            wrong type or is out of range.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"config: no file {path}; give one of the YAML files in configs/")
    try:
        raw = OmegaConf.load(path)
        for override in overrides:
            if "=" not in override or override.startswith("-"):
                raise ValueError(f"override: {override!r} has not the form section.field=value, as train.steps=100")
        raw = OmegaConf.merge(raw, OmegaConf.from_dotlist(list(overrides)))
        values = OmegaConf.to_container(raw, resolve=False)
    except (OmegaConfBaseException, YAMLError) as error:
        raise ValueError(f"config: {path} cannot be read: {error}") from error
    return config_from_dict(values)


def config_from_dict(values: Any) -> Config:
    """The inverse of `to_dict`; the same errors as load_config."""
    return _build(Config, values, "")


def to_dict(config: Config) -> dict[str, Any]:
    """Plain dicts, lists and scalars: for YAML, JSON and W&B."""
    return OmegaConf.to_container(OmegaConf.create(asdict(config)))  # pyright: ignore[reportReturnType]


def to_yaml(config: Config) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(asdict(config)))


def accumulation(config: Config, world_size: int) -> int:
    """Passes a rank makes in a step.

    Raises:
        ValueError: global_batch is no multiple of micro_batch x ranks.
    """
    train = config.train
    rows = train.micro_batch * world_size
    if train.global_batch % rows:
        raise ValueError(
            f"train.global_batch: {train.global_batch} rows do not divide into {world_size} ranks x micro_batch "
            f"{train.micro_batch}; set it to a multiple of {rows}, or change train.micro_batch"
        )
    return train.global_batch // rows


def heads_config(config: Config, hidden_size: int, rms_norm_eps: float) -> TokenSwiftConfig:
    """The network that `draft` describes, for a target of this width."""
    shape = {name: value for name, value in asdict(config.draft).items() if name != "method"}
    return TokenSwiftConfig(hidden_size=hidden_size, rms_norm_eps=rms_norm_eps, **shape)


def deepspeed_dict(config: Config, world_size: int) -> dict[str, Any]:
    """What deepspeed.initialize gets; the learning rate and the optimizer are set by train/engine.py."""
    bf16 = config.train.precision == "bf16"
    return {
        "train_batch_size": config.train.global_batch,
        "train_micro_batch_size_per_gpu": config.train.micro_batch,
        "gradient_accumulation_steps": accumulation(config, world_size),
        "gradient_clipping": config.optimizer.clip,
        "bf16": {"enabled": bf16},
        # Passes are summed in fp32 too: ten bf16 passes would lose the small ones.
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": config.train.zero_stage},
        # torch's AdamW: DeepSpeed knows its own optimizers only, and those are compiled at the first launch.
        "zero_allow_untested_optimizer": True,
        # Sums of bf16 gradients over ranks would depend on their number far more than sums in fp32.
        "communication_data_type": "fp32",
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }


def _build(kind: Any, values: Any, where: str) -> Any:
    """A dataclass from a mapping, recursively, strict about keys and types."""
    if not isinstance(values, dict):
        raise ValueError(f"{where or 'config'}: expected a section of fields, got {values!r}")
    known = {f.name: f for f in fields(kind)}
    hints = get_type_hints(kind)
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)
            raise ValueError(
                f"{_join(where, key)}: unknown key; did you mean {_join(where, near[0])}? (known: {', '.join(known)})"
            )
    built = {}
    for name, f in known.items():
        if name not in values:
            if f.default is MISSING and f.default_factory is MISSING:
                what = "section" if is_dataclass(hints[name]) else "value"
                raise ValueError(f"{_join(where, name)}: the {what} is missing and has no default; add it to the YAML")
            continue
        value = values[name]
        if is_dataclass(hints[name]):
            built[name] = _build(hints[name], value, _join(where, name))
        else:
            built[name] = _convert(hints[name], value, _join(where, name))
    return kind(**built)


def _join(where: str, key: Any) -> str:
    return f"{where}.{key}" if where else str(key)


def _convert(kind: Any, value: Any, where: str) -> Any:
    """The value as the field's type; numbers written as text (1e-4 is text to YAML) are read, nothing else is bent."""
    if isinstance(kind, types.UnionType):
        if value is None:
            return None
        kind = next(k for k in get_args(kind) if k is not types.NoneType)
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        if not isinstance(value, (list, tuple)) or len(value) != len(kinds):
            raise ValueError(f"{where}: expected a list of {len(kinds)} values, got {value!r}")
        return tuple(_convert(k, v, where) for k, v in zip(kinds, value, strict=True))
    if kind is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    elif type(value) is kind:
        return value
    raise ValueError(f"{where}: expected {kind.__name__}, got {value!r} ({type(value).__name__})")


def _check(config: Config) -> None:
    """Ranges and choices; what depends on the target or the data is checked where these are opened."""
    train, optimizer, log = config.train, config.optimizer, config.log
    choices = {
        "train.precision": (train.precision, PRECISIONS),
        "train.zero_stage": (train.zero_stage, ZERO_STAGES),
        "draft.method": (config.draft.method, METHODS),
        "log.wandb": (log.wandb, WANDB_MODES),
    }
    for name, (value, known) in choices.items():
        if value not in known:
            raise ValueError(f"{name}: {value!r} is unknown; choose one of {', '.join(map(str, known))}")
    heads_config(config, hidden_size=1, rms_norm_eps=1e-6)  # its own checks, before anything is loaded
    positive = {
        "data.seq_len": config.data.seq_len,
        "train.steps": train.steps,
        "train.global_batch": train.global_batch,
        "train.micro_batch": train.micro_batch,
        "train.save_every": train.save_every,
        "train.keep_checkpoints": train.keep_checkpoints,
        "optimizer.peak_lr": optimizer.peak_lr,
        "optimizer.eps": optimizer.eps,
        "optimizer.clip": optimizer.clip,
        "heldout.every": config.heldout.every,
        "heldout.rows": config.heldout.rows,
        "heldout.choices": config.heldout.choices,
        "log.every": log.every,
    }
    for name, value in positive.items():
        if not value > 0:
            raise ValueError(f"{name}: {value} is not positive; give a value above 0")
    if not 0 <= train.seed < 2**63:
        raise ValueError(f"train.seed: {train.seed} is out of range; give 0 to 2^63 - 1")
    if not 0 <= optimizer.warmup_steps < train.steps:
        raise ValueError(
            f"optimizer.warmup_steps: {optimizer.warmup_steps} must be at least 0 and below train.steps = {train.steps}"
        )
    if optimizer.weight_decay < 0:
        raise ValueError(f"optimizer.weight_decay: {optimizer.weight_decay} is negative; give 0 or more")
    if not all(0 <= beta < 1 for beta in optimizer.betas):
        raise ValueError(f"optimizer.betas: {list(optimizer.betas)} must lie in [0, 1); the usual pair is [0.9, 0.999]")
    if config.data.seq_len <= config.draft.n_heads + 1:
        raise ValueError(
            f"data.seq_len: {config.data.seq_len} tokens leave no label for draft.n_heads = {config.draft.n_heads}"
        )
