"""Generations as OpenAI's interface answers them, whole or streamed.

Source: OpenAI's API reference, "Chat" and "Completions"; the object `metrics.speculative_decoding` is vLLM's.
"""

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from longdraft.infer.generation import Generation, Piece
from longdraft.infer.logprobs import TokenLogprob
from longdraft.infer.requests import Request
from longdraft.infer.server.protocol import Body
from longdraft.infer.text import TextReader, token_bytes
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
        self._asked, self._n, self._options, self._max_depth = body.asked(), body.n, body.stream_options, max_depth
        self._requests, self._tokenizer, asked = requests, target.tokenizer, self._asked
        self._new = [0] * len(requests)  # tokens of each choice so far
        self.tells_tokens = self._options.include_accepted or asked.alternatives is not None
        self._readers = [TextReader(target.tokenizer, one.continued_tokens, asked.skip_special) for one in requests]
        name, prefix = ("chat.completion", "chatcmpl") if asked.is_chat else ("text_completion", "cmpl")
        self._head = {"object": name, "id": f"{prefix}-{identity}", "created": int(time.time()), "model": model}
        self._chunk_head = self._head | ({"object": f"{name}.chunk"} if asked.is_chat else {})

    def response(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """The answer that is not streamed."""
        choices = []
        for index, one in enumerate(generations):
            text = one.text or ""
            content = {"message": {"role": "assistant", "content": text}} if self._asked.is_chat else {"text": text}
            choices.append(self._choice(index, content, one.finish_reason, one.logprobs))
        return {**self._head, "choices": choices, **self._figures(generations)}

    def first(self, index: int) -> dict[str, Any] | None:
        """The chunk that begins a choice; None for a completion, which has none."""
        return self._chunk(index, {"delta": {"role": "assistant", "content": ""}}) if self._asked.is_chat else None

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """The next text of a choice, and what else the body asks for."""
        self._new[index] += len(piece.tokens)
        reason = None if piece.generation is None else piece.generation.finish_reason
        content: dict[str, Any] = {"text": piece.text}
        if self._asked.is_chat:
            content = {"delta": {"content": piece.text} if piece.text or reason is None else {}}
        entries = None if self._asked.alternatives is None else piece.logprobs
        chunk = self._chunk(index, content, reason, entries)
        if self._options.include_accepted:
            characters = piece.accepted_text
            chunk["accepted"] = {"tokens": len(piece.tokens), "accepted": piece.accepted, "characters": characters}
        return chunk

    def end(self, last: dict[str, Any], generations: Sequence[Generation]) -> list[dict[str, Any]]:
        """The stream's last chunks: `last` with the figures, or with `include_usage` the figures in a chunk of their
        own."""
        figures = self._figures(generations)
        if self._options.include_usage:
            return [last, {**self._chunk_head, "choices": [], **figures}]
        figures.pop("usage")
        return [last | figures]

    def _chunk(self, index: int, content: dict[str, Any], *more: Any) -> dict[str, Any]:
        chunk = {**self._chunk_head, "choices": [self._choice(index, content, *more)]}
        if self._options.include_usage:
            chunk["usage"] = self._usage() if self._options.continuous_usage_stats else None
        return chunk

    def _choice(
        self, index: int, content: dict, reason: str | None = None, entries: Sequence[TokenLogprob] | None = None
    ) -> dict[str, Any]:
        logprobs = None
        if entries is not None and self._asked.is_chat:
            logprobs = chat_logprobs(self._tokenizer, entries)
        elif entries is not None:
            logprobs = completion_logprobs(self._tokenizer, entries, self._readers[index])
        reason = reason and FINISH_REASONS[reason]
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}

    def _usage(self) -> dict[str, Any]:
        """The tokens so far. A prompt counts once, however many choices it has."""
        prompt, new = sum(len(one.prompt) for one in self._requests[:: self._n]), sum(self._new)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def _figures(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """Usage and speculation. `cached_tokens` are those whose keys and values an earlier prompt left."""
        self._new = [len(one.tokens) for one in generations]
        cached = sum(one.stats.taken_over for one in generations[:: self._n])
        figures = {"usage": self._usage() | {"prompt_tokens_details": {"cached_tokens": cached}}}
        return figures | ({"metrics": metrics(generations, self._max_depth)} if self._max_depth else {})


def chat_logprobs(tokenizer: Any, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Each token with its text and bytes, and the most probable ones in its place, as in a chat."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = token_bytes(tokenizer, token)
        return {"token": _spelled(data), "logprob": max(logprob, LEAST), "bytes": list(data)}

    content = [entry(one.token, one.logprob) | {"top_logprobs": [entry(*pair) for pair in one.top]} for one in entries]
    return {"content": content, "refusal": None}


def completion_logprobs(tokenizer: Any, entries: Sequence[TokenLogprob], reader: TextReader) -> dict[str, Any]:
    """Lists with an entry for each token, as in a completion. reader: reads the text, for the tokens' places in it."""
    offsets, tops = [], []
    for one in entries:
        offsets.append(len(reader.text))
        reader.push([one.token])
        pairs = [*one.top, (one.token, one.logprob)]
        tops.append({_spelled(token_bytes(tokenizer, token)): max(logprob, LEAST) for token, logprob in pairs})
    return {
        "tokens": [_spelled(token_bytes(tokenizer, one.token)) for one in entries],
        "token_logprobs": [max(one.logprob, LEAST) for one in entries],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _spelled(data: bytes) -> str:
    """A token's text. The bytes of a token that is no whole character are spelled out, as OpenAI does."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in data)


def metrics(generations: Sequence[Generation], max_depth: int) -> dict[str, Any]:
    """vLLM's `speculative_decoding` object for all choices together.

    A speculative step is one that verifies more than the root. `num_spec_tokens` is the greatest depth of a tree, and
    entry i of the histogram counts the steps that accepted i tokens.
    """
    stats = [one.stats for one in generations]
    steps, drafted = sum(one.speculative_steps for one in stats), sum(one.drafted for one in stats)
    at_least = [steps] + [0] * (max_depth + 1)  # [i]: steps that accepted at least i tokens
    for one in stats:
        for depth, count in enumerate(one.accepted_at_depth, start=1):
            at_least[depth] += count
    accepted = sum(at_least[1:])
    values = {
        "mean_acceptance_length": 1 + accepted / max(steps, 1),
        "draft_acceptance_rate": accepted / max(drafted, 1),
        "acceptance_histogram": [more - fewer for more, fewer in pairwise(at_least)],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": max_depth,
    }
    return {"speculative_decoding": values}
