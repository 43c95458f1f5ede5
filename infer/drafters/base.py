"""What a drafter is: the one interface between the decoding loop and a method.

Shapes: B slots, T rows of a pass, N tree nodes, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.infer.accept import AcceptResult
from longdraft.infer.sampling import SamplingParams
from longdraft.infer.slot_state import SlotState
from longdraft.infer.tree import TokenTree
from longdraft.kernels.transfer import read_together
from longdraft.models.kv_cache import KVCache
from longdraft.models.passes import TargetOutput


@dataclass(frozen=True)
class Request:
    """A prompt that has been given a slot. `sampling.seed` is never None here."""

    index: int
    prompt: list[int]
    sampling: SamplingParams


class Inquiry(NamedTuple):
    """What a tree that is made on the host waits for.

    `tensors`: int64 or bool [B, ...]. `answer`: the tree, from their lists.
    """

    tensors: tuple[Tensor, ...]
    answer: Callable[[list[list]], TokenTree]

    def now(self) -> TokenTree:
        """The tree, for which the host waits."""
        return self.answer(read_together(*self.tensors))


class Drafter:
    """Proposes candidates. Whatever they are, the output is plain decoding's; they only decide how many steps it takes.

    Attributes:
        needs: the TargetOutput fields it wants from the next pass of the target, the prefill's included; it may change
            from pass to pass. "queries" are the root's in a step, the last row's in a prefill.
        max_nodes: the most nodes below the root it ever proposes.
        max_depth: the deepest level it ever proposes.
    """

    needs: frozenset[str] = frozenset()
    max_nodes: int
    max_depth: int

    @property
    def n_classes(self) -> int:
        """Number of node classes (`TokenTree.classes`); a class is the node's index where a tree has none."""
        return 1 + self.max_nodes

    def on_start(self, slots: Sequence[int], requests: Sequence[Request], cache: KVCache) -> None:
        """These slots start these requests on this cache; what was kept for the slots' former requests is void."""

    def on_prefill(self, slots: Sequence[int], tokens_BT: Tensor, output: TargetOutput) -> None:
        """One chunk of the prefill of these slots (rows of `tokens_BT` and `output` are the slots, in order), already
        committed to the cache."""

    def propose(self, state: SlotState, max_nodes: int) -> TokenTree:
        """At most `max_nodes` nodes below the roots, the ones worth most first as far as the drafter can tell."""
        raise NotImplementedError

    def inquire(self, state: SlotState, max_nodes: int) -> Inquiry:
        """`propose` in two parts: what is to be read on the host, and the tree that is made of it, so that the host
        waits once for all who propose in one step. The tree's lists are read with it."""
        tree = self.propose(state, max_nodes)
        return Inquiry(tree.unread, tree.take_lists)

    def on_step(self, state: SlotState, tree: TokenTree, accepted: AcceptResult, output: TargetOutput) -> None:
        """What the target computed of `tree`, and what was committed of it; `state` stands behind the step.

        The tree may hold other drafters' nodes or only some of those proposed, and the committed tokens may be none of
        this drafter's: catch up. Slots with `accepted.counts[b] == 0` took no part.
        """

    def rewind(self, lengths_B: Tensor) -> None:
        """The tokens at positions >= lengths_B[b] (int64) were taken back: an outer engine decided otherwise.

        Until the next `propose`, whose state tells what stands there now, nothing else happens but `advance`.
        """

    def advance(self, most: int) -> None:
        """At most so many tokens came to each slot in a step of an outer engine, which is not observed."""

    def release(self) -> None:
        """The cache of `begin` is about to be freed: let go of it and of what was allocated beside it."""

    def memory_bytes(self, batch: int, capacity: int) -> Mapping[str, int]:
        """What it will allocate for `batch` slots of `capacity` positions, by name, its weights not counted."""
        return {}

    def decisions(self) -> Mapping[str, str]:
        """What it decided by itself in the running call (an `auto`), in words; shown with the statistics."""
        return {}


def committed_nodes(accepted: AcceptResult) -> Tensor:
    """bool [B, P]: which places of `accepted.nodes` and `accepted.tokens` count."""
    return torch.arange(accepted.nodes.shape[1], device=accepted.nodes.device) < accepted.counts[:, None]
