"""One step of decoding: propose, one pass of the target, choose and walk, keep, observe. There is no other loop.

The engine takes steps on the full cache; a drafter that is an engine itself takes them on a cache of its own. No
method's name stands here. Shapes: B slots, N tree nodes, V vocabulary.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from longdraft.infer.drafters.base import Drafter, SlotState
from longdraft.infer.tree import TokenTree
from longdraft.infer.verify import Verdict, walk, walk_chosen
from longdraft.kernels import backend
from longdraft.models.decoder import Decoder, TargetOutput
from longdraft.models.kv_cache import KVCache


@dataclass(frozen=True)
class Step:
    """What one step leaves for the host to read. Seconds are wall-clock time; on a GPU, that of launching.

    `proposed`: the drafter's tree; `width`: rows of the pass, after pruning and padding; `draft_pass_seconds`: of the
    step, inside the drafter's networks; `choice_seconds` (processors, noise, argmax) are part of `commit_seconds`.
    """

    proposed: TokenTree
    drafted: Tensor  # int64 [B], nodes verified below each root
    width: int
    verdict: Verdict
    draft_seconds: float
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
    room: int,
    prune: Callable[[TokenTree, Tensor], TokenTree] | None = None,
    checked: bool = True,
) -> Step:
    """Advance every active slot by one pass.

    Args:
        cache: behind its committed rows the pass's rows are written, and the accepted ones stay. It need not hold a
            slot's tokens at their positions: `state.positions` alone says where the root stands.
        room: most nodes below the root; 0 does not ask the drafter.
        prune: (proposal, active) -> what of it is verified.
        checked: read the proposal's roots on the host to name a drafter that breaks its word.
    """
    begin, in_networks = time.perf_counter(), drafter.pass_seconds
    graphs = state.graphs
    tree = drafter.propose(state, room) if room else TokenTree.roots(state.roots)
    if graphs.recording:  # where it is recorded work's, its host side must not outlive the step
        tree = tree.with_tokens(tree.tokens)
    proposed = tree
    if tree.width > room + 1:
        raise ValueError(f"drafter: it proposed {tree.width - 1} nodes, with room for {room}")
    if checked and not torch.equal(tree.tokens[:, 0], state.roots):
        raise ValueError("drafter: node 0 of its tree is not the root, the last committed token of each slot")
    if prune is not None:
        tree = prune(tree, state.active)
    drafted = time.perf_counter()
    alone, needs = tree.width == 1, drafter.needs | {"logits"}
    of_tree = () if alone else (tree.ancestors, tree.depths)

    def target_pass(tokens_BN: Tensor, positions_B: Tensor, *of_tree: Tensor) -> TargetOutput:
        return model(
            tokens_BN,
            cache=cache,
            positions_BT=positions_B[:, None] if alone else positions_B[:, None] + of_tree[1],
            tree_mask_BTT=None if alone else of_tree[0],
            needs=needs,
            query_rows_B=torch.zeros_like(positions_B) if "queries" in needs else None,
        )

    output = graphs.run(("pass", needs), (model, cache), target_pass, tree.tokens, state.positions, *of_tree)
    passed = time.perf_counter()
    assert output.logits is not None
    clock = _Clock()

    def commit(
        state: SlotState, logits_BNV: Tensor, tokens_BN: Tensor, parents_BN: Tensor, *of_tree: Tensor
    ) -> Verdict:
        nodes = TokenTree(tokens_BN, parents_BN)
        if state.sampling.unfiltered and not backend.reads_are_free(tokens_BN.device):
            positions_BN = state.positions[:, None] if alone else state.positions[:, None] + of_tree[1]
            choices_BN = state.sampling.choose_all(logits_BNV, positions_BN)
            verdict = walk_chosen(nodes, choices_BN, state.active, drafter.max_depth)
            steps_P = torch.arange(1, 2 + drafter.max_depth, device=tokens_BN.device)
            state.history.write(state.positions[:, None] + steps_P, verdict.tokens)
        else:
            verdict = walk(nodes, _choice(state, logits_BNV, clock), state.active, drafter.max_depth)
        cache.keep(verdict.rows, verdict.counts)
        return verdict

    commits = ("commit", drafter.max_depth)
    verdict = state.run(commits, (cache,), commit, output.logits, tree.tokens, tree.parents, *of_tree)
    if graphs.recording:
        verdict = Verdict(verdict.rows.clone(), verdict.tokens.clone(), verdict.counts.clone())
    state.positions += verdict.counts
    state.roots = torch.where(state.active, verdict.last(verdict.tokens), state.roots)
    drafter.observe(state, tree, verdict, output)
    done = time.perf_counter()
    return Step(
        proposed,
        (tree.parents >= 0).sum(dim=1),
        tree.width,
        verdict,
        draft_seconds=drafted - begin,
        draft_pass_seconds=drafter.pass_seconds - in_networks,
        target_seconds=passed - drafted,
        commit_seconds=done - passed,
        choice_seconds=clock.seconds,
    )


@dataclass
class _Clock:
    seconds: float = 0.0


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
        clock.seconds += time.perf_counter() - begin
        return chosen_B

    return choose
