"""OpenAI's interface: from bodies to requests for the engine.

A field that would change the answer and is not served (NOT_SERVED) is refused by name, unless its value asks for
nothing. Every other field that is not served is ignored, and `ignored` names it.
Source: OpenAI's API reference, "Chat" and "Completions"; `top_k`, `min_p`, `min_tokens`, `repetition_penalty`,
`stop_token_ids`, `ignore_eos`, `skip_special_tokens`, `continuous_usage_stats` and `chat_template_kwargs` are vLLM's.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from inspect import signature
from typing import Annotated, Any, Self, TypeVar

from pydantic import ConfigDict, Field, model_validator

from longdraft.infer.requests import Request, prompt_tokens, read_requests
from longdraft.infer.sampling import Logprobs, Number, SamplingParams, draw_seed
from longdraft.models.schema import Bool, Int, Schema, Str, short_repr, validate
from longdraft.models.target import Target

MOST_CHOICES = 128  # prompts times n
MOST_CHARACTERS = 300  # of an error, which repeats names and values that the client chose
BAN = -100  # OpenAI's lowest logit_bias, which bans its token
COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens in /v1/completions
# Fields that SamplingParams reads, by their names there.
SAMPLING = {"repeat_penalty": "repetition_penalty", "min_tokens": "min_new_tokens", "stop": "stop_strings"}
SAMPLING |= {name: name for name in ("temperature", "top_p", "top_k", "min_p", "eta_cutoff", "seed", "ignore_eos")}
SAMPLING |= {name: name for name in ("presence_penalty", "frequency_penalty", "repetition_penalty", "stop_token_ids")}
# Variables of chat templates that clients give as fields.
TEMPLATE_VARIABLES = ("reasoning_effort", "enable_thinking", "thinking")
# Fields that would change the answer, here and in other servers, and values of them that ask for nothing, besides false
# ones.
_NOT_SERVED = """
    tools functions bad_words documents logits_processors tool_choice function_call response_format modalities
    verbosity suffix best_of add_generation_prompt skip_special_tokens echo continue_final_message
    include_stop_str_in_output use_beam_search return_token_ids return_tokens_as_token_ids add_special_tokens
    length_penalty typical_p tfs_z mirostat mirostat_mode xtc_probability dry_multiplier top_a no_repeat_ngram_size
    min_length audio chat_template prompt_embeds prompt_logprobs truncate_prompt_tokens web_search_options lora_path
    allowed_token_ids structured_outputs guided_json guided_regex guided_choice guided_grammar json_schema regex ebnf
    grammar guided_decoding structural_tag stop_regex custom_logit_processor reasoning max_length max_completion_tokens
"""
NOT_SERVED = set(_NOT_SERVED.split())
NEUTRAL = {"tool_choice": "auto", "function_call": "auto", "response_format": {"type": "text"}, "modalities": ["text"]}
NEUTRAL |= {"verbosity": "medium", "best_of": 1, "length_penalty": 1, "typical_p": 1, "tfs_z": 1}
NEUTRAL |= {"add_generation_prompt": True, "skip_special_tokens": True}
# The keys of a message that the chat template reads, and those that are refused.
MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
NOT_READ = ("audio", "function_call")


class ApiError(Exception):
    """An error to answer with. `body` is OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.headers = status, headers
        types = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        error_type = types.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.body = {"error": {"message": message, "type": error_type, "param": param, "code": code}}


