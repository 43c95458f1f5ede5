"""The one typed configuration of a training run: read, overridden, checked, printed whole.

A YAML file has flat sections, one dataclass each (config_sections.py); `a.b=c` on the command line overrides a field.
Not here: which values are valid (config_checks.py), several stages in one file (stages.py), how a mapping becomes
dataclasses (typed.py), what DeepSpeed is told (deepspeed_engine.py).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.rope import RopeConfig
from longdraft.train import config_checks as checks
from longdraft.train.config_checks import EITHER
from longdraft.train.config_sections import (
    DRAFT_SECTIONS,
    DataSection,
    DecodingSection,
    DraftSection,
    HeldoutSection,
    LogSection,
    OptimizerSection,
    TargetSection,
    TokenSwiftSection,
    TrainSection,
)
from longdraft.train.typed import build, lay_over, read_overrides, read_yaml, resolve

# Stands for any target where a draft section's own fields alone are checked.
_ANY_TARGET = DecoderConfig(1 << 40, 2, 2, 1, 1, 1, 2, 1e-6, 1 << 40, RopeConfig(2, 1 << 40))


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
        values = to_flat_dict(self)
        checks.check_choices(values)
        self.draft.network(_ANY_TARGET)  # the network's own checks, before anything is loaded
        checks.check_ranges(values)
        checks.check_one_of_each_pair(values)
        checks.check_optimizer(self.optimizer, self.train)
        checks.check_loss(self.train, self.draft)
        checks.check_data(self.data, getattr(self.draft, "n_heads", None))
        checks.check_decoding(self.decoding)
        checks.check_numbers_and_names(values)
        checks.check_wandb_project(self.log.wandb_project)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file of one run, apply overrides of the form `section.field=value` and resolve `${...}`.

    Raises ValueError where the file is missing or not YAML, a key is unknown (the nearest known one is named), a value
    has the wrong type or is out of range, or overrides set both fields of a pair in EITHER.
    """
    layers = read_overrides(overrides)
    check_either(layers)
    return config_from_layers([read_layer(path), *layers])


def read_layer(path: str | Path) -> dict[str, Any]:
    """The sections of a YAML file, with `${...}` as written."""
    return OmegaConf.to_container(read_yaml(path), resolve=False)  # pyright: ignore[reportReturnType]


def config_from_layers(layers: Sequence[Mapping[str, Any]]) -> Config:
    """Lay each layer over those before it. One that sets a field of a pair in EITHER unsets the other field."""
    raw = OmegaConf.create()
    for layer in layers:
        for section, pair in EITHER.items():
            names = _set_fields(layer, section)
            if len(names) == 1:
                raw = lay_over(raw, {section: {name: None for name in pair if name not in names}})
        raw = lay_over(raw, layer)
    return config_from_dict(resolve(raw))


def check_either(layers: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError where overrides of equal rank together set both fields of a pair in EITHER."""
    raw = OmegaConf.create()
    for layer in layers:
        raw = lay_over(raw, layer)
    merged: Any = OmegaConf.to_container(raw, resolve=False)
    for section, (one, other) in EITHER.items():
        if len(_set_fields(merged, section)) == 2:
            raise ValueError(f"{section}.{one}, {section}.{other}: both are given; set one of them")


def _set_fields(layer: Mapping[str, Any], section: str) -> list[str]:
    """Which fields of the section's pair in EITHER a layer sets."""
    values = layer.get(section)
    return [name for name in EITHER[section] if isinstance(values, Mapping) and values.get(name) is not None]


def config_from_dict(values: Any) -> Config:
    """The inverse of `to_dict`; raises ValueError as load_config does."""
    return build(Config, values, {"draft": _draft_section})


def _draft_section(values: Any) -> type:
    """The section of the method that is named; a value that is not a section is left for `build` to refuse."""
    method = values.get("method", "tokenswift") if isinstance(values, dict) else "tokenswift"
    if not isinstance(method, str) or method not in DRAFT_SECTIONS:
        raise ValueError(f"draft.method: {method!r} is unknown; choose one of {', '.join(DRAFT_SECTIONS)}")
    return DRAFT_SECTIONS[method]


def to_dict(config: Config) -> dict[str, Any]:
    """Plain dicts, lists and scalars, for JSON and W&B."""
    return _plain(asdict(config))


def to_flat_dict(config: Config) -> dict[str, Any]:
    """`to_dict` with keys `section.field`."""
    return {f"{section}.{name}": value for section, fields in to_dict(config).items() for name, value in fields.items()}


def to_yaml(config: Config) -> str:
    """YAML that load_config reads back; a `${` in a value is escaped, since it is not a reference."""
    return OmegaConf.to_yaml(OmegaConf.create(_plain(asdict(config), lambda text: text.replace("${", "\\${"))))


def _plain(value: Any, text: Callable[[str], str] = str) -> Any:
    """The value with tuples as lists, and strings passed through `text`."""
    if isinstance(value, dict):
        return {key: _plain(inner, text) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner, text) for inner in value]
    return text(value) if isinstance(value, str) else value


def accumulation(config: Config, world_size: int) -> int:
    """The number of passes that a rank makes in a step. Where a step's passes do not divide among the ranks, the last
    one is empty on some.

    Raises ValueError where the ranks do not divide into groups that share a row.
    """
    train = config.train
    if world_size % train.sequence_parallel:
        raise ValueError(
            f"train.sequence_parallel: {train.sequence_parallel} does not divide {world_size} ranks; set it to a "
            "divisor, or start another number of ranks"
        )
    return -(-train.global_batch // (train.micro_batch * (world_size // train.sequence_parallel)))


def empty_passes(config: Config, world_size: int) -> int:
    """The number of passes without rows in a step, over all ranks (or groups of ranks that share a row)."""
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

    Raises ValueError where that leaves less than one step, or none after the warm-up or after `train.kl_steps`.
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
