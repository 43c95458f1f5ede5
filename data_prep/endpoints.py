"""Gets completions from OpenAI-style servers (vLLM, SGLang, `longdraft serve`) instead of from an engine of our own.

A prompt is sent to /v1/completions as token ids, so that the target's own template and tokenizer make it, and not the
server's chat template. A server answers with text, which the target's tokenizer turns back into tokens.
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
TRIES, FIRST_PAUSE, LONGEST_PAUSE = 8, 1.0, 60.0  # of one request; in seconds, doubled after each try
RETRIED = (408, 425, 429, 500, 502, 503, 504)
# How vLLM, SGLang and our own server say that prompt and answer need more positions than the server has.
TOO_LONG = re.compile(r"context.length|maximum.(model.)?length|max_(model_len|length)|have at most|too long", re.I)
FINISHED = ("stop", "length")
CONNECT_SECONDS = 20.0
# A text of several scripts, with numbers and blanks, which other tokenizers split into a different number of tokens.
PROBE = "The 3 quick brown foxes' tails: 12,345.67 + x_i = naïve façade;\n\tЖизнь 世界 🙂, `def f(x): return x**2`"


class EndpointClient:
    """A client of servers with the same model. Call `check` once; then it is a `Generate` of responses.py.

    Args:
        urls: each server's URL, with or without the /v1.
        sampling: fields of a request besides prompt and seed: max_tokens, temperature, ...
        tokenizer: the target's transformers tokenizer. An answer that ended gets its EOS token.
        positions: most tokens of a prompt and its answer together; max_tokens is lowered accordingly.
        model: the model's name on the servers; None: the only model that they have.
        concurrency: the number of requests in flight.
        seconds: timeout of a request.
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
        self._model_given, self._concurrency, self._next_server = model, concurrency, count()
        bases = [url.rstrip("/").removesuffix("/v1") + "/v1" for url in urls]
        key = os.environ.get(KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=concurrency)
        timeout = httpx.Timeout(seconds, connect=CONNECT_SECONDS)
        self._clients = [httpx.Client(base_url=base, headers=headers, limits=limits, timeout=timeout) for base in bases]
        # A given name is not looked up before `check`, so that a call that finds its work done asks no server.
        self.model = model or self._find_model()

    def _find_model(self) -> str:
        """The model that all endpoints serve. Raises ValueError if there is none, or more than one to choose from."""
        name = self._model_given
        for server, client in enumerate(self._clients):
            body = self._request("GET", "models", None, server)
            try:
                names = [str(model["id"]) for model in body["data"]]
            except (KeyError, TypeError):
                raise ValueError(
                    f"--endpoint: {client.base_url}models lists no models; is it an OpenAI server?"
                ) from None
            if name is None and len(names) != 1:
                raise ValueError(f"--endpoint: {client.base_url} serves {', '.join(names)}; choose one by --model")
            name = name or names[0]
            if name not in names:
                raise ValueError(f"--model: {client.base_url} serves {', '.join(names)}, not {name}")
        assert name is not None
        return name

    def check(self) -> None:
        """Raises ValueError if a server does not have the model, or does not count a text's tokens as the target's
        tokenizer does."""
        if self._model_given is not None:
            self._find_model()
        own_count = len(self._tokenizer(PROBE)["input_ids"])
        for server, client in enumerate(self._clients):
            request = {"model": self.model, "prompt": PROBE, "max_tokens": 1, "temperature": 0}
            usage = self._request("POST", "completions", request, server).get("usage")
            server_count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
            if server_count != own_count:
                raise ValueError(
                    f"--endpoint: {client.base_url} counts {server_count} tokens in a text of which "
                    f"--target's tokenizer makes {own_count}; serve the target itself"
                )

    def __call__(self, prompts: Sequence[list[int]], seeds: Sequence[int]) -> Iterator[Completion]:
        """The prompts' completions, as they arrive. Raises ValueError if a server refuses, or none answers."""
        with ThreadPoolExecutor(self._concurrency) as pool:
            to_submit = enumerate(zip(prompts, seeds, strict=True))
            in_flight: set[Future[Completion]] = set()
            try:
                while True:
                    while len(in_flight) < self._concurrency and (following := next(to_submit, None)):
                        index, (prompt, seed) = following
                        in_flight.add(pool.submit(self._complete, index, prompt, seed))
                    if not in_flight:
                        return
                    done, in_flight = wait(in_flight, return_when=FIRST_COMPLETED)
                    for future in done:
                        yield future.result()
            finally:  # also after an error: requests that have not started are dropped
                pool.shutdown(wait=False, cancel_futures=True)

    def _complete(self, index: int, prompt: list[int], seed: int) -> Completion:
        # Servers take signed 64-bit seeds. Our own noise is the same for a seed and its signed form.
        signed = seed - 2**64 if seed >= 2**63 else seed
        request = {"model": self.model, "prompt": prompt, "seed": signed, **self._sampling}
        request["max_tokens"] = min(request["max_tokens"], self._positions - len(prompt))
        body = self._request("POST", "completions", request, next(self._next_server))
        choice, usage = body["choices"][0], body.get("usage")
        tokens = self._tokens(prompt, choice["text"])
        ended = choice.get("finish_reason") == "stop"
        count = usage.get("completion_tokens") if isinstance(usage, dict) else None
        return Completion(index, [*tokens, self._tokenizer.eos_token_id] if ended else tokens, ended, count)

    def _tokens(self, prompt: list[int], text: str) -> list[int]:
        """The tokens of a text that follows the prompt. If the tokenizer puts a blank before any text, they are taken
        from the text after a line end."""
        alone, head, whole = self._tokenizer([text, "\n", "\n" + text], add_special_tokens=False)["input_ids"]
        candidates = alone, whole[len(head) :]
        rust = self._tokenizer.backend_tokenizer
        return next((tokens for tokens in candidates if text_behind(rust, prompt, tokens) == text), alone)

    def _request(self, method: str, path: str, body: dict | None, server: int) -> dict:
        """The JSON body of a server's answer. After a failure that may pass, the next server is asked, or the same one
        again if the question is about it (its models, a probe).

        server: the index of the first one to ask; it may exceed their number."""
        why, pause = "", FIRST_PAUSE
        for attempt in range(TRIES):
            is_probe = body is None or isinstance(body.get("prompt"), str)  # is about this one server
            client = self._clients[(server + (0 if is_probe else attempt)) % len(self._clients)]
            wait_at_least = 0.0
            try:
                response = client.request(method, path, json=body)
                if response.status_code == 200:
                    return _checked(response, path, is_probe)
                why = f"{response.status_code}: {_message(response)}"
                if response.status_code not in RETRIED:
                    remedy = "; give --max-length, the server's most positions" if TOO_LONG.search(why) else ""
                    raise ValueError(f"--endpoint: {client.base_url}{path} refuses with {why}{remedy}")
                wait_at_least = _retry_after(response)
            except (httpx.RequestError, _Unreadable) as error:
                why = f"{type(error).__name__.lstrip('_')}: {error}"
            if attempt + 1 < TRIES:
                time.sleep(max(wait_at_least, pause))
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
        host = httpx.URL(url).host
    except (httpx.InvalidURL, ValueError) as error:  # ValueError: a name that no domain can have
        raise ValueError(f"--endpoint: {url!r} is no URL ({error}); give one, as http://localhost:8000") from error
    if not host:
        raise ValueError(f"--endpoint: {url!r} names no server; give a URL, as http://localhost:8000")


