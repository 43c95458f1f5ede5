"""OpenAI's interface: from bodies to requests for the engine.

A field of OpenAI's that would change the answer but is not served (NOT_SERVED) is refused by name, unless its value has
no effect. Every other unknown field is ignored.
Source: OpenAI's API reference, "Chat" and "Completions"; `top_k`, `min_p`, `min_tokens`, `repetition_penalty`,
`stop_token_ids`, `ignore_eos`, `skip_special_tokens`, `structured_outputs` and `chat_template_kwargs` are vLLM's.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from longdraft.infer.choice.grammar import choice_grammar, json_grammar, regex_grammar, textless_tokens
from longdraft.infer.requests import Request, prompt_tokens, read_requests
from longdraft.infer.sampling import Logprobs, Number, SamplingParams, Text, draw_seed
from longdraft.infer.server.answer_format import THOUGHT, THOUGHTS, AnswerFormat, answer_format
from longdraft.infer.server.answer_grammar import answer_grammar
from longdraft.models.schema import Bool, Int, Schema, Str, short_repr, validate
from longdraft.models.target import Target

MOST_CHOICES = 128  # prompts times n
MOST_STOPS = 64
COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens in /v1/completions
# Fields that SamplingParams validates, with their names in it.
SAMPLING = {"min_tokens": "min_new_tokens", "stop": "stop_strings"}
SAMPLING |= {name: name for name in ("temperature", "top_p", "top_k", "min_p", "eta_cutoff", "seed", "ignore_eos")}
SAMPLING |= {name: name for name in ("presence_penalty", "frequency_penalty", "repetition_penalty", "stop_token_ids")}
# Fields that are refused, each with a value that has no effect. False values have none either.
NOT_SERVED: dict[str, Any] = dict.fromkeys(("functions", "suffix", "audio", "echo"))
NOT_SERVED |= dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"))
NOT_SERVED |= dict.fromkeys(("allowed_token_ids", "bad_words", "use_beam_search", "prompt_logprobs"))
NOT_SERVED |= dict.fromkeys(("continue_final_message", "logits_processors"))
NOT_SERVED |= {"function_call": "auto", "modalities": ["text"], "best_of": 1}


class ApiError(Exception):
    """An error to answer with. `body` is OpenAI's error object."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status = status
        types = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        error_type = types.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.body = {"error": {"message": message, "type": error_type, "param": param, "code": code}}


