"""The gate as one object: its parts put together, its status, its start and its stop."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable

from rlfleet import __version__
from rlfleet.api.wire import (
    PROTOCOL_VERSION,
    EngineReport,
    FenceRequest,
    GateStatus,
    Held,
)
from rlfleet.devices import Devices, of_pod
from rlfleet.engine import View, make_adapter
from rlfleet.gate.admission import AdmissionControl
from rlfleet.gate.closing import ProcessWatch, UnprovenCloser, WedgeWatch
from rlfleet.gate.config import GateConfig
from rlfleet.gate.context import GateContext
from rlfleet.gate.links import EngineLink, Routers
from rlfleet.gate.listener import engine_listener
from rlfleet.gate.metrics import GateMetrics
from rlfleet.gate.operations import Operations
from rlfleet.gate.rules import is_another_process
from rlfleet.gate.staging import StagingArea
from rlfleet.gate.startup import StartupPromise
from rlfleet.gate.store import Store

log = logging.getLogger(__name__)

#: Seconds that a running operation gets to end when the gate is told to stop.
STOP_SECONDS = 5.0


class Gate:
    """One gate. ``start`` recovers the durable state, ``stop`` leaves engine and routers as they are."""

    def __init__(self, config: GateConfig, on_fatal: Callable[[BaseException], None]) -> None:
        self.config = config
        self.store = Store(config.state_dir)
        adapter = make_adapter(
            config.engine_type, config.engine_url, api_key=config.engine_api_key, admin_key=config.engine_admin_key
        )
        self.ctx = GateContext(
            config=config,
            store=self.store,
            area=StagingArea(config.staging_dir, config.capacity_bytes),
            engine=EngineLink(
                adapter,
                self.store,
                listener=engine_listener(config.engine_url, config.pod_ip),
                allow_unknown_version=config.allow_unknown_version,
            ),
            routers=Routers(self.store, config.router_keys_dir),
            devices=Devices(config.node, config.devices, is_own=of_pod(config.pod_uid)),
            metrics=GateMetrics(),
        )
        self.operations = Operations(self.ctx, on_fatal)
        self.admission = AdmissionControl(
            config,
            self.store,
            self.is_closed,
            lambda: self.operations.in_flight,
            look=self._look_at_listener,
            met=self.ctx.engine.forget,
        )
        self.startup = StartupPromise(self.store, self.ctx.routers, config.router_quiet_seconds)
        self._on_fatal = on_fatal
        self._closer = UnprovenCloser(self.store, self.ctx.engine, self.operations)
        self._tasks: list[asyncio.Task[None]] = []
        #: How many engine processes were met since this gate runs.
        self._met = 0

    async def start(self) -> None:
        """Recover, and begin to keep the start-up promise."""
        self.operations.recover()
        await asyncio.to_thread(self.ctx.area.recover, self.store.staging)
        self.ctx.metrics.fence.set(self.store.fence.generation)
        watch = ProcessWatch(self.store, self._look_at_listener, self._look)
        runs = (self.startup.run(), self._closer.run(), WedgeWatch(self.operations).run(), watch.run())
        self._tasks = [asyncio.create_task(run) for run in runs]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_fatal(error)

    async def stop(self) -> None:
        """End what runs, close connections. Engine and routers are not touched: only an explicit order closes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.operations.stop(STOP_SECONDS)
        await self.ctx.engine.close()
        await self.ctx.routers.close()
        self.store.close()

    async def is_closed(self) -> bool:
        """Paused, and read back from every router as not listed."""
        (_, report), routed = await asyncio.gather(self._observe(), self.ctx.routers.routed())
        return report.paused is True and all(listed is False for listed in routed.values())

    async def observe_engine(self) -> View:
        """The engine's own answers now, for the readiness probe."""
        view, _ = await self._observe()
        return view

    async def engine_hangs(self) -> bool:
        """Whether the engine's loop leaves a question unanswered that nothing of ours could stand in front of.

        A pause does not: the loop goes on. An operation does, and so may one whose end is unknown.
        """
        if self.store.incarnation is None or self._operation_may_block():
            return False
        if await self.ctx.engine.loop_answers():
            return False
        return not self._operation_may_block()  # one may have begun meanwhile

    def _operation_may_block(self) -> bool:
        return self.operations.in_flight is not None or self.operations.uncertain

    async def _observe(self) -> tuple[View, EngineReport]:
        self._look_at_listener()
        met = self._met
        view, report = await self.ctx.engine.observe(busy=self.operations.in_flight is not None)
        self._look_at_listener()
        if met != self._met:  # what was seen may be of the process before, or judged by its record
            met = self._met
            view, report = await self.ctx.engine.observe(busy=self.operations.in_flight is not None)
        # Several look at the same time. One that began before another process was met may end after it with an answer
        # of the process before, which is none of the present one's; names of processes have no order of their own.
        if met == self._met:
            self._recognise(view)
        return view, report

    async def _look(self) -> None:
        await self._observe()

    def _look_at_listener(self) -> bool:
        """Meet another engine process than before by its socket; True: the recorded one listens. Nothing is awaited."""
        known, found = self.store.engine_listener, self.ctx.engine.listener()
        # As below: an operation that runs ends first.
        if found is None or found == known or self.operations.in_flight is not None:
            return found is not None and found == known
        again = known is not None and self.store.incarnation is not None
        with self.store.transaction():
            if again:
                self.store.forget_process(secrets.token_hex(16), found)
                self.store.engine_instance = None  # of the one before; it is told anew
                self.store.met_before_told = not self.store.told_before_met
                self.store.told_before_met = False
            self.store.engine_listener = found
        self._met += 1
        if not again:
            log.info("the engine listens", extra={"listener": found})
        else:
            log.error("another engine process listens", extra={"incarnation": self.store.incarnation})
            self.ctx.engine.forget()
        return True

    def _recognise(self, view: View) -> None:
        """Meet another engine process than before, where processes tell who they are. Nothing is awaited in here."""
        known, told = self.store.engine_instance, view.instance
        # An operation that runs still ends for the process before this one; afterwards it is looked at again.
        if told is None or told == known or self.operations.in_flight is not None:
            return
        again = is_another_process(known, told) and self.store.incarnation is not None
        with self.store.transaction():
            if again:
                self.store.forget_process(secrets.token_hex(16))
            self.store.engine_instance = told
        self._met += 1
        if again:
            log.error("another engine process answers", extra={"incarnation": self.store.incarnation})
            self.ctx.engine.forget()

    async def fence(self, body: FenceRequest) -> GateStatus:
        """Store the fence, then tell everything that a new owner must know."""
        await self.admission.admit(body)
        return await self.status()

    async def status(self) -> GateStatus:
        """Everything known of this engine process, read now."""
        (_, report), entries, devices = await asyncio.gather(
            self._observe(), self.ctx.routers.look(), self.ctx.devices.report()
        )
        facts = await self.ctx.engine.facts()
        store, enrolment, fence = self.store, self.store.enrolment, self.store.fence
        staging, uncertain = self.ctx.area.staging, self.operations.uncertain
        metrics = self.ctx.metrics
        metrics.fence.set(fence.generation)
        metrics.paused.set(-1 if report.paused is None else int(report.paused))
        metrics.uncertain.set(int(uncertain))
        metrics.holds(store.holds.version if store.holds else None)
        shunned = {name: entry.shunned[:200] for name, entry in entries.items() if entry is not None and entry.shunned}
        metrics.shunned.set(len(shunned))
        return GateStatus(
            protocol_version=PROTOCOL_VERSION,
            gate_version=__version__,
            capabilities=tuple(sorted(facts.capabilities)) if facts else (),
            pod_uid=self.config.pod_uid,
            incarnation=store.incarnation,
            enrolled=enrolment is not None,
            enrolment=enrolment.digest() if enrolment else "",
            engine_process=store.engine_process,
            pipeline=enrolment.pipeline if enrolment else "",
            pool=enrolment.pool if enrolment else self.config.pool,
            engine_name=enrolment.engine if enrolment else self.config.engine_name,
            fence=Held(pipeline=fence.pipeline, operation=fence.operation, generation=fence.generation),
            engine=report,
            holds=store.holds,
            loads=tuple(store.loads()),
            in_flight=self.operations.in_flight,
            uncertain=uncertain,
            uncertain_seconds=self.operations.uncertain_seconds,
            wedged=self.operations.wedged,
            staged=staging.report() if staging else None,
            staging_capacity_bytes=self.ctx.area.usable_bytes,
            routed={name: None if entry is None else entry.listed for name, entry in entries.items()},
            shunned=shunned,
            router_refusals=dict(self.ctx.routers.refusals),
            devices=devices,
            released=store.memory.released,
            releasing=bool(store.memory.in_between),
            startup=self.startup.problem,
            attempts=store.attempts(),
        )