class _Unreadable(Exception):
    """A response's body is not what was requested; it may have been cut off."""


def _checked(response: httpx.Response, path: str, is_probe: bool) -> dict:
    """The response's JSON. Raises _Unreadable, also for an answer that neither ended nor reached its length, because it
    was broken off. For the single token of a probe, that does not matter."""
    try:
        body = response.json()
    except ValueError:
        raise _Unreadable(f"no JSON: {response.text[:80]!r}") from None
    if path == "completions":
        try:
            choice = body["choices"][0]
            text = choice["text"]
        except (KeyError, IndexError, TypeError):
            raise _Unreadable(f"no choices: {response.text[:80]!r}") from None
        if not isinstance(text, str):
            raise _Unreadable(f"no text: {response.text[:80]!r}")
        if not is_probe and choice.get("finish_reason") not in FINISHED:
            raise _Unreadable(f"finish_reason {choice.get('finish_reason')!r}, and neither stop nor length")
    return body


def _message(response: httpx.Response) -> str:
    """A server's error message, in OpenAI's format, or else the beginning of the body."""
    try:
        body = response.json()
        return str(body.get("error", body).get("message", body))
    except (ValueError, AttributeError):
        return response.text[:200]


def _retry_after(response: httpx.Response) -> float:
    """Seconds of the Retry-After header; 0 if there is none."""
    seconds = response.headers.get("retry-after", "")
    return min(float(seconds), LONGEST_PAUSE) if seconds.isdecimal() else 0.0
