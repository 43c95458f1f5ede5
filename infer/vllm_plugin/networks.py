"""Draft folders as the draft models of vLLM's EAGLE proposer: heads (TokenSwift, Medusa) and LongSpec's block.

That proposer runs a draft model over the tokens of a verification, each at the position before its own and with the
target's hidden state there, and then over one token a pass. The second tensor that a pass returns is the next pass's
hidden state. Post-norm heads and the block use `method: eagle`. linear_chain reads the pre-norm state, so it uses
`eagle3`, whose auxiliary states are the residual stream after any layer. Networks and weights are those of our own
runtime (models/drafts/, models/draft_folder.py). Shapes: N tokens, D hidden, V vocabulary, E draft vocabulary.
"""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vllm.config import VllmConfig  # pyright: ignore[reportMissingImports]
from vllm.model_executor.layers.logits_processor import LogitsProcessor  # pyright: ignore[reportMissingImports]
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM  # pyright: ignore[reportMissingImports]

from longdraft.infer.vllm_plugin.attention import TargetAttention, WindowAttention
from longdraft.models.draft_folder import Draft, load_draft, local_folder
from longdraft.models.drafts.heads import Medusa, TokenSwift
from longdraft.models.drafts.longspec import LongSpec

# Targets that scale embeddings after the lookup, while a draft model shares only the table.
SCALED = ("gemma", "cohere", "granite", "minicpm")


class _DraftModel(Eagle3LlamaForCausalLM):
    """What vLLM requires of heads and block. Its proposer demands this base class for `eagle3`; none of it is used."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        nn.Module.__init__(self)
        self._check_engine(vllm_config)
        speculation = vllm_config.speculative_config
        folder, self.config = speculation.draft_model_config, speculation.draft_model_config.hf_config
        self.draft: Draft = load_draft(local_folder(folder.model, folder.revision)).to(
            vllm_config.device_config.device, vllm_config.model_config.dtype
        )
        target = vllm_config.model_config.hf_text_config
        reads_pre_norm = isinstance(self.draft, TokenSwift) and self.draft.reads == "pre_norm"
        method = "eagle3" if reads_pre_norm else "eagle"
        if speculation.method != method:
            raise ValueError(f"method: {speculation.method}, but {folder.model} needs {method}; give that")
        self.vocab_size = vllm_config.model_config.get_vocab_size()
        self.logits_processor = LogitsProcessor(self.vocab_size)
        # vLLM replaces this table by the target's embeddings, if they are as wide, and sets lm_head to its LM head.
        self.model = nn.ModuleDict({"embed_tokens": nn.Embedding(1, target.hidden_size)})
        self.has_own_embed_tokens = self.has_own_lm_head = False
        self.cross = TargetAttention(vllm_config, _layer(vllm_config, 0))
        self._head_ED: Tensor | None = None

    @staticmethod
    def _check_engine(vllm_config: VllmConfig) -> None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if (size := getattr(vllm_config.parallel_config, name)) > 1:
                raise ValueError(f"{name}: {size}, but longdraft's drafts run on one GPU; set it to 1")
        if vllm_config.use_v2_model_runner:
            raise ValueError("vLLM's second model runner drafts differently; set VLLM_USE_V2_MODEL_RUNNER=0")

    def embed_input_ids(self, input_ids: Tensor, *_: Any, **__: Any) -> Tensor:
        return self.model.embed_tokens(input_ids)  # pyright: ignore[reportCallIssue]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Hidden states [N, D] to logits [N, V], -inf for tokens outside a restricted draft vocabulary."""
        ids_E = self.draft.token_ids
        if ids_E is None:
            return self.logits_processor(self.lm_head, hidden_states)
        if self._head_ED is None:
            self._head_ED = self.draft.own_rows(self.lm_head.weight)
        logits_NE = F.linear(hidden_states, self._head_ED)
        return logits_NE.new_full((len(logits_NE), self.vocab_size), -torch.inf).index_copy_(1, ids_E, logits_NE)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Report all weights as loaded: `load_draft` has loaded them, and checked config.json's digest."""
        return {name for name, _ in self.named_parameters()}


