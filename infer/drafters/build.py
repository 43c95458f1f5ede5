"""Builds drafters by name, and combinations of them as "a+b"."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

from longdraft.infer.drafters.base import Drafter, Plain
from longdraft.infer.drafters.combine import Combined
from longdraft.infer.drafters.heads import HeadsDrafter
from longdraft.infer.drafters.longspec import LongSpecDrafter
from longdraft.infer.drafters.prompt_lookup import PromptLookup
from longdraft.infer.drafters.small_model import SmallModelDrafter
from longdraft.infer.drafters.token_recycling import TokenRecycling
from longdraft.infer.drafters.tokenswift import TokenSwiftDrafter
from longdraft.infer.drafters.triforce import TriForceDrafter
from longdraft.infer.tree import likeliest_nodes
from longdraft.models.device import on_device
from longdraft.models.draft_folder import DRAFTS, draft_method, load_draft, read_info
from longdraft.models.hf import load_target
from longdraft.models.target import Target

# A trained drafter takes its draft as `draft`, and some take another model as `small`; other arguments are options.
DRAFTERS: dict[str, Callable[..., Drafter]] = {
    "plain": Plain,
    "tokenswift": TokenSwiftDrafter,
    "medusa": HeadsDrafter,
    "longspec": LongSpecDrafter,
    "triforce": TriForceDrafter,
    "small_model": SmallModelDrafter,
    "token_recycling": TokenRecycling,
    "prompt_lookup": PromptLookup,
}
TRAINED = frozenset(name for name, make in DRAFTERS.items() if "draft" in inspect.signature(make).parameters)
# Nodes of a tree that is chosen by measured rates: the likeliest ones, best first.
RATED_NODES = 39


def build_drafter(name: str, target: Target, draft: Any = None, options: Mapping[str, Any] | None = None) -> Drafter:
    """Build the drafter `name` for this target.

    Args:
        name: a key of DRAFTERS, or several joined by "+", which then fill one tree.
        draft: a draft folder, or a loaded draft, for the one among them that is trained.
        options: keyword arguments of the drafter; in a combination, "drafter.option" for one of them.

    Raises:
        ValueError: an unknown name or option, a draft that is missing, or that the drafter cannot use.
    """
    with on_device(target.model.embed_tokens.weight.device):
        drafters = [_build(one, target, given) for one, given in parse_drafters(name, draft, options)]
    return drafters[0] if len(drafters) == 1 else Combined(drafters)


def _build(name: str, target: Target, given: dict[str, Any]) -> Drafter:
    make, weight = DRAFTERS[name], target.model.embed_tokens.weight
    if isinstance(given.get("draft"), str | Path):
        given["draft"] = load_draft(given["draft"], target)
    if isinstance(given.get("small"), str | Path):
        given["small"] = load_target(given["small"], weight.dtype, weight.device)
    return make(**({"target": target} if "target" in inspect.signature(make).parameters else {}), **given)


def parse_drafters(name: str, draft: Any, options: Mapping[str, Any] | None) -> list[tuple[str, dict[str, Any]]]:
    """The drafters in `name`, each with its keyword arguments but the target. Loads nothing. Arguments as for
    `build_drafter`; raises its errors that no target would avert."""
    names = name.split("+")
    for one in names:
        if one not in DRAFTERS:
            raise ValueError(f"drafter: unknown name {one!r}; known: {', '.join(DRAFTERS)}, or several as a+b")
    if draft is not None and not TRAINED.intersection(names):
        raise ValueError(f"draft: {name} takes none; omit it or name one of {', '.join(sorted(TRAINED))}")
    options_of: dict[str, dict[str, Any]] = {one: {} for one in names}
    for key, value in (options or {}).items():
        owner, _, option = key.rpartition(".")
        owner = names[0] if len(names) == 1 and not owner else owner
        if owner not in names:
            raise ValueError(f"options: {key}: say which drafter's, as in {names[0]}.{option}")
        options_of[owner][option] = value
    for one, given in options_of.items():
        parameters = inspect.signature(DRAFTERS[one]).parameters
        known = [key for key in parameters if key not in ("target", "draft")]
        if wrong := sorted(set(given) - set(known)):
            raise ValueError(f"options: {one} does not know {', '.join(wrong)}; it knows {', '.join(known) or 'none'}")
        if "small" in known and parameters["small"].default is inspect.Parameter.empty and "small" not in given:
            raise ValueError(f"options: {one} needs small, a model of the target's vocabulary: a path, name or Target")
        if one not in TRAINED:
            continue
        if draft is None:
            raise ValueError(f"draft: {one} needs a trained draft; give the folder that `longdraft export` wrote")
        if isinstance(draft, str | Path):
            method, networks = draft_method(draft), get_args(parameters["draft"].annotation)[0]
            if not issubclass(DRAFTS[method][1], networks):
                raise ValueError(f"draft: {draft} is a {method} draft, which {one} cannot use; name {method} instead")
            options_of[one] = _tree_option(draft, parameters) | given
        options_of[one]["draft"] = draft
    return [(one, options_of[one]) for one in names]


def _tree_option(folder: str | Path, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A draft folder's tree as the drafter's option: its likeliest nodes if rates were measured, else its levels."""
    tree = read_info(folder).tree
    if "shape" in parameters and (rates := tree.get("choice_rates")):
        return {"shape": likeliest_nodes(rates, RATED_NODES)}
    levels = tree.get("levels")
    return {name: tuple(levels) for name in ("shape", "widths") if name in parameters and levels}
