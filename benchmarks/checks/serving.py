"""Measures what serving costs: a server and an engine are given the same prompts in turns.

The server is a process of its own (`longdraft serve`); the client and the engine run in this one. With `--load STREAMS`
many clients stream at once, some of which hang up, read slowly or send half a body; every answer is compared with the
engine's, and the server's memory is recorded. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from itertools import count, pairwise
from statistics import median
from typing import Any

import psutil

from longdraft.benchmarks.drafters.prompts import stdlib_prompts
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.models.hf import load_target, load_tokenizer

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    add = parser.add_argument
    add("--target", default="smollm2-135m")
    add("--drafter", default="plain")
    add("--slots", type=int, default=8)
    add("--prompt-tokens", type=int, default=192)
    add("--new-tokens", type=int, default=96)
    add("--rounds", type=int, default=3)
    add("--url", help="HOST:PORT of a running server, of whatever kind; no engine is timed then")
    add("--model", default=None, help="with --url: the model's name there")
    add("--load", type=int, default=0, metavar="STREAMS", help="check answers and memory under this many streams")
    add("--seconds", type=float, default=120, help="duration of --load")
    args = parser.parse_args(argv)
    if args.url:
        host, _, port = args.url.rpartition(":")
        print(json.dumps(asyncio.run(_measure(args, Client(host, int(port), args.model), None))))
        return
    command = [sys.executable, "-m", "longdraft.launch.cli", "serve", "--target", args.target, "--port", "0"]
    options = ["--drafter", args.drafter, "--slots", str(args.slots)]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        found = next(match for line in process.stderr if (match := re.search(r"http://([\d.]+):(\d+)", line)))
        client = Client(found[1], int(found[2]), None)
        engine = Engine(load_target(args.target), args.drafter)
        work = _load(args, client, engine, psutil.Process(process.pid)) if args.load else _measure(args, client, engine)
        print(json.dumps(asyncio.run(work)))
    finally:
        process.terminate()
        status = process.wait(60)
    assert status == 0, f"the server ended with {status}"


class Client:
    """Streams completions over bare sockets, so that the client costs as little as possible."""

    def __init__(self, host: str, port: int, model: str | None):
        self.host, self.port, self.model = host, port, model

    async def stream(self, prompt: Any, new: int, leave: int = 0, pause: float = 0.0) -> dict[str, Any]:
        """Return an answer's text and the times of its pieces. leave: hang up after this many pieces, unless it is 0;
        pause: seconds to wait after each."""
        body = {"prompt": prompt, "max_tokens": new, "stream": True, "temperature": 0, "ignore_eos": True}
        content = json.dumps(body | ({"model": self.model} if self.model else {})).encode()
        began, times, texts = time.perf_counter(), list[float](), list[str]()
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(HEAD.format(len(content)).encode() + content)
            status = int((await reader.readline()).split()[1])
            while status == 200 and (line := await reader.readline()):
                if line.startswith(b"data: [DONE]"):
                    break
                if line.startswith(b"data: {"):
                    times.append(time.perf_counter())
                    texts += [choice["text"] for choice in json.loads(line[6:])["choices"]]
                    if leave and len(times) >= leave:
                        break
                    await asyncio.sleep(pause)
        finally:
            writer.close()
        return {"status": status, "began": began, "times": times, "text": "".join(texts)}

    async def half(self) -> None:
        """Send a request whose body ends in the middle."""
        _, writer = await asyncio.open_connection(self.host, self.port)
        writer.write(HEAD.format(100).encode() + b'{"prompt": "ha')
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.close()


async def _measure(args: argparse.Namespace, client: Client, engine: Engine | None) -> dict[str, Any]:
    """Tokens per second of the engine and of the server with one stream, in turns, and of the server with eight; times
    to the first token, and the gaps that a long prompt causes in running streams."""
    new, encode = args.new_tokens, load_tokenizer(args.target).encode
    prompts, (long,) = stdlib_prompts(encode, args.prompt_tokens, 8), stdlib_prompts(encode, 4000, 1)
    speeds: dict[str, list[float]] = {"engine": [], "server": [], "server, 8 streams": []}
    first: dict[str, list[float]] = {"alone": [], "of 8 at once": [], "while 7 run": []}
    params, gaps = SamplingParams(max_new_tokens=new, ignore_eos=True), list[float]()
    for turn in range(args.rounds + 1):  # the first one warms up
        if engine is not None:
            begin = time.perf_counter()
            engine.generate([prompts[0]], params)
            speeds["engine"].append(new / (time.perf_counter() - begin))
        begin = time.perf_counter()
        one = await client.stream(prompts[0], new)
        speeds["server"].append(new / (time.perf_counter() - begin))
        first["alone"].append(one["times"][0] - one["began"])
        begin = time.perf_counter()
        eight = await asyncio.gather(*(client.stream(prompt, new) for prompt in prompts))
        speeds["server, 8 streams"].append(8 * new / (time.perf_counter() - begin))
        first["of 8 at once"] += [one["times"][0] - one["began"] for one in eight] if turn else []
    running = [asyncio.create_task(client.stream(prompt, 3 * new)) for prompt in prompts[:7]]
    await asyncio.sleep(1.5)
    late = await client.stream(prompts[7], 8)
    first["while 7 run"].append(late["times"][0] - late["began"])
    long_began = time.perf_counter()
    whole = await client.stream(long, 4)
    first["of 4000 tokens while 7 run"] = [whole["times"][0] - whole["began"]]
    for one in await asyncio.gather(*running):
        meanwhile = [at for at in one["times"] if long_began < at < whole["times"][0] + 0.5]
        gaps += [b - a for a, b in pairwise(meanwhile)]
    again = await client.stream([*long, *prompts[0]], 4)
    named = f"of {len(long) + len(prompts[0])} tokens of which {len(long)} were read before"
    first[named] = [again["times"][0] - again["began"]]
    found = {f"{name}, tokens/s": round(median(values[1:]), 1) for name, values in speeds.items() if values}
    found |= {f"first token {name}, s": round(median(values[1:] or values), 3) for name, values in first.items()}
    return found | {"longest gap of the 7 meanwhile, s": round(max(gaps, default=0.0), 3)}


async def _load(args: argparse.Namespace, client: Client, engine: Engine, server: psutil.Process) -> dict[str, Any]:
    """Keep many streams running and compare every answer with the engine's: none may be lost or mixed up. The server's
    memory is recorded, so that one sees whether it grows."""
    prompts, new = stdlib_prompts(load_tokenizer(args.target).encode, 24, 8), 12
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    want = [one.text for one in engine.generate(prompts, params)]
    end, numbers, seen, memory = time.perf_counter() + args.seconds, count(), Counter[str](), list[float]()

    async def caller() -> None:
        while time.perf_counter() < end:
            number = next(numbers)
            place, behaviour = number % 8, number % 5
            if behaviour == 1:
                await client.half()
                seen["half a body"] += 1
                continue
            leave, pause = (1 + number % 3 if behaviour == 2 else 0), (0.1 if behaviour == 3 else 0.0)
            one = await client.stream(prompts[place], new, leave, pause)
            if one["status"] != 200:
                seen[f"status {one['status']}"] += 1
                await asyncio.sleep(1)
            elif leave:
                right = (want[place] or "").startswith(one["text"])
                seen["hung up" if right else "WRONG"] += 1
            else:
                seen["whole" if one["text"] == want[place] else "WRONG"] += 1

    async def watch() -> None:
        while time.perf_counter() < end:
            await asyncio.sleep(args.seconds / 12)
            memory.append(round(server.memory_info().rss / 2**20, 1))

    await asyncio.gather(watch(), *(caller() for _ in range(args.load)))
    assert not seen["WRONG"], seen
    return {"streams": args.load, "slots": args.slots, "seconds": args.seconds, **seen, "memory, MiB": memory}


if __name__ == "__main__":
    main()
