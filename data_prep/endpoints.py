"""Gets completions from OpenAI-style servers (vLLM, SGLang, `longdraft serve`) instead of from an engine of our own.

A prompt is sent to /v1/completions as token ids, so that the target's own template and tokenizer make it, and not the
server's chat template.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import httpx
from pydantic import BaseModel, Field, HttpUrl, ValidationError

from longdraft.data_prep.response_generation import Completion
from longdraft.models.schema import validate

KEY = "OPENAI_API_KEY"
TRIES, LONGEST_PAUSE = 8, 60.0  # of one request; in seconds, doubled after each try from 1 on
RETRIED = (408, 425, 429)  # and all of the servers' own errors
# A text of several scripts, with numbers and blanks, which other tokenizers split into a different number of tokens.
PROBE = "The 3 quick brown foxes' tails: 12,345.67 + x_i = naïve façade;\n\tЖизнь 世界 🙂, `def f(x): return x**2`"


class _Choice(BaseModel):
    text: str
    finish_reason: Literal["stop", "length"]  # with any other the answer was broken off


class _Completions(BaseModel):
    choices: list[_Choice] = Field(min_length=1)
    usage: dict[str, Any] | None = None


class EndpointClient:
    """A client of servers with the same model: a `Generate` of response_generation.py.

    Args:
        urls: each server's URL, with or without the /v1.
        sampling: fields of a request besides prompt and seed: max_tokens, temperature, ..., and the model's name for
            servers that need one.
        positions: most tokens of a prompt and its answer together; max_tokens is lowered accordingly.
        concurrency: the number of requests in flight.
        seconds: timeout of a request.
    Raises:
        ValueError: a URL is not valid.
    """

    def __init__(
        self,
        urls: Sequence[str],
        sampling: Mapping[str, Any],
        positions: int,
        concurrency: int = 64,
        seconds: float = 600.0,
    ):
        for url in urls:
            validate(HttpUrl, url, f"--endpoint: {url!r}")
        self._servers = [url.rstrip("/").removesuffix("/v1") + "/v1/completions" for url in urls]
        self._sampling, self._positions, self._concurrency = dict(sampling), positions, concurrency
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=concurrency * len(urls))
        headers = {"Authorization": f"Bearer {os.environ[KEY]}"} if os.environ.get(KEY) else {}
        self._client = httpx.Client(headers=headers, limits=limits, timeout=seconds)

    def check(self, n_tokens: int) -> None:
        """Raises ValueError if a server does not count `n_tokens` in PROBE, as the target's tokenizer does."""
        for number, server in enumerate(self._servers):
            found = (self._request(number, prompt=PROBE, max_tokens=1).usage or {}).get("prompt_tokens")
            if found != n_tokens:
                raise ValueError(
                    f"--endpoint: {server} counts {found} tokens in a text of which --target's tokenizer makes "
                    f"{n_tokens}; serve the target itself"
                )

    def __call__(self, prompts: Sequence[list[int]], seeds: Sequence[int]) -> Iterator[Completion]:
        """The prompts' completions, in order. Raises ValueError if a server refuses, or none answers; then requests
        that have not started are dropped."""
        with ThreadPoolExecutor(self._concurrency) as pool:
            yield from pool.map(self._complete, range(len(prompts)), prompts, seeds)

    def _complete(self, index: int, prompt: list[int], seed: int) -> Completion:
        # Servers take signed 64-bit seeds. Our own noise is the same for a seed and its signed form.
        signed = seed - 2**64 if seed >= 2**63 else seed
        most = min(self._sampling["max_tokens"], self._positions - len(prompt))
        choice = self._request(index, prompt=prompt, seed=signed, max_tokens=most).choices[0]
        return Completion(index, choice.text, choice.finish_reason == "stop")

    def _request(self, first: int, **fields: Any) -> _Completions:
        """The answer of a server. After a failure that may pass, the next server is asked, TRIES times in all.

        Raises ValueError if a server refuses the request, or if none answers it."""
        why = ""
        for attempt in range(TRIES):
            server = self._servers[(first + attempt) % len(self._servers)]
            time.sleep(min(2.0 ** (attempt - 1), LONGEST_PAUSE) if attempt else 0)
            try:
                response = self._client.post(server, json=self._sampling | fields)
                if response.is_client_error and response.status_code not in RETRIED:
                    raise ValueError(
                        f"--endpoint: {server} refuses with {response.status_code}: {response.text[:300]}; for too "
                        "long a prompt give --max-length"
                    )
                return _Completions.model_validate_json(response.raise_for_status().content)
            except (httpx.HTTPError, ValidationError) as error:
                why = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"--endpoint: the servers did not answer in {TRIES} tries, the last time with {why}; finished parts are "
            "kept, the same call goes on"
        )
