"""A target pass over several rows against a pass over one: speculative decoding's verification against a plain step.

The decoder has a profile's shape, random weights and a cache of random rows, which cost as much as real ones. If it
would not fit into memory it has fewer layers, and `layers` says how many. The pass computes the logits of all rows;
drafting, choosing and accepting are not part of it. It is launched kernel by kernel, and on a GPU also as a CUDA graph.
"""

from dataclasses import replace

import torch

from longdraft.benchmarks.drafters.timing import width_curve
from longdraft.benchmarks.kernels.profiles import PROFILES, step_work
from longdraft.benchmarks.kernels.race import OURS, Bench, NotTimed
from longdraft.models.decoder import Decoder
from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.footprint import layer_weights
from longdraft.models.hf import build_decoder

MOST_ON_A_CPU = 4 * 2**30  # bytes of weights and cache: drawing and reading more takes minutes
WAYS = {f"{OURS}, plain launches": False, f"{OURS}, CUDA graph": True}  # whether passes are recorded


def random_decoder(bench: Bench, config: DecoderConfig) -> Decoder:
    """Build a decoder whose random weights keep activations near 1."""
    model = build_decoder(config, bench.dtype, bench.device)
    generator = torch.Generator(bench.device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
    return model


def measure(bench: Bench, profile: str, contexts: list[int], nodes: list[int]) -> list[dict]:
    """Return a row for each context, way of launching, and number of rows of the pass (always also 1)."""
    nodes = sorted({1, *nodes})
    layers = layers_that_fit(bench, PROFILES[profile], max(contexts) + max(nodes))
    config, models, found = replace(PROFILES[profile], n_layers=layers), list[Decoder](), []

    def curve(context: int, recorded: bool) -> dict[int, float]:
        if recorded and bench.device.type != "cuda":
            raise NotTimed("not available", "CUDA graphs need a CUDA device")
        if not models:
            models.append(random_decoder(bench, config))
        return width_curve(models[0], context, nodes, bench.turns, recorded)

    for context in contexts:
        for name, recorded in WAYS.items():
            seconds, status = bench.attempt(name, lambda at=context, how=recorded: curve(at, how))
            shape = {"benchmark": "step", "profile": profile, "context": context, "layers": layers}
            bench.log(", ".join(f"{key} {value}" for key, value in (shape | {"implementation": name} | status).items()))
            for n in nodes:
                found.append({**shape, "nodes": n, "implementation": name, **status})
                if seconds is not None:
                    found[-1] |= bench.figures(seconds[n], step_work(config, context, n, bench.dtype.itemsize))
                    found[-1]["over_one_row"] = seconds[n] / seconds[1]
    return found


def layers_that_fit(bench: Bench, config: DecoderConfig, capacity: int) -> int:
    """The number of layers whose weights and cache fit into the free memory; at least one."""
    room = 0.7 * bench.free_bytes
    room = room if bench.device.type == "cuda" else min(room, MOST_ON_A_CPU)
    layer, outside = layer_weights(config)
    cached = 2 * capacity * config.n_kv_heads * config.head_dim
    return max(1, min(config.n_layers, int((room / bench.dtype.itemsize - outside) // (layer + cached))))
