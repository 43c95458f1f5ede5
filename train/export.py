"""A run's newest checkpoint to a draft folder, which is then loaded again and held against the trained draft.

Not here: the folder's form (models/draft_folder.py).
Shapes: T positions, D hidden, V vocabulary, I heads.
"""

from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from longdraft.models.draft_folder import DraftInfo, load_draft, save_draft, target_entry
from longdraft.models.drafts.tokenswift import RANKS, TokenSwift
from longdraft.models.hf import Target, load_target
from longdraft.train import state
from longdraft.train.batches import read_batch
from longdraft.train.config import Config, heads_config, to_dict
from longdraft.train.loop import DTYPES, open_rows
from longdraft.train.teacher import Teacher

# Logits are compared on so many positions of a held-out row: enough to meet every weight, and small beside tokens x V.
COMPARED = 128
VERSIONS = ("longdraft", "torch", "transformers", "deepspeed", "safetensors")


def export(run_dir: str | Path, out: str | Path | None = None, target: Target | None = None) -> Path:
    """Writes the draft folder (run_dir/draft unless `out` says otherwise), checks it, and says where it lies.

    Args:
        target: saves loading the run's own.

    Raises:
        ValueError: no whole checkpoint in run_dir, or the reloaded draft does not give the trained one's logits.
    """
    found = state.newest(run_dir)
    if found is None:
        raise ValueError(f"run_dir: {run_dir} holds no whole checkpoint; train first, or give another run's folder")
    folder, saved = found
    config = state.saved_config(run_dir, saved)
    target = target or load_target(
        config.target.path, DTYPES[config.train.precision], gguf_file=config.target.gguf_file
    )
    trained = _trained(config, folder, target)
    out = Path(out) if out is not None else Path(run_dir) / "draft"
    heldout = saved["extra"]["heldout"]
    info = DraftInfo(
        target=target_entry(target),
        train_length=config.data.seq_len,
        tree={"levels": [RANKS] * config.draft.n_heads}
        | {name: heldout.get(name) for name in ("rank_rates", "choice_rates")},
        versions={name: version(name) for name in VERSIONS},
        train_config=to_dict(config),
    )
    save_draft(out, trained, info)
    difference = largest_difference(config, target, trained, load_draft(out, target))
    if difference != 0:
        raise ValueError(
            f"out: the draft in {out} gives logits up to {difference:.3g} off the trained one's; export again"
        )
    print(
        f"Exported step {saved['step']} of {run_dir} to {out}: reloaded, largest difference of a logit {difference:g}"
    )
    return out


def _trained(config: Config, folder: Path, target: Target) -> TokenSwift:
    """The draft as the trainer held it, in its training dtype."""
    shape = heads_config(config, target.model.config.hidden_size, target.model.config.rms_norm_eps)
    draft = TokenSwift(shape)
    draft.load_state_dict(load_file(folder / state.WEIGHTS), assign=True)
    return draft.requires_grad_(False)


@torch.no_grad()
def largest_difference(config: Config, target: Target, one: TokenSwift, other: TokenSwift) -> float:
    """Of any head's logit on held-out text, the two drafts against the same target."""
    rows = open_rows(config, "heldout", target)
    tokens_1T = read_batch(rows, [0]).tokens[:, :COMPARED]
    teacher = Teacher(target.model, one.needs)
    hidden_1TD = teacher.hidden(tokens_1T)

    def logits(draft: TokenSwift) -> Tensor:
        return torch.stack(draft.states(hidden_1TD)) @ teacher.lm_head_VD.T

    return float((logits(one) - logits(other)).abs().max())
