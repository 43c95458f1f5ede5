"""What happens before a run's first step: check the data, load target and draft, put the engine around the draft."""

import os
import socket
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longdraft.data_prep.shards import ShardSet
from longdraft.models.device import free_bytes
from longdraft.models.draft_folder import Draft, load_draft, read_info
from longdraft.models.fingerprint import weights_hash
from longdraft.models.hf import LOADERS, load_through_transformers, read_target_config
from longdraft.models.target import Target
from longdraft.train import checkpoint
from longdraft.train.config import DTYPES, Config, DataSection, DraftSection, TargetSection
from longdraft.train.deepspeed_engine import DraftEngine
from longdraft.train.evaluate import Evaluator
from longdraft.train.memory import estimate
from longdraft.train.methods.base import Method
from longdraft.train.methods.build import open_method
from longdraft.train.ranks import Ranks
from longdraft.train.run import Run
from longdraft.train.sequence_parallel import SequenceParallel, sequence_group
from longdraft.train.sharding import load_sharded_target, share_out, whole_layers
from longdraft.train.teacher import Teacher
from longdraft.train.vocabulary import frequent_tokens

# Fields of a draft's config that say how its training begins or goes, and nothing about the shape of its weights.
TRAINING_ALONE = ("noise", "warm_start", "init_std", "out_norm_init")
# Checking more bytes than this takes long enough to be announced.
TOLD_ABOVE = 10**9


def whole_target(section: TargetSection, dtype: torch.dtype, device: torch.device | str = "cpu") -> Target:
    """The target, whole, on this device."""
    return LOADERS[section.loader](section.path, dtype, device, section.gguf_file, section.max_positions)


def open_target(config: Config, ranks: Ranks) -> Target:
    """The run's frozen target: a whole copy on this rank's device, or this rank's share of it."""
    section, dtype = config.target, DTYPES[config.train.precision]
    if ranks.device.type == "cuda" and section.loader == "longdraft":
        check_room(config, ranks)
    if section.zero_stage == 0:
        return whole_target(section, dtype, ranks.device)
    options = section.gguf_file, section.max_positions
    if section.loader == "longdraft":
        return load_sharded_target(section.path, dtype, ranks, *options)
    wrap = partial(share_out, ranks, dtype)
    return load_through_transformers(section.path, dtype, ranks.device, *options, wrap=wrap)


def check_room(config: Config, ranks: Ranks) -> None:
    """Compare the free memory of the ranks' GPUs with the estimate, before anything is loaded.

    Raises ValueError, on all ranks, where a GPU has no room for what training keeps there all the time. Where only the
    peak, which is an estimate, is more than what is free, it is logged.
    """
    target = read_target_config(config.target.path, config.target.gguf_file, config.target.max_positions)
    needed = estimate(config, target, ranks.world_size, gpu=True)
    kept, (moment, peak) = sum(needed.kept.values()), needed.peak
    # The process has taken what it needs beside tensors by now.
    free, place = min(ranks.gather((free_bytes(ranks.device), f"{ranks.device} of {socket.gethostname()}")))
    there = f"{place} has {free / 2**30:.2f} GiB free"
    if kept > free:
        parts = ", ".join(f"{name} {n / 2**30:.2f} GiB" for name, n in needed.kept.items())
        raise ValueError(
            f"train.device: {there}, and training keeps {kept / 2**30:.2f} GiB there ({parts}); take more or larger "
            "GPUs, or share out by target.zero_stage=3, train.zero_stage=3 or train.offload_optimizer=true"
        )
    if peak - needed.process > free:
        ranks.log(
            f"The {moment} is estimated at {peak / 2**30:.2f} GiB in all, and {there}: should it run out, lower "
            "train.micro_batch or data.query_share"
        )


