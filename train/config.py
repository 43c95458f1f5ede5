"""The typed configuration of a training run: its sections with their fields, defaults and valid values.

A YAML file has one section for each class below (config_file.py reads it). The networks' own fields are explained in
models/drafts/.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from omegaconf import OmegaConf
from pydantic import AfterValidator, Field, model_validator

from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.drafts.heads import MedusaConfig, TokenSwiftConfig
from longdraft.models.drafts.longspec import WIDTHS, LongSpecConfig
from longdraft.models.files import from_home
from longdraft.models.schema import Bool, Float, Int, Schema, Str, validate

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MAX_NUMBER = 2**31 - 1

Count = Annotated[Int, Field(gt=0, le=MAX_NUMBER)]
Natural = Annotated[Int, Field(ge=0, le=MAX_NUMBER)]
Share = Annotated[Float, Field(gt=0, le=1)]
Beta = Annotated[Float, Field(ge=0, lt=1)]
Weight = Annotated[Float, Field(ge=0, le=MAX_NUMBER)]
InitStd = Annotated[Float, Field(ge=0, le=10)]
Name = Annotated[Str, Field(pattern=r"\S")]
PathName = Annotated[Name, AfterValidator(from_home)]


class TargetSection(Schema):
    """The frozen model: a Hugging Face folder or hub name, a .gguf file, or a bundled name (models/hf.py).

    `max_positions`: the number of positions that it was trained for, if its config.json says otherwise. None: the
    number that its RoPE and scaling imply. `zero_stage`: 0 keeps a full copy in each process, 3 shards it over them.
    `loader`: whose model classes compute it: ours, or those of transformers, which support more families.
    """

    path: PathName
    max_positions: Count | None = None
    zero_stage: Literal[0, 3] = 0
    loader: Literal["longdraft", "transformers"] = "longdraft"


class DraftFields(Schema):
    """The fields of every method's section. `start_from`: a draft folder whose weights training starts from.
    `draft_vocab_size`: the draft proposes only so many tokens, the most frequent ones of the training data."""

    method: str
    start_from: Name | None = None
    draft_vocab_size: Count | None = None

    def network_fields(self, target: DecoderConfig) -> dict[str, Any]:
        """The fields that are also in the network's config. Raises ValueError for more tokens than the target has."""
        if (size := self.draft_vocab_size or 0) > target.vocab_size:
            raise ValueError(f"draft.draft_vocab_size: {size}; give at most {target.vocab_size}, the target's")
        return self.model_dump(exclude={"method", "start_from"})


class TokenSwiftSection(DraftFields):
    """TokenSwift's heads (TokenSwiftConfig)."""

    method: Literal["tokenswift"] = "tokenswift"
    n_heads: Count = 3
    kind: Literal["linear_chain", "silu_chain"] = "linear_chain"
    out_norm_init: Literal["ones", "target"] = "ones"
    init_std: InitStd = 0.02

    def network(self, target: DecoderConfig) -> TokenSwiftConfig:
        return TokenSwiftConfig(target.hidden_size, target.rms_norm_eps, **self.network_fields(target))


class MedusaSection(DraftFields):
    """Medusa-1's heads (MedusaConfig)."""

    method: Literal["medusa"] = "medusa"
    n_heads: Count = 3
    init_std: InitStd = 0.0

    def network(self, target: DecoderConfig) -> MedusaConfig:
        return MedusaConfig(target.hidden_size, **self.network_fields(target))


class LongSpecSection(DraftFields):
    """LongSpec's block (LongSpecConfig)."""

    method: Literal["longspec"] = "longspec"
    window: Count = 512
    noise: Count = 5
    final_norm: Bool = False
    warm_start: Bool = False

    def network(self, target: DecoderConfig) -> LongSpecConfig:
        return LongSpecConfig.for_target(target, **self.network_fields(target))


DraftSection = TokenSwiftSection | MedusaSection | LongSpecSection
DRAFT_SECTIONS: dict[str, type[DraftSection]] = {
    "tokenswift": TokenSwiftSection,
    "medusa": MedusaSection,
    "longspec": LongSpecSection,
}


