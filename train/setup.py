"""Opens a run (`Run`): checks the data, loads target and draft, wraps the draft in DeepSpeed."""

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from tqdm import tqdm

from longdraft.data_prep.shards import MANIFEST, SPLITS, ShardSet
from longdraft.models.device import free_bytes
from longdraft.models.draft_folder import load_draft
from longdraft.models.fingerprint import weights_hash
from longdraft.models.hf import LOADERS, load_through_transformers, read_target, read_target_config
from longdraft.models.target import Target
from longdraft.train import checkpoint
from longdraft.train.batches import EpochRow
from longdraft.train.checkpoint import Found, checkpoint_folder, finished_folders
from longdraft.train.config import DTYPES, Config, DataSection, TargetSection, differences
from longdraft.train.config_file import Stage
from longdraft.train.deepspeed_engine import DraftEngine
from longdraft.train.estimate import memory
from longdraft.train.evaluate import Evaluator
from longdraft.train.methods.base import Method, MicroBatch
from longdraft.train.methods.build import check_target, open_draft, same_shape
from longdraft.train.ranks import Ranks, log
from longdraft.train.sequence_parallel import SequenceParallel, sequence_group
from longdraft.train.sharding import load_sharded_target, share_out, whole_layers
from longdraft.train.teacher import Teacher
from longdraft.train.tracking import Tracker


@dataclass
class StepInput:
    """This rank's input of a step: its passes, and their number of labels for each part of the loss, [P]."""

    rows_by_pass: list[list[EpochRow]]
    micro_batches: list[MicroBatch]
    n_labels: Sequence[float]


@dataclass
class Run:
    """The state of a run during training.

    `target_weights`: the hash of the target's weights (models/fingerprint.py). `decoding`: None if the config does not
    ask for it. `step`: completed steps. `skipped`: passes and steps that were skipped because their loss or gradient
    was not finite. `heldout`: the latest validation. `undecoded`: a stop cut off the current step's decoding. `stop`:
    the run ends once it is non-empty on any rank. Only the first rank has a `tracker` and a visible `bar`.

    `sums` waits for the all-reduce at a step's end and returns its result (`finish_step_sum` in step.py). `next_input`:
    the next step's input, prepared while the device is still working; None before the first step.
    """

    config: Config
    ranks: Ranks
    method: Method
    engine: DraftEngine
    teacher: Teacher
    rows: ShardSet
    heldout_rows: ShardSet
    target_weights: str | None
    decoding: Evaluator | None = None
    step: int = 0
    skipped: int = 0
    sums: Callable[[], list[float]] = field(default=lambda: [0.0, 0.0])
    next_input: StepInput | None = None
    heldout: dict[str, Any] = field(default_factory=dict)
    undecoded: bool = False
    stop: Sequence[int] = ()
    tracker: Tracker | None = None
    bar: tqdm = field(default_factory=partial(tqdm, disable=True))

    def is_due(self, step: int, every: int) -> bool:
        """Whether something that is done every `every` steps, and after the last one, is done after step 1, 2, ..."""
        return step == self.config.train.n_steps or step % every == 0