def open_run(config: Config, ranks: Ranks, target: Target | None = None) -> Run:
    """Open data, target, draft and engine as they are before the first step. `target` saves loading the run's own."""
    train = config.train
    if train.deterministic:
        if train.loss == "acceptance" and ranks.device.type == "cuda":
            raise ValueError(
                "train.deterministic: true, but PyTorch's running sums on a GPU, which train.loss = acceptance takes, "
                "are not; set it to false, or train.loss to overlap or kl"
            )
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)  # an operation that has no such algorithm raises
    target = target or open_target(config, ranks)
    note_weights(target)
    rows, heldout_rows = (open_rows(config.data, split, target) for split in ("train", "heldout"))
    verify_shards([rows, heldout_rows], ranks, target.model.config.vocab_size)
    decoding = Evaluator(config, target, heldout_rows, ranks) if config.decoding.every else None
    check_draft(config.draft, target)
    folder = config.draft.start_from
    start = None if folder is None else load_draft(folder, target)
    with whole_layers(target.model, 0, -1):  # a warm start reads them
        method = open_method(config, target.model, _draft_vocabulary(config.draft, start, rows, target))
    masters: dict[str, Tensor] = {}
    if start is not None and folder is not None:
        begin_with(method, start, folder)
        masters = take_masters(method, folder, ranks)
    parallel = None
    if train.sequence_parallel > 1:
        parallel = SequenceParallel(target.model.config, sequence_group(train.sequence_parallel))
    engine = DraftEngine(config, method.draft, ranks)
    if masters:
        engine.set_masters(masters)
    teacher, weights = Teacher(target.model, parallel), target.fingerprint.get("weights")
    return Run(config, ranks, method, engine, teacher, rows, heldout_rows, weights, decoding)


def note_weights(target: Target) -> None:
    """Put the hash of the target's weights into its fingerprint. All ranks call it, because a sharded target is
    gathered layer by layer. A target loaded through transformers has its hash already, or none."""
    if target.loader == "transformers":
        return
    layers = list(target.model.layers)
    digest = weights_hash(target.model, lambda layer: whole_layers(target.model, layers.index(layer)))
    if digest is not None:
        target.fingerprint["weights"] = digest


def check_draft(section: DraftSection, target: Target) -> None:
    """Raises ValueError where a target loaded through transformers lacks what the draft section needs of it."""
    if target.loader != "transformers":
        return
    model: Any = target.model  # of models/transformers_model.py, which imports much of transformers
    if section.method == "longspec" and not model.rotates:
        raise ValueError(
            f"draft.method: longspec's block rotates its queries over whole heads, and the last layer's keys of "
            f"{target.name} are not rotated so; take tokenswift or medusa"
        )
    for name, copied in (("warm_start", True), ("final_norm", True), ("out_norm_init", "target")):
        # Gemma stores its norms' weights less 1: our decoder adds it when it reads them.
        as_ours = name != "warm_start" and model.known is not None and not model.known.norm_offset
        if getattr(section, name, None) == copied and not as_ours:
            raise ValueError(
                f"draft.{name}: {copied} begins with the target's weights as our decoder has them, and target.loader "
                "is transformers; leave it out"
            )


def begin_with(method: Method, start: Draft, folder: str) -> None:
    """Put the weights of another draft into the network.

    Raises ValueError if that draft has another method or shape than the config's.
    """
    ours = method.draft.config
    ignored = dict.fromkeys(TRAINING_ALONE)
    if type(start) is not type(method.draft) or asdict(start.config) | ignored != asdict(ours) | ignored:
        raise ValueError(
            f"draft.start_from: {folder} holds {start.config}, but this run trains {ours}; set the draft section alike"
        )
    method.draft.load_state_dict(start.state_dict())


def take_masters(method: Method, folder: str, ranks: Ranks) -> dict[str, Tensor]:
    """Put the fp32 weights that a folder's draft was rounded from into the network, and return them: none where some
    rank does not find them in the run that the folder lies in."""
    weights = method.draft.state_dict()
    masters, reason = checkpoint.masters_of(folder, weights, read_info(folder).step)
    reason = next(filter(None, ranks.gather(reason)), "")
    form = "as they are exported" if reason else "in fp32"
    ranks.log(f"Begins with the weights of {folder}, {form}{reason and f': {reason}'}")
    masters = {} if reason else masters
    method.draft.load_state_dict(weights | masters)
    return masters


