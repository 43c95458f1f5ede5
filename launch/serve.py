"""Serve a target with a drafter: `longdraft serve --draft FOLDER`, with OpenAI's interface (infer/server.py)."""

import argparse
import os
import signal
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from longdraft.launch.console import framed, note
from longdraft.launch.shared_options import add_drafting, add_model

KEY = "LONGDRAFT_API_KEY"
FAILED = 1  # the engine raised: whoever watches the process starts it anew


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="longdraft serve", description=f"Serve OpenAI's interface. The environment variable {KEY} sets a key."
    )
    add = add_model(parser)
    add("--slots", type=int, default=8, help="requests decoded together (default: 8)")
    add_drafting(parser, several=False)
    add = parser.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", help="address to listen at (default: this machine alone)")
    add("--port", type=int, default=8000, help="default: 8000; 0 takes a free one, which is said")
    add("--model-name", help="what requests call it (default: the target's name)")
    add(
        "--queue", type=int, default=256, help="requests that may wait for a slot (default: 256); more are answered 429"
    )
    add(
        "--drain", type=int, default=300, metavar="SECONDS", help="for running answers when it is to end (default: 300)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 after SIGTERM, 2 after an error, 1 where the engine failed."""
    parser = _parser()
    return framed(parser.prog, lambda: _serve(parser.parse_args(argv)), shows=False)


def _serve(args: argparse.Namespace) -> int:
    from longdraft.infer.server import Settings, serve
    from longdraft.launch.runtime import Drafting

    for name, least in (("slots", 1), ("port", 0), ("queue", 0), ("drain", 0)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name}: {getattr(args, name)}; give at least {least}")
    asked = Drafting(args)
    # On a thread that ends: OpenMP's threads belong to who first computes, and with a second set of them beside the
    # engine thread's, on a CPU, all wait asleep instead of spinning (a prompt then takes a quarter longer).
    with ThreadPoolExecutor(1) as loading:
        engine = loading.submit(asked.open_engine, args.max_length or 1, args.slots).result()
    target = engine.target
    if target.tokenizer is None:
        raise ValueError(f"{target.name} has no tokenizer files, so no text can be served; add the tokenizer's")
    settings = Settings(args.model_name or Path(target.name).name, os.environ.get(KEY, ""), args.queue)
    listening = _listen(args.host, args.port)
    place, key = f"http://{args.host}:{listening.getsockname()[1]}", ", with a key" if settings.api_key else ""
    # The server takes signals itself while it runs, and gives them back at its end: the work is done then. One that
    # comes before is kept for it.
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    note(f"Serving {settings.model} on {place} with {args.slots} slots of {engine.max_length} positions{key}")
    return 0 if serve(engine, settings, listening, args.drain, ended) else FAILED


def _listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections. Raises: ValueError where it cannot be had."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise ValueError(f"--host, --port: cannot listen at {host}:{port}: {error}; give others") from error