class _Fields(Schema):
    """Fields of a body. Null is the default everywhere, and there may be others."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        return {k: v for k, v in values.items() if v is not None} if isinstance(values, dict) else values

    @property
    def others(self) -> dict[str, Any]:
        return self.model_extra or {}


class StreamOptions(_Fields):
    """What a stream carries besides the text. `include_accepted` is ours: how much of it drafters had proposed."""

    include_usage: Bool = False
    continuous_usage_stats: Bool = False
    include_accepted: Bool = False


@dataclass(frozen=True)
class Asked:
    """What a body asks for, in the same terms for chats and completions.

    Attributes:
        prompts: as `prompt_tokens` takes each. options: what the tokenizer or its chat template gets beside one.
        limit, limit_field: the most new tokens (None: as many as fit), and the name of the field that says so.
        alternatives: how many of the most probable tokens are wanted with each token's log-probability; None if no
            log-probabilities are wanted.
        skip_special: as in Request.
    """

    is_chat: bool
    prompts: list[Any]
    options: Mapping[str, Any]
    limit: int | None
    limit_field: str
    alternatives: int | None
    skip_special: bool = True


class Body(_Fields):
    """The fields of both interfaces, without those that SamplingParams validates."""

    model: Str | None = None
    max_tokens: Int | None = None
    n: Annotated[Int, Field(ge=1, le=MOST_CHOICES)] = 1
    logit_bias: dict[int, Number] = {}
    stream: Bool = False
    stream_options: StreamOptions = StreamOptions()

    def asked(self) -> Asked:
        raise NotImplementedError

    @property
    def ignored(self) -> set[str]:
        """The names of the fields that are not read."""
        names = self.others.keys() - SAMPLING.keys() - NOT_SERVED - set(TEMPLATE_VARIABLES)
        return names | {f"stream_options.{name}" for name in self.stream_options.others}

    @model_validator(mode="after")
    def _is_served(self) -> Self:
        for name, value in self.others.items():
            if name in NOT_SERVED and value and value != "none" and value != NEUTRAL.get(name):
                raise ValueError(f"{name}: {short_repr(value)}; this is not served: leave it out")
        return self


class Chat(Body):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Int | None = None
    logprobs: Bool = False
    top_logprobs: Logprobs = 0
    chat_template_kwargs: dict[str, Any] = {}

    def asked(self) -> Asked:
        limit_field = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        variables = {name: self.others[name] for name in TEMPLATE_VARIABLES if name in self.others}
        options, prompt = variables | self.chat_template_kwargs, [_readable(message) for message in self.messages]
        alternatives = self.top_logprobs if self.logprobs else None
        return Asked(True, [prompt], options, getattr(self, limit_field), limit_field, alternatives)


def _readable(message: dict[str, Any]) -> dict[str, Any]:
    """The keys of a message that the template reads. A key that asks for nothing is left out, since templates ask which
    there are. `reasoning` is vLLM's newer name of reasoning_content, and a refusal stands in place of the content.

    Raises ValueError for a key that would change the answer and is not read.
    """
    if found := [key for key in NOT_READ if message.get(key)]:
        raise ValueError(f"messages: {found[0]} is not served; give {', '.join(MESSAGE_KEYS)}")
    named = {"reasoning_content": message["reasoning"]} if "reasoning" in message else {}
    named |= {key: message[key] for key in MESSAGE_KEYS if key in message}
    if named.get("content") is None and message.get("refusal"):
        named["content"] = message["refusal"]
    return {key: value for key, value in named.items() if key in ("role", "content") or value}


class Completion(Body):
    """The body of /v1/completions."""

    prompt: Any
    max_tokens: Int = COMPLETION_TOKENS
    logprobs: Any = None
    skip_special_tokens: Bool = True
    add_special_tokens: Bool = True

    def asked(self) -> Asked:
        listed = (
            isinstance(self.prompt, list) and self.prompt and all(isinstance(one, str | list) for one in self.prompt)
        )
        prompts = self.prompt if listed else [self.prompt]
        options = {} if self.add_special_tokens else {"add_special_tokens": False}
        alternatives = None if self.logprobs is False else self.logprobs
        return Asked(False, prompts, options, self.max_tokens, "max_tokens", alternatives, self.skip_special_tokens)


B = TypeVar("B", bound=Body)


def parse(kind: type[B], body: bytes) -> B:
    """Read a body's fields. Raises ApiError, which names the first wrong one."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    try:
        return validate(kind, fields)
    except ValueError as error:
        raise _refused(error, {}) from error


