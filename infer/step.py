"""One step of decoding: propose, one pass of the target, accept, commit. There is no other loop.

The engine takes steps on the full cache; a drafter that is an engine itself takes them on a cache of its own. No
method's name stands here. Shapes: B slots, N tree nodes, V vocabulary.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longdraft.infer.accept import AcceptResult, accept, accept_chosen
from longdraft.infer.drafters.base import Drafter, SlotState
from longdraft.infer.tree import TokenTree
from longdraft.kernels import backend
from longdraft.models.decoder import Decoder
from longdraft.models.kv_cache import KVCache
from longdraft.models.passes import Pass, TargetOutput


@dataclass(frozen=True)
class Step:
    """What one step leaves for the host to read. Seconds are wall-clock time; on a GPU, that of launching, and where
    steps are recorded all but the proposal's is in `commit_seconds`.

    Where steps are recorded the next one overwrites the tensors: what the host reads of them is copied before.

    `proposed`: the drafter's tree; `width`: rows of the pass, after pruning and padding; `draft_pass_seconds`: of the
    step, inside the drafter's networks; `choice_seconds` (processors, noise, argmax) are part of `commit_seconds`;
    `draft_work`: what `take_step`'s clock says of the proposal.
    """

    proposed: TokenTree
    drafted: Tensor  # int64 [B], nodes verified below each root
    width: int
    accepted: AcceptResult
    draft_seconds: float
    draft_work: float
    draft_pass_seconds: float
    target_seconds: float
    commit_seconds: float
    choice_seconds: float


@torch.no_grad()
def take_step(
    model: Decoder,
    cache: KVCache,
    drafter: Drafter,
    state: SlotState,
    max_nodes: int,
    prune: Callable[[TokenTree, Tensor], TokenTree] | None = None,
    checked: bool = True,
    work_clock: Callable[[], float] = time.perf_counter,
) -> Step:
    """Advance every active slot by one pass.

    Args:
        cache: behind its committed rows the pass's rows are written, and the accepted ones stay. It need not hold a
            slot's tokens at their positions: `state.positions` alone says where the root stands.
        max_nodes: most nodes below the root; 0 does not ask the drafter.
        prune: (proposal, active) -> what of it is verified.
        checked: read the proposal's roots on the host to name a drafter that breaks its word.
        work_clock: what the drafter's work is measured by.
    """
    begin, in_networks, work_before = time.perf_counter(), drafter.pass_seconds, work_clock()
    tree = proposed = drafter.propose(state, max_nodes) if max_nodes else TokenTree.roots(state.roots)
    if tree.width > max_nodes + 1:
        raise ValueError(f"drafter: it proposed {tree.width - 1} nodes, with room for {max_nodes}")
    if checked and not torch.equal(tree.tokens[:, 0], state.roots):
        raise ValueError("drafter: node 0 of its tree is not the root, the last committed token of each slot")
    if prune is not None:
        tree = prune(tree, state.active)
    drafted, draft_work = time.perf_counter(), work_clock() - work_before
    alone, needs = tree.width == 1, drafter.needs
    of_tree = () if alone else (tree.ancestors, tree.depths)
    clock = _Clock(drafted)

    def verify(
        state: SlotState, tokens_BN: Tensor, parents_BN: Tensor, *of_tree: Tensor
    ) -> tuple[AcceptResult, TargetOutput]:
        positions_BN = state.positions[:, None] if alone else state.positions[:, None] + of_tree[1]
        output = model(
            Pass(
                tokens_BN,
                cache=cache,
                positions_BT=positions_BN,
                tree_mask_BTT=None if alone else of_tree[0],
                needs=needs | {"logits"},
                queries_at_B=torch.zeros_like(state.positions) if "queries" in needs else None,
            )
        )
        clock.passed = time.perf_counter()
        assert output.logits is not None
        nodes = TokenTree(tokens_BN, parents_BN)
        ancestors_BNN = None if alone else of_tree[0]
        accepted = _decide(state, nodes, positions_BN, ancestors_BNN, output.logits, drafter.max_depth, clock)
        cache.commit(accepted.nodes, accepted.counts)
        # What recorded work returns, it keeps.
        return accepted, output if "logits" in needs else replace(output, logits=None)

    work = ("verify", needs, drafter.max_depth), (model, cache)
    accepted, output = state.run(*work, verify, tree.tokens, tree.parents, *of_tree, widest=tree.width)
    state.positions += accepted.counts
    state.roots = torch.where(state.active, accepted.last(accepted.tokens), state.roots)
    drafter.on_step(state, tree, accepted, output)
    done = time.perf_counter()
    return Step(
        proposed,
        (tree.parents >= 0).sum(dim=1),
        tree.width,
        accepted,
        draft_seconds=drafted - begin,
        draft_work=draft_work,
        draft_pass_seconds=drafter.pass_seconds - in_networks,
        target_seconds=clock.passed - drafted,
        commit_seconds=done - clock.passed,
        choice_seconds=clock.choice_seconds,
    )


@dataclass
class _Clock:
    """Of a step whose work is launched one by one: when the pass was through, and the host's seconds in choices."""

    passed: float
    choice_seconds: float = 0.0


def _decide(
    state: SlotState,
    tree: TokenTree,
    positions_BN: Tensor,
    ancestors_BNN: Tensor | None,
    logits_BNV: Tensor,
    max_depth: int,
    clock: _Clock,
) -> AcceptResult:
    """The walk; the history has its tokens then. positions_BN: of the nodes. ancestors_BNN: None for roots alone.

    Where the host knows how far the walk is, the choices are made on its way, at no more nodes than it meets; elsewhere
    at all nodes at once.
    """
    if backend.is_host(logits_BNV.device):
        return accept(tree, _choice(state, logits_BNV, clock), state.active, max_depth)
    choices_BN = state.sampling.choose_all(logits_BNV, state.history, tree.tokens, positions_BN, ancestors_BNN)
    accepted = accept_chosen(tree, choices_BN, state.active, max_depth)
    steps_P = torch.arange(1, 2 + max_depth, device=logits_BNV.device)
    # What lies behind the path lies behind the new root, and is void.
    state.history.write(state.positions[:, None] + steps_P, accepted.tokens)
    return accepted


def _choice(state: SlotState, logits_BNV: Tensor, clock: _Clock) -> Callable[[Tensor, int], Tensor]:
    """The choice rule at one node of each slot, for the walk; `clock` counts the host's time in it."""
    slots = torch.arange(len(state.roots), device=state.roots.device)

    def choose(nodes_B: Tensor, depth: int) -> Tensor:
        begin = time.perf_counter()
        positions_B = state.positions + depth
        # One slot's row is a view; of several slots the rows are gathered.
        logits_BV = logits_BNV[0, nodes_B] if len(slots) == 1 else logits_BNV[slots, nodes_B]
        chosen_B = state.sampling.choose(logits_BV, state.history, positions_B)
        # Where the walk stops before, this lies behind the new root and is void.
        state.history.write(positions_B + 1, chosen_B)
        clock.choice_seconds += time.perf_counter() - begin
        return chosen_B

    return choose
