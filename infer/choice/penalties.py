"""Penalties, biases and bans: how a request changes the target's logits, by earlier tokens or by its own list.

They see a node's own history: the context and its ancestors in the tree (infer/history.py). They come before
temperature and filters (infer/choice/slots.py), in the order contextual, repetition, presence and frequency, biases
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
            tokens_BC, places_BC, seen_B1C = self._history(history, positions_B)
            own = tokens_BC[:, -1:], positions_B[:, None]
            logits_BNV = self._look_back(logits_BNV, history, *own, tokens_BC, places_BC, seen_B1C, token_ids_R)
        if self._adds:
            logits_BNV = self._add(logits_BNV, history, positions_B[:, None], token_ids_R)
        return logits_BNV if logits.dim() == 3 else logits_BNV[:, 0]

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

        Args:
            logits_BMV: of the nodes first .. first + M - 1.
            history: valid through the roots.
            tokens_BN, positions_BN: int64, of all nodes; node 0 is the root.
            ancestors_BNN: bool, [b, i, j]: j is i itself or above it; None where there is the root alone.
        """
        if not self.any:
            return logits_BMV
        logits_BMV, some = logits_BMV.float(), slice(first, first + logits_BMV.shape[1])
        if self._looks_back:
            tokens_BC, places_BC, seen_B1C = self._history(history, positions_BN[:, 0])
            if ancestors_BNN is not None:  # the nodes below the root come before the history
                tokens_BC = torch.cat([tokens_BN[:, 1:], tokens_BC], 1)
                places_BC = torch.cat([positions_BN[:, 1:], places_BC], 1)
                path_BMN = ancestors_BNN[:, some, 1:]
                seen_B1C = torch.cat([path_BMN, seen_B1C.expand(-1, path_BMN.shape[1], -1)], 2)
            own = tokens_BN[:, some], positions_BN[:, some]
            logits_BMV = self._look_back(logits_BMV, history, *own, tokens_BC, places_BC, seen_B1C)
        return self._add(logits_BMV, history, positions_BN[:, some], None) if self._adds else logits_BMV

    def _history(self, history: History, positions_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The last tokens up to positions_B, as many as matter, and their positions, [B, C]; and bool [B, 1, C], which
        of them are there."""
        count = self._reach(history, positions_B)
        places_BC = (positions_B - (count - 1))[:, None] + torch.arange(count, device=positions_B.device)
        return history.read(places_BC[:, 0], count), places_BC, (places_BC >= 0)[:, None]

    def _look_back(
        self,
        logits_BNV: Tensor,
        history: History,
        own_BN: Tensor,
        positions_BN: Tensor,
        tokens_BC: Tensor,
        places_BC: Tensor,
        seen_BNC: Tensor,
        ids_R: Tensor | None = None,
    ) -> Tensor:
        """Penalise tokens that came before.

        Args:
            own_BN, positions_BN: int64, the nodes' tokens and positions; [B, 1] if all have the same.
            tokens_BC, places_BC: int64, the tokens that nodes look back on, their own among them, and their positions.
            seen_BNC: bool, which of them a node looks back on; [B, 1, C] if all look back on the same.
        """
        if ids_R is not None:
            # One more column stands for tokens outside of the restricted vocabulary.
            places = self.places_of(ids_R)
            own_BN, tokens_BC = (places[x.clamp(max=len(places) - 1)] for x in (own_BN, tokens_BC))
            logits_BNV = torch.nn.functional.pad(logits_BNV, (0, 1))
        tokens_B1C, own_BN1 = tokens_BC[:, None], own_BN[:, :, None]
        if self._contextual is not None:
            inside_BNC = seen_BNC & (places_BC[:, None] > (positions_BN - self._windows[:, None])[:, :, None])
            logits_BNV = _scale_seen(logits_BNV, tokens_B1C, own_BN1, inside_BNC, self._contextual)
        if self._repetition is not None:
            logits_BNV = _scale_seen(logits_BNV, tokens_B1C, own_BN1, seen_BNC, self._repetition)
        if self._counts:
            generated_BNC = seen_BNC & (places_BC >= history.prompt_lengths[:, None])[:, None]
            logits_BNV = self._subtract(logits_BNV, tokens_B1C, generated_BNC)
        return logits_BNV if ids_R is None else logits_BNV[..., :-1]

    def _reach(self, history: History, positions_B: Tensor) -> int:
        """How many of the last tokens have to be read. On a GPU, where the host does not know positions, it is the most
        it can be; on a CPU that would make a short text in a long slot slow."""
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

    def _subtract(self, logits_BNV: Tensor, tokens_B1C: Tensor, generated_BNC: Tensor) -> Tensor:
        """Subtract presence once, and frequency as often as a token was generated, in exact counts."""
        index_BNC = tokens_B1C.expand_as(generated_BNC)
        zeros_BNV = logits_BNV.new_zeros(*generated_BNC.shape[:2], logits_BNV.shape[2])
        times_BNC = zeros_BNV.scatter_add_(2, index_BNC, generated_BNC.float()).gather(2, index_BNC)
        less_BNC = torch.zeros_like(times_BNC)
        if self._presence is not None:
            less_BNC = less_BNC + self._presence[:, None] * (times_BNC > 0)
        if self._frequency is not None:
            less_BNC = less_BNC + self._frequency[:, None] * times_BNC
        index_BNC = tokens_B1C.expand(-1, logits_BNV.shape[1], -1)
        return logits_BNV.scatter(2, index_BNC, logits_BNV.gather(2, index_BNC) - less_BNC)

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
                known = [pair for pair in pairs if pair[0] < vocab]
                row.index_add_(
                    0,
                    torch.tensor([token for token, _ in known], dtype=torch.int64),
                    torch.tensor([bias for _, bias in known], dtype=torch.float32),
                )
            self._tables[key] = from_host(table, self._device)
        table_BV = self._tables[key]
        return table_BV if ids_R is None else table_BV[:, ids_R]


def column(values: Sequence[float], off: float, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """One number a slot, [B, 1] on the device; None if it is `off` for all of them."""
    return from_host(torch.tensor(values, dtype=dtype), device)[:, None] if set(values) != {off} else None


def _scale_seen(
    logits_BNV: Tensor, tokens_B1C: Tensor, own_BN1: Tensor, inside_BNC: Tensor, penalty_B1: Tensor
) -> Tensor:
    """logit / penalty where positive, logit * penalty where negative, once for each token inside.

    Every occurrence of a token writes the same number. In the place of tokens that are not inside stands the node's
    own, which always is. A penalty of 1 leaves every bit as it is.
    """
    index_BNC = torch.where(inside_BNC, tokens_B1C, own_BN1).expand(-1, logits_BNV.shape[1], -1)
    seen_BNC, penalty_B11 = logits_BNV.gather(2, index_BNC), penalty_B1[:, None]
    scaled_BNC = torch.where(seen_BNC > 0, seen_BNC / penalty_B11, seen_BNC * penalty_B11)
    return logits_BNV.scatter(2, index_BNC, scaled_BNC)
