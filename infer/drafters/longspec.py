"""LongSpec's drafter (arXiv 2502.17421, section 3): a beam of the draft block over the target's last-layer cache.

Pass l = 1, 2, ... runs the nodes of level l - 1 as queries (first the root, at position p) and proposes level l. The
self-attention of these queries reads the draft's window and their ancestors. Their cross-attention reads the target's
committed keys, which end at p - 1: the noise shift l of training. The draft's own keys and values depend on token and
position only, so there is no prefill: a proposal first computes those that are missing, at most a window of them, from
the committed tokens of the history, whoever proposed them.

The block is in models/drafts/longspec.py. `_CPasses` runs it by one C call a level where the C kernels compute it,
`_TorchPasses` by PyTorch's operations elsewhere.
Shapes: B slots, T queries of a pass, N rows of the tree so far, C missing tokens, W rows of the window, S = W + N keys,
P positions, E draft vocabulary, H query heads, K key/value heads, G = H / K, d head width.
"""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from longdraft.infer.accept import AcceptResult
from longdraft.infer.budget import Budget
from longdraft.infer.drafters.base import Count, DeviceDrafter, Levels, Request, check_draft
from longdraft.infer.slot_state import SlotState
from longdraft.infer.tree import ROOT, TokenTree
from longdraft.kernels import backend
from longdraft.kernels.beam import Level, beam_level
from longdraft.kernels.cpu import draft_block, rows
from longdraft.kernels.tree_attention import cross_attention
from longdraft.models.decoder import Decoder, Embedding, LMHead
from longdraft.models.drafts.longspec import WIDTHS, LongSpec, LongSpecConfig, shape_of
from longdraft.models.footprint import Allocations
from longdraft.models.kv_cache import KVCache
from longdraft.models.passes import TargetOutput
from longdraft.models.schema import Instance, validated
from longdraft.models.target import Target

# On a CPU, where every query token costs, only a level's best nodes are extended; a step commits almost as many tokens.
EXTENDED_ON_CPU = 4
# Borders of a level's classes, by surprise: minus a node's log-probability given its parent, in nats.
SURPRISE = (0.05, 0.2, 0.5, 1.0, 1.7, 2.5, 3.5, 5.0, 7.0)


