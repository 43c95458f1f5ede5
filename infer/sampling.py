"""The sampling parameters of one request, validated, and published presets. infer/choice/slots.py chooses by them."""

import re
import secrets
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any

from pydantic import AfterValidator, Field, Strict

from longdraft.models.schema import Bool, Int, Str, validated_dataclass

# Below this, logit / T could overflow; at far higher T the choice is already greedy.
COLDEST = 1e-6
# Far above this, T would overflow fp32, and -inf / inf is NaN.
WARMEST = 1e30
MOST_LOGPROBS = 20  # as in other servers


def _warm_or_greedy(temperature: float) -> float:
    if temperature and not COLDEST <= temperature <= WARMEST:
        raise ValueError(f"{temperature} is not valid; give 0 (greedy), or a number from {COLDEST} to {WARMEST}")
    return temperature


Number = Annotated[float, Strict()]
Fraction = Annotated[Number, Field(ge=0, lt=1)]
# A token may get two penalties; a logit times both must stay finite, or a ban of it would be NaN.
Penalty = Annotated[Number, Field(ge=1e-15, le=1e15)]
Shift = Annotated[Number, Field(ge=-1e30, le=1e30)]
AtLeast0 = Annotated[Int, Field(ge=0, lt=2**62)]
AtLeast1 = Annotated[Int, Field(ge=1, lt=2**62)]
TokenIds = tuple[AtLeast0, ...]
Logprobs = Annotated[Int, Field(ge=0, le=MOST_LOGPROBS)]
Text = Annotated[Str, Field(min_length=1)]


@validated_dataclass
class SamplingParams:
    """How one request is decoded. Penalties, biases and bans apply at every temperature, filters only above 0.

    Order: grammar, contextual, repetition, presence and frequency penalty, biases, bans, temperature, top-k, top-p,
    min-p, eta.

    Attributes:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k largest logits (ties with the k-th stay); 0 is off.
        top_p: keep the most probable tokens until their sum reaches it (ties with the last one stay); 1 is off.
        min_p: drop tokens less probable than min_p times the most probable one; 0 is off.
        seed: 64-bit; the same seed gives the same text with every drafter. None draws one, which the result reports.
        max_new_tokens: at least 1.
        min_new_tokens: until there are this many new tokens, no end or stop token is chosen and stop strings are
            ignored; 0 is off.
        stop_token_ids: end the sequence; the stop token is the last one returned, and has no text.
        ignore_eos: continue after the target's own end tokens, unless there is a grammar.
        eta_cutoff: drop tokens less probable than min(eta_cutoff, sqrt(eta_cutoff) * exp(-entropy)), never the most
            probable one (Hewitt et al. 2022); 0 is off.
        min_tokens_to_keep: min-p and eta keep at least this many of the most probable tokens (ties with the last one
            stay); TokenSwift's code uses 20; 1 is off.
        contextual_penalty: logits of tokens among the last `contextual_window` ones are divided by it where positive,
            multiplied by it where negative (TokenSwift, section 3.3); 1 is off.
        contextual_window: how far that penalty looks back, in tokens.
        repetition_penalty: the same over prompt and generation, as in transformers; 1 is off.
        presence_penalty: subtracted once from the logits of tokens that were generated; 0 is off.
        frequency_penalty: subtracted from the logits of a token for each time that it was generated; 0 is off.
        banned_token_ids: tokens that are never chosen.
        logit_bias: numbers by token id that are added to the logits.
        stop_strings: texts that end the sequence; they may span several tokens.
        grammar: what the generated text must follow, in llguidance's dialect of Lark; infer/choice/grammar.py makes one
            of a JSON schema, a regular expression or choices. The sequence ends where no more may follow. None is off.
        logprobs: return the log-probability of every new token under the target's own distribution (the softmax of its
            logits), and those of this many most probable tokens at its position. None is off.
    """

    temperature: Annotated[Number, AfterValidator(_warm_or_greedy)] = 0.0
    top_k: AtLeast0 = 0
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    min_p: Fraction = 0.0
    seed: Annotated[Int, Field(ge=-(2**63), lt=2**64)] | None = None
    max_new_tokens: AtLeast1 = 256
    stop_token_ids: TokenIds = ()
    ignore_eos: Bool = False
    eta_cutoff: Fraction = 0.0
    min_tokens_to_keep: AtLeast1 = 1
    contextual_penalty: Penalty = 1.0
    contextual_window: AtLeast1 = 1024
    repetition_penalty: Penalty = 1.0
    presence_penalty: Shift = 0.0
    frequency_penalty: Shift = 0.0
    banned_token_ids: TokenIds = ()
    stop_strings: tuple[Text, ...] = ()
    min_new_tokens: AtLeast0 = 0
    logit_bias: dict[AtLeast0, Shift] = field(default_factory=dict, hash=False)
    grammar: Text | None = None
    logprobs: Logprobs | None = None


GREEDY = SamplingParams()


def draw_seed() -> int:
    """A fresh seed for a request that names none."""
    return secrets.randbits(63)


# Published settings by name, as keywords of SamplingParams. Source: TokenSwift (arXiv 2502.18890), Table 10. Settings
# that the table omits are from the authors' code: min-p and eta always keep 20 tokens, and with Llama-3.1 two tokens
# are banned.
_TOKENSWIFT = {"temperature": 1.0, "contextual_window": 1024}
_MIN_P = _TOKENSWIFT | {"min_tokens_to_keep": 20}
PRESETS: dict[str, Mapping[str, Any]] = {
    "tokenswift-llama3.1-8b": _MIN_P | {"min_p": 0.1, "contextual_penalty": 1.2, "banned_token_ids": (18328, 78191)},
    "tokenswift-yarn-llama2-7b-128k": _TOKENSWIFT | {"top_p": 0.9, "contextual_penalty": 1.15},
    "tokenswift-qwen2.5-1.5b": _TOKENSWIFT | {"top_p": 0.9, "contextual_penalty": 1.15},
    "tokenswift-qwen2.5-7b": _MIN_P | {"min_p": 0.05, "contextual_penalty": 1.15},
    "tokenswift-qwen2.5-14b": _MIN_P | {"min_p": 0.05, "contextual_penalty": 1.13},
}


def preset_for(target: str) -> str | None:
    """The published preset for a target's name, such as "meta-llama/Llama-3.1-8B"; None if there is none."""

    def plain(text: str) -> str:
        return re.sub(r"[^a-z0-9.]", "", text.lower())

    return next((name for name in PRESETS if plain(name.removeprefix("tokenswift-")) in plain(target)), None)
