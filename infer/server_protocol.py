"""OpenAI's interface: bodies to checked requests, generations to answers. Not here: HTTP (infer/server.py).

Fields that would change the answer and are not served are refused by name, unless they ask for nothing.
Source: OpenAI's API reference, "Chat" and "Completions"; the fields `top_k`, `min_p`, `repetition_penalty`,
`stop_token_ids`, `ignore_eos`, `skip_special_tokens` and the object `metrics.speculative_decoding` are vLLM's.
"""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from longdraft.infer.drafters.base import Request
from longdraft.infer.requests import Continuation, prompt_tokens, read_requests
from longdraft.infer.results import Generation
from longdraft.infer.sampling import SamplingParams, draw_seed
from longdraft.infer.values import short_repr
from longdraft.models.target import Target

MOST_CHOICES = 128  # prompts times n
LOWEST_BIAS = -100  # a logit_bias that bans its token
COMPLETION_TOKENS = 16  # of a /v1/completions that does not say how many, as OpenAI has it
MOST_DIGITS = 20  # of a token id; no vocabulary is so large
# A message's keys; those without a value ask for nothing.
MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
# How the engine's errors begin, and the field that is meant where it has another name here.
PARAMETER, FIELDS = re.compile(r"sampling parameter (\w+)"), {"stop_strings": "stop", "banned_token_ids": "logit_bias"}
# Fields of several types, of which pydantic would name one.
UNIONS = {"prompt": "give a text, token ids, or a list of either", "stop": "give a text or a list of texts"}
FINISH_REASONS = {"stop": "stop", "length": "length", "capacity": "length", "cancelled": "stop"}


class ApiError(Exception):
    """What is answered instead, as OpenAI's error object."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.headers = status, dict[str, str]()
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class StreamOptions(BaseModel):
    """What a stream carries beside the text; `include_accepted`, our own: which of it drafters had proposed."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False
    include_accepted: bool = False
    include_obfuscation: Literal[False] = False


class Body(BaseModel):
    """What both interfaces share."""

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
    # They say who asks, and change nothing of the answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None

    @property
    def limit_field(self) -> str:
        """Which field says how many new tokens there may be."""
        return "max_tokens"

    @property
    def limit(self) -> int | None:
        """What it says; None: nothing."""
        return getattr(self, self.limit_field)

    def prompts(self) -> list[Any]:
        """What `read_requests` takes, one a prompt."""
        raise NotImplementedError


