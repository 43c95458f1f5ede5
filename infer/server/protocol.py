"""OpenAI's interface: from bodies to requests for the engine.

A field that would change the answer and is not served (NOT_SERVED) is refused by name, unless its value asks for
nothing. Every other field that is not served is ignored, and `ignored` names it.
Source: OpenAI's API reference, "Chat" and "Completions"; the fields `top_k`, `min_p`, `min_tokens`,
`repetition_penalty`, `stop_token_ids`, `ignore_eos`, `skip_special_tokens`, `continuous_usage_stats` and
`chat_template_kwargs` are vLLM's.
"""

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from inspect import signature
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator

from longdraft.infer.drafters.base import Request
from longdraft.infer.requests import prompt_tokens, read_requests
from longdraft.infer.sampling import MOST_LOGPROBS, SamplingParams, draw_seed
from longdraft.models.schema import short_repr
from longdraft.models.target import Target

MOST_CHOICES = 128  # prompts times n
BAN = -100  # OpenAI's lowest logit_bias, which bans its token
COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens in /v1/completions
# Fields that would change the answer, here and in other servers, with the values beside null that ask for nothing.
NOT_SERVED: dict[str, tuple[Any, ...]] = {
    name: nothing
    for nothing, names in (
        (([],), "tools functions bad_words documents logits_processors"),
        (("none", "auto"), "tool_choice function_call"),
        (({"type": "text"},), "response_format"),
        ((["text"],), "modalities"),
        (("medium",), "verbosity"),
        (("",), "suffix"),
        ((True,), "add_generation_prompt skip_special_tokens"),
        ((False,), "echo continue_final_message include_stop_str_in_output use_beam_search"),
        ((False,), "return_token_ids return_tokens_as_token_ids add_special_tokens"),
        ((1,), "length_penalty typical_p tfs_z"),
        ((0,), "mirostat mirostat_mode xtc_probability dry_multiplier top_a no_repeat_ngram_size min_length"),
        ((), "audio chat_template prompt_embeds prompt_logprobs truncate_prompt_tokens web_search_options lora_path"),
        ((), "allowed_token_ids structured_outputs guided_json guided_regex guided_choice guided_grammar"),
        ((), "json_schema regex ebnf grammar guided_decoding structural_tag stop_regex custom_logit_processor"),
        ((), "thinking enable_thinking reasoning max_length max_completion_tokens"),
    )
    for name in names.split()
}
# The keys of a message that the chat template reads, those that are read as one of them, and those that are refused.
MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
ALSO_READ, NOT_READ = ("reasoning", "refusal"), ("audio", "function_call")
# How the engine's errors name a parameter, and the fields that have another name here.
PARAMETER = re.compile(rf"({'|'.join(one.name for one in fields(SamplingParams))})\b")
FIELDS = {"stop_strings": "stop", "banned_token_ids": "logit_bias", "min_new_tokens": "min_tokens"}
# Fields of several types; pydantic's message would name only one of them.
UNIONS = {
    "prompt": "give a text, token ids, or a list of either",
    "stop": "give a text or a list of texts",
    "logprobs": f"give a whole number from 0 to {MOST_LOGPROBS}",
}


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


class StreamOptions(BaseModel):
    """What a stream carries besides the text. `include_accepted` is ours: how much of it drafters had proposed."""

    model_config = ConfigDict(extra="allow", strict=True)
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_accepted: bool | None = False


