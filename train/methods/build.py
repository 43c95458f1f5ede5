"""The trained method that a config names, with its network."""

from collections.abc import Mapping

import torch
from torch import Tensor

from longdraft.models.decoder import Decoder
from longdraft.models.draft_folder import DRAFTS, Draft
from longdraft.models.drafts.heads import Medusa, TokenSwift
from longdraft.models.drafts.longspec import LongSpec
from longdraft.models.target import Target
from longdraft.train.config import DataSection, DraftSection, TrainSection
from longdraft.train.methods.base import Method
from longdraft.train.methods.heads import HeadsMethod
from longdraft.train.methods.longspec import LongSpecMethod

# By the name of a method: makes the network (config, generator, target, restricted vocabulary), and how it is trained.
METHODS = {
    "tokenswift": (lambda shape, rng, target, ids: TokenSwift(shape, rng, target.norm.weight, ids), HeadsMethod),
    "medusa": (lambda shape, rng, target, ids: Medusa(shape, rng, ids), HeadsMethod),
    "longspec": (LongSpec, LongSpecMethod),
}


def open_method(
    section: DraftSection, data: DataSection, train: TrainSection, target: Decoder, token_ids_E: Tensor | None = None
) -> Method:
    """The method with its network as it is before the first step, drawn from the seed. `token_ids_E`: the restricted
    vocabulary, where the config asks for one."""
    make_network, kind = METHODS[section.method]
    network = make_network(
        section.network(target.config), torch.Generator().manual_seed(train.seed), target, token_ids_E
    )
    return kind(data, train, network, target.config.vocab_size)


def frozen_draft(section: DraftSection, target: Target, weights: Mapping[str, Tensor]) -> Draft:
    """A separate network with these weights (of a `state_dict`), frozen, on the target's device."""
    with torch.device("meta"):  # shapes alone: the weights are given
        draft: Draft = DRAFTS[section.method][1](section.network(target.model.config))
    draft.load_state_dict(weights, assign=True)
    return draft.to(target.model.lm_head.weight.device).requires_grad_(False).eval()
