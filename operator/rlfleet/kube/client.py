"""A thin asynchronous client of the apiserver: plain JSON objects over one connection pool.

Invariants:
- every call has a deadline, given by the caller;
- status and metadata are written only under a resourceVersion (an empty one is refused, because the apiserver would
  take it for "no precondition"), objects are deleted only under a UID;
- a write without an answer is ``Unknown`` (see errors.py); no write is ever sent twice by this module;
- a client with a ``guard`` writes only while that allows it (NotLeader, nothing sent).
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, NamedTuple

import aiohttp

from .config import CredentialSource
from .errors import (
    Gone,
    Unavailable,
    Unknown,
)
from .guard import Guard
from .limiter import Priority, RateLimiter
from .resources import EVENTS, OPENAPI, OPENAPI_PATH, PODS, Resource
from .transport import CONNECT_SECONDS, JSON, ApiObserver, Transport
from .watching import Obj, WatchEvent, events_of

__all__ = ["KubeClient", "ListResult", "Obj", "WatchEvent"]

MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
PAGE = 500


class ListResult(NamedTuple):
    """One consistent list."""

    items: list[Obj]
    resource_version: str


class KubeClient:
    """Talks to one apiserver. ``async with`` it, or ``open()`` and ``close()``."""

    def __init__(
        self,
        source: CredentialSource,
        *,
        limiter: RateLimiter | None = None,
        observer: ApiObserver | None = None,
        field_manager: str = "rlfleet",
        user_agent: str = "rlfleet",
        guard: Guard | None = None,
    ) -> None:
        self._shared = Transport(source, limiter or RateLimiter(), observer, user_agent, guard)
        self._priority = Priority.SCALE
        self._field_manager = field_manager

    def at(self, priority: Priority, *, field_manager: str | None = None) -> KubeClient:
        """The same client (connections, limit) whose calls queue at ``priority`` and write as ``field_manager``."""
        other = object.__new__(KubeClient)
        other._shared = self._shared
        other._priority = priority
        other._field_manager = field_manager or self._field_manager
        return other

    def guarded(self, guard: Guard) -> KubeClient:
        """The same client (connections, limit) whose writes ``guard`` must allow."""
        other = self.at(self._priority)
        other._shared = self._shared.guarded(guard)
        return other

    async def open(self) -> KubeClient:
        """Read the credentials and make the connection pool."""
        await self._shared.open()
        return self

    async def close(self) -> None:
        """Close all connections."""
        await self._shared.close()

    async def __aenter__(self) -> KubeClient:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def last_date_ms(self) -> int:
        """Milliseconds since the epoch in the last Date header of the apiserver (whole seconds); 0 before the first."""
        return self._shared.time.last_date_ms

    @property
    def now_ms(self) -> int | None:
        """Milliseconds since the epoch by the apiserver's clock, to about a second; None before its first answer."""
        return self._shared.time.now_ms(time.monotonic())

    # ------------------------------------------------------------------------------------------ reads

    async def get(self, res: Resource, ns: str | None, name: str, *, timeout: float) -> Obj:
        """The live object (a quorum read)."""
        return await self._call("get", "GET", res, res.path(ns, name), timeout=timeout)

    async def published(self, *, timeout: float) -> Obj:
        """The OpenAPI v3 document of our group and version; NotFound while none of our kinds is served."""
        return await self._call("get", "GET", OPENAPI, OPENAPI_PATH, timeout=timeout)

    async def list(
        self,
        res: Resource,
        ns: str | None = None,
        *,
        timeout: float,
        label_selector: str = "",
        field_selector: str = "",
        page: int = PAGE,
    ) -> ListResult:
        """All objects, consistent at one resourceVersion. ``timeout`` is for each page."""
        params = _selectors(label_selector, field_selector)
        items: list[Obj] = []
        token = ""
        while True:
            query = params | ({"limit": str(page)} if page else {}) | ({"continue": token} if token else {})
            try:
                body = await self._call("list", "GET", res, res.path(ns), params=query, timeout=timeout)
            except Gone:
                if not token:
                    raise
                items, token, page = [], "", 0  # compacted between two pages: once more, in one piece
                continue
            items += body.get("items") or []
            token = body["metadata"].get("continue") or ""
            if not token:
                return ListResult(items, body["metadata"]["resourceVersion"])

    async def watch(
        self,
        res: Resource,
        ns: str | None = None,
        *,
        resource_version: str,
        label_selector: str = "",
        field_selector: str = "",
        server_timeout: float = 300.0,
        inactivity_timeout: float = 70.0,
    ) -> AsyncGenerator[WatchEvent, None]:
        """Changes after ``resource_version``, with bookmarks; ends when the server ends the stream.

        Raises Gone when the version is too old and Unavailable when nothing (not even a bookmark) came for
        ``inactivity_timeout`` seconds: a stream that went silent looks the same as one where nothing happens.
        """
        params = _selectors(label_selector, field_selector) | {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(max(1, int(server_timeout))),
        }
        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=inactivity_timeout)
        call = f"watch {res.plural}"
        async with (
            self._shared.request(
                "watch", "GET", res, res.path(ns), params=params, priority=self._priority, limits=limits, call=call
            ) as response,
            aclosing(events_of(response, inactivity_timeout, call)) as events,
        ):
            async for event in events:
                yield event

    # ------------------------------------------------------------------------------------------ writes

    async def create(self, res: Resource, ns: str | None, body: Mapping[str, Any], *, timeout: float) -> Obj:
        """Create an object; AlreadyExists where the name is taken."""
        obj = {"apiVersion": res.api_version, "kind": res.kind, **body}
        return await self._call("create", "POST", res, res.path(ns), body=obj, timeout=timeout, write=True)

    async def apply(
        self,
        res: Resource,
        ns: str | None,
        name: str,
        body: Mapping[str, Any],
        *,
        timeout: float,
        force: bool = True,
        subresource: str | None = None,
    ) -> Obj:
        """Server-side apply under this client's field manager."""
        obj = {"apiVersion": res.api_version, "kind": res.kind, **body}
        return await self._call(
            "apply",
            "PATCH",
            res,
            res.path(ns, name, subresource),
            params={"force": "true" if force else "false"},
            body=obj,
            content_type=APPLY_PATCH,
            timeout=timeout,
            write=True,
        )

    async def replace(
        self, res: Resource, ns: str | None, name: str, body: Mapping[str, Any], *, timeout: float
    ) -> Obj:
        """Write a whole object that was read before, under the resourceVersion in it; else Conflict."""
        _precondition(str((body.get("metadata") or {}).get("resourceVersion") or ""))
        obj = {"apiVersion": res.api_version, "kind": res.kind, **body}
        return await self._call("update", "PUT", res, res.path(ns, name), body=obj, timeout=timeout, write=True)

    async def patch_status(
        self,
        res: Resource,
        ns: str | None,
        name: str,
        *,
        resource_version: str,
        status: Mapping[str, Any],
        timeout: float,
    ) -> Obj:
        """Merge ``status`` into the object's status if it still is at ``resource_version``; else Conflict.

        A value of None deletes its key; lists are replaced whole. A resourceVersion names one state of one object, so
        another object of the same name is refused too.
        """
        body = {"metadata": _precondition(resource_version), "status": status}
        path = res.path(ns, name, "status")
        return await self._call(
            "patch", "PATCH", res, path, body=body, content_type=MERGE_PATCH, timeout=timeout, write=True
        )

    async def patch_series(self, ns: str, name: str, *, count: int, last: str, timeout: float) -> Obj:
        """Say that an Event happened ``count`` times so far, lastly at ``last``; NotFound when it expired."""
        body = {"series": {"count": count, "lastObservedTime": last}}
        return await self._call(
            "patch",
            "PATCH",
            EVENTS,
            EVENTS.path(ns, name),
            body=body,
            content_type=MERGE_PATCH,
            timeout=timeout,
            write=True,
        )

    async def patch_metadata(
        self,
        res: Resource,
        ns: str | None,
        name: str,
        *,
        resource_version: str,
        timeout: float,
        finalizers: Sequence[str] | None = None,
        owners: Sequence[Mapping[str, Any]] | None = None,
    ) -> Obj:
        """Change finalizers or owner references (whole lists; None leaves them) under ``resource_version``."""
        metadata: Obj = _precondition(resource_version)
        if finalizers is not None:
            metadata["finalizers"] = [*finalizers]
        if owners is not None:
            metadata["ownerReferences"] = [dict(o) for o in owners]
        path = res.path(ns, name)
        return await self._call(
            "patch",
            "PATCH",
            res,
            path,
            body={"metadata": metadata},
            content_type=MERGE_PATCH,
            timeout=timeout,
            write=True,
        )

    async def label(
        self, res: Resource, ns: str, name: str, *, uid: str, labels: Mapping[str, str | None], timeout: float
    ) -> Obj:
        """Set labels (None deletes) of the object with this UID.

        Invalid when another one bears the name now: a UID cannot be changed.
        """
        return await self._call(
            "patch",
            "PATCH",
            res,
            res.path(ns, name),
            body={"metadata": {"uid": uid, "labels": dict(labels)}},
            content_type=MERGE_PATCH,
            timeout=timeout,
            write=True,
        )

    async def delete(self, res: Resource, ns: str | None, name: str, *, uid: str, timeout: float) -> Obj:
        """Delete exactly the object with ``uid`` (Conflict if another bears the name, NotFound if none does)."""
        if not uid:
            raise ValueError("delete needs the UID of the object that is meant")
        options: Obj = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        return await self._call("delete", "DELETE", res, res.path(ns, name), body=options, timeout=timeout, write=True)

    async def evict(self, ns: str, name: str, *, uid: str, timeout: float) -> Obj:
        """Have the pod with ``uid`` deleted within every PodDisruptionBudget; TooManyRequests if one refuses."""
        if not uid:
            raise ValueError("evict needs the UID of the pod that is meant")
        body: Obj = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": ns},
            "deleteOptions": {"preconditions": {"uid": uid}},
        }
        path = PODS.path(ns, name, "eviction")
        return await self._call("create", "POST", PODS, path, body=body, timeout=timeout, write=True)

    async def _call(
        self,
        verb: str,
        method: str,
        res: Resource,
        path: str,
        *,
        timeout: float,
        params: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = JSON,
        write: bool = False,
    ) -> Obj:
        query = dict(params or {})
        if write and method != "DELETE":
            query["fieldManager"] = self._field_manager
        call = f"{verb} {path}"
        limits = aiohttp.ClientTimeout(total=timeout, sock_connect=min(timeout, CONNECT_SECONDS))
        async with self._shared.request(
            verb,
            method,
            res,
            path,
            params=query,
            body=json.dumps(body).encode() if body is not None else None,
            content_type=content_type,
            priority=self._priority,
            limits=limits,
            call=call,
            write=write,
        ) as response:
            try:
                data = json.loads(await response.read())
            except (aiohttp.ClientError, TimeoutError, ValueError) as e:
                raise (Unknown if write else Unavailable)(f"answer broke off: {e!r}", call=call) from e
        if not isinstance(data, dict):
            raise (Unknown if write else Unavailable)("answer is not an object", call=call)
        return data


def _selectors(labels: str, fields: str) -> dict[str, str]:
    return ({"labelSelector": labels} if labels else {}) | ({"fieldSelector": fields} if fields else {})


def _precondition(resource_version: str) -> Obj:
    if not resource_version:
        raise ValueError("a fenced write needs the resourceVersion it was decided on")
    return {"resourceVersion": resource_version}
