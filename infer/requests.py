"""Turns prompts and sampling parameters into checked requests, and follows a request on its slot."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

from longdraft.infer.drafters.base import Request
from longdraft.infer.logprobs import TokenLogprob
from longdraft.infer.results import Generation, Piece, Statistics
from longdraft.infer.sampling import SamplingParams, draw_seed, one_each
from longdraft.infer.text import StopStrings, text_behind
from longdraft.models.schema import short_repr
from longdraft.models.special_tokens import TEMPLATE_ERRORS, special_tokens
from longdraft.models.target import Target

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True)
class Continuation(Request):
    """A request whose text continues that of its prompt, unlike the answer in a chat.

    skip_special: whether special tokens are left out of the text; otherwise only the end token is.
    """

    skip_special: bool = True


def text_before(request: Request) -> Sequence[int]:
    """The tokens whose text the request continues."""
    return request.prompt if isinstance(request, Continuation) else ()


def read_requests(
    target: Target,
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams],
    max_length: int,
) -> list[Request]:
    """Make one request of each prompt: a text, token ids, or a chat's messages, which the tokenizer's template formats.
    The request of a text is a Continuation. A request's sampling has a seed, and all that end it in
    `stop_token_ids`: the target's end tokens, and special tokens among its stop strings, which are no text to be found.

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
    requests = []
    for index, (prompt, sampling) in enumerate(zip(prompts, one_each(params, len(prompts)), strict=True)):
        if not isinstance(sampling, SamplingParams):
            raise ValueError(
                f"params: {short_repr(sampling)} for prompt {index}; give SamplingParams, one or one for each prompt"
            )
        tokens = prompt_tokens(target, prompt, f"prompt {index}")
        seed = draw_seed() if sampling.seed is None else sampling.seed
        ends = [] if sampling.ignore_eos else [*target.eos_token_ids]
        if sampling.stop_strings:
            ends += _special_stops(target, sampling.stop_strings)
        sampling = replace(sampling, seed=seed, stop_token_ids=(*sampling.stop_token_ids, *ends))
        _check(target, index, tokens, sampling, max_length)
        kind = Continuation if isinstance(prompt, str) else Request
        requests.append(kind(index, tokens, sampling))
    return requests


def prompt_tokens(
    target: Target, prompt: Any, name: str = "prompt", options: Mapping[str, Any] | None = None
) -> list[int]:
    """The token ids of a text, of a chat (up to where the answer begins) or of token ids, whose range is not checked.

    options: what the tokenizer gets beside a text, or a chat's template beside the messages.

    Raises ValueError, beginning with `name`, for anything else, and if the tokenizer or its template cannot read it.
    """
    prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    chat = isinstance(prompt, Sequence) and bool(prompt) and all(isinstance(part, Mapping) for part in prompt)
    if not (isinstance(prompt, str) or chat):
        listed = isinstance(prompt, Sequence) and not isinstance(prompt, bytes)
        if not (listed and all(isinstance(token, Integral) and not isinstance(token, bool) for token in prompt)):
            raise ValueError(
                f"{name} is {short_repr(prompt)}; give a text, a list of token ids or a list of chat messages"
            )
        return [int(token) for token in prompt]
    if target.tokenizer is None:
        raise ValueError(f"{name}: a text needs a tokenizer, and this target has none; give token ids")
    if isinstance(prompt, str):
        check_text(name, prompt)
        return target.tokenizer(prompt, **(options or {})).input_ids
    if not target.tokenizer.chat_template:
        raise ValueError(f"{name}: a chat needs a chat template, and {target.name}'s tokenizer has none; give text")
    messages = [_message(message, f"{name}, message {i}") for i, message in enumerate(prompt)]
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