class LongSpecDrafter(DeviceDrafter):
    """Beam search that discards nothing: nodes that are not extended stay in the tree.

    A node's score is the sum of its path's log-probabilities. At T > 0 these are the log-softmax of logits / T + noise:
    the target's choice is the argmax of its own logits / T plus the same noise, and if the draft's sum differs from the
    target's by independent Gumbel errors, the softmax is each token's chance of being that choice.

    Args:
        target: the loaded target (models/target.py).
        draft: a trained block, in the target's dtype and on its device. A CPU with bf16 instructions runs a bf16 block
            in int8.
        widths: nodes of each level; ones make a chain. A lower `max_nodes` narrows all levels alike.
        extended: how many nodes of a level, the best ones, are queries of the next pass; None: all on a GPU, and
            EXTENDED_ON_CPU on a CPU.
    """

    @validated
    def __init__(
        self,
        target: Instance[Target],
        draft: Instance[LongSpec],
        widths: Levels = WIDTHS,
        extended: Count | None = None,
    ):
        check_draft(target, draft, shape_of(target.model.whole_config))
        if len(widths) > draft.config.window:
            raise ValueError(f"widths: {len(widths)} levels, more than the {draft.config.window} of the draft's window")
        if len(widths) > draft.config.noise + 1:  # the authors decode one level deeper than they train
            trained = f"the draft was trained for {draft.config.noise}"
            warnings.warn(f"widths: {len(widths)} levels, but {trained}; the others are rarely accepted", stacklevel=2)
        self.widths = widths
        self.draft, self._model = draft, target.model
        self._head = draft.lm_head(target.model)
        self.max_nodes, self.max_depth = sum(self.widths), len(self.widths)
        self.extended = extended or (EXTENDED_ON_CPU if backend.is_host(self._head.weight.device) else max(self.widths))
        # The last level's nodes are never queries.
        self._tree_rows = 1 + sum(min(width, self.extended) for width in self.widths[:-1])
        self._borders = torch.tensor(SURPRISE, device=self._head.weight.device)
        self._kind = _CPasses if _runs_in_c(draft, self._model, self._head) else _TorchPasses
        self._passes: DraftPasses | None = None

    @property
    def class_stages(self) -> Sequence[int]:
        return [0, *(level for level in range(1, 1 + self.max_depth) for _ in range(len(SURPRISE) + 1))]

    def on_start(self, slot: int, request: Request, cache: KVCache) -> None:
        if self._passes is None or self._passes.cache is not cache:
            self._passes = self._kind(self.draft, self._model, self._head, cache, self._tree_rows)
        self._passes.note_prompt(slot, len(request.prompt))

    def on_step(self, state: SlotState, tree: TokenTree, accepted: AcceptResult, output: TargetOutput) -> None:
        assert self._passes is not None
        self._passes.note_step(accepted.nodes.shape[1])

    def buffers(self) -> tuple[object, ...]:
        return (self._passes,)

    def release(self) -> None:
        self._passes = None

    def allocations(self, batch: int, capacity: int) -> Allocations:
        shape = self._kind.kept_shape(self.draft.config, batch, capacity, self._tree_rows)
        return {"draft window": [(shape, self._head.weight.dtype)]}

    def plan(self, state: SlotState, budget: Budget) -> tuple[int, ...]:
        """The most tokens before a root whose keys are missing, and the widths of the levels."""
        assert self._passes is not None
        widths = _fit(self.widths, budget.max_nodes)[: budget.stages]
        self.num_query_tokens = min(max(widths, default=1), self.extended)
        return self._passes.begin(state) if widths else 0, *widths

    def grow(self, state: SlotState, budget: Budget, plan: tuple[int, ...]) -> TokenTree:
        n_missing, *widths = plan
        assert self._passes is not None
        roots_B = state.roots
        if self._kind is _CPasses:
            state = state.leading()
        self._passes.catch_up(state, n_missing)
        level = self._root_level(state)
        nodes_3BN, first = level.nodes_3BW, 0  # the tree so far; index of its first node that is extended
        tree = TokenTree(*nodes_3BN)
        for stage, width in enumerate(widths, start=1):
            tokens_BT, scores_BT, ancestors_BTN = level.nodes_3BW[0], level.scores_BW, level.ancestors_BWN
            if (others := tokens_BT.shape[1] - self.extended) > 0:
                tokens_BT, scores_BT = tokens_BT[:, :-others], scores_BT[:, :-others]
                ancestors_BTN = ancestors_BTN[:, :-others, :-others]  # the level's own columns are the last ones
            logits_BTE = self._passes.logits(state, tokens_BT, stage, ancestors_BTN)
            best = state.best(logits_BTE, stage, min(width, logits_BTE.shape[-1]), self.draft.token_ids)
            first_class = 1 + (stage - 1) * (len(SURPRISE) + 1)
            level = beam_level(
                *best, scores_BT, ancestors_BTN, width, first, first_class, self._borders, self.draft.token_ids
            )
            first = nodes_3BN.shape[2]
            nodes_3BN = torch.cat((nodes_3BN, level.nodes_3BW), 2)
            tree = TokenTree(*nodes_3BN)
            if stage < len(widths) and not budget.goes_on(tree):
                break
        return tree.with_roots(roots_B)

    def _root_level(self, state: SlotState) -> Level:
        """The roots as level 0. The score of an inactive slot's root is -inf, which makes its nodes padding."""
        roots_B1 = state.roots[:, None]
        nodes_3B1 = torch.stack((roots_B1, torch.full_like(roots_B1, ROOT), torch.zeros_like(roots_B1)))
        scores_B1 = torch.zeros_like(roots_B1, dtype=torch.float32).masked_fill_(~state.active[:, None], -torch.inf)
        return Level(nodes_3B1, scores_B1, torch.ones_like(roots_B1, dtype=torch.bool)[:, :, None])


