"""What a drafter is: the one interface between the decoding loop and a method. Plain decoding is the simplest method.

Shapes: B slots, T rows of a pass, N tree nodes, V vocabulary.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any
from weakref import ref

import torch
from pydantic import BeforeValidator, Field

from longdraft.infer.accept import AcceptResult
from longdraft.infer.budget import Budget
from longdraft.infer.requests import Request
from longdraft.infer.slot_state import SlotState
from longdraft.infer.tree import TokenTree
from longdraft.models.drafts.base import DraftModule
from longdraft.models.footprint import Allocations, Buffer
from longdraft.models.kv_cache import KVCache
from longdraft.models.passes import TargetOutput
from longdraft.models.schema import Int
from longdraft.models.target import Target

# Types of options. The levels of a tree are one number or several, best a tuple: nodes, or ranks, on each level.
Count = Annotated[Int, Field(ge=1)]
CountOrZero = Annotated[Int, Field(ge=0)]
Levels = Annotated[
    tuple[Count, ...], Field(min_length=1), BeforeValidator(lambda value: (value,) if type(value) is int else value)
]


class Drafter:
    """Proposes candidates. Whatever they are, the output is plain decoding's; they only decide how many steps it takes.

    A drafter that is made of others lists them in `parts`; methods that it does not override call those of all parts.

    Attributes:
        parts: the drafters that it is made of.
        needs: fields of TargetOutput that it wants from the target's next pass, prefill passes included; may change
            from pass to pass. "queries" are those of the root in a step, of the last row in a prefill.
        learns_from: the subset of `needs` that `on_step` reads after a proposal.
        max_nodes: the most nodes below the root that it ever proposes.
        max_depth: the deepest level that it ever proposes.
    """

    needs: frozenset[str] = frozenset()
    learns_from: frozenset[str] = frozenset()
    max_nodes: int
    max_depth: int
    user: object = None  # the engine that is decoding with it
    last_user: object = None  # a weak reference to the last such engine
    parts: Sequence["Drafter"] = ()

    @contextmanager
    def used_by(self, engine: object) -> Iterator[bool]:
        """Reserve this drafter and its parts for `engine`. Yields whether no other engine has decoded with one of them
        since this one did. Raises RuntimeError if an engine is decoding with one of them now."""
        if self.user is not None:
            what = "engine" if self.user is engine else "drafter"
            raise RuntimeError(f"this {what} is already decoding; finish or close its stream, or use a second one")
        with ExitStack() as reserved:
            stayed = [reserved.enter_context(part.used_by(engine)) for part in self.parts]
            stayed.append(self.last_user == ref(engine))
            self.user, self.last_user = engine, ref(engine)
            try:
                yield all(stayed)
            finally:
                self.user = None

    @property
    def class_stages(self) -> Sequence[int]:
        """For each class of nodes (`TokenTree.classes`), the stage of the proposal that adds them; 0 for the root's
        class. A drafter that runs a pass for each level has one stage a level: it runs at most `Budget.stages`, and
        asks `Budget.goes_on` between two. Others have one stage, or 0 when combined with a drafter that has several."""
        return [0, *[1] * self.max_nodes]

    def on_start(self, slot: int, request: Request, cache: KVCache) -> None:
        """This request starts in this slot of the cache. Forget what was kept for the slot's previous request."""
        for part in self.parts:
            part.on_start(slot, request, cache)

    def on_prefill(self, slot: int, prompt: Sequence[int], start: int, end: int, output: TargetOutput) -> None:
        """The tokens prompt[start:end] of this slot's prompt are committed to the cache. In the last call `end` is the
        index of the prompt's last token, which is the root. A prompt of one token has no call.

        Args:
            output: the target's for these tokens, B = 1. It has no fields if their rows were copied from an earlier
                prompt, which never happens in the last call.
        """
        for part in self.parts:
            part.on_prefill(slot, prompt, start, end, output)

    def propose(self, state: SlotState, budget: Budget) -> TokenTree:
        """Propose at most `budget.max_nodes` nodes below each root, the most promising first as far as it can tell."""
        raise NotImplementedError

    def on_step(self, state: SlotState, tree: TokenTree, accepted: AcceptResult, output: TargetOutput) -> None:
        """Learn what the target computed for `tree` and which tokens were committed. `state` is the one after the step.

        The tree may hold other drafters' nodes or only some of those proposed, and another drafter may have proposed
        the committed tokens: catch up with them. Slots with `accepted.counts[b] == 0` took no part.
        """
        for part in self.parts:
            part.on_step(state, tree, accepted, output)

    def release(self) -> None:
        """The cache of `on_start` is about to be freed: drop it, and what was allocated beside it."""
        for part in self.parts:
            part.release()

    def allocations(self, batch: int, capacity: int) -> Allocations:
        """What it will allocate for `batch` slots of `capacity` positions beside its weights: shapes and dtypes by
        name, for the estimate of memory."""
        named: dict[str, list[Buffer]] = {}
        for part in self.parts:
            for name, buffers in part.allocations(batch, capacity).items():
                named.setdefault(name, []).extend(buffers)
        return named


