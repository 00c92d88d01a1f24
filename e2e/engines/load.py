"""Clients that ask engines all the time while rounds change their weights, and keep every answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from e2e.engines.asking import Answer


@dataclass(frozen=True)
class Asked:
    """One request and its end."""

    prompt: list[int]
    answer: Answer


class Clients:
    """Threads that ask one request after the other from entering to leaving; the last ones are waited for.

    ``ask``: sends one prompt. Nothing is retried: the first failure of each thread is kept in ``failures`` and ends it.
    """

    def __init__(self, ask: Callable[[list[int]], Answer], prompts: list[list[int]]) -> None:
        self._ask = ask
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(prompt,)) for prompt in prompts]
        self.done: list[Asked] = []
        self.failures: list[BaseException] = []

    def _run(self, prompt: list[int]) -> None:
        try:
            while not self._stop.is_set():
                self.done.append(Asked(prompt, self._ask(prompt)))
        except Exception as error:  # noqa: BLE001 - whatever a client would see; the test looks at it
            self.failures.append(error)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
