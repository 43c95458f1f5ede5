"""Acceptance: which nodes of a tree the target's own choices confirm, and the target's choice after the last of them.

At each node the choice rule (infer/choice/slots.py) gives the target's token; the path goes down to the child that
carries it and stops where there is none. Nothing is accepted or rejected by chance, so the result is plain decoding's.
Shapes: B sequences, N tree nodes, P places of a path.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from longdraft.infer.slot_state import SlotState
from longdraft.infer.tree import TokenTree
from longdraft.kernels.tree import accepted_path
from longdraft.models.passes import spread


@dataclass(frozen=True)
class AcceptResult:
    """What one pass decided.

    Attributes:
        nodes: int64 [B, P], the nodes of the accepted path, the root first; valid up to counts[b].
        tokens: int64 [B, P], the choice at each of these nodes; tokens[b, :counts[b]] are the newly committed tokens.
        counts: int64 [B], nodes on the accepted path, which is the number of new tokens; 0 for an inactive slot.
    """

    nodes: Tensor
    tokens: Tensor
    counts: Tensor

    def among(self, slots: slice, batch: int) -> "AcceptResult":
        """Spread these slots' result over all `batch` slots, of which the others took no part."""
        return AcceptResult(*(spread(x, slots, batch) for x in (self.nodes, self.tokens, self.counts)))

    def last(self, values_BP: Tensor) -> Tensor:
        """values_BP at the last node of each path, [B]; at the first one for inactive slots."""
        return values_BP.gather(1, (self.counts - 1).clamp(min=0)[:, None])[:, 0]


def accept(
    tree: TokenTree,
    logits_BNV: Tensor,
    state: SlotState,
    positions_BN: Tensor,
    ancestors_BNN: Tensor | None,
    allowed_BNW: Tensor | None,
    max_depth: int,
) -> AcceptResult:
    """Go down from each root along the target's choices, and write the new tokens to the history.

    On a CPU a choice is made only at nodes that a path reaches, so P is the length of the longest path. Elsewhere
    reading a choice would wait for the device, so choices are made at all nodes, and P = 1 + max_depth. On a CPU
    choices at all nodes would take longer than the pass.

    Args:
        tree: the verified tree; no node lies deeper than `max_depth`.
        positions_BN, ancestors_BNN: of its nodes; no ancestors for roots alone.
        allowed_BNW: which tokens the slots' grammars allow after each node (`allowed_tokens`); None: all.
    """
    if not tree.on_host:
        nodes = tree.tokens, positions_BN, ancestors_BNN, allowed_BNW
        choices_BN = state.sampling.choose_all(logits_BNV, state.history, *nodes)
        result = AcceptResult(*accepted_path(tree.tokens, tree.parents, choices_BN, state.active, max_depth))
        places_P = torch.arange(1, 2 + max_depth, device=logits_BNV.device)
        # Tokens after the path's end lie beyond the new root and are ignored.
        state.history.write(state.positions[:, None] + places_P, result.tokens)
        return result
    all_tokens, all_parents, _ = tree.lists
    here = [0] * len(all_tokens)  # the last node of each slot's path so far
    alive = state.active.tolist()
    nodes, tokens, counts = [], [], [0] * len(here)
    for depth in range(max_depth + 1):
        # One slot's row is a view; of several slots the rows are gathered.
        logits_BV = logits_BNV[:, here[0]] if len(here) == 1 else logits_BNV[torch.arange(len(here)), here]
        allowed_BW = None if allowed_BNW is None else allowed_BNW[torch.arange(len(here)), here]
        chosen_B = state.sampling.choose(logits_BV, state.history, state.positions + depth, allowed_BW)
        # For a path that has ended, this lies beyond the new root and is ignored.
        state.history.write((state.positions + depth + 1)[:, None], chosen_B[:, None])
        nodes.append(list(here))
        tokens.append(chosen_B)
        for slot, choice in enumerate(chosen_B.tolist()):
            if alive[slot]:
                counts[slot] += 1
                child = _child(all_tokens[slot], all_parents[slot], here[slot], choice)
                alive[slot], here[slot] = child > 0, child or here[slot]
        if not any(alive):
            break
    return AcceptResult(torch.tensor(list(zip(*nodes, strict=True))), torch.stack(tokens, 1), torch.tensor(counts))


def _child(tokens: list[int], parents: list[int], node: int, token: int) -> int:
    """The child of `node` that carries `token`; 0, which is never a child, if there is none."""
    return next((child for child, above in enumerate(parents) if above == node and tokens[child] == token), 0)
