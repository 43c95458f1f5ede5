"""Answers from OpenAI-style servers (vLLM, SGLang, `longdraft serve`), in the place of an engine of our own.

A prompt is sent to /v1/completions as token ids, so that it is the target's own template and tokenizer that make it,
whatever the server would make of a chat. What a server answers is text, read back with the target's tokenizer.
Not here: what is asked and what becomes of an answer (responses.py).
"""

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import count
from typing import Any

import httpx

from longdraft.data_prep.responses import Completion, text_behind

KEY = "OPENAI_API_KEY"
TRIES, FIRST_PAUSE, LONGEST_PAUSE = 8, 1.0, 60.0  # of one request; seconds, twice as long each time
RETRIED = (408, 425, 429, 500, 502, 503, 504)
# In a refusal, that prompt and answer are longer than the server's positions: vLLM's, SGLang's and our own words.
TOO_LONG = re.compile(r"context.length|maximum.(model.)?length|max_(model_len|length)|have at most|too long", re.I)
FINISHED = ("stop", "length")
CONNECT_SECONDS = 20.0
# Of several scripts, with numbers and blanks: other tokenizers count it otherwise.
PROBE = "The 3 quick brown foxes' tails: 12,345.67 + x_i = naïve façade;\n\tЖизнь 世界 🙂, `def f(x): return x**2`"


class EndpointClient:
    """Asks servers of one model for completions; a `Generate` of responses.py once `check` has been called.

    Args:
        urls: where each server's /v1 is, with or without it.
        sampling: of a request's JSON, besides prompt and seed: max_tokens, temperature, ...
        tokenizer: the target's, of transformers; its EOS token stands for the end of an answer.
        positions: most tokens of a prompt and its answer; of a longer answer no more is asked for.
        model: as the servers call it; None is the only one that they have.
        concurrency: requests under way at a time.
        seconds: that an answer may take.
    """

    def __init__(
        self,
        urls: Sequence[str],
        sampling: Mapping[str, Any],
        tokenizer: Any,
        positions: int,
        model: str | None = None,
        concurrency: int = 64,
        seconds: float = 600.0,
    ):
        if concurrency < 1:
            raise ValueError(f"--concurrency: {concurrency}; ask at least 1 at a time")
        for url in urls:
            _check_url(url)
        self._sampling, self._tokenizer, self._positions = dict(sampling), tokenizer, positions
        self._asked, self._concurrency, self._turn = model, concurrency, count()
        bases = [url.rstrip("/").removesuffix("/v1") + "/v1" for url in urls]
        key = os.environ.get(KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=concurrency)
        timeout = httpx.Timeout(seconds, connect=CONNECT_SECONDS)
        self._clients = [httpx.Client(base_url=base, headers=headers, limits=limits, timeout=timeout) for base in bases]
        # A name that is given is checked with the servers, and so not by a call that finds its work done.
        self.model = model or self._find_model()

    def _find_model(self) -> str:
        """The name that all endpoints serve. Raises ValueError where there is none, or more than one to choose from."""
        wanted = self._asked
        for place, client in enumerate(self._clients):
            found = self._ask("GET", "models", None, place)
            try:
                names = [str(model["id"]) for model in found["data"]]
            except (KeyError, TypeError):
                raise ValueError(
                    f"--endpoint: {client.base_url}models says no models; is it an OpenAI server?"
                ) from None
            if wanted is None and len(names) != 1:
                raise ValueError(f"--endpoint: {client.base_url} serves {', '.join(names)}; choose one by --model")
            wanted = wanted or names[0]
            if wanted not in names:
                raise ValueError(f"--model: {client.base_url} serves {', '.join(names)}, not {wanted}")
        assert wanted is not None
        return wanted

    def check(self) -> None:
        """Raises ValueError where a server has not the model, or counts a text's tokens otherwise than the target's
        tokenizer."""
        if self._asked is not None:
            self._find_model()
        own = len(self._tokenizer(PROBE)["input_ids"])
        for place, client in enumerate(self._clients):
            asked = {"model": self.model, "prompt": PROBE, "max_tokens": 1, "temperature": 0}
            usage = self._ask("POST", "completions", asked, place).get("usage")
            theirs = usage.get("prompt_tokens") if isinstance(usage, dict) else None
            if theirs != own:
                raise ValueError(
                    f"--endpoint: {client.base_url} counts {theirs} tokens in a text of which "
                    f"--target's tokenizer makes {own}; serve the target itself"
                )

    def __call__(self, prompts: Sequence[list[int]], seeds: Sequence[int]) -> Iterator[Completion]:
        """The prompts' completions as they come. Raises ValueError where a server refuses, or none answers."""
        with ThreadPoolExecutor(self._concurrency) as pool:
            asked = enumerate(zip(prompts, seeds, strict=True))
            under_way: set[Future[Completion]] = set()
            try:
                while True:
                    while len(under_way) < self._concurrency and (following := next(asked, None)):
                        index, (prompt, seed) = following
                        under_way.add(pool.submit(self._complete, index, prompt, seed))
                    if not under_way:
                        return
                    done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                    for future in done:
                        yield future.result()
            finally:  # after an error, too: what has not begun is not asked any more
                pool.shutdown(wait=False, cancel_futures=True)

    def _complete(self, index: int, prompt: list[int], seed: int) -> Completion:
        # Servers take signed 64 bits; our noise is the same for both ways to write them.
        signed = seed - 2**64 if seed >= 2**63 else seed
        asked = {"model": self.model, "prompt": prompt, "seed": signed, **self._sampling}
        asked["max_tokens"] = min(asked["max_tokens"], self._positions - len(prompt))
        found = self._ask("POST", "completions", asked, next(self._turn))
        choice, usage = found["choices"][0], found.get("usage")
        tokens = self._tokens(prompt, choice["text"])
        ended = choice.get("finish_reason") == "stop"
        count = usage.get("completion_tokens") if isinstance(usage, dict) else None
        return Completion(index, [*tokens, self._tokenizer.eos_token_id] if ended else tokens, ended, count)

    def _tokens(self, prompt: list[int], text: str) -> list[int]:
        """Of a text that stands behind the prompt: where the tokenizer puts a blank before any text, of the text behind
        a line's end."""
        alone, head, whole = self._tokenizer([text, "\n", "\n" + text], add_special_tokens=False)["input_ids"]
        readings = alone, whole[len(head) :]
        rust = self._tokenizer.backend_tokenizer
        return next((tokens for tokens in readings if text_behind(rust, prompt, tokens) == text), alone)

    def _ask(self, method: str, path: str, body: dict | None, place: int) -> dict:
        """An endpoint's answer; what may be better another time is asked again, of the next endpoint."""
        why, pause = "", FIRST_PAUSE
        for attempt in range(TRIES):
            alone = body is None or isinstance(body.get("prompt"), str)  # is about this one server
            client = self._clients[(place + (0 if alone else attempt)) % len(self._clients)]
            waited = 0.0
            try:
                response = client.request(method, path, json=body)
                if response.status_code == 200:
                    return _checked(response, path, is_probe=alone)
                why = f"{response.status_code}: {_message(response)}"
                if response.status_code not in RETRIED:
                    remedy = "; give --max-length, the server's most positions" if TOO_LONG.search(why) else ""
                    raise ValueError(f"--endpoint: {client.base_url}{path} refuses with {why}{remedy}")
                waited = _retry_after(response)
            except (httpx.RequestError, _Unreadable) as error:
                why = f"{type(error).__name__.lstrip('_')}: {error}"
            if attempt + 1 < TRIES:
                time.sleep(max(waited, pause))
                pause = min(2 * pause, LONGEST_PAUSE)
        where = " and ".join(str(client.base_url) for client in self._clients)
        raise ValueError(
            f"--endpoint: {where} did not answer in {TRIES} tries, the last time with {why}; finished parts are kept, "
            "the same call goes on"
        )


