"""The state of a request during decoding, and the results: generations with statistics, and pieces of a stream."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from longdraft.infer.choice.grammar import matcher_of
from longdraft.infer.logprobs import TokenLogprob
from longdraft.infer.requests import Request
from longdraft.infer.text import ShownText
from longdraft.models.target import Target


@dataclass
class Statistics:
    """The cost of a generation. Seconds are wall-clock; on a GPU draft, target and commit seconds measure launches.

    Every slot that took part in a step counts the step's full time; it is not divided by the batch.
    """

    steps: int = 0
    speculative_steps: int = 0  # those that verified more than the root
    drafted: int = 0  # nodes verified below the roots
    cached_tokens: int = 0  # tokens of the prompt whose keys and values were reused from an earlier prompt
    prefill_seconds: float = 0.0  # host time to queue the passes; a GPU may still be running them
    first_token_seconds: float = 0.0  # from the start of the prefill to the first step's tokens
    decode_seconds: float = 0.0  # of the steps that it took part in; excludes all prefills
    draft_seconds: float = 0.0
    target_seconds: float = 0.0  # verification: the target's passes
    commit_seconds: float = 0.0  # choice, accept, commit, on_step
    accepted_at_depth: list[int] = field(default_factory=list)  # [d] steps that accepted at least d + 1 nodes


@dataclass
class Generation:
    """The result of one request, which grows until the request is finished.

    Attributes:
        index: the prompt's place in the call.
        tokens: the new tokens, including the stop token or those that completed a stop string.
        text: the tokens decoded without special ones, up to a stop string; after a text prompt, what they add to its
            text. None if the target has no tokenizer.
        seed: the seed that was used.
        finish_reason: "stop" (an end token, a stop string, or the grammar allows no more text), "length"
            (max_new_tokens), "capacity" (no positions left), "grammar" (the text became too complex for the grammar's
            matcher) or "cancelled".
        logprobs: of each new token; None if the request did not ask for them.
    """

    index: int
    prompt: list[int]
    tokens: list[int]
    text: str | None
    seed: int
    finish_reason: str
    stats: Statistics
    logprobs: list[TokenLogprob] | None = None

    @property
    def tokens_per_step(self) -> float:
        """New tokens per pass of the target, without prefill."""
        return len(self.tokens) / max(self.stats.steps, 1)

    @property
    def acceptance(self) -> float:
        """Accepted draft tokens / drafted tokens; 0 if nothing was drafted."""
        return sum(self.stats.accepted_at_depth) / max(self.stats.drafted, 1)

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of decoding, without prefill."""
        return len(self.tokens) / max(self.stats.decode_seconds, 1e-9)

    def summary(self) -> Mapping[str, object]:
        """The figures as plain values, for JSON."""
        rates = {name: getattr(self, name) for name in ("tokens_per_step", "tokens_per_second", "acceptance")}
        counts = {"prompt_tokens": len(self.prompt), "new_tokens": len(self.tokens), "seed": self.seed}
        return {**counts, "finish_reason": self.finish_reason, **rates, **asdict(self.stats)}


@dataclass
class Piece:
    """What a stream yields.

    Attributes:
        index: the prompt's place in the call.
        tokens: the next tokens.
        accepted: how many of the leading tokens a drafter had proposed.
        logprobs: the tokens' log-probabilities, if the request asks for them.
        text: what can be shown now; a request's pieces concatenate to the generation's text. Empty without a tokenizer.
        accepted_text: how many leading characters of `text` come from accepted tokens.
        generation: the result, in a request's last piece; None in the others.
    """

    index: int
    tokens: list[int]
    accepted: int
    logprobs: list[TokenLogprob] = field(default_factory=list)
    text: str = ""
    accepted_text: int = 0
    generation: Generation | None = None


class ActiveSequence:
    """A request during decoding: its committed tokens, its text and its finish reason.

    Attributes:
        committed: the prompt and all new tokens.
        matcher: of the request's grammar, after the new tokens; None if it has none.
        began: when its prefill began, by `time.perf_counter`; 0 before.
        result: the generation so far.
    """

    def __init__(self, request: Request, target: Target, max_length: int):
        sampling = request.sampling
        assert sampling.seed is not None
        self.request, self._max_length, self.began = request, max_length, 0.0
        self.committed, self._stop_ids = list(request.prompt), frozenset(sampling.stop_token_ids)
        self.result = Generation(request.index, request.prompt, [], None, sampling.seed, "", Statistics())
        self.result.logprobs = None if sampling.logprobs is None else []
        self.matcher = request.matcher and request.matcher.deep_copy()
        if self.matcher is None and sampling.grammar is not None:
            self.matcher = matcher_of(target, sampling.grammar)
        self._text = None
        if target.tokenizer is not None:
            continued = request.prompt if request.continues else ()
            self._text = ShownText(target.tokenizer, sampling.stop_strings, continued, request.skip_special)

    def commit(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> Piece:
        """Append a step's tokens up to the first one that ends the sequence, with their log-probabilities where there
        are any. All of the step's tokens but the last one had been proposed by a drafter."""
        piece, drafted = Piece(self.request.index, [], 0), len(tokens) - 1
        for token in tokens:
            self.committed.append(token)
            self.result.tokens.append(token)
            piece.tokens.append(token)
            self._read(token, piece)
            if len(piece.tokens) <= drafted:
                piece.accepted, piece.accepted_text = len(piece.tokens), len(piece.text)
            if self.result.finish_reason:
                break
        if (k := self.request.sampling.logprobs) is not None and self.result.logprobs is not None:
            piece.logprobs = [one._replace(top=one.top[:k]) for one in logprobs[: len(piece.tokens)]]
            self.result.logprobs += piece.logprobs
        return self._finished(piece)

    def cancel(self) -> Piece:
        """End the sequence here."""
        self.result.finish_reason = "cancelled"
        return self._finished(Piece(self.request.index, [], 0))

    def _read(self, token: int, piece: Piece) -> None:
        """Add the last token's text to the piece, and note if it ends the sequence."""
        sampling, count = self.request.sampling, len(self.result.tokens)
        is_end, stopped = token in self._stop_ids, False
        if self._text is not None and not is_end:  # an end token has no text
            piece.text += self._text.push(token, searched=count >= sampling.min_new_tokens)
            stopped = self._text.stopped
        if self.matcher is not None:
            self.matcher.consume_token(token)
            stopped = stopped or self.matcher.is_stopped()
        if self.matcher is not None and self.matcher.is_error():
            self.result.finish_reason = "grammar"
        elif is_end or stopped:
            self.result.finish_reason = "stop"
        elif count >= sampling.max_new_tokens:
            self.result.finish_reason = "length"
        elif len(self.committed) >= self._max_length:
            self.result.finish_reason = "capacity"

    def _finished(self, piece: Piece) -> Piece:
        """The piece, with the generation and the rest of its text if it is finished."""
        if self.result.finish_reason:
            piece.generation = self.result
            if self._text is not None:
                self.result.text, rest = self._text.finish()
                piece.text += rest
                if self._text.stopped:  # by what was held back until now
                    self.result.finish_reason = "stop"
        return piece