class Body(BaseModel):
    """The fields of both interfaces. Null is the default everywhere."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = Field(
        None, validation_alias=AliasChoices("repetition_penalty", "repeat_penalty")
    )
    eta_cutoff: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = False
    logit_bias: dict[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=BAN, le=100)]] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    # The most new tokens, and the name of the field that says so; how many of the most probable tokens are wanted with
    # each token's log-probability (None: no log-probabilities); the prompts as `read_requests` takes them; and what
    # the tokenizer or its chat template gets beside a prompt.
    @property
    def limit_field(self) -> str:
        return "max_tokens"

    @property
    def limit(self) -> int | None:
        return getattr(self, self.limit_field)

    @property
    def alternatives(self) -> int | None:
        raise NotImplementedError

    @property
    def prompts(self) -> list[Any]:
        raise NotImplementedError

    @property
    def prompt_options(self) -> dict[str, Any]:
        raise NotImplementedError

    @property
    def ignored(self) -> set[str]:
        """The names of the fields that are not read."""
        options = self.stream_options.model_extra or {} if self.stream_options else {}
        fields = (self.model_extra or {}).items()
        names = {name for name, value in fields if value is not None and name not in NOT_SERVED}
        return names | {f"stream_options.{name}" for name in options}

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Raise ValueError, beginning with the field, for what is not served or does not go together."""
        for name, value in (self.model_extra or {}).items():
            if name in NOT_SERVED and value is not None and value not in NOT_SERVED[name]:
                raise ValueError(f"{name}: {short_repr(value)}; this is not served: leave it out")
        if self.limit is not None and self.limit < 1 and not (self.limit == 0 and getattr(self, "echo", False)):
            raise ValueError(f"{self.limit_field}: {short_repr(self.limit)}; give at least 1")
        if self.max_tokens not in (None, self.limit):
            raise ValueError(
                f"{self.limit_field}: {short_repr(self.limit)}, and max_tokens is another; give one of them"
            )
        if (count := len(self.prompts) * (self.n or 1)) > MOST_CHOICES:
            raise ValueError(f"n: {count} answers, prompts times n; give 1 to {MOST_CHOICES} in one request")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: it is for a stream; give stream too, or leave it out")
        return self