def _parsed(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except RecursionError as error:
        raise ValueError(f"{error}; nest it less deep") from error


class _JsonSchema(Schema, extra="ignore"):
    of: dict[str, Any] = Field(alias="schema")


class _ResponseFormat(Schema):
    """OpenAI's field for the format of an answer's text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: _JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError(f"type: {self.type!r}; the type 'json_schema' needs a json_schema, and others have none")
        return self

    @property
    def text_grammar(self) -> str | None:
        """The text's grammar; None: any text."""
        schema = {"type": "object"} if self.json_schema is None else self.json_schema.of
        return None if self.type == "text" else json_grammar(schema)


class _StructuredOutputs(Schema):
    """vLLM's field for the same."""

    of_json: Annotated[dict[str, Any], BeforeValidator(_parsed)] | None = Field(alias="json", default=None)
    json_object: Bool | None = None
    regex: Text | None = None
    choice: Annotated[list[Text], Field(min_length=1)] | None = None
    grammar: Text | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        fields = [self.of_json, self.json_object or None, self.regex, self.choice, self.grammar]
        if (count := sum(one is not None for one in fields)) != 1:
            raise ValueError(f"{count} formats; give one of json, json_object, regex, choice and grammar")
        return self

    @property
    def text_grammar(self) -> str:
        """The text's grammar."""
        if self.regex is not None:
            return regex_grammar(self.regex)
        if self.choice is not None:
            return choice_grammar(self.choice)
        return self.grammar or json_grammar({"type": "object"} if self.of_json is None else self.of_json)


class Body(Schema):
    """The fields of both interfaces, without those that SamplingParams validates. Null always means the default."""

    model_config = ConfigDict(extra="allow")
    model: Str | None = None
    max_tokens: Int | None = None
    n: Annotated[Int, Field(ge=1, le=MOST_CHOICES)] = 1
    logit_bias: dict[int, Number] = {}
    stream: Bool = False
    stream_options: dict[str, Any] = {}
    store: Bool = True  # whether it may be recorded
    response_format: _ResponseFormat = _ResponseFormat()
    structured_outputs: _StructuredOutputs | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        return {k: v for k, v in values.items() if v is not None} if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _is_served(self) -> Self:
        nothing = NOT_SERVED | {"best_of": self.n}
        for name, value in (self.model_extra or {}).items():
            if name in NOT_SERVED and value and value not in ("none", NOT_SERVED[name], nothing[name]):
                raise ValueError(f"{name}: {short_repr(value)}; this is not served: omit it")
        if self.structured_outputs and self.response_format.type != "text":
            raise ValueError("structured_outputs: there is a response_format too; give one of them")
        return self

    @property
    def text_grammar(self) -> str | None:
        """The grammar of the answer's text; None: any text."""
        return (self.structured_outputs or self.response_format).text_grammar

    @property
    def must_call(self) -> bool:
        """Whether the answer must be a call of a tool."""
        return False

    @property
    def has_form(self) -> bool:
        """Whether the answer must follow a grammar."""
        return self.must_call or self.structured_outputs is not None or self.response_format.type != "text"

    @property
    def form_field(self) -> str:
        """The field that asks for it."""
        given = "structured_outputs" if self.structured_outputs else "response_format"
        return "tool_choice" if self.must_call else given


class _Function(Schema, extra="allow"):
    name: Text


class _Tool(Schema, extra="allow"):
    type: Literal["function"]
    function: _Function


def _is_tool(value: Any) -> Any:
    """A tool that is checked, and otherwise as it came, because the template writes it."""
    validate(_Tool, value)
    return value


class Chat(Body):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    tools: list[Annotated[dict[str, Any], AfterValidator(_is_tool)]] = []
    tool_choice: Literal["auto", "none", "required"] | _Tool = "auto"
    parallel_tool_calls: Bool = True
    max_completion_tokens: Int | None = None
    logprobs: Bool = False
    top_logprobs: Logprobs = 0
    chat_template_kwargs: dict[str, Any] = {}

    @model_validator(mode="after")
    def _alternatives_are_answered(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError(
                f"top_logprobs: {self.top_logprobs}, but logprobs is not true; set it, or omit top_logprobs"
            )
        return self

    @model_validator(mode="after")
    def _chosen_tool_exists(self) -> Self:
        if self.must_call and not self.may_call:
            named = self.tool_choice.function.name if isinstance(self.tool_choice, _Tool) else self.tool_choice
            raise ValueError(f"tool_choice: {short_repr(named)}, but there is no such tool; add it to tools")
        return self

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that the prompt names."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def must_call(self) -> bool:
        return self.tool_choice not in ("auto", "none")

    @property
    def may_call(self) -> list[dict[str, Any]]:
        """The tools that the answer may call."""
        if not isinstance(self.tool_choice, _Tool):
            return self.offered
        return [one for one in self.tools if one["function"]["name"] == self.tool_choice.function.name]

    @property
    def prompts(self) -> list[Any]:
        """The messages without empty fields, because templates test which fields exist."""
        return [[{k: v for k, v in one.items() if v or k in ("role", "content")} for one in self.messages]]

    @property
    def alternatives(self) -> int | None:
        """How many of the most probable tokens to return with each log-probability; None: no log-probabilities."""
        return self.top_logprobs if self.logprobs else None


class Completion(Body):
    """The body of /v1/completions."""

    prompt: Any
    max_tokens: Int = COMPLETION_TOKENS
    logprobs: Any = None
    skip_special_tokens: Bool = True

    @property
    def prompts(self) -> list[Any]:
        """The prompts, each as `prompt_tokens` takes it."""
        given = self.prompt
        listed = isinstance(given, list) and given and all(isinstance(one, str | list) for one in given)
        return given if listed else [given]

    @property
    def alternatives(self) -> Any:
        return None if self.logprobs is False else self.logprobs


def parse(kind: type[Chat | Completion], body: bytes) -> Chat | Completion:
    """Parse a body's fields. Raises ApiError, which names the first wrong one."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    try:
        return validate(kind, fields)
    except ValueError as error:
        raise _refused(error, {}) from error


def requests_of(
    body: Chat | Completion, target: Target, max_length: int, check: Callable[[str], None] = lambda grammar: None
) -> list[Request]:
    """A body's requests: `n` for each prompt, prompt after prompt. Choice i of a prompt has seed + i.

    check: raises ValueError for a grammar that must not be compiled here (`GrammarTrial.check`).

    Raises ApiError.
    """
    if (count := len(body.prompts) * body.n) > MOST_CHOICES:
        raise ApiError(400, f"n: {count} answers (prompts times n); give 1 to {MOST_CHOICES} in one request", "n")
    own, variables = signature(target.tokenizer.apply_chat_template).parameters, dict[str, Any]()
    # The body's names of the fields that the engine's errors name.
    names = {"max_new_tokens": "max_tokens", "prompt": "prompt"}
    names |= {value: name for name, value in SAMPLING.items()}
    if isinstance(body, Chat):
        names["prompt"], variables = "messages", body.chat_template_kwargs
        if body.max_completion_tokens is not None:
            names["max_new_tokens"] = "max_completion_tokens"
        if wrong := sorted(variables.keys() & own.keys()):
            text = f"chat_template_kwargs.{wrong[0]}: this is not a template variable; omit it"
            raise ApiError(400, text, "chat_template_kwargs")
        variables = variables | ({"tools": body.offered} if body.offered else {})
    requests = list[Request]()
    for i, prompt in enumerate(body.prompts):
        try:
            tokens = prompt_tokens(target, prompt, "prompt" if isinstance(body, Chat) else f"prompt {i}", variables)
            new_tokens = _new_tokens(body, len(tokens), max_length, names)
            params = _sampling(body, new_tokens, target.model.config.vocab_size)
            seed = draw_seed() if params.seed is None else params.seed
            many = [replace(params, seed=seed + j) for j in range(body.n)]
            if body.has_form:
                names["grammar"] = body.form_field
                grammar = _grammar_of(body, target, tokens)
                check(grammar)
                many = [replace(one, grammar=grammar) for one in many]
            choices = read_requests(target, [tokens] * body.n, many, max_length, first=i)  # errors name this index
        except ValueError as error:
            raise _refused(error, names) from error
        if isinstance(body, Completion):
            choices = [replace(one, continues=True, skip_special=body.skip_special_tokens) for one in choices]
        elif form := _format_of(body, target):
            choices = [replace(one, skip_special=not form.has_special) for one in choices]
        requests += choices
    return requests


def _format_of(body: Chat, target: Target) -> AnswerFormat | None:
    """How the target writes the answer. Raises ApiError if the body offers tools and it is not known how it calls."""
    form = answer_format(target.tokenizer, bool(body.offered))
    if body.offered and not (form and form.has_calls):
        text = f"how {target.name} calls tools is not known; set response_template in its tokenizer_config.json"
        raise ApiError(400, f"tools: {text}", "tools")
    return form


def _grammar_of(body: Chat | Completion, target: Target, prompt: Sequence[int]) -> str:
    """The grammar that the answer to this prompt must follow.

    Raises ApiError if it is not known how the target writes thoughts, or the calls of the tools that the body offers;
    ValueError if its tokenizer cannot follow a grammar.
    """
    textless_tokens(target)
    content = body.text_grammar
    if not isinstance(body, Chat) or (form := _format_of(body, target)) is None:
        assert content is not None
        return content
    thinks = not form.template.fields.keys().isdisjoint((THOUGHT, *THOUGHTS))
    if (body.may_call and form.written.calls is None) or (thinks and form.written.thought is None):
        text = (
            f"tokenizer_config.json says how {target.name}'s answers are read, but not how they are written; omit this"
        )
        raise ApiError(400, f"{body.form_field}: {text}", body.form_field)
    content = None if body.must_call else content
    several = body.parallel_tool_calls and not isinstance(body.tool_choice, _Tool)  # one of that name, as elsewhere
    return answer_grammar(target, form.written, prompt, content, body.may_call, several)


def _refused(error: ValueError, names: Mapping[str, str]) -> ApiError:
    """The ApiError for an error that starts with a field's name. names: the body's name of each field."""
    text = str(error)[:300]  # it may quote the client's value
    found = re.match("[a-z_]+", text)
    name = found and names.get(found[0], found[0])
    return ApiError(400, text if found is None else f"{name}{text[found.end() :]}", name)


def _new_tokens(body: Chat | Completion, prompt_tokens: int, max_length: int, names: Mapping[str, str]) -> int:
    """How many new tokens a prompt of this length may have. Raises ApiError if they do not fit."""
    room, asked = max_length - prompt_tokens, getattr(body, names["max_new_tokens"])
    if room < 1 or (asked is not None and asked > room):
        field = names["prompt" if room < 1 else "max_new_tokens"]
        text = (  # OpenAI's wording, by which litellm recognises the error
            f"{field}: this model's maximum context length is {max_length}, including the new tokens, but the prompt "
            f"has {prompt_tokens}; shorten the prompt, or ask for fewer"
        )
        raise ApiError(400, text, field, "context_length_exceeded")
    return room if asked is None else asked


def _sampling(body: Chat | Completion, max_new_tokens: int, vocab_size: int) -> SamplingParams:
    """The body's sampling. Missing fields have OpenAI's defaults: temperature 1, no filter, no penalty."""
    given: dict[str, Any] = {"temperature": 1.0}
    given |= {SAMPLING[name]: value for name, value in (body.model_extra or {}).items() if name in SAMPLING}
    if isinstance(stop := given.get("stop_strings"), str):
        given["stop_strings"] = [stop]
    stops, top_k = given.get("stop_strings"), given.get("top_k")
    if isinstance(stops, list) and len(stops) > MOST_STOPS:  # each is searched for after each token
        raise ValueError(f"stop_strings: {len(stops)} texts; give at most {MOST_STOPS}")
    if type(top_k) is int and (top_k == -1 or top_k >= vocab_size):  # how clients say "off"
        given["top_k"] = 0
    given |= {"logit_bias": body.logit_bias, "logprobs": body.alternatives}
    return SamplingParams(**given, max_new_tokens=max_new_tokens)
