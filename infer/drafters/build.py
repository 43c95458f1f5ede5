"""The drafters by name."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path

from longdraft.infer.drafters.base import Drafter
from longdraft.infer.drafters.plain import Plain
from longdraft.infer.drafters.tokenswift import TokenSwiftDrafter
from longdraft.infer.shape import TreeShape
from longdraft.models.draft_folder import load_draft, read_info
from longdraft.models.hf import Target


def _plain(target: Target, draft) -> Plain:
    if draft is not None:
        raise ValueError("draft: plain decoding has none; leave it out or name a drafter that uses it")
    return Plain()


def _tokenswift(target: Target, draft, shape: TreeShape | None = None) -> TokenSwiftDrafter:
    if draft is None:
        raise ValueError("draft: tokenswift needs trained heads; give the folder that `longdraft export` wrote")
    if isinstance(draft, str | Path):
        shape = shape or TreeShape.cartesian(read_info(draft).tree["levels"])
        draft = load_draft(draft, target)
    return TokenSwiftDrafter(target, draft, shape)


DRAFTERS: dict[str, Callable[..., Drafter]] = {"plain": _plain, "tokenswift": _tokenswift}


def build_drafter(name: str, target: Target, draft, options: Mapping) -> Drafter:
    """The drafter `name` for this target, with its trained draft and its own options."""
    if name not in DRAFTERS:
        raise ValueError(f"drafter: unknown name {name!r}; known: {', '.join(sorted(DRAFTERS))}")
    known = list(inspect.signature(DRAFTERS[name]).parameters)[2:]
    if unknown := sorted(set(options) - set(known)):
        raise ValueError(f"options: {name} does not know {', '.join(unknown)}; it knows {', '.join(known) or 'none'}")
    return DRAFTERS[name](target, draft, **options)
