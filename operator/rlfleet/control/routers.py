"""Routers of a pool: which ones there are now, and taking addresses out of them.

Invariants:
- an address counts as removed only after the router was read back; a router that does not answer is unknown;
- a router whose pod is gone holds no entry, so there is nothing to remove from it;
- an address that a living engine bears is never removed in the name of a dead one from the routers that list the living
  one; from those of the dead one alone it is.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol
from urllib.parse import urlsplit

from rlfleet.api.conditions import Reason
from rlfleet.api.wire import RouterEndpoint, RouterType
from rlfleet.calls import CallError
from rlfleet.kube.client import KubeClient
from rlfleet.kube.errors import ApiError, Forbidden, NotFound
from rlfleet.kube.guard import Guard
from rlfleet.kube.resources import SECRETS
from rlfleet.plan.adopt import is_home
from rlfleet.plan.pool_observed import Problem
from rlfleet.plan.template import BY_THE_POD, router_keys
from rlfleet.router import RouterAdapter, make_router, usable_key

#: A gate takes at most this many.
MAX_ENDPOINTS = 16
#: Most calls to routers of one pool at the same time.
PARALLEL = 16


@dataclass(frozen=True, slots=True)
class RouterKey:
    """One key of a Secret: what a router demands on its API."""

    namespace: str
    secret: str
    key: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """The routers of a pool as found. ``names``: all that must list an engine, also those that are not there now."""

    endpoints: tuple[RouterEndpoint, ...] = ()
    names: frozenset[str] = frozenset()
    problems: tuple[Problem, ...] = ()
    keys: Mapping[str, RouterKey] = field(default_factory=dict)
    """Where the keys lie of those endpoints that demand one, by URL."""


def base_url(ip: str, port: int) -> str:
    """``http://<address>:<port>``, with brackets around an IPv6 address."""
    return f"http://[{ip}]:{port}" if ":" in ip else f"http://{ip}:{port}"


class Pods(Protocol):
    """Where router pods are looked for: a view (kube.reflector.Reflector) or a live list."""

    def select(self, namespace: str, match_labels: Mapping[str, str]) -> list[dict[str, Any]]:
        """Pods of ``namespace`` that bear all of these labels."""


def resolve(pool: Mapping[str, Any], pods: Pods) -> Resolved:
    """Find the routers of ``pool``: fixed URLs, and running pods by selector."""
    endpoints: list[RouterEndpoint] = []
    names: set[str] = set()
    problems: list[Problem] = []
    namespace, secrets = pool["metadata"]["namespace"], router_keys(pool)
    keys: dict[str, RouterKey] = {}
    for router in pool["spec"].get("routers") or []:
        if router["type"] in BY_THE_POD:
            continue  # nothing to call: the pods' own readiness or label is the entry
        name, kind = router["name"], RouterType(router["type"])
        metrics_port = router.get("metricsPort")
        if router.get("url"):
            url = router["url"].rstrip("/")
            host = urlsplit(url).hostname or ""
            metrics = base_url(host, int(metrics_port)) if metrics_port and host else None
            endpoints.append(RouterEndpoint(name=name, type=kind, url=url, metrics=metrics))
            names.add(name)
            if ref := secrets.get(name):
                keys[url] = RouterKey(namespace, ref["name"], ref["key"])
            continue
        match = (router.get("podSelector") or {}).get("matchLabels") or {}
        found = [p for p in pods.select(namespace, match) if _runs(p)]
        if not found:
            names.add(name)
            problems.append(Problem(Reason.ROUTER_UNREACHABLE, f"router {name}: no running pod matches its selector"))
        # Several replicas of a router each have their own list, so each one is a router to us.
        for pod in found:
            own = name if len(found) == 1 else f"{name}:{pod['metadata']['name']}"
            ip = pod["status"]["podIP"]
            metrics = base_url(ip, int(metrics_port)) if metrics_port else None
            url = base_url(ip, int(router["port"]))
            endpoints.append(RouterEndpoint(name=own[:253], type=kind, url=url, metrics=metrics))
            names.add(own[:253])
            if ref := secrets.get(name):
                keys[url] = RouterKey(namespace, ref["name"], ref["key"])
    if len(endpoints) > MAX_ENDPOINTS:
        problems.append(
            Problem(Reason.ROUTER_AMBIGUOUS, f"{len(endpoints)} router pods match; a gate takes {MAX_ENDPOINTS}")
        )
        endpoints = endpoints[:MAX_ENDPOINTS]
    return Resolved(tuple(endpoints), frozenset(names), tuple(problems), keys)


