"""A Dynamo worker's RL routes (``POST /engine/<route>`` on its system server) behind the adapter protocol.

Facts this rests on (Dynamo 1.6.1, its vLLM worker; 1.3.1 answers alike):
- every route answers 200 with ``status`` inside, and "error" there is a refusal; an unknown route is 404, a handler
  that raises 500. Any HTTP method runs the handler, OPTIONS too, so nothing can be tried without doing it. Names are
  used as they are advertised: what this worker advertises the operator reads from discovery, before each phase;
- nothing tells whether a worker is paused. A disk update does: it is refused before it looks at its path unless the
  worker is paused, and for want of a path when it is. It is asked with an empty path and a method that no engine has,
  so that it can not load anything whatever becomes of that order. The two refusals differ in the words of ``message``
  alone: status code (200) and ``status`` (error) are the same, and no field says more. Other words are "not known",
  never a guess, so a release that changes them leaves its workers closed and takes part in no round;
- one lock lets a pause, resume, update and flush each wait for the one before, without a limit;
- ``flush_cache`` says ok whether or not the engine could drop anything under requests that it keeps. A pause with
  ``clear_cache`` does drop them (kept requests are computed again), and nothing is computed until the resume;
- the version is what somebody declared, no evidence about weights. A new process has declared none, and is not paused;
- which process answers is in ``/metrics``: the label ``worker_id`` is the instance id of discovery, in hexadecimal.
  Addresses stay the same when a worker is started again, that does not.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from rlfleet.api.wire import BroadcastGroup, MemoryTag, PauseMode
from rlfleet.calls import Answer, CallError, JsonClient, NotSent, Refused, explain
from rlfleet.engine.adapter import Bucket, Capability, Checksum, Facts, Token, View
from rlfleet.engine.common import QUICK, as_text, polls

#: Seconds that a pause may take beyond draining.
PAUSE_SECONDS = 20.0
#: Seconds that a worker may take to admit requests after a resume.
RESUME_SECONDS = 30.0

#: What the label reads while nobody has declared a version: no version of ours, so it voids any proof.
UNDECLARED = "undeclared"

#: With the cache dropped a kept request is recomputed: Keep and Retract are one, as on vLLM.
_MODES = {PauseMode.RETRACT: "keep", PauseMode.KEEP: "keep", PauseMode.WAIT: "keep", PauseMode.ABORT: "abort"}
_ASKS_PAUSED = {"model_path": "", "engine_rpc": "rlfleet_asks_whether_paused"}
_SAMPLE = re.compile(r"^(dynamo_component_\w+)\{([^}]*)\} (\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_INFLIGHT = "dynamo_component_inflight_requests"
#: The endpoint through which frontends ask for routes; its calls are no requests of users.
_RL_ENDPOINT = "rl"


@dataclass(frozen=True, slots=True)
class Process:
    """What a worker's metrics tell of its process. ``instance``: decimal; None: none, or more than one."""

    instance: str | None
    running: int | None


