"""Rollouts over HTTP: what a trainer asks of a fleet, and what it believes of the answers.

Invariant: nothing is retried and nothing is repaired. An answer that is not 200, was aborted, is shorter than asked
for, or whose version spans do not cover its tokens, ends the run with :class:`RolloutError`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

T = TypeVar("T")


class RolloutError(Exception):
    """The fleet did not answer a rollout as it must."""


@dataclass(frozen=True)
class Span:
    """Output tokens ``[start, stop)`` and the version label under which the engine says it sampled them."""

    version: str
    start: int
    stop: int


@dataclass(frozen=True)
class Sample:
    """One finished rollout. ``logprobs`` are the engine's, one per output token."""

    prompt: list[int]
    output: list[int]
    logprobs: list[float]
    spans: tuple[Span, ...]
    retractions: int


#: The engines whose surface a client can speak: SGLang's (and the reference engine's), and vLLM's.
APIS = ("sglang", "vllm")


def request(api: str, prompt: Sequence[int], new_tokens: int) -> tuple[str, dict[str, Any]]:
    """Path and body of one request that is sampled at temperature 1 and does not end before its length."""
    how: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True}
    if api == "vllm":
        how |= {"max_tokens": new_tokens, "logprobs": 0}
        return "/inference/v1/generate", {"token_ids": list(prompt), "sampling_params": how}
    how["max_new_tokens"] = new_tokens
    return "/generate", {"input_ids": list(prompt), "return_logprob": True, "sampling_params": how}


def parse(prompt: Sequence[int], new_tokens: int, answer: Any, api: str = "sglang") -> Sample:
    """Check one answer to such a request. RolloutError that says what is wrong with it."""
    try:
        meta = answer["choices"][0] if api == "vllm" else answer["meta_info"]
        if api == "vllm":
            output = [int(t) for t in meta["token_ids"]]
            pairs = [(float(c["logprob"]), int(c["token_id"])) for c in meta["logprobs"]["content"]]
            reason, retractions = str(meta["finish_reason"]), 0  # it does not tell whether it computed a part anew
        else:
            output = [int(t) for t in answer["output_ids"]]
            pairs = [(float(p), int(t)) for p, t, _ in meta["output_token_logprobs"]]
            reason, retractions = str(meta["finish_reason"]["type"]), int(meta["num_retractions"])
        spans = tuple(Span(str(s["version"]), int(s["start"]), int(s["end"])) for s in meta["weight_versions"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise RolloutError(f"malformed answer ({error!r}): {str(answer)[:200]}") from error
    if reason != "length" or len(output) != new_tokens:
        raise RolloutError(f"asked for {new_tokens} tokens, got {len(output)} with finish reason {reason}")
    if [t for _, t in pairs] != output:
        raise RolloutError("log-probabilities belong to other tokens than the answer's")
    covered = [i for span in spans for i in range(span.start, span.stop)]
    if covered != list(range(new_tokens)):
        raise RolloutError(f"version spans {spans} do not cover tokens 0..{new_tokens}")
    return Sample(list(prompt), output, [p for p, _ in pairs], spans, retractions)


class RolloutClient:
    """Sends rollouts to a router (or one engine) from its own thread, so that they go on while a sync blocks.

    ``api``: of ``APIS``. ``timeout``: seconds until one request must be answered, the time it waits in a paused engine
    included.
    """

    def __init__(self, url: str, *, api: str = "sglang", timeout: float = 120) -> None:
        self._url = url.rstrip("/")
        self._api = api
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._thread.start()
        self._session = self._run(self._open()).result()

    async def _open(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(timeout=self._timeout, connector=aiohttp.TCPConnector(limit=0))

    def _run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def submit(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, temperature: float = 1.0
    ) -> Future[list[Sample]]:
        """Start one request per prompt, all at once; the future ends with all samples or the first RolloutError."""

        async def all_of_them() -> list[Sample]:
            return list(await asyncio.gather(*(self._one(list(p), new_tokens) for p in prompts)))

        return self._run(all_of_them())

    async def _one(self, prompt: list[int], new_tokens: int) -> Sample:
        path, body = request(self._api, prompt, new_tokens)
        try:
            async with self._session.post(self._url + path, json=body) as response:
                if response.status != 200:
                    raise RolloutError(f"POST {path}: {response.status} {(await response.text())[:200]}")
                return parse(prompt, new_tokens, await response.json(), self._api)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise RolloutError(f"POST {path}: {error!r}") from error

    def wait_serving(self, prompt: Sequence[int], seconds: float) -> None:
        """Wait until the fleet answers at all (routers and engines are starting). RolloutError after ``seconds``."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                self.submit([prompt], 1).result()
                return
            except RolloutError as error:
                if time.monotonic() > deadline:
                    raise RolloutError(f"no answer within {seconds:.0f} s: {error}") from error
                time.sleep(0.2)

    def close(self) -> None:
        """End the session and the thread."""
        self._run(self._session.close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> RolloutClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
