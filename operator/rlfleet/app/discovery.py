"""Worker discovery in the operator process: where its list of workers comes from, how they are asked, who may read it.

Invariants:
- it only reads: its clients have a guard that allows nothing, so no defect of it could change a gate or an object;
- every replica can serve it, leader or not: the list is made of the view of pods that each one keeps and of EnginePools
  that are read live. A replica whose view is not complete, that can not reach the apiserver, or that can not read the
  signing key with which gates are asked, knows nothing and says so;
- nothing is done while nobody reads, and whatever readers cause goes behind all that the operator does itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any, Protocol

import aiohttp

from rlfleet.api.wire import GateStatus
from rlfleet.app.settings import Settings
from rlfleet.control.keys import SigningKeyError, SigningKeys
from rlfleet.control.peers import Peer, PeerError, Peers
from rlfleet.control.rounds.pods import gate_peer, is_gone, is_unborn, made_by
from rlfleet.control.routers import base_url
from rlfleet.discovery.board import Board, DiscoveryError
from rlfleet.discovery.probing import ProbeError, ProbeObserver, Prober
from rlfleet.discovery.server import Denied, DiscoveryServer, RequestObserver
from rlfleet.kube.client import KubeClient
from rlfleet.kube.config import Credentials, load
from rlfleet.kube.errors import ApiError
from rlfleet.kube.guard import Guard
from rlfleet.kube.limiter import Priority
from rlfleet.kube.reflector import Reflector
from rlfleet.kube.resources import ENGINEPOOLS
from rlfleet.plan.adopt import adopted, adopts, selector_of
from rlfleet.plan.discovery import Scope, Worker
from rlfleet.plan.template import engine_port
from rlfleet.tls import ClientTLS
from rlfleet.web import viewer
from rlfleet.web.viewer import MAX_TOKEN, Viewer

log = logging.getLogger(__name__)
Obj = dict[str, Any]


class Observer(ProbeObserver, RequestObserver, Protocol):
    """Whom probes and requests are told to (app/metrics.py)."""


class Discovery:
    """Serves worker discovery from ``start()`` to ``stop()``."""

    def __init__(
        self,
        settings: Settings,
        kube: KubeClient,
        pods: Reflector,
        *,
        authorities: ClientTLS | None,
        observer: Observer,
    ) -> None:
        self._settings = settings
        guard = Guard()
        guard.revoke("worker discovery changes nothing")
        self._guard = guard
        self._kube = kube.at(Priority.READER).guarded(guard)
        self._pods = pods
        self._authorities = authorities
        self._keys: SigningKeys | None = None
        self._keys_at = 0.0
        self._peers: Peers | None = None
        self._where: Credentials | None = None
        self._session: aiohttp.ClientSession | None = None
        naming = settings.discovery_naming()
        prober = Prober(self._probe, naming, cap=settings.discovery_max_concurrent_probes, observer=observer)
        seconds = float(settings.discovery_request_timeout_seconds)
        self._server = DiscoveryServer(
            settings.discovery_host,
            settings.discovery_port,
            board=Board(self._list, prober, naming, timeout=seconds),
            authorize=self._authorize,
            observer=observer,
        )

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return self._server.port

    async def start(self) -> None:
        """Start serving; OSError where the address is in use."""
        if self._settings.discovery_auth == "token":
            self._where = await load(self._settings.kubeconfig or None, anonymous=True)
            self._session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), trust_env=False)
        try:
            await self._server.start()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop serving."""
        await self._server.stop()
        if self._peers is not None:
            await self._peers.close()
        if self._session is not None:
            await self._session.close()

    # -------------------------------------------------------------------------------------------- who may read

    async def _authorize(self, header: str | None, scope: Scope) -> None:
        """Nobody is asked who they are, or the apiserver judges the reader's own token, as for the web page."""
        served = self._settings.watch_namespaces
        if scope.namespace and served and scope.namespace not in served:
            # Its engines may live, but another operator's they are: an empty list would say that there are none.
            raise Denied(404, f"namespace {scope.namespace} is not served by this operator")
        if self._settings.discovery_auth != "token":
            return
        scheme, _, token = (header or "").partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token or len(token) > MAX_TOKEN or not token.isascii():
            raise Denied(401, "send a bearer token of a ServiceAccount that may read what the base URL names")
        assert self._session is not None
        assert self._where is not None
        who = Viewer(self._session, self._where, token)
        try:
            if scope.pipeline:
                # Its trainer is told where these engines are in any case: a push goes to them.
                await who.may_read_pipeline(scope.namespace, scope.pipeline)
            else:
                await asyncio.gather(*(who.may_list(namespace) for namespace in self._namespaces(scope)))
        except viewer.Denied as e:
            more = ". Name a namespace in the base URL: /namespaces/NAMESPACE" if e.status == 403 else ""
            raise Denied(e.status, f"{e}{more if not scope.namespace else ''}") from e

    # -------------------------------------------------------------------------------------------- the list

    def _namespaces(self, scope: Scope) -> tuple[str | None, ...]:
        """What is listed by itself; None stands for all namespaces."""
        if scope.namespace:
            return (scope.namespace,)
        return self._settings.watch_namespaces or (None,)

    async def _list(self, scope: Scope) -> Iterable[Worker]:
        missing = self._pods.missing
        if missing and not (scope.namespace and self._pods.covers(scope.namespace)):
            raise DiscoveryError(f"this replica's view of pods is not complete yet: {missing}")
        try:
            await self._load_keys()
            listed = await asyncio.gather(
                *(
                    self._kube.list(ENGINEPOOLS, namespace, timeout=self._settings.api_timeout)
                    for namespace in self._namespaces(scope)
                )
            )
        except ApiError as e:
            raise DiscoveryError(f"the apiserver does not tell of pools: {e}") from e
        pools = [pool for found in listed for pool in found.items]
        return [
            worker
            for pool in pools
            if not scope.pipeline or pool["spec"]["pipeline"] == scope.pipeline
            for pod in self._engines(pool, pools)
            if (worker := worker_of(pool, pod)) is not None
        ]

    def _engines(self, pool: Obj, pools: list[Obj]) -> list[Obj]:
        """Pods of the pool: those that it made, or those that it adopts."""
        namespace = pool["metadata"]["namespace"]
        found = self._pods.select(namespace, selector_of(pool))
        if not adopts(pool):
            return [p for p in found if made_by(p, pool)]
        return list(adopted(pool, [p for p in pools if p["metadata"]["namespace"] == namespace], found).pods)

    async def _load_keys(self) -> None:
        """The signing key, looked at again as often as the leader does; one that is gone or unusable is not waited for
        while an earlier one is known."""
        now = asyncio.get_running_loop().time()
        if self._keys is not None and now - self._keys_at < self._settings.key_seconds:
            return
        s = self._settings
        try:
            found = await SigningKeys.find(self._kube, s.namespace, s.signing_key_secret, timeout=s.api_timeout)
        except SigningKeyError as e:
            found = None
            log.warning("signing key: %s", e)
        self._keys_at = now
        if found is None and self._keys is None:
            raise DiscoveryError("there is no signing key yet, so no gate can be asked")
        if self._keys is None:
            self._keys = found
        elif found is not None:
            self._keys.adopt(found)

    # -------------------------------------------------------------------------------------------- one worker

    async def _probe(self, worker: Worker, seconds: float) -> GateStatus:
        if self._peers is None:
            assert self._keys is not None
            self._peers = Peers(
                self._keys, self._guard, proxy=self._settings.peer_proxy or None, authorities=self._authorities
            )
        gate = Peer(worker.pod, worker.uid, worker.gate_url, worker.gate_name)
        try:
            return await self._peers.gate_status(gate, worker.pipeline, seconds=seconds)
        except PeerError as e:
            raise ProbeError(str(e)) from e


def worker_of(pool: Obj, pod: Obj) -> Worker | None:
    """The pod as a worker; None: it runs no engine (yet, or any more), or is about to go."""
    peer = gate_peer(pod)
    meta = pod["metadata"]
    if peer is None or is_gone(pod) or is_unborn(pod) or "deletionTimestamp" in meta:
        return None
    engine = pool["spec"].get("engine") or {}
    return Worker(
        namespace=meta["namespace"],
        pipeline=pool["spec"]["pipeline"],
        pool=pool["metadata"]["name"],
        pod=meta["name"],
        uid=meta["uid"],
        gate_url=peer.url,
        gate_name=peer.server_name,
        engine_url=base_url(pod["status"]["podIP"], engine_port(pool)),
        model=str(engine.get("model") or ""),
    )
