"""GPUs as the driver shows them (NVML): who they are, how much of their memory is in use, and by whom.

Invariants:
- nothing is guessed: a device that the driver does not show, a call that fails or does not come back make memory None
  ("unreadable"), with the reason beside it; they never make it 0;
- memory is of the whole device (of a MIG slice: of the slice), whoever uses it: a neighbour's bytes are as much in the
  way as the engine's own;
- a driver that hangs costs one thread and no caller: while a reading has not come back, everybody is told so.

Used by gate and sender; needs ``libnvidia-ml.so.1``, which comes with the driver and is absent on nodes without one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pynvml

from rlfleet.api.wire import DeviceMemory, DeviceProcess, DeviceReport
from rlfleet.threads import in_daemon

log = logging.getLogger(__name__)

#: Seconds that a caller waits for the driver. It answers within milliseconds when it is well.
READ_SECONDS = 2.0
#: A reading not older than this is given again, so that many status calls ask the driver once.
FRESH_SECONDS = 0.5
MAX_PROCESSES = 16

#: UUID -> NVML's handle.
Handles = dict[str, Any]


class Devices:
    """Reads the devices of one container.

    ``declared``: the UUIDs that the pod names, if any; then only these are told, else all that the driver shows here.
    ``is_own``: whether a process id belongs to this pod, so that other tenants can be told from it.
    """

    def __init__(
        self, node: str, declared: Sequence[str] | None = None, *, is_own: Callable[[int], bool] = lambda pid: False
    ) -> None:
        self._node = node
        self._declared = tuple(declared) if declared is not None else None
        self._is_own = is_own
        # One at a time: NVML calls of one process do not overtake each other, and a hung one is not joined by more.
        self._reading: asyncio.Future[DeviceReport] | None = None
        self._latest: tuple[float, DeviceReport] | None = None
        self._ready = False

    async def report(self, *, fresh: bool = False) -> DeviceReport:
        """The devices now. ``fresh``: not a reading that began before this call."""
        ends = time.monotonic() + READ_SECONDS
        if fresh and self._reading is not None:
            await asyncio.wait({self._reading}, timeout=READ_SECONDS)
        if self._latest is not None and not fresh and time.monotonic() - self._latest[0] < FRESH_SECONDS:
            return self._latest[1]
        if self._reading is None or self._reading.done():
            self._reading = asyncio.ensure_future(in_daemon(self.read, "nvml"))
        # Kept here: another caller may begin the next reading before this one is resumed.
        reading = self._reading
        done, _ = await asyncio.wait({reading}, timeout=max(0.0, ends - time.monotonic()))
        if not done:
            return self._unknown(f"the driver does not answer within {READ_SECONDS:g} s")
        report = reading.result()
        self._latest = (time.monotonic(), report)
        return report

    def read(self) -> DeviceReport:
        """One reading, in the caller's thread."""
        try:
            if not self._ready:
                pynvml.nvmlInit()
                self._ready = True
            return self._read()
        except (pynvml.NVMLError, OSError, ValueError) as e:
            self._reset()
            return self._unknown(f"NVML: {e}"[:512])

    def _read(self) -> DeviceReport:
        shown = _handles()
        if not shown:
            return self._unknown("NVML: the driver shows no device to this container")
        wanted = shown if self._declared is None else {u: shown[u] for u in self._declared if u in shown}
        missing = [u for u in self._declared or () if u not in shown]
        if missing:
            return self._unknown(f"NVML: declared, but not shown by the driver: {', '.join(missing)}"[:512])
        memory: dict[str, DeviceMemory] = {}
        for uuid, handle in wanted.items():
            info = pynvml.nvmlDeviceGetMemoryInfo(handle)
            memory[uuid] = DeviceMemory(used_bytes=int(info.used), total_bytes=int(info.total))
        return DeviceReport(
            source="NVML", node=self._node, uuids=tuple(wanted), memory=memory, processes=self._others(wanted)
        )

    def _others(self, wanted: Handles) -> tuple[DeviceProcess, ...]:
        found = [
            DeviceProcess(uuid=uuid, pid=pid, name=_name(pid), used_bytes=used)
            for uuid, handle in wanted.items()
            for pid, used in _users(handle).items()
            if not self._is_own(pid)
        ]
        return tuple(sorted(found, key=lambda p: (-(p.used_bytes or 0), p.uuid, p.pid))[:MAX_PROCESSES])

    def _unknown(self, problem: str) -> DeviceReport:
        log.debug("devices: %s", problem)
        if self._declared is None:
            return DeviceReport(source="Unknown", node=self._node, problem=problem)
        return DeviceReport(source="Declared", node=self._node, uuids=self._declared, problem=problem)

    def _reset(self) -> None:
        """Begin anew with the next reading: a driver that was restarted answers no old handle."""
        if self._ready:
            self._ready = False
            try:
                pynvml.nvmlShutdown()
            except pynvml.NVMLError as e:
                log.debug("nvmlShutdown: %s", e)


def _handles() -> Handles:
    """UUID -> handle of every device of this container: MIG slices where a GPU is cut into them, else the GPU."""
    found: Handles = {}
    for index in range(pynvml.nvmlDeviceGetCount()):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
        if not _is_cut(gpu):
            found[pynvml.nvmlDeviceGetUUID(gpu)] = gpu
            continue
        for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
            try:
                part = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number)
            except pynvml.NVMLError_NotFound:
                continue  # a place in which no slice was made
            found[pynvml.nvmlDeviceGetUUID(part)] = part
    return found


def _is_cut(gpu: Any) -> bool:
    try:
        mode, _ = pynvml.nvmlDeviceGetMigMode(gpu)
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
        return False
    return bool(mode == pynvml.NVML_DEVICE_MIG_ENABLE)


def _users(handle: Any) -> dict[int, int | None]:
    """Process id -> bytes, for compute and graphics; what the driver does not tell is left out."""
    found: dict[int, int | None] = {}
    for ask in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetGraphicsRunningProcesses):
        try:
            found |= {int(p.pid): None if p.usedGpuMemory is None else int(p.usedGpuMemory) for p in ask(handle)}
        except pynvml.NVMLError as e:
            # Containers without the right to see other processes still read memory, and that is what decides.
            log.debug("processes of a device: %s", e)
    return found


def _name(pid: int) -> str:
    try:
        return str(pynvml.nvmlSystemGetProcessName(pid))[:128]
    except pynvml.NVMLError:
        return ""


def of_pod(pod_uid: str) -> Callable[[int], bool]:
    """Whether a process belongs to this pod, as far as /proc shows it: by its cgroup, or by the variable that every
    container of ours gets. A process that is not shown is taken for somebody else's.
    """
    in_cgroup = {pod_uid.encode(), pod_uid.replace("-", "_").encode()}
    variable = f"RLFLEET_POD_UID={pod_uid}".encode()

    def is_own(pid: int) -> bool:
        if not pod_uid:
            return False
        proc = Path("/proc") / str(pid)
        try:
            if any(uid in proc.joinpath("cgroup").read_bytes() for uid in in_cgroup):
                return True
            return variable in proc.joinpath("environ").read_bytes().split(b"\0")
        except OSError:
            return False

    return is_own
