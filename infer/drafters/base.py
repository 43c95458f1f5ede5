"""What a drafter is: the one interface between the decoding loop and a method.

Shapes: B slots, T rows of a pass, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from longdraft.infer.sampling import SamplingParams, SlotSampling
from longdraft.infer.tree import TokenTree
from longdraft.infer.verify import Verdict
from longdraft.models.decoder import TargetOutput
from longdraft.models.kv_cache import KVCache


@dataclass(frozen=True)
class Request:
    """A prompt that has been given a slot. `sampling.seed` is never None here."""

    index: int
    prompt: list[int]
    sampling: SamplingParams


@dataclass
class SlotState:
    """Where every slot stands before a step. Only the engine writes it.

    Attributes:
        roots: int64 [B], the last committed token of each slot.
        positions: int64 [B], its absolute position, counted without padding; the target's cache ends right before it.
        active: bool [B], False for slots without a request.
        sampling: the slots' parameters, and the noise of this step.
        committed: per slot the prompt and all new tokens, on the host (on a GPU it may lag one step behind).
    """

    roots: Tensor
    positions: Tensor
    active: Tensor
    sampling: SlotSampling
    committed: list[list[int]]

    def ranking(self, logits_BV: Tensor, offset: int) -> Tensor:
        """Scores to rank candidates for the token `offset` behind the root by, fp32 or the logits' dtype [B, V].

        At T > 0 the noise that the target's choice will use is known beforehand, so candidates are ranked with it.
        """
        return self.sampling.scores(logits_BV, self.noise(offset, logits_BV.shape[-1]))

    def noise(self, offset: int, vocab_size: int) -> Tensor | None:
        """g(seed, root's position + offset, .), fp32 [B, V]; None when every slot is greedy."""
        return None if self.sampling.greedy else self.sampling.noise(self.positions, offset, vocab_size)


class Drafter(Protocol):
    """Proposes candidates. Whatever they are, the output is plain decoding's; they only decide how many steps it takes.

    Attributes:
        needs: the TargetOutput fields it wants from every pass of the target, the prefill's included.
        max_nodes: the most nodes below the root it ever proposes.
        max_depth: the deepest level it ever proposes.
    """

    needs: frozenset[str]
    max_nodes: int
    max_depth: int

    def begin(self, slots: Sequence[int], requests: Sequence[Request], cache: KVCache) -> None:
        """These slots start these requests; what was kept for the slots' former requests is void."""
        ...

    def read(self, slots: Sequence[int], tokens_BT: Tensor, output: TargetOutput) -> None:
        """One chunk of the prefill of these slots (rows of `tokens_BT` and `output` are the slots, in order)."""
        ...

    def propose(self, state: SlotState, room: int) -> TokenTree:
        """At most `room` nodes below the roots."""
        ...

    def observe(self, tree: TokenTree, verdict: Verdict, output: TargetOutput) -> None:
        """What the target computed of `tree`, and what was committed (possibly another drafter's tokens)."""
        ...
