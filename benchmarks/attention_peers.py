"""What others have for tree attention: SDPA with a dense mask, FlexAttention, a flash kernel and a merge.

Each is prepared as well as it can be: grouped heads are folded into the query rows where that spares expanding K and V,
masks are additive and made once, what follows a flash kernel is one compiled kernel on a GPU. Not here: ours
(attention.py).
Shapes: N query tokens of the pass, S committed rows, H query heads, K key/value heads, Q = H / K * N, d head width.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longdraft.benchmarks.attention_case import Case, additive
from longdraft.benchmarks.candidates import Build, Run, Unavailable
from longdraft.kernels.backend import has_flash_attn, triton_kernels
from longdraft.kernels.reference.tree_attention import pack_tree

FLEX = "FlexAttention, block mask"


def _sdpa(case: Case) -> Run:
    _, k, v = case.heads_first()
    # One row reads all there is: no mask, which is the faster call.
    mask = None if case.n_query_tokens == 1 else additive(case.full_mask(), k.dtype).repeat(case.groups, 1)
    return lambda: case.unfolded(scaled_dot_product_attention(case.folded(), k, v, attn_mask=mask))


def _flex(case: Case) -> Run:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = case.heads_first()
    own, length, last = case.own_mask(), case.length, case.n_query_tokens - 1

    def opened(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        del batch, head
        return (key < length) | own[row.clamp(max=last), (key - length).clamp(0, last)]

    torch._dynamo.reset()  # else PyTorch stops compiling after some shapes
    blocks = create_block_mask(opened, 1, 1, case.n_query_tokens, k.shape[2], device=q.device.type)
    compiled = torch.compile(flex_attention, dynamic=False)

    def run() -> Tensor:
        with torch.no_grad():
            out = compiled(q, k, v, block_mask=blocks, enable_gqa=case.groups > 1)
        assert isinstance(out, Tensor)
        return out.transpose(1, 2)

    return run


def _own_rows(case: Case) -> Callable[[], tuple[Tensor, Tensor]]:
    """() -> (output [1, N, H, d], log-sum-exp [1, N, H]) over the pass's own rows: our Triton kernel on a GPU, as the
    authors of LongSpec do it; elsewhere a dense product in fp32."""
    stop = case.length + case.n_query_tokens
    k, v = case.keys_1CKd[:, case.length : stop], case.values_1CKd[:, case.length : stop]
    kernels = triton_kernels("tree_attention", k.device.type)
    if kernels is not None:
        bits_depths = pack_tree(case.tree_mask_1NN, 1, case.n_query_tokens, k.device)
        nothing = torch.zeros_like(case.lengths_1)
        is_tree = case.tree_mask_1NN is not None
        return lambda: kernels.tree_attention(case.q_1NHd, k, v, nothing, *bits_depths, is_tree)
    bias = additive(case.own_mask(), torch.float32).repeat(case.groups, 1)

    def run() -> tuple[Tensor, Tensor]:
        q_KQd, k_KNd, v_KNd = case.folded()[0].float(), k[0].transpose(0, 1).float(), v[0].transpose(0, 1).float()
        scores = q_KQd @ k_KNd.mT * k.shape[-1] ** -0.5 + bias
        lse = scores.logsumexp(-1, keepdim=True)
        return case.unfolded(((scores - lse).exp() @ v_KNd)[None]), case.unfolded(lse[None])[..., 0]

    return run


def _merge(old: Tensor, old_lse: Tensor, new: Tensor, new_lse: Tensor) -> Tensor:
    """Two attentions over different keys [1, N, H, d] into one, by their log-sum-exps [1, N, H]; in old's dtype."""
    share = torch.sigmoid(new_lse.float() - old_lse.float())[..., None]
    return torch.lerp(old.float(), new.float(), share).to(old.dtype)


def _merged(case: Case, prefix: Callable[[], tuple[Tensor, Tensor]]) -> Run:
    """A prefix's output and log-sum-exp, and the tree's, into one."""
    own = _own_rows(case)
    merge = torch.compile(_merge, dynamic=False) if case.q_1NHd.is_cuda else _merge
    return lambda: merge(*prefix(), *own())


def _flash_attn(case: Case) -> Run:
    if not case.q_1NHd.is_cuda:
        raise Unavailable("flash-attn needs a CUDA device")
    if not has_flash_attn():
        raise Unavailable("flash-attn is not installed; PyTorch's flash backend stands for it")
    from flash_attn import flash_attn_with_kvcache  # pyright: ignore[reportMissingImports]

    given, lengths = (case.q_1NHd, case.keys_1CKd, case.values_1CKd), case.lengths_1.int()

    def prefix() -> tuple[Tensor, Tensor]:
        old, lse_1HN = flash_attn_with_kvcache(*given, cache_seqlens=lengths, return_softmax_lse=True)
        return old, lse_1HN.transpose(1, 2)

    return _merged(case, prefix)


def _torch_flash(case: Case) -> Run:
    _, k, v = (x[:, :, : case.length] for x in case.heads_first())
    if k.is_cuda and k.dtype == torch.float32:
        raise Unavailable("PyTorch's flash backend takes fp16 and bf16 on a GPU")
    aten = torch.ops.aten
    flash = aten._scaled_dot_product_flash_attention if k.is_cuda else aten._scaled_dot_product_flash_attention_for_cpu

    def prefix() -> tuple[Tensor, Tensor]:
        old_1KQd, lse_1KQ = flash(case.folded(), k, v)[:2]
        return case.unfolded(old_1KQd), case.unfolded(lse_1KQ[..., None])[..., 0]

    return _merged(case, prefix)


PEERS: dict[str, Build] = {
    "SDPA, dense mask": _sdpa,
    FLEX: _flex,  # before the others that compile, for it clears what was compiled
    "flash-attn prefix + tree": _flash_attn,
    "PyTorch flash prefix + tree": _torch_flash,
}
