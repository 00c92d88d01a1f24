"""SGLang's HTTP surface behind the adapter protocol.

Facts this rests on (SGLang 0.5.23 and neighbours):
- bodies are required even when every field has a default, so ``{}`` is sent;
- ``/pause_generation`` and ``/continue_generation`` answer 200 whatever happened: the state is read back. With mode
  ``retract`` the front end only passes the order on; the scheduler carries it out before anything that is asked later.
  A scheduler that is paused counts no more: ``/v1/loads`` shows for ever what ran when the pause came;
- ``/ready`` is 200 only if not paused, started, and the last health check was good. 200 proves "not paused"; 503 has
  three causes. A health check that fails while paused leaves ``/ready`` at 503 after the resume, until one succeeds;
- versions since 0.5.21 demand a begin/end session around broadcast updates, older ones do not have it. Before 0.5.20
  there is no ``/ready``, and nothing else that proves a pause;
- the defaults of ``flush_cache`` and ``abort_all_requests`` would flush under load or abort every running request, so
  both are always sent as false and flushing is a step of its own;
- ``/release_memory_occupation`` answers 200 without the memory saver too, and then frees nothing. With a request in
  the scheduler, or for a tag that is given back already, it ends the server; so does ``/resume_memory_occupation``
  for a tag that is here, and when the device has no room. Neither may be repeated, and neither answer proves anything
  about the device. What was in ``weights`` is gone. A 400 comes for a bad body and for a failure in mid-work alike;
- with an admin key set, control paths take only that key and all others only the user key.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from rlfleet.api.wire import BroadcastGroup, MemoryTag, PauseMode
from rlfleet.calls import Answer, CallError, JsonClient, NoAnswer, Refused, explain
from rlfleet.engine.adapter import Bucket, Checksum, Facts, Token, View
from rlfleet.engine.common import (
    POLL_MIN,
    PROBE_PROMPT,
    QUICK,
    as_int,
    as_text,
    bearer,
    joining,
    polls,
    refuses_strangers,
)
from rlfleet.engine.sglang_facts import PROBED, RELEASE, SESSION, TAGS, TYPE, checksum, counts, read

#: Seconds that a pause may take beyond draining: mode abort repeats its aborts each second until nothing runs.
PAUSE_SECONDS = 20.0
#: Seconds that the engine may take to admit requests after a resume; its own health check takes at least one.
RESUME_SECONDS = 30.0

_RESUME = "/resume_memory_occupation"


class SGLangAdapter:
    """One SGLang server. ``admin_key`` goes to control paths, ``api_key`` to the rest; None where none is set."""

    type = TYPE
    default_pause = PauseMode.RETRACT
    tells_pause = False
    released_before: ClassVar[Mapping[MemoryTag, MemoryTag]] = {}
    offload_remedy = "add --enable-memory-saver to its arguments"

    def __init__(self, url: str, *, api_key: str | None = None, admin_key: str | None = None) -> None:
        self._http = JsonClient(url)
        self._user = bearer(api_key)
        self._admin = bearer(admin_key or api_key)
        self._sessions: bool | None = None
        #: How the pause came about that was verified last and not ended since.
        self._paused: PauseMode | None = None

    async def close(self) -> None:
        """Close connections; touches nothing at the engine."""
        await self._http.close()

    # ------------------------------------------------------------------------------------------ observation

    async def facts(self, seconds: float) -> Facts:
        """Detect version, layout and capabilities. Goes through the scheduler, so it waits while that is blocked."""
        info = await self._get("/server_info", "/get_server_info", seconds)
        exists = await asyncio.gather(*(self._exists(path, seconds) for path in PROBED))
        paths = {path for path, there in zip(PROBED, exists, strict=True) if there}
        self._sessions = SESSION in paths
        return read(info, paths)

    async def _exists(self, path: str, seconds: float) -> bool:
        """Whether the server has this POST path. OPTIONS runs no handler: 404 says no, 405 (or 401) says yes."""
        answer = await self._http.ask("OPTIONS", path, seconds=seconds, headers=self._admin)
        return answer.status != 404

    async def guarded(self, seconds: float) -> bool | None:
        """Its control paths take the admin key, where it was given one, and no other."""
        return await refuses_strangers(self._http, self._user, seconds)

    async def view(self, seconds: float) -> View:
        """Read label, admission and load at the same time, each within ``seconds``."""
        info, ready, loads = await asyncio.gather(
            self._quiet("/model_info", seconds), self._quiet("/ready", seconds), self._quiet("/v1/loads", seconds)
        )
        if info is None and ready is None and loads is None:
            return View(reachable=False)
        model = info.body if info is not None and info.status == 200 and isinstance(info.body, dict) else {}
        running, waiting = counts(loads)
        admitting = None if ready is None or ready.status not in (200, 503) else ready.status == 200
        if admitting is False and self._paused is not None and running is not None and waiting is not None:
            # The counts are those of the moment before: what ran then waits now, or was aborted.
            running, waiting = 0, 0 if self._paused is PauseMode.ABORT else running + waiting
        return View(
            reachable=True,
            admitting=admitting,
            label=as_text(model.get("weight_version")),
            model=as_text(model.get("served_model_name")) or as_text(model.get("model_path")),
            running=running,
            waiting=waiting,
        )

    async def _quiet(self, path: str, seconds: float) -> Answer | None:
        try:
            return await self._http.ask("GET", path, seconds=seconds, headers=self._user)
        except CallError:
            return None

    async def _get(self, path: str, old_path: str, seconds: float) -> dict[str, Any]:
        answer = await self._http.ask("GET", path, seconds=seconds, headers=self._user)
        if answer.status == 404:
            answer = await self._http.ask("GET", old_path, seconds=seconds, headers=self._user)
        if answer.status != 200 or not isinstance(answer.body, dict):
            raise Refused(f"GET {path}", answer.status, explain(answer))
        return answer.body

    # ------------------------------------------------------------------------------------------ admission

    async def pause(
        self,
        mode: PauseMode,
        *,
        drain_seconds: float,
        seconds: float = PAUSE_SECONDS,
        still: Callable[[], None] = lambda: None,
    ) -> None:
        """Pause and prove it: the engine admits nothing now, and nothing runs.

        Retracted requests are proven by an answer of the scheduler to a later question. Aborted ones by its counts; or,
        where it was paused before and counts no more, by a flush, which it refuses as long as anything runs.
        Only together with "it did admit requests before", which the caller has seen, does this prove a pause: "does
        not admit" alone could be a failed health check.
        """
        if mode is PauseMode.KEEP:
            # Mode in_place exists, but a cache in use is never flushed, so old and new weights would mix in it.
            raise Refused("pause", 400, "SGLang can not flush its cache under requests that are kept; use Retract")
        if mode is PauseMode.WAIT:
            await self._drain(drain_seconds)
        still()
        self._paused = None
        wire_mode = "abort" if mode is PauseMode.ABORT else "retract"
        deadline = time.monotonic() + seconds
        await self._control("/pause_generation", {"mode": wire_mode}, seconds)
        async for left in polls(deadline):
            view = await self.view(QUICK)
            if view.admitting is not False:
                continue
            if mode is PauseMode.ABORT:
                proven = (view.running, view.waiting) == (0, 0) or await self._flushes(left)
            else:
                proven = await self._scheduler_answers(left)
            if proven:
                self._paused = mode
                return
        raise Refused("POST /pause_generation", 200, f"still not paused after {seconds:g} s ({view})")

    async def _scheduler_answers(self, seconds: float) -> bool:
        """Whether the scheduler answers a question that is asked now: then it has done all that it was told before."""
        try:
            await self._get("/server_info", "/get_server_info", seconds)
        except CallError:
            return False
        return True

    async def _flushes(self, seconds: float) -> bool:
        """Whether the scheduler flushes now, after the aborts that it was sent: nothing runs then."""
        try:
            await self._control("/flush_cache", {}, seconds)
        except CallError:
            return False
        return True

    async def _drain(self, seconds: float) -> None:
        """Wait until nothing runs or waits, at most ``seconds``; what is left is retracted by the pause."""
        async for _ in polls(time.monotonic() + seconds):
            view = await self.view(QUICK)
            if view.running == 0 and view.waiting == 0:
                return

    async def resume(self) -> None:
        """Continue generation (idempotent) and wait until the engine admits requests."""
        self._paused = None
        await self._control("/continue_generation", {}, QUICK * 5)
        if not await self.heal_readiness(RESUME_SECONDS):
            raise Refused("POST /continue_generation", 200, f"still not ready after {RESUME_SECONDS:g} s")

    async def heal_readiness(self, seconds: float) -> bool:
        """Whether ``/ready`` is 200, running the engine's own health check where it is not: only that corrects it."""
        deadline = time.monotonic() + seconds
        async for left in polls(deadline):
            ready = await self._quiet("/ready", QUICK)
            if ready is not None and ready.status == 200:
                return True
            await self._quiet("/health", max(left, POLL_MIN))
        return False

    # ------------------------------------------------------------------------------------------ weights

    async def load_directory(self, path: str, *, seconds: float) -> None:
        """Load from disk; a 400 may come after some tensors were replaced, so it proves nothing about the weights."""
        body = {"model_path": path, "flush_cache": False, "abort_all_requests": False}
        await self._control("/update_weights_from_disk", body, seconds)

    async def recover(self, seconds: float) -> None:
        """Nothing to do: whatever was loaded, the next load writes every parameter, and opens a session of its own."""

    async def begin_parts(self, seconds: float) -> None:
        """Nothing to do: a load from disk needs no session and writes single parts of fused parameters."""

    async def load_part(self, path: str, *, seconds: float) -> None:
        """A load from disk takes what is there."""
        await self.load_directory(path, seconds=seconds)

    async def end_parts(self, seconds: float) -> None:
        """Nothing to do."""

    async def join_group(self, group: BroadcastGroup, *, rank: int, seconds: float) -> None:
        """Blocks the scheduler until all are there."""
        body = joining(group, rank)
        try:
            await self._control("/init_weights_update_group", body, seconds)
        except Refused as e:
            if "already" not in e.detail.lower():
                raise
            # Left behind by a transfer that broke off; the refusal proves that nothing was joined now.
            await self.leave_group(group.group_name, seconds)
            await self._control("/init_weights_update_group", body, seconds)

    async def begin_update(self, seconds: float) -> None:
        """Open a session, where this version has sessions."""
        if self._sessions is None:
            self._sessions = await self._exists(SESSION, seconds)
        if not self._sessions:
            return
        try:
            await self._control("/begin_weight_update", {}, seconds)
        except Refused as e:
            if e.status != 400:
                raise
            # A session that a broken transfer left open is the one reason to refuse; ending it loads nothing.
            await self._control("/end_weight_update", {}, seconds)
            await self._control("/begin_weight_update", {}, seconds)

    async def receive(self, bucket: Bucket, *, group: str, seconds: float) -> None:
        """Receive one bucket as one uint8 tensor and load its tensors."""
        body = {
            "names": list(bucket.names),
            "dtypes": list(bucket.dtypes),
            "shapes": [list(shape) for shape in bucket.shapes],
            "group_name": group,
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "abort_all_requests": False,
        }
        await self._control("/update_weights_from_distributed", body, seconds)

    async def end_update(self, seconds: float) -> None:
        """Close the session, where this version has sessions."""
        if self._sessions:
            await self._control("/end_weight_update", {}, seconds)

    async def leave_group(self, group: str, seconds: float) -> None:
        """Destroy the group; the engine answers 400 for one that does not exist, which is as good."""
        try:
            await self._control("/destroy_weights_update_group", {"group_name": group}, seconds)
        except Refused as e:
            if e.status != 400 or "not exist" not in e.detail.lower():
                raise

    async def flush(self, seconds: float) -> None:
        """Flush, backing off while the engine says 400: aborts and retractions end after their call returned."""
        refused: Refused | None = None
        async for left in polls(time.monotonic() + seconds):
            try:
                await self._control("/flush_cache", {}, min(left, QUICK * 5))
                return
            except Refused as e:
                if e.status != 400:
                    raise
                refused = e
        raise refused or NoAnswer(f"POST /flush_cache: not even tried within {seconds:g} s")

    async def checksum(self, seconds: float) -> Checksum | None:
        """Ask for checksums of all ranks. None where the path does not exist or the engine says that it can not."""
        answer = await self._http.ask(
            "POST", "/weights_checker", seconds=seconds, body={"action": "checksum"}, headers=self._admin
        )
        if answer.status in (400, 404):
            return None
        if answer.status != 200 or not isinstance(answer.body, dict):
            raise Refused("POST /weights_checker", answer.status, explain(answer))
        if answer.body.get("success") is not True:
            return None
        return checksum(answer.body)

    async def write_label(self, label: str, seconds: float) -> str:
        """Write the label (its default would abort every running request) and read it back."""
        body = {"new_version": label, "abort_all_requests": False}
        await self._control("/update_weight_version", body, seconds)
        info = await self._get("/model_info", "/get_model_info", seconds)
        return as_text(info.get("weight_version")) or ""

    async def probe(self, seconds: float) -> Token:
        """One request like any other. An aborted one answers 200 too, with its tokens so far."""
        body = {"input_ids": PROBE_PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
        answer = await self._http.call("POST", "/generate", seconds=seconds, body=body, headers=self._user)
        given = answer.body if isinstance(answer.body, dict) else {}
        tokens, meta = given.get("output_ids"), given.get("meta_info")
        meta = meta if isinstance(meta, dict) else {}
        end = meta.get("finish_reason")
        if isinstance(end, dict) and end.get("type") == "abort":
            raise Refused("POST /generate", 200, "the probe was aborted")
        token = as_int(tokens[0]) if isinstance(tokens, list) and len(tokens) == 1 else None
        if token is None:
            raise Refused("POST /generate", 200, f"not one token: {explain(answer)}")
        return Token(token, as_text(meta.get("weight_version")))

    async def idle(self, seconds: float, *, memory_here: bool) -> bool:
        """A checksum passes the scheduler behind everything asked before it: its answer proves that all is done.

        Weights that are given back can not be read without ending the server; the resolved arguments then pass the
        scheduler in its place. All that may have been asked of such an engine is to pause.
        """
        try:
            if not memory_here:
                return await self._scheduler_answers(seconds)
            return await self.checksum(seconds) is not None
        except CallError:
            return False

    async def release_memory(self, tag: MemoryTag, *, seconds: float) -> None:
        """Give one tag back; asked once."""
        await self._control(RELEASE, {"tags": [TAGS[tag]]}, seconds)

    async def resume_memory(self, tag: MemoryTag, *, seconds: float) -> None:
        """Take one tag back; asked once."""
        await self._control(_RESUME, {"tags": [TAGS[tag]]}, seconds)

    async def _control(self, path: str, body: dict[str, Any], seconds: float) -> Answer:
        answer = await self._http.call("POST", path, seconds=seconds, body=body, headers=self._admin)
        if isinstance(answer.body, dict) and answer.body.get("success") is False:
            raise Refused(f"POST {path}", answer.status, explain(answer))
        return answer
