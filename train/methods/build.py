"""Builds the draft that a run trains: the method that its config names, with network, vocabulary and initial weights.

Most of LongSpec's draft time goes into reading the LM head once per level, and a few tokens make up most of a text. So
a draft may be restricted to the most frequent tokens. The omitted ones cost acceptance, never exactness;
models/drafts/longspec.py tells how the draft treats them. Shapes: V vocabulary, E draft vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from longdraft.data_prep.shards import ShardSet
from longdraft.models.decoder import Decoder
from longdraft.models.draft_folder import DRAFTS, Draft, load_draft
from longdraft.models.drafts.heads import Medusa, TokenSwift
from longdraft.models.drafts.longspec import LongSpec
from longdraft.models.target import Target
from longdraft.train.checkpoint import WEIGHTS
from longdraft.train.config import Config, DataSection, DraftSection, TrainSection
from longdraft.train.methods.base import Method
from longdraft.train.methods.heads import HeadsMethod
from longdraft.train.methods.longspec import LongSpecMethod
from longdraft.train.sharding import whole_layers

# For each method: a function of (config, generator, target, restricted vocabulary) that makes the network; its Method.
METHODS = {
    "tokenswift": (lambda shape, rng, target, ids: TokenSwift(shape, rng, target.norm.weight, ids), HeadsMethod),
    "medusa": (lambda shape, rng, target, ids: Medusa(shape, rng, ids), HeadsMethod),
    "longspec": (LongSpec, LongSpecMethod),
}
# Fields of a draft's config that do not change the shapes of its weights: initialisation, noise shifts, and the size of
# its vocabulary, whose weights are the target's.
SHAPELESS = dict.fromkeys(("noise", "warm_start", "init_std", "out_norm_init", "draft_vocab_size"))


def open_draft(config: Config, target: Target, rows: ShardSet, saved: Path | None) -> Method:
    """The method with its network and initial weights. All ranks call it.

    Args:
        saved: the folder of the checkpoint to resume, if any: its vocabulary is used; its weights are loaded later.
    """
    section, token_ids = config.draft, None
    start = load_draft(section.start_from, target) if section.start_from is not None and saved is None else None
    if section.draft_vocab_size is not None:
        if saved is not None:
            token_ids = load_file(saved / WEIGHTS)["token_ids"]
        elif start is not None and start.config.draft_vocab_size == section.draft_vocab_size:
            token_ids = start.token_ids
        else:
            vocab_size = target.model.config.vocab_size
            token_ids = frequent_tokens(rows, vocab_size, section.draft_vocab_size, target.eos_token_ids)
    with whole_layers(target.model, target.model.config.attention_layers[0], -1):  # a warm start reads them
        method = open_method(section, config.data, config.train, target.model, token_ids)
    if start is not None:  # the network keeps its own vocabulary
        weights = {name: weight for name, weight in start.state_dict().items() if name != "token_ids"}
        method.draft.load_state_dict(method.draft.state_dict() | weights)
    return method


def check_target(section: DraftSection, target: Target) -> None:
    """Raises ValueError if a target loaded through transformers lacks something that the draft section needs. Its model
    may also be `read_target`'s."""
    if target.loader != "transformers":
        return
    # Fields of models/transformers_model.py, which imports much of transformers; absent in `read_target`'s.
    known, rotates = (getattr(target.model, name, True) for name in ("known", "rotates"))
    # Gemma stores its norms' weights minus 1; our decoder adds the 1 when it loads them.
    has_our_norms = known is not None and not target.model.config.norm_offset
    lacks = {
        "method": section.method == "longspec" and not rotates,  # the last layer's keys over whole heads
        "warm_start": getattr(section, "warm_start", False),
        "final_norm": getattr(section, "final_norm", False) and not has_our_norms,
        "out_norm_init": getattr(section, "out_norm_init", "ones") == "target" and not has_our_norms,
    }
    for name in (name for name, is_lacking in lacks.items() if is_lacking):
        raise ValueError(
            f"draft.{name}: {getattr(section, name)} needs parts of {target.name} that target.loader=transformers lacks"
            "; omit it, or use draft.method=tokenswift or medusa"
        )


def open_method(
    section: DraftSection, data: DataSection, train: TrainSection, target: Decoder, token_ids_E: Tensor | None = None
) -> Method:
    """The method with its network, initialised from the seed. `token_ids_E`: the restricted vocabulary, if the config
    asks for one."""
    make_network, kind = METHODS[section.method]
    network = make_network(
        section.network(target.config), torch.Generator().manual_seed(train.seed), target, token_ids_E
    )
    return kind(data, train, network, target.config.vocab_size)


def same_shape(one: Any, other: Any) -> bool:
    """Whether drafts with these configs have the same method and weights of the same shapes."""
    return type(one) is type(other) and asdict(one) | SHAPELESS == asdict(other) | SHAPELESS


def frequent_tokens(
    rows: ShardSet, vocab_size: int, n: int, always: Sequence[int] = (), among: Tensor | None = None
) -> Tensor:
    """The n most frequent token ids of a split, int64 [E = n], ascending; a function of the rows alone.

    Every token of the split except padding counts; of equally frequent tokens the smaller id is preferred. Because ids
    are ascending, equal logits resolve to the same token as in the full vocabulary, and the LM head's rows are read in
    order.

    Args:
        rows: the training split; all of it is read, a few million tokens at a time.
        vocab_size: V, the target's.
        always: ids that are included whatever their count: the tokens that end a sequence, which occur once in each
            document. Ids outside the vocabulary are ignored.
        among: the candidate ids, int64, beside `always`. None: the whole vocabulary.

    Raises ValueError if n is below the number of `always` or above that of all candidates, or the split has an id >= V.
    """
    included = sorted({token for token in always if 0 <= token < vocab_size})
    most = vocab_size if among is None else len({*among.tolist(), *included})
    least = max(1, len(included))
    if not least <= n <= most:
        raise ValueError(
            f"draft_vocab_size: {n}; give {least} (the tokens that end a sequence) to {most} (all candidates)"
        )
    counts_V = np.zeros(vocab_size, dtype=np.int64)
    for tokens in rows.used_tokens():
        counts = np.bincount(tokens, minlength=vocab_size)
        if len(counts) > vocab_size:
            raise ValueError(
                f"data.path: {rows.folder} holds the token {len(counts) - 1}, but the target's vocabulary has "
                f"{vocab_size}; prepare it with this target"
            )
        counts_V += counts
    if among is not None:
        counts_V[np.setdiff1d(np.arange(vocab_size), among.cpu())] = -1
    counts_V[included] = np.iinfo(np.int64).max
    most_frequent_E = np.argsort(-counts_V, kind="stable")[:n]
    return torch.from_numpy(np.sort(most_frequent_E))


def frozen_draft(section: DraftSection, target: Target, weights: Mapping[str, Tensor]) -> Draft:
    """A separate network with these weights (of a `state_dict`), frozen, on the target's device."""
    with torch.device("meta"):  # shapes only: the weights are given
        draft: Draft = DRAFTS[section.method][1](section.network(target.model.config))
    draft.load_state_dict(weights, assign=True)
    return draft.to(target.model.lm_head.weight.device).requires_grad_(False).eval()
