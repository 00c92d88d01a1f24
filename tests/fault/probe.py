"""Looks at engines, and asks them what users ask, all the time, and hands what it sees to the checker.

Invariant: it changes nothing. What it saw is judged LAG_SECONDS later, when commits of that time are known.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import httpx

from rlfleet.api import labels
from tests.fault.history import Recorder
from tests.fault.invariants import LAG_SECONDS, Checker

_TIMEOUT = httpx.Timeout(5.0, connect=1.0)
_ASK = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2, "temperature": 0}}


class Prober:
    """Samples every running engine of the recorder's pods each ``every`` seconds, and a router if there is one.

    ``router``: its URL of the moment, or None while there is none. A pool behind a router serves through it only.
    """

    def __init__(
        self,
        recorder: Recorder,
        checker: Checker,
        *,
        every: float = 0.3,
        routed: bool = False,
        router: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._recorder = recorder
        self._checker = checker
        self._every = every
        self._routed = routed
        self._router = router
        self._stop = threading.Event()
        self._late: deque[tuple[float, Callable[[], None]]] = deque()
        self.samples = 0
        self.answers = 0
        self.refusals = 0
        self.problem: BaseException | None = None
        self._threads = [threading.Thread(target=self._guard, args=(self._sample,), daemon=True)]
        if routed:
            self._threads.append(threading.Thread(target=self._guard, args=(self._ask,), daemon=True))

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)

    def _guard(self, work: Callable[[httpx.Client], None]) -> None:
        try:
            with httpx.Client(timeout=_TIMEOUT, trust_env=False) as http:
                while not self._stop.wait(self._every):
                    work(http)
                    now = time.monotonic()
                    while self._late and self._late[0][0] <= now:
                        self._late.popleft()[1]()
        except BaseException as e:
            self.problem = e
            raise

    def _later(self, begin: float, judge: Callable[[], None]) -> None:
        def unless_blind() -> None:
            # While a watch was broken a commit may have been seen later than its effects.
            if self._recorder.blind_until < begin - LAG_SECONDS:
                judge()

        self._late.append((time.monotonic() + 2 * LAG_SECONDS, unless_blind))

    def _sample(self, http: httpx.Client) -> None:
        listed = self._listed(http) if self._routed else None
        for pod in list(self._recorder.objects["pods"].values()):
            meta, status = pod["metadata"], pod.get("status") or {}
            names = meta.get("labels") or {}
            if labels.POOL not in names or status.get("phase") != "Running" or "deletionTimestamp" in meta:
                continue
            url = f"http://{status['podIP']}:30000"
            if listed is not None and url not in listed:
                continue
            self._look(http, meta["namespace"], names.get(labels.PIPELINE, "p"), meta["name"], url)

    def _look(self, http: httpx.Client, namespace: str, pipeline: str, name: str, url: str) -> None:
        begin = time.monotonic()
        try:
            if not self._open(http, url):
                return
            label = self._label(http, url)
            answer = http.post(url + "/weights_checker", json={"action": "checksum"})
            checksum = str(answer.json()["per_engine_checksum"]) if answer.status_code == 200 else None
            if label == "default" and not self._routed:
                return  # an engine that has just started: its gate is about to close it
            if self._label(http, url) != label or not self._open(http, url):
                return
        except (httpx.HTTPError, ValueError, KeyError):
            return  # dead, frozen, or starting
        end = time.monotonic()
        self.samples += 1
        self._later(begin, lambda: self._checker.serving(namespace, pipeline, name, label, checksum, begin, end))

    @staticmethod
    def _open(http: httpx.Client, url: str) -> bool:
        return http.get(url + "/ready").status_code == 200

    @staticmethod
    def _label(http: httpx.Client, url: str) -> str:
        return str(http.get(url + "/model_info").json()["weight_version"])

    def _listed(self, http: httpx.Client) -> set[str]:
        url = self._router()
        if url is None:
            return set()
        try:
            answer: dict[str, Any] = http.get(url + "/workers").json()
            return {str(w["url"]).rstrip("/") for w in answer["workers"]}
        except (httpx.HTTPError, ValueError, KeyError):
            return set()

    def _ask(self, http: httpx.Client) -> None:
        url = self._router()
        if url is None:
            return
        begin = time.monotonic()
        try:
            answer = http.post(url + "/generate", json=_ASK, timeout=httpx.Timeout(60.0, connect=1.0))
            if answer.status_code != 200:
                self.refusals += 1
                return
            version = str(answer.json()["meta_info"]["weight_version"])
        except (httpx.HTTPError, ValueError, KeyError):
            self.refusals += 1
            return
        end = time.monotonic()
        self.answers += 1
        for pipeline in list(self._recorder.objects["rlpipelines"].values()):
            meta = pipeline["metadata"]
            self._later(
                begin,
                lambda meta=meta: self._checker.answered(  # type: ignore[misc]
                    meta["namespace"], meta["name"], version, begin, end
                ),
            )
