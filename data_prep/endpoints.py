"""Gets completions from OpenAI-style servers (vLLM, SGLang, `longdraft serve`) instead of from an engine of our own.

A prompt is sent to /v1/completions as token ids, so that the target's own template and tokenizer make it, not those of
the server.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Literal

import httpx
from pydantic import BaseModel, Field, HttpUrl, ValidationError

from longdraft.data_prep.regenerate import Completion, Due
from longdraft.models.schema import validate

KEY = "OPENAI_API_KEY"
TRIES, LONGEST_PAUSE = 8, 60.0  # of one request; pauses start at 1 s and double after each try
SECONDS = 3600.0
RETRIED = (408, 425, 429)  # in addition to all server errors (5xx)
OF_PROMPTS = (400, 413, 422)  # the fault of the prompt, if the server answers others


class _Choice(BaseModel):
    text: str
    finish_reason: Literal["stop", "length"]  # any other means that the answer was aborted


class _Completions(BaseModel):
    choices: list[_Choice] = Field(min_length=1)


class EndpointClient:
    """A client of servers with the same model: a `Generate` of regenerate.py.

    Args:
        urls: each server's URL, with or without the /v1.
        sampling: fields of a request besides prompt and seed: max_tokens, temperature, ..., and the model's name for
            servers that need one.
        positions: the most tokens of a prompt and its answer together; max_tokens is lowered accordingly.
        concurrency: the number of requests in flight. seconds: how long to wait for an answer, which arrives as a whole
            after its last token.

    Raises ValueError for a URL that is not valid.
    """

    def __init__(
        self,
        urls: Sequence[str],
        sampling: Mapping[str, Any],
        positions: int,
        concurrency: int = 64,
        seconds: float = SECONDS,
    ):
        for url in urls:
            validate(HttpUrl, url, f"--endpoint: {url!r}")
        self._servers = [url.rstrip("/").removesuffix("/v1") + "/v1/completions" for url in urls]
        self._sampling, self._positions, self._concurrency = dict(sampling), positions, concurrency
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=concurrency * len(urls))
        headers = {"Authorization": f"Bearer {os.environ[KEY]}"} if os.environ.get(KEY) else {}
        timeout = httpx.Timeout(seconds, connect=min(seconds, 60.0))
        self._client, self._answered = httpx.Client(headers=headers, limits=limits, timeout=timeout), 0

    def __call__(self, due: Due) -> Iterator[Completion]:
        """The prompts' completions, as they arrive. Raises ValueError if the servers refuse all prompts or none
        answers; requests that have not started are then dropped."""
        pool, asked, finished = ThreadPoolExecutor(self._concurrency), set[Future[Completion]](), list[Completion]()
        try:
            while due or asked:
                while due and len(asked) < self._concurrency:  # later turns first: a server may still cache their start
                    index, (prompt, seed) = due.popitem()
                    asked.add(pool.submit(self._complete, index, prompt, seed))
                done, asked = wait(asked, return_when=FIRST_COMPLETED)
                finished += [future.result() for future in done]
                if self._answered:  # until then all are refused, perhaps not because of the prompts
                    yield from finished
                    finished.clear()
        finally:
            pool.shutdown(cancel_futures=True)
        if finished:
            raise ValueError(f"--endpoint: {finished[0].refused}; for too long a prompt give --max-length")

    def _complete(self, index: int, prompt: list[int], seed: int) -> Completion:
        """Send a request, after a temporary failure to the next server, TRIES times in all. If all tries fail while
        other requests are answered, the prompt is at fault."""
        # Servers take signed 64-bit seeds. Our own noise is the same for a seed and its signed form.
        signed = seed - 2**64 if seed >= 2**63 else seed
        request = {**self._sampling, "prompt": prompt, "seed": signed}
        request["max_tokens"] = min(request["max_tokens"], self._positions - len(prompt))
        why, answered, failed = "", 0, False
        for attempt in range(TRIES):
            server, answered = self._servers[(index + attempt) % len(self._servers)], self._answered
            time.sleep(min(2.0 ** (attempt - 1), LONGEST_PAUSE) if attempt else 0)
            response = None
            try:
                response = self._client.post(server, json=request)
                if response.is_client_error and response.status_code not in RETRIED:
                    why = f"{server} refuses with {response.status_code}: {response.text[:300]}"
                    if response.status_code not in OF_PROMPTS:
                        raise ValueError(f"--endpoint: {why}")
                    return Completion(index, "", False, why)
                choice = _Completions.model_validate_json(response.raise_for_status().content).choices[0]
                self._answered += 1
                return Completion(index, choice.text, choice.finish_reason == "stop")
            except (httpx.HTTPError, ValidationError) as error:
                failed = isinstance(error, ValidationError) or (response is not None and response.is_server_error)
                why = " ".join(f"{type(error).__name__}: {error}".split())
        if failed and self._answered > answered:  # during the last pause or try
            return Completion(index, "", False, f"no answer in {TRIES} tries, the last time with {why}")
        raise ValueError(
            f"--endpoint: the servers did not answer in {TRIES} tries, the last time with {why}; finished parts are "
            "kept, and the same call resumes"
        )
