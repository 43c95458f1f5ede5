"""Heads as the checkpoint that vLLM reads with `method: medusa` (its models/medusa.py and configs/medusa.py; one shared
LM head since its pull request 10454). vLLM 0.33 removed the method: 0.32 is the last version that reads this.

In vLLM, head i takes the target's post-norm state x through its layers, x + SiLU(W x) each, and then through the LM
head; all heads have the same number of layers. Its argmax is the i-th token after the one that the target chose from x,
which is what our head i + 1 proposes. The file:

    blocks.{i}.layers.{j}.weight   [D, D], head i = 0 .. I-1, layer j
    lm_heads.0.weight              [V, D], the target's, for all heads: vLLM does not share the target's own
    token_map                      [E], with a restricted vocabulary, whose rows [E, D] alone are then in the LM head

Medusa's heads are one layer each. Head i of a chain is I layers: the blocks 0 .. i, and then zeros, since SiLU(0) = 0
makes a zero block the identity. Not here: which run is exported, and what is checked afterwards (export.py).
Shapes: D hidden, V vocabulary, E draft vocabulary, I heads; ... any leading shape.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from longdraft.models.draft_files import CONFIG, WEIGHTS, write_pair
from longdraft.models.drafts.medusa import Medusa
from longdraft.models.drafts.tokenswift import TokenSwift
from longdraft.models.target import Target
from longdraft.train.config_sections import DraftSection, LongSpecSection, TokenSwiftSection

NAME = "vllm-medusa"
NEWEST_VLLM = "0.32"
HEAD, TOKENS = "lm_heads.0.weight", "token_map"


def check_section(section: DraftSection) -> None:
    """Raises ValueError, with the reason, for drafts that this format cannot hold."""
    if isinstance(section, LongSpecSection):
        what, why = "longspec", "its block reads tokens and the target's cache, vLLM's heads one hidden state"
    elif isinstance(section, TokenSwiftSection) and section.kind != "silu_chain":
        what, why = f"tokenswift's {section.kind}", "its heads have norms, no SiLU, and read the pre-norm state"
    else:
        return
    raise ValueError(
        f"format: {NAME} cannot hold {what}: {why}; export it as longdraft, or train draft.method=medusa or "
        "draft.kind=silu_chain"
    )


def save(
    folder: Path,
    draft: TokenSwift | Medusa,
    target: Target,
    about: dict[str, Any],
    check: Callable[[Path], None] = lambda staged: None,
) -> None:
    """Write config.json and model.safetensors, in the draft's dtype. `about` is kept under a key of ours, with the
    digest of the weights. `check` and the ValueError are those of `write_pair`.

    vLLM takes any key that contains "num" and "heads" or "layers" for the number of heads or layers, so there must be
    no other. It requires `num_speculative_tokens` unless `n_predict` is given.
    """
    blocks = [cast(nn.Linear, proj).weight.detach() for proj in draft.proj]
    n_heads, identity = len(blocks), torch.zeros_like(blocks[0])
    if isinstance(draft, TokenSwift):
        heads = [[blocks[j] if j <= i else identity for j in range(n_heads)] for i in range(n_heads)]
    else:
        heads = [[block] for block in blocks]
    vocab_size = target.model.config.vocab_size
    head = draft.head(target.model.lm_head.weight.detach()).to(identity.dtype)
    content = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": draft.config.hidden_size,
        "vocab_size": vocab_size,
        "truncated_vocab_size": len(head),
        "num_heads": n_heads,
        "num_hidden_layers": len(heads[0]),
        "n_predict": n_heads,
        "original_lm_head": True,
        "medusa_fc_bias": False,
        "torch_dtype": str(identity.dtype).removeprefix("torch."),
    }
    # Copies, since safetensors refuses tensors that share memory.
    weights = {f"blocks.{i}.layers.{j}.weight": w.clone() for i, head in enumerate(heads) for j, w in enumerate(head)}
    weights |= {HEAD: head} | ({} if draft.token_ids is None else {TOKENS: draft.token_ids})
    write_pair(folder, lambda digest: content | {"longdraft": about | {"weights_sha256": digest}}, weights, check)


class VllmMedusa:
    """The heads of such a folder, computed as vLLM computes them, from the two files alone."""

    needs = frozenset({"post_norm"})

    def __init__(self, folder: Path, device: torch.device):
        content = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        weights = load_file(folder / WEIGHTS, str(device))
        heads, layers = range(content["num_heads"]), range(content["num_hidden_layers"])
        self.heads = [[weights[f"blocks.{i}.layers.{j}.weight"] for j in layers] for i in heads]
        self.lm_head, self.token_ids = weights[HEAD], weights.get(TOKENS)

    def states(self, hidden: Tensor) -> list[Tensor]:
        """What the LM head reads for each head, [..., D], given the target's post-norm state [..., D]."""
        states = []
        for head in self.heads:
            state = hidden
            for weight_DD in head:
                state = state + F.silu(F.linear(state, weight_DD))
            states.append(state)
        return states
