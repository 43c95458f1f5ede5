"""Gets completions from OpenAI-style servers (vLLM, SGLang, `longdraft serve`) instead of from an engine of our own.

A prompt is sent to /v1/completions as token ids, so that the target's own template and tokenizer make it, and not the
server's chat template. A server answers with text, which the target's tokenizer turns back into tokens.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count, cycle, islice
from typing import Any, Literal, TypeVar

import httpx
from pydantic import BaseModel, Field, HttpUrl, ValidationError

from longdraft.data_prep.response_generation import Completion, text_behind
from longdraft.models.schema import one_line, validate

KEY = "OPENAI_API_KEY"
TRIES, LONGEST_PAUSE = 8, 60.0  # of one request; in seconds, doubled after each try from 1 on
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


class _Completions(BaseModel):
    choices: list[_Choice] = Field(min_length=1)
    usage: dict[str, Any] | None = None


Body = TypeVar("Body", bound=BaseModel)


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
        self._sampling, self._tokenizer, self._positions = dict(sampling), tokenizer, positions
        self._concurrency, self._next_server = concurrency, count()
        bases = [str(validate(HttpUrl, url, "--endpoint")).rstrip("/").removesuffix("/v1") for url in urls]
        self._servers = [f"{base}/v1" for base in bases]
        headers = {"Authorization": f"Bearer {os.environ[KEY]}"} if os.environ.get(KEY) else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=concurrency * len(urls))
        self._client = httpx.Client(
            headers=headers, limits=limits, timeout=httpx.Timeout(seconds, connect=CONNECT_SECONDS)
        )
        # A given name is not looked up, so that a call that finds its work done asks no server.
        self.model = model or self._only_model()

    def _only_model(self) -> str:
        lists = [self._request(_Models, "models", None, [server]).data for server in self._servers]
        names = sorted({model.id for models in lists for model in models})
        if len(names) != 1:
            raise ValueError(f"--model: the servers have {', '.join(names) or 'none'}; name the target's")
        return names[0]

    def check(self) -> None:
        """Raises ValueError if a server does not have the model, or does not count a text's tokens as the target's
        tokenizer does."""
        own_count = len(self._tokenizer(PROBE)["input_ids"])
        request = {"model": self.model, "prompt": PROBE, "max_tokens": 1, "temperature": 0}
        for server in self._servers:
            found = (self._request(_Completions, "completions", request, [server]).usage or {}).get("prompt_tokens")
            if found != own_count:
                raise ValueError(
                    f"--endpoint: {server} counts {found} tokens in a text of which --target's tokenizer makes "
                    f"{own_count}; serve the target itself"
                )

    def __call__(self, prompts: Sequence[list[int]], seeds: Sequence[int]) -> Iterator[Completion]:
        """The prompts' completions, in order. Raises ValueError if a server refuses, or none answers; then requests
        that have not started are dropped."""
        with ThreadPoolExecutor(self._concurrency) as pool:
            yield from pool.map(self._complete, range(len(prompts)), prompts, seeds)

    def _complete(self, index: int, prompt: list[int], seed: int) -> Completion:
        # Servers take signed 64-bit seeds. Our own noise is the same for a seed and its signed form.
        signed = seed - 2**64 if seed >= 2**63 else seed
        request = {"model": self.model, "prompt": prompt, "seed": signed, **self._sampling}
        request["max_tokens"] = min(request["max_tokens"], self._positions - len(prompt))
        first = next(self._next_server) % len(self._servers)
        servers = self._servers[first:] + self._servers[:first]
        (choice, *_) = self._request(_Completions, "completions", request, servers).choices
        ended = choice.finish_reason == "stop"
        end = [self._tokenizer.eos_token_id] if ended else []
        return Completion(index, [*self._tokens(prompt, choice.text), *end], ended)

    def _tokens(self, prompt: list[int], text: str) -> list[int]:
        """The tokens of a text that follows the prompt. If the tokenizer puts a blank before any text, they are taken
        from the text after a line end."""
        alone, head, whole = self._tokenizer([text, "\n", "\n" + text], add_special_tokens=False)["input_ids"]
        candidates = alone, whole[len(head) :]
        rust = self._tokenizer.backend_tokenizer
        return next((tokens for tokens in candidates if text_behind(rust, prompt, tokens) == text), alone)

    def _request(self, kind: type[Body], path: str, body: dict | None, servers: Sequence[str]) -> Body:
        """The body of an answer. After a failure that may pass, the next of the servers is asked, TRIES times in all.

        Raises ValueError if a server refuses the request, or if none answers it."""
        why = ""
        for attempt, server in enumerate(islice(cycle(servers), TRIES)):
            if attempt:
                time.sleep(min(2.0 ** (attempt - 1), LONGEST_PAUSE))
            try:
                response = self._client.request("GET" if body is None else "POST", f"{server}/{path}", json=body)
                if response.status_code == 200:
                    return kind.model_validate_json(response.content)
                why = f"{response.status_code}: {' '.join(response.text[:300].split())}"
                if response.status_code not in RETRIED:
                    remedy = "if the prompts are too long for it, give --max-length"
                    raise ValueError(f"--endpoint: {server}/{path} refuses with {why}; {remedy}")
            except httpx.RequestError as error:
                why = f"{type(error).__name__}: {error}"
            except ValidationError as error:
                why = one_line(error)
        raise ValueError(
            f"--endpoint: {' and '.join(servers)} did not answer {path} in {TRIES} tries, the last time with {why}; "
            "finished parts are kept, the same call goes on"
        )
