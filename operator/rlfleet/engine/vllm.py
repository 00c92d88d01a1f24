"""vLLM's HTTP surface behind the adapter protocol.

Facts this rests on (vLLM 0.32, with ``VLLM_SERVER_DEV_MODE=1``; without it none of the control paths exist):
- the mode of ``/pause`` is a query parameter; a body is ignored. Its answer comes when nothing is in flight any more;
  ``/is_paused`` says yes from the first moment on, so both are needed. With ``clear_cache`` kept requests lose their
  cache and are recomputed when they go on, which is what SGLang calls retract;
- ``/reset_prefix_cache`` answers 200 with ``success: false`` under load; ``reset_running_requests`` makes it succeed;
- an update puts parameters into load state: until all of it has ended well they hold nothing, no checksum can be read
  (500), and a request that is scheduled ends the engine. ``/health`` stays 200;
- of sessions through our plug-in (rlfleet_vllm) none ends well unless every parameter was loaded, and the next whole
  load repairs one that failed. An update that fails ends its session, a finish that fails does not;
- ``reload_weights``, all that there is without the plug-in, is a session of its own. Parts of fused parameters that it
  does not get become garbage, and it answers 200. A path that does not exist leaves load state behind, too, and what
  was loaded in part before it failed is mixed into the next load;
- a scheduler that is paused writes no metrics: the numbers of requests are those of the last step;
- ``/wake_up`` resumes scheduling by itself once all memory is back, so the workers are asked instead; ``/sleep``
  without sleep mode pauses, frees nothing and answers 200;
- a connection over which an error 500 came is closed without a word, so no connection is used twice;
- ``--api-key`` guards ``/v1`` and ``/inference`` only; our middleware closes the rest with the pod's own admin key.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar
from urllib.parse import urlencode

from rlfleet.api.wire import BroadcastGroup, MemoryTag, PauseMode
from rlfleet.calls import Answer, CallError, JsonClient, NoAnswer, Refused, explain
from rlfleet.engine.adapter import Bucket, Checksum, Facts, Token, View
from rlfleet.engine.common import PROBE_PROMPT, QUICK, as_int, as_text, bearer, joining, polls, refuses_strangers
from rlfleet.engine.vllm_facts import PLUGIN, SETUP, TAGS, WORKERS, read

#: Seconds that a pause may take beyond draining.
PAUSE_SECONDS = 20.0
#: Seconds that the engine may take to admit requests after a resume.
RESUME_SECONDS = 30.0
#: SHA-256 of nothing: what a parameter hashes to whose values are packed away elsewhere (linear layers on CPUs).
EMPTY = hashlib.sha256(b"").hexdigest()

_USER_PATHS = ("/v1/", "/inference/")
_DEVELOPMENT = "set VLLM_SERVER_DEV_MODE=1 in the engine's environment"
#: What to do about a path that is missing for a reason of its own.
_REMEDIES = {"/openapi.json": "leave --disable-fastapi-docs out: its paths tell what the engine can do"}
_GAUGE = re.compile(r"^vllm:num_requests_(running|waiting)(?:\{[^}]*\})? ([0-9.eE+]+)$", re.MULTILINE)


class VLLMAdapter:
    """One vLLM server. ``admin_key`` goes to control paths, ``api_key`` to the rest; None where none is set."""

    type = "VLLM"
    default_pause = PauseMode.KEEP
    tells_pause = True
    released_before: ClassVar[Mapping[MemoryTag, MemoryTag]] = {MemoryTag.WEIGHTS: MemoryTag.KV_CACHE}
    offload_remedy = "add --enable-sleep-mode to its arguments"

    def __init__(self, url: str, *, api_key: str | None = None, admin_key: str | None = None) -> None:
        self._http = JsonClient(url, keep_alive=False)
        self._user = bearer(api_key)
        self._admin = bearer(admin_key or api_key)
        #: Whether weights can travel through our weight transfer plug-in; None: not asked yet.
        self._plugin: bool | None = None

    async def close(self) -> None:
        """Close connections; touches nothing at the engine."""
        await self._http.close()

    # ------------------------------------------------------------------------------------------ observation

    async def facts(self, seconds: float) -> Facts:
        """Detect version, layout and capabilities from what the server publishes of itself."""
        version, paths, info, size = await asyncio.gather(
            self._get("/version", seconds),
            self._get("/openapi.json", seconds),
            self._setup(seconds),
            self._get("/get_world_size", seconds),
        )
        facts, self._plugin = read(version, paths, info, size)
        return facts

    async def guarded(self, seconds: float) -> bool | None:
        """Its control paths are open to everybody, unless our middleware closes them."""
        return await refuses_strangers(self._http, self._user, seconds)

    async def _setup(self, seconds: float) -> dict[str, Any]:
        """What it was started with: from our middleware, or from vLLM itself, which needs pip in its image for it."""
        answer = await self._http.ask("GET", SETUP, seconds=seconds, headers=self._admin)
        if answer.status == 200 and isinstance(answer.body, dict):
            return answer.body
        try:
            return await self._get("/server_info?config_format=json", seconds)
        except Refused as e:
            if e.status != 500:
                raise
            remedy = "add --middleware rlfleet_vllm.ControlKey, or pip to the engine's image"
            raise Refused("GET /server_info", 500, f"{e.detail}; {remedy}") from e

    async def view(self, seconds: float) -> View:
        """Read label, admission and load at the same time, each within ``seconds``."""
        models, paused, info, metrics = await asyncio.gather(
            *(self._quiet(path, seconds) for path in ("/v1/models", "/is_paused", "/weight_info", "/metrics"))
        )
        if models is None and paused is None and info is None and metrics is None:
            return View(reachable=False)
        told = _body(paused).get("is_paused")
        admitting = not told if isinstance(told, bool) else None
        running, waiting = _counts(metrics)
        if admitting is False and running is not None and waiting is not None:
            # A paused scheduler steps no more and counts no more: what it counted last is held now, nothing runs.
            running, waiting = 0, running + waiting
        return View(
            reachable=True,
            admitting=admitting,
            label=as_text(_body(info).get("weight_version")),
            model=_model(models),
            running=running,
            waiting=waiting,
        )

    async def _quiet(self, path: str, seconds: float) -> Answer | None:
        try:
            return await self._http.ask("GET", path, seconds=seconds, headers=self._key(path))
        except CallError:
            return None

    async def _get(self, path: str, seconds: float) -> dict[str, Any]:
        answer = await self._http.ask("GET", path, seconds=seconds, headers=self._key(path))
        if answer.status == 404:
            raise Refused(f"GET {path}", 404, f"no such path; {_REMEDIES.get(path, _DEVELOPMENT)}")
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
        """Pause and prove it: the call has come back, and the engine says that it is paused.

        Keep and Retract are one here: requests stay, lose their cache, and are recomputed when they go on.
        """
        if mode is PauseMode.WAIT:
            await self._drain(drain_seconds)
        still()
        deadline = time.monotonic() + seconds
        await self._pause("abort" if mode is PauseMode.ABORT else "keep", seconds)
        async for _ in polls(deadline):
            answer = await self._quiet("/is_paused", QUICK)
            if _body(answer).get("is_paused") is True:
                return
        raise Refused("POST /pause", 200, f"still not paused after {seconds:g} s")

    async def _drain(self, seconds: float) -> None:
        """Let what runs end while new requests wait, at most ``seconds``; what still runs then is kept."""
        if seconds > 0:
            with contextlib.suppress(NoAnswer):
                await self._pause("wait", seconds)

    async def _pause(self, mode: str, seconds: float) -> None:
        await self._control(f"/pause?{urlencode({'mode': mode, 'clear_cache': 'true'})}", None, seconds)

    async def resume(self) -> None:
        """Go on (idempotent), and see that the engine says so."""
        await self._control("/resume", None, QUICK * 5)
        if not await self.heal_readiness(RESUME_SECONDS):
            raise Refused("POST /resume", 200, f"still paused after {RESUME_SECONDS:g} s")

    async def heal_readiness(self, seconds: float) -> bool:
        """Whether the engine says that it is not paused. It is never wrong about it, so there is nothing to heal."""
        async for _ in polls(time.monotonic() + seconds):
            told = _body(await self._quiet("/is_paused", QUICK)).get("is_paused")
            if told is False:
                return True
        return False

    # ------------------------------------------------------------------------------------------ weights

    async def recover(self, seconds: float) -> None:
        """Leave no session open. Without our plug-in also see that there are weights again, of whatever values."""
        if await self._has_plugin(seconds):
            await self._drop_session(seconds)
            return
        # A session that loads nothing puts back what is not loaded in part. With no backend at all it is refused.
        await self._control("/start_weight_update", None, seconds)
        await self.end_update(seconds)
        await self.checksum(seconds)

    async def _drop_session(self, seconds: float) -> None:
        """An update without any content is always refused before it touches anything, and ends its session."""
        with contextlib.suppress(Refused):
            await self._control("/update_weights", {"update_info": {}}, seconds)

    async def load_directory(self, path: str, *, seconds: float) -> None:
        """Load every file in one session: by our plug-in, which misses no tensor, or else by ``reload_weights``."""
        ends = time.monotonic() + seconds
        if not await self._has_plugin(seconds):
            await self._workers("reload_weights", {"weights_path": path}, seconds)
            return
        await self.begin_update(seconds)
        await self.load_part(path, seconds=max(ends - time.monotonic(), QUICK))
        await self.end_update(max(ends - time.monotonic(), QUICK))

    async def begin_parts(self, seconds: float) -> None:
        """Open the one session that all parts must share."""
        if not await self._has_plugin(seconds):
            raise Refused("POST /start_weight_update", 400, f"needs --weight-transfer-config with backend {PLUGIN}")
        await self.begin_update(seconds)

    async def load_part(self, path: str, *, seconds: float) -> None:
        """Load every file of a directory within the open session."""
        await self._control("/update_weights", {"update_info": {"directory": path}}, seconds)

    async def end_parts(self, seconds: float) -> None:
        """Close the session."""
        await self.end_update(seconds)

    async def _has_plugin(self, seconds: float) -> bool:
        if self._plugin is None:
            await self.facts(seconds)
        return self._plugin is True

    async def join_group(self, group: BroadcastGroup, *, rank: int, seconds: float) -> None:
        """Blocks the engine until all are there."""
        info = {**joining(group, rank), "timeout_s": _before(seconds)}
        await self._control("/init_weight_transfer_engine", {"init_info": info}, seconds)

    async def begin_update(self, seconds: float) -> None:
        """Open a session; the first update in it is what touches parameters."""
        try:
            await self._control("/start_weight_update", None, seconds)
        except Refused as e:
            if "already" not in e.detail.lower():
                raise
            # A broken transfer left it open.
            await self._drop_session(seconds)
            await self._control("/start_weight_update", None, seconds)

    async def receive(self, bucket: Bucket, *, group: str, seconds: float) -> None:
        """Receive one bucket as one uint8 tensor and load its tensors. The group is the last one joined."""
        info = {
            "names": list(bucket.names),
            "dtype_names": list(bucket.dtypes),
            "shapes": [list(shape) for shape in bucket.shapes],
            "timeout_s": _before(seconds),
        }
        await self._control("/update_weights", {"update_info": info}, seconds)

    async def end_update(self, seconds: float) -> None:
        """Close the session, which finds what is missing; the label is written once the weights are verified."""
        await self._control("/finish_weight_update", {}, seconds)

    async def leave_group(self, group: str, seconds: float) -> None:
        """Leave whatever group there is; without one this succeeds, too."""
        await self._control("/shutdown_weight_transfer_engine", None, seconds)

    async def flush(self, seconds: float) -> None:
        """Drop every prefix. Caches of other kinds were dropped by the pause, and nothing has run since."""
        path = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
        refused: Refused | None = None
        async for left in polls(time.monotonic() + seconds):
            answer = await self._control(path, None, min(left, QUICK * 5))
            if _body(answer).get("success") is True:
                return
            refused = Refused("POST /reset_prefix_cache", answer.status, explain(answer))
        raise refused or NoAnswer(f"POST /reset_prefix_cache: not even tried within {seconds:g} s")

    async def checksum(self, seconds: float) -> Checksum | None:
        """Ask for checksums of all workers. None where there is no such path; Refused while parameters hold nothing."""
        path = "/weight_checker"
        answer = await self._http.ask(
            "POST", path, seconds=seconds, body={"action": "checksum"}, headers=self._key(path)
        )
        if answer.status == 404:
            return None
        hashes = _body(answer).get("checksums")
        if answer.status != 200 or not isinstance(hashes, dict) or not hashes:
            raise Refused(f"POST {path}", answer.status, explain(answer))
        text = json.dumps(hashes, sort_keys=True, separators=(",", ":"))
        return Checksum(hashlib.sha256(text.encode()).hexdigest(), meaningful=EMPTY not in hashes.values())

    async def write_label(self, label: str, seconds: float) -> str:
        """Write the label, which touches no request, and read it back."""
        await self._control("/update_weight_version", {"new_version": label}, seconds)
        return as_text((await self._get("/weight_info", seconds)).get("weight_version")) or ""

    async def probe(self, seconds: float) -> Token:
        """One request like any other. An aborted one answers 200 too; which weights made the token is not told."""
        path = "/v1/completions"
        body = {
            "prompt": PROBE_PROMPT,
            "max_tokens": 1,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = await self._http.call("POST", path, seconds=seconds, body=body, headers=self._key(path))
        choices = _body(answer).get("choices")
        choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        if choice.get("finish_reason") == "abort":
            raise Refused(f"POST {path}", 200, "the probe was aborted")
        tokens = choice.get("token_ids")
        token = as_int(tokens[0]) if isinstance(tokens, list) and len(tokens) == 1 else None
        if token is None:
            raise Refused(f"POST {path}", 200, f"not one token: {explain(answer)}")
        return Token(token, None)

    async def idle(self, seconds: float, *, memory_here: bool) -> bool | None:
        """Pause state and checksum pass the engine's loop behind everything asked before: their answers prove it done.

        A checksum that is refused proves it as well: parameters are in load state and nobody works on them. An engine
        that has none is asked for its pause state alone, and one without development paths can not be asked at all.
        """
        crosses = await self._crosses_loop(seconds)
        if not crosses or not memory_here:
            return crosses
        try:
            await self.checksum(seconds)
        except Refused:
            return await self._crosses_loop(seconds)
        except CallError:
            return False
        return True

    async def _crosses_loop(self, seconds: float) -> bool | None:
        """Whether the engine behind the front end lives. A front end alone answers 500, and 404 to what it has not."""
        answer = await self._quiet("/is_paused", seconds)
        if answer is not None and answer.status == 404:
            return None
        return answer is not None and answer.status == 200

    # ------------------------------------------------------------------------------------------ device memory

    async def release_memory(self, tag: MemoryTag, *, seconds: float) -> None:
        """Have the workers give one tag back; the scheduler stays paused and is not asked."""
        if tag is MemoryTag.KV_CACHE:
            await self._workers("discard", {"tags": ["kv_cache"]}, seconds)
        else:
            # It takes the cache along (released_before). To discard the weights alone would lose buffers that belong
            # to no checkpoint, such as those of rotary embeddings: only sleep keeps a copy of them. Level 2 keeps none
            # of the parameters in host memory: another load follows every wake.
            await self._workers("sleep", {"level": 2}, seconds)

    async def resume_memory(self, tag: MemoryTag, *, seconds: float) -> None:
        """Have the workers take one tag back; the scheduler stays paused."""
        await self._workers("wake_up", {"tags": [TAGS[tag]]}, seconds)

    # ------------------------------------------------------------------------------------------ calls

    async def _workers(self, method: str, kwargs: Mapping[str, Any], seconds: float) -> None:
        await self._control(WORKERS, {"method": method, "kwargs": dict(kwargs)}, seconds)

    async def _control(self, path: str, body: dict[str, Any] | None, seconds: float) -> Answer:
        return await self._http.call("POST", path, seconds=seconds, body=body, headers=self._key(path))

    def _key(self, path: str) -> dict[str, str] | None:
        return self._user if path.startswith(_USER_PATHS) else self._admin


def _before(seconds: float) -> float:
    """The engine gives up a little before its caller, and says so: its loop is then known to be free again."""
    return max(seconds - 1.0, seconds * 0.8)


def _body(answer: Answer | None) -> Mapping[str, Any]:
    return answer.body if answer is not None and isinstance(answer.body, dict) else {}


def _model(answer: Answer | None) -> str | None:
    data = _body(answer).get("data")
    first = data[0] if isinstance(data, list) and data and isinstance(data[0], dict) else {}
    return as_text(first.get("id"))


def _counts(answer: Answer | None) -> tuple[int | None, int | None]:
    """Running and waiting requests over all engine cores, as of their last step; None where that is not told."""
    if answer is None or answer.status != 200:
        return None, None
    found: dict[str, list[float]] = {"running": [], "waiting": []}
    for which, value in _GAUGE.findall(answer.text):
        found[which].append(float(value))
    running, waiting = (round(sum(v)) if v else None for v in found.values())
    return running, waiting
