"""Measures the cost of serving: a server and an engine get the same prompts in turns.

The server is a process of its own (`longdraft serve`); the client and the engine run in this one. The last line is one
JSON object: tokens/s of the engine and of the server with one stream, and of the server with eight; seconds to the
first token; and the longest gap that a long prompt causes in running streams.
"""

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import pairwise
from statistics import median

from longdraft.benchmarks.drafters.timing import stdlib_prompts
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.models.hf import load_target

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
# (prompt, number of new tokens) -> when the request was sent, and when each piece of the answer arrived.
Stream = Callable[[list[int], int], Awaitable[list[float]]]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A server against its own engine.")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default="plain")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=192)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    command = [sys.executable, "-m", "longdraft.launch.cli", "serve", "--target", args.target, "--port", "0"]
    options = ["--drafter", args.drafter, "--slots", str(args.slots)]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        found = next(match for line in process.stderr if (match := re.search(r"http://([\d.]+):(\d+)", line)))
        stream = partial(stream_from, found[1], int(found[2]))
        print(json.dumps(asyncio.run(measure(stream, Engine(load_target(args.target), args.drafter), args))))
    finally:
        process.terminate()
        status = process.wait(60)
    assert status == 0, f"the server ended with {status}"


async def stream_from(host: str, port: int, prompt: list[int], new: int) -> list[float]:
    """A Stream over a bare socket, so that the client costs little."""
    body = {"prompt": prompt, "max_tokens": new, "stream": True, "temperature": 0, "ignore_eos": True}
    content, times = json.dumps(body).encode(), [time.perf_counter()]
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(HEAD.format(len(content)).encode() + content)
    status = int((await reader.readline()).split()[1])
    assert status == 200, f"the server answered with status {status}"
    while not (line := await reader.readline()).startswith(b"data: [DONE]"):
        assert line, "the server hung up"
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
    writer.close()
    return times


async def measure(stream: Stream, engine: Engine, args: argparse.Namespace) -> dict[str, float]:
    assert engine.target.tokenizer is not None
    encode, new = engine.target.tokenizer.encode, args.new_tokens
    prompts, (long,) = stdlib_prompts(encode, args.prompt_tokens, 8), stdlib_prompts(encode, 4000, 1)
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    seconds: dict[str, list[float]] = {"engine": [], "server": [], "server, 8 streams": []}
    first: dict[str, list[float]] = {"alone": [], "of 8 at once": []}
    for _ in range(args.rounds + 1):  # the first one warms up
        begin = time.perf_counter()
        engine.generate([prompts[0]], params)
        seconds["engine"].append(time.perf_counter() - begin)
        one = await stream(prompts[0], new)
        seconds["server"].append(one[-1] - one[0])
        first["alone"].append(one[1] - one[0])
        eight = await asyncio.gather(*(stream(prompt, new) for prompt in prompts))
        seconds["server, 8 streams"].append((max(each[-1] for each in eight) - min(each[0] for each in eight)) / 8)
        first["of 8 at once"].append(median(each[1] - each[0] for each in eight))
    found = {f"{name}, tokens/s": round(new / median(of[1:]), 1) for name, of in seconds.items()}
    found |= {f"first token {name}, s": round(median(of[1:]), 3) for name, of in first.items()}
    running = [asyncio.ensure_future(stream(prompt, 3 * new)) for prompt in prompts[:7]]
    await asyncio.sleep(1.5)
    late = await stream(prompts[7], 8)
    of_long = await stream(long, 4)
    gaps = []
    for one in await asyncio.gather(*running):
        meanwhile = [at for at in one[1:] if of_long[0] < at < of_long[1] + 0.5]
        gaps += [b - a for a, b in pairwise(meanwhile)]
    again = await stream([*long, *prompts[0]], 4)
    return found | {
        "first token while 7 run, s": round(late[1] - late[0], 3),
        "first token of 4000 tokens while 7 run, s": round(of_long[1] - of_long[0], 3),
        "longest gap of the 7 meanwhile, s": round(max(gaps, default=0.0), 3),
        "first token of the 4000 again with 192 more, s": round(again[1] - again[0], 3),
    }


if __name__ == "__main__":
    main()
