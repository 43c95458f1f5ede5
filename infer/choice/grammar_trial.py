"""Compiles a client's grammar in another process first.

A grammar of a few hundred bytes can take minutes and all memory to compile, and a long chain of rules overflows the
stack, which ends the process. Here that only ends the trial's process. It runs this file, and reads lines of JSON: the
tokenizer, then grammars. It answers each with a line: the error, or nothing.
"""

import json
import re
import resource
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLTokenizer

if TYPE_CHECKING:  # nothing of longdraft's is imported in the process, which must start at once
    from longdraft.models.target import Target

SECONDS, BYTES, STACK = 5, 4 << 30, 4 << 20  # for a grammar; STACK is half of what it will have in the server
# Before llguidance's errors: a place in lines that the caller may not know.
PLACE = re.compile(r"^(?:at )?(?:\d+\(\d+\): )*")
KEPT = 1000  # grammars that are known to be good


class GrammarTrial:
    """The process, which starts with the first grammar and again after one that ended it. For one thread."""

    def __init__(self, target: "Target"):
        self._target, self._good = target, dict[str, None]()
        self._process: Any = None

    def check(self, grammar: str) -> None:
        """Raise ValueError, which names `grammar`, if it is wrong or cannot be compiled within the limits."""
        if grammar in self._good:
            return
        answer = self._ask(grammar)
        if not answer:
            self.close()
            raise ValueError(f"grammar: compiling it takes more than {SECONDS} s or {BYTES >> 30} GiB; simplify it")
        if error := json.loads(answer):
            raise ValueError(f"grammar: {error}")
        self._good[grammar] = None
        if len(self._good) > KEPT:
            del self._good[next(iter(self._good))]

    def _ask(self, grammar: str) -> str:
        """The process's answer; empty if it has died."""
        lines = [grammar]
        if self._process is None:
            # -P: the files beside this one are no modules of the process.
            command = [sys.executable, "-P", __file__]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            tokenizer = copy(self._target.tokenizer.backend_tokenizer)
            tokenizer.no_padding()
            tokenizer.no_truncation()
            lines = [[tokenizer.to_str(), self._target.model.config.vocab_size, self._target.eos_token_ids], grammar]
        with suppress(BrokenPipeError):
            print(*map(json.dumps, lines), sep="\n", file=self._process.stdin, flush=True)
        return self._process.stdout.readline()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ends the server, which ends this process
    threading.stack_size(STACK)
    tokenizer, size, ends = json.loads(sys.stdin.readline())
    try:
        vocabulary = LLTokenizer(tokenizer, n_vocab=size, eos_token=ends)
    except ValueError as error:
        for _ in sys.stdin:
            print(json.dumps(f"this target's tokenizer cannot follow one: {error}"), flush=True)
        return
    for line in sys.stdin:
        signal.alarm(SECONDS)  # unhandled, so it ends this process
        thread = threading.Thread(target=_answer, args=(vocabulary, json.loads(line)))
        thread.start()
        thread.join()
        signal.alarm(0)


def _answer(vocabulary: LLTokenizer, grammar: str) -> None:
    print(json.dumps(error_of(LLMatcher(vocabulary, grammar, log_level=0))), flush=True)


def error_of(matcher: LLMatcher) -> str:
    """What is wrong with the grammar of a matcher that has read nothing; empty if nothing is."""
    matcher = matcher.deep_copy()
    allowed = not matcher.is_error() and any(matcher.compute_bitmask())
    error = matcher.get_error()
    if matcher.is_error() and not error.startswith("NoExtension"):
        return PLACE.sub("", error.splitlines()[0])
    return "" if allowed and not error else "no text follows it"


if __name__ == "__main__":
    main()