class Plain(Drafter):
    """Plain decoding: proposes only the root, so that the baseline runs in the same loop as every method.

    A step is one pass of the target over one token, and commits one token.
    """

    max_nodes = 0
    max_depth = 0

    def propose(self, state: SlotState, budget: Budget) -> TokenTree:
        return TokenTree.roots(state.roots)


class DeviceDrafter(Drafter):
    """A drafter with networks or tables on the device. A subclass implements `plan`, `grow` and `update`.

    Order of calls in a step. The runner calls `propose` and `on_step`; these call the other three:

        propose(state, budget)
            plan(state, budget)         on the host: decides everything that `grow` depends on
            grow(state, budget, plan)   on the device: the tree
        the runner prunes the tree, the target verifies it, the accepted path is committed
        on_step(state, tree, accepted, output)
            update(...)                 on the device: learns; not called if the output lacks a field of `learns_from`

    On a GPU `grow` is recorded for each plan, `update` for each width, and both are then replayed. So both only queue
    work and read nothing on the host, and the memory that they use besides their arguments stays in place as long as
    the cache of `on_start` lives. Host work after a step goes into a subclass's own `on_step`. Before the first request
    all plans are recorded in steps without a request (`Runner.rehearse`); `on_start` then gets a placeholder.

    Attributes:
        num_query_tokens: query tokens of its widest pass for each slot, if it contains attention.
    """

    num_query_tokens = 1

    @torch.no_grad()
    def propose(self, state: SlotState, budget: Budget) -> TokenTree:
        plan, owners = self.plan(state, budget), (self, *self.buffers())

        def work(state: SlotState) -> TokenTree:
            # A GPU need not give the same bits on every rank, and all must verify the same tree.
            return self.grow(state, budget, plan).of_first_rank(state.ranks)

        return state.run(("propose", plan), owners, work, widest=self.num_query_tokens)

    def plan(self, state: SlotState, budget: Budget) -> Hashable:
        """Decide on the host everything that `grow` depends on; `grow` is recorded for each plan separately."""
        return budget.max_nodes

    def grow(self, state: SlotState, budget: Budget, plan: Any) -> TokenTree:
        """Build the tree on the device. It uses only `budget.goes_on`, which is always True where it is recorded."""
        raise NotImplementedError

    @torch.no_grad()
    def on_step(self, state: SlotState, tree: TokenTree, accepted: AcceptResult, output: TargetOutput) -> None:
        fields = {name: getattr(output, name) for name in self.learns_from}
        if any(value is None for value in fields.values()):  # not asked for, because the drafter did not propose
            return
        owners = self, *self.buffers()
        nodes = TokenTree(tree.tokens, tree.parents)  # without classes and cached properties: all share a recording
        state.run(("on_step",), owners, self.update, nodes, accepted, TargetOutput(**fields))

    def update(self, state: SlotState, tree: TokenTree, accepted: AcceptResult, output: TargetOutput) -> None:
        """Learn from a step on the device. Arguments as in `on_step`; `output` has only the fields of `learns_from`."""

    def buffers(self) -> tuple[object, ...]:
        """What `on_start` allocated that `grow` and `update` use. Work recorded with other buffers is not replayed:
        another engine's `on_start` or `release` may have replaced them."""
        return ()


def check_draft(target: Target, draft: DraftModule, shape: Mapping[str, Any]) -> None:
    """Raise ValueError unless `draft` has the target's dtype and device, and its config the target's `shape`."""
    for name, value in shape.items():
        if (given := getattr(draft.config, name)) != value:
            raise ValueError(
                f"draft: {name} is {given}, but {value} in {target.name}; give a draft made for this target"
            )
    weight, ours = target.model.lm_head.weight, next(draft.parameters())
    if (ours.dtype, ours.device) != (weight.dtype, weight.device):
        raise ValueError(
            f"draft: {ours.dtype} on {ours.device}, but the target is {weight.dtype} on {weight.device}; "
            f"load it with load_draft(folder, target)"
        )
