"""A target pass over several rows against a pass over one: speculative decoding's verification against a plain step.

The decoder has a profile's shape, random weights and a cache of random rows, which cost as much as real ones. If it
would not fit into memory it has fewer layers, and `layers` says how many. The pass computes the logits of all rows;
drafting, choosing and accepting are not part of it. It is launched kernel by kernel, and on a GPU also as a CUDA graph.
Shapes: N query tokens, V vocabulary.
"""

import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from longdraft.benchmarks.kernels.attention import random_tree
from longdraft.benchmarks.kernels.candidates import OURS, Build, Run, Unavailable, race, too_far
from longdraft.benchmarks.kernels.profiles import Profile
from longdraft.benchmarks.kernels.timing import Bench
from longdraft.infer.graphs import cuda_graphs
from longdraft.kernels.cpu.library import decoding
from longdraft.models.decoder import Decoder
from longdraft.models.hf import build_decoder
from longdraft.models.hf_config import decoder_config
from longdraft.models.kv_cache import KVCache
from longdraft.models.passes import Pass

SMALL_LAYERS, SMALL_CONTEXT, COMPARED_NODES = 2, 33, 8  # for the model whose logits are compared
MOST_ON_A_CPU = 4 * 2**30  # bytes of weights and cache: drawing and reading more takes minutes


@dataclass
class Case:
    """A model, the committed rows of one slot, and a tree. `exact` and `plain` are logits of the `compared` nodes, each
    from a pass over its own history without a cache, in fp32 and in the model's dtype; None if none are compared."""

    model: Decoder
    cache: KVCache
    tokens_1N: Tensor
    positions_1N: Tensor
    tree_mask_1NN: Tensor | None
    compared: list[int]
    exact: Tensor | None = None
    plain: Tensor | None = None


def random_decoder(bench: Bench, profile: Profile, n_layers: int, max_positions: int) -> Decoder:
    """Build a decoder whose random weights keep activations near 1."""
    model = build_decoder(
        decoder_config(profile.transformers_config(n_layers, max_positions)), bench.dtype, bench.device
    )
    generator = torch.Generator(bench.device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
    return model


def _tokens(model: Decoder, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    tokens_1N = torch.randint(model.config.vocab_size, (1, count), generator=generator)
    return tokens_1N.to(model.embed_tokens.weight.device)


def make_case(bench: Bench, model: Decoder, cache: KVCache, nodes: int) -> Case:
    """A tree pass after the cache's rows, with nothing to compare."""
    tree = random_tree(nodes).to(bench.device)[None]
    positions = int(cache.lengths[0]) + tree.sum(-1) - 1
    return Case(model, cache, _tokens(model, nodes), positions, None if nodes == 1 else tree, [])


@torch.no_grad()
def make_small_case(bench: Bench, profile: Profile, nodes: int) -> Case:
    """The same heads, widths and tree in a model of few layers, with a cache that it filled itself, to compare."""
    capacity = SMALL_CONTEXT + nodes
    model = random_decoder(bench, profile, min(SMALL_LAYERS, profile.n_layers), capacity)
    context, cache = _tokens(model, SMALL_CONTEXT), model.new_cache(1, capacity)
    model(Pass(context, cache=cache, needs={"last_kv"}))
    cache.commit(None, torch.tensor([SMALL_CONTEXT], device=bench.device))
    case = make_case(bench, model, cache, nodes)
    case.compared = sorted({*range(0, nodes, -(-nodes // COMPARED_NODES)), nodes - 1})
    wide = copy.deepcopy(model).float()
    case.exact, case.plain = (_alone(one, case, context) for one in (wide, model))
    return case


def _alone(model: Decoder, case: Case, context: Tensor) -> Tensor:
    """Logits [len(compared), V] of each compared node from a causal pass over its own history."""
    found = []
    for node in case.compared:
        path = slice(node, node + 1) if case.tree_mask_1NN is None else case.tree_mask_1NN[0, node]
        history = torch.cat((context, case.tokens_1N[:, path]), 1)
        last = torch.tensor([[history.shape[1] - 1]], device=history.device)
        found.append(model(Pass(history, logits_at_BR=last)).logits[0, 0])
    return torch.stack(found)


def _launches(case: Case) -> Run:
    def run() -> Tensor:
        with torch.no_grad(), decoding(case.tokens_1N.device.type == "cpu"):  # as the engine's passes
            output = case.model(
                Pass(case.tokens_1N, cache=case.cache, positions_BT=case.positions_1N, tree_mask_BTT=case.tree_mask_1NN)
            )
        return output.logits

    return run


def _graph(case: Case) -> Run:
    """The same launches, recorded and replayed in the same way as the engine's steps."""
    if not case.tokens_1N.is_cuda:
        raise Unavailable("CUDA graphs need a CUDA device")
    launches, graphs = _launches(case), cuda_graphs(case.tokens_1N.device)

    def run() -> Tensor:
        return graphs.run(("pass",), (case.model, case.cache), launches)

    run()  # launched kernel by kernel
    run()  # recorded; replayed from now on, so that a replay is compared
    return run


WAYS: dict[str, Build] = {f"{OURS}, plain launches": _launches, f"{OURS}, CUDA graph": _graph}


def verdict(_: str, case: Any, logits_1NV: Tensor) -> str | None:
    """Apply the rule of candidates.py to the norm of the compared logits' error."""
    return too_far(logits_1NV[0, case.compared], case.exact, case.plain, largest=False)


def measure(
    bench: Bench, profile: Profile, contexts: list[int], nodes: list[int], ways: dict[str, Build] = WAYS
) -> list[dict]:
    """Return a row for each context, number of rows of the pass (always also 1) and way of launching."""
    nodes = sorted({1, *nodes})
    capacity = max(contexts) + max(nodes)
    layers = layers_that_fit(bench, profile, capacity)
    small = cache(lambda n: make_small_case(bench, profile, n))
    model = cache(lambda: random_decoder(bench, profile, layers, capacity))
    filled = cache(lambda context: _filled_cache(model(), context, context + max(nodes)))
    found = []
    for context in contexts:
        rows = []
        for n in nodes:
            shape = {"benchmark": "step", "profile": profile.name, "context": context, "nodes": n, "layers": layers}
            work = profile.step_work(context, n, bench.dtype.itemsize, layers)

            def cases(context=context, n=n) -> list[Case]:
                return [small(n), make_case(bench, model(), filled(context), n)]

            rows += race(bench, shape, ways, cases, verdict, work)
        one = {row["implementation"]: row["ms"] for row in rows if row["nodes"] == 1 and "ms" in row}
        for row in rows:
            if "ms" in row and row["implementation"] in one:
                row["over_one_row"] = row["ms"] / one[row["implementation"]]
        filled.cache_clear()
        found += rows
    return found


def _filled_cache(model: Decoder, context: int, capacity: int) -> KVCache:
    """A cache of random rows."""
    made = model.new_cache(1, capacity)
    made.keys.normal_()
    made.values.normal_()
    made.commit(None, torch.tensor([context], device=made.keys.device))
    return made


def layers_that_fit(bench: Bench, profile: Profile, capacity: int) -> int:
    """The number of layers whose weights and cache fit into the free memory; at least one."""
    room = 0.7 * bench.free_bytes
    room = room if bench.device.type == "cuda" else min(room, MOST_ON_A_CPU)
    cached = 2 * capacity * profile.n_kv_heads * profile.head_dim
    fit = int((room / bench.dtype.itemsize - profile.parameters(0)) // (profile.layer_parameters + cached))
    return max(1, min(profile.n_layers, fit))
