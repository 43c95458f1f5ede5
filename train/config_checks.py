"""Which values the fields of a training config may have. Every message names the field and a valid value.

Not here: what depends on the target or the data, which is checked where these are opened (setup.py).
"""

from collections.abc import Callable, Mapping
from math import inf
from typing import Any

from longdraft.train.config_sections import (
    DTYPES,
    DataSection,
    DecodingSection,
    DraftSection,
    LongSpecSection,
    OptimizerSection,
    TrainSection,
)

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
# Field: (the condition that a valid value meets, the rest of the message).
RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    **dict.fromkeys(POSITIVE, (lambda value: value > 0, " is not positive; give a value above 0")),
    "train.max_skipped": (lambda value: value >= 0, " is negative; give 0 or more"),
    "train.seed": (lambda value: 0 <= value < 2**63, " is out of range; give 0 to 2^63 - 1"),
    "optimizer.weight_decay": (lambda value: not value < 0, " is negative; give 0 or more"),  # NaN has its own message
    "optimizer.warmup_share": (lambda value: 0 <= value < 1, "; give a share from 0 to below 1"),
    "data.sinks": (lambda value: value >= 0, " is negative; give 0 or more, the paper's is 4"),
    "data.max_dropped_share": (lambda value: 0 <= value <= 1, " is not a share; give 0 to 1"),
    "data.query_share": (lambda value: 0 < value <= 1, "; give a share above 0 and up to 1"),
    "decoding.every": (lambda value: value >= 0, " is negative; give a number of steps, or 0 for never"),
    "decoding.share": (lambda value: 0 < value <= 1, "; give a share above 0 and up to 1"),
}
# Section: two of its fields, of which exactly one must be set. They say how long to train, and how long to warm up.
EITHER = {"train": ("steps", "epochs"), "optimizer": ("warmup_steps", "warmup_share")}
# The largest value that makes sense; for all other fields it is MAX_NUMBER.
MAXIMA = {
    "train.seed": 2**63 - 1,
    "train.epochs": 1e6,
    "optimizer.peak_lr": 1.0,  # AdamW moves every weight by about the rate in each step
    "optimizer.eps": 1.0,
    "optimizer.clip": 1e9,
    "optimizer.weight_decay": 10.0,
    "draft.init_std": 10.0,
}
MAX_NUMBER = 2**31 - 1
# W&B's rules for the name of a project.
NOT_IN_PROJECTS, MOST_OF_PROJECT = r"/\#?%:", 128


def check_choices(values: Mapping[str, Any]) -> None:
    """`values`: the whole config by `section.field`, here and below."""
    for name, known in CHOICES.items():
        if values[name] not in known:
            raise ValueError(f"{name}: {values[name]!r} is unknown; choose one of {', '.join(map(str, known))}")


def check_ranges(values: Mapping[str, Any]) -> None:
    for name, (is_valid, remedy) in RANGES.items():
        if values[name] is not None and not is_valid(values[name]):
            raise ValueError(f"{name}: {values[name]}{remedy}")


def check_one_of_each_pair(values: Mapping[str, Any]) -> None:
    """Exactly one of the two fields of each pair in EITHER is set."""
    for section, pair in EITHER.items():
        names = [f"{section}.{name}" for name in pair]
        n_set = sum(values[name] is not None for name in names)
        if n_set != 1:
            raise ValueError(f"{', '.join(names)}: {'both are' if n_set else 'neither is'} given; set one of them")


def check_numbers_and_names(values: Mapping[str, Any]) -> None:
    """Numbers are finite and not absurd, names and paths are not empty."""
    for name, value in values.items():
        for entry in value if isinstance(value, list) else [value]:
            if isinstance(entry, str) and (not entry.strip() or "\0" in entry):
                raise ValueError(f"{name}: {entry!r} names nothing; give a name or path, or leave the field out")
            if isinstance(entry, (int, float)):
                limit = MAXIMA.get(name, MAX_NUMBER)
                if not -inf < entry <= limit:
                    raise ValueError(f"{name}: {entry} is out of range; give a number of at most {limit:g}")


def check_optimizer(optimizer: OptimizerSection, train: TrainSection) -> None:
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


def check_loss(train: TrainSection, draft: DraftSection) -> None:
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
    if train.level_weights is not None:
        _check_level_weights(train.level_weights, draft)


def _check_level_weights(weights: tuple[float, ...], draft: DraftSection) -> None:
    if not isinstance(draft, LongSpecSection):
        raise ValueError(f"train.level_weights: {draft.method} has no noise shifts to draw; leave it out")
    if len(weights) != draft.noise or min(weights) < 0 or not sum(weights) < inf or not weights[0] > 0:
        raise ValueError(
            f"train.level_weights: {list(weights)}; give draft.noise = {draft.noise} numbers of 0 or more, "
            "the first above 0"
        )


def check_data(data: DataSection, n_heads: int | None) -> None:
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


def check_decoding(decoding: DecodingSection) -> None:
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


def check_wandb_project(name: str) -> None:
    if set(name) & set(NOT_IN_PROJECTS):
        raise ValueError(f"log.wandb_project: {name!r} has one of {NOT_IN_PROJECTS}; W&B takes none of them")
    if len(name) > MOST_OF_PROJECT:
        raise ValueError(
            f"log.wandb_project: {name!r} has {len(name)} characters; give {MOST_OF_PROJECT} at most, as W&B takes them"
        )
