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
from longdraft.models.files import write_text

IDLE_SECONDS = 300.0  # a session that nobody continues for this long is written
MOST_TOKENS = 1 << 24  # held in memory, which is 64 MiB; then all sessions are written


@dataclass(eq=False)
class _Session:
    """A sequence, int32 [n], the spans of its answers, and when the last one came."""

    tokens: np.ndarray
    answers: list[tuple[int, int]]
    at: float


class Recorder:
    """Writes finished requests to new files of a folder, on a thread of its own. A file is complete when it appears.

    Args:
        folder: exists.
        tokenizer_hash: from `tokenizer_hash` of models/fingerprint.py.
        log: receives a line if a file cannot be written; its records are lost.
    """

    def __init__(self, folder: Path, tokenizer_hash: str, log: Callable[[str], object]):
        self._folder, self._hash, self._log = folder, tokenizer_hash, log
        self._inbox = SimpleQueue[Generation | None]()
        self._sessions = list[_Session]()  # the one that was continued last is the last one
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def add(self, generation: Generation) -> None:
        """Record a finished request. It may have been cancelled."""
        self._inbox.put(generation)

    def close(self) -> None:
        """Write what is left, and stop."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                if (generation := self._inbox.get(timeout=IDLE_SECONDS)) is None:
                    break
                self._add(generation)
            except Empty:
                pass
            now = time.monotonic()
            # Twice the time, so that a file has the sessions of some minutes.
            if self._sessions and now - self._sessions[0].at > 2 * IDLE_SECONDS:
                self._write([one for one in self._sessions if now - one.at > IDLE_SECONDS])
            if sum(len(one.tokens) for one in self._sessions) > MOST_TOKENS:
                self._write(self._sessions)
        self._write(self._sessions)

    def _add(self, generation: Generation) -> None:
        if not generation.tokens:
            return
        start, tokens = len(generation.prompt), np.array([*generation.prompt, *generation.tokens], dtype=np.int32)
        shorter = (one for one in self._sessions if len(one.tokens) <= start)
        continued = [one for one in shorter if np.array_equal(one.tokens, tokens[: len(one.tokens)])]
        session = max(continued, key=lambda one: len(one.tokens), default=None)
        if session is not None:
            self._sessions.remove(session)
        answers = [*(session.answers if session else ()), (start, len(tokens))]
        self._sessions.append(_Session(tokens, answers, time.monotonic()))

    def _write(self, sessions: list[_Session]) -> None:
        """Write these sessions, which are over, to a file."""
        records = [
            {"tokens": one.tokens.tolist(), "answers": one.answers, "tokenizer_sha256": self._hash} for one in sessions
        ]
        self._sessions = [one for one in self._sessions if one not in sessions]
        if not records:
            return
        path = self._folder / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(4)}.jsonl"
        try:
            write_text(path, "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records))
        except OSError as error:
            self._log(f"{len(records)} recorded sessions are lost: {path} cannot be written ({error.strerror})")