class Heads(_DraftModel):
    """TokenSwift's chains and Medusa's heads: pass i computes head i + 1 from the previous pass's state."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        n_tokens = vllm_config.speculative_config.num_speculative_tokens
        heads = cast(TokenSwift | Medusa, self.draft).config.n_heads
        if n_tokens > heads:
            raise ValueError(f"num_speculative_tokens: {n_tokens}, more than the draft has heads; give at most {heads}")
        # The residual stream after the last layer, which the final norm reads.
        self.config.eagle_aux_hidden_state_layer_ids = [vllm_config.model_config.get_total_num_hidden_layers()]

    def combine_hidden_states(self, hidden_states: Tensor) -> Tensor:
        """The only auxiliary state, unchanged."""
        return hidden_states

    def forward(
        self, input_ids: Tensor, positions: Tensor, hidden_states: Tensor, inputs_embeds: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns, both [N, D], what the LM head reads and the state for the next pass."""
        return cast(TokenSwift | Medusa, self.draft).step(self.cross.draft_index, hidden_states)


class Block(_DraftModel):
    """LongSpec's block. vLLM gives the token at position p the position p - 1. So RoPE is computed one position later,
    and the target's keys end at p - 1, as in training. vLLM skips the text's first token, which our own runtime
    reads while it is within the window."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        draft, target = self.draft, vllm_config.model_config.hf_text_config
        assert isinstance(draft, LongSpec)
        config, cross = draft.config, self.cross
        shape = (config.n_heads, config.n_kv_heads, config.head_dim)
        if shape != (cross.num_heads, cross.num_kv_heads, cross.head_size):
            raise ValueError(f"draft: its heads, key heads and widths are {shape}; serve the draft's own target")
        if draft.rope.length_dependent:
            raise ValueError(f"draft: RoPE of type {config.rope_config.type} depends on the length; not served by vLLM")
        if config.rope_config.rotated < config.head_dim:
            raise ValueError(
                "draft: RoPE rotates a part of each head of its target, which vLLM orders otherwise; not served by vLLM"
            )
        if target.model_type.startswith(SCALED):
            raise ValueError(f"target: {target.model_type} scales its embeddings; not served by vLLM with LongSpec")
        self.own = WindowAttention(cross, config.window + 1, vllm_config, _layer(vllm_config, 1))

    def forward(
        self, input_ids: Tensor, positions: Tensor, hidden_states: Tensor, inputs_embeds: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns what the LM head reads, [N, D], twice. `hidden_states` is not used."""
        draft, cross, own = self.draft, self.cross, self.own
        assert isinstance(draft, LongSpec)
        positions = positions[0] if positions.dim() == 2 else positions  # of Qwen-VL's three, which are equal for texts
        embeddings_ND = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds

        def attend_self(q_1NHd: Tensor, k_1NKd: Tensor, v_1NKd: Tensor) -> Tensor:
            q_N, k_N, v_N = (x[0].flatten(1).contiguous() for x in (q_1NHd, k_1NKd, v_1NKd))
            return own(q_N, k_N, v_N).view_as(q_1NHd)

        def attend_cross(q_1NHd: Tensor) -> Tensor:
            return cross(q_1NHd[0].flatten(1).contiguous(), None, None).view_as(q_1NHd)

        states_ND = draft.block(embeddings_ND[None], draft.tables(positions[None] + 1), attend_self, attend_cross)[0]
        return states_ND, states_ND


def _layer(vllm_config: VllmConfig, i: int) -> str:
    """The name of the draft's attention layer i. vLLM requires a number in it, counted from the target's layers."""
    return f"draft.layers.{vllm_config.model_config.get_total_num_hidden_layers() + i}.attention"
