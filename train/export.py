"""Exports a run's newest checkpoint as a draft folder (models/draft_folder.py), and reads it back.

Shapes: E draft vocabulary.
"""

from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from longdraft.models.draft_folder import Draft, DraftInfo, check_out, load_draft, save_draft, target_entry
from longdraft.models.drafts.base import TOP_K
from longdraft.models.drafts.longspec import WIDTHS, LongSpec
from longdraft.models.hf import lasting_name
from longdraft.models.target import Target
from longdraft.train import checkpoint, model_card
from longdraft.train.config import DTYPES, Config, to_dict
from longdraft.train.methods.build import frequent_tokens, frozen_draft
from longdraft.train.setup import open_rows, whole_target

VERSIONS = ("longdraft", "torch", "transformers", "deepspeed", "safetensors")


def export(
    run_dir: str | Path,
    out: str | Path | None = None,
    target: Target | None = None,
    *,
    draft_vocab_size: int | None = None,
    best: bool = False,
    card: str | None = None,
) -> Path:
    """Write the draft folder, read it back to verify it, and print its path, which is returned.

    Args:
        out: the folder to write. None: run_dir/draft.
        target: the run's target, if it is already loaded.
        draft_vocab_size: restrict the draft to this many of the tokens it was trained with, the most frequent ones of
            the run's training data.
        best: export the weights that decoded best during training (train/evaluate.py), not the newest.
        card: also write a model card and transformers' custom_generate beside the draft (train/model_card.py), for the
            hub repository OWNER/NAME, or for the folder if this is "".

    Raises ValueError if run_dir has no intact checkpoint or no best weights, the vocabulary cannot be restricted to
    that size, or `out` holds anything but a draft of ours or cannot be written; an existing draft is then untouched.
    Also if the draft that is read back differs from the trained one.
    """
    found = checkpoint.best(run_dir) if best else checkpoint.newest(run_dir)
    if found is None:
        missing = "best weights (decoding.every keeps them)" if best else "intact checkpoint"
        raise ValueError(f"run_dir: {run_dir} holds no {missing}; train first, or give another run's folder")
    saved, weights = found.state, load_file(found.folder / checkpoint.WEIGHTS)
    config = checkpoint.saved_config(run_dir, saved)
    out = Path(out) if out is not None else Path(run_dir) / "draft"
    check_out(out)
    target = target or whole_target(config.target, DTYPES[config.train.precision])
    draft = frozen_draft(config.draft, target, weights)
    if draft_vocab_size is not None:
        draft = _restricted(config, target, draft, draft_vocab_size)
    info = _info(config, saved, target, draft)
    save_draft(out, draft, info)
    _check_same(load_draft(out), draft)
    ids, vocab_size = draft.token_ids, target.model.config.vocab_size
    n_known = "" if ids is None else f", for {len(ids)} of {vocab_size} tokens"
    print(f"Exported step {saved['step']} of {run_dir} to {out}{n_known}: reloaded, every weight is equal")
    if card is not None:
        model_card.write_card(run_dir, out, config, saved["step"], card)
    return out


def _restricted(config: Config, target: Target, draft: Draft, n: int) -> Draft:
    """The same draft, restricted to the n of its tokens that are most frequent in the training split."""
    rows, vocab_size = open_rows(config.data, "train", target), target.model.config.vocab_size
    token_ids_E = frequent_tokens(rows, vocab_size, n, target.eos_token_ids, among=draft.token_ids)
    section = config.changed(draft={"draft_vocab_size": n}).draft
    return frozen_draft(section, target, draft.state_dict() | {"token_ids": token_ids_E})


def _info(config: Config, saved: dict[str, Any], target: Target, draft: Draft) -> DraftInfo:
    noise = draft.config.noise if isinstance(draft, LongSpec) else None
    levels: list[int] = [TOP_K] * draft.config.n_heads if noise is None else list(WIDTHS[:noise])  # pyright: ignore
    heldout = saved["extra"]["heldout"]
    return DraftInfo(
        # With the hash of the weights that the run began with, even if the target's path now holds others.
        target=target_entry(target, saved["extra"].get("target_weights")),
        train_length=config.data.seq_len,
        tree={"levels": levels, "rank_rates": heldout.get("rank_rates"), "choice_rates": heldout.get("choice_rates")},
        versions={name: version(name) for name in VERSIONS},
        train_config=to_dict(config.changed(target={"path": lasting_name(config.target.path)})),
        noise=noise,
        step=saved["step"],
    )


def _check_same(exported: Draft, trained: Draft) -> None:
    """Raises ValueError if the draft that was read back has another config or another weight."""
    found, expected = exported.state_dict(), trained.state_dict()
    same = exported.config == trained.config and found.keys() == expected.keys()
    if not (same and all(found[name].equal(weight.cpu()) for name, weight in expected.items())):
        raise ValueError("out: the draft that was read back differs from the trained one; export again")
