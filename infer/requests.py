"""Turns prompts and sampling parameters into checked requests."""

import copy
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Integral
from typing import Annotated, Any, Literal

from llguidance import LLMatcher
from pydantic import BeforeValidator, Field

from longdraft.infer.choice.grammar import matcher_of
from longdraft.infer.sampling import SamplingParams, Text, draw_seed
from longdraft.models.schema import Instance, Schema, Str, short_repr, validate
from longdraft.models.special_tokens import TEMPLATE_ERRORS, special_tokens
from longdraft.models.target import Target

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
# Text that UTF-8 can encode; pydantic checks this only if the field has a constraint.
Encodable = Annotated[Str, Field(min_length=0)]


@dataclass(frozen=True)
class Request:
    """A prompt and how it is decoded. `read_requests` makes them.

    Attributes:
        index: the prompt's place in the call.
        sampling: with a seed; its `stop_token_ids` include the target's end tokens, unless `ignore_eos`.
        continues: whether the new text continues the prompt's text; False for a chat's answer.
        skip_special: whether the text omits all special tokens; otherwise it omits only the end token.
        matcher: of its grammar. Other processes get a request without it.
    """

    index: int
    prompt: list[int]
    sampling: SamplingParams
    continues: bool = False
    skip_special: bool = True
    matcher: LLMatcher | None = field(default=None, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"matcher": None}


def read_requests(
    target: Target,
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams],
    max_length: int,
    first: int = 0,
) -> list[Request]:
    """Make one request of each prompt: a text, token ids, or a chat's messages, which the tokenizer's template formats.

    Stop strings that are special tokens become stop tokens, because special tokens have no text.

    Args:
        params: one for all prompts, or one for each.
        first: the index of the first prompt.

    Raises:
        ValueError: a prompt that is empty, too long for `max_length` positions, or of another type; a text if the
            target has no tokenizer; banned or stop token ids outside the vocabulary; a grammar that cannot be followed;
            not as many params as prompts.
    """
    if isinstance(prompts, str) or (
        isinstance(prompts, list) and prompts and isinstance(prompts[0], Mapping | Integral)
    ):
        prompts = [prompts]  # type: ignore[list-item]
    prompts = validate(list[Any], prompts, "prompts")
    many = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    many = validate(list[Instance[SamplingParams]], many, "params")
    if len(many) != len(prompts):
        raise ValueError(f"params: {len(many)}, but prompts: {len(prompts)}; give one, or one for each prompt")
    requests, matchers = [], dict[str, LLMatcher]()
    for index, (prompt, sampling) in enumerate(zip(prompts, many, strict=True), first):
        tokens = prompt_tokens(target, prompt, f"prompt {index}")
        seed = draw_seed() if sampling.seed is None else sampling.seed
        ends = [] if sampling.ignore_eos and sampling.grammar is None else [*target.eos_token_ids]
        if sampling.stop_strings:
            ends += _special_stops(target, sampling.stop_strings)
        sampling = replace(sampling, seed=seed, stop_token_ids=(*sampling.stop_token_ids, *ends))
        _check_tokens(target, index, tokens, sampling, max_length)
        if (grammar := sampling.grammar) is not None and grammar not in matchers:
            matchers[grammar] = matcher_of(target, grammar)
        matcher = matchers[grammar].deep_copy() if grammar is not None else None
        requests.append(Request(index, tokens, sampling, continues=isinstance(prompt, str), matcher=matcher))
    return requests