def requests_of(body: Body, target: Target, max_length: int) -> list[Request]:
    """A body's requests: `n` for each prompt, prompt after prompt. Choice i of a prompt has seed + i, modulo 2^64.

    Raises ApiError.
    """
    try:
        asked, requests = body.asked(), list[Request]()
    except ValueError as error:
        raise _refused(error, {}) from error
    if (count := len(asked.prompts) * body.n) > MOST_CHOICES:
        raise ApiError(400, f"n: {count} answers, prompts times n; give 1 to {MOST_CHOICES} in one request", "n")
    own = signature(target.tokenizer.apply_chat_template).parameters if asked.is_chat else {}
    if wrong := sorted(asked.options.keys() & own.keys()):
        text = f"chat_template_kwargs.{wrong[0]}: this is no variable of a template; leave it out"
        raise ApiError(400, text, "chat_template_kwargs")
    # The names of fields in the engine's errors.
    names = {value: name for name, value in SAMPLING.items() if name != "repeat_penalty"}
    names |= {"max_new_tokens": asked.limit_field, "banned_token_ids": "logit_bias"}
    names |= {"prompt": "messages"} if asked.is_chat else {}
    for i, prompt in enumerate(asked.prompts):
        try:
            tokens = prompt_tokens(target, prompt, f"prompt {i}", asked.options)
            params = _sampling(body, asked, _new_tokens(asked, len(tokens), max_length))
            seed = draw_seed() if params.seed is None else params.seed
            seeds = [seed + j if seed + j < 2**64 else seed + j - 2**64 for j in range(body.n)]
            choices = read_requests(target, [tokens] * body.n, [replace(params, seed=s) for s in seeds], max_length)
        except ValueError as error:
            raise _refused(error, names) from error
        continues = not asked.is_chat
        requests += [replace(one, continues=continues, skip_special=asked.skip_special) for one in choices]
    return requests


def _refused(error: ValueError, names: Mapping[str, str]) -> ApiError:
    """The answer to an error that begins with a field's name; names: what the body calls it."""
    text = str(error)[:MOST_CHARACTERS]
    found = re.match("[a-z_]+", text)
    name = found and names.get(found[0], found[0])
    return ApiError(400, text if found is None else f"{name}{text[found.end() :]}", name)


def _new_tokens(asked: Asked, prompt_tokens: int, max_length: int) -> int:
    """The most new tokens after a prompt of this length, at least 1. Raises ApiError if they do not fit."""
    room, field = max_length - prompt_tokens, asked.limit_field
    if room < 1:
        name = "messages" if asked.is_chat else "prompt"
        text = f"{name}: {prompt_tokens} tokens; at most {max_length - 1} fit, to leave room for one more"
        raise ApiError(400, text, name, "context_length_exceeded")
    if asked.limit is not None and asked.limit > room:
        text = (
            f"{field}: {short_repr(asked.limit)}, but the prompt has {prompt_tokens} tokens and both together may have "
            f"at most {max_length}; ask for at most {room}, or shorten the prompt"
        )
        raise ApiError(400, text, field, "context_length_exceeded")
    return room if asked.limit is None else asked.limit


def _sampling(body: Body, asked: Asked, max_new_tokens: int) -> SamplingParams:
    """The body's sampling. Missing fields have OpenAI's defaults: temperature 1, no filter, no penalty."""
    given: dict[str, Any] = {"temperature": 1.0}
    given |= {SAMPLING[name]: value for name, value in body.others.items() if name in SAMPLING}
    if given.get("top_k") == -1:  # vLLM's value for off
        del given["top_k"]
    if isinstance(stop := given.get("stop_strings"), str):
        given["stop_strings"] = [stop]
    return SamplingParams(
        **given,
        max_new_tokens=max_new_tokens,
        banned_token_ids=tuple(token for token, bias in body.logit_bias.items() if bias == BAN),
        logit_bias={token: bias for token, bias in body.logit_bias.items() if bias != BAN},
        logprobs=asked.alternatives,
    )
