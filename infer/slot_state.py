"""Where every slot of a runner stands between two steps. Not here: who moves it on (infer/runner.py).

Shapes: B slots, N tree nodes, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import Tensor

from longdraft.infer.graphs import Graphs
from longdraft.infer.history import History
from longdraft.infer.policy import DraftPassChoice, Policy
from longdraft.infer.sampling import SlotSampling
from longdraft.infer.tree import Lists, TokenTree

T = TypeVar("T")


@dataclass
class SlotState:
    """Where every slot stands between two steps. Only the runner writes it.

    Attributes:
        roots: int64 [B], the last committed token of each slot.
        positions: int64 [B], its absolute position, counted without padding. The cache ends right before it.
        active: bool [B], False for slots without a request.
        history: every slot's tokens by absolute position, up to the root, on the device.
        sampling: the slots' parameters, and the noise of their positions.
        committed: per slot the prompt and all new tokens, on the host (on a GPU it may lag one step behind).
        policy: what decides how deep a proposal goes; None: all its stages are run.
        first_class: among the policy's classes, the first of the drafter's own.
        graphs: work that is queued on the device in every step goes through `run`, which records it.
        draft_pass: whether this proposal is to have a draft pass, where that is tried out.
    """

    roots: Tensor
    positions: Tensor
    active: Tensor
    history: History
    sampling: SlotSampling
    committed: list[list[int]]
    graphs: Graphs = field(default_factory=Graphs)
    policy: Policy | None = None
    first_class: int = 0
    draft_pass: DraftPassChoice | None = None

    def of_slots(self, slots: slice) -> "SlotState":
        """These slots' alone, as they stand."""
        return replace(
            self,
            roots=self.roots[slots],
            positions=self.positions[slots],
            active=self.active[slots],
            history=self.history.of_slots(slots),
            sampling=self.sampling.of_slots(slots),
            committed=self.committed[slots],
        )

    def run(self, key: tuple, owners: tuple, work: Callable[..., T], *inputs: Any, widest: int = 1) -> T:
        """`work(state, *inputs)`, recorded (see `Graphs.run`): of its state it may read roots, positions, active,
        history and sampling, for `ranking` above all, and nothing of the host."""
        if not self.graphs.recording:
            return work(self, *inputs)

        def of(roots_B: Tensor, positions_B: Tensor, active_B: Tensor, *inputs: Any) -> T:
            return work(replace(self, roots=roots_B, positions=positions_B, active=active_B), *inputs)

        owners, state = (*owners, self.history), (self.roots, self.positions, self.active)
        return self.graphs.run(key, owners, of, *state, *inputs, widest=widest, variant=self.sampling)

    def rounded(self, count: int) -> int:
        """`count`, a size that steers the work of a step; where work is recorded, for each size by itself, it is
        rounded up to a power of two."""
        return 1 << (count - 1).bit_length() if count and self.graphs.recording else count

    def stages(self, most: int) -> int:
        """Of the `most` stages of a proposal, how many it may have at most: for `DeviceDrafter.plan`."""
        return most if self.policy is None else self.policy.depth.limit(most)

    def goes_on(self, tree: TokenTree) -> bool:
        """Whether one more stage pays behind `tree`, what a drafter has proposed so far (see infer/depth.py)."""
        policy = self.policy
        return policy is None or policy.depth.goes_on(tree, policy.rates, self.active, self.first_class)

    @property
    def asks_first(self) -> bool:
        """Whether a drafter in stages is to ask `begins` before the first."""
        return self.policy is not None and self.policy.depth.asks_first

    def begins(self, others: Lists) -> bool:
        """Whether a drafter in stages is to propose beside what others have proposed."""
        return self.policy is None or self.policy.depth.begins(others, self.active)

    def ranking(self, logits: Tensor, offset: int, token_ids: Tensor | None = None) -> Tensor:
        """Scores to rank candidates for the token `offset` behind the root by: fp32, or the logits' dtype.

        At T > 0 the noise that the target's choice will use is known beforehand, so candidates are ranked with it;
        penalties and bans count as the root's history has them.

        Args:
            logits: [B, V], or [B, N, V] of several nodes at this depth.
            token_ids: int64 [V], the target's ids of a restricted draft vocabulary; None: all, in order.
        """
        return self.sampling.ranking(logits, self.history, self.positions, offset, token_ids)

    def best(
        self, logits_BTV: Tensor, offset: int, count: int, token_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Of each node the `count` candidates that `ranking` puts first: log-probabilities, and indices into V."""
        return self.sampling.best(logits_BTV, self.history, self.positions, offset, count, token_ids)
