"""What a drafter is: the one interface between the decoding loop and a method.

Shapes: B slots, T rows of a pass, N tree nodes, V vocabulary.
"""

import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longdraft.infer.accept import AcceptResult
from longdraft.infer.sampling import SamplingParams
from longdraft.infer.slot_state import SlotState
from longdraft.infer.tree import TokenTree
from longdraft.models.kv_cache import KVCache
from longdraft.models.passes import TargetOutput

_TAKING = threading.Lock()


@dataclass(frozen=True)
class Request:
    """A prompt that has been given a slot. `sampling.seed` is never None here."""

    index: int
    prompt: list[int]
    sampling: SamplingParams


class Drafter:
    """Proposes candidates. Whatever they are, the output is plain decoding's; they only decide how many steps it takes.

    Attributes:
        needs: the TargetOutput fields it wants from the next pass of the target, the prefill's included; it may change
            from pass to pass. "queries" are the root's in a step, the last row's in a prefill.
        learns_from: those of them that `on_step` reads where it has proposed.
        max_nodes: the most nodes below the root it ever proposes.
        max_depth: the deepest level it ever proposes.
        trunk: so many first nodes of its last tree are one path that all others lie behind.
        draft_pass_budget: beyond so many tokens of context a draft pass may pay, which the policy tries out
            (`SlotState.draft_pass`); None where there is nothing to try out.
    """

    needs: frozenset[str] = frozenset()
    learns_from: frozenset[str] = frozenset()
    max_nodes: int
    max_depth: int
    trunk = 0
    draft_pass_budget: int | None = None
    user: object = None  # the engine that decodes with it

    @property
    def parts(self) -> Sequence["Drafter"]:
        """The drafters that it is made of."""
        return ()

    @contextmanager
    def used_by(self, engine: object) -> Iterator[None]:
        """While this engine decodes with it. Raises: RuntimeError where one does already, with it or a part of it."""
        every: list[Drafter] = [self]
        for one in every:
            every += one.parts
        with _TAKING:
            users = {one.user for one in every} - {None}
            if users:
                mine = engine in users
                what, remedy = ("engine", "make a second Engine") if mine else ("drafter", "give a second one")
                raise RuntimeError(f"this {what} is decoding already; finish or close its stream, or {remedy}")
            for one in every:
                one.user = engine
        try:
            yield
        finally:
            for one in every:
                one.user = None

    @property
    def n_classes(self) -> int:
        """Number of node classes (`TokenTree.classes`); a class is the node's index where a tree has none."""
        return 1 + self.max_nodes

    @property
    def class_stages(self) -> Sequence[int]:
        """Of each class, the stage that proposes its nodes, 0 for the root's. A drafter with a pass of its own for
        every level asks `SlotState.goes_on` between two of them; others propose in one stage."""
        return [0, *[1] * (self.n_classes - 1)]

    def on_start(self, slot: int, request: Request, cache: KVCache) -> None:
        """This slot of the cache starts this request; what was kept for the slot's former request is void."""

    def on_prefill(self, slot: int, prompt: Sequence[int], start: int, end: int, output: TargetOutput) -> None:
        """The tokens prompt[start:end] of this slot's prompt are committed to the cache. The last time `end` is the
        place of the prompt's last token, which is the root; of a prompt of one token nothing is told.

        output: of these tokens, B = 1; without fields where the cache has them from an earlier prompt, which is never
            so the last time.
        """

    def propose(self, state: SlotState, max_nodes: int) -> TokenTree:
        """At most `max_nodes` nodes below the roots, the ones worth most first as far as the drafter can tell."""
        raise NotImplementedError

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
        """The cache of `on_start` is about to be freed: let go of it and of what was allocated beside it."""

    def memory_bytes(self, batch: int, capacity: int) -> Mapping[str, int]:
        """What it will allocate for `batch` slots of `capacity` positions, by name, its weights not counted."""
        return {}

    def decisions(self) -> Mapping[str, str]:
        """What it decided by itself in the running call (an `auto`), in words; shown with the statistics."""
        return {}


class DeviceDrafter(Drafter):
    """A drafter with networks and tables on the device: it proposes by `grow` and learns by `update`.

    Both queue work and read nothing on the host, so that the runner may record and replay them. What they read and
    write besides their arguments lies where it is for as long as the cache of `on_start` does.

    Attributes:
        num_query_tokens: of its widest pass for each slot, where attention is in it.
    """

    num_query_tokens = 1

    def buffers(self) -> tuple[object, ...]:
        """What `on_start` allocated that `grow` and `update` read or write. Work that was recorded with others is not
        replayed, for another engine's `on_start` or `release` may have replaced them."""
        return ()

    def plan(self, state: SlotState, max_nodes: int) -> Hashable:
        """The host's part of a proposal, before `grow`: all that steers it, for each plan is recorded by itself."""
        return max_nodes

    def grow(self, state: SlotState, plan: Any) -> TokenTree:
        """The tree."""
        raise NotImplementedError

    def update(self, state: SlotState, tree: TokenTree, accepted: AcceptResult, output: TargetOutput) -> None:
        """As `on_step`, with those fields alone."""

    @torch.no_grad()
    def propose(self, state: SlotState, max_nodes: int) -> TokenTree:
        plan = self.plan(state, max_nodes)

        def grow(state: SlotState) -> TokenTree:
            tree = self.grow(state, plan)
            if state.graphs.recording:  # what pruning and the pass will ask of the tree is recorded with it
                _ = tree.ancestors, tree.depths
            return tree

        return state.run(("propose", plan), (self, *self.buffers()), grow, widest=self.num_query_tokens)

    @torch.no_grad()
    def on_step(self, state: SlotState, tree: TokenTree, accepted: AcceptResult, output: TargetOutput) -> None:
        if state.graphs.recording:
            _ = tree.ancestors, tree.depths
        fields = {name: getattr(output, name) for name in self.learns_from}
        if any(value is None for value in fields.values()):  # not asked for: the drafter has not proposed
            return
        owners = self, *self.buffers()
        state.run(("on_step",), owners, self.update, tree, accepted, TargetOutput(**fields))
