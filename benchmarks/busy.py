"""What is left of decoding's speed on a CPU beside processes that only spin.

`python benchmarks/busy.py --spinners 1 2 4` prints a table and one JSON line: tokens a second, the prompt counted, of
plain decoding, prompt lookup and transformers' generate, alone and beside k processes that never rest. All are taken in
turns within each number of spinners, and the quiet speed is measured before and after. `fair share` is what a process
with a thread a core gets of c cores beside k others: c / (c + k). `--streams N` decodes N prompts together.
"""

import argparse
import json
import multiprocessing
import statistics
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from longdraft.benchmarks.timing import DTYPES, take_turns
from longdraft.benchmarks.turns import TransformersAnswers
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.models.hf import load_target, load_transformers

SETTLING = 0.5  # seconds until the scheduler has spread new processes


def _spin() -> None:
    while True:
        pass


@contextmanager
def spinning(count: int) -> Iterator[None]:
    """`count` processes that only spin run beside the block."""
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=_spin, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    time.sleep(SETTLING)
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def stdlib_prompts(encode: Callable[[str], list[int]], n_tokens: int, count: int) -> list[list[int]]:
    """Stretches of a text of Python's standard library, evenly spaced."""
    tokens = encode(Path(textwrap.__file__).read_text(encoding="utf-8"))
    starts = [i * (len(tokens) - n_tokens) // count for i in range(count)]
    return [tokens[start : start + n_tokens] for start in starts]


def decoders(
    path: str, dtype: torch.dtype, n_prompts: int, prompt_tokens: int, new_tokens: int, with_peer: bool
) -> dict[str, Callable[[], object]]:
    """Name -> one whole generation of all prompts, prefill included."""
    target = load_target(path, dtype)
    assert target.tokenizer is not None
    prompts = stdlib_prompts(target.tokenizer.encode, prompt_tokens, n_prompts)
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    made: dict[str, Callable[[], object]] = {}
    for name in ("plain", "prompt_lookup"):
        engine = Engine(target, name, keep_prompts=False)
        made[name] = lambda engine=engine: engine.generate(prompts, params)
    if with_peer:
        theirs = TransformersAnswers(load_transformers(path, dtype), target.eos_token_ids)
        made["transformers"] = lambda: theirs.generate(prompts, params)
    return made


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", default="smollm2-135m")
    add("--dtype", choices=DTYPES, default="bf16")
    add("--spinners", type=int, nargs="+", default=[1, 2, 4])
    add("--streams", type=int, default=1)
    add("--prompt-tokens", type=int, default=181)
    add("--new-tokens", type=int, default=64)
    add("--repeats", type=int, default=3)
    add("--no-transformers", action="store_true", help="leave the peer out")
    args = parser.parse_args(argv)
    peer = not args.no_transformers
    made = decoders(args.target, DTYPES[args.dtype], args.streams, args.prompt_tokens, args.new_tokens, peer)

    def measure() -> dict[str, float]:
        n_tokens = args.streams * args.new_tokens
        return {name: n_tokens / statistics.median(found) for name, found in take_turns(made, args.repeats).items()}

    take_turns(made, 1)  # warm-up
    quiet = measure()
    found = {}
    for count in args.spinners:
        with spinning(count):
            found[count] = measure()
    again = measure()
    quiet = {name: (quiet[name] + again[name]) / 2 for name in made}
    cores = torch.get_num_threads()
    print(
        f"{args.target}, {args.dtype}, {cores} threads: {args.streams} x {args.prompt_tokens} tokens of prompt, "
        f"{args.new_tokens} new"
    )
    print(f"{'beside':>12} {'fair share':>11}" + "".join(f"{name:>24}" for name in made))
    print(f"{'nothing':>12} {'100 %':>11}" + "".join(f"{quiet[name]:>12.1f} tokens/s  " for name in made))
    for count, speed in found.items():
        cells = "".join(f"{speed[name]:>12.1f} = {100 * speed[name] / quiet[name]:>5.1f} % " for name in made)
        print(f"{f'{count} spinning':>12} {100 * cores / (cores + count):>9.0f} %" + cells)
    record = {"quiet": quiet, "busy": found, "settings": vars(args), "threads": cores, "torch": torch.__version__}
    print(json.dumps({"busy": record}))


if __name__ == "__main__":
    main()
