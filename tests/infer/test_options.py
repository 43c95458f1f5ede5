"""Every option of every drafter accepts valid values and refuses others with a ValueError that names it."""

import inspect

import pytest
import torch

from longdraft.infer.drafters.build import DRAFTERS, TRAINED, build_drafter
from longdraft.infer.tree import TreeShape
from longdraft.models.drafts.heads import Medusa, MedusaConfig, TokenSwift, TokenSwiftConfig
from longdraft.models.drafts.longspec import LongSpec, LongSpecConfig

VOCAB = 61
NO_NUMBER = ("4x", "", 2.5, float("nan"), True, [], (3,), {}, object(), -1)
COUNT_OR_ZERO = (*NO_NUMBER, None)
COUNT = (*COUNT_OR_ZERO, 0)
OPTIONAL_COUNT = (*NO_NUMBER, 0)
LEVELS = ("48", "", 2.5, True, None, {}, object(), (), (3, 0), (3, -1), (3, 2.5), (3, "3"), (True,), 0, -1)
SHAPE = (*(value for value in LEVELS if value is not None), (1,) * 9)
# Invalid and valid values of each option.
CASES = {
    "tokenswift": {
        "shape": (SHAPE, (None, 3, (3, 3), [3, 2, 1], TreeShape.cartesian((2, 2)))),
        "draft_pass": (("sometimes", 1, None, True, [], {}, object()), ("auto", "always", "never")),
        "budget": ((*COUNT, 16), (17, 64)),
        "ngrams": (COUNT_OR_ZERO, (0, 3)),
    },
    "medusa": {"shape": (SHAPE, (None, 3, (3, 3), [3, 2, 1], TreeShape.cartesian((2, 2))))},
    "longspec": {"widths": ((*LEVELS, (1,) * 9), (1, (1, 1, 1), [2, 3])), "extended": (OPTIONAL_COUNT, (None, 1, 99))},
    "triforce": {
        "small": ((3, 2.5, True, [], {}, object()), (None,)),
        "gamma": (COUNT, (1,)),
        "chain": (COUNT, (1, 8)),
        "budget": ((*COUNT, 12), (16, 64)),
        "chunk": ((*COUNT, 3), (4,)),
        "select": (("last", 1, None, True, [], {}, object()), ("retrieved", "recent")),
    },
    "small_model": {
        "small": ((None, 3, 2.5, True, [], {}, object()), ()),
        "gamma": ((*COUNT, 129), (1, 5)),
    },
    "token_recycling": {
        "nodes": ((*COUNT, 81), (1, 80)),
    },
    "prompt_lookup": {name: (COUNT, (1, 4)) for name in ("length", "candidates")},
}


@pytest.fixture
def small(tiny_target):
    return tiny_target(vocab_size=VOCAB, n_layers=1, seed=5)


def draft_of(name, target):
    if name not in TRAINED:
        return None
    generator, size = torch.Generator().manual_seed(7), target.model.config.hidden_size
    return {
        "tokenswift": lambda: TokenSwift(TokenSwiftConfig(size, rms_norm_eps=1e-6), generator),
        "medusa": lambda: Medusa(MedusaConfig(size)),
        "longspec": lambda: LongSpec(LongSpecConfig.for_target(target.model.config, window=8)),
    }[name]().requires_grad_(False)


def options_with(name, small, option, value):
    """The option, and others that it needs."""
    needed = {"small": small} if "small" in CASES[name] else {}
    return needed | {option: value}


def test_every_option_is_tried():
    for name, kind in DRAFTERS.items():
        options = set(inspect.signature(kind).parameters) - {"target", "draft", "args", "kwargs"}
        assert options == set(CASES.get(name, {})), name


@pytest.mark.parametrize(("name", "option"), [(name, option) for name in CASES for option in CASES[name]])
def test_what_an_option_cannot_be_is_a_value_error_that_names_it(target, small, name, option):
    draft, (wrong, right) = draft_of(name, target), CASES[name][option]
    for value in wrong:
        with pytest.raises(ValueError) as error:
            build_drafter(name, target, draft, options_with(name, small, option, value))
        assert option in str(error.value) or value == "", (value, error.value)
    for value in right:
        build_drafter(name, target, draft, options_with(name, small, option, value))


@pytest.mark.parametrize("name", sorted(TRAINED))
def test_a_draft_of_another_kind_is_named(target, name):
    for draft in (torch.nn.Linear(2, 2), 3, object()):
        with pytest.raises(ValueError, match=r"^draft: "):
            build_drafter(name, target, draft)


def test_what_would_have_no_effect_is_refused(target, small):
    small.model.to("meta")
    for name, options, said in [
        ("triforce", {"gamma": 3}, "gamma=3"),
        ("tokenswift", {"draft_pass": "never", "budget": 64}, "budget=64"),
        ("small_model", {"small": small}, "small: .* is on meta"),
    ]:
        with pytest.raises(ValueError, match=said):
            build_drafter(name, target, draft_of(name, target), options)