class DataSection(Schema):
    """`path`: a prepared folder with train/ and heldout/ (launch/prepare.py). `seq_len`: tokens per row, as the
    folder was prepared.

    `positions`: plain, or anchor_offset (LongSpec, 3.2), where the first `sinks` positions of each document piece stay
    and the others are shifted by a random offset, to at most `max_position`.
    `query_share`: the share of each piece's tokens, in blocks, that the draft runs for. It limits the draft's memory;
    the target always reads all tokens.
    `max_dropped_share`: the largest share of documents that the preparation may have dropped as bad or unfit (those
    dropped by `--max-tokens` do not count). Above it, training is refused.
    """

    path: PathName
    seq_len: Count
    positions: Literal["plain", "anchor_offset"] = "plain"
    max_position: Count | None = None
    sinks: Natural = 4
    query_share: Share = 1.0
    max_dropped_share: Annotated[Float, Field(ge=0, le=1)] = 0.5

    def check_positions(self, target: str, limit: int) -> None:
        """Raises ValueError if rows or shifted positions exceed the target's `limit`."""
        for name, value in (("seq_len", self.seq_len), ("max_position", self.max_position or 0)):
            if value > limit:
                raise ValueError(f"data.{name}: {value}; stay within the {limit} positions of {target}")


class TrainSection(Schema):
    """One step takes `global_batch` rows, whatever the number of ranks, in passes of `micro_batch` rows (the last pass
    takes the rest) that are dealt to the ranks in turn. Either `steps` or `epochs` sets the length of training.

    `precision`: fp32, or bf16 with fp32 master weights; the target is loaded in the same precision.
    `zero_stage`: the draft's. `offload_optimizer` keeps the optimizer's state and step on the host.
    `sequence_parallel`: the number of ranks that share one long row; beyond that, ranks are data-parallel.
    `device`: auto uses the GPUs, or the CPU if there are none; cuda and cpu force the choice.
    `deterministic`: bit-identical results on the same hardware and number of ranks, on a GPU at some cost in speed.
    `max_skipped`: a pass whose loss, or a step whose gradient, is not finite is skipped and counted. Above this number
    the run stops, at most one step later and before anything is logged or saved.

    `loss`: cross_entropy of the text; kl, from the target's own distribution to the draft's; mix, both, with
    cross-entropy weighted by `text_weight`; overlap, -log of the sum of min(p, q) over both distributions; acceptance,
    -log of how often both choose the same token under the same noise (kernels/distillation.py). The last two
    begin after `kl_steps` steps of kl.
    `level_weights`: how often each of LongSpec's noise shifts 1 to J is drawn, relative to the others; best as often as
    serving reaches its level. None: all equally often.
    """

    run_dir: PathName
    global_batch: Count
    micro_batch: Count
    precision: Literal["fp32", "bf16"]
    loss: Literal["cross_entropy", "kl", "mix", "overlap", "acceptance"] = "cross_entropy"
    text_weight: Annotated[Float, Field(gt=0, lt=1)] | None = None
    kl_steps: Natural | None = None
    level_weights: tuple[Weight, ...] | None = None
    steps: Count | None = None
    epochs: Annotated[Float, Field(gt=0, le=1e6)] | None = None
    zero_stage: Annotated[Int, Field(ge=1, le=3)] = 1
    offload_optimizer: Bool = False
    sequence_parallel: Count = 1
    seed: Annotated[Int, Field(ge=0, lt=2**63)] = 0
    device: Literal["auto", "cuda", "cpu"] = "auto"
    deterministic: Bool = False
    save_every: Count = 50
    keep_checkpoints: Count = 2
    max_skipped: Natural = 10

    @property
    def pass_rows(self) -> int:
        """Rows of the largest pass."""
        return min(self.micro_batch, self.global_batch)

    @property
    def n_steps(self) -> int:
        """`steps` of a resolved config."""
        assert self.steps is not None, "the config is not resolved"
        return self.steps

    def distillation(self, step: int) -> tuple[str, float] | None:
        """`objective` and `text_weight` of `Distillation` in step 0, 1, ...; None for cross-entropy."""
        if self.loss == "cross_entropy":
            return None
        is_kl = self.loss in ("kl", "mix") or step < (self.kl_steps or 0)
        return "kl" if is_kl else self.loss, self.text_weight or 0.0

    def n_passes(self, world_size: int) -> int:
        """The number of passes of a rank in a step; if rows do not divide evenly, some ranks' last pass is empty.

        Raises ValueError if the ranks do not divide into groups that share a row.
        """
        if world_size % self.sequence_parallel:
            raise ValueError(
                f"train.sequence_parallel: {self.sequence_parallel}; give a divisor of {world_size}, all ranks"
            )
        return -(-self.global_batch // (self.micro_batch * (world_size // self.sequence_parallel)))


class OptimizerSection(Schema):
    """`name`: adamw, or adamuon, which updates matrices by their orthogonalised momentum and everything else as adamw
    does (train/adamuon.py). AdaMuon's best learning rates are about three times as high. Its momentum of matrices is
    0.95, so the first of `betas` applies to norms and biases only.

    The rate rises linearly over `warmup_steps`, or `warmup_share` of the steps, then falls along a cosine to 0 after
    the last step. Weight decay does not apply to norms and biases. `clip`: the maximum norm of the gradient.
    """

    peak_lr: Share  # AdamW moves every weight by about the learning rate in each step
    name: Literal["adamw", "adamuon"] = "adamw"
    warmup_steps: Natural | None = None
    warmup_share: Annotated[Float, Field(ge=0, lt=1)] | None = None
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Share = 1e-8
    weight_decay: Annotated[Float, Field(ge=0, le=10)] = 0.1
    clip: Annotated[Float, Field(gt=0, le=1e9)] = 1.0


class HeldoutSection(Schema):
    """Every `every` steps, and after the last one, measure the loss on `rows` held-out rows, evenly spread. At about
    `choices` of their positions the draft is also compared with the target's own argmax."""

    every: Count = 50
    rows: Count = 16
    choices: Count = 512


class DecodingSection(Schema):
    """Every `every` steps (0: never), and after the last one, decode for real with the current weights: `prompts`
    held-out prompts of each length in `contexts`, each continued by `new_tokens` tokens at each of `temperatures`,
    where 0 is greedy (train/evaluate.py)."""

    every: Natural = 0
    prompts: Count = 8
    contexts: tuple[Count, ...] = ()
    new_tokens: Count = 64
    temperatures: tuple[Weight, ...] = Field(default=(0.0,), min_length=1)


class LogSection(Schema):
    """Every `every` steps, write a line to the run's metrics.jsonl and to W&B. `wandb`: online, offline, disabled, or
    auto, which is online with a key in the environment or a login, else offline."""

    every: Count = 1
    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"


class Config(Schema):
    target: TargetSection
    data: DataSection
    train: TrainSection
    optimizer: OptimizerSection
    draft: DraftSection = TokenSwiftSection()
    heldout: HeldoutSection = HeldoutSection()
    decoding: DecodingSection = DecodingSection()
    log: LogSection = LogSection()

    @model_validator(mode="after")
    def _fields_fit(self) -> "Config":
        for name, is_met, remedy in _rules(self):
            if not is_met:
                section, field = name.split(".")
                raise ValueError(f"{name}: {getattr(getattr(self, section), field)}; {remedy}")
        return self

    def changed(self, **sections: Mapping[str, Any]) -> "Config":
        """The config with these fields of its sections changed: `config.changed(train={"steps": 3})`."""
        values = to_dict(self)
        return config_from_dict(values | {name: values[name] | fields for name, fields in sections.items()})

    def resolved(self, n_rows: int) -> "Config":
        """The config with epochs and shares turned into steps, for a training split of `n_rows` rows.

        Raises ValueError if that gives less than one step, or none after the warm-up or after `train.kl_steps`.
        """
        train, optimizer = self.train, self.optimizer
        steps = train.steps or int((train.epochs or 0) * n_rows / train.global_batch)
        if not steps:
            raise ValueError(f"train.epochs: {train.epochs} of {n_rows} rows are less than one step; prepare more data")
        warmup = optimizer.warmup_steps
        if warmup is None:
            warmup = int((optimizer.warmup_share or 0) * steps)
        return self.changed(
            train={"steps": steps, "epochs": None}, optimizer={"warmup_steps": warmup, "warmup_share": None}
        )


def _rules(config: Config) -> list[tuple[str, bool, str]]:
    """The constraints between fields: a field, whether its value is valid given the others, and the remedy if it is
    not."""
    data, train, optimizer, decoding = config.data, config.train, config.optimizer, config.decoding
    draft = config.draft.model_dump()
    n_levels, n_heads, window = draft.get("noise", 0), draft.get("n_heads", -1), draft.get("window", MAX_NUMBER)
    depth = len(WIDTHS[:n_levels])  # of the tree that the drafter grows unless it is given another
    has_norms = (draft.get("kind"), draft.get("out_norm_init")) != ("silu_chain", "target")
    moves, weights, steps = data.positions == "anchor_offset", train.level_weights, train.steps or MAX_NUMBER + 1
    max_position_fits = (data.max_position or 0) >= data.seq_len if moves else data.max_position is None
    weights_fit = weights is None or (len(weights) == n_levels > 0 and weights[0] > 0)
    is_whole = train.zero_stage < 3 and not train.offload_optimizer  # AdaMuon needs whole matrices on the device
    begins_with_kl = train.loss in ("overlap", "acceptance")
    warms_up_once = (optimizer.warmup_steps is None) != (optimizer.warmup_share is None)
    return [
        ("train.steps", (train.steps is None) != (train.epochs is None), "set either this or train.epochs"),
        ("optimizer.warmup_steps", warms_up_once, "set either this or optimizer.warmup_share"),
        ("optimizer.warmup_steps", (optimizer.warmup_steps or 0) < steps, "it must be below train.steps"),
        ("optimizer.name", is_whole or optimizer.name != "adamuon", "it needs zero_stage 1 or 2 without offloading"),
        ("train.text_weight", (train.text_weight is None) == (train.loss != "mix"), "set it for train.loss=mix only"),
        ("train.kl_steps", (train.kl_steps is not None) == begins_with_kl, "set it for loss=overlap, acceptance only"),
        ("train.kl_steps", (train.kl_steps or 0) < steps, "it must be below train.steps"),
        ("train.level_weights", weights_fit, f"give a number for each of draft.noise = {n_levels}, the first above 0"),
        ("draft.window", window >= depth, f"give {depth} or more, the tree's levels at draft.noise = {n_levels}"),
        ("draft.out_norm_init", has_norms, "silu_chain has no norms to start from the target's: set it to ones"),
        ("data.seq_len", data.seq_len > n_heads + 1, f"it leaves no label for draft.n_heads = {n_heads}"),
        ("data.max_position", max_position_fits, "set it for anchor_offset only, to at least data.seq_len"),
        ("decoding.contexts", bool(decoding.contexts) or not decoding.every, "give lengths, such as [512, 2048]"),
    ]


def config_from_dict(values: Any) -> Config:
    """The inverse of `to_dict`. Raises a ValueError of one line that names the field."""
    draft = values.get("draft") if isinstance(values, Mapping) else None
    if isinstance(draft, Mapping):  # its other fields depend on `method`
        method = draft.get("method", "tokenswift")
        if not isinstance(method, str) or method not in DRAFT_SECTIONS:
            raise ValueError(f"draft.method: {method!r} is unknown; choose one of {', '.join(DRAFT_SECTIONS)}")
        values = {**values, "draft": validate(DRAFT_SECTIONS[method], draft, "draft")}
    return validate(Config, values)


def to_dict(config: Config) -> dict[str, Any]:
    """Plain dicts, lists and scalars, for JSON and W&B."""
    return config.model_dump(mode="json")


def differences(config: Config, other: Config) -> dict[str, tuple[Any, Any]]:
    """The fields of `config` that have another value in `other`: `section.field` to both values, None where it lacks
    the field."""
    own, others = (
        {f"{section}.{name}": value for section, fields in to_dict(one).items() for name, value in fields.items()}
        for one in (config, other)
    )
    return {name: (value, others.get(name)) for name, value in own.items() if value != others.get(name)}


def to_yaml(config: Config) -> str:
    """YAML that load_config reads back."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))
