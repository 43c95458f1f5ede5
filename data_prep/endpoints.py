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

from longdraft.data_prep.regenerate import Completion
from longdraft.models.schema import validate

KEY = "OPENAI_API_KEY"
TRIES, LONGEST_PAUSE = 8, 60.0  # of one request; in seconds, doubled after each try from 1 on
RETRIED = (408, 425, 429)  # and all of the servers' own errors


class _Choice(BaseModel):
    text: str
    finish_reason: Literal["stop", "length"]  # with any other the answer was broken off


class _Completions(BaseModel):
    choices: list[_Choice] = Field(min_length=1)


class EndpointClient:
    """A client of servers with the same model: a `Generate` of regenerate.py.

    Args:
        urls: each server's URL, with or without the /v1.
        sampling: fields of a request besides prompt and seed: max_tokens, temperature, ..., and the model's name for
            servers that need one.
        positions: most tokens of a prompt and its answer together; max_tokens is lowered accordingly.
        concurrency: the number of requests in flight. seconds: timeout of a request.

    Raises ValueError for a URL that is not valid.
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

    def __call__(self, prompts: Sequence[list[int]], seeds: Sequence[int]) -> Iterator[Completion]:
        """The prompts' completions, in order. Raises ValueError if a server refuses, or none answers; then requests
        that have not started are dropped."""
        with ThreadPoolExecutor(self._concurrency) as pool:
            yield from pool.map(self._complete, range(len(prompts)), prompts, seeds)

    def _complete(self, index: int, prompt: list[int], seed: int) -> Completion:
        """Ask a server, and after a failure that may pass the next one, TRIES times in all."""
        # Servers take signed 64-bit seeds. Our own noise is the same for a seed and its signed form.
        signed = seed - 2**64 if seed >= 2**63 else seed
        request = {**self._sampling, "prompt": prompt, "seed": signed}
        request["max_tokens"] = min(request["max_tokens"], self._positions - len(prompt))
        why = ""
        for attempt in range(TRIES):
            server = self._servers[(index + attempt) % len(self._servers)]
            time.sleep(min(2.0 ** (attempt - 1), LONGEST_PAUSE) if attempt else 0)
            try:
                response = self._client.post(server, json=request)
                if response.is_client_error and response.status_code not in RETRIED:
                    raise ValueError(
                        f"--endpoint: {server} refuses with {response.status_code}: {response.text[:300]}; for too "
                        "long a prompt give --max-length"
                    )
                choice = _Completions.model_validate_json(response.raise_for_status().content).choices[0]
                return Completion(index, choice.text, choice.finish_reason == "stop")
            except (httpx.HTTPError, ValidationError) as error:
                why = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"--endpoint: the servers did not answer in {TRIES} tries, the last time with {why}; finished parts are "
            "kept, the same call goes on"
        )
