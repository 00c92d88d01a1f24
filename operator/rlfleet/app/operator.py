"""The operator process: kopf as the shell, our queue and reconcilers inside.

Invariants:
- kopf delivers events of our kinds and runs start-up and clean-up; it stores nothing on objects and handles nothing;
- if a part that everything rests on ends (the view of pods, the queue), the process ends and is restarted, rather
  than going on half alive.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

import kopf

from rlfleet.api import labels
from rlfleet.app.health import HealthServer, LoopStamp
from rlfleet.app.metrics import OperatorMetrics
from rlfleet.app.settings import Settings
from rlfleet.app.triggers import Triggers
from rlfleet.control.context import Context, Kind, QueueKey, SystemClock
from rlfleet.control.keys import SigningKeys
from rlfleet.control.peers import Peers
from rlfleet.control.pipeline import reconcile_pipeline
from rlfleet.control.pool import PoolReconciler
from rlfleet.control.queue import Result, WorkQueue
from rlfleet.kube.client import KubeClient
from rlfleet.kube.config import credential_source
from rlfleet.kube.events import EventRecorder
from rlfleet.kube.limiter import RateLimiter
from rlfleet.kube.reflector import Reflector
from rlfleet.kube.resources import PODS

log = logging.getLogger(__name__)


class Operator:
    """One operator process. ``run()`` returns the exit code after SIGTERM or SIGINT."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._metrics = OperatorMetrics()
        self._stamp = LoopStamp()
        self._stop = asyncio.Event()
        self._exit_code = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._keys_loaded = False
        self._pods: Reflector | None = None
        self._pools: PoolReconciler | None = None
        self._context: Context | None = None
        host, port = settings.health_address()
        self._health = HealthServer(
            host,
            port,
            stamp=self._stamp,
            stall_seconds=settings.loop_stall_seconds,
            not_ready=self._not_ready,
            metrics=self._metrics.render,
        )
        self._queue = WorkQueue(self._reconcile, concurrency=settings.concurrency, observer=self._metrics)
        self._triggers = Triggers(self._queue.enqueue)

    async def run(self) -> int:
        """Run until a signal or a fatal error."""
        try:
            self._health.start()
        except OSError as e:
            log.critical("can not serve probes and metrics (--health-bind): %s", e)
            return 1
        log.info("serving probes and metrics on port %d", self._health.port)
        self._spawn(self._stamp.run(), "loop stamp")
        try:
            await kopf.operator(
                registry=self._registry(),
                settings=self._kopf_settings(),
                standalone=True,
                clusterwide=not self._settings.watch_namespace,
                namespaces=[self._settings.watch_namespace] if self._settings.watch_namespace else [],
                stop_flag=self._stop,
            )
        finally:
            await self._shut_down()
            self._health.stop()
        return self._exit_code

    # ------------------------------------------------------------------------------------------ kopf

    def _kopf_settings(self) -> kopf.OperatorSettings:
        s = kopf.OperatorSettings()
        s.peering.standalone = True
        s.posting.enabled = False
        s.watching.server_timeout = 300
        s.watching.connect_timeout = 10
        s.networking.request_timeout = 30
        s.networking.error_backoffs = (0.5, 1, 2, 3)
        s.queueing.exit_timeout = 2.0
        return s

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()
        kubeconfig = self._settings.kubeconfig

        @kopf.on.login(registry=registry)
        def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
            by_file = kopf.login_with_kubeconfig
            by_account = kopf.login_with_service_account
            first, second = (by_file, by_account) if kubeconfig else (by_account, by_file)
            return first(**kwargs) or second(**kwargs)

        @kopf.on.startup(registry=registry)
        async def startup(**_: Any) -> None:
            await self._start_up()

        @kopf.on.cleanup(registry=registry)
        async def cleanup(**_: Any) -> None:
            await self._shut_down()

        @kopf.on.event(labels.GROUP, labels.VERSION, "enginepools", registry=registry)
        async def pool(*, type: str, namespace: str | None, name: str, spec: kopf.Spec, **_: Any) -> None:
            self._triggers.pool(namespace or "", name, None if type == "DELETED" else spec)

        @kopf.on.event(labels.GROUP, labels.VERSION, "rlpipelines", registry=registry)
        async def pipeline(*, type: str, namespace: str | None, name: str, spec: kopf.Spec, **_: Any) -> None:
            self._triggers.pipeline(namespace or "", name, None if type == "DELETED" else spec)

        @kopf.on.event(labels.GROUP, labels.VERSION, "syncrounds", registry=registry)
        async def round_(*, namespace: str | None, spec: kopf.Spec, **_: Any) -> None:
            self._triggers.round(namespace or "", spec)

        return registry

    # ------------------------------------------------------------------------------------------ our parts

    async def _start_up(self) -> None:
        s, control = self._settings, self._settings.control()
        kube = await KubeClient(
            credential_source(s.kubeconfig or None),
            limiter=RateLimiter(s.api_qps, s.api_burst, on_wait=self._metrics.throttled),
            observer=self._metrics,
            user_agent="rlfleet-operator",
        ).open()
        keys = await SigningKeys.load(kube, s.namespace, timeout=s.api_timeout)
        self._keys_loaded = True
        pods = Reflector(
            kube,
            PODS,
            namespace=s.watch_namespace or None,
            on_change=self._triggers.pod,
            index_labels=(labels.POOL, labels.PIPELINE),
            on_reset=lambda reason: self._metrics.view_reset(PODS.plural, reason),
        )
        events = EventRecorder(kube, instance=control.identity)
        self._context = Context(
            kube=kube,
            pods=pods,
            peers=Peers(keys),
            keys=keys,
            events=events,
            enqueue=self._queue.enqueue,
            settings=control,
            clock=SystemClock(),
            metrics=self._metrics,
        )
        self._pods = pods
        self._pools = PoolReconciler(self._context)
        self._spawn(pods.run(), "view of pods")
        self._spawn(events.run(), "event recorder")
        self._spawn(self._queue.run(), "queue")
        log.info("started as %s", control.identity)

    async def _shut_down(self) -> None:
        """End what runs, in order: reconciles, then events, then connections. Does nothing the second time."""
        ctx, self._context = self._context, None
        # Taken first: the queue ends while it drains, and an end that was asked for is no failure.
        tasks, self._tasks = self._tasks, []
        if ctx is not None and not await self._queue.drain(self._settings.drain_seconds):
            log.warning("reconciles were still running after %g s and were cancelled", self._settings.drain_seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if ctx is not None:
            await ctx.events.flush(2.0)
            if self._pools is not None:
                await self._pools.close()
            await ctx.peers.close()
            await ctx.kube.close()

    async def _reconcile(self, key: QueueKey) -> Result:
        ctx, pools = self._context, self._pools
        if ctx is None or pools is None:
            raise asyncio.CancelledError
        if key.kind is Kind.POOL:
            return await pools.reconcile(key.namespace, key.name)
        return await reconcile_pipeline(ctx, key.namespace, key.name)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task not in self._tasks:
            return
        log.critical("%s ended, stopping", task.get_name(), exc_info=task.exception())
        self._exit_code = 1
        self._stop.set()

    def _not_ready(self) -> str:
        if not self._keys_loaded:
            return "signing key is not loaded"
        if self._pods is None or not self._pods.synced:
            return "view of pods is not complete"
        return ""
