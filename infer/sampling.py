"""The sampling parameters of one request, checked. infer/slot_sampling.py chooses tokens by them."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from longdraft.infer.values import check_text, is_integer, is_number, short_repr

# Below this a logit / T could overflow; long before, the choice is the greedy one.
COLDEST = 1e-6
# Above this T would leave fp32, and infinities would be divided.
WARMEST = 1e30
MOST_LOGPROBS = 20  # as in other servers


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded. Penalties, biases and bans hold also when greedy, filters only above temperature 0.

    Order: contextual, repetition, presence and frequency penalty, biases, bans, temperature, top-k, top-p, min-p, eta.

    Attributes:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k largest logits (ties with the k-th stay); 0 is off.
        top_p: keep the most probable tokens until their sum reaches it (ties with the last one stay); 1 is off.
        min_p: drop tokens less probable than min_p times the most probable one; 0 is off.
        seed: 64-bit; the same seed gives the same text with every drafter. None draws one, which the result reports.
        max_new_tokens: at least 1.
        min_new_tokens: before so many new tokens no end or stop token is chosen, and no stop string looked for; 0 is
            off.
        stop_token_ids: end the sequence; the stop token is the last one returned.
        ignore_eos: go on after the target's own end tokens.
        eta_cutoff: drop tokens less probable than min(eta_cutoff, sqrt(eta_cutoff) * exp(-entropy)), never the most
            probable one (Hewitt et al. 2022); 0 is off.
        min_tokens_to_keep: min-p and eta keep at least this many of the most probable tokens (ties with the last one
            stay), as TokenSwift's program does with 20; 1 is off.
        contextual_penalty: logits of tokens among the last `contextual_window` ones are divided by it where positive,
            multiplied by it where negative (TokenSwift, section 3.3); 1 is off.
        contextual_window: how far that penalty looks back, in tokens.
        repetition_penalty: the same over prompt and generation, as in transformers; 1 is off.
        presence_penalty: subtracted once from the logits of tokens that were generated; 0 is off.
        frequency_penalty: subtracted from the logits of a token for each time that it was generated; 0 is off.
        banned_token_ids: tokens that are never chosen.
        logit_bias: numbers by token id that are added to the logits.
        stop_strings: texts that end the sequence, also across the borders of tokens.
        logprobs: the result has the log-probability of every new token under the target's own distribution, the softmax
            of its logits, and of this many most probable tokens in its place. None is off.
        prompt_logprobs: the same for the prompt's tokens.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_new_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    eta_cutoff: float = 0.0
    min_tokens_to_keep: int = 1
    contextual_penalty: float = 1.0
    contextual_window: int = 1024
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    banned_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    min_new_tokens: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self):
        def demand(holds: bool, name: str, want: str):
            if not holds:
                raise ValueError(f"sampling parameter {name}={short_repr(getattr(self, name))} must be {want}")

        def number(name: str, holds, want: str):
            value = getattr(self, name)
            demand(is_number(value) and holds(value), name, want)
            object.__setattr__(self, name, float(value))

        def integer(name: str, least: int, want: str, most: int = 2**62 - 1):
            value = getattr(self, name)
            demand(is_integer(value) and least <= int(value) <= most, name, want)
            object.__setattr__(self, name, int(value))

        warmest = "0 (greedy) or a number above, from 1e-06 on up to 1e+30"
        number("temperature", lambda t: t == 0 or COLDEST <= t <= WARMEST, warmest)
        integer("top_k", 0, "0 (off) or a positive integer")
        number("top_p", lambda p: 0 < p <= 1, "above 0 and at most 1 (off)")
        number("min_p", lambda p: 0 <= p < 1, "at least 0 (off) and below 1")
        number("eta_cutoff", lambda p: 0 <= p < 1, "at least 0 (off) and below 1")
        integer("max_new_tokens", 1, "at least 1, an integer")
        integer("min_tokens_to_keep", 1, "at least 1 (off), an integer")
        integer("min_new_tokens", 0, "at least 0 (off), an integer")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                integer(name, 0, f"None or an integer from 0 to {MOST_LOGPROBS}", MOST_LOGPROBS)
        integer("contextual_window", 1, "at least 1, an integer")
        for name in ("contextual_penalty", "repetition_penalty"):
            number(name, lambda p: 1e-30 <= p <= 1e30, "above 0 (1e-30 to 1e30); 1 is off, above it penalises")
        for name in ("presence_penalty", "frequency_penalty"):
            number(name, lambda p: abs(p) <= 1e30, "a number from -1e30 to 1e30; 0 is off, above it penalises")
        if self.seed is not None:
            integer("seed", -(2**63), "None or an integer of 64 bits", 2**64 - 1)
        demand(isinstance(self.ignore_eos, bool), "ignore_eos", "True or False")
        for name in ("stop_token_ids", "banned_token_ids"):
            ids = getattr(self, name)
            listed = isinstance(ids, Sequence | set | frozenset) and not isinstance(ids, str | bytes)
            demand(listed and all(is_integer(t) and int(t) >= 0 for t in ids), name, "a list of token ids")
            object.__setattr__(self, name, tuple(int(token) for token in ids))
        biases = self.logit_bias
        sound = isinstance(biases, Mapping) and all(
            is_integer(token) and token >= 0 and is_number(bias) and abs(bias) <= 1e30 for token, bias in biases.items()
        )
        demand(sound, "logit_bias", "a mapping of token ids to numbers from -1e30 to 1e30")
        object.__setattr__(self, "logit_bias", {int(token): float(bias) for token, bias in biases.items()})
        listed = isinstance(self.stop_strings, list | tuple)
        full = listed and all(isinstance(text, str) and text for text in self.stop_strings)
        demand(full, "stop_strings", "a list of strings that are not empty")
        for text in self.stop_strings:
            check_text("sampling parameter stop_strings", text)
        object.__setattr__(self, "stop_strings", tuple(self.stop_strings))


def draw_seed() -> int:
    """A fresh seed for a request that names none."""
    return secrets.randbits(63)


def one_each(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    """One SamplingParams for each prompt; a single one serves all prompts."""
    if not isinstance(params, SamplingParams | Sequence):
        raise ValueError(f"params: {params!r}; give SamplingParams, one or one for each prompt")
    many = [params] * count if isinstance(params, SamplingParams) else list(params)
    if len(many) != count:
        raise ValueError(f"params: {len(many)} SamplingParams for {count} prompts; give one, or one for each prompt")
    return many