def prompt_tokens(
    target: Target, prompt: Any, name: str = "prompt", options: Mapping[str, Any] | None = None
) -> list[int]:
    """The token ids of a text, of a chat (up to the start of the answer) or of token ids, whose range is not checked.

    options: further arguments for the tokenizer (text) or the chat template (chat).

    Raises ValueError, whose message starts with `name`, for other types and if the tokenizer or its template fails.
    """
    listed, options = isinstance(prompt, list | tuple), options or {}
    if listed and all(isinstance(token, Integral) and not isinstance(token, bool) for token in prompt):
        return [int(token) for token in prompt]
    if not isinstance(prompt, str) and not (listed and all(isinstance(message, Mapping) for message in prompt)):
        raise ValueError(f"{name} is {short_repr(prompt)}; give a text, a list of token ids or a list of chat messages")
    if target.tokenizer is None:
        raise ValueError(f"{name}: a text needs a tokenizer, and this target has none; give token ids")
    if isinstance(prompt, str):
        text = validate(Encodable, prompt, name)  # pyright: ignore[reportArgumentType]
        return target.tokenizer(text, **options).input_ids
    if not target.tokenizer.chat_template:
        raise ValueError(f"{name}: a chat needs a chat template, and {target.name}'s tokenizer has none; give text")
    messages = []
    for i, message in enumerate(prompt):
        is_call = bool(message.get("tool_calls")) and message.get("content") is None
        read = validate(_Message, {**message, "content": ""} if is_call else dict(message), f"{name}, message {i}")
        messages.append({**message, "content": None if is_call else read.content})
    render = partial(target.tokenizer.apply_chat_template, add_generation_prompt=True, return_dict=False, **options)
    try:
        with suppress(*TEMPLATE_ERRORS):  # raised by a template that expects arguments as text
            return render(_with_objects(messages))
        return render(messages)
    except TEMPLATE_ERRORS as error:
        raise ValueError(f"{name}: {target.name}'s chat template refuses these messages: {error}") from error


def _with_objects(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A copy of the messages with the arguments of tool calls parsed: OpenAI sends JSON text, but transformers'
    templates expect objects."""
    messages = copy.deepcopy(messages)
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            with suppress(LookupError, TypeError, ValueError):  # the template refuses malformed calls
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return messages


class _TextPart(Schema, extra="ignore"):
    type: Literal["text"]
    text: Encodable


def _as_text(content: Any) -> Any:
    """Joins a list of text parts, which some clients send, to one text."""
    if not isinstance(content, list | tuple) or not content:
        return content
    return "".join(part.text for part in validate(tuple[_TextPart, ...], content))


class _Message(Schema, extra="ignore"):
    """The fields of a chat message that are validated; the template gets the other fields unchanged."""

    role: Text
    content: Annotated[Encodable, BeforeValidator(_as_text)]


def _check_tokens(target: Target, index: int, tokens: list[int], sampling: SamplingParams, max_length: int) -> None:
    vocab = target.model.config.vocab_size
    if not tokens:
        raise ValueError(f"prompt {index} has no tokens; give at least one, such as the BOS token")
    for name, ids in [
        (f"prompt {index}: token ids", tokens),
        ("logit_bias", list(sampling.logit_bias)),
        ("banned_token_ids", sampling.banned_token_ids),
        ("stop_token_ids", sampling.stop_token_ids),
    ]:
        if ids and (min(ids) < 0 or max(ids) >= vocab):
            raise ValueError(f"{name} must lie in 0..{vocab - 1}, got {short_repr(min(ids))}..{short_repr(max(ids))}")
    if len({*sampling.banned_token_ids, *(sampling.stop_token_ids if sampling.min_new_tokens else ())}) == vocab:
        raise ValueError("banned_token_ids: all tokens are banned; leave at least one")
    if sampling.grammar is not None:
        for name in ("min_new_tokens", "banned_token_ids"):
            if getattr(sampling, name):
                raise ValueError(f"{name}: the text's grammar may allow no other tokens; omit the one or the other")
    if len(tokens) >= max_length:
        raise ValueError(
            f"prompt {index} has {len(tokens)} tokens; give at most {max_length - 1}, so that one new token fits"
        )


def _special_stops(target: Target, strings: Sequence[str]) -> list[int]:
    if target.tokenizer is None:
        raise ValueError("stop_strings: this target has no tokenizer; use stop_token_ids")
    vocab = target.model.config.vocab_size
    return [token for token, text in special_tokens(target.tokenizer).items() if text in strings and token < vocab]
