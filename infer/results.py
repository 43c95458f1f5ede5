"""What decoding returns: generations with their statistics, and the pieces of a stream."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from longdraft.infer.logprobs import TokenLogprob


@dataclass
class Statistics:
    """What one generation cost. Seconds are wall-clock time; on a GPU the parts are times of launching, not of running.

    All slots that took part in a step count its whole time; it is not divided by the batch.
    """

    steps: int = 0
    speculative_steps: int = 0  # those that verified more than the root
    drafted: int = 0  # nodes verified below the roots
    taken_over: int = 0  # tokens of the prompt whose keys and values were reused from an earlier prompt
    prefill_seconds: float = 0.0
    first_token_seconds: float = 0.0  # from the start of the prefill to the first step's tokens
    decode_seconds: float = 0.0  # of steps that it took part in, without prefills, its own or others'
    draft_seconds: float = 0.0
    target_seconds: float = 0.0  # verification: the target's passes
    commit_seconds: float = 0.0  # choice, accept, commit, on_step
    accepted_at_depth: list[int] = field(default_factory=list)  # [d] steps that accepted at least d + 1 nodes
    decisions: dict[str, str] = field(default_factory=dict)  # what "auto" options decided, in words

    @property
    def host_seconds(self) -> float:
        """Decoding time outside of the target's passes and the proposals."""
        return self.decode_seconds - self.target_seconds - self.draft_seconds

    @property
    def acceptance_by_depth(self) -> list[float]:
        """[d]: share of steps that accepted at least d + 1 nodes."""
        return [count / max(self.steps, 1) for count in self.accepted_at_depth]


@dataclass
class Generation:
    """One finished request.

    Attributes:
        index: the prompt's place in the call.
        tokens: the new tokens, including the stop token or those that completed a stop string.
        text: the tokens decoded without special ones, up to a stop string; after a text prompt, what they add to it.
            None if the target has no tokenizer.
        seed: the seed they were chosen with.
        finish_reason: "stop" (an end token or stop string), "length" (max_new_tokens), "capacity" (no positions left)
            or "cancelled".
        logprobs, prompt_logprobs: of each new token, and of each of the prompt's tokens but the first; None if the
            request did not ask for them.
    """

    index: int
    prompt: list[int]
    tokens: list[int]
    text: str | None
    seed: int
    finish_reason: str
    stats: Statistics
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None

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
        stats, steps = self.stats, max(self.stats.steps, 1)
        per_step = {
            f"{part}_ms": round(1e3 * getattr(stats, f"{part}_seconds") / steps, 3)
            for part in ("draft", "target", "commit", "host")
        }
        return {
            "prompt_tokens": len(self.prompt),
            "new_tokens": len(self.tokens),
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "steps": stats.steps,
            "tokens_per_step": round(self.tokens_per_step, 4),
            "tokens_per_second": round(self.tokens_per_second, 3),
            "acceptance": round(self.acceptance, 4),
            "acceptance_by_depth": [round(share, 4) for share in stats.acceptance_by_depth],
            "taken_over": stats.taken_over,
            "first_token_seconds": round(stats.first_token_seconds, 4),
            **per_step,
            "decisions": stats.decisions,
        }


@dataclass
class Piece:
    """What a stream yields: the next tokens of prompt `index`; how many of them, from the first on, a drafter had
    proposed; its Generation once it is finished; and the tokens' log-probabilities, if the request asks for them."""

    index: int
    tokens: list[int]
    accepted: int = 0
    generation: Generation | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