def _fit(widths: Sequence[int], max_nodes: int) -> list[int]:
    """Narrow all levels alike until they have at most `max_nodes` nodes, at least one each. If there are fewer nodes
    than levels, the deepest levels are dropped."""
    widths = list(widths)[:max_nodes]
    narrow = [max(1, min(width, width * max_nodes // sum(widths))) for width in widths]
    while sum(narrow) > max_nodes:
        narrow[narrow.index(max(narrow))] -= 1
    for level, width in enumerate(widths):  # what rounding left over widens the first levels
        narrow[level] += min(width - narrow[level], max_nodes - sum(narrow))
    return narrow


class DraftPasses:
    """The block's passes over the slots of one cache of the target, with the block's own keys and values.

    Attributes:
        cache: the target's.
        window: how many positions before its own a query reads at most: the configured window, or fewer positions.
        kept: the block's own keys and values [B, P + rows of a tree, K, d]; the token at position p has row p % P.
        keeps_all: whether rows are kept of all positions, with those of roots that were queries, or of the last
            `window` positions without them.

    Args:
        tree_rows: the most rows of a tree that are ever queries.
    """

    keeps_all = False

    def __init__(self, draft: LongSpec, model: Decoder, head: LMHead, cache: KVCache, tree_rows: int):
        self.draft, self.cache, self._head = draft, cache, head
        self._embed, self._ranks = model.embed_tokens, model.ranks
        self.window = min(draft.config.window, draft.config.max_positions)
        # Zeros, because masked rows are still multiplied by 0, and uninitialised memory may be NaN.
        keys, values = head.weight.new_zeros(self.kept_shape(draft.config, cache.batch, cache.capacity, tree_rows))
        self.kept, self._n_positions = (keys, values), keys.shape[1] - tree_rows
        self._slots_B1 = torch.arange(cache.batch, device=keys.device)[:, None]
        self._missing = [0] * cache.batch  # how many tokens each slot lacks keys of at most, its root included
        self._most = 0  # tokens that a step may commit to a slot

    @classmethod
    def kept_shape(cls, config: LongSpecConfig, batch: int, capacity: int, tree_rows: int) -> tuple[int, ...]:
        """The shape of keys and values together, for a cache of the target with `batch` slots of `capacity` rows."""
        n_positions = capacity if cls.keeps_all else min(config.window, config.max_positions)
        return 2, batch, n_positions + tree_rows, config.n_kv_heads, config.head_dim

    def note_prompt(self, slot: int, length: int) -> None:
        """Another sequence starts on this slot. length: tokens of its prompt."""
        self._missing[slot] = length

    def note_step(self, most: int) -> None:
        """A step committed at most `most` tokens to each slot."""
        self._most = most
        self._missing = [count + most for count in self._missing]

    def begin(self, state: SlotState) -> int:
        """Start a proposal on the host. Returns how many tokens before the roots `catch_up` must process."""
        working = [slot for slot, tokens in enumerate(state.committed) if tokens]
        count = min(max([0, *(self._missing[slot] - 1 for slot in working)]), self.window)
        for slot in working:
            self._missing[slot] = 0 if self.keeps_all else 1  # the root itself
        return state.rounded(count, min(self._most, self.window), self.window)

    def catch_up(self, state: SlotState, n_missing: int) -> None:
        """Compute the keys and values of the last `n_missing` tokens before the roots."""
        if n_missing:
            last_C = torch.arange(-n_missing, 0, device=state.positions.device)
            positions_BC = (state.positions[:, None] + last_C).clamp(min=0)  # position 0 again where there are fewer
            embeddings_BCD = self._embed(state.history.read(state.positions - n_missing, n_missing))
            tables = self.draft.tables(positions_BC, state.history.prompt_lengths)
            places = self._slots_B1[: len(state.roots)], positions_BC % self._n_positions
            self.kept[0][places], self.kept[1][places] = self.draft.self_kv(embeddings_BCD, tables)

    def logits(self, state: SlotState, nodes_BT: Tensor, level: int, ancestors_BTN: Tensor) -> Tensor:
        """Logits [B, T, E] after the nodes of `level` - 1, which are at position p + level - 1 for a root at p.

        ancestors_BTN: bool, which of the tree's rows so far each node reads; the nodes' own rows are the last T.
        """
        raise NotImplementedError


class _TorchPasses(DraftPasses):
    """Passes in PyTorch. The keys and values of the last W positions before the root are kept, and a proposal catches
    up with them. The tree's rows follow in the same tensor, so that a pass attends to one tensor under one mask."""

    def logits(self, state: SlotState, nodes_BT: Tensor, level: int, ancestors_BTN: Tensor) -> Tensor:
        cache, n_rows, n_nodes = self.cache, *ancestors_BTN.shape[1:]
        at_B, last_B1 = state.positions + level - 1, state.positions[:, None] - 1
        positions_BW = last_B1 - (last_B1 - torch.arange(self.window, device=at_B.device)) % self.window
        in_window_BW = positions_BW >= (at_B[:, None] - self.window).clamp(min=0)
        mask_BTS = torch.cat([in_window_BW[:, None].expand(-1, n_rows, -1), ancestors_BTN], dim=2)
        end = self.window + n_nodes

        def attend_self(q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor) -> Tensor:
            keys, values = self.kept
            keys[:, end - n_rows : end], values[:, end - n_rows : end] = k_BTKd, v_BTKd
            return _attend(q_BTHd, keys[:, :end], values[:, :end], mask_BTS)

        def attend_cross(q_BTHd: Tensor) -> Tensor:
            q_BThd = self._ranks.part(q_BTHd, 2)  # of the keys and values that this rank has
            out_BThd = cross_attention(q_BThd, cache.keys[-1], cache.values[-1], cache.lengths)
            return self._ranks.joined(out_BThd, 2, q_BTHd.shape[2])

        tables = self.draft.tables(at_B[:, None].expand_as(nodes_BT), state.history.prompt_lengths)
        hidden_BTD = self.draft.block(self._embed(nodes_BT), tables, attend_self, attend_cross)
        return self._head(hidden_BTD)


def _attend(q_BTHd: Tensor, k_BSKd: Tensor, v_BSKd: Tensor, mask_BTS: Tensor) -> Tensor:
    """Attention [B, T, H, d] over the rows in each query's mask. Query groups are folded into the query length, so that
    keys and values are read once and never repeated."""
    batch, n_rows, n_heads, head_dim = q_BTHd.shape
    n_kv_heads = k_BSKd.shape[2]
    groups = n_heads // n_kv_heads
    q_BKGTd = q_BTHd.view(batch, n_rows, n_kv_heads, groups, head_dim).permute(0, 2, 3, 1, 4)
    out_BKQd = scaled_dot_product_attention(
        q_BKGTd.reshape(batch, n_kv_heads, groups * n_rows, head_dim),
        k_BSKd.transpose(1, 2),
        v_BSKd.transpose(1, 2),
        attn_mask=mask_BTS.repeat(1, groups, 1)[:, None],
    )
    out_BKGTd = out_BKQd.view(batch, n_kv_heads, groups, n_rows, head_dim)
    return out_BKGTd.permute(0, 3, 1, 2, 4).reshape(batch, n_rows, n_heads, head_dim)


class _CPasses(DraftPasses):
    """Passes by one C call a level, over keys and values of all positions; those before the window are not read."""

    keeps_all = True

    def __init__(self, draft: LongSpec, model: Decoder, head: LMHead, cache: KVCache, tree_rows: int):
        super().__init__(draft, model, head, cache, tree_rows)
        config = draft.config
        cos, sin = draft.tables(torch.arange(cache.capacity + tree_rows)[None])
        self._n_missing = 0  # tokens before the roots that the next level's call catches up with
        scale, weights = _scale_of(self._embed), block_weights(draft, head.weight)
        assert scale is not None
        # A level is bound by the bytes that it reads, and int8 hardly changes its first candidates.
        in_int8 = weights.dtype == torch.bfloat16 and rows.multiplies_bf16()
        self._block = draft_block.DraftBlock(
            weights.in_bytes() if in_int8 else weights,
            draft_block.Inputs(self._embed.weight.detach(), scale, cos.flatten(0, -2), sin.flatten(0, 1).flatten(1)),
            config.n_heads, config.n_kv_heads, config.rms_norm_eps, self.window + 1,  # and a row's own key
            self.kept, (cache.keys[-1], cache.values[-1]),
        )  # fmt: skip

    def catch_up(self, state: SlotState, n_missing: int) -> None:
        if len(state.roots) * n_missing <= rows.MOST_LINEAR_ROWS:
            self._n_missing = n_missing  # computed with the first level
        else:
            super().catch_up(state, n_missing)

    def logits(self, state: SlotState, nodes_BT: Tensor, level: int, ancestors_BTN: Tensor) -> Tensor:
        n_missing, self._n_missing = self._n_missing, 0
        lengths_B, tokens_BS = self.cache.lengths[: len(nodes_BT)], state.history.tokens
        return self._block.run(nodes_BT, state.positions, level - 1, ancestors_BTN, lengths_B, tokens_BS, n_missing)


def _runs_in_c(draft: LongSpec, model: Decoder, head: LMHead) -> bool:
    """Whether the C kernels compute this block here. Their RoPE is a table by position, so it must not depend on the
    sequence's length; and they read the keys of all heads."""
    embed: nn.Embedding = model.embed_tokens
    has_kernel = draft_block.can_run(block_weights(draft, head.weight), draft.config.head_dim)
    same_form = (embed.weight.dtype, embed.weight.device) == (head.weight.dtype, head.weight.device)
    plain_table = _scale_of(embed) is not None and embed.weight.is_contiguous()
    has_all = model.ranks.size == 1
    return has_kernel and same_form and plain_table and has_all and not draft.rope.length_dependent


def _scale_of(embed: nn.Embedding) -> float | None:
    """The factor that scales the table's rows; None for other embedding classes."""
    if isinstance(embed, Embedding):
        return embed.scale
    return 1.0 if type(embed) is nn.Embedding and embed.max_norm is None else None


def block_weights(draft: LongSpec, head_ED: Tensor) -> draft_block.BlockWeights:
    """The weights of a draft and its LM head for C, without a copy."""
    layers = draft.self_qkv, draft.self_o, draft.cross_q, draft.cross_o, draft.gate_up, draft.down
    norms = draft.self_norm, draft.cross_norm, draft.mlp_norm, draft.final_norm
    matrices = *(layer.weight for layer in layers), head_ED
    vectors = draft.self_qkv.bias, draft.cross_q.bias, *(None if norm is None else norm.weight for norm in norms)
    weights = *(rows.Weight(matrix.detach()) for matrix in matrices), *(x if x is None else x.detach() for x in vectors)
    return draft_block.BlockWeights._make(weights)
