"""Gated DeltaNet (arXiv 2412.06464), the linear attention of Qwen3-Next and Qwen3.5: a sub-layer in place of attention.

kernels/gated_delta.py computes its rule, models/delta_states.py keeps its state between passes. Shapes: B slots, T
tokens, D hidden width, V heads of the values, k key width, v value width, C channels of the convolution, W its width,
S = W - 1 + T tokens of a pass and before it.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from longdraft.kernels.gate import sigmoid
from longdraft.kernels.gated_delta import DeltaTokens, chain, tree
from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.delta_states import DeltaStates, last_inputs
from longdraft.models.passes import LayerContext
from longdraft.models.stream import Linear, RMSNorm, Stream

# Tokens of a text that are taken at a time, which bounds their fp32 copies.
BLOCK = 1024


class GatedDeltaNet(nn.Module):
    """Reads the stream through a causal convolution and the gated delta rule. One product gives, in this order, the
    convolution's channels (queries, keys, values), the output's gate and, for each head of the values, beta and decay.
    """

    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__()
        assert config.delta is not None
        self.config = delta = config.delta
        self.index = delta.layers.index(layer)  # into DeltaStates
        width = delta.value_heads * delta.value_dim
        self.in_proj = Linear(config.hidden_size, delta.channels + width + 2 * delta.value_heads, bias=False)
        self.conv = nn.Parameter(torch.empty(delta.channels, delta.kernel))
        self.log_rate, self.decay_bias = (nn.Parameter(torch.empty(delta.value_heads)) for _ in range(2))
        self.norm = RMSNorm(delta.value_dim, config.rms_norm_eps)
        self.o_proj = Linear(width, config.hidden_size, bias=False)

    def project(self, stream: Stream, norm: RMSNorm, context: LayerContext) -> tuple[Tensor]:
        """All that the tokens need of the stream: [B, T, in_proj's rows]."""
        return (stream.read(self.in_proj, norm),)

    def attend(self, projected: tuple[Tensor, ...], context: LayerContext) -> Tensor:
        """The heads' outputs of all tokens of the pass, [B, T, V v]. With a cache, its state advances by the tokens of
        `Pass.commits_B`, or they become pending."""
        (projected_BTX,), delta, cache = projected, self.config, context.inputs.cache
        sizes = delta.channels, delta.value_heads * delta.value_dim, delta.value_heads, delta.value_heads
        inputs_BTC, gate_BTF, beta_BTV, g_BTV = projected_BTX.split(sizes, -1)
        beta_BTV = sigmoid(beta_BTV.float())
        # In fp64 for the reason given at `sigmoid`.
        g_BTV = -self.log_rate.double().exp() * softplus(g_BTV.double() + self.decay_bias.double())
        states = None if cache is None else cache.delta
        if states is None or context.inputs.commits_B is not None:
            read_BTVv = self._read_text(inputs_BTC, g_BTV.float(), beta_BTV, context, states)
        else:
            read_BTVv = self._read_tree(inputs_BTC, g_BTV.float(), beta_BTV, context, states)
        normed_BTVv = self.norm(read_BTVv)
        return (normed_BTVv.flatten(2) * _silu(gate_BTF)).to(projected_BTX.dtype)

    def _read_tree(
        self, inputs_BTC: Tensor, g_BTV: Tensor, beta_BTV: Tensor, context: LayerContext, states: DeltaStates
    ) -> Tensor:
        """What the nodes of a tree read, [B, T, V, v]; they become pending."""
        plan, width = context.plan, self.config.kernel
        assert plan is not None
        joined_BSC = torch.cat([states.inputs[self.index], inputs_BTC], 1)
        if context.recent_BTW is None:
            taps = [joined_BSC[:, tap : tap + inputs_BTC.shape[1]] for tap in range(width)]
        else:
            slots_B1 = torch.arange(len(joined_BSC), device=joined_BSC.device)[:, None]
            taps = [joined_BSC[slots_B1, places_BT + width - 1] for places_BT in context.recent_BTW.unbind(2)]
        tokens = self._tokens(taps, g_BTV, beta_BTV)
        states.pending.append((inputs_BTC, tokens))
        return tree(tokens, states.memory[self.index], plan).to(inputs_BTC.dtype)

    def _read_text(
        self, inputs_BTC: Tensor, g_BTV: Tensor, beta_BTV: Tensor, context: LayerContext, states: DeltaStates | None
    ) -> Tensor:
        """What the tokens of texts read, [B, T, V, v]: of a prompt, whose states advance, or without a cache."""
        delta, (batch, n_tokens, _) = self.config, inputs_BTC.shape
        if states is None:
            memory = g_BTV.new_zeros(batch, delta.value_heads, delta.key_dim, delta.value_dim)
            before_BWC = inputs_BTC.new_zeros(batch, delta.kernel - 1, delta.channels)
        else:
            memory, before_BWC = states.memory[self.index], states.inputs[self.index]
        joined_BSC, commits_B, reads = torch.cat([before_BWC, inputs_BTC], 1), context.inputs.commits_B, []
        for start in range(0, n_tokens, BLOCK):
            stop, own_T = min(start + BLOCK, n_tokens), None
            shifted = [slice(start + tap, stop + tap) for tap in range(delta.kernel)]
            taps = (joined_BSC[:, tokens] for tokens in shifted)
            if (piece_S := context.piece_S) is not None:  # zeros where a tap reads another piece; one copy at a time
                own_T = piece_S[shifted[-1]]
                taps = (x_BTC * (piece_S[seen] == own_T)[:, None] for x_BTC, seen in zip(taps, shifted, strict=True))
                if start:  # the memory is that of the last token's piece, which may end there
                    memory = memory * (piece_S[shifted[-2]][0] == own_T[0])
            tokens = self._tokens(taps, g_BTV[:, start:stop], beta_BTV[:, start:stop])
            if commits_B is not None:
                tokens = tokens.only(commits_B - start)
            read, memory = chain(tokens, memory, own_T)
            reads.append(read.to(inputs_BTC.dtype))
        if states is not None and commits_B is not None:
            states.memory[self.index].copy_(memory)
            states.inputs[self.index].copy_(last_inputs(before_BWC, inputs_BTC, commits_B))
        return torch.cat(reads, 1)

    def _tokens(self, taps: Iterable[Tensor], g_BTV: Tensor, beta_BTV: Tensor) -> DeltaTokens:
        """The convolution's outputs as queries, keys and values. taps: its inputs from the earliest on, [B, T, C]."""
        delta, taps, (first_C, *others) = self.config, iter(taps), self.conv.T.float()
        mixed_BTC = next(taps) * first_C
        for x_BTC, weight_C in zip(taps, others, strict=True):
            mixed_BTC = mixed_BTC + x_BTC * weight_C
        mixed_BTC = _silu(mixed_BTC).to(self.conv.dtype).float()
        keys = delta.key_heads * delta.key_dim
        q, k, v = mixed_BTC.split([keys, keys, delta.value_heads * delta.value_dim], -1)
        q, k = (x.unflatten(-1, (delta.key_heads, -1)) for x in (q, k))
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        repeats = delta.value_heads // delta.key_heads
        q, k = (x.repeat_interleave(repeats, 2) for x in (q * delta.key_dim**-0.5, k))
        return DeltaTokens(q, k, v.unflatten(-1, (delta.value_heads, -1)), g_BTV, beta_BTV)


def _silu(x: Tensor) -> Tensor:
    """silu in fp32, with `sigmoid`'s bits."""
    return x.float() * sigmoid(x.float())
