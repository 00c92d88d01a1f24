"""vLLM's face of the reference engine (0.32 with VLLM_SERVER_DEV_MODE=1 and our plug-in): routes, keys, error bodies.

Invariants, all the real engine's:
- a pause is the scheduler's: requests that come meanwhile wait inside, where an abort reaches them;
- the numbers of requests are those of the scheduler's last step, so they stand still during a pause;
- what passes the engine's loop (pause state, label, checksum, groups) does not answer while that is stuck; ``/health``
  does, and says 200.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from aiohttp import web

from . import bodies
from .admission import Admission
from .faults import Faults
from .front import Front, Route
from .labels import Labels, Refused
from .memory import WEIGHTS
from .vllm_weights import WorkerError
from .vllm_workers import Workers

VERSION = "0.32.0"
#: Name of our plug-in in --weight-transfer-config.
PLUGIN = "rlfleet"
#: Taken with any key or none; our middleware closes everything else but the user's paths.
_OPEN = ("/health", "/ping", "/version")
_USER = ("/v1/", "/v2/", "/inference/")
_DRAIN_LOOK_SECONDS = 0.005


class BadRequest(Exception):
    """The engine answers 400 with these words."""


class VLLMServer(Front):
    """Routes of one engine."""

    discard = "Call to collective_rpc method failed: Worker failed with error ''"
    discard_status = 500

    def __init__(
        self,
        admission: Admission,
        workers: Workers,
        labels: Labels,
        faults: Faults,
        *,
        api_key: str | None,
        admin_key: str | None,
        plugin: bool,
        close_port: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(admission, workers, faults, api_key=api_key, admin_key=admin_key, close_port=close_port)
        self._workers = workers
        self._labels = labels
        self._plugin = plugin
        self._scheduler = admission.scheduler
        self._asleep = False

    def routes(self) -> list[Route]:
        """vLLM's paths."""
        get, post = ("GET",), ("POST",)
        return [
            (get, "/health", self._fine),
            (get, "/ping", self._fine),
            (get, "/version", self._version),
            (get, "/openapi.json", self._openapi),
            (get, "/server_info", self._server_info),
            *([(get, "/rlfleet/setup", self._server_info)] if self._plugin else []),
            (get, "/get_world_size", self._world_size),
            (get, "/metrics", self._metrics),
            (get, "/v1/models", self._models),
            (post, "/v1/completions", self._completions),
            (post, "/pause", self._pause),
            (post, "/resume", self._resume),
            (get, "/is_paused", self._is_paused),
            (post, "/abort_requests", self._abort),
            (post, "/reset_prefix_cache", self._reset_prefix_cache),
            (post, "/sleep", self._sleep),
            (get, "/is_sleeping", self._is_sleeping),
            (post, "/collective_rpc", self._collective_rpc),
            (post, "/init_weight_transfer_engine", self._init),
            (post, "/shutdown_weight_transfer_engine", self._shutdown),
            (post, "/start_weight_update", self._start),
            (post, "/update_weights", self._update),
            (post, "/finish_weight_update", self._finish),
            (post, "/update_weight_version", self._set_label),
            (get, "/weight_info", self._weight_info),
            (post, "/weight_checker", self._weight_checker),
        ]

    def wanted_key(self, path: str) -> str | None:
        """User paths take the user key; everything that is not open the admin key, where our middleware has one."""
        if path.startswith(_USER):
            return self._api_key
        return None if path in _OPEN else self._admin_key

    def error(self, message: str, status: int) -> web.Response:
        """The engine's error object."""
        kind = "InternalServerError" if status == 500 else "Bad Request"
        body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
        return web.json_response(body, status=status)

    def refusal(self, problem: Exception) -> web.Response | None:
        """What a worker raises is a 500, what is wrong with a call a 400."""
        if isinstance(problem, WorkerError):
            return self.error(f"Call to collective_rpc method failed: Worker failed with error '{problem}'", 500)
        if isinstance(problem, BadRequest | Refused | bodies.BodyError | TypeError | ValueError | KeyError):
            return self.error(f"1 validation error: {problem}", 400)
        return None

    async def _body(self, request: web.Request) -> dict[str, Any]:
        raw = json.loads(await request.read() or b"{}")
        if not isinstance(raw, dict):
            raise BadRequest("body: Input should be a valid dictionary")
        return raw

    # ---- what it says of itself -----------------------------------------------------------------------------------

    async def _fine(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": VERSION})

    async def _openapi(self, _: web.Request) -> web.Response:
        paths: dict[str, dict[str, object]] = {
            path: {method.lower(): {} for method in methods} for methods, path, _ in self.routes()
        }
        return web.json_response({"openapi": "3.1.0", "paths": paths})

    def config(self) -> dict[str, Any]:
        """The parts of vLLM's configuration that somebody asks for."""
        model = {
            "model": self._labels.started_with["model_path"],
            "served_model_name": self._labels.started_with["served_model_name"],
            "dtype": "torch.float32",
            "quantization": None,
            "enable_sleep_mode": self._admission.memory.saver,
        }
        sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1}
        return {
            "model_config": model,
            "parallel_config": sizes | {"enable_expert_parallel": False},
            "lora_config": None,
            "speculative_config": None,
            "weight_transfer_config": {"backend": PLUGIN} if self._plugin else None,
        }

    async def _server_info(self, _: web.Request) -> web.Response:
        return web.json_response({"vllm_config": self.config(), "vllm_env": {"VLLM_SERVER_DEV_MODE": True}})

    async def _world_size(self, _: web.Request) -> web.Response:
        return web.json_response({"world_size": 1})

    async def _metrics(self, _: web.Request) -> web.Response:
        running, waiting = self._scheduler.counted
        labels = f'{{engine="0",model_name="{self._labels.served_model_name}"}}'
        samples = {"vllm:num_requests_running": running, "vllm:num_requests_waiting": waiting}
        return web.Response(text="".join(f"{name}{labels} {float(value)}\n" for name, value in samples.items()))

    async def _models(self, _: web.Request) -> web.Response:
        card = {"id": self._labels.served_model_name, "object": "model", "owned_by": "vllm"}
        return web.json_response({"object": "list", "data": [card]})

    # ---- requests -------------------------------------------------------------------------------------------------

    async def _completions(self, request: web.Request) -> web.Response:
        raw = await self._body(request)
        prompt = raw.get("prompt")
        if not isinstance(prompt, list) or raw.get("stream"):
            raise BadRequest("prompt: the reference engine takes one list of token ids, and does not stream")
        sampling = {
            "max_new_tokens": raw.get("max_tokens", 16),
            **{key: raw[key] for key in ("temperature", "top_p", "stop_token_ids", "seed") if raw.get(key) is not None},
        }
        body = bodies.parse(bodies.Generate, {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True})
        answer = await self._admission.generate(body)
        tokens, meta = answer["output_ids"], answer["meta_info"]
        logprobs = {"token_logprobs": [pair[0] for pair in meta["output_token_logprobs"]]}
        choice = {
            "index": 0,
            "text": "",
            "finish_reason": meta["finish_reason"]["type"],
            "logprobs": logprobs if raw.get("logprobs") is not None else None,
            "token_ids": tokens if raw.get("return_token_ids") else None,
        }
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
        told = {"id": meta["id"], "object": "text_completion", "model": self._labels.served_model_name}
        return web.json_response({**told, "choices": [choice], "usage": usage})

    async def _abort(self, request: web.Request) -> web.Response:
        ids = (await self._body(request)).get("request_ids")

        def work() -> int:
            before = len(self._scheduler.running) + len(self._scheduler.waiting)
            for rid in ids or [None]:
                self._scheduler.abort(rid)
            return before - len(self._scheduler.running) - len(self._scheduler.waiting)

        return web.json_response({"status": "aborted", "aborted": await self.to_the_end(self._workers.run(work))})

    # ---- admission ------------------------------------------------------------------------------------------------

    async def _pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            raise BadRequest("query.mode: Input should be 'abort', 'wait' or 'keep'")
        clear = request.query.get("clear_cache", "true") == "true"

        def work() -> None:
            if mode == "abort":
                self._scheduler.abort(None)
            self._scheduler.pause({"abort": "drain", "wait": "drain"}.get(mode, "retract" if clear else "in_place"))

        await self.to_the_end(self._paused(work))
        return web.json_response({"status": "paused"})

    async def _paused(self, work: Callable[[], None]) -> None:
        await self._workers.run(work)
        while await self._workers.run(lambda: bool(self._scheduler.running) and not self._scheduler.paused):
            await asyncio.sleep(_DRAIN_LOOK_SECONDS)

    async def _resume(self, _: web.Request) -> web.Response:
        await self.to_the_end(self._workers.run(self._scheduler.resume))
        return web.json_response({"status": "resumed"})

    async def _is_paused(self, _: web.Request) -> web.Response:
        return web.json_response({"is_paused": await self._workers.run(lambda: not self._scheduler.admits)})

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        forced = request.query.get("reset_running_requests", "false") == "true"

        def work() -> bool:
            held = bool(self._scheduler.running)
            if held and forced:
                admits, paused = self._scheduler.admits, self._scheduler.paused
                self._scheduler.pause("retract")
                self._scheduler.admits, self._scheduler.paused = admits, paused
            return forced or not held

        return web.json_response({"success": await self.to_the_end(self._workers.run(work))})

    async def _sleep(self, request: web.Request) -> web.Response:
        """Without sleep mode: pauses, frees nothing, and says that it sleeps."""
        level = int(request.query.get("level", "1"))

        def work() -> None:
            self._scheduler.pause("retract")
            self._asleep = level > 0
            if level > 0:
                self._workers.rpc("sleep", {"level": level})

        await self.to_the_end(self._workers.run(work))
        return web.json_response({"status": "sleeping", "level": level})

    async def _is_sleeping(self, _: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": self._asleep or not self._scheduler.admits})

    # ---- weights --------------------------------------------------------------------------------------------------

    async def _collective_rpc(self, request: web.Request) -> web.Response:
        raw = await self._body(request)
        await self.to_the_end(self._workers.run(lambda: self._workers.rpc(str(raw["method"]), raw.get("kwargs", {}))))
        return web.json_response({"results": [None]})

    async def _init(self, request: web.Request) -> web.Response:
        info = (await self._body(request))["init_info"]
        await self._transfer(lambda: self._workers.join(info))
        return web.json_response({"message": "Weight transfer initialized"})

    async def _shutdown(self, _: web.Request) -> web.Response:
        await self.to_the_end(self._workers.run(self._workers.leave))
        return web.json_response({"message": "Weight transfer shut down"})

    async def _start(self, _: web.Request) -> web.Response:
        await self._transfer(self._workers.loads.start)
        return web.json_response({"message": "Weight update started"})

    async def _update(self, request: web.Request) -> web.Response:
        info = (await self._body(request))["update_info"]
        await self._transfer(lambda: self._workers.update(info))
        return web.json_response({"message": "Weights updated"})

    async def _finish(self, request: web.Request) -> web.Response:
        label = (await self._body(request)).get("weight_version")
        await self._transfer(self._workers.loads.finish)
        if label is not None:
            self._scheduler.version = label
        return web.json_response({"message": "Weight update finished"})

    async def _transfer(self, work: Callable[[], None]) -> None:
        def run() -> None:
            if not self._plugin:
                raise WorkerError("Weight transfer not configured. Please set weight_transfer_config to enable it.")
            work()

        await self.to_the_end(self._workers.run(run))

    async def _set_label(self, request: web.Request) -> web.Response:
        label = str((await self._body(request))["new_version"])

        def work() -> None:
            self._scheduler.version = self._labels.weight_version = label

        await self.to_the_end(self._workers.run(work))
        return web.json_response({"success": True, "new_version": label})

    async def _weight_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": await self._workers.run(lambda: self._scheduler.version)})

    async def _weight_checker(self, request: web.Request) -> web.Response:
        action = (await self._body(request)).get("action")
        if action != "checksum":
            raise BadRequest(f"body.action: the reference engine knows 'checksum' only, not {action!r}")

        def work() -> dict[str, str]:
            self._admission.memory.touch(WEIGHTS)
            return self._workers.loads.checksums()

        return web.json_response({"checksums": await self.to_the_end(self._workers.run(work))})
