"""Decoding with the shapes of Llama-3.1-8B after 2,048 to 100,000 tokens, without a checkpoint: its weights are random.

`python benchmarks/checks/long_contexts.py` prints a JSON object a line: for each context and drafter the time to the
first token and of a step, the speedup over plain decoding, and the engine's log, such as the seconds of recording.
Costs are real, but the acceptance is forced (benchmarks/drafters/forced.py) to the tokens a step in the papers. It also
measures transformers' first token, passes of 1 and 64 rows, and with --out profiles a prefill and plain steps.
"""

import argparse
import gc
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from longdraft.benchmarks.drafters.answering import of_engine, of_transformers
from longdraft.benchmarks.drafters.forced import Blank, Forced, at_tokens_per_step
from longdraft.benchmarks.drafters.metrics import totals
from longdraft.benchmarks.drafters.record import Answer
from longdraft.benchmarks.drafters.timing import width_curve
from longdraft.benchmarks.kernels.race import PROFILES
from longdraft.infer.drafters.base import Drafter
from longdraft.infer.drafters.build import build_drafter
from longdraft.infer.drafters.token_recycling import CANDIDATES, TokenRecycling
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.models.device import on_device, option_device
from longdraft.models.drafts.heads import TokenSwift, TokenSwiftConfig
from longdraft.models.drafts.longspec import LongSpec, LongSpecConfig
from longdraft.models.hf import build_decoder
from longdraft.models.hf_config import decoder_config
from longdraft.models.target import Target

ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE |= {"original_max_position_embeddings": 8192}
# What benchmarks/kernels/race.py lacks of a shape: the number of layers, and the width of their feed-forward.
LAYERS = {"llama3.1-8b": (32, 14_336), "tiny": (2, 96)}
# Forced tokens a step: all; LongSpec's table 1 (Llama-3-8B, 2.99 to 3.39); TokenSwift's table 12 (Llama-3.1-8B, 20,480
# tokens: alpha 0.66, which is 4 * 0.66 + 1); Token Recycling's table 1 (Vicuna-7B).
TOKENS_A_STEP = {"oracle": 13.0, "longspec": 3.3, "tokenswift": 3.64, "token_recycling": 2.7}
SHORT, LONG = 512, 4096  # tokens of the first prompts; of those that are read once
WIDTHS, WIDE_AFTER = (1, 64), {"llama3.1-8b": (8192, 65_536), "tiny": (16,)}  # rows and contexts of single passes


def random_target(shape: str, device: torch.device, dtype: torch.dtype) -> Target:
    """A target of this shape whose weights are drawn on the device, without a tokenizer."""
    profile, (n_layers, feed_forward) = PROFILES[shape], LAYERS[shape]
    hf_config = LlamaConfig(
        vocab_size=profile.vocab_size, hidden_size=profile.hidden_size, intermediate_size=feed_forward,
        num_hidden_layers=n_layers, num_attention_heads=profile.n_heads, num_key_value_heads=profile.n_kv_heads,
        head_dim=profile.head_dim, max_position_embeddings=131_072, rope_parameters=ROPE,
    )  # fmt: skip
    decoder = build_decoder(decoder_config(hf_config), dtype, device)
    generator = torch.Generator(device).manual_seed(0)
    for name, weight in decoder.named_parameters():
        weight.data.normal_(float("norm" in name), 0.02, generator=generator)
    return Target(decoder, None, f"random {shape}", hf_config, {"config": "random", "tokenizer": "none"}, ())


def build(name: str, target: Target, plain: Engine) -> Drafter:
    """A drafter, with a random draft if it has one, whose acceptance is forced to TOKENS_A_STEP.

    plain: continues plain decoding where a draft's pass flips a near-tie. With random weights there are many of these,
    and this engine has kept the prompts, which take seconds to prefill.
    """
    config, weight = target.model.config, target.model.embed_tokens.weight
    with on_device(weight.device):
        if name == "oracle":
            inner: Drafter = Blank()
        elif name == "longspec":
            with torch.device(weight.device):  # it is large, and created in fp32
                draft = LongSpec(LongSpecConfig.for_target(config), None, target.model)
            inner = build_drafter(name, target, draft.to(weight).requires_grad_(False).eval())
        elif name == "tokenswift":
            heads = TokenSwift(TokenSwiftConfig(hidden_size=config.hidden_size, rms_norm_eps=config.rms_norm_eps))
            inner = build_drafter(name, target, heads.to(weight).requires_grad_(False).eval())
        else:
            inner = TokenRecycling(target)
            tokens_V = torch.arange(config.vocab_size, device=weight.device)
            # As after long use, because a random text is too short to fill the table.
            inner.candidates[:-2] = ((tokens_V[:, None] + 1 + tokens_V[:CANDIDATES]) % config.vocab_size).int()
        return Forced(inner, target, at_tokens_per_step(TOKENS_A_STEP[name], inner.max_depth), plain=plain)


