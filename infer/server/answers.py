"""Generations as OpenAI's interface answers them, whole or streamed.

Source: OpenAI's API reference, "Chat" and "Completions"; the object `metrics.speculative_decoding` is vLLM's.
"""

import time
from collections.abc import Sequence
from typing import Any

from longdraft.infer.drafters.base import Request
from longdraft.infer.generation import Generation, Piece
from longdraft.infer.logprobs import TokenLogprob
from longdraft.infer.server.protocol import Body, Completion, StreamOptions
from longdraft.infer.text import TextReader, text_behind, token_bytes
from longdraft.models.target import Target

FINISH_REASONS = {"stop": "stop", "length": "length", "capacity": "length", "cancelled": "stop"}
LEAST = -9999.0  # what OpenAI's interface says for a log-probability of -inf, which JSON does not have


class Answers:
    """Makes the response to one body, or the chunks of a stream.

    Attributes:
        tells_tokens: whether a chunk is wanted for tokens that add no text that can be shown.
    """

    def __init__(
        self, body: Body, requests: Sequence[Request], target: Target, identity: str, model: str, max_depth: int
    ):
        completion = body if isinstance(body, Completion) else None
        self._chat, self._body, self._max_depth = completion is None, body, max_depth
        self._requests, self._tokenizer = requests, target.tokenizer
        self._echoes = completion is not None and bool(completion.echo)
        self._skips = completion is None or completion.skip_special_tokens is not False
        wanted = body.alternatives is not None
        befores = [() if self._echoes else one.continued_tokens for one in requests if wanted]
        self._readers = [TextReader(target.tokenizer, before, self._skips) for before in befores]
        name, prefix = ("chat.completion", "chatcmpl") if self._chat else ("text_completion", "cmpl")
        self._object, self._chunk_object = name, f"{name}.chunk" if self._chat else name
        self._head = {"id": f"{prefix}-{identity}", "created": int(time.time()), "model": model}
        self._options = body.stream_options or StreamOptions()
        self._new = [0] * len(requests)  # tokens of each choice so far
        self.tells_tokens = bool(self._options.include_accepted) or wanted

    def response(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """The answer that is not streamed."""
        choices, limit = [], self._body.limit
        for index, one in enumerate(generations):
            text = self._echo(index) + ("" if limit == 0 else one.text or "")
            content = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
            logprobs = self._logprobs(index, one.logprobs and one.logprobs[:limit], one.prompt_logprobs)
            reason = FINISH_REASONS[one.finish_reason]
            choices.append({"index": index, **content, "logprobs": logprobs, "finish_reason": reason})
        return {"object": self._object, **self._head, "choices": choices, **self._figures(generations)}

    def first(self, index: int) -> dict[str, Any] | None:
        """The chunk that begins a choice; None for a completion without echo, which has none."""
        content = {"role": "assistant", "content": ""} if self._chat else self._echo(index)
        return self._chunk(index, content, None, None) if content else None

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """The next text of a choice, and what else the body asks for."""
        text = piece.text
        self._new[index] += len(piece.tokens)
        reason = None if piece.generation is None else FINISH_REASONS[piece.generation.finish_reason]
        delta = {"content": text} if text or reason is None else {}
        entries = piece.logprobs if self._body.alternatives is not None else None
        chunk = self._chunk(index, delta if self._chat else text, reason, self._logprobs(index, entries))
        if self._options.include_accepted:
            characters = piece.accepted_text
            chunk["accepted"] = {"tokens": len(piece.tokens), "accepted": piece.accepted, "characters": characters}
        return chunk

    def end(self, last: dict[str, Any], generations: Sequence[Generation]) -> list[dict[str, Any]]:
        """The stream's last chunks: `last` with the figures, or with `include_usage` the figures in a chunk of their
        own."""
        figures = self._figures(generations)
        if self._options.include_usage:
            return [last, {"object": self._chunk_object, **self._head, "choices": [], **figures}]
        figures.pop("usage")
        return [last | figures]

    def _chunk(self, index: int, content: Any, reason: str | None, logprobs: dict | None) -> dict[str, Any]:
        kind = "delta" if self._chat else "text"
        choice = {"index": index, kind: content, "logprobs": logprobs, "finish_reason": reason}
        chunk: dict[str, Any] = {"object": self._chunk_object, **self._head, "choices": [choice]}
        if self._options.include_usage:
            chunk["usage"] = self._usage() if self._options.continuous_usage_stats else None
        return chunk

    def _echo(self, index: int) -> str:
        """The prompt's text, if the choice is to begin with it."""
        if not self._echoes:
            return ""
        prompt = self._body.prompts[index // (self._body.n or 1)]
        return prompt if isinstance(prompt, str) else text_behind(self._tokenizer, (), prompt, self._skips)

    def _logprobs(
        self, index: int, entries: Sequence[TokenLogprob] | None, of_prompt: Sequence[TokenLogprob] | None = None
    ) -> dict[str, Any] | None:
        if entries is None:
            return None
        if self._chat:
            return chat_logprobs(self._tokenizer, entries)
        first = None if of_prompt is None else self._requests[index].prompt[0]
        return completion_logprobs(self._tokenizer, [*(of_prompt or ()), *entries], self._readers[index], first)

    def _usage(self) -> dict[str, Any]:
        """The tokens so far. A prompt counts once, however many choices it has."""
        prompt, new = sum(len(one.prompt) for one in self._requests[:: self._body.n or 1]), sum(self._new)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def _figures(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """Usage and speculation. `cached_tokens` are those whose keys and values an earlier prompt left."""
        self._new = [len(one.tokens[: self._body.limit]) for one in generations]
        cached = sum(one.stats.taken_over for one in generations[:: self._body.n or 1])
        figures = {"usage": self._usage() | {"prompt_tokens_details": {"cached_tokens": cached}}}
        speculation = metrics(generations, self._max_depth)
        return figures if speculation is None else figures | {"metrics": speculation}


def chat_logprobs(tokenizer: Any, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Each token with its text and bytes, and the most probable ones in its place, as in a chat."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = token_bytes(tokenizer, token)
        return {"token": _spelled(data), "logprob": max(logprob, LEAST), "bytes": list(data)}

    content = [entry(one.token, one.logprob) | {"top_logprobs": [entry(*pair) for pair in one.top]} for one in entries]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Any, entries: Sequence[TokenLogprob], reader: TextReader, first: int | None = None
) -> dict[str, Any]:
    """Lists with an entry for each token, as in a completion.

    reader: reads the text, for the tokens' places in it. first: a token before them that has no log-probability.
    """
    lists: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def add(token: int, logprob: float | None, top: dict[str, float] | None) -> None:
        entry = _spelled(token_bytes(tokenizer, token)), logprob, top, len(reader.text)
        reader.push([token])
        for values, value in zip(lists.values(), entry, strict=True):
            values.append(value)

    if first is not None:
        add(first, None, None)
    for one in entries:
        pairs = [*one.top, (one.token, one.logprob)]
        top = {_spelled(token_bytes(tokenizer, token)): max(logprob, LEAST) for token, logprob in pairs}
        add(one.token, max(one.logprob, LEAST), top)
    return lists


def _spelled(data: bytes) -> str:
    """A token's text. The bytes of a token that is no whole character are spelled out, as OpenAI does."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in data)


def metrics(generations: Sequence[Generation], max_depth: int) -> dict[str, Any] | None:
    """vLLM's `speculative_decoding` object for all choices together; None if nothing is ever drafted.

    A speculative step is one that verifies more than the root. `num_spec_tokens` is the greatest depth of a tree, and
    entry i of the histogram counts the steps that accepted i tokens.
    """
    if max_depth == 0:
        return None
    stats = [one.stats for one in generations]
    steps, drafted = sum(one.speculative_steps for one in stats), sum(one.drafted for one in stats)
    by_depth = [one.accepted_at_depth + [0] * (max_depth - len(one.accepted_at_depth)) for one in stats]
    at_least = [steps, *map(sum, zip(*by_depth, strict=True))]
    accepted = sum(at_least[1:])
    values = {
        "mean_acceptance_length": 1 + accepted / max(steps, 1),
        "draft_acceptance_rate": accepted / max(drafted, 1),
        "acceptance_histogram": [more - fewer for more, fewer in zip(at_least, [*at_least[1:], 0], strict=True)],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": max_depth,
    }
    return {"speculative_decoding": values}
