"""Serve a target with a drafter behind OpenAI's interface (infer/server/app.py): `longdraft serve --draft FOLDER`."""

import argparse
import os
import signal
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from longdraft.launch.console import note, run_command
from longdraft.launch.shared_options import add_drafting, add_model

KEY = "LONGDRAFT_API_KEY"
FAILED = 1  # exit status if the engine raised, so that a supervisor restarts the process


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="longdraft serve", description=f"Serve OpenAI's interface. The environment variable {KEY} sets a key."
    )
    add = add_model(parser)
    add("--slots", type=int, default=8, help="requests decoded together (default: 8)")
    add_drafting(parser, several=False)
    add = parser.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", help="address to listen at (default: this machine only)")
    add("--port", type=int, default=8000, help="default: 8000; 0 takes a free one, which is shown")
    add("--model-name", help="the model's name in requests (default: the target's name)")
    help = "requests that may wait for a slot (default: 256); more are answered with 429"
    add("--queue", type=int, default=256, help=help)
    help = "time that running answers have to finish when the server is to end (default: 300)"
    add("--drain", type=int, default=300, metavar="SECONDS", help=help)
    help = "origins of web pages that may use the server, such as http://localhost:3000; '*' for all (default: none)"
    add("--cors", nargs="+", default=[], metavar="ORIGIN", help=help)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0 after SIGTERM, 2 after an error, 1 if the engine failed."""
    parser = _parser()
    return run_command(parser.prog, lambda: _serve(parser.parse_args(argv)), needs_output=False)


def _serve(args: argparse.Namespace) -> int:
    from longdraft.infer.server.app import Settings, serve
    from longdraft.launch.runtime import Drafting

    for name, least in (("slots", 1), ("port", 0), ("queue", 0), ("drain", 0)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name}: {getattr(args, name)}; give at least {least}")
    drafting = Drafting(args)
    # Load on a thread that then ends. Each thread that computes gets OpenMP threads of its own, and with two such sets
    # on a CPU, this one's and the engine thread's, all sleep instead of spinning: a prompt takes a quarter longer.
    with ThreadPoolExecutor(1) as loading:
        engine = loading.submit(drafting.open_engine, args.max_length or 1, args.slots).result()
    target = engine.target
    if target.tokenizer is None:
        raise ValueError(f"{target.name} has no tokenizer files, so no text can be served; add them")
    model = args.model_name or Path(target.name).name
    settings = Settings(model, os.environ.get(KEY, ""), args.queue, cors=args.cors)
    listening = _listen(args.host, args.port)
    place, key = f"http://{args.host}:{listening.getsockname()[1]}", ", with a key" if settings.api_key else ""
    # While it runs, the server handles signals itself. A signal that comes earlier is kept for it in `ended`, and one
    # that comes later has nothing to stop any more.
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    note(f"Serving {settings.model} on {place} with {args.slots} slots of {engine.max_length} positions{key}")
    return 0 if serve(engine, settings, listening, args.drain, ended) else FAILED


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ValueError if the address cannot be used."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise ValueError(f"--host, --port: cannot listen at {host}:{port}: {error}; give others") from error
