"""OpenAI's interface: from bodies to checked requests. Answers are in infer/server_answers.py, HTTP in infer/server.py.

A field that is not served and would change the answer is refused by name, unless its value asks for nothing.
Source: OpenAI's API reference, "Chat" and "Completions"; the fields `top_k`, `min_p`, `repetition_penalty`,
`stop_token_ids`, `ignore_eos` and `skip_special_tokens` are vLLM's.
"""

import re
from dataclasses import replace
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from longdraft.infer.drafters.base import Request
from longdraft.infer.requests import Continuation, prompt_tokens, read_requests
from longdraft.infer.sampling import SamplingParams, draw_seed
from longdraft.infer.values import short_repr
from longdraft.models.target import Target

MOST_CHOICES = 128  # prompts times n
LOWEST_BIAS = -100  # a logit_bias that bans its token
COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens in /v1/completions
MOST_DIGITS = 20  # of a token id; no vocabulary is so large
# The keys of a message that are served. Others may be null.
MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
# How the engine's errors name a parameter, and the fields that have another name here.
PARAMETER, FIELDS = re.compile(r"sampling parameter (\w+)"), {"stop_strings": "stop", "banned_token_ids": "logit_bias"}
# Fields of several types; pydantic's message would name only one of them.
UNIONS = {"prompt": "give a text, token ids, or a list of either", "stop": "give a text or a list of texts"}


class ApiError(Exception):
    """An error to answer with. `body` is OpenAI's error object."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.headers = status, dict[str, str]()
        types = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        error_type = types.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.body = {"error": {"message": message, "type": error_type, "param": param, "code": code}}


class StreamOptions(BaseModel):
    """What a stream carries besides the text. `include_accepted` is ours: how much of it drafters had proposed."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False
    include_accepted: bool = False
    include_obfuscation: Literal[False] = False


