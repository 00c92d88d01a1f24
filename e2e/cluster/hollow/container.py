"""One container of a pod: runs its process, restarts it by policy, keeps the state that its status is made from.

Three kinds. An ordinary init container runs to completion; a sidecar (an init container with restartPolicy Always)
restarts by itself whatever the pod's policy is; a main container follows the pod's policy. ``started`` is set when the
start-up probe has passed (or there is none), which is what the next container waits for.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import aiohttp

from e2e.cluster.hollow.environment import ConfigError
from e2e.cluster.hollow.probes import Prober
from e2e.cluster.hollow.process import HostProcess, StartError
from e2e.cluster.hollow.timestamps import now
from e2e.cluster.nursery import Nursery

Object = dict[str, Any]

_CONFIG_RETRY_SECONDS = 0.5
_BACK_OFF_SECONDS = (0.1, 0.5, 1.0, 2.0, 5.0)
# A container that ran this long starts with the first back-off again.
_STABLE_SECONDS = 30.0
_MESSAGE_BYTES = 2048

log = logging.getLogger("hollow.container")


class Kind(Enum):
    """How a container takes part in its pod's life."""

    INIT = "init"
    SIDECAR = "sidecar"
    MAIN = "main"


@dataclass(frozen=True)
class Launch:
    """What is needed to start the process; made anew for every start."""

    command: list[str]
    environment: dict[str, str]
    folder: Path
    log: Path
    nurseries: Sequence[Nursery] = ()

    def start(self, command: list[str] | None = None) -> HostProcess:
        """The process, or another one with all that is its own. Raises StartError."""
        return HostProcess(command or self.command, self.environment, self.folder, self.log, self.nurseries)


