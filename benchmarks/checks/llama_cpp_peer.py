"""Measures llama.cpp on a CPU beside this runtime, in one process with the same prompts and threads.

SmolLM2 comes as a GGUF file whose layers are in 4-bit blocks (Q4_1) and whose LM head is in 8-bit blocks. llama.cpp
decodes this file and two that it writes from its values, in bf16 and in 8-bit blocks (Q8_0); we decode the values in
bf16. All continue the same prompts greedily, one prompt at a time, in turns. The table has medians over prompts and
rounds: tokens/s of the prompt up to the first piece of the answer, tokens/s behind it, and the ratio of the latter to
llama.cpp's in bf16 in the same round. The last line is one JSON object.

llama.cpp is compiled for this processor from its Python package, into a folder of its own that later calls use again.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

from longdraft.benchmarks.drafters.metrics import same_tokens
from longdraft.benchmarks.drafters.prompts import stdlib_prompts
from longdraft.benchmarks.drafters.timing import SPUN_OUT, take_turns
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.models.draft_folder import SHIPPED
from longdraft.models.hf import BUNDLED, load_target

TARGET = "smollm2-135m"
BLOCK = str(SHIPPED / f"{TARGET}-longspec")
OURS = {"plain": None, "longspec": BLOCK, "prompt_lookup": None, "longspec+prompt_lookup": BLOCK}
BASE = "llama.cpp BF16"
PACKAGES = ("llama-cpp-python==0.3.36", "diskcache==5.6.3")
# Without its reader of images, and without AMX, with which GCC 12 makes an illegal instruction of its products of int8.
FLAGS = "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DCMAKE_C_FLAGS=-mno-amx-int8 -DCMAKE_CXX_FLAGS=-mno-amx-int8"
# A prompt -> the new tokens in pieces, as they come.
Decoder = Callable[[list[int]], Iterable[list[int]]]


class Answer(NamedTuple):
    tokens: list[int]
    prefill: float  # tokens/s, as the next
    decoding: float


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--folder", default="build/llama.cpp", help="where llama.cpp is, or is installed if it is not")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    if not Path(args.folder, "llama_cpp").exists():
        options = ["--no-deps", "--no-cache-dir", "--no-binary=llama-cpp-python"]  # pip may hold another flags' build
        command = [sys.executable, "-m", "pip", "install", *options, "--target", args.folder, *PACKAGES]
        subprocess.run(command, env={"CMAKE_ARGS": FLAGS} | os.environ, check=True)
    sys.path.append(args.folder)
    logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
    target = load_target(TARGET, torch.bfloat16)
    prompts = stdlib_prompts(target.tokenizer.encode, args.prompt_tokens, args.prompts)
    length = args.prompt_tokens + args.new_tokens + 16
    with TemporaryDirectory() as folder:
        decoders = {f"llama.cpp {kind}": _theirs(file, length, args.new_tokens) for kind, file in _files(Path(folder))}
        for name, draft in OURS.items():
            engine = Engine(target, name, draft, max_length=length, keep_prompts=False)
            decoders[f"longdraft {name}"] = _ours(engine, args.new_tokens)
        _report(_measure(decoders, prompts, args.rounds), args)


def _files(folder: Path) -> Iterable[tuple[str, Path]]:
    """The types and paths of the files: two that llama.cpp writes into the folder, and the package's own."""
    import llama_cpp  # pyright: ignore[reportMissingImports]

    own = next(Path(find_spec(BUNDLED[TARGET]).origin).parent.glob("*.gguf"))  # type: ignore[union-attr]
    for kind in ("BF16", "Q8_0"):
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}"), True
        assert llama_cpp.llama_model_quantize(bytes(own), bytes(folder / kind), params) == 0
        yield kind, folder / kind
    yield "Q4_1", own


def _theirs(file: Path, length: int, n_tokens: int) -> Decoder:
    from llama_cpp import Llama  # pyright: ignore[reportMissingImports]

    threads = torch.get_num_threads()
    llama = Llama(str(file), n_ctx=length, n_threads=threads, n_threads_batch=threads, verbose=False)

    def decode(prompt: list[int]) -> Iterable[list[int]]:
        llama.reset()  # else it does not read again what the prompt shares with the last one
        return ([token] for token in islice(llama.generate(prompt, temp=0), n_tokens))

    return decode


def _ours(engine: Engine, n_tokens: int) -> Decoder:
    params = SamplingParams(max_new_tokens=n_tokens, ignore_eos=True)
    return lambda prompt: (piece.tokens for piece in engine.stream([prompt], params) if piece.tokens)


def _measure(decoders: dict[str, Decoder], prompts: list[list[int]], rounds: int) -> dict[str, list[Answer]]:
    """Name -> the answers to all prompts in all rounds."""

    def timed(name: str, prompt: list[int]) -> Answer:
        time.sleep(SPUN_OUT)
        begin, pieces = time.perf_counter(), iter(decoders[name](prompt))
        tokens = list(next(pieces))
        first, n_first = time.perf_counter(), len(tokens)
        tokens += [token for piece in pieces for token in piece]
        decoding = (len(tokens) - n_first) / (time.perf_counter() - first)
        return Answer(tokens, len(prompt) / (first - begin), decoding)

    found: dict[str, list[Answer]] = {name: [] for name in decoders}
    for name in decoders:
        timed(name, prompts[0][::-1])  # warm-up, on another text
    for prompt in prompts:
        take_turns({n: lambda n=n, prompt=prompt: found[n].append(timed(n, prompt)) for n in decoders}, rounds)
    return found


def _report(found: dict[str, list[Answer]], args: argparse.Namespace) -> None:
    print(f"{'':34}prefill  decoding  over {BASE}  its tokens")
    figures = {}
    for name, answers in found.items():
        prefill, decoding = (median(getattr(one, what) for one in answers) for what in ("prefill", "decoding"))
        over = median(one.decoding / base.decoding for one, base in zip(answers, found[BASE], strict=True))
        same, count = same_tokens(*([one.tokens for one in some] for some in (answers, found[BASE])))
        print(f"{name:34}{prefill:7.0f}{decoding:10.1f}{over:21.2f}{same:6} of {count}")
        figures[name] = {"prefill": prefill, "decoding": decoding, "over": over, "same": [same, count]}
    print(json.dumps({"threads": torch.get_num_threads(), **vars(args), "tokens_per_second": figures}))


if __name__ == "__main__":
    main()
