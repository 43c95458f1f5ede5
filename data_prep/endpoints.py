"""Gets completions from OpenAI-style servers (vLLM, SGLang, `longdraft serve`) instead of from an engine of our own.

A prompt is sent to /v1/completions as token ids, so that the target's own template and tokenizer make it, and not the
server's chat template. A server answers with text, which the target's tokenizer turns back into tokens.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import count, cycle, islice
from typing import Any, Literal, TypeVar

import httpx
from pydantic import BaseModel, Field, ValidationError

from longdraft.data_prep.response_generation import Completion, text_behind
from longdraft.models.schema import one_line

KEY = "OPENAI_API_KEY"
TRIES, FIRST_PAUSE, LONGEST_PAUSE = 8, 1.0, 60.0  # of one request; in seconds, doubled after each try
RETRIED = (408, 425, 429, 500, 502, 503, 504)
CONNECT_SECONDS = 20.0
# A text of several scripts, with numbers and blanks, which other tokenizers split into a different number of tokens.
PROBE = "The 3 quick brown foxes' tails: 12,345.67 + x_i = naïve façade;\n\tЖизнь 世界 🙂, `def f(x): return x**2`"


class _Model(BaseModel):
    id: str


class _Models(BaseModel):
    data: list[_Model]


class _Choice(BaseModel):
    text: str
    finish_reason: Literal["stop", "length"]  # with any other the answer was broken off


class _Usage(BaseModel):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Completions(BaseModel):
    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage | None = None


Body = TypeVar("Body", _Models, _Completions)


class EndpointClient:
    """A client of servers with the same model. Call `check` once; then it is a `Generate` of response_generation.py.

    Args:
        urls: each server's URL, with or without the /v1.
        sampling: fields of a request besides prompt and seed: max_tokens, temperature, ...
        tokenizer: the target's transformers tokenizer. An answer that ended gets its EOS token.
        positions: most tokens of a prompt and its answer together; max_tokens is lowered accordingly.
        model: the model's name on the servers; None: the only model that they have.
        concurrency: the number of requests in flight.
        seconds: timeout of a request.
    Raises:
        ValueError: a URL is not valid, or without `model`: the servers have no model, several, or different ones.
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
            raise ValueError(f"--concurrency: {concurrency}; give at least 1")
        self._sampling, self._tokenizer, self._positions = dict(sampling), tokenizer, positions
        self._concurrency, self._next_server = concurrency, count()
        headers = {"Authorization": f"Bearer {os.environ[KEY]}"} if os.environ.get(KEY) else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=concurrency)
        timeout = httpx.Timeout(seconds, connect=CONNECT_SECONDS)
        bases = [_base_url(url) for url in urls]
        self._clients = [httpx.Client(base_url=base, headers=headers, limits=limits, timeout=timeout) for base in bases]
        # A given name is not looked up, so that a call that finds its work done asks no server.
        self.model = model or self._only_model()

    def _only_model(self) -> str:
        """The one model of all servers. Raises ValueError if they have none, several, or different ones."""
        lists = [self._request(_Models, "models", None, [client]).data for client in self._clients]
        names = sorted({model.id for models in lists for model in models})
        if len(names) != 1:
            raise ValueError(f"--model: the servers have {', '.join(names) or 'none'}; name the target's")
        return names[0]

    def check(self) -> None:
        """Raises ValueError if a server does not have the model, or does not count a text's tokens as the target's
        tokenizer does."""
        own_count = len(self._tokenizer(PROBE)["input_ids"])
        request = {"model": self.model, "prompt": PROBE, "max_tokens": 1, "temperature": 0}
        for client in self._clients:
            usage = self._request(_Completions, "completions", request, [client]).usage
            found = usage and usage.prompt_tokens
            if found != own_count:
                raise ValueError(
                    f"--endpoint: {client.base_url} counts {found} tokens in a text of which --target's tokenizer "
                    f"makes {own_count}; serve the target itself"
                )

    def __call__(self, prompts: Sequence[list[int]], seeds: Sequence[int]) -> Iterator[Completion]:
        """The prompts' completions, as they arrive. Raises ValueError if a server refuses, or none answers."""
        with ThreadPoolExecutor(self._concurrency) as pool:
            requests = enumerate(zip(prompts, seeds, strict=True))
            futures = [pool.submit(self._complete, index, prompt, seed) for index, (prompt, seed) in requests]
            try:
                for future in as_completed(futures):
                    yield future.result()
            finally:  # after an error, requests that have not started are dropped
                pool.shutdown(wait=False, cancel_futures=True)

    def _complete(self, index: int, prompt: list[int], seed: int) -> Completion:
        # Servers take signed 64-bit seeds. Our own noise is the same for a seed and its signed form.
        signed = seed - 2**64 if seed >= 2**63 else seed
        request = {"model": self.model, "prompt": prompt, "seed": signed, **self._sampling}
        request["max_tokens"] = min(request["max_tokens"], self._positions - len(prompt))
        first = next(self._next_server) % len(self._clients)
        servers = self._clients[first:] + self._clients[:first]
        body = self._request(_Completions, "completions", request, servers)
        tokens = self._tokens(prompt, body.choices[0].text)
        ended = body.choices[0].finish_reason == "stop"
        tokens = [*tokens, self._tokenizer.eos_token_id] if ended else tokens
        return Completion(index, tokens, ended, body.usage and body.usage.completion_tokens)

    def _tokens(self, prompt: list[int], text: str) -> list[int]:
        """The tokens of a text that follows the prompt. If the tokenizer puts a blank before any text, they are taken
        from the text after a line end."""
        alone, head, whole = self._tokenizer([text, "\n", "\n" + text], add_special_tokens=False)["input_ids"]
        candidates = alone, whole[len(head) :]
        rust = self._tokenizer.backend_tokenizer
        return next((tokens for tokens in candidates if text_behind(rust, prompt, tokens) == text), alone)

    def _request(self, kind: type[Body], path: str, body: dict | None, servers: Sequence[httpx.Client]) -> Body:
        """The body of an answer. After a failure that may pass, the next of the servers is asked, TRIES times in all.

        Raises ValueError if a server refuses the request, or if none answers it."""
        why, pause = "", FIRST_PAUSE
        for attempt, server in enumerate(islice(cycle(servers), TRIES), start=1):
            try:
                response = server.request("GET" if body is None else "POST", path, json=body)
                if response.status_code == 200:
                    return kind.model_validate_json(response.content)
                why = f"{response.status_code}: {' '.join(response.text[:300].split())}"
                if response.status_code not in RETRIED:
                    remedy = "if the prompts are too long for it, give --max-length"
                    raise ValueError(f"--endpoint: {server.base_url}{path} refuses with {why}; {remedy}")
            except httpx.RequestError as error:
                why = f"{type(error).__name__}: {error}"
            except ValidationError as error:
                why = one_line(error)
            if attempt < TRIES:
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        where = " and ".join(str(server.base_url) for server in servers)
        raise ValueError(
            f"--endpoint: {where} did not answer {path} in {TRIES} tries, the last time with {why}; finished parts are "
            "kept, the same call goes on"
        )


def _base_url(url: str) -> str:
    """The URL with /v1 at its end. Raises ValueError for a URL that is not valid."""
    try:
        valid = url.startswith(("http://", "https://")) and httpx.URL(url).host
    except (httpx.InvalidURL, ValueError):  # ValueError: a name that no domain can have
        valid = False
    if not valid:
        raise ValueError(f"--endpoint: {url!r} is not a URL; give one such as http://localhost:8000")
    return url.rstrip("/").removesuffix("/v1") + "/v1"
