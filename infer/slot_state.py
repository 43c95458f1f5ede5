"""The state of a runner's slots between two steps, and what a drafter may read of it.

Shapes: B slots, N tree nodes, T nodes of one level, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from longdraft.infer.choice.grammar import Matchers
from longdraft.infer.choice.slots import SlotSampling
from longdraft.infer.graphs import Graphs
from longdraft.infer.history import History
from longdraft.kernels.backend import is_host
from longdraft.models.tensor_parallel import ALONE, TensorParallel

T = TypeVar("T")


@dataclass
class SlotState:
    """The state of all slots between two steps. Only the runner and the owner of the slots write it. They write roots,
    positions and active in place, because recorded work reads these tensors.

    Attributes:
        roots: int64 [B], the last committed token of each slot.
        positions: int64 [B], the root's absolute position, counted without padding. The cache ends right before it.
        active: bool [B], False for slots without a request.
        history: every slot's tokens by absolute position, up to the root, on the device.
        sampling: the slots' parameters, and the noise of their positions.
        committed: for each slot the prompt and all new tokens, on the host; on a GPU it may lag by one step.
        matchers: where a request has a grammar, each slot's matcher after the committed tokens, or None; else empty.
        graphs: records the work that `run` queues.
        logprobs: whether a slot's request asks for log-probabilities.
        ranks: the processes that compute the target together, each with such a state of its own.
    """

    roots: Tensor
    positions: Tensor
    active: Tensor
    history: History
    sampling: SlotSampling
    committed: list[Sequence[int]]
    matchers: Matchers = ()
    graphs: Graphs = field(default_factory=Graphs)
    logprobs: bool = False
    ranks: TensorParallel = ALONE

    def of_slots(self, slots: slice) -> "SlotState":
        """The state of these slots alone."""
        return replace(
            self,
            roots=self.roots[slots],
            positions=self.positions[slots],
            active=self.active[slots],
            history=self.history.of_slots(slots),
            sampling=self.sampling.of_slots(slots),
            committed=self.committed[slots],
            matchers=self.matchers[slots],
        )

    @property
    def working(self) -> slice:
        """The slots that a step computes. On a CPU, where every row costs time: from the first slot with a request to
        the last. Elsewhere all slots, because the host would have to wait for `active`."""
        active = [] if self.graphs.recording or not is_host(self.active.device) else self.active.nonzero().tolist()
        return slice(active[0][0], active[-1][0] + 1) if active else slice(0, len(self.roots))

    def leading(self) -> "SlotState":
        """The state of the slots up to the last one of `working`."""
        stop = self.working.stop
        return self.of_slots(slice(0, stop)) if stop < len(self.roots) else self

    def run(self, key: tuple, owners: tuple, work: Callable[..., T], *inputs: Any, widest: int = 1) -> T:
        """Queue `work(state, *inputs)` on the device. On a CPU this is a plain call; where steps are recorded, it is
        `Graphs.run`, which explains the arguments.

        owners: without the state, of which the work may use roots, positions, active, history and sampling.
        """
        owners = *owners, self.history, self.sampling, self.roots, self.positions, self.active
        return self.graphs.run(key, owners, partial(work, self), *inputs, widest=widest)

    def rounded(self, count: int, usual: int, most: int) -> int:
        """`count`, a size up to `most` that a step's work depends on. Where work is recorded, every size needs its own
        recording, so the count is rounded up to `usual` or `most`."""
        return (usual if count <= usual else most) if self.graphs.recording else count

    def best(
        self, logits_BTV: Tensor, offset: int, count: int, token_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`SlotSampling.best` after the roots: the `count` best candidates of each node for the token `offset` after
        the root. Returns log-probabilities, and indices into V."""
        return self.sampling.best(logits_BTV, self.history, self.positions, offset, count, token_ids)
