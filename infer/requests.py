"""Turns prompts and sampling parameters into checked requests."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from longdraft.infer.sampling import SamplingParams, Text, draw_seed
from longdraft.models.schema import Schema, Str, short_repr, validate
from longdraft.models.special_tokens import TEMPLATE_ERRORS, special_tokens
from longdraft.models.target import Target

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
# A text that UTF-8 can encode; without a constraint pydantic does not look.
Encodable = Annotated[Str, Field(min_length=0)]


@dataclass(frozen=True)
class Request:
    """A prompt and how it is decoded. `read_requests` makes them.

    Attributes:
        index: the prompt's place in the call.
        sampling: its seed is not None, and its `stop_token_ids` have the target's end tokens too.
        continues: whether the new text continues that of the prompt, unlike the answer in a chat.
        skip_special: whether special tokens are left out of the text; otherwise only the end token is.
    """

    index: int
    prompt: list[int]
    sampling: SamplingParams
    continues: bool = False
    skip_special: bool = True

    @property
    def continued_tokens(self) -> Sequence[int]:
        """The tokens whose text the new text continues."""
        return self.prompt if self.continues else ()


def read_requests(
    target: Target,
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams],
    max_length: int,
) -> list[Request]:
    """Make one request of each prompt: a text, token ids, or a chat's messages, which the tokenizer's template formats.

    params: one for all prompts, or one for each. Special tokens among the stop strings, which are no text to be found,
    become stop tokens.

    Raises:
        ValueError: a prompt that is empty, too long for `max_length` positions, or no prompt; a text if the target has
            no tokenizer; banned or stop token ids outside the vocabulary; not as many params as prompts.
    """
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()  # type: ignore[union-attr]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise ValueError(f"prompts: {short_repr(prompts)}; give a text or a list of prompts")
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], Mapping)):
        prompts = [prompts]  # type: ignore[list-item]
    if any(isinstance(prompt, Integral) for prompt in prompts):
        raise ValueError("prompts: token ids where prompts belong; give a list of prompts, such as [[1, 2, 3]]")
    many = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    if not (isinstance(many, Sequence) and all(isinstance(one, SamplingParams) for one in many)):
        raise ValueError(f"params: {short_repr(params)}; give SamplingParams, one or one for each prompt")
    if len(many) != len(prompts):
        raise ValueError(f"params: {len(many)} for {len(prompts)} prompts; give one, or one for each prompt")
    requests = []
    for index, (prompt, sampling) in enumerate(zip(prompts, many, strict=True)):
        tokens = prompt_tokens(target, prompt, f"prompt {index}")
        seed = draw_seed() if sampling.seed is None else sampling.seed
        ends = [] if sampling.ignore_eos else [*target.eos_token_ids]
        if sampling.stop_strings:
            ends += _special_stops(target, sampling.stop_strings)
        sampling = replace(sampling, seed=seed, stop_token_ids=(*sampling.stop_token_ids, *ends))
        _check_tokens(target, index, tokens, sampling, max_length)
        requests.append(Request(index, tokens, sampling, continues=isinstance(prompt, str)))
    return requests


def prompt_tokens(
    target: Target, prompt: Any, name: str = "prompt", options: Mapping[str, Any] | None = None
) -> list[int]:
    """The token ids of a text, of a chat (up to where the answer begins) or of token ids, whose range is not checked.

    options: what the tokenizer gets beside a text, or a chat's template beside the messages.

    Raises ValueError, beginning with `name`, for anything else, and if the tokenizer or its template cannot read it.
    """
    prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    listed = isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes)
    if listed and all(isinstance(token, Integral) and not isinstance(token, bool) for token in prompt):
        return [int(token) for token in prompt]
    if not isinstance(prompt, str) and not (listed and all(isinstance(message, Mapping) for message in prompt)):
        raise ValueError(f"{name} is {short_repr(prompt)}; give a text, a list of token ids or a list of chat messages")
    if target.tokenizer is None:
        raise ValueError(f"{name}: a text needs a tokenizer, and this target has none; give token ids")
    if isinstance(prompt, str):
        return target.tokenizer(check_text(name, prompt), **(options or {})).input_ids
    if not target.tokenizer.chat_template:
        raise ValueError(f"{name}: a chat needs a chat template, and {target.name}'s tokenizer has none; give text")
    messages = [_message(message, f"{name}, message {i}") for i, message in enumerate(prompt)]  # type: ignore
    failed: Exception | None = None
    # A few templates read the arguments of tool calls only as text.
    for variant in ([_with_objects(message) for message in messages], messages):
        try:
            return target.tokenizer.apply_chat_template(
                variant, add_generation_prompt=True, return_dict=False, **(options or {})
            )
        except TEMPLATE_ERRORS as error:
            failed = failed or error
    raise ValueError(f"{name}: {target.name}'s chat template refuses these messages: {failed}") from failed


def check_text(name: str, text: str) -> str:
    """The text. Raises ValueError, beginning with `name`, if UTF-8 cannot encode it, such as an argument of the command
    line that is not UTF-8."""
    return validate(Encodable, text, name)  # pyright: ignore[reportArgumentType]


class _TextPart(Schema, extra="ignore"):
    type: Literal["text"]
    text: Encodable


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class _Message(Schema, extra="ignore"):
    """What is read of a chat's message. Some interfaces write its content as parts of text."""

    role: Text
    content: Annotated[tuple[_TextPart, ...] | None, Field(min_length=1), BeforeValidator(_as_parts)] = None
    tool_calls: Any = None

    @model_validator(mode="after")
    def _has_content(self) -> "_Message":
        if self.content is None and self.role != "assistant":
            raise ValueError('content: None; give a text, or parts {"type": "text", "text": ...}')
        return self


def _message(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A chat's message with its content as one text, which an assistant that calls tools may lack."""
    read = validate(_Message, dict(message), name)
    if read.content is None and read.tool_calls:
        return dict(message)
    return {**message, "content": "".join(part.text for part in read.content or ())}


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """A message with the arguments of its tool calls as objects, which templates expect. In OpenAI's interface they are
    JSON texts."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple):
        return message
    return {**message, "tool_calls": [_tool_call(call) for call in calls]}


def _tool_call(call: Any) -> Any:
    if not (isinstance(call, Mapping) and isinstance(function := call.get("function"), Mapping)):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _check_tokens(target: Target, index: int, tokens: list[int], sampling: SamplingParams, max_length: int) -> None:
    vocab = target.model.config.vocab_size
    if not tokens:
        raise ValueError(f"prompt {index} has no tokens; give at least one (the BOS token, for an open start)")
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
    if len(tokens) >= max_length:
        raise ValueError(
            f"prompt {index} has {len(tokens)} tokens; at most {max_length - 1} fit, to leave room for one more "
            f"(max_length={max_length}, the target has {target.model.config.max_positions} positions)"
        )


def _special_stops(target: Target, strings: Sequence[str]) -> list[int]:
    if target.tokenizer is None:
        raise ValueError("stop_strings: this target has no tokenizer; use stop_token_ids")
    vocab = target.model.config.vocab_size
    return [token for token, text in special_tokens(target.tokenizer).items() if text in strings and token < vocab]