def routers_of(engines: Iterable[Mapping[str, Any]], pools: Iterable[Mapping[str, Any]], pods: Pods) -> set[str]:
    """URLs of all routers in which one of these pods may stand, as an engine of one of ``pools``."""
    listed = list(engines)
    return {e.url for p in pools if any(is_home(p, o) for o in listed) for e in resolve(p, pods).endpoints}


def _runs(pod: Mapping[str, Any]) -> bool:
    """A router that may still route, also while it is being deleted."""
    status = pod.get("status") or {}
    return status.get("phase") == "Running" and bool(status.get("podIP"))


class KeyUnknown(Exception):
    """The key of a router can not be had; the message says why and what to do."""


async def read_key(kube: KubeClient, where: RouterKey, timeout: float) -> str:
    """The key as its Secret holds it now. Raises KeyUnknown."""
    at = f"Secret {where.namespace}/{where.secret}, which spec.routers[].adminKeySecretRef names,"
    try:
        secret = await kube.get(SECRETS, where.namespace, where.secret, timeout=timeout)
        key = usable_key(base64.b64decode((secret.get("data") or {})[where.key], validate=True))
    except NotFound as e:
        raise KeyUnknown(f"{at} does not exist") from e
    except Forbidden as e:
        raise KeyUnknown(f"{at} may not be read by the operator: name it in the chart's routerKeySecrets") from e
    except ApiError as e:
        raise KeyUnknown(f"{at} can not be read: {e}") from e
    except (KeyError, binascii.Error):
        raise KeyUnknown(f"{at} has no key {where.key!r}") from None
    if not key:
        raise KeyUnknown(f"{at} holds no key in {where.key!r} that could be sent: one line of ASCII without spaces")
    return key


class RouterClients:
    """Connections to routers, one per type and URL. Only a leader removes anything (NotLeader otherwise).

    A pool's router may become one of another type at the same URL: the calls of the type before are not its own then,
    and a vllm-router would pass them on to an engine. Keys are read anew for each removal, which is rare.
    """

    def __init__(self, kube: KubeClient, *, timeout: float, guard: Guard) -> None:
        self._kube = kube
        self._timeout = timeout
        self._guard = guard
        self._clients: dict[tuple[RouterType, str], RouterAdapter] = {}
        self._keys: dict[str, str] = {}
        self._slots = asyncio.Semaphore(PARALLEL)

    async def remove(
        self, endpoints: Iterable[RouterEndpoint], url: str, keys: Mapping[str, RouterKey]
    ) -> dict[str, str | None]:
        """Take ``url`` out of all of them and read that back: router URL -> None (done) or what went wrong."""
        targets = list(endpoints)

        async def one(endpoint: RouterEndpoint) -> str | None:
            async with self._slots:
                try:
                    with self._guard.mutation("router"):
                        where = keys.get(endpoint.url)
                        self._keys[endpoint.url] = await read_key(self._kube, where, self._timeout) if where else ""
                        await self._client(endpoint).remove(url, seconds=self._timeout)
                except (CallError, KeyUnknown) as e:
                    return f"router {endpoint.name}: {e}"
            return None

        results = await asyncio.gather(*(one(e) for e in targets))
        return {e.url: r for e, r in zip(targets, results, strict=True)}

    async def keep_only(self, urls: set[str]) -> None:
        """Close the connections to routers that are not in ``urls`` any more."""
        for key in [k for k in self._clients if k[1] not in urls]:
            await self._clients.pop(key).close()
        self._keys = {url: key for url, key in self._keys.items() if url in urls}

    async def close(self) -> None:
        """Close all connections."""
        await self.keep_only(set())

    def _client(self, endpoint: RouterEndpoint) -> RouterAdapter:
        at = (endpoint.type, endpoint.url)
        if at not in self._clients:
            key = partial(self._key_of, endpoint.url)
            self._clients[at] = make_router(endpoint.type.value, endpoint.url, key=key)
        return self._clients[at]

    def _key_of(self, url: str) -> str:
        return self._keys.get(url, "")