def check_text(name: str, text: str) -> None:
    """Raise ValueError, beginning with `name`, for a text with half a surrogate pair, which UTF-8 cannot encode.

    Python makes such halves of command line arguments that are not UTF-8.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code, place = ord(text[error.start]), f"at character {error.start}"
        if 0xDC80 <= code <= 0xDCFF:
            problem = f"byte 0x{code - 0xDC00:02x} {place} is not UTF-8; give the text in UTF-8"
        else:
            problem = f"\\u{code:04x} {place} is half a surrogate pair and not a character; leave it out"
        raise ValueError(f"{name}: {problem}") from error


def _message(message: Any, name: str) -> dict[str, Any]:
    """A chat's message with its content as one text: parts of text, which some interfaces write, are joined."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ValueError(
            f"{name}: role is {short_repr(role)}; give 'user', 'assistant' or another that the template knows"
        )
    check_text(f"{name}: role", role)
    if content is None and role == "assistant":
        return dict(message) if message.get("tool_calls") else {**message, "content": ""}
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list | tuple) or not parts:
        raise ValueError(
            f'{name}: content is {short_repr(content)}; give a text, or parts {{"type": "text", "text": ...}}'
        )
    for i, part in enumerate(parts):
        part_type = part.get("type") if isinstance(part, Mapping) else None
        if part_type != "text" or not isinstance(part.get("text"), str):
            what = f"a part of type {short_repr(part_type)}" if part_type not in (None, "text") else short_repr(part)
            raise ValueError(
                f"{name}: content[{i}] is {what}; this target reads only text, as "
                '{"type": "text", "text": "..."}: leave other parts out'
            )
        check_text(f"{name}: content", part["text"])
    return {**message, "content": "".join(part["text"] for part in parts)}


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


def _check(target: Target, index: int, tokens: list[int], sampling: SamplingParams, max_length: int) -> None:
    config = target.model.config
    vocab = config.vocab_size
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
            f"(max_length={max_length}, the target has {config.max_positions} positions)"
        )


def _special_stops(target: Target, strings: Sequence[str]) -> list[int]:
    if target.tokenizer is None:
        raise ValueError("stop_strings: this target has no tokenizer; use stop_token_ids")
    vocab = target.model.config.vocab_size
    return [token for token, text in special_tokens(target.tokenizer).items() if text in strings and token < vocab]


@dataclass
class ActiveSequence:
    """A request on its slot: what is committed, and why it ended."""

    request: Request
    target: Target
    max_length: int
    began: float  # when its prefill began
    stats: Statistics
    finish_reason: str = ""
    committed: list[int] = field(init=False)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    def __post_init__(self):
        sampling = self.request.sampling
        self.committed = list(self.request.prompt)
        self._stop_ids = frozenset(sampling.stop_token_ids)
        stops, before = sampling.stop_strings, text_before(self.request)
        self._stops = StopStrings(self.target.tokenizer, stops, before) if stops else None

    def commit(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> list[int]:
        """Append tokens up to the first one that ends the sequence, with their log-probabilities where there are any.
        Returns what was appended."""
        before, sampling = len(self.committed), self.request.sampling
        least, last = (len(self.request.prompt) + count for count in (sampling.min_new_tokens, sampling.max_new_tokens))
        for token in tokens:
            self.committed.append(token)
            searched = len(self.committed) >= least
            if token in self._stop_ids or (self._stops is not None and self._stops.push(token, searched)):
                self.finish_reason = "stop"
            elif len(self.committed) >= last:
                self.finish_reason = "length"
            elif len(self.committed) >= self.max_length:
                self.finish_reason = "capacity"
            if self.finish_reason:
                break
        new = self.committed[before:]
        if (k := sampling.logprobs) is not None:
            self.logprobs += [one._replace(top=one.top[:k]) for one in logprobs[: len(new)]]
        return new

    def piece(self, tokens: list[int], accepted: int, decisions: Callable[[], dict[str, str]]) -> Piece:
        """A stream's piece with these tokens, and with the generation if they are the last ones."""
        generation = self.generation(decisions()) if self.finish_reason else None
        logprobs = self.logprobs[len(self.logprobs) - len(tokens) :] if self.logprobs else []
        return Piece(self.request.index, tokens, min(accepted, len(tokens)), generation, logprobs)

    def generation(self, decisions: dict[str, str]) -> Generation:
        """The finished request."""
        tokenizer, request = self.target.tokenizer, self.request
        tokens, seed = self.committed[len(request.prompt) :], request.sampling.seed
        assert seed is not None
        skip_special = not isinstance(request, Continuation) or request.skip_special
        has_end = self.finish_reason == "stop" and tokens[-1] in self._stop_ids
        shown = tokens[:-1] if has_end and not skip_special else tokens
        text = None if tokenizer is None else text_behind(tokenizer, text_before(request), shown, skip_special)
        if self._stops is not None and self.finish_reason == "stop" and not has_end:
            text = self._stops.text
        self.stats.decisions = decisions
        asked, of_prompt = request.sampling.logprobs is not None, request.sampling.prompt_logprobs is not None
        logprobs = (self.logprobs if asked else None, self.prompt_logprobs if of_prompt else None)
        return Generation(request.index, request.prompt, tokens, text, seed, self.finish_reason, self.stats, *logprobs)
