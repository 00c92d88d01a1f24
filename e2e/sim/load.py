"""``python -m e2e.sim.load``: a client that asks a router for answers all the time and keeps the books.

It never retries: every answer that is not a whole one is counted as failed, by kind, and the versions that answered
are counted from the engines' own token spans. Ends on SIGTERM, SIGINT or after ``--seconds``: requests in flight are
waited for, then the summary is written. While it runs the summary file is renewed every two seconds, so that even a
killed client leaves its books.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from .model import MODELS
from .rollouts import APIS, RolloutError, parse, request
from .task import prompts


@dataclass
class Books:
    """What was asked and what came back. ``failures``: by kind; ``versions``: label -> answers it took part in."""

    sent: int = 0
    answered: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    versions: Counter[str] = field(default_factory=Counter)
    crossing: int = 0
    retracted: int = 0
    slowest_seconds: float = 0.0

    @property
    def failed(self) -> int:
        """Requests that did not end in a whole answer."""
        return sum(self.failures.values())

    def fail(self, kind: str, detail: str) -> None:
        """Count one failure; the first detail of each kind is kept."""
        self.failures[kind] += 1
        self.examples.setdefault(kind, detail[:300])

    def summary(self, *, ended: bool) -> dict[str, Any]:
        """The JSON-ready summary; ``inFlight`` is 0 once ended."""
        return {
            "ended": ended,
            "sent": self.sent,
            "answered": self.answered,
            "failed": self.failed,
            "inFlight": self.sent - self.answered - self.failed,
            "failures": dict(self.failures),
            "examples": self.examples,
            "versions": dict(self.versions),
            "crossing": self.crossing,
            "retracted": self.retracted,
            "slowestSeconds": round(self.slowest_seconds, 3),
        }


def classify(error: BaseException) -> str:
    """The kind of a failure below HTTP."""
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "connect"
    if isinstance(error, aiohttp.ClientPayloadError | json.JSONDecodeError):
        return "truncated"
    return "reset"


async def ask(
    session: aiohttp.ClientSession, url: str, prompt: list[int], new_tokens: int, books: Books, api: str
) -> None:
    """Send one request and book its end."""
    path, body = request(api, prompt, new_tokens)
    books.sent += 1
    began = time.monotonic()
    try:
        async with session.post(url + path, json=body) as response:
            if response.status != 200:
                books.fail(f"http{response.status}", await response.text())
                return
            answer = await response.json()
    except (aiohttp.ClientError, TimeoutError, json.JSONDecodeError) as error:
        books.fail(classify(error), repr(error))
        return
    finally:
        books.slowest_seconds = max(books.slowest_seconds, time.monotonic() - began)
    try:
        sample = parse(prompt, new_tokens, answer, api)
    except RolloutError as error:
        books.fail("abort" if "finish reason abort" in str(error) else "truncated", str(error))
        return
    books.answered += 1
    books.versions.update({span.version for span in sample.spans})
    books.crossing += len(sample.spans) > 1
    books.retracted += sample.retractions > 0


async def run(arguments: argparse.Namespace, books: Books) -> None:
    """Ask until told to stop; see the module."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    if arguments.seconds is not None:
        loop.call_later(arguments.seconds, stop.set)
    url = arguments.router.rstrip("/")
    rng = random.Random(arguments.seed)
    vocabulary = MODELS[arguments.model].vocab_size

    async def pause(seconds: float) -> None:
        try:
            await asyncio.wait_for(stop.wait(), seconds)
        except TimeoutError:
            return

    async def worker(session: aiohttp.ClientSession) -> None:
        while not stop.is_set():
            new_tokens = rng.randint(arguments.min_tokens, arguments.max_tokens)
            await ask(session, url, prompts(rng, 1, vocabulary)[0], new_tokens, books, arguments.api)
            await pause(arguments.pause)

    async def bookkeeper() -> None:
        while not stop.is_set():
            write(arguments.summary, books.summary(ended=False))
            await pause(2)

    timeout = aiohttp.ClientTimeout(total=arguments.timeout)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        waiting = Books()
        deadline = time.monotonic() + arguments.wait_serving
        while not stop.is_set() and not waiting.answered and time.monotonic() < deadline:
            await ask(session, url, prompts(rng, 1, vocabulary)[0], 1, waiting, arguments.api)
            if not waiting.answered:
                await pause(0.2)
        await asyncio.gather(bookkeeper(), *(worker(session) for _ in range(arguments.concurrency)))


def write(path: Path | None, summary: dict[str, Any]) -> None:
    """Replace the summary file in one step."""
    if path is None:
        return
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(json.dumps(summary, indent=2) + "\n")
    os.replace(fresh, path)


def main() -> int:
    """Run and print the summary. Exit code 1 when anything failed or nothing was answered."""
    parser = argparse.ArgumentParser(prog="python -m e2e.sim.load", description=__doc__)
    parser.add_argument("--router", required=True, help="base URL that answers /generate")
    parser.add_argument("--summary", type=Path, help="JSON file, renewed while running")
    parser.add_argument("--seconds", type=float, help="default: until SIGTERM")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.02, help="seconds between two requests of one worker")
    parser.add_argument("--min-tokens", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds until a request counts as failed")
    parser.add_argument("--wait-serving", type=float, default=0.0, help="seconds to wait for a first answer, uncounted")
    parser.add_argument("--model", choices=sorted(MODELS), default="tiny")
    parser.add_argument("--api", choices=APIS, default="sglang", help="what the engines behind the router speak")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    books = Books()
    asyncio.run(run(arguments, books))
    summary = books.summary(ended=True)
    write(arguments.summary, summary)
    print(json.dumps(summary), flush=True)
    return 1 if books.failed or not books.answered else 0


if __name__ == "__main__":
    sys.exit(main())
