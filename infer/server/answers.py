"""Turns generations into responses of OpenAI's interface, complete or streamed.

Source: OpenAI's API reference, "Chat" and "Completions".
"""

import time
from collections.abc import Sequence
from typing import Any

from longdraft.infer.generation import Generation, Piece
from longdraft.infer.logprobs import TokenLogprob
from longdraft.infer.requests import Request
from longdraft.infer.server.answer_format import CALLS, AnswerSplitter, answer_format, typed
from longdraft.infer.server.protocol import Chat, Completion
from longdraft.infer.text import token_bytes, token_text

FINISH_REASONS = {"stop": "stop", "length": "length", "capacity": "length", "grammar": "length", "cancelled": "stop"}
LEAST = -9999.0  # OpenAI's value for a log-probability of -inf, which JSON does not have


class Answers:
    """Makes the response to one body, or the chunks of a stream."""

    def __init__(self, body: Chat | Completion, requests: Sequence[Request], tokenizer: Any, identity: str, model: str):
        self._body, self._tokenizer = body, tokenizer
        self._is_chat, self._include_usage = isinstance(body, Chat), bool(body.stream_options.get("include_usage"))
        name, prefix = ("chat.completion", "chatcmpl") if self._is_chat else ("text_completion", "cmpl")
        self._head = {"object": name, "id": f"{prefix}-{identity}", "created": int(time.time()), "model": model}
        self._chunk_head = self._head | ({"object": f"{name}.chunk"} if self._is_chat else {})
        self._splitters = list[AnswerSplitter]()  # one for each choice, unless an answer is text alone
        if isinstance(body, Chat) and (form := answer_format(tokenizer, bool(body.offered))):
            most = None if body.parallel_tool_calls else 1
            tools = [*map(typed, body.offered)]
            self._splitters = [AnswerSplitter(form, tokenizer, one.prompt, tools, most) for one in requests]

    def response(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """The complete response, for a body without `stream`."""
        choices = []
        for index, one in enumerate(generations):
            parts = self._parts(index, one.text or "", one.finish_reason)
            if self._is_chat:
                calls = [{name: call[name] for name in call if name != "index"} for call in parts.get(CALLS, ())]
                parts |= {CALLS: calls} if calls else {}
                parts = {"message": {"role": "assistant", "content": None if calls else ""} | parts}
            choices.append(self._choice(index, parts, one.finish_reason, one.logprobs))
        return {**self._head, "choices": choices, "usage": self._usage(generations)}

    def start(self, index: int) -> list[dict[str, Any]]:
        """The chunk that goes before a choice's first piece, which only a chat has."""
        role = self._chunk(self._choice(index, {"delta": {"role": "assistant", "content": ""}}))
        return [role] if self._is_chat else []

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """The chunk of a choice's next piece."""
        reason = None if piece.generation is None else piece.generation.finish_reason
        entries = None if self._body.alternatives is None else piece.logprobs
        parts = self._parts(index, piece.text, reason)
        return self._chunk(self._choice(index, {"delta": parts} if self._is_chat else parts, reason, entries))

    def end(self, generations: Sequence[Generation]) -> list[dict[str, Any]]:
        """The stream's last chunk, which only `include_usage` asks for."""
        usage = {"usage": self._usage(generations)}
        return [self._chunk() | usage] if self._include_usage else []

    def _parts(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        """What the next text of a choice adds to its message, or to a completion. reason: why it ends here, if so."""
        if self._splitters:
            return self._splitters[index].push(text, reason is not None, is_whole=reason == "stop")
        return {"content": text} if self._is_chat else {"text": text}

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        usage = {"usage": None} if self._include_usage else {}
        return {**self._chunk_head, "choices": list(choices), **usage}

    def _choice(
        self, index: int, content: dict, reason: str | None = None, entries: Sequence[TokenLogprob] | None = None
    ) -> dict[str, Any]:
        as_logprobs = chat_logprobs if self._is_chat else completion_logprobs
        logprobs = None if entries is None else as_logprobs(self._tokenizer, entries)
        calls = reason == "stop" and self._splitters and self._splitters[index].calls
        finish_reason = "tool_calls" if calls else reason and FINISH_REASONS[reason]
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}

    def _usage(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """A prompt counts once, however many choices it has. `cached_tokens` are those whose keys and values were
        reused from an earlier prompt."""
        prompts = generations[:: self._body.n]
        prompt, new = sum(len(one.prompt) for one in prompts), sum(len(one.tokens) for one in generations)
        cached = {"cached_tokens": sum(one.stats.cached_tokens for one in prompts)}
        counts = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        return counts | {"prompt_tokens_details": cached}


def chat_logprobs(tokenizer: Any, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Each token with its text and bytes, and the most probable tokens at its position, as in a chat."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        spelled = list(token_bytes(tokenizer, token))
        return {"token": token_text(tokenizer, token), "logprob": max(logprob, LEAST), "bytes": spelled}

    content = [entry(one.token, one.logprob) | {"top_logprobs": [entry(*pair) for pair in one.top]} for one in entries]
    return {"content": content, "refusal": None}


def completion_logprobs(tokenizer: Any, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Lists with an entry for each token, as in a completion."""

    def name(token: int) -> str:
        """A token's text or, if that is no complete character, its bytes as in OpenAI's completions."""
        text, spelled = token_text(tokenizer, token), token_bytes(tokenizer, token)
        return text if text.encode() == spelled else "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    def by_text(*pairs: tuple[int, float]) -> dict[str, float]:
        return {name(token): max(logprob, LEAST) for token, logprob in pairs}

    return {
        "tokens": [name(one.token) for one in entries],
        "token_logprobs": [max(one.logprob, LEAST) for one in entries],
        "top_logprobs": [by_text(*one.top, (one.token, one.logprob)) for one in entries],
    }