def _check_url(url: str) -> None:
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"--endpoint: {url!r}; give a URL, as http://localhost:8000")
    try:
        named = httpx.URL(url).host
    except (httpx.InvalidURL, ValueError) as error:  # the latter: a name that no domain can have
        raise ValueError(f"--endpoint: {url!r} is no URL ({error}); give one, as http://localhost:8000") from error
    if not named:
        raise ValueError(f"--endpoint: {url!r} names no server; give a URL, as http://localhost:8000")


class _Unreadable(Exception):
    """A body that is not what was asked for: it may have been cut."""


def _checked(response: httpx.Response, path: str, is_probe: bool) -> dict:
    """The body's JSON. An answer that neither ended nor was cut by its length was broken off, which of the probe's
    single token does not matter. Raises _Unreadable."""
    try:
        found = response.json()
    except ValueError:
        raise _Unreadable(f"no JSON: {response.text[:80]!r}") from None
    if path == "completions":
        try:
            choice = found["choices"][0]
            text = choice["text"]
        except (KeyError, IndexError, TypeError):
            raise _Unreadable(f"no choices: {response.text[:80]!r}") from None
        if not isinstance(text, str):
            raise _Unreadable(f"no text: {response.text[:80]!r}")
        if not is_probe and choice.get("finish_reason") not in FINISHED:
            raise _Unreadable(f"finish_reason {choice.get('finish_reason')!r}, and neither stop nor length")
    return found


def _message(response: httpx.Response) -> str:
    """What a server says of an error: OpenAI's form, or the beginning of the body."""
    try:
        found = response.json()
        return str(found.get("error", found).get("message", found))
    except (ValueError, AttributeError):
        return response.text[:200]


def _retry_after(response: httpx.Response) -> float:
    """Seconds of Retry-After; 0 where it says none."""
    said = response.headers.get("retry-after", "")
    return min(float(said), LONGEST_PAUSE) if said.isdecimal() else 0.0