def open_run(config: Config, ranks: Ranks, target: Target, found: Found | None = None) -> Run:
    """Open data, draft and engine, in their initial state or in that of the checkpoint `found`."""
    train = config.train
    torch.use_deterministic_algorithms(train.deterministic)  # operations without a deterministic algorithm raise
    note_weights(target)
    weights, extra = target.fingerprint.get("weights"), found.state["extra"] if found else {}
    if extra.get("target_weights") not in (None, weights):
        raise ValueError(
            f"target.path: {config.target.path} has other weights than the run in {train.run_dir} began with; "
            "restore them, or start a new run with another train.run_dir"
        )
    rows, heldout_rows = (open_rows(config.data, split, target) for split in ("train", "heldout"))
    begun_with = {"data.path": (rows.identity, heldout_rows.identity), "target.path": weights}
    of_ranks = ranks.gather(begun_with)
    for name, value in begun_with.items():
        if any(other[name] != value for other in of_ranks):
            raise ValueError(f"{name}: differs between the machines; copy it from the first one to the others")
    # All shards are verified before training. Each machine may have its own copy, so its ranks verify it together.
    share = ranks.local_rank, ranks.local_size, target.model.config.vocab_size
    ranks.on_all(lambda: [split.verify(*share) for split in (rows, heldout_rows)])
    decoding = Evaluator(config, target, heldout_rows, ranks) if config.decoding.every else None
    method = open_draft(config, target, rows, found and found.folder)
    parallel = None
    if train.sequence_parallel > 1:
        parallel = SequenceParallel(target.model.config, sequence_group(train.sequence_parallel))
    teacher, engine = Teacher(target.model, parallel), DraftEngine(method.draft, ranks, train, config.optimizer)
    run = Run(config, ranks, method, engine, teacher, rows, heldout_rows, weights, decoding)
    if found:
        checkpoint.load(engine, found)
        run.step, run.skipped, run.heldout = found.state["step"], extra["skipped"], extra["heldout"]
    return run


def whole_target(section: TargetSection, dtype: torch.dtype, device: torch.device | str = "cpu") -> Target:
    """Load the target, unsharded, on this device."""
    return LOADERS[section.loader](section.path, dtype, device, section.max_positions)


def open_target(config: Config, ranks: Ranks) -> Target:
    """Load the run's frozen target on this rank's device: a full copy, or this rank's shard of it."""
    section, dtype = config.target, DTYPES[config.train.precision]
    if ranks.device.type == "cuda" and section.loader == "longdraft":
        check_room(config, ranks)
    if section.zero_stage == 0:
        return whole_target(section, dtype, ranks.device)
    if section.loader == "longdraft":
        return load_sharded_target(section.path, dtype, ranks, section.max_positions)
    wrap = partial(share_out, ranks, dtype)
    return load_through_transformers(section.path, dtype, ranks.device, section.max_positions, wrap=wrap)


def check_same(stages: Sequence[Stage], ranks: Ranks) -> None:
    """Raises ValueError, on all ranks, if the machines were given different configs: the ranks would wait for each
    other in vain, or train something that is neither machine's config."""
    (first_ones, *others), advice = ranks.gather(stages), "start all machines with the same config and overrides"
    for rank, there in enumerate(others, start=1):
        if [stage.name for stage in first_ones] != [stage.name for stage in there]:
            raise ValueError(f"stages: they are not the same on rank 0 and on rank {rank}; {advice}")
        for one, other in zip(first_ones, there, strict=True):
            for name, (first, second) in differences(one.config, other.config).items():
                raise ValueError(f"{name}: {first!r} on rank 0, but {second!r} on rank {rank}; {advice}")


def check_shared(folder: Path, ranks: Ranks) -> None:
    """Raises ValueError, on all ranks, if not every machine sees the first one's `folder`. Another machine may have a
    folder of that name with an earlier run, so it is asked for a new name, which `remove_unfinished` removes."""
    new = ranks.from_first(partial(_new_folder, folder))
    if not all(ranks.gather((folder / new).exists())):
        raise ValueError(f"train.run_dir: not every machine sees the first one's {folder.parent}; use shared storage")


