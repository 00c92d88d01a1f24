"""Every revision of our objects and of pods, as the apiserver hands them out, recorded by a client nobody disturbs.

Invariant: revisions of one kind come in the order of their resourceVersions and none is left out while a watch holds;
``gaps`` counts the re-lists after which that is not known (the apiserver was restarted, or compacted).
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from rlfleet.api import labels
from rlfleet.client import credentials
from tests.fault.calls import Address, Journal

_OURS = "/apis/rlfleet.dev/v1alpha1"
KINDS = {
    "rlpipelines": f"{_OURS}/rlpipelines",
    "enginepools": f"{_OURS}/enginepools",
    "syncrounds": f"{_OURS}/syncrounds",
    "pods": "/api/v1/pods",
}
_START_SECONDS = 120.0
#: Transports close in the turns of the loop after they were told to.
_CLOSE_SECONDS = 0.1
_PAUSE_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Revision:
    """One state of one object. ``deleted``: it is the last one. ``at``: monotonic seconds when it was seen here."""

    plural: str
    obj: dict[str, Any]
    deleted: bool
    at: float

    @property
    def uid(self) -> str:
        """UID of the object."""
        return str(self.obj["metadata"]["uid"])


class Recorder:
    """Watches all namespaces that ``wanted`` accepts (all of them by default) until the end of the ``with`` block.

    It tells ``journal`` who has which address, hands every revision to ``observers``, and keeps the newest state of
    every object in ``objects``; the whole history only with ``keep``.
    """

    def __init__(
        self,
        kubeconfig: Path,
        journal: Journal,
        *,
        keep: bool = True,
        wanted: Callable[[str], bool] = lambda namespace: True,
    ) -> None:
        self._access = credentials.find(kubeconfig)
        self._journal = journal
        self._keep = keep
        self._wanted = wanted
        self.revisions: list[Revision] = []
        self.objects: dict[str, dict[str, dict[str, Any]]] = {plural: {} for plural in KINDS}
        self.observers: list[Callable[[Revision], None]] = []
        self.gaps = 0
        #: Monotonic time until which a watch is known to have been broken: what is seen then may be seen late.
        self.blind_until = 0.0
        self.problems: list[str] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._listed = 0
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(_START_SECONDS), "the recorder could not list our kinds"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_START_SECONDS)

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        connector = aiohttp.TCPConnector(ssl=self._access.tls or True, limit=0)
        async with aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None, sock_connect=5), read_bufsize=2**20
        ) as session:
            tasks = [asyncio.create_task(self._follow(session, plural)) for plural in KINDS]
            await self._stop.wait()
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception):
                    self.problems.append(repr(result))
        await asyncio.sleep(_CLOSE_SECONDS)

    def _headers(self) -> dict[str, str]:
        authorization = self._access.authorization()
        return {"Accept": "application/json"} | ({"Authorization": authorization} if authorization else {})

    async def _follow(self, session: aiohttp.ClientSession, plural: str) -> None:
        version = ""
        while True:
            try:
                if not version:
                    version = await self._list(session, plural)
                version = await self._watch(session, plural, version)
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
                self.blind_until = time.monotonic() + _PAUSE_SECONDS
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _list(self, session: aiohttp.ClientSession, plural: str) -> str:
        url = self._access.server + KINDS[plural]
        async with session.get(url, headers=self._headers(), timeout=aiohttp.ClientTimeout(total=10)) as answer:
            answer.raise_for_status()
            body = await answer.json()
        known = self.objects[plural]
        there = {item["metadata"]["uid"] for item in body["items"]}
        for item in body["items"]:
            self._see(plural, item, deleted=False)
        for uid in set(known) - there:
            self._see(plural, known[uid], deleted=True)
        self._listed += 1
        if self._listed == len(KINDS):
            self._started.set()
        elif self._listed > len(KINDS):
            self.gaps += 1
        return str(body["metadata"]["resourceVersion"])

    async def _watch(self, session: aiohttp.ClientSession, plural: str, version: str) -> str:
        query = {"watch": "1", "allowWatchBookmarks": "true", "resourceVersion": version, "timeoutSeconds": "600"}
        url = self._access.server + KINDS[plural]
        async with session.get(url, headers=self._headers(), params=query) as answer:
            answer.raise_for_status()
            try:
                pending = b""
                async for chunk in answer.content.iter_any():
                    *lines, pending = (pending + chunk).split(b"\n")
                    for line in lines:
                        event = json.loads(line)
                        if event["type"] == "ERROR":
                            return ""
                        version = event["object"]["metadata"]["resourceVersion"]
                        if event["type"] != "BOOKMARK":
                            self._see(plural, event["object"], deleted=event["type"] == "DELETED")
            except aiohttp.ClientError:
                self.blind_until = time.monotonic() + _PAUSE_SECONDS
        return version

    def _see(self, plural: str, obj: dict[str, Any], *, deleted: bool) -> None:
        meta = obj["metadata"]
        if not self._wanted(str(meta.get("namespace") or "")):
            return
        meta.pop("managedFields", None)
        known = self.objects[plural].get(meta["uid"])
        if not deleted and known is not None and known["metadata"]["resourceVersion"] == meta["resourceVersion"]:
            return
        if deleted:
            self.objects[plural].pop(meta["uid"], None)
        else:
            self.objects[plural][meta["uid"]] = obj
        if plural == "pods" and (ip := (obj.get("status") or {}).get("podIP")):
            self._journal.addresses[ip] = Address(_name(meta), meta["uid"])
        revision = Revision(plural, obj, deleted, time.monotonic())
        if self._keep:
            self.revisions.append(revision)
        for observer in self.observers:
            observer(revision)


def _name(meta: dict[str, Any]) -> str:
    """The same in every run: pool and index of an engine; any other pod of a fleet is the trainer."""
    found = meta.get("labels") or {}
    if labels.POOL in found:
        return f"{found[labels.POOL]}-{found.get(labels.ENGINE_INDEX, '?')}"
    return "sender" if found.get("app") == "trainer" else str(meta["name"])
