"""Plain decoding against transformers' `generate` with the same random weights: time to the first token, and tokens per
second after it beside the read floor.

Both decode the same prompts in turns. Before that, a model of the profile's widths and few layers must give the same
tokens in fp32; in bf16 the tokens of random weights depend on rounding. If weights and cache would not fit into memory,
the model has fewer layers, and `layers` says how many.
"""

import statistics
from dataclasses import replace
from typing import Any

import torch

from longdraft.benchmarks.drafters.answering import EngineAnswers, TransformersAnswers
from longdraft.benchmarks.drafters.metrics import same_tokens, totals
from longdraft.benchmarks.drafters.progress import UNWATCHED
from longdraft.benchmarks.drafters.record import Answer
from longdraft.benchmarks.kernels.candidates import OURS, figures, ratios, refused
from longdraft.benchmarks.kernels.profiles import Profile, Work
from longdraft.benchmarks.kernels.step import SMALL_LAYERS, layers_that_fit, too_large
from longdraft.benchmarks.kernels.timing import Bench, Times
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.models.from_transformers import target_from_transformers

PEER = "transformers generate"
SMALL_PROMPT, SMALL_TOKENS = 40, 16


def transformers_model(
    profile: Profile, n_layers: int, positions: int, device: torch.device, dtype: torch.dtype
) -> Any:
    """transformers' own class for the profile's family, with random weights large enough to keep logits apart."""
    from transformers import AutoModelForCausalLM

    config = profile.transformers_config(n_layers, positions)
    config.initializer_range = 0.05
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def draw_prompts(profile: Profile, n_prompts: int, n_tokens: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(n_tokens)
    return torch.randint(profile.vocab_size, (n_prompts, n_tokens), generator=generator).tolist()


def both(model: Any, engine: Engine, prompts: list[list[int]], new_tokens: int) -> dict[str, list[Answer]]:
    """Answers of our engine and of transformers, which take turns at each prompt after a warm-up."""
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    answerers = {OURS: EngineAnswers(engine), PEER: TransformersAnswers(model, ())}
    for answerer in answerers.values():
        answerer.answer(prompts[0], replace(params, max_new_tokens=4), UNWATCHED)
    found: dict[str, list[Answer]] = {name: [] for name in answerers}
    for prompt in prompts:
        for name, answerer in answerers.items():
            found[name].append(answerer.answer(prompt, params, UNWATCHED))
    return found


def difference(bench: Bench, profile: Profile) -> str | None:
    """How many tokens of a small model in fp32 differ from transformers', in words; None if none do."""
    layers, positions = min(SMALL_LAYERS, profile.n_layers), SMALL_PROMPT + SMALL_TOKENS
    model = transformers_model(profile, layers, positions, bench.device, torch.float32)
    prompts = draw_prompts(profile, 2, SMALL_PROMPT)
    engine = Engine(target_from_transformers(model))
    found = both(model, engine, prompts, SMALL_TOKENS)
    equal, tokens = same_tokens(*([answer.tokens for answer in answers] for answers in found.values()))
    return None if equal == tokens else f"{tokens - equal} of {tokens} tokens in fp32 are not transformers'"


def measure(bench: Bench, profile: Profile, contexts: list[int], new_tokens: int, n_prompts: int = 3) -> list[dict]:
    """Return rows of decoding and of `prefill`, which ends with the first token, for each context: ours and
    transformers'."""
    bench.log(f"decode, {profile.name}: tokens in fp32 against transformers'")
    base = {"benchmark": "decode", "profile": profile.name, "layers_of_model": profile.n_layers}
    base |= {"new_tokens": new_tokens, "prompts": n_prompts}
    shapes = [{**base, "context": context} for context in contexts]
    # In fp32, with q, k, v, gate and up of all layers twice.
    reason = bench.spent if bench.left < 0 else too_large(bench, profile, 8)
    if reason is not None:
        return [row for shape in shapes for row in refused(shape, (OURS, PEER), reason)]
    if (reason := difference(bench, profile)) is not None:
        bench.log(f"  {OURS}: wrong: {reason}")
        wrong = {"status": "wrong", "reason": reason}
        return [{**shape, "implementation": OURS, **wrong} for shape in shapes]
    positions = max(contexts) + new_tokens
    # Our q, k, v, gate and up exist beside transformers', and its cache beside ours.
    n_layers = layers_that_fit(bench, profile, positions, copies=2)
    model = transformers_model(profile, n_layers, positions, bench.device, bench.dtype)
    engine = Engine(target_from_transformers(model), keep_prompts=False)
    found = []
    for shape in shapes:
        bench.log(f"decode, {profile.name}: {n_layers} of {profile.n_layers} layers, {shape['context']} tokens before")
        if bench.left < 0:
            found += refused(shape, (OURS, PEER), bench.spent)
        else:
            found += _measure(bench, profile, model, engine, shape | {"layers": n_layers})
    return found


def _measure(bench: Bench, profile: Profile, model: Any, engine: Engine, shape: dict) -> list[dict]:
    prompts = draw_prompts(profile, shape["prompts"], shape["context"])
    answers = both(model, engine, prompts, shape["new_tokens"])
    token = {name: [a.decode_seconds / len(a.tokens) for a in found] for name, found in answers.items()}
    middle = shape["context"] + shape["new_tokens"] // 2
    decoding = _rows(bench, shape, token, profile.step_work(middle, 1, bench.itemsize, shape["layers"]))
    for row in decoding:
        row["tokens_per_second"] = 1e3 / row["ms"]
    decoding[0]["host_share"] = statistics.mean(totals([answer])["host_share"] for answer in answers[OURS])
    # transformers' prefill is a call that generates one token.
    first = {OURS: [a.first_token_seconds for a in answers[OURS]], PEER: [a.prefill_seconds for a in answers[PEER]]}
    work = profile.prefill_work(shape["context"], bench.itemsize, shape["layers"])
    return decoding + _rows(bench, shape | {"benchmark": "prefill"}, first, work)


def _rows(bench: Bench, shape: dict, seconds: dict[str, list[float]], work: Work) -> list[dict]:
    rows = [
        {**shape, "implementation": name, "status": "ok", **figures(bench, Times.of(found), work)}
        for name, found in seconds.items()
    ]
    ratios(rows)
    return rows