def measure(
    engine: Engine, lines: list[str], prompts: list[list[int]], params: SamplingParams, texts: list[list[int]]
) -> dict:
    """The figures of one engine over prompts of one length.

    Args:
        lines: where the engine's log goes.
        texts: plain decoding's answers, which forced acceptance follows; empty for plain decoding, which appends them.
    """
    gc.collect()  # frees the previous engine, whose recorded work has reference cycles
    lines.clear()
    firsts, drafter, device, once = dict[int, float](), engine.drafter, engine.runner.device, of_engine(engine)

    def answer(prompt: list[int], params: SamplingParams) -> Answer:
        found = once(prompt, params)
        firsts.setdefault(id(prompt), found.first_token_seconds)  # not of a repetition, which reuses the kept prompt
        return found

    if isinstance(drafter, Forced):
        rehearsed = engine.runner.rehearsed  # decoding it plainly would replace the kept prompt
        drafter.keep(rehearsed.prompt, rehearsed.sampling, [])
        for prompt, text in zip(prompts, texts, strict=True):
            drafter.keep(prompt, params, text)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    answers = [(drafter.answering(answer) if isinstance(drafter, Forced) else answer)(one, params) for one in prompts]
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    texts.extend([] if texts else [one.tokens for one in answers])
    found = totals(answers)
    return {
        "first_token_s": median(firsts.values()), "tokens_per_s": found["tokens_per_second"],
        "ms_per_step": 1e3 * found["tokens_per_step"] / found["tokens_per_second"],
        **{name: found[name] for name in ("tokens_per_step", "draft_ms", "nodes_per_step")},
        "peak_gib": peak / 2**30, "engine": lines.copy(),
    }  # fmt: skip


def of_transformers_model(target: Target, prompts: Sequence[list[list[int]]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Seconds to the first token of transformers' model of this shape, for prompts of several lengths, after a warm-up
    with the first one. It prefills a prompt in one pass, for which memory may be too small."""
    weight = target.model.embed_tokens.weight
    with torch.device(weight.device):
        model = AutoModelForCausalLM.from_config(target.hf_config, dtype=weight.dtype).eval()
    answer, one_token = of_transformers(model, ()), SamplingParams(max_new_tokens=1)
    answer(prompts[0][0], one_token)
    for alike in prompts:
        try:
            found = {"first_token_s": median(answer(prompt, one_token).first_token_seconds for prompt in alike)}
        except torch.OutOfMemoryError as error:
            found = {"problem": str(error)}
        yield f"transformers after {len(alike[0])}", found


def profile(work: Callable[[], object], device: torch.device) -> str:
    """PyTorch's profiles of a call, after a warm-up call: sorted by device time, and by host time."""
    from torch.profiler import ProfilerActivity, profile

    work()
    on_gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    with profile(activities=[ProfilerActivity.CPU, *on_gpu]) as seen:
        work()
    keys = ("self_device_time_total", "self_cpu_time_total") if on_gpu else ("self_cpu_time_total",)
    return "\n".join(seen.key_averages().table(sort_by=key, row_limit=30, max_name_column_width=80) for key in keys)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Decoding after long prompts, with random weights.")
    parser.add_argument("--shape", choices=LAYERS, default="llama3.1-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--contexts", type=int, nargs="+", default=[99_999, 32_767, 2048], help="tokens of the prompts")
    parser.add_argument("--drafters", nargs="+", choices=TOKENS_A_STEP, default=list(TOKENS_A_STEP))
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="also write prefill.txt and steps.txt, two profiles")
    args = parser.parse_args(argv)
    try:
        device = option_device(args.device)
    except ValueError as error:
        parser.error(str(error))
    logging.getLogger("transformers").setLevel(logging.ERROR)
    target = random_target(args.shape, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    params = SamplingParams(seed=0, max_new_tokens=args.new_tokens, ignore_eos=True)  # texts are kept by seed
    generator = torch.Generator().manual_seed(0)

    def draw(length: int, count: int) -> list[list[int]]:
        return torch.randint(target.hf_config.vocab_size, (count, length), generator=generator).tolist()

    def say(key: str, found: dict[str, Any]) -> None:
        print(json.dumps({key: found}), flush=True)

    prompts, lines = draw(SHORT, 3), list[str]()
    plain = Engine(target, log=lines.append)
    say(f"plain after {SHORT}", measure(plain, lines, prompts, params, []))
    for key, found in of_transformers_model(target, [prompts, *(draw(context, 1) for context in args.contexts)]):
        say(key, found)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # not while work is recorded
    for context in args.contexts:
        # A long prompt takes seconds to prefill, and a drafter's speed hardly differs from one to the next.
        prompts, texts = draw(context, 3 if context < LONG else 1), list[list[int]]()
        usual = measure(plain, lines, prompts, params, texts)
        say(f"plain after {context}", usual)
        for name in args.drafters:
            engine = Engine(target, build(name, target, plain), nodes=None, log=lines.append)
            found = measure(engine, lines, prompts, params, texts)
            del engine
            say(f"{name} after {context}", {**found, "over_plain": found["tokens_per_s"] / usual["tokens_per_s"]})
    for context in WIDE_AFTER[args.shape]:  # last, because their tuning stays for all engines of the process
        say(f"passes after {context}", {f"{n} rows": s for n, s in width_curve(target.model, context, WIDTHS).items()})
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        engine = Engine(target, keep_prompts=False)
        prompts = draw(min(args.contexts), 1)
        for file, n_tokens in (("prefill.txt", 1), ("steps.txt", args.new_tokens)):
            work = partial(engine.generate, prompts, replace(params, max_new_tokens=n_tokens))
            (args.out / file).write_text(profile(work, device) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
