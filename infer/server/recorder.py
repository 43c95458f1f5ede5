"""Records what a server reads and writes as sequences of token ids, on which its draft can be trained.

A line of a file is a record: {"tokens", "answers", "tokenizer_sha256"}, where `answers` has (start, stop) of each
answer among the tokens. A request whose prompt begins with a recorded sequence continues it, as the next turn of a chat
does, so a session is one sequence. data_prep/formats.py reads the records.
"""

import json
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

import numpy as np

from longdraft.infer.generation import Generation
from longdraft.models.files import write_atomically

IDLE_SECONDS = 600.0  # a session is written before nobody has continued it for so long, and after half of that
MOST_SESSIONS, MOST_TOKENS = 1024, 1 << 22  # held in memory; beyond either, the older half is written
CLOSE_SECONDS = 60.0  # how long the last file may take


@dataclass(eq=False)
class _Session:
    """A sequence, int32 [n], the spans of its answers, and when the last one came."""

    tokens: np.ndarray
    answers: list[tuple[int, int]]
    at: float

    def begins(self, tokens: np.ndarray) -> bool:
        """Whether these tokens are the sequence, or continue it."""
        n = len(self.tokens)
        # The last one alone tells most sessions apart.
        return n <= len(tokens) and self.tokens[-1] == tokens[n - 1] and np.array_equal(self.tokens, tokens[:n])


class Recorder:
    """Writes finished requests to new files of a folder, on a thread of its own. A file is complete when it appears.

    Whatever fails there, requests are answered: `log` receives a line, and the records are lost.

    Args:
        tokenizer_hash: from `tokenizer_hash` of models/fingerprint.py.
    """

    def __init__(self, folder: Path, tokenizer_hash: str, log: Callable[[str], object]):
        self._folder, self._hash, self._log = folder, tokenizer_hash, log
        self._inbox = SimpleQueue[Generation | None]()
        self._sessions = list[_Session]()  # in the order of their last answers
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def add(self, generation: Generation) -> None:
        """Record a finished request. It may have been cancelled."""
        self._inbox.put(generation)

    def close(self) -> None:
        """Write what is left, and stop."""
        self._inbox.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._log(f"the last recorded sessions are lost: {self._folder} cannot be written in {CLOSE_SECONDS:.0f} s")

    def _run(self) -> None:
        while True:
            wait = self._sessions[0].at + IDLE_SECONDS - time.monotonic() if self._sessions else None
            try:
                generation = self._inbox.get(timeout=wait and max(wait, 0))
            except Empty:
                # Not only the one whose time is up, which would be as many files as sessions.
                self._write(sum(time.monotonic() - one.at > IDLE_SECONDS / 2 for one in self._sessions))
                continue
            if generation is None:
                return self._write(len(self._sessions))
            if generation.tokens:
                self._add(generation)
            if len(self._sessions) > MOST_SESSIONS or sum(len(one.tokens) for one in self._sessions) > MOST_TOKENS:
                self._write(-(-len(self._sessions) // 2))

    def _add(self, generation: Generation) -> None:
        start, stop = len(generation.prompt), len(generation.prompt) + len(generation.tokens)
        session = _Session(np.array([*generation.prompt, *generation.tokens], dtype=np.int32), [], time.monotonic())
        # Those that end within the answer are other answers. One that ends with it is the same again.
        begun = [one for one in self._sessions if one.begins(session.tokens) and not start < len(one.tokens) < stop]
        if begun:
            longest = max(begun, key=lambda one: len(one.tokens))
            self._sessions.remove(longest)
            session.answers += longest.answers
        if (start, stop) not in session.answers:
            session.answers.append((start, stop))
        self._sessions.append(session)

    def _write(self, count: int) -> None:
        """Write the first `count` sessions, which are then over, to a file."""
        over, self._sessions = self._sessions[:count], self._sessions[count:]
        if not over:
            return
        path = self._folder / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(4)}.jsonl"

        def write(temporary: Path) -> None:
            temporary.touch(mode=0o600)
            with temporary.open("w") as file:
                for one in over:
                    record = {"tokens": one.tokens.tolist(), "answers": one.answers, "tokenizer_sha256": self._hash}
                    file.write(json.dumps(record, separators=(",", ":")) + "\n")

        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(path, write)
        except (OSError, MemoryError) as error:
            self._log(f"{len(over)} recorded sessions are lost: {path} cannot be written ({error})")
