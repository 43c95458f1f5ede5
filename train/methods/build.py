"""The trained method that a config names, with its network."""

from collections.abc import Mapping

import torch
from torch import Tensor

from longdraft.models.decoder import Decoder
from longdraft.models.draft_folder import DRAFTS, Draft
from longdraft.models.drafts.longspec import LongSpec
from longdraft.models.drafts.medusa import Medusa
from longdraft.models.drafts.tokenswift import TokenSwift, TokenSwiftConfig
from longdraft.models.target import Target
from longdraft.train.config import Config, LongSpecSection
from longdraft.train.methods.base import Method
from longdraft.train.methods.heads import HeadsMethod
from longdraft.train.methods.longspec import LongSpecMethod


def open_method(config: Config, target: Decoder, token_ids_E: Tensor | None = None) -> Method:
    """The method with its network as it is before the first step, drawn from the seed. `token_ids_E`: the restricted
    vocabulary, where the config asks for one."""
    section, generator = config.draft, torch.Generator().manual_seed(config.train.seed)
    if isinstance(section, LongSpecSection):
        return LongSpecMethod(config, LongSpec(section.network(target.config), generator, target, token_ids_E))
    shape = section.network(target.config)
    if isinstance(shape, TokenSwiftConfig):
        heads = TokenSwift(shape, generator, target.norm.weight, token_ids_E)
    else:
        heads = Medusa(shape, generator, token_ids_E)
    return HeadsMethod(config, heads, target.config.vocab_size)


def frozen_draft(config: Config, target: Target, weights: Mapping[str, Tensor]) -> Draft:
    """A separate network with these weights (of a `state_dict`), frozen, on the target's device."""
    with torch.device("meta"):  # shapes alone: the weights are given
        draft: Draft = DRAFTS[config.draft.method][1](config.draft.network(target.model.config))
    draft.load_state_dict(weights, assign=True)
    return draft.to(target.model.lm_head.weight.device).requires_grad_(False).eval()
