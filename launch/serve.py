"""Serve a target with a drafter behind OpenAI's interface (infer/server/app.py): `longdraft serve --draft FOLDER`."""

import argparse
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

from longdraft.infer.engine import Engine
from longdraft.infer.server.app import Server, Service
from longdraft.infer.server.recorder import Recorder
from longdraft.launch.arguments import API_KEY
from longdraft.launch.console import note
from longdraft.launch.runtime import Drafting
from longdraft.models.files import signals_noted
from longdraft.models.fingerprint import tokenizer_hash

ENGINE_FAILED = 1  # exit status that makes a supervisor restart the process


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C. Returns the exit status."""
    drafting = Drafting(args)
    # Taken before the target is loaded, which may take minutes. Connections are refused until the engine is ready. A
    # port that another server has taken likewise, and does not listen on yet, is refused then.
    address = None if drafting.ranks.rank > 0 else _bind(args.host, args.port)
    if address is not None and args.record is not None:
        _make_folder(args.record)
    # Load on a thread that then ends. Each thread that computes gets OpenMP threads of its own. With two such sets on a
    # CPU, this thread's and the engine thread's, all sleep instead of spinning, and a prompt takes a quarter longer.
    with ThreadPoolExecutor(1) as loading:
        engine = loading.submit(drafting.open_engine, args.slots).result()
        target = engine.target
        if target.tokenizer is None:
            raise ValueError(f"{target.name} has no tokenizer files, so no text can be served; add them")
        loading.submit(engine.reserve).result()
    if address is None:
        return _follow(engine)
    model = args.model_name or Path(target.name).name
    with _address_named(args.host, args.port):
        address.listen()
    api_key = os.environ.get(API_KEY, "")
    recorder = args.record and Recorder(args.record, tokenizer_hash(target.tokenizer), note)
    service = Service(engine, model, api_key, args.queue, args.host, recorder and recorder.add)
    host = f"[{args.host}]" if ":" in args.host else args.host
    place, key = f"http://{host}:{address.getsockname()[1]}", ", with a key" if api_key else ""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # while it runs, the server handles signals itself
    recorded = f"; recorded in {args.record}" if args.record else ""
    note(f"Serving {model} on {place}, slots: {args.slots} of {engine.max_length} positions{key}{recorded}")
    try:
        Server(service).run([address])
    finally:
        if recorder:
            recorder.close()
    return ENGINE_FAILED if service.thread.failed else 0


def _bind(host: str, port: int) -> socket.socket:
    """A socket that has the address but does not listen yet."""
    if not host:  # would be every address of this machine
        raise ValueError("--host: it is empty; give an address, such as 127.0.0.1")
    with _address_named(host, port):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        address = socket.socket(family)
        address.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            address.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        address.bind((host, port))
    return address


def _make_folder(folder: Path) -> None:
    """Make a folder for its owner only, unless it exists. Raises ValueError if it cannot be written."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"--record: {folder} cannot be written ({error.strerror}); give another folder") from error


@contextmanager
def _address_named(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except (OSError, OverflowError) as error:
        raise ValueError(f"--host, --port: {host}, {port}: {str(error).rstrip('.')}; give others") from error


def _follow(engine: Engine) -> int:
    """Serve what the first rank serves, until it has ended."""
    with signals_noted() as told:
        try:
            deque(engine.serve(lambda idle: ()), maxlen=0)
        except RuntimeError:
            if not told:  # else the first rank has ended without a word, as it may when it is told twice
                raise
    return 0
