"""Generations as OpenAI's interface answers them, whole or streamed. Requests are in infer/server_protocol.py.

Source: OpenAI's API reference, "Chat" and "Completions"; the object `metrics.speculative_decoding` is vLLM's.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from longdraft.infer.results import Generation
from longdraft.infer.server_protocol import Body, Chat, StreamOptions

FINISH_REASONS = {"stop": "stop", "length": "length", "capacity": "length", "cancelled": "stop"}


def usage(generations: Sequence[Generation], n: int) -> dict[str, Any]:
    """Token counts. A prompt counts once, however many of the `n` choices it has. `cached_tokens` are those whose keys
    and values were taken over from an earlier prompt."""
    prompt = sum(len(one.prompt) for one in generations[::n])
    cached = sum(one.stats.taken_over for one in generations[::n])
    new = sum(len(one.tokens) for one in generations)
    tokens = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    return tokens | {"prompt_tokens_details": {"cached_tokens": cached}}


def metrics(generations: Sequence[Generation], max_depth: int) -> dict[str, Any] | None:
    """vLLM's `speculative_decoding` object for all choices together; None if nothing is ever drafted.

    A speculative step is one that verifies more than the root. `num_spec_tokens` is the greatest depth of a tree, and
    entry i of the histogram counts the steps that accepted i tokens.
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
    """Makes the answers to one body: a whole one, or a stream's chunks."""

    def __init__(self, body: Body, identity: str, model: str, max_depth: int):
        self._chat, self._body, self._max_depth = isinstance(body, Chat), body, max_depth
        name, prefix = ("chat.completion", "chatcmpl") if self._chat else ("text_completion", "cmpl")
        self._object, self._chunk_object = name, f"{name}.chunk" if self._chat else name
        self._head = {"id": f"{prefix}-{identity}", "created": int(time.time()), "model": model}
        self._options = body.stream_options or StreamOptions()
        self.tells_accepted = self._options.include_accepted

    def whole(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """The answer that is not streamed."""
        choices = []
        for index, one in enumerate(generations):
            text = {"message": {"role": "assistant", "content": one.text}} if self._chat else {"text": one.text}
            reason = FINISH_REASONS[one.finish_reason]
            choices.append({"index": index, **text, "logprobs": None, "finish_reason": reason})
        return {"object": self._object, **self._head, "choices": choices, **self._figures(generations)}

    def _figures(self, generations: Sequence[Generation]) -> dict[str, Any]:
        figures = {"usage": usage(generations, self._body.n or 1)}
        speculation = metrics(generations, self._max_depth)
        return figures if speculation is None else figures | {"metrics": speculation}

    def first(self, index: int) -> dict[str, Any] | None:
        """The chunk that begins a choice; None for completions, which have none."""
        return self._chunk(index, {"role": "assistant", "content": ""}, None) if self._chat else None

    def chunk(self, index: int, text: str, accepted: Mapping[str, int], finish_reason: str = "") -> dict[str, Any]:
        """The next text of a choice. `accepted` is added to it if the body asks for that."""
        delta = {"content": text} if text or not finish_reason else {}
        chunk = self._chunk(index, delta if self._chat else text, FINISH_REASONS.get(finish_reason))
        return chunk | {"accepted": accepted} if self.tells_accepted else chunk

    def _chunk(self, index: int, content: Any, reason: str | None) -> dict[str, Any]:
        choice = {"index": index, "delta" if self._chat else "text": content, "logprobs": None, "finish_reason": reason}
        no_usage = {"usage": None} if self._options.include_usage else {}
        return {"object": self._chunk_object, **self._head, "choices": [choice], **no_usage}

    def end(self, last: dict[str, Any], generations: Sequence[Generation]) -> list[dict[str, Any]]:
        """The stream's last chunks: `last` with the figures, or with `include_usage` the figures in a chunk of their
        own."""
        figures = self._figures(generations)
        if self._options.include_usage:
            return [last, {"object": self._chunk_object, **self._head, "choices": [], **figures}]
        figures.pop("usage")
        return [last | figures]
