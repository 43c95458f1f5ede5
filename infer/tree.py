"""TokenTree: the candidates of one step, a trie below the last committed token of every sequence.

Not here: how a drafter fills it (infer/drafters) and how it is verified (infer/accept.py).
Shapes: B sequences, N nodes with the root.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longdraft.kernels import backend
from longdraft.kernels.transfer import from_host

ROOT, PAD = -1, -2


# Tokens, parents and classes (or None, in all slots) of one slot's nodes.
SlotLists = tuple[list[int], list[int], list[int] | None]


class Lists(NamedTuple):
    """B tries as lists, [slot][node]; see TokenTree."""

    tokens: list[list[int]]
    parents: list[list[int]]
    classes: list[list[int]] | None


@dataclass(frozen=True)
class TokenTree:
    """B tries of at most N nodes. Node 0 is the root: the last committed token, whose state no pass has computed yet.

    Attributes:
        tokens: int64 [B, N].
        parents: int64 [B, N]; -1 for the root, -2 for padding, else an index smaller than the node's own.
        classes: int64 [B, N] or None: what a drafter knows of a node's chances, as the number of a class whose rate the
            engine learns (infer/policy.py). None: a node's class is its index.
    Siblings carry different tokens, so no prefix is verified twice and the accepted path is never ambiguous.
    """

    tokens: Tensor
    parents: Tensor
    classes: Tensor | None = None

    @staticmethod
    def roots(tokens_B: Tensor) -> "TokenTree":
        """Only roots, which is what plain decoding proposes. tokens_B: int64 [B]."""
        tokens = tokens_B[:, None]
        return TokenTree(tokens, torch.full_like(tokens, ROOT))

    @staticmethod
    def from_chain(roots_B: Tensor, chain_BK: Tensor) -> "TokenTree":
        """A chain of K tokens below each root; a negative token ends its sequence's chain."""
        ended_BK = (chain_BK < 0).cummax(dim=1).values
        tokens = torch.cat([roots_B[:, None], chain_BK.masked_fill(ended_BK, 0)], dim=1)
        before = torch.arange(chain_BK.shape[1], device=chain_BK.device).expand_as(chain_BK)
        parents = torch.cat([torch.full_like(roots_B, ROOT)[:, None], before.masked_fill(ended_BK, PAD)], dim=1)
        return TokenTree(tokens, parents)

    @staticmethod
    def from_paths(roots: Sequence[int], paths: Sequence[Sequence[Sequence[int]]], device=None) -> "TokenTree":
        """The trie of each sequence's candidate paths (token lists below the root); shared prefixes become one node."""
        tries = []
        for root, sequence_paths in zip(roots, paths, strict=True):
            tokens, parents, children = [int(root)], [ROOT], {}
            for path in sequence_paths:
                node = 0
                for token in map(int, path):
                    if (node, token) not in children:
                        children[node, token] = len(tokens)
                        tokens.append(token)
                        parents.append(node)
                    node = children[node, token]
            tries.append((tokens, parents, None))
        return TokenTree.from_lists(tries, device)

    @staticmethod
    def from_lists(slots: Iterable[SlotLists], device=None) -> "TokenTree":
        """Tries from lists of their nodes, padded to the widest; the lists are kept for `lists`."""
        tokens, parents, classes = zip(*slots, strict=True)
        width = max(map(len, tokens))
        known = [] if classes[0] is None else [(classes, 0)]
        rows = [
            [nodes + [fill] * (width - len(nodes)) for nodes in part]
            for part, fill in [(tokens, 0), (parents, PAD), *known]
        ]
        tree = TokenTree(*from_host(torch.tensor(rows), device).unbind(0))
        tree.__dict__["lists"] = Lists(rows[0], rows[1], rows[2] if len(rows) > 2 else None)
        return tree

    @property
    def width(self) -> int:
        """N, the nodes of the widest trie with its root."""
        return self.tokens.shape[1]

    @property
    def on_host(self) -> bool:
        """Whether `lists` is there already, or reading it waits for nothing."""
        return "lists" in self.__dict__ or backend.is_host(self.tokens.device)

    @property
    def unread(self) -> tuple[Tensor, ...]:
        """What is to be read of it, for `take_lists`; nothing where that waits for nothing."""
        if self.on_host:
            return ()
        return self.tokens, self.parents, *([] if self.classes is None else [self.classes])

    def take_lists(self, read: Sequence[list[list[int]]]) -> "TokenTree":
        """Itself, with the lists of `unread`, which so need not be read again."""
        if read:
            self.__dict__["lists"] = Lists(*read, *[None] * (3 - len(read)))
        return self

    @cached_property
    def lists(self) -> "Lists":
        """The nodes on the host; on a GPU one read."""
        classes = None if self.classes is None else self.classes.tolist()
        return Lists(self.tokens.tolist(), self.parents.tolist(), classes)

    @cached_property
    def ancestors(self) -> Tensor:
        """bool [B, N, N]: [b, i, j] says that j is i itself or above it. A padding node sees only itself."""
        batch, width = self.parents.shape
        if self.on_host:  # of 33 nodes 8 us in place of 62 on a CPU, and one copy in place of 20 launches on a GPU
            return from_host(torch.from_numpy(_ancestors(self.lists.parents)), self.parents.device)
        eye = torch.eye(width, dtype=torch.bool, device=self.parents.device)
        reach = eye.expand(batch, -1, -1)
        if width == 1:
            return reach
        # Doubling: after k rounds a node reaches 2**k levels up.
        reach = reach | (self.parents[:, :, None] == torch.arange(width, device=self.parents.device))
        levels = 1
        while levels < width - 1:
            reach = reach.float().bmm(reach.float()) > 0
            levels *= 2
        return reach

    @cached_property
    def depths(self) -> Tensor:
        """int64 [B, N]: edges to the root; 0 for the root and for padding."""
        return self.ancestors.sum(dim=2) - 1

    def with_tokens(self, tokens_BN: Tensor, parents_BN: Tensor | None = None) -> "TokenTree":
        """A tree of this shape with other tokens; what was computed of the shape is shared.

        parents_BN: this tree's, but for nodes that are taken out of it (PAD).
        """
        tree = TokenTree(tokens_BN, self.parents if parents_BN is None else parents_BN, self.classes)
        tree.__dict__.update({name: self.__dict__[name] for name in ("ancestors", "depths") if name in self.__dict__})
        return tree

    def pad_to(self, width: int) -> "TokenTree":
        """The same tries, padded to `width` nodes."""
        extra = width - self.width
        assert extra >= 0, f"a tree of {self.width} nodes does not fit a width of {width}"
        if extra == 0:
            return self
        pad = torch.nn.functional.pad
        classes = None if self.classes is None else pad(self.classes, (0, extra))
        tree = TokenTree(pad(self.tokens, (0, extra)), pad(self.parents, (0, extra), value=PAD), classes)
        if "ancestors" in self.__dict__ and "depths" in self.__dict__:
            own_WW = torch.eye(width, dtype=torch.bool, device=self.parents.device)
            tree.__dict__["ancestors"] = pad(self.ancestors, (0, extra, 0, extra)) | own_WW
            tree.__dict__["depths"] = pad(self.depths, (0, extra))
        return tree

    def take(self, order_BW: Tensor) -> "TokenTree":
        """The trie of these nodes alone, in this order.

        Args:
            order_BW: int64, indices of nodes: the root first, every parent before its children, none twice; padding
                nodes may stand at the end.
        """
        batch, width = order_BW.shape
        places = torch.arange(width, device=order_BW.device).expand(batch, -1)
        moved_BN = torch.zeros_like(self.parents).scatter_(1, order_BW, places)
        old_BW = self.parents.gather(1, order_BW)
        parents_BW = torch.where(old_BW >= 0, moved_BN.gather(1, old_BW.clamp(min=0)), old_BW)
        classes = order_BW if self.classes is None else self.classes.gather(1, order_BW)
        tree = TokenTree(self.tokens.gather(1, order_BW), parents_BW, classes)
        if "ancestors" in self.__dict__:
            rows = self.ancestors.gather(1, order_BW[:, :, None].expand(-1, -1, self.width))
            tree.__dict__["ancestors"] = rows.gather(2, order_BW[:, None, :].expand(-1, width, -1))
        if "depths" in self.__dict__:
            tree.__dict__["depths"] = self.depths.gather(1, order_BW)
        return tree

    def paths(self) -> list[list[list[int]]]:
        """Every sequence's nodes as token paths below the root, in node order (host lists)."""
        result = []
        for tokens, parents in zip(self.lists.tokens, self.lists.parents, strict=True):
            found: dict[int, list[int]] = {0: []}
            for node in range(1, len(tokens)):
                if parents[node] != PAD:
                    found[node] = [*found[parents[node]], tokens[node]]
            result.append(list(found.values())[1:])
        return result


def _ancestors(parents: Sequence[list[int]]) -> np.ndarray:
    """bool [B, N, N] of `TokenTree.ancestors`: a node's row is its parent's and its own bit."""
    width = len(parents[0])
    size = -(-width // 8)
    bits = bytearray()
    for slot in parents:
        rows: list[int] = []
        for node, parent in enumerate(slot):
            rows.append((rows[parent] if parent >= 0 else 0) | 1 << node)
        for row in rows:
            bits += row.to_bytes(size, "little")
    packed = np.frombuffer(bits, dtype=np.uint8).reshape(len(parents), width, size)
    return np.unpackbits(packed, axis=2, count=width, bitorder="little").view(bool)