class Chat(Body):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def limit_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def alternatives(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def prompt_options(self) -> dict[str, Any]:
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | (self.chat_template_kwargs or {})

    @property
    def prompts(self) -> list[Any]:
        return [[_readable(message) for message in self.messages]]

    @property
    def ignored(self) -> set[str]:
        known = {*MESSAGE_KEYS, *ALSO_READ, *NOT_READ}
        given = {key for message in self.messages for key, value in message.items() if value}
        return super().ignored | {f"messages.{key}" for key in given - known}

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        for i, message in enumerate(self.messages):
            if found := [key for key in NOT_READ if message.get(key)]:
                raise ValueError(f"messages.{i}.{found[0]}: this is not served; give {', '.join(MESSAGE_KEYS)}")
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs: {self.top_logprobs}; give logprobs: true with it")
        return self


def _readable(message: dict[str, Any]) -> dict[str, Any]:
    """The keys of a message that the template reads. A key that asks for nothing is left out, since templates ask which
    there are. `reasoning` is vLLM's newer name of reasoning_content, and a refusal stands in place of the content."""
    named = {"reasoning_content": message["reasoning"]} if "reasoning" in message else {}
    named |= {key: message[key] for key in MESSAGE_KEYS if key in message}
    if named.get("content") is None and message.get("refusal"):
        named["content"] = message["refusal"]
    return {key: value for key, value in named.items() if key in ("role", "content") or value}


class Completion(Body):
    """The body of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    best_of: int | None = None
    echo: bool | None = False
    logprobs: int | Literal[False] | None = Field(None, ge=0, le=MOST_LOGPROBS)
    skip_special_tokens: bool | None = True
    add_special_tokens: bool | None = True

    @property
    def limit(self) -> int | None:
        return COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return None if self.logprobs is False else self.logprobs

    @property
    def prompts(self) -> list[Any]:
        prompt = self.prompt
        return [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else list(prompt)

    @property
    def prompt_options(self) -> dict[str, Any]:
        return {"add_special_tokens": False} if self.add_special_tokens is False else {}

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        if not self.prompt and not isinstance(self.prompt, str):
            raise ValueError(f"prompt: []; {UNIONS['prompt']}")
        if self.best_of not in (None, self.n or 1):
            raise ValueError(f"best_of: {self.best_of}; all choices are returned: leave it out, or give n too")
        if self.echo and self.stream and (self.limit == 0 or self.alternatives is not None):
            raise ValueError("echo: in a stream it does not go with logprobs or max_tokens: 0; leave one of them out")
        if self.skip_special_tokens is False and (self.stream or self.stop):
            raise ValueError("skip_special_tokens: false does not go with stream or stop; leave one of them out")
        return self


B = TypeVar("B", bound=Body)


def parse(kind: type[B], body: bytes) -> B:
    """Read a body's fields. Raises ApiError, which names the first wrong one."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place, text = [str(part) for part in first["loc"]], first["msg"].removeprefix("Value error, ")
        if first["type"] == "json_invalid":
            text = f"the body is not JSON: {text}"
        elif first["type"] == "value_error":  # it names its field
            place = text.partition(":")[0].split(".")
        elif not place:
            text = f"the body: {text}; give an object of fields and their values"
        elif place[0] in UNIONS and len(place) > 1:
            text = f"{place[0]}: {UNIONS[place[0]]}"
        else:
            text = f"{'.'.join(place[:3])[:80]}: {text}"
        raise ApiError(400, text, place[0] if place else None) from error


def requests_of(body: Body, target: Target, max_length: int) -> list[Request]:
    """A body's requests: `n` for each prompt, prompt after prompt. Choice i of a prompt has seed + i, modulo 2^64.

    Raises ApiError.
    """
    options, chat = body.prompt_options, isinstance(body, Chat)
    own = signature(target.tokenizer.apply_chat_template).parameters if chat else {}
    if wrong := sorted(options.keys() & own.keys()):
        text = f"chat_template_kwargs.{wrong[0]}: this is no variable of a template; leave it out"
        raise ApiError(400, text, "chat_template_kwargs")
    count, requests = body.n or 1, list[Request]()
    for i, prompt in enumerate(body.prompts):
        name = "messages" if chat else f"prompt {i}"
        try:
            tokens = prompt_tokens(target, prompt, name, options)
            params = _sampling(body, _new_tokens(body, name, len(tokens), max_length))
            seed = draw_seed() if params.seed is None else params.seed
            seeds = [seed + j if seed + j < 2**64 else seed + j - 2**64 for j in range(count)]
            choices = read_requests(target, [tokens] * count, [replace(params, seed=s) for s in seeds], max_length)
        except ValueError as error:
            raise _in_fields(str(error), name) from error
        if isinstance(body, Completion):
            skip = body.skip_special_tokens is not False
            choices = [replace(one, continues=True, skip_special=skip) for one in choices]
        requests += choices
    return requests


def _new_tokens(body: Body, name: str, prompt_tokens: int, max_length: int) -> int:
    """The most new tokens after a prompt of this name and length, at least 1. Raises ApiError if they do not fit."""
    room, field, limit = max_length - prompt_tokens, body.limit_field, body.limit
    code = "context_length_exceeded"
    if room < 1:
        text = f"{name} has {prompt_tokens} tokens; at most {max_length - 1} fit, to leave room for one more"
        raise ApiError(400, text, name.split()[0], code)
    if limit is not None and limit > room:
        default = ", the default" if getattr(body, field) is None else ""
        text = (
            f"{field}: {short_repr(limit)}{default}, but the prompt has {prompt_tokens} tokens and both together may "
            f"have at most {max_length}; ask for at most {room}, or shorten the prompt"
        )
        raise ApiError(400, text, field, code)
    return room if limit is None else max(1, limit)


def _in_fields(text: str, name: str) -> ApiError:
    """An error of the engine, in terms of the body's fields. `name` is the prompt's."""
    if found := PARAMETER.match(text):
        field = FIELDS.get(found[1], found[1])
        return ApiError(400, field + text[found.end() :], field)
    return ApiError(400, re.sub(r"^prompt \d+", name, text), name.split()[0])


def _sampling(body: Body, max_new_tokens: int) -> SamplingParams:
    """The body's sampling. Missing and null fields have OpenAI's defaults: temperature 1, no filter, no penalty."""
    names = "top_p", "min_p", "eta_cutoff", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed"
    given: dict[str, Any] = {name: value for name in names if (value := getattr(body, name)) is not None}
    if body.top_k is not None and body.top_k != -1:  # -1 is vLLM's value for off
        given["top_k"] = body.top_k
    biases = body.logit_bias or {}
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        max_new_tokens=max_new_tokens,
        min_new_tokens=body.min_tokens or 0,
        stop_strings=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        banned_token_ids=tuple(token for token, bias in biases.items() if bias == BAN),
        logit_bias={token: bias for token, bias in biases.items() if bias != BAN},
        logprobs=body.alternatives,
        prompt_logprobs=body.alternatives if isinstance(body, Completion) and body.echo else None,
        **given,
    )
