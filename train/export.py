"""Export a run's newest checkpoint as a draft folder (models/draft_folder.py), which is read back and compared with the
trained draft before it is put in its place.

Shapes: E draft vocabulary.
"""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from longdraft.models.draft_folder import (
    Draft,
    DraftInfo,
    TargetEntry,
    check_out,
    load_draft,
    save_draft,
    target_entry,
)
from longdraft.models.drafts.longspec import LongSpec
from longdraft.models.drafts.loss import TOP_K
from longdraft.models.hf import lasting_name
from longdraft.models.target import Target
from longdraft.train import checkpoint, model_card
from longdraft.train.config import DTYPES, Config, to_dict
from longdraft.train.methods.build import frozen_draft
from longdraft.train.setup import open_rows, whole_target
from longdraft.train.vocabulary import frequent_tokens

# The drafter's default beam by level, of which a draft gets as many levels as it was trained with noise shifts.
BEAM = (8, 16, 16, 16, 16)
VERSIONS = ("longdraft", "torch", "transformers", "deepspeed", "safetensors")


def export(
    run_dir: str | Path,
    out: str | Path | None = None,
    target: Target | None = None,
    *,
    draft_vocab_size: int | None = None,
    best: bool = False,
    card: bool = False,
    push: str | None = None,
) -> Path:
    """Write the folder, once what will be in it is checked, and print where it lies.

    Args:
        out: the folder to write. None: run_dir/draft.
        target: the run's, where it is already loaded.
        draft_vocab_size: restrict the draft to this many of the tokens it was trained with, the most frequent ones of
            the run's training data.
        best: take the weights that decoded best while training (train/evaluate.py), not the newest.
        card: also write a model card and transformers' custom_generate beside the draft (train/model_card.py).
        push: OWNER/NAME of a hub repository to upload the draft and its card to.

    Raises ValueError where run_dir has no whole checkpoint or no best weights, the vocabulary cannot be restricted to
    that size, `out` holds anything but a draft of ours or cannot be written, or what is read back is not the trained
    draft. A draft that is there already is then untouched.
    """
    if push is not None:
        model_card.check_name(push)
    saved, weights = _read(run_dir, best)
    config, extra = checkpoint.saved_config(run_dir, saved), saved["extra"]
    trained_with = config.draft.draft_vocab_size
    if None not in (draft_vocab_size, trained_with) and (draft_vocab_size or 0) > (trained_with or 0):
        raise ValueError(
            f"draft_vocab_size: {draft_vocab_size}, but the run trained with {trained_with} (draft.draft_vocab_size); "
            "give at most that"
        )
    out = Path(out) if out is not None else Path(run_dir) / "draft"
    check_out(out)
    if checkpoint.checkpoint_folder(out).exists():  # even with a draft's files in it
        raise ValueError(f"out: {out} is the folder of a training run; give another, such as {out / 'draft'}")
    target = target or whole_target(config.target, DTYPES[config.train.precision])
    entry = _entry(target, extra.get("target_weights"), config.target.path)
    draft = frozen_draft(config.draft, target, weights)
    if draft_vocab_size is not None:
        draft = _restricted(config, target, draft, draft_vocab_size)
    save_draft(out, draft, _info(config, saved, entry, draft), lambda staged: _check_same(load_draft(staged), draft))
    ids, vocab_size = draft.token_ids, target.model.config.vocab_size
    n_known = "" if ids is None else f", for {len(ids)} of {vocab_size} tokens"
    # Equal bits under an equal config are equal logits.
    print(f"Exported step {saved['step']} of {run_dir} to {out}{n_known}: reloaded, largest difference of a logit 0")
    if card or push:
        model_card.write_card(run_dir, out, config, saved["step"], push)
    if push is not None:
        print(f"Pushed to {model_card.push(out, push)}")
    return out


def _read(run_dir: str | Path, best: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """State and draft of the newest checkpoint, or of the best weights."""
    found = checkpoint.best(run_dir) if best else checkpoint.newest(run_dir, read=[checkpoint.WEIGHTS])
    if found is None and best:
        raise ValueError(f"best: {run_dir} keeps no best weights; train with decoding.every above 0, or do without")
    if found is None:
        raise ValueError(f"run_dir: {run_dir} holds no whole checkpoint; train first, or give another run's folder")
    return found[1], load_file(found[0] / checkpoint.WEIGHTS)


def _entry(target: Target, trained_with: str | None, path: str) -> TargetEntry:
    """The target as the run began with it, by the hash of its weights (if any), whatever lies at its path now."""
    now, entry = target_entry(target), target_entry(target, trained_with)
    if now != entry:
        print(
            f"target.path: {path} has other weights now (weights_sha256 {now.get('weights_sha256')}) than the run "
            f"trained with ({trained_with}); the draft is exported as one of those",
            flush=True,
        )
    return entry


def _restricted(config: Config, target: Target, draft: Draft, n: int) -> Draft:
    """The same draft, restricted to the n of its tokens that are most frequent in the training split."""
    rows, vocab_size = open_rows(config.data, "train", target), target.model.config.vocab_size
    token_ids_E = frequent_tokens(rows, vocab_size, n, target.eos_token_ids, among=draft.token_ids)
    section = config.changed(draft={"draft_vocab_size": n}).draft
    return frozen_draft(section, target, draft.state_dict() | {"token_ids": token_ids_E})


def _info(config: Config, saved: dict[str, Any], entry: TargetEntry, draft: Draft) -> DraftInfo:
    noise = draft.config.noise if isinstance(draft, LongSpec) else None
    levels: list[int] = [TOP_K] * draft.config.n_heads if noise is None else list(BEAM[:noise])  # pyright: ignore
    heldout = saved["extra"]["heldout"]
    return DraftInfo(
        target=entry,
        train_length=config.data.seq_len,
        tree={"levels": levels, "rank_rates": heldout.get("rank_rates"), "choice_rates": heldout.get("choice_rates")},
        versions={name: version(name) for name in VERSIONS},
        train_config=to_dict(config.changed(target={"path": lasting_name(config.target.path)})),
        noise=noise,
        step=saved["step"],
    )


def _check_same(exported: Draft, trained: Draft) -> None:
    """Raises ValueError where the draft that was read back has another config or other bits in a weight."""
    found, expected = exported.state_dict(), trained.state_dict()
    same = exported.config == trained.config and found.keys() == expected.keys()
    if not (same and all(_bits(found[name]).equal(_bits(weight)) for name, weight in expected.items())):
        raise ValueError("out: the draft that is read again is not the trained one, and is not put there; export again")


def _bits(weight: Tensor) -> Tensor:
    return weight.detach().cpu().contiguous().flatten().view(torch.uint8)
