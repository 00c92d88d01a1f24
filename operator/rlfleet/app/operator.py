"""The operator process: kopf as the shell (app.shell), our queue and reconcilers inside.

Invariants:
- nothing is reconciled and nothing is written before this process leads (kube.leader); until then it only keeps its
  views warm, so that a takeover starts at once;
- at the end of a term mutations stop first, then the process ends; at SIGTERM the Lease is released when no mutation
  can follow any more;
- if a part that everything rests on ends (the view of pods, the queue), the process ends and is restarted, rather
  than going on half alive.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine
from typing import Any, cast

import kopf

from rlfleet.api import labels
from rlfleet.app import shell
from rlfleet.app.discovery import Discovery
from rlfleet.app.health import HealthServer, LoopStamp
from rlfleet.app.kinds import ServedKinds
from rlfleet.app.metrics import OperatorMetrics
from rlfleet.app.settings import Settings
from rlfleet.app.signing import SigningKeySource
from rlfleet.app.triggers import Triggers
from rlfleet.control.context import Context, Kind, QueueKey, SystemClock, Traces
from rlfleet.control.deletion import watch_deletion
from rlfleet.control.explaining import Wanted, report
from rlfleet.control.peers import Peers
from rlfleet.control.pipeline import reconcile_pipeline
from rlfleet.control.pool import PoolReconciler
from rlfleet.control.queue import Result, WorkQueue
from rlfleet.kube.client import KubeClient
from rlfleet.kube.config import CredentialSource, credential_source, load
from rlfleet.kube.events import EventRecorder
from rlfleet.kube.guard import Guard
from rlfleet.kube.leader import Elector
from rlfleet.kube.limiter import RateLimiter
from rlfleet.kube.reflector import Reflector
from rlfleet.kube.resources import PODS
from rlfleet.logkeys import bound
from rlfleet.web.server import Standby, WebServer

log = logging.getLogger(__name__)

#: Seconds for queued Events, and then for mutations under way to be answered, before the Lease is released.
FLUSH_SECONDS = 0.5
QUIET_SECONDS = 1.0


class Operator:
    """One operator process. ``run()`` returns the exit code: 0 after SIGTERM or SIGINT, 1 after anything else."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._control = settings.control()
        self._authorities = settings.authorities()
        self._metrics = OperatorMetrics()
        if settings.leader_elect:
            self._guard = Guard(margin=settings.timing().margin, observer=self._metrics)
        else:
            self._guard = Guard.unelected()
        self._elector: Elector | None = None
        self._clients: list[KubeClient] = []
        self._ending: asyncio.Task[None] | None = None
        self._lost = False
        self._stamp = LoopStamp()
        self._stop = asyncio.Event()
        self._exit_code = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._signing = SigningKeySource(settings)
        self._kinds = ServedKinds()
        self._pods: Reflector | None = None
        self._pools: PoolReconciler | None = None
        self._web: WebServer | None = None
        self._discovery: Discovery | None = None
        self._context: Context | None = None
        self._close_traces: Callable[[], None] | None = None
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
        ready = asyncio.Event()
        signals = asyncio.get_running_loop().create_task(self._take_signals(ready), name="signals")
        try:
            await kopf.operator(
                registry=shell.registry(
                    self._triggers,
                    kubeconfig=self._settings.kubeconfig,
                    start_up=self._start_up,
                    clean_up=lambda: self._end("kopf ends"),
                ),
                settings=shell.settings(named_namespaces=bool(self._settings.watch_namespaces)),
                # kopf would ask for the user's name, which the user of a container need not have.
                identity=cast(Any, self._control.identity),
                standalone=True,
                clusterwide=not self._settings.watch_namespaces,
                namespaces=self._settings.watch_namespaces,
                stop_flag=self._stop,
                ready_flag=ready,
            )
        finally:
            signals.cancel()
            await asyncio.gather(signals, return_exceptions=True)
            await self._end("kopf ended")
            self._health.stop()
        return self._exit_code

    async def _take_signals(self, ready: asyncio.Event) -> None:
        """Replace kopf's own handlers: it would end its streams first, and the Lease would wait for them."""
        await ready.wait()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end, number.name)

    def _end(self, why: str) -> asyncio.Future[None]:
        """Begin to shut down, once; what is returned ends when that is done."""
        if self._ending is None:
            log.info("stopping: %s", why)
            self._ending = asyncio.get_running_loop().create_task(self._shut_down(), name="stop")
            self._ending.add_done_callback(lambda _: self._stop.set())
        return asyncio.shield(self._ending)

    # ------------------------------------------------------------------------------------------ our parts

    async def _start_up(self) -> None:
        """What a standby runs too: views, streams, the look for the key, and the election."""
        s = self._settings
        source = credential_source(s.kubeconfig or None)
        kube = await self._client(source, RateLimiter(s.api_qps, s.api_burst, on_wait=self._metrics.throttled))
        self._pods = Reflector(
            kube,
            PODS,
            namespaces=s.watch_namespaces,
            on_change=self._triggers.pod,
            index_labels=(labels.POOL, labels.PIPELINE),
            on_reset=lambda reason: self._metrics.view_reset(PODS.plural, reason),
        )
        self._spawn(self._pods.run(), "view of pods")
        if s.leader_elect:
            # Its own client, without guard and shared limit: a renewal waits for nobody.
            self._elector = Elector(
                await self._client(source, None, guarded=False),
                self._guard,
                namespace=s.namespace,
                name=s.lease_name,
                identity=self._control.identity,
                timing=s.timing(),
                observer=self._metrics,
            )
        self._spawn(self._work(kube, self._pods, self._elector), "queue")
        await self._serve_web()
        await self._serve_discovery(kube, self._pods)
        log.info("started as %s", self._control.identity)

    async def _serve_web(self) -> None:
        """The page, where it is asked for. Every replica shows the fleet; only the leader can look at gates."""
        address = self._settings.web_address()
        if address is None:
            return
        kubeconfig = self._settings.kubeconfig or None
        self._web = WebServer(*address, where=lambda: load(kubeconfig, anonymous=True), report=self._dry_run)
        try:
            await self._web.start()
        except OSError as e:
            # Nothing but eyes depends on it.
            log.warning("going on without the web page, which can not be served (--web-bind): %s", e)
            return
        log.info("serving the web page on port %d", self._web.port)

    async def _serve_discovery(self, kube: KubeClient, pods: Reflector) -> None:
        """Worker discovery, where it is asked for. An address that can not be used ends the process: readers would wait
        for a service that never comes."""
        s = self._settings
        if not s.discovery:
            return
        discovery = Discovery(s, kube, pods, authorities=self._authorities, observer=self._metrics)
        try:
            await discovery.start()
        except OSError as e:
            log.critical("can not serve worker discovery (--discovery-host, --discovery-port): %s", e)
            self._exit_code = 1
            self._end("worker discovery can not be served")
            return
        self._discovery = discovery
        log.info("serving worker discovery on port %d", discovery.port)

    async def _dry_run(self, namespace: str, pipeline: str, wanted: Wanted | None) -> dict[str, Any]:
        if self._context is None:
            where = f"{self._settings.namespace}/{self._settings.lease_name}"
            raise Standby(f"this replica is a standby, only the leader can ask gates: Lease {where} names its pod")
        return await report(self._context, namespace, pipeline, wanted)

    async def _client(
        self, source: CredentialSource, limiter: RateLimiter | None, *, guarded: bool = True
    ) -> KubeClient:
        client = KubeClient(
            source,
            limiter=limiter,
            observer=self._metrics,
            user_agent="rlfleet-operator",
            guard=self._guard if guarded else None,
        )
        self._clients.append(await client.open())
        return client

    async def _work(self, kube: KubeClient, pods: Reflector, elector: Elector | None) -> None:
        """Wait until our kinds are served as we know them, then until we lead; then reconcile until cancelled."""
        await self._kinds.wait(kube, timeout=self._settings.api_timeout)
        if elector is None:
            self._metrics.leading(True, 0)
        else:
            self._spawn(elector.run(), "leader election")
            await self._signing.look(kube, elector)
            await elector.acquired.wait()
        keys = await self._signing.load(kube)
        events = EventRecorder(kube, instance=self._control.identity, observer=self._metrics)
        self._context = Context(
            kube=kube,
            pods=pods,
            peers=Peers(
                keys,
                self._guard,
                proxy=self._settings.peer_proxy or None,
                authorities=self._authorities,
                observer=self._metrics,
            ),
            keys=keys,
            events=events,
            enqueue=self._queue.enqueue,
            guard=self._guard,
            settings=self._control,
            clock=SystemClock(),
            metrics=self._metrics,
            traces=self._make_traces(),
        )
        self._pools = PoolReconciler(self._context)
        self._spawn(events.run(), "event recorder")
        self._spawn(self._signing.follow(kube, keys), "view of the signing key")
        await self._queue.run()

    def _make_traces(self) -> Traces:
        if not self._settings.otlp_endpoint:
            return Traces()
        from rlfleet.app.tracing import RoundTraces  # an extra

        made = RoundTraces(self._settings.otlp_endpoint, identity=self._control.identity)
        self._close_traces = made.close
        return made

    async def _shut_down(self) -> None:
        """End what runs, in order: reconciles, Events, the right to mutate, the Lease, connections.

        After a lost term nothing is waited for: others may act already.
        """
        # Taken first: the queue ends while it drains, and an end that was asked for is no failure.
        tasks, self._tasks = self._tasks, []
        ctx = self._context
        if ctx is not None and not self._lost:
            drain = self._settings.drain_seconds
            if not await self._queue.settle(drain):
                log.warning("what was still running after %g s is left to the next leader as it is", drain)
            await ctx.events.flush(FLUSH_SECONDS)
        self._guard.revoke("this process is stopping")
        if not self._lost and not await self._guard.quiet(QUIET_SECONDS):
            # Whatever they still do is refused where the next leader has raised the fence.
            log.warning("mutations without an answer after %g s; going on", QUIET_SECONDS)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._elector is not None and not self._lost:
            await self._elector.release()
        if self._web is not None:
            await self._web.stop()
        if self._discovery is not None:
            await self._discovery.stop()
        if ctx is not None:
            if self._pools is not None:
                await self._pools.close()
            await ctx.frontends.close()
            await ctx.peers.close()
            if self._close_traces is not None:
                await asyncio.to_thread(self._close_traces)
        clients, self._clients = self._clients, []
        for client in clients:
            await client.close()

    async def _reconcile(self, key: QueueKey) -> Result:
        ctx, pools = self._context, self._pools
        if ctx is None or pools is None:
            raise asyncio.CancelledError
        with bound(**{key.kind.value.lower(): f"{key.namespace}/{key.name}"}):
            if key.kind is Kind.POOL:
                return await pools.reconcile(key.namespace, key.name)
            if key.kind is Kind.DELETION:
                return await watch_deletion(ctx, key.namespace, key.name)
            return await reconcile_pipeline(ctx, key.namespace, key.name)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        if self._ending is not None:
            # Whoever shuts down has its list of what is to end already; an election that begins now would never end.
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work, name=name)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task not in self._tasks:
            return
        log.critical("%s ended, stopping", task.get_name(), exc_info=task.exception())
        self._exit_code = 1
        self._lost = task.get_name() == "leader election"
        self._end(f"{task.get_name()} ended")

    def _not_ready(self) -> str:
        if self._kinds.problem:
            return self._kinds.problem
        if not self._signing.found:
            return "signing key is not loaded"
        if self._pods is None:
            return "view of pods is not complete"
        if missing := self._pods.missing:
            return f"view of pods is not complete: {missing}"
        return ""
