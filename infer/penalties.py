"""Penalties, biases and bans: how a request changes the target's logits, by earlier tokens or by its own list.

They see a node's own history: the context and its ancestors in the tree (infer/history.py). They come before
temperature and filters (infer/slot_sampling.py), in the order contextual, repetition, presence and frequency, biases
and bans.
Shapes: B slots, N nodes, M of them, V vocabulary, C tokens of history looked at, R restricted vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from longdraft.infer.history import History
from longdraft.kernels import backend
from longdraft.kernels.transfer import from_host, integers

Biases = Sequence[tuple[int, float]]
NOTHING = -0.0  # added to a logit, also to -0.0, it changes no bit


class Penalties:
    """The penalties, biases and bans of B slots, from their SamplingParams. Without any, `apply` does nothing.

    Attributes:
        any: whether any slot has one.
        widest: the longest window of a contextual penalty, in tokens.
        biases: each slot's pairs of token id and bias, which is -inf for a ban; None if no slot has any.
        held_back: the same for end and stop tokens, which are banned until there are min_new_tokens.
    """

    def __init__(self, params: Sequence, device: torch.device):
        def of_all(name: str, off: float) -> Tensor | None:
            return column([getattr(p, name) for p in params], off, torch.float32, device)

        self._device = device
        self._contextual = of_all("contextual_penalty", 1.0)
        # The windows of slots without the penalty must not make the others' reads longer.
        windows = [p.contextual_window if p.contextual_penalty != 1 else 1 for p in params]
        self._windows, self.widest = integers(windows, device), max(windows)
        self._repetition = of_all("repetition_penalty", 1.0)
        self._presence = of_all("presence_penalty", 0.0)
        self._frequency = of_all("frequency_penalty", 0.0)
        biases = [(*p.logit_bias.items(), *((token, -torch.inf) for token in p.banned_token_ids)) for p in params]
        held_back = [tuple((token, -torch.inf) for token in p.stop_token_ids if p.min_new_tokens) for p in params]
        self.biases = biases if any(biases) else None
        self.held_back = held_back if any(held_back) else None
        self._least = column([p.min_new_tokens for p in params], 0, torch.int64, device) if self.held_back else None
        self._tables: dict[tuple[bool, int, bool], Tensor] = {}
        self._places: dict[int, tuple[Tensor, Tensor]] = {}
        self._counts = self._presence is not None or self._frequency is not None
        self._looks_back = self._contextual is not None or self._repetition is not None or self._counts
        self._adds = self.biases is not None or self.held_back is not None
        self.any = self._looks_back or self._adds

    @property
    def columns(self) -> tuple[Tensor | None, ...]:
        """The slots' numbers on the device; None for penalties that no slot has."""
        return self._contextual, self._windows, self._repetition, self._presence, self._frequency, self._least

    def apply(self, logits: Tensor, history: History, positions_B: Tensor, token_ids_R: Tensor | None = None) -> Tensor:
        """Penalised logits, fp32; the logits themselves where there is nothing to do.

        Args:
            logits: [B, V] or [B, N, V], of nodes whose history is `history` up to and including positions_B.
            token_ids_R: int64, the target's ids of a restricted vocabulary, if the logits are of one.
        """
        if not self.any:
            return logits
        logits_BNV = (logits if logits.dim() == 3 else logits[:, None]).float()
        if self._looks_back:
            logits_BNV = self._look_back(logits_BNV, history, positions_B, token_ids_R)
        if self._adds:
            logits_BNV = self._add(logits_BNV, history, positions_B[:, None], token_ids_R)
        return logits_BNV if logits.dim() == 3 else logits_BNV[:, 0]

    def _look_back(self, logits_BNV: Tensor, history: History, positions_B: Tensor, ids_R: Tensor | None) -> Tensor:
        count = self._reach(history, positions_B)
        first_B = positions_B - (count - 1)
        tokens_BC = history.read(first_B, count)
        places_BC = first_B[:, None] + torch.arange(count, device=first_B.device)
        if ids_R is not None:
            # One more column stands for tokens outside of the restricted vocabulary.
            places = self.places_of(ids_R)
            tokens_BC = places[tokens_BC.clamp(max=len(places) - 1)]
            logits_BNV = torch.nn.functional.pad(logits_BNV, (0, 1))
        if self._contextual is not None:
            recent = min(self.widest, count)
            inside_BC = places_BC[:, -recent:] > (positions_B - self._windows).clamp(min=-1)[:, None]
            logits_BNV = _scale_seen(logits_BNV, tokens_BC[:, -recent:], inside_BC, self._contextual)
        if self._repetition is not None:
            logits_BNV = _scale_seen(logits_BNV, tokens_BC, places_BC >= 0, self._repetition)
        if self._counts:
            generated_BC = places_BC >= history.prompt_lengths[:, None]
            logits_BNV = self._subtract(logits_BNV, tokens_BC, generated_BC)
        return logits_BNV if ids_R is None else logits_BNV[..., :-1]

    def apply_at_nodes(
        self,
        logits_BMV: Tensor,
        history: History,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        ancestors_BNN: Tensor | None,
        first: int = 0,
    ) -> Tensor:
        """`apply` at M nodes of a tree, each by its own history, with the same bits. Nothing is written to `history`.

        `apply` has its own arithmetic for one history a slot: over 49152 words a contextual penalty takes a CPU 0.08 ms
        there and 0.35 ms here at one node, 0.11 and 1.4 ms at four, in steps of 12 ms.

        Args:
            logits_BMV: of the nodes first .. first + M - 1.
            history: valid through the roots.
            tokens_BN, positions_BN: int64, of all nodes; node 0 is the root.
            ancestors_BNN: bool, [b, i, j]: j is i itself or above it; None where there is the root alone.
        """
        if not self.any:
            return logits_BMV
        logits_BMV = logits_BMV.float()
        if self._looks_back:
            if ancestors_BNN is None:
                ancestors_BNN = torch.ones_like(tokens_BN, dtype=torch.bool)[:, None]
            path_BMN = ancestors_BNN[:, first : first + logits_BMV.shape[1]].clone()
            path_BMN[:, :, 0] = False  # the root is in the history
            logits_BMV = self._look_back_at_nodes(logits_BMV, history, tokens_BN, positions_BN, path_BMN, first)
        if self._adds:
            places_BM = positions_BN[:, first : first + logits_BMV.shape[1]]
            logits_BMV = self._add(logits_BMV, history, places_BM, None)
        return logits_BMV

    def _look_back_at_nodes(
        self,
        logits_BMV: Tensor,
        history: History,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        path_BMN: Tensor,
        first: int,
    ) -> Tensor:
        """path_BMN: bool, the nodes on the path to each of the M nodes, itself included and the root not."""
        n_nodes, vocab = logits_BMV.shape[1:]
        positions_B, positions_BM1 = positions_BN[:, 0], positions_BN[:, first : first + n_nodes, None]
        count = self._reach(history, positions_B)
        places_BC = (positions_B - (count - 1))[:, None] + torch.arange(count, device=positions_B.device)
        tokens_BC = history.read(places_BC[:, 0], count)
        index_BMN = tokens_BN[:, None].expand(-1, n_nodes, -1)

        def times_on_path(inside_BMN: Tensor) -> Tensor:
            return torch.zeros_like(logits_BMV).scatter_add_(2, index_BMN, inside_BMN.float())

        # The last position of each token in the history, -1 for none.
        nowhere_BV = tokens_BC.new_full((len(tokens_BC), vocab), -1)
        last_B1V = nowhere_BV.scatter_reduce(1, tokens_BC, places_BC.clamp(min=-1), "amax")[:, None]
        if self._contextual is not None:
            before_BM1 = positions_BM1 - self._windows[:, None, None]
            inside_BMN = path_BMN & (positions_BN[:, None] > before_BM1)
            seen_BMV = (last_B1V > before_BM1.clamp(min=-1)) | (times_on_path(inside_BMN) > 0)
            logits_BMV = torch.where(seen_BMV, _scaled(logits_BMV, self._contextual[:, None]), logits_BMV)
        if self._repetition is not None:
            seen_BMV = (last_B1V >= 0) | (times_on_path(path_BMN) > 0)
            logits_BMV = torch.where(seen_BMV, _scaled(logits_BMV, self._repetition[:, None]), logits_BMV)
        if self._counts:
            generated_BC = places_BC >= history.prompt_lengths[:, None]
            times_BV = torch.zeros_like(logits_BMV[:, 0]).scatter_add_(1, tokens_BC, generated_BC.float())
            logits_BMV = logits_BMV - self._taken_off(times_BV[:, None] + times_on_path(path_BMN))
        return logits_BMV

    def _taken_off(self, times: Tensor) -> Tensor:
        """Presence once, and frequency as often as a token was generated. times: [B, ...], exact counts."""
        less, dims = torch.zeros_like(times), (len(times), *[1] * (times.dim() - 1))
        if self._presence is not None:
            less = less + self._presence.view(dims) * (times > 0)
        if self._frequency is not None:
            less = less + self._frequency.view(dims) * times
        return less

    def _reach(self, history: History, positions_B: Tensor) -> int:
        """How many of the last tokens have to be read. On a GPU, where the host does not know positions, it is the most
        it can be. On a CPU that would take 3 ms a choice in place of 0.06, in a slot of 300 tokens with room for 128K.
        """
        capacity = history.tokens.shape[1]
        whole = self._repetition is not None or self._counts
        if not backend.is_host(positions_B.device):
            return capacity if whole else min(capacity, self.widest)
        longest = int(positions_B.max()) + 1
        if self._repetition is None and self._counts:  # of the prompt only what is in the contextual window counts
            longest = max(int((positions_B - history.prompt_lengths).max()) + 1, min(self.widest, longest))
        elif not whole:
            longest = min(self.widest, longest)
        return max(1, min(capacity, longest))

    def _subtract(self, logits_BNV: Tensor, tokens_BC: Tensor, generated_BC: Tensor) -> Tensor:
        """Subtract presence once, and frequency as often as a token was generated, in exact counts."""
        batch, nodes, vocab = logits_BNV.shape
        zeros_BV = torch.zeros(batch, vocab, device=logits_BNV.device)
        times_BC = zeros_BV.scatter_add(1, tokens_BC, generated_BC.float()).gather(1, tokens_BC)
        index_BNC, less_B1C = tokens_BC[:, None].expand(-1, nodes, -1), self._taken_off(times_BC)[:, None]
        return logits_BNV.scatter(2, index_BNC, logits_BNV.gather(2, index_BNC) - less_B1C)

    def places_of(self, ids_R: Tensor) -> Tensor:
        """int64 [last id + 2]: the index of each target id in `ids_R`, R for ids that are not there; cached."""
        if id(ids_R) not in self._places:
            places = torch.full((int(ids_R.max()) + 2,), len(ids_R), device=ids_R.device)
            places[ids_R] = torch.arange(len(ids_R), device=ids_R.device)
            self._places[id(ids_R)] = ids_R, places
        return self._places[id(ids_R)][1]

    def _add(self, logits_BNV: Tensor, history: History, places_BN: Tensor, ids_R: Tensor | None) -> Tensor:
        """Add biases and bans. places_BN: int64, the nodes' absolute positions; [B, 1] if all have the root's."""
        if self.biases is not None:
            logits_BNV = logits_BNV + self._table(self.biases, logits_BNV.shape[-1], ids_R)[:, None]
        if self.held_back is not None and self._least is not None:
            table_B1V = self._table(self.held_back, logits_BNV.shape[-1], ids_R)[:, None]
            early_BN = places_BN + 1 - history.prompt_lengths[:, None] < self._least
            logits_BNV = logits_BNV + torch.where(early_BN[:, :, None], table_B1V, NOTHING)
        return logits_BNV

    def _table(self, biases: Sequence[Biases], width: int, ids_R: Tensor | None) -> Tensor:
        """What biases or held_back add to each slot's logits: fp32 [B, V] or [B, R]."""
        vocab = width if ids_R is None else len(self.places_of(ids_R))
        key = biases is self.held_back, vocab, ids_R is None
        if key not in self._tables:
            table = torch.full((len(biases), vocab), NOTHING)
            for row, pairs in zip(table, biases, strict=True):
                last, bias = max(pairs, default=(0, 0.0))
                if ids_R is None and last >= vocab:
                    name = "banned_token_ids" if bias == -torch.inf else "logit_bias"
                    raise ValueError(f"{name} has {last}; the target's vocabulary is 0..{vocab - 1}")
                known = [pair for pair in pairs if pair[0] < vocab]
                row.index_add_(
                    0,
                    torch.tensor([token for token, _ in known], dtype=torch.int64),
                    torch.tensor([bias for _, bias in known], dtype=torch.float32),
                )
                if ids_R is None and bool((row == -torch.inf).all()):
                    raise ValueError(f"banned_token_ids has all {vocab} tokens; leave at least one")
            self._tables[key] = from_host(table, self._device)
        table_BV = self._tables[key]
        return table_BV if ids_R is None else table_BV[:, ids_R]


def column(values: Sequence[float], off: float, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """One number a slot, [B, 1] on the device; None if it is `off` for all of them."""
    return from_host(torch.tensor(values, dtype=dtype), device)[:, None] if set(values) != {off} else None


def _scale_seen(logits_BNV: Tensor, tokens_BC: Tensor, inside_BC: Tensor, penalty_B1: Tensor) -> Tensor:
    """logit / penalty where positive, logit * penalty where negative, once for each token of the history.

    Every occurrence of a token writes the same number. Positions that are not inside repeat the last one, which always
    is inside. A penalty of 1 leaves every bit as it is.
    """
    tokens_BC = torch.where(inside_BC, tokens_BC, tokens_BC[:, -1:])
    index_BNC = tokens_BC[:, None].expand(-1, logits_BNV.shape[1], -1)
    return logits_BNV.scatter(2, index_BNC, _scaled(logits_BNV.gather(2, index_BNC), penalty_B1[:, None]))


def _scaled(logits: Tensor, penalty_B11: Tensor) -> Tensor:
    return torch.where(logits > 0, logits / penalty_B11, logits * penalty_B11)