class Container:
    """A container's life. ``run`` returns when it has ended for good."""

    def __init__(
        self,
        spec: Object,
        kind: Kind,
        policy: str,
        pod_ip: str,
        grace_seconds: float,
        launch: Callable[[], Awaitable[Launch]],
        changed: Callable[[], None],
        session: aiohttp.ClientSession,
    ) -> None:
        self.spec = spec
        self.name: str = spec["name"]
        self.kind = kind
        self.started = asyncio.Event()
        self.ready = False
        self.restarts = 0
        self.identity = ""
        self.state: Object = {"waiting": {"reason": "PodInitializing"}}
        self.last_state: Object = {}
        self.process: HostProcess | None = None
        self.exit_code: int | None = None
        #: Its liveness probe does not end it (``HollowControl.freeze``); after a thaw, until it has passed once.
        self.spared = False
        self.thawed = False
        self._policy = "Always" if kind is Kind.SIDECAR else policy
        self._ip = pod_ip
        self._grace = grace_seconds
        self._launch = launch
        self._changed = changed
        self._session = session
        self._stopping = asyncio.Event()
        self._current: Launch | None = None

    @property
    def running(self) -> bool:
        """Whether its process runs."""
        return self.process is not None and self.process.exit_code is None

    async def run(self) -> None:
        """Runs until the end: completed, failed without a restart, or stopped."""
        attempt = 0
        while not self._stopping.is_set():
            began = time.monotonic()
            code = await self._run_once()
            if code is None:
                return
            if self._stopping.is_set() or not self._restarts_after(code):
                self.exit_code = code
                self._changed()
                return
            attempt = 0 if time.monotonic() - began > _STABLE_SECONDS else attempt
            delay = _BACK_OFF_SECONDS[min(attempt, len(_BACK_OFF_SECONDS) - 1)]
            attempt += 1
            self.last_state = self.state
            self.state = {
                "waiting": {
                    "reason": "CrashLoopBackOff",
                    "message": f"back-off {delay} s restarting container {self.name} (exit code {code})",
                }
            }
            self._changed()
            await self._pause(delay)
            self.restarts += 1
        self._mark_stopped()

    async def stop(self, grace_seconds: float) -> None:
        """SIGTERM, SIGKILL after the grace period; returns when the process has ended. No restart follows."""
        self._stopping.set()
        process = self.process
        if process is None or process.exit_code is not None:
            return
        process.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_seconds):
                await process.wait()
        except TimeoutError:
            process.signal(signal.SIGKILL)
            await process.wait()

    def kill(self) -> None:
        """SIGKILL without a restart, for a pod that is gone."""
        self._stopping.set()
        if self.process is not None:
            self.process.signal(signal.SIGKILL)

    def _restarts_after(self, code: int) -> bool:
        if self.kind is Kind.INIT:
            return code != 0 and self._policy != "Never"
        return self._policy == "Always" or (self._policy == "OnFailure" and code != 0)

    async def _run_once(self) -> int | None:
        """Starts the process and waits for its end. None: stopped before it could start."""
        launch = await self._prepare()
        if launch is None:
            self._mark_stopped()
            return None
        log_start = launch.log.stat().st_size if launch.log.exists() else 0
        began = now()
        self.identity = f"hollow://{self.name}-{self.restarts}-{time.time_ns():x}"
        try:
            self.process = launch.start()
        except StartError as error:
            self._terminated(128, began, "StartError", str(error))
            return 128
        self._current = launch
        self.state = {"running": {"startedAt": began}}
        self._changed()
        probes = asyncio.create_task(self._probe(self.process))
        try:
            code = await self.process.wait()
        finally:
            probes.cancel()
            await asyncio.wait({probes})
        if not probes.cancelled() and (problem := probes.exception()) is not None:
            log.error("probes of %s ended: %r", self.name, problem)
        message = ""
        if code != 0 and self.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            message = _tail(launch.log, log_start)
        self._terminated(code, began, "Completed" if code == 0 else "Error", message)
        return code

    async def _prepare(self) -> Launch | None:
        while not self._stopping.is_set():
            try:
                return await self._launch()
            except ConfigError as error:
                waiting = {"waiting": {"reason": "CreateContainerConfigError", "message": str(error)}}
                if self.state != waiting:
                    self.state = waiting
                    self._changed()
                await self._pause(_CONFIG_RETRY_SECONDS)
        return None

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            pass

    async def _probe(self, process: HostProcess) -> None:
        prober = Prober(self.spec, self._ip, self._session, self._execute)
        if startup := self.spec.get("startupProbe"):
            async with aclosing(prober.verdicts(startup, eager=True)) as verdicts:
                async for passed in verdicts:
                    if passed:
                        break
                    await self._unhealthy(process, "start-up", startup)
                    return
        self.started.set()
        readiness, liveness = self.spec.get("readinessProbe"), self.spec.get("livenessProbe")
        self.ready = self.kind is not Kind.INIT and readiness is None
        self._changed()
        async with asyncio.TaskGroup() as group:
            if readiness:
                group.create_task(self._readiness(prober, readiness))
            if liveness:
                group.create_task(self._liveness(prober, liveness, process))

    async def _readiness(self, prober: Prober, probe: Object) -> None:
        async with aclosing(prober.verdicts(probe)) as verdicts:
            async for passed in verdicts:
                if passed != self.ready:
                    self.ready = passed
                    self._changed()

    async def _liveness(self, prober: Prober, probe: Object, process: HostProcess) -> None:
        async with aclosing(prober.verdicts(probe)) as verdicts:
            async for passed in verdicts:
                if passed and self.thawed:
                    self.spared = self.thawed = False
                if not passed and not self.spared:
                    await self._unhealthy(process, "liveness", probe)
                    return

    async def _unhealthy(self, process: HostProcess, kind: str, probe: Object) -> None:
        # A stop that is under way has its own grace period.
        if self._stopping.is_set():
            return
        log.info("container %s failed its %s probe: ending it", self.name, kind)
        process.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(probe.get("terminationGracePeriodSeconds", self._grace)):
                await process.wait()
        except TimeoutError:
            process.signal(signal.SIGKILL)

    async def _execute(self, command: list[str], timeout: float) -> bool:
        launch = self._current
        if launch is None:
            return False
        try:
            process = launch.start(command)
        except StartError:
            return False
        try:
            async with asyncio.timeout(timeout):
                return await process.wait() == 0
        finally:
            process.signal(signal.SIGKILL)

    def _terminated(self, code: int, began: str, reason: str, message: str) -> None:
        self.started.clear()
        self.ready = False
        self.state = {
            "terminated": {
                "exitCode": code,
                "reason": reason,
                "startedAt": began,
                "finishedAt": now(),
                "containerID": self.identity,
                **({"message": message} if message else {}),
            }
        }
        self._changed()

    def _mark_stopped(self) -> None:
        # Ended between two starts: what it last ended with is its end.
        if self.last_state and "terminated" not in self.state:
            self.state, self.last_state = self.last_state, {}
            self.exit_code = self.state["terminated"]["exitCode"]
            self._changed()


def _tail(path: Path, start: int) -> str:
    with path.open("rb") as output:
        output.seek(max(start, path.stat().st_size - _MESSAGE_BYTES))
        return output.read().decode(errors="replace")