class Body(BaseModel):
    """The fields of both interfaces."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None
    max_tokens: int | None = None
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logit_bias: dict[str, float] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    # These say who asks. They do not change the answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None

    @property
    def limit_field(self) -> str:
        """The name of the field that limits the new tokens."""
        return "max_tokens"

    @property
    def limit(self) -> int | None:
        """The most new tokens; None if the body sets no limit."""
        return getattr(self, self.limit_field)

    def prompts(self) -> list[Any]:
        """The prompts, each as `read_requests` takes it."""
        raise NotImplementedError


class Chat(Body):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    tools: list[Any] | None = Field(None, max_length=0)
    tool_choice: Literal["none"] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    modalities: list[Literal["text"]] | None = None

    @property
    def limit_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def prompts(self) -> list[Any]:
        return [self.messages]


class Completion(Body):
    """The body of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    best_of: int | None = None
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None
    logprobs: None = None
    skip_special_tokens: bool = True

    @property
    def limit(self) -> int | None:
        return COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    def prompts(self) -> list[Any]:
        prompt = self.prompt
        return [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else list(prompt)


B = TypeVar("B", bound=Body)


def parse(kind: type[B], body: bytes) -> B:
    """Read a body's fields. Raises ApiError, which names the first wrong one."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = [str(part) for part in first["loc"]]
        field = place[0] if place else None
        if first["type"] == "json_invalid":
            raise ApiError(400, f"the body is not JSON: {first['msg']}") from error
        if field in ("logprobs", "top_logprobs"):
            raise ApiError(400, f"{field}: log-probabilities are not served; leave it out", field) from error
        if first["type"] == "extra_forbidden":
            fields = kind.model_fields if len(place) == 1 else StreamOptions.model_fields
            known = ", ".join(sorted(fields))
            raise ApiError(400, f"{'.'.join(place)}: unknown; the fields served are {known}", field) from error
        if field is None:
            raise ApiError(400, f"the body: {first['msg']}; give an object of fields and their values") from error
        if field in UNIONS and first["type"] != "missing":
            raise ApiError(400, f"{field}: {UNIONS[field]}", field) from error
        raise ApiError(400, f"{'.'.join(place)}: {first['msg']}", field) from error


def requests_of(body: Body, target: Target, max_length: int) -> list[Request]:
    """A body's requests: `n` for each prompt, prompt after prompt. Choice i of a prompt has seed + i, modulo 2^64.

    Raises ApiError.
    """
    _check(body)
    count, requests = body.n or 1, list[Request]()
    for i, prompt in enumerate(body.prompts()):
        name = "messages" if isinstance(body, Chat) else f"prompt {i}"
        try:
            tokens = prompt_tokens(target, prompt, name)
            params = _sampling(body, _new_tokens(body, len(tokens), max_length))
            seed = draw_seed() if params.seed is None else params.seed
            seeds = [seed + j if seed + j < 2**64 else seed + j - 2**64 for j in range(count)]
            choices = read_requests(target, [tokens] * count, [replace(params, seed=s) for s in seeds], max_length)
            if isinstance(body, Completion):
                skip = body.skip_special_tokens
                choices = [Continuation(one.index, one.prompt, one.sampling, skip) for one in choices]
            requests += choices
        except ValueError as error:
            raise _in_fields(str(error), name) from error
    return requests


def _check(body: Body) -> None:
    """Raise ApiError for fields that do not go together, and for unknown keys of a message."""
    count, best_of, prompts = body.n or 1, getattr(body, "best_of", None), len(body.prompts())
    if best_of not in (None, count):
        raise ApiError(400, f"best_of: {best_of}; all choices are returned: leave it out, or give n={count}", "best_of")
    if not prompts:
        raise ApiError(400, f"prompt: []; {UNIONS['prompt']}", "prompt")
    if count * prompts > MOST_CHOICES:
        raise ApiError(400, f"prompts times n: {prompts} x {count}; give 1 to {MOST_CHOICES} in one request", "n")
    if body.limit is not None and body.limit < 1:
        raise ApiError(400, f"{body.limit_field}: {short_repr(body.limit)}; give at least 1", body.limit_field)
    if body.max_tokens not in (None, body.limit):
        both = f"max_tokens, {body.limit_field}: {short_repr(body.max_tokens)} and {short_repr(body.limit)}"
        raise ApiError(400, f"{both}; give one of them", body.limit_field)
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options: it is for a stream; give stream too, or leave it out", "stream_options")
    if isinstance(body, Completion) and not body.skip_special_tokens and (body.stream or body.stop):
        text = "skip_special_tokens: false does not go with stream or stop; leave out one or the other"
        raise ApiError(400, text, "skip_special_tokens")
    for i, message in enumerate(body.messages if isinstance(body, Chat) else ()):
        if unknown := [key for key, value in message.items() if key not in MESSAGE_KEYS and value is not None]:
            raise ApiError(
                400,
                f"messages.{i}.{unknown[0]}: unknown; a message has {', '.join(MESSAGE_KEYS)}",
                "messages",
            )


def _new_tokens(body: Body, prompt_tokens: int, max_length: int) -> int:
    """The most new tokens after a prompt of this length. Raises ApiError if the body asks for more than there is room
    for."""
    room, field, limit = max_length - prompt_tokens, body.limit_field, body.limit
    if limit is None or room < 1:  # a prompt that leaves no room is refused later, as too long
        return max(1, room)
    if limit > room:
        default = ", the default" if getattr(body, field) is None else ""
        raise ApiError(
            400,
            f"{field}: {short_repr(limit)}{default}, but the prompt has {prompt_tokens} tokens and both together may "
            f"have at most {max_length}; ask for at most {room}, or shorten the prompt",
            field,
            "context_length_exceeded",
        )
    return limit


def _in_fields(text: str, name: str) -> ApiError:
    """An error of the engine, told in the body's fields. `name` is the prompt's."""
    if found := PARAMETER.match(text):
        field = FIELDS.get(found[1], found[1])
        return ApiError(400, field + text[found.end() :], field)
    return ApiError(400, re.sub(r"^prompt \d+", name, text), name.split()[0])


def _sampling(body: Body, max_new_tokens: int) -> SamplingParams:
    """The body's sampling. Missing and null fields have OpenAI's defaults: temperature 1, no filter, no penalty."""
    bans = []
    for token, bias in (body.logit_bias or {}).items():
        if bias != LOWEST_BIAS or not token.isdecimal() or len(token) > MOST_DIGITS:
            entry = f"logit_bias: {token if len(token) <= MOST_DIGITS else short_repr(token)}: {bias}"
            raise ApiError(400, f"{entry}; only bans are served: a token id with {LOWEST_BIAS}", "logit_bias")
        bans.append(int(token))
    names = "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed"
    given: dict[str, Any] = {name: value for name in names if (value := getattr(body, name)) is not None}
    if body.top_k is not None and body.top_k != -1:  # -1 is vLLM's value for off
        given["top_k"] = body.top_k
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        max_new_tokens=max_new_tokens,
        stop_strings=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        banned_token_ids=tuple(bans),
        **given,
    )