def _new_folder(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    return Path(mkdtemp(prefix="tmp-", dir=folder)).name  # from Python 3.12 on, the path itself is absolute


def check_stages(stages: Sequence[Stage], ranks: Ranks) -> Target | None:
    """Raises ValueError before the first stage's target is opened if any stage would fail later: for its number of
    ranks, its draft's shape, the draft that it starts from, or its rows; a later stage's may not be prepared yet.

    Returns: that target, if it had to be opened for this because only transformers supports its family.
    """
    first, before = stages[0].config.target, None
    known = read_target(first.path, first.max_positions, first.loader)
    target = known or open_target(stages[0].config, ranks)
    for stage in stages:
        config, own, is_first = stage.config, stage.config.target, stage is stages[0]
        try:
            config.train.n_passes(ranks.world_size)
            network = config.draft.network(target.model.config)
            before = ranks.from_first(partial(_start_of, config, target)) if is_first else before
            if before is not None and not same_shape(before, network):
                start = f"draft.start_from: {config.draft.start_from} holds {before}"
                raise ValueError(f"{start}, but this run trains {network}; make the draft section match")
            if (own.path, own.max_positions, own.loader) == (first.path, first.max_positions, first.loader):
                check_target(config.draft, target)
                ranks.from_first(partial(_check_rows, config, target, is_first))
        except ValueError as error:
            raise ValueError(str(error) if stage.name is None else f"stages.{stage.name}: {error}") from error
        before = network
    return None if known else target


def _start_of(config: Config, target: Target) -> Any:
    """The shape of the draft that a run starts from; None if it starts from a checkpoint or with new weights."""
    start, begun = config.draft.start_from, finished_folders(checkpoint_folder(config.train.run_dir))
    return None if start is None or begun else load_draft(start, target).config


def _check_rows(config: Config, target: Target, is_first: bool) -> None:
    are_prepared = all((Path(config.data.path) / split / MANIFEST).exists() for split in SPLITS)  # written last
    if not (is_first or are_prepared):
        log(f"{config.data.path} is not prepared yet; prepare it before its stage begins")
        return
    rows, _ = (open_rows(config.data, split, target) for split in SPLITS)
    config.resolved(len(rows))


def check_room(config: Config, ranks: Ranks) -> None:
    """Raises ValueError, on all ranks and before anything is loaded, if a GPU has too little free memory for what
    training keeps there permanently."""
    target = read_target_config(config.target.path, config.target.max_positions)
    kept = sum(memory(config, target, ranks.world_size, gpu=True).kept.values())
    # The process has already allocated what it needs beside tensors.
    free, place = min(ranks.gather((free_bytes(ranks.device), f"{ranks.device} of {socket.gethostname()}")))
    if kept > free:
        raise ValueError(
            f"train.device: {place} has {free / 2**30:.2f} GiB free, but training keeps {kept / 2**30:.2f} GiB there "
            "(--estimate lists it); use more or larger GPUs, target.zero_stage=3, train.zero_stage=3 or "
            "train.offload_optimizer=true"
        )


def note_weights(target: Target) -> None:
    """Put the hash of the target's weights into its fingerprint. All ranks call it, because a sharded target is
    gathered layer by layer. A target loaded through transformers has its hash already, or none."""
    if target.loader == "transformers":
        return
    layers = list(target.model.layers)
    digest = weights_hash(target.model, lambda layer: whole_layers(target.model, layers.index(layer)))
    if digest is not None:
        target.fingerprint["weights"] = digest


def open_rows(data: DataSection, split: str, target: Target) -> ShardSet:
    """Open a split of the prepared folder. Raises ValueError if its rows or tokenizer do not fit the run, it has no
    supervised token, or too many documents were dropped."""
    rows = ShardSet(Path(data.path) / split)
    place, length, tokenizer = rows.folder, rows.manifest["seq_len"], rows.manifest["tokenizer_sha256"]
    if length != data.seq_len:
        raise ValueError(f"data.seq_len: {data.seq_len}, but {place} has rows of {length} tokens; set it to that")
    if tokenizer != target.fingerprint["tokenizer"]:
        raise ValueError(
            f"data.path: {place} was prepared with the tokenizer {tokenizer}, which is not {target.name}'s"
        )
    if not len(rows) or not rows.manifest.get("supervised_tokens", 1):  # older manifests do not count them
        raise ValueError(
            f"data.path: {place} has no supervised token in its rows ({len(rows)}); look at it with longdraft prepare "
            "--inspect, and prepare more data or a larger --heldout-share"
        )
    share, reasons = rows.dropped_share()
    if share > data.max_dropped_share:
        why = ", ".join(f"{reason}: {n:,}" for reason, n in reasons.items() if n)
        raise ValueError(
            f"data.max_dropped_share: {data.max_dropped_share:g}, but {share:.0%} of the documents of {place} were "
            f"bad or did not fit ({why}); fix the sources, or raise it"
        )
    data.check_positions(target.name, target.model.config.max_positions)
    return rows
