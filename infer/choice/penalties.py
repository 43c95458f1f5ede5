"""Penalties, biases and bans: a request's changes to the target's logits, by earlier tokens or by its own lists.

They see a node's own history: the context and its ancestors in the tree (infer/history.py). They come before
temperature and filters (infer/choice/slots.py), in the order contextual, repetition, presence and frequency, biases and
bans.
Shapes: B slots, N nodes of a tree, M of these nodes, V vocabulary, C tokens of history, R restricted vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from longdraft.infer.history import History
from longdraft.kernels import backend
from longdraft.kernels.transfer import fill_from_host, from_host, integers

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
        self._tables: dict[tuple[str, int], Tensor] = {}
        self._widths: dict[int, tuple[Tensor, int]] = {}
        self._counts = self._presence is not None or self._frequency is not None
        self._reads_all = self._repetition is not None or self._counts
        self._looks_back = self._contextual is not None or self._reads_all
        self.any = self._looks_back or self.biases is not None or self.held_back is not None

    @property
    def columns(self) -> tuple[Tensor | None, ...]:
        """The slots' numbers on the device; None for penalties that no slot has."""
        return self._contextual, self._windows, self._repetition, self._presence, self._frequency, self._least

    def follow(self, other: "Penalties") -> None:
        """Copy another's biases, bans and held-back tokens into the tables that recorded work reads."""
        before, self.biases, self.held_back = (self.biases, self.held_back), other.biases, other.held_back
        for key, table_B1V in self._tables.items() if before != (self.biases, self.held_back) else ():
            fill_from_host(table_B1V, self._host_table(*key))

    def apply(
        self,
        logits_BMV: Tensor,
        history: History,
        positions_BN: Tensor,
        tokens_BN: Tensor | None = None,
        ancestors_BNN: Tensor | None = None,
        first: int = 0,
        ids_R: Tensor | None = None,
    ) -> Tensor:
        """The penalised logits in fp32, or the logits themselves if there is nothing to do. `history` is not written.

        Args:
            logits_BMV: without a tree, of nodes whose history is `history` up to and including positions_BN[:, 0]; with
                a tree, of its nodes first .. first + M - 1, each with its own history.
            history: valid through positions_BN[:, 0].
            positions_BN, tokens_BN: int64, of all nodes of the tree; node 0 is the root.
            ancestors_BNN: bool, [b, i, j]: j is i itself or above it; None without a tree.
            ids_R: int64, if the logits are of a restricted vocabulary: its ids in the target's.
        """
        if not self.any:
            return logits_BMV
        logits_BMV = logits_BMV.float()
        if ids_R is not None:
            wide = (*logits_BMV.shape[:2], self.width_of(ids_R))
            logits_BMV = logits_BMV.new_full(wide, -torch.inf).index_copy_(2, ids_R, logits_BMV)
        some = slice(first, first + logits_BMV.shape[1])
        positions_BM = positions_BN[:, :1] if ancestors_BNN is None else positions_BN[:, some]
        if self._looks_back:
            tokens_BC, places_BC, seen_BMC = self._history(history, positions_BN[:, 0])
            own_BM = tokens_BC[:, -1:]
            if ancestors_BNN is not None and tokens_BN is not None:  # the nodes below the root come before the history
                own_BM = tokens_BN[:, some]
                tokens_BC = torch.cat([tokens_BN[:, 1:], tokens_BC], 1)
                places_BC = torch.cat([positions_BN[:, 1:], places_BC], 1)
                path_BMN = ancestors_BNN[:, some, 1:]
                seen_BMC = torch.cat([path_BMN, seen_BMC.expand(-1, path_BMN.shape[1], -1)], 2)
            last = logits_BMV.shape[2] - 1  # takes ids beyond a restricted vocabulary
            own_BM1, tokens_B1C = own_BM.clamp(max=last)[:, :, None], tokens_BC.clamp(max=last)[:, None]
            if self._contextual is not None:
                inside_BMC = seen_BMC & (places_BC[:, None] > (positions_BM - self._windows[:, None])[:, :, None])
                logits_BMV = _scale_seen(logits_BMV, tokens_B1C, own_BM1, inside_BMC, self._contextual)
            if self._repetition is not None:
                logits_BMV = _scale_seen(logits_BMV, tokens_B1C, own_BM1, seen_BMC, self._repetition)
            if self._counts:
                generated_BMC = seen_BMC & (places_BC >= history.prompt_lengths[:, None])[:, None]
                logits_BMV = self._subtract(logits_BMV, tokens_B1C, generated_BMC)
        if self.biases is not None:
            logits_BMV = logits_BMV + self._table("biases", logits_BMV.shape[-1])
        if self.held_back is not None and self._least is not None:
            early_BM = positions_BM + 1 - history.prompt_lengths[:, None] < self._least
            table_B1V = self._table("held_back", logits_BMV.shape[-1])
            logits_BMV = logits_BMV + torch.where(early_BM[:, :, None], table_B1V, NOTHING)
        return logits_BMV if ids_R is None else logits_BMV[..., ids_R]

    def _history(self, history: History, positions_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The last tokens up to positions_B that may matter, and their positions, [B, C]; and bool [B, 1, C], which of
        them exist. On a GPU, where the host does not know positions, C is the largest possible. On a CPU it is the
        text's length at most; a short text in a long slot would otherwise be slow."""
        capacity = history.tokens.shape[1]
        count = capacity if self._reads_all else min(capacity, self.widest)
        if backend.is_host(positions_B.device):
            count = min(count, int(positions_B.max()) + 1)
        places_BC = (positions_B - (count - 1))[:, None] + torch.arange(count, device=positions_B.device)
        return history.read(places_BC[:, 0], count), places_BC, (places_BC >= 0)[:, None]

    def _subtract(self, logits_BMV: Tensor, tokens_B1C: Tensor, generated_BMC: Tensor) -> Tensor:
        """Subtract presence once, and frequency as often as a token was generated, in exact counts."""
        index_BMC = tokens_B1C.expand_as(generated_BMC)
        zeros_BMV = logits_BMV.new_zeros(*generated_BMC.shape[:2], logits_BMV.shape[2])
        times_BMC = zeros_BMV.scatter_add_(2, index_BMC, generated_BMC.float()).gather(2, index_BMC)
        less_BMC = torch.zeros_like(times_BMC)
        if self._presence is not None:
            less_BMC = less_BMC + self._presence[:, None] * (times_BMC > 0)
        if self._frequency is not None:
            less_BMC = less_BMC + self._frequency[:, None] * times_BMC
        index_BMC = tokens_B1C.expand(-1, logits_BMV.shape[1], -1)
        return logits_BMV.scatter(2, index_BMC, logits_BMV.gather(2, index_BMC) - less_BMC)

    def width_of(self, ids_R: Tensor) -> int:
        """max(ids_R) + 2: ids up to the greatest, and one for those beyond. Cached, because it waits for the device."""
        if id(ids_R) not in self._widths:
            self._widths[id(ids_R)] = ids_R, int(ids_R.max()) + 2
        return self._widths[id(ids_R)][1]

    def _table(self, name: str, width: int) -> Tensor:
        """What the attribute of this name, biases or held_back, adds to each slot's logits: fp32 [B, 1, V]; cached."""
        key = name, width
        if key not in self._tables:
            self._tables[key] = from_host(self._host_table(*key), self._device)
        return self._tables[key]

    def _host_table(self, name: str, width: int) -> Tensor:
        of_slots: Sequence[Biases] = getattr(self, name) or ()
        table_BV = torch.full((len(of_slots), width), NOTHING)
        for row_V, pairs in zip(table_BV, of_slots, strict=True):
            for token, bias in pairs:
                row_V[token : token + 1] += bias  # none for an id beyond a restricted vocabulary
        return table_BV[:, None]


def column(values: Sequence[float], off: float, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """One number a slot, [B, 1] on the device; None if it is `off` for all of them."""
    return from_host(torch.tensor(values, dtype=dtype), device)[:, None] if set(values) != {off} else None


def _scale_seen(
    logits_BMV: Tensor, tokens_B1C: Tensor, own_BM1: Tensor, inside_BMC: Tensor, penalty_B1: Tensor
) -> Tensor:
    """logit / penalty where positive, logit * penalty where negative, once for each token inside.

    Every occurrence of a token writes the same number. Tokens that are not inside are replaced by the node's own, which
    always is. A penalty of 1 leaves every bit as it is.
    """
    index_BMC = torch.where(inside_BMC, tokens_B1C, own_BM1).expand(-1, logits_BMV.shape[1], -1)
    seen_BMC, penalty_B11 = logits_BMV.gather(2, index_BMC), penalty_B1[:, None]
    scaled_BMC = torch.where(seen_BMC > 0, seen_BMC / penalty_B11, seen_BMC * penalty_B11)
    return logits_BMV.scatter(2, index_BMC, scaled_BMC)