def _draft_vocabulary(section: DraftSection, start: Draft | None, rows: ShardSet, target: Target) -> Tensor | None:
    """The restricted vocabulary, if any: that of the draft which training starts from, else the most frequent ids."""
    if section.draft_vocab_size is None:
        return None
    if start is not None and start.config.draft_vocab_size == section.draft_vocab_size:
        return start.token_ids
    return frequent_tokens(rows, target.model.config.vocab_size, section.draft_vocab_size, target.eos_token_ids)


def open_rows(data: DataSection, split: str, target: Target) -> ShardSet:
    """Open a split of the prepared folder; raises ValueError where its rows or tokenizer do not fit the run, the loss
    counts no token, or too many documents were left out."""
    rows = ShardSet(Path(data.path) / split)
    if rows.manifest["seq_len"] != data.seq_len:
        raise ValueError(
            f"data.seq_len: {data.seq_len}, but {rows.folder} has rows of {rows.manifest['seq_len']} tokens; "
            f"set data.seq_len={rows.manifest['seq_len']} or prepare with --seq-len {data.seq_len}"
        )
    prepared_with, tokenizer = rows.manifest["tokenizer_sha256"], target.fingerprint["tokenizer"]
    if prepared_with != tokenizer:
        raise ValueError(
            f"data.path: {rows.folder} was prepared with the tokenizer {prepared_with}, but {target.name}'s is "
            f"{tokenizer}; prepare it for this target"
        )
    if not len(rows):
        raise ValueError(f"data.path: {rows.folder} has no rows; prepare more text")
    if not rows.manifest.get("supervised_tokens", 1):  # older manifests do not count them
        raise ValueError(
            f"data.path: {rows.folder} has no token that the loss counts; look at longdraft prepare --inspect "
            f"{data.path}"
        )
    share, reasons = rows.left_out()
    if share > data.max_dropped_share:
        why = ", ".join(f"{reason}: {n:,}" for reason, n in reasons.items() if n)
        raise ValueError(
            f"data.max_dropped_share: {data.max_dropped_share:g}, but {share:.0%} of the documents of {rows.folder} "
            f"were left out ({why}); fix the sources, or raise it"
        )
    data.check_positions(target.name, target.model.config.max_positions)
    return rows


def verify_shards(splits: Sequence[ShardSet], ranks: Ranks, vocab_size: int) -> None:
    """Read all shards once, before any is trained on. The ranks of a machine divide them, since it may have a copy of
    its own. Raises ValueError on all ranks, naming shards that are damaged or hold ids beyond the vocabulary."""
    n_bytes = sum(shard["bytes"] for rows in splits for shard in rows.manifest["shards"])
    if n_bytes > TOLD_ABOVE:
        ranks.log(f"Checking {n_bytes / 1e9:.1f} GB of prepared rows")
    place, n_places = ranks.place_on_machine()
    damage = None
    for rows in splits:
        try:
            rows.verify(place, n_places, vocab_size)
        except ValueError as error:
            damage = damage or str(error)
    if found := [text for text in ranks.gather(damage) if text is not None]:
        raise ValueError(f"data.path: {'; '.join(found)}")


def describe(run: Run) -> str:
    """What is logged before the first step."""
    train, data, target = run.config.train, run.config.data, run.config.target
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in run.engine.draft.parameters())
    kind = "GPU" if run.ranks.device.type == "cuda" else "CPU"
    counted, used = (run.rows.manifest.get(name) for name in ("supervised_tokens", "tokens"))
    tokens = f" with {used:,} tokens, of which the loss counts {counted / used:.1%}" if counted and used else ""
    allowed = target.max_positions
    return (
        (f"Positions of the target: {allowed:,}, by target.max_positions\n" if allowed else "")
        + f"Rows: {len(run.rows):,}{tokens}; {run.rows.left_out()[0]:.1%} of the documents were left out\n"
        f"Training {run.config.draft.method} ({parameters / 1e6:.1f} M parameters) for {target.path} on "
        f"{run.ranks.world_size} {kind} rank(s), {train.precision}, ZeRO-{train.zero_stage}: step {run.step} to "
        f"{train.n_steps}, up to {train.global_batch * data.seq_len:,} tokens each, from {data.path}; all goes to "
        f"{train.run_dir}"
    )
