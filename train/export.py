"""Export a run's newest checkpoint as a folder for serving, which is read back and compared with the trained draft
before it is put in its place.

Not here: the folder's format (models/draft_folder.py).
Shapes: N tokens end to end, D hidden, V vocabulary, E draft vocabulary.
"""

from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from longdraft.data_prep.shards import ShardSet
from longdraft.models.draft_folder import Draft, DraftInfo, check_out, load_draft, save_draft, target_entry
from longdraft.models.drafts.longspec import LongSpec, plan_queries
from longdraft.models.drafts.loss import RANKS
from longdraft.models.hf import lasting_name
from longdraft.models.passes import Pass
from longdraft.models.target import Target
from longdraft.train import checkpoint, model_card
from longdraft.train.batches import Place, read_batch
from longdraft.train.config import Config, to_dict
from longdraft.train.methods.base import plain_positions
from longdraft.train.methods.build import frozen_draft
from longdraft.train.setup import open_rows, whole_target
from longdraft.train.vocabulary import frequent_tokens

# Tokens of a held-out row on which logits are compared: enough to use every weight, with few logits in memory.
COMPARED = 128
# The drafter's default beam by level, of which a draft gets as many levels as it was trained with noise shifts.
BEAM = (8, 16, 16, 16, 16)
VERSIONS = ("longdraft", "torch", "transformers", "deepspeed", "safetensors")