class Chat(Body):
    """Of /v1/chat/completions."""

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
    """Of /v1/completions."""

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
        given = self.prompt
        return [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else list(given)


B = TypeVar("B", bound=Body)


def parse(kind: type[B], body: bytes) -> B:
    """The body's fields. Raises: ApiError, which names the first wrong one."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = [str(part) for part in first["loc"]]
        field = place[0] if place else None
        if first["type"] == "json_invalid":
            raise ApiError(400, f"the body is no JSON: {first['msg']}") from error
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
    """Prompt after prompt, `n` of each; the i-th choice of a prompt has the body's seed + i, of 64 bits.

    Raises: ApiError.
    """
    _check(body)
    count, given, requests = body.n or 1, body.prompts(), list[Request]()
    for place, prompt in enumerate(given):
        name = "messages" if isinstance(body, Chat) else f"prompt {place}"
        try:
            tokens = prompt_tokens(target, prompt, name)
            params = _sampling(body, _new_tokens(body, len(tokens), max_length))
            seed = draw_seed() if params.seed is None else params.seed
            seeds = [seed + i if seed + i < 2**64 else seed + i - 2**64 for i in range(count)]
            found = read_requests(target, [tokens] * count, [replace(params, seed=s) for s in seeds], max_length)
            if isinstance(body, Completion):
                skip = body.skip_special_tokens
                found = [Continuation(one.index, one.prompt, one.sampling, skip) for one in found]
            requests += found
        except ValueError as error:
            raise _in_fields(str(error), name) from error
    return requests


def _check(body: Body) -> None:
    """Raise ApiError for fields that do not go with each other, and for what a message has beside its own keys."""
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
        raise ApiError(400, "stream_options: of a stream; give stream too, or leave it out", "stream_options")
    if isinstance(body, Completion) and not body.skip_special_tokens and (body.stream or body.stop):
        text = "skip_special_tokens: false is of whole answers; leave it, or stream and stop, out"
        raise ApiError(400, text, "skip_special_tokens")
    for place, message in enumerate(body.messages if isinstance(body, Chat) else ()):
        if unknown := [key for key, value in message.items() if key not in MESSAGE_KEYS and value is not None]:
            raise ApiError(
                400,
                f"messages.{place}.{unknown[0]}: unknown; a message has {', '.join(MESSAGE_KEYS)}",
                "messages",
            )


def _new_tokens(body: Body, prompt_tokens: int, max_length: int) -> int:
    """How many may follow so many of a prompt. Raises: ApiError where they are to be more than there is room for."""
    room, field, limit = max_length - prompt_tokens, body.limit_field, body.limit
    if limit is None or room < 1:  # a prompt without room is refused as one
        return max(1, room)
    if limit > room:
        default = " where nothing is said" if getattr(body, field) is None else ""
        raise ApiError(
            400,
            f"{field}: {short_repr(limit)}{default}, but the prompt has {prompt_tokens} tokens and both together may "
            f"have at most {max_length}; ask for at most {room}, or shorten the prompt",
            field,
            "context_length_exceeded",
        )
    return limit


def _in_fields(text: str, name: str) -> ApiError:
    """The engine's error in words of the body's fields. name: of the prompt."""
    if found := PARAMETER.match(text):
        field = FIELDS.get(found[1], found[1])
        return ApiError(400, field + text[found.end() :], field)
    return ApiError(400, re.sub(r"^prompt \d+", name, text), name.split()[0])


def _sampling(body: Body, max_new_tokens: int) -> SamplingParams:
    """Absent and null fields are OpenAI's defaults: temperature 1, no filter, no penalty."""
    bans = []
    for token, bias in (body.logit_bias or {}).items():
        if bias != LOWEST_BIAS or not token.isdecimal() or len(token) > MOST_DIGITS:
            what = f"logit_bias: {token if len(token) <= MOST_DIGITS else short_repr(token)}: {bias}"
            raise ApiError(400, f"{what}; only bans are served, a token id with {LOWEST_BIAS}", "logit_bias")
        bans.append(int(token))
    names = "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed"
    given: dict[str, Any] = {name: value for name in names if (value := getattr(body, name)) is not None}
    if body.top_k is not None and body.top_k != -1:  # vLLM's way to say that it is off
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


def usage(generations: Sequence[Generation], n: int) -> dict[str, Any]:
    """Tokens that were read and written; a prompt counts once, however many choices it has. Cached: those of the
    prompts whose keys and values were an earlier one's."""
    prompt = sum(len(one.prompt) for one in generations[::n])
    cached = sum(one.stats.taken_over for one in generations[::n])
    new = sum(len(one.tokens) for one in generations)
    tokens = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    return tokens | {"prompt_tokens_details": {"cached_tokens": cached}}


def metrics(generations: Sequence[Generation], max_depth: int) -> dict[str, Any] | None:
    """vLLM's `speculative_decoding`, of all choices together; None where nothing is ever drafted.

    A speculative step verifies more than the root; num_spec_tokens is the deepest that a tree may be, and the histogram
    tells how many steps accepted 0, 1, ... so many tokens.
    """
    if max_depth == 0:
        return None
    stats = [one.stats for one in generations]
    steps, drafted = sum(one.speculative_steps for one in stats), sum(one.drafted for one in stats)
    at_least = [steps] + [
        sum(one.accepted_at_depth[depth] for one in stats if depth < len(one.accepted_at_depth))
        for depth in range(max_depth)
    ]
    exactly = [more - fewer for more, fewer in zip(at_least, [*at_least[1:], 0], strict=True)]
    accepted = sum(at_least[1:])
    values = {
        "mean_acceptance_length": 1 + accepted / max(steps, 1),
        "draft_acceptance_rate": accepted / max(drafted, 1),
        "acceptance_histogram": exactly,
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": max_depth,
    }
    return {"speculative_decoding": values}


class Answers:
    """The answers to one body: all in one, or a stream's chunks."""

    def __init__(self, body: Body, identity: str, model: str, max_depth: int):
        self._chat, self._body, self._max_depth = isinstance(body, Chat), body, max_depth
        kind, prefix = ("chat.completion", "chatcmpl") if self._chat else ("text_completion", "cmpl")
        self._whole_kind, self._chunk_kind = kind, f"{kind}.chunk" if self._chat else kind
        self._head = {"id": f"{prefix}-{identity}", "created": int(time.time()), "model": model}
        self._options = body.stream_options or StreamOptions()
        self.tells_accepted = self._options.include_accepted

    def whole(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """Everything at once."""
        choices = []
        for index, one in enumerate(generations):
            text = {"message": {"role": "assistant", "content": one.text}} if self._chat else {"text": one.text}
            reason = FINISH_REASONS[one.finish_reason]
            choices.append({"index": index, **text, "logprobs": None, "finish_reason": reason})
        return {"object": self._whole_kind, **self._head, "choices": choices, **self._figures(generations)}

    def _figures(self, generations: Sequence[Generation]) -> dict[str, Any]:
        numbers = metrics(generations, self._max_depth)
        own = {"usage": usage(generations, self._body.n or 1)}
        return own if numbers is None else own | {"metrics": numbers}

    def first(self, index: int) -> dict[str, Any] | None:
        """What begins a choice, where something does."""
        return self._chunk(index, {"role": "assistant", "content": ""}, None) if self._chat else None

    def chunk(self, index: int, text: str, accepted: Mapping[str, int], finish_reason: str = "") -> dict[str, Any]:
        """The next text of a choice. accepted: what is told of it where that is asked for."""
        delta = {"content": text} if text or not finish_reason else {}
        found = self._chunk(index, delta if self._chat else text, FINISH_REASONS.get(finish_reason))
        return found | {"accepted": accepted} if self.tells_accepted else found

    def _chunk(self, index: int, given: Any, reason: str | None) -> dict[str, Any]:
        choice = {"index": index, "delta" if self._chat else "text": given, "logprobs": None, "finish_reason": reason}
        none = {"usage": None} if self._options.include_usage else {}
        return {"object": self._chunk_kind, **self._head, "choices": [choice], **none}

    def end(self, last: dict[str, Any], generations: Sequence[Generation]) -> list[dict[str, Any]]:
        """The last choice's last chunk with the figures; tokens, where they are asked for, in one of their own."""
        figures = self._figures(generations)
        if self._options.include_usage:
            return [last, {"object": self._chunk_kind, **self._head, "choices": [], **figures}]
        figures.pop("usage")
        return [last | figures]
