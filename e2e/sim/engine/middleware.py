"""Runs an ASGI middleware, as vLLM loads them by name, in front of the reference engine's aiohttp handlers.

Invariant: what the middleware passes on is handled as if it were not there; what it answers itself reaches no handler.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

Message = dict[str, Any]


def named(name: str, config: Mapping[str, Any]) -> Middleware:
    """Middleware ``package.Class``, imported as vLLM does. ``config``: what it may read of the engine's VllmConfig."""
    module, _, attribute = name.rpartition(".")
    kind: Callable[..., Callable[..., Awaitable[None]]] = getattr(importlib.import_module(module), attribute)
    known = json.loads(json.dumps(config), object_hook=lambda fields: SimpleNamespace(**fields))
    application = SimpleNamespace(state=SimpleNamespace(vllm_config=known))

    @web.middleware
    async def run(request: web.Request, handler: Handler) -> web.StreamResponse:
        passed: list[bool] = []
        sent: list[Message] = []

        async def app(*_: Any) -> None:
            passed.append(True)

        async def receive() -> Message:
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        scope: Message = {
            "type": "http",
            "app": application,
            "method": request.method,
            "path": request.path,
            "root_path": "",
            "headers": [(name.lower(), value) for name, value in request.raw_headers],
        }
        await kind(app)(scope, receive, send)
        if passed:
            return await handler(request)
        start, body = sent
        headers = {key.decode(): value.decode() for key, value in start["headers"]}
        return web.Response(status=start["status"], headers=headers, body=body["body"])

    return run