class Trained(NamedTuple):
    """A checkpoint to export: the draft in its training dtype, on the target's device. `heldout`: its validation.
    `entry`: the target that it was trained with, as a draft folder names it."""

    config: Config
    step: int
    heldout: dict[str, Any]
    target: Target
    entry: dict[str, str]
    draft: Draft


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
    that size, `out` holds anything but a draft of ours or cannot be written, or the draft that is read back gives other
    logits. A draft that is there already is then untouched.
    """
    if push is not None:
        model_card.check_name(push)
    saved, weights = _read(run_dir, best)
    config = checkpoint.saved_config(run_dir, saved)
    if draft_vocab_size is not None:
        _check_restriction(config, draft_vocab_size)
    out = Path(out) if out is not None else Path(run_dir) / "draft"
    _check_out(out)
    target = target or whole_target(config)
    extra = saved["extra"]
    entry = _entry(config, extra.get("target_weights"), target)
    draft = frozen_draft(config, target, weights)
    trained = Trained(config, saved["step"], extra["heldout"], target, entry, draft)
    if draft_vocab_size is not None:
        trained = trained._replace(draft=_restricted(trained, draft_vocab_size))
    heldout = open_rows(config, "heldout", target)

    def prove(exported: Draft) -> None:
        difference = largest_difference(heldout, target, trained.draft, exported)
        if difference != 0:
            raise ValueError(
                f"out: the draft for {out}, read again, gives logits up to {difference:.3g} off the trained one's, and "
                "is not put there; export again"
            )

    details = _write(trained, out, prove)
    print(f"Exported step {trained.step} of {run_dir} to {out}{details}: reloaded, largest difference of a logit 0")
    if card or push:
        model_card.write_card(run_dir, out, config, trained.step, push)
    if push is not None:
        print(f"Pushed to {model_card.push(out, push)}")
    return out


def _read(run_dir: str | Path, best: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """State and draft of the newest checkpoint, or of the best weights. If a run that trains on removes the folder
    meanwhile, there is another by then."""

    def read() -> tuple[dict[str, Any], dict[str, Tensor]]:
        folder, saved = _find(run_dir, best)
        return saved, load_file(folder / checkpoint.WEIGHTS)

    try:
        return read()
    except FileNotFoundError:
        return read()


def _find(run_dir: str | Path, best: bool) -> checkpoint.Found:
    """The newest checkpoint, or the best weights."""
    found = checkpoint.best(run_dir) if best else checkpoint.newest(run_dir, read=[checkpoint.WEIGHTS])
    if found is None and best:
        raise ValueError(f"best: {run_dir} keeps no best weights; train with decoding.every above 0, or leave it out")
    if found is None:
        raise ValueError(f"run_dir: {run_dir} holds no whole checkpoint; train first, or give another run's folder")
    return found


def _check_out(out: Path) -> None:
    check_out(out)
    if checkpoint.checkpoint_folder(out).exists():  # even with a draft's files in it
        raise ValueError(f"out: {out} is the folder of a training run; give another, such as {out / 'draft'}")


def _entry(config: Config, trained_with: str | None, target: Target) -> dict[str, str]:
    """The target as the run began with it, by the hash of its weights (if any), whatever lies at its path now."""
    now, entry = target_entry(target), target_entry(target, trained_with)
    if now != entry:
        print(
            f"target.path: {config.target.path} has other weights now (weights_sha256 {now.get('weights_sha256')}) "
            f"than the run trained with ({trained_with}); the draft is exported as one of those",
            flush=True,
        )
    return entry


def _check_restriction(config: Config, n: int) -> None:
    trained = config.draft.draft_vocab_size
    if trained is not None and n > trained:
        raise ValueError(
            f"draft_vocab_size: {n}, but the run trained with {trained} (draft.draft_vocab_size); give at most that"
        )


def _restricted(trained: Trained, n: int) -> Draft:
    """The same draft, restricted to the n of its tokens that are most frequent in the training split."""
    config, target, draft = trained.config, trained.target, trained.draft
    rows, vocab_size = open_rows(config, "train", target), target.model.config.vocab_size
    token_ids_E = frequent_tokens(rows, vocab_size, n, target.eos_token_ids, among=draft.token_ids)
    config = config.changed(draft={"draft_vocab_size": n})
    return frozen_draft(config, target, draft.state_dict() | {"token_ids": token_ids_E})


def _write(trained: Trained, out: Path, prove: Callable[[Draft], None]) -> str:
    """Write a draft folder, once `prove` has accepted what is read back; returns details for the log."""
    config, draft = trained.config, trained.draft
    block = isinstance(draft, LongSpec)
    rates = {name: trained.heldout.get(name) for name in ("rank_rates", "choice_rates")}
    info = DraftInfo(
        target=trained.entry,
        train_length=config.data.seq_len,
        tree={"levels": list(BEAM[: draft.config.noise]) if block else [RANKS] * draft.config.n_heads} | rates,
        versions={name: version(name) for name in VERSIONS},
        train_config=to_dict(config.changed(target={"path": lasting_name(config.target.path)})),
        noise=draft.config.noise if block else None,
        step=trained.step,
    )
    place = trained.target.model.lm_head.weight
    save_draft(out, draft, info, lambda staged: prove(load_draft(staged).to(place.device, place.dtype)))
    if draft.token_ids is None:
        return ""
    return f", for {len(draft.token_ids)} of {trained.target.model.config.vocab_size} tokens"


@torch.no_grad()
def largest_difference(heldout: ShardSet, target: Target, one: Draft, other: Draft) -> float:
    """The largest difference of a logit between two drafts on held-out text; LongSpec's under each noise shift."""
    batch = read_batch(heldout, [Place(0, 0)])
    n = min(len(batch.tokens), COMPARED)
    borders = [border for border in batch.borders if border < n] + [n]
    tokens_N = batch.tokens[:n].to(target.model.lm_head.weight.device)
    pairs = zip(*(_logits(target, draft, tokens_N, borders) for draft in (one, other)), strict=True)
    return float(torch.stack([(a - b).abs().max() for a, b in pairs]).max())


def _logits(target: Target, draft: Draft, tokens_N: Tensor, borders: list[int]) -> Iterator[Tensor]:
    """Logits [N, V] or [N, E] of each head or noise shift in turn."""
    model, head = target.model, draft.head(target.model.lm_head.weight)
    if isinstance(draft, LongSpec):
        last_kv = model(Pass(tokens_N[None], borders=borders, needs={"last_kv"})).last_kv
        assert last_kv is not None
        seen = model.embed_tokens(tokens_N), plain_positions(borders).to(tokens_N.device), last_kv[0][0], last_kv[1][0]
        for shift in range(1, draft.config.noise + 1):
            queries = plan_queries(borders, [shift] * (len(borders) - 1), draft.config.window)
            yield draft.states(*seen, queries) @ head.T
        return
    (field,) = draft.needs
    hidden_ND = getattr(model(Pass(tokens_N[None], borders=borders, needs=draft.needs)), field)[0]
    for state_ND in draft.states(hidden_ND):
        yield state_ND @ head.T