class DynamoAdapter:
    """One worker, by its system server, which knows no keys."""

    type = "Dynamo"
    default_pause = PauseMode.KEEP
    tells_pause = True
    released_before: ClassVar[Mapping[MemoryTag, MemoryTag]] = {}
    offload_remedy = "Dynamo's RL routes offer nothing for that: leave spec.active out"

    def __init__(self, url: str) -> None:
        self._http = JsonClient(url)
        self._pinned: str | None = None

    async def close(self) -> None:
        """Close connections; touches nothing at the worker."""
        await self._http.close()

    # ------------------------------------------------------------------------------------------ observation

    async def facts(self, seconds: float) -> Facts:
        """What workers of this kind can do, once this one answers; from then on this process is meant."""
        process, _ = await asyncio.gather(self._read_process(seconds), self._route("get_weight_version", {}, seconds))
        if process.instance is None:
            raise Refused("GET /metrics", 200, "tells no worker_id, so nobody can say which process this is")
        self._pinned = process.instance
        return Facts(
            version="",
            world_size=1,
            # Its model, ranks and data types it does not tell; without checksums nothing is compared by them.
            layout=hashlib.sha256(self.type.encode()).hexdigest()[:16],
            model="",
            capabilities=frozenset(
                {
                    Capability.SERIALIZED,
                    Capability.LABEL,
                    Capability.PAUSE_RETRACT,
                    Capability.PAUSE_KEEP,
                    Capability.PAUSE_ABORT,
                    Capability.PAUSE_WAIT,
                }
            ),
        )

    async def view(self, seconds: float) -> View:
        """Read process, version and pause at the same time, each within ``seconds``."""
        process, version, paused = await asyncio.gather(
            self._process(seconds), self._quiet("get_weight_version", {}, seconds), self._paused(seconds)
        )
        if process is None and version is None:
            return View(reachable=False)
        told = version.body if version is not None and isinstance(version.body, dict) else {}
        answers = told.get("status") == "ok"
        return View(
            reachable=True,
            admitting=None if paused is None else not paused,
            label=_declared(told) if answers else None,
            # It does not tell its model; that its routes answer says that it has one.
            model=self.type if answers else None,
            running=process.running if process is not None else None,
            waiting=0 if process is not None and process.running is not None else None,
            instance=process.instance if process is not None else None,
        )

    async def _read_process(self, seconds: float) -> Process:
        """The process behind the metrics as they are now; CallError where they can not be read."""
        return read_metrics((await self._http.call("GET", "/metrics", seconds=seconds)).text)

    async def _process(self, seconds: float) -> Process | None:
        try:
            return await self._read_process(seconds)
        except CallError:
            return None

    async def _paused(self, seconds: float) -> bool | None:
        """Whether the worker is paused; None while something else holds its lock, or for an answer not understood."""
        answer = await self._quiet("update_weights_from_disk", _ASKS_PAUSED, seconds)
        told = answer.body if answer is not None and isinstance(answer.body, dict) else {}
        text = str(told.get("message") or "").lower()
        if told.get("status") != "error":
            return None
        if "must be paused" in text:
            return False
        return True if "model_path" in text else None

    async def _quiet(self, route: str, body: dict[str, Any], seconds: float) -> Answer | None:
        try:
            answer = await self._http.ask("POST", f"/engine/{route}", seconds=seconds, body=body)
        except CallError:
            return None
        return answer if answer.status == 200 else None

    # ------------------------------------------------------------------------------------------ admission

    async def pause(
        self,
        mode: PauseMode,
        *,
        drain_seconds: float,
        seconds: float = PAUSE_SECONDS,
        still: Callable[[], None] = lambda: None,
    ) -> None:
        """Pause, drop what was computed with the present weights, and see the worker say that it is paused."""
        if mode is PauseMode.WAIT:
            # Its own mode waits without a limit, and nothing else gets its lock meanwhile.
            await self._drain(drain_seconds)
        still()
        deadline = time.monotonic() + seconds
        await self._route("pause_generation", {"mode": _MODES[mode], "clear_cache": True}, seconds)
        view = View(reachable=False)
        async for _ in polls(deadline):
            view = await self.view(QUICK)
            if view.admitting is False and (mode is not PauseMode.ABORT or view.running == 0):
                return
        raise Refused("POST /engine/pause_generation", 200, f"still not paused after {seconds:g} s ({view})")

    async def _drain(self, seconds: float) -> None:
        async for _ in polls(time.monotonic() + seconds):
            process = await self._process(QUICK)
            if process is not None and process.running == 0:
                return

    async def resume(self) -> None:
        """Let generation go on (idempotent); see that the worker is not paused, and that its engine's loop answers."""
        await self._route("resume_generation", {}, QUICK * 5)
        if not await self.heal_readiness(RESUME_SECONDS):
            raise Refused("POST /engine/resume_generation", 200, f"still not ready after {RESUME_SECONDS:g} s")

    async def heal_readiness(self, seconds: float) -> bool:
        """Whether the worker admits requests; there is nothing that would have to be healed."""
        async for _ in polls(time.monotonic() + seconds):
            if await self._paused(QUICK) is False:
                return True
        return False

    # ------------------------------------------------------------------------------------------ weights

    async def load_directory(self, path: str, *, seconds: float) -> None:
        """Load from disk; the worker refuses unless it is paused. The version that is declared stays as it is."""
        await self._route("update_weights_from_disk", {"model_path": path}, seconds)

    async def recover(self, seconds: float) -> None:
        """Nothing to do: the next load is of all tensors, and nothing is asked of the weights before it."""

    async def begin_parts(self, seconds: float) -> None:
        """Refused: a load from disk takes the directory for the whole model."""
        _no("begin_parts", "a Dynamo worker loads whole models only; use spec.transport.staging Full")

    async def load_part(self, path: str, *, seconds: float) -> None:
        """Refused, as begin_parts is."""
        _no("load_part", "a Dynamo worker loads whole models only")

    async def end_parts(self, seconds: float) -> None:
        """Refused, as begin_parts is."""
        _no("end_parts", "a Dynamo worker loads whole models only")

    async def join_group(self, group: BroadcastGroup, *, rank: int, seconds: float) -> None:
        """Refused: the routes pass their bodies on to methods of the engine that nothing tells the names of.

        A rendezvous that fails would end the worker as well: its own watchdog kills it after 30 s.
        """
        _no("join_group", "a Dynamo worker has no group protocol that is known; use transport CPUSerialize")

    async def begin_update(self, seconds: float) -> None:
        """Refused, as join_group is."""
        _no("begin_update", "no group was joined")

    async def receive(self, bucket: Bucket, *, group: str, seconds: float) -> None:
        """Refused, as join_group is."""
        _no("receive", "no group was joined")

    async def end_update(self, seconds: float) -> None:
        """Refused, as join_group is."""
        _no("end_update", "no group was joined")

    async def leave_group(self, group: str, seconds: float) -> None:
        """No group was ever joined, so every group is left."""

    async def flush(self, seconds: float) -> None:
        """Drop caches once more. The proof is the pause: since then nothing was computed that could be in them."""
        if await self._paused(min(seconds, QUICK)) is not True:
            raise Refused("POST /engine/flush_cache", 200, "the worker is not paused, so its caches may be in use")
        await self._route("flush_cache", {}, seconds)

    async def checksum(self, seconds: float) -> Checksum | None:
        """None: the routes have no checksum of parameters."""
        return None

    async def write_label(self, label: str, seconds: float) -> str:
        """Declare the version, read it back, and see that the process is the one that the weights were loaded into."""
        await self._route("set_weight_version", {"weight_version": label}, seconds)
        told = await self._route("get_weight_version", {}, seconds)
        # Metrics that can not be read are no answer of another process: the order stands, and its end is not known.
        now = (await self._read_process(seconds)).instance
        if now is None or now != self._pinned:
            raise Refused(
                "POST /engine/set_weight_version",
                200,
                f"instance {now or 'unknown'} answers now, the weights were loaded into {self._pinned or 'another'}",
            )
        return _declared(told)

    async def probe(self, seconds: float) -> Token:
        """Never sent: requests reach a worker through its frontend only, and that chooses the worker."""
        raise NotSent("probe: a Dynamo worker takes requests from its frontend only, which chooses the worker")

    async def idle(self, seconds: float, *, memory_here: bool) -> bool:
        """The question whether it is paused waits for the lock that pauses, updates and flushes hold."""
        return await self._paused(seconds) is not None

    async def guarded(self, seconds: float) -> bool | None:
        """False: a system server knows no keys, and does what anybody asks who reaches it."""
        return False

    async def release_memory(self, tag: MemoryTag, *, seconds: float) -> None:
        """Refused: the RL routes offer nothing for that."""
        _no("release_memory", self.offload_remedy)

    async def resume_memory(self, tag: MemoryTag, *, seconds: float) -> None:
        """Refused: nothing can have been released."""
        _no("resume_memory", self.offload_remedy)

    async def _route(self, route: str, body: dict[str, Any], seconds: float) -> dict[str, Any]:
        path = f"/engine/{route}"
        answer = await self._http.call("POST", path, seconds=seconds, body=body)
        if not isinstance(answer.body, dict) or answer.body.get("status") != "ok":
            raise Refused(f"POST {path}", answer.status, explain(answer))
        return answer.body


def read_metrics(text: str) -> Process:
    """The process behind a worker's metrics, and how many requests of users it works on."""
    instances: set[str] = set()
    running, counted = 0, False
    for name, labels_text, value in _SAMPLE.findall(text):
        labels = dict(_LABEL.findall(labels_text))
        try:
            if "worker_id" in labels:
                instances.add(str(int(labels["worker_id"], 16)))
            if name == _INFLIGHT:
                counted = True
                running += 0 if labels.get("dynamo_endpoint") == _RL_ENDPOINT else int(float(value))
        except (ValueError, OverflowError):
            return Process(None, None)
    return Process(instances.pop() if len(instances) == 1 else None, running if counted else None)


def _declared(body: dict[str, Any]) -> str:
    """The declared version as text. ``version_declared`` False: whatever stands in ``version`` was said by nobody."""
    version = body.get("version")
    if body.get("version_declared") is not True or version is None:
        return UNDECLARED
    return as_text(str(version)) or UNDECLARED


def _no(what: str, why: str) -> NoReturn:
    raise Refused(what, 400, why)
