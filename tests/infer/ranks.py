"""One rank of the test of tensor parallelism in test_exactness.py: decodes with its share of each target.

Its argument is JSON: `cases`, each [drafter, target, how], and `out`, where `out`-RANK gets their tokens by case. How:
fp32, bf16, or recorded on a pretended GPU.
"""

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from torch import nn

from longdraft.infer.drafters import triforce
from longdraft.infer.drafters.combine import Combined
from longdraft.infer.drafters.small_model import SmallModelDrafter
from longdraft.infer.engine import Engine
from longdraft.infer.requests import read_requests
from longdraft.infer.sampling import SamplingParams
from longdraft.kernels.cpu import library
from longdraft.models import tensor_parallel
from longdraft.models.hf import build_decoder
from longdraft.models.passes import Pass
from longdraft.models.target import Target
from longdraft.models.tensor_parallel import join, leave, share


def load(file: str) -> ModuleType:
    spec = spec_from_file_location(Path(file).stem, Path(__file__).parent / file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def share_of(target: Target, dtype: torch.dtype) -> Target:
    """This rank's share of a target."""
    model, config = target.model, target.model.config
    part, weights = build_decoder(config, torch.float32, "cpu", ranks), dict(model.named_parameters())
    for name, parameter in part.named_parameters():
        parameter.data.copy_(share(name, weights[name].data, parameter.shape, config, ranks))
    return replace(target, model=part.to(dtype))


def served(engine: Engine) -> dict[int, list[int]]:
    """The tokens of two requests of the first rank, whose reader cancels one after the last arrivals."""
    params, asked = SamplingParams(max_new_tokens=exactness.NEW), exactness.prompts("gqa", "overflow")[:2]
    arrivals, ended = iter([read_requests(engine.target, asked, params, engine.max_length), None]), {}
    for piece in engine.serve(lambda idle: next(arrivals) if ranks.rank == 0 else ()):
        if ranks.rank == 0 and piece.index == 1:
            engine.cancel(1)
        if piece.generation:
            ended[piece.index] = piece.generation.tokens
    return ended


def bits_depend_on_width(target: Target) -> bool:
    """Whether a token's logits in a pass of one row are others than in wider passes."""
    cache = target.model.new_cache(1, 80)
    tokens_1T = torch.arange(1, 41)[None] % exactness.VOCAB
    target.model(Pass(tokens_1T, cache))
    cache.commit(None, torch.tensor([40]))
    with library.decoding(True):
        passes = [target.model(Pass(tokens_1T[:, :width], cache)).logits[:, 0] for width in (1, 2, 7, 16)]
    return any(not torch.equal(logits, passes[0]) for logits in passes)


OPERATIONS = torch.library.Library("ranks", "DEF")


def make_collectives_operations() -> None:
    """A pretended device (tests/pretended_cuda.py) records and replays operations of PyTorch alone."""
    real, found = tensor_parallel.dist, torch.ops.ranks
    for signature, work in (
        ("gather(Tensor(a!) parts, Tensor x) -> ()", tensor_parallel._gather),
        ("first(Tensor(a!) x) -> ()", lambda x: real.broadcast(x, 0)),
        ("total(Tensor(a!) x) -> ()", real.all_reduce),
    ):
        OPERATIONS.define(signature)
        OPERATIONS.impl(signature.partition("(")[0], work, "CompositeExplicitAutograd")

    def all_reduce(x: torch.Tensor, *how: object) -> None:
        (real.all_reduce if how else found.total)(x, *how)

    replaced = {"broadcast": lambda x, _: found.first(x), "all_reduce": all_reduce}
    tensor_parallel._gather, tensor_parallel.dist = found.gather, SimpleNamespace(**vars(real) | replaced)


def decode(name: str, kind: str, precision: str, put: Callable[[nn.Module], object]) -> list[list[int]]:
    """The tokens that a drafter decodes. put: brings a network to its device."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    shape = {"vocab_size": exactness.VOCAB, "max_positions": exactness.POSITIONS}
    whole = tiny.make_tiny_target(n_kv_heads=exactness.HEADS.get(kind, 2), **shape, **exactness.OTHERS.get(kind, {}))
    # But in fp32 the ranks' drafts differ, and all nodes are verified.
    differ = ranks.rank == 1 and precision != "fp32"

    def drawn(draft, target):
        draft = randomised(draft, target, std=0.5 if differ else 0.3)
        put(draft)
        return draft

    exactness.randomised = drawn
    layers = exactness.SMALLER.get(kind, {"n_layers": 1})
    small = tiny.make_tiny_target(n_kv_heads=1, seed=6 if differ else 5, dtype=dtype, **layers, **shape)
    target = share_of(whole, dtype)
    experts = target.model.config.experts  # whose C kernels need widths that are multiples of 8
    in_c = library.library() is not None and not (experts and experts.size % 8)
    assert not (in_c and bits_depend_on_width(target)), (kind, precision)
    put(target.model)
    put(small.model)
    parts = [exactness.DRAFTERS[part](target, small) for part in name.split("+") if part != "plain"]
    drafter = Combined(parts) if len(parts) > 1 else [*parts, "plain"][0]
    nodes = "auto" if precision == "fp32" else None
    engine, asked = Engine(target, drafter, slots=3, nodes=nodes), exactness.prompts(kind, "overflow")
    cases = exactness.every(given["samplings"])
    params = [replace(exactness.SAMPLINGS[one], seed=1500 + i, max_new_tokens=exactness.NEW) for one, i in cases]
    if ranks.rank == 1:  # the first rank's requests count
        asked, params = asked[::-1], [SamplingParams(seed=1)] * len(params)
    tokens = exactness.decoded(engine, [asked[index] for _, index in cases], params)
    assert bool(len(engine.runner.graphs)) == (precision == "recorded")
    return tokens


exactness, tiny, pretended = map(load, ("test_exactness.py", "../tiny_target.py", "../pretended_cuda.py"))
randomised = exactness.randomised
given, found = json.loads(sys.argv[1]), {}
ranks = join(2, torch.device("cpu"))
SmallModelDrafter.window, triforce.STRIDE = 12, 10
make_collectives_operations()
for name, kind, precision in given["cases"]:
    with pretended.PretendedCuda() if precision == "recorded" else nullcontext() as gpu:
        put = gpu.put if gpu is not None else lambda network: network
        found[f"{name} {kind} {precision}"] = decode(name, kind, precision, put)
whole = tiny.make_tiny_target(vocab_size=exactness.VOCAB, max_positions=exactness.POSITIONS)
found["served"] = served(Engine(share_of(whole, torch.float32), slots=2))
Path(f"{given['out']}-{ranks.rank}").write_text(json.dumps(found))
leave()
