"""The arguments and GenerationConfig fields that infer/transformers_api.py supports. All others are refused."""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from longdraft.infer.values import is_integer, is_number, short_repr

# The supported fields, and disable_compile, which says nothing about the result.
SUPPORTED = frozenset(
    {
        *("max_length", "max_new_tokens", "stop_strings", "eos_token_id", "pad_token_id", "bos_token_id"),
        *("do_sample", "temperature", "top_k", "top_p", "min_p", "eta_cutoff", "repetition_penalty", "suppress_tokens"),
        *("num_return_sequences", "return_dict_in_generate", "disable_compile"),
    }
)
# transformers itself ignores these without do_sample.
SAMPLING_ONLY = frozenset({"top_h", "typical_p", "epsilon_cutoff"})
# Values that change nothing, besides None, False and transformers' defaults.
NEUTRAL = {"guidance_scale": 1, "penalty_alpha": 0, "cache_implementation": "dynamic"}
# The least value of each whole number.
LEAST = {"max_new_tokens": 1, "max_length": 1, "num_return_sequences": 1}
REAL = ("temperature", "top_p", "min_p", "eta_cutoff", "repetition_penalty")
REMEDIES = {
    "bad_words_ids": "single tokens can be banned by suppress_tokens",
    "min_length": "with the end tokens in suppress_tokens, rows reach their full length",
    "min_new_tokens": "with the end tokens in suppress_tokens, rows reach their full length",
    "assistant_model": "a drafter does that; name one by drafter=",
    "prompt_lookup_num_tokens": "a drafter does that: drafter='prompt_lookup'",
    "use_cache": "decoding always keeps a cache",
    "inputs": "give the prompt as input_ids",
}


def check_types(
    model: Any, input_ids: Any, mask: Any, config: Any, streamer: Any, options: Any, kwargs: Mapping[str, Any]
) -> None:
    """Raise ValueError for the first argument of a wrong type."""
    arguments = {
        "model": (hasattr(model, "generation_config"), model, "a loaded transformers model"),
        "input_ids": (isinstance(input_ids, Tensor | None), input_ids, "a tensor of integer ids [batch, length]"),
        "attention_mask": (isinstance(mask, Tensor | None), mask, "a tensor like input_ids, 0 on padding"),
        "generation_config": (isinstance(config, GenerationConfig | None), config, "a GenerationConfig"),
        "streamer": (streamer is None or hasattr(streamer, "put"), streamer, "one of transformers' streamers"),
        "options": (isinstance(options, Mapping | None), options, "a dict of the drafter's options"),
        # transformers iterates over these two when it makes the configuration, and `check_fields` does not check them.
        "suppress_tokens": _ids_argument(kwargs, "suppress_tokens", single=False),
        "eos_token_id": _ids_argument(kwargs, "eos_token_id", single=True),
    }
    for name, (fits, value, expected) in arguments.items():
        if not fits:
            raise ValueError(f"{name}={short_repr(value)}: give {expected}")


def _ids_argument(kwargs: Mapping[str, Any], name: str, single: bool) -> tuple[bool, Any, str]:
    """(whether the argument is token ids, its value, what it must be). `single`: one id alone is allowed."""
    value = kwargs.get(name)
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes) and all(map(is_integer, value))
    fits = value is None or isinstance(value, Tensor) or is_list or (single and is_integer(value))
    return fits, value, "a token id or a list of them" if single else "a list of token ids"


def check_fields(values: Mapping[str, Any]) -> None:
    """Raise ValueError for the first field of GenerationConfig that is not the number, id or bool it must be."""
    for name, value in values.items():
        if value is None:
            continue
        if name in LEAST and not (is_integer(value) and value >= LEAST[name]):
            raise ValueError(f"{name}={short_repr(value)}: give a whole number of at least {LEAST[name]}")
        if name in ("pad_token_id", "bos_token_id") and not is_integer(value):
            raise ValueError(f"{name}={short_repr(value)}: give a token id")
        if name in ("do_sample", "return_dict_in_generate") and not isinstance(value, bool):
            raise ValueError(f"{name}={short_repr(value)}: give True or False")
        if name in REAL and not is_number(value):
            raise ValueError(f"{name}={short_repr(value)}: give a number")


def refuse_unsupported(config: GenerationConfig, kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError for the first field that asks for something and is not supported.

    `kwargs` are the arguments that GenerationConfig has no field for.
    """
    defaults = GenerationConfig._get_default_generation_params() | {"use_cache": True}
    unsupported = vars(GenerationConfig()).keys() - SUPPORTED - {"transformers_version"}
    fields = {name: getattr(config, name) for name in sorted(unsupported) if not name.startswith("_")}
    for name, value in fields.items():
        neutral = (defaults.get(name), NEUTRAL.get(name))
        if value is None or (value is False and name != "use_cache") or value in neutral:
            continue
        if name in SAMPLING_ONLY and not config.do_sample:
            continue
        raise ValueError(f"{name}={value!r} is not supported here; {_remedy(name)}")
    for name, value in kwargs.items():
        if value is not None and value is not False and not (isinstance(value, Sequence) and not value):
            raise ValueError(f"{name}: this argument is not supported here; {_remedy(name)}")


def _remedy(name: str) -> str:
    return f"{REMEDIES[name]}, or use model.generate" if name in REMEDIES else "leave it out, or use model.generate"


def token_ids(ids: Any) -> list[int]:
    """Token ids as a list, from any form in which a configuration has them."""
    ids = ids.tolist() if isinstance(ids, Tensor) else ids
    return [] if ids is None else [ids] if isinstance(ids, Integral) else list(ids)  # type: ignore[list-item]
