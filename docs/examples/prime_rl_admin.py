"""prime-rl's admin paths in front of a fleet that rlfleet keeps: the orchestrator stays as it is.

Run it beside the orchestrator, in a pod whose label the RLPipeline `demo` selects, and point prime-rl at it:

    [orchestrator.client]
    base_url = ["http://router:30001/v1"]
    admin_base_url = ["http://127.0.0.1:8100"]

The orchestrator pauses, orders an update from a folder of safetensors and resumes, each on every admin URL. Here all
of that is one round: nothing happens at /pause, /update_weights answers when the version is committed and served, and
nothing is left to do at /resume. So an orchestrator that dies in between, or asks twice, or resumes after a failure,
cannot leave some engines on other weights than the rest: they go on serving what was committed.

Weights must be broadcast through the file system (prime-rl's `weight_broadcast.type = "filesystem"`); no LoRA.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web
from safetensors.torch import load_file

from rlfleet.client import Client, ClientError, RoutingDegraded, SyncRefused
from rlfleet.sender import SenderError, WeightSender

STEP = re.compile(r"/step_(\d+)/?$")


class Admin:
    """What the orchestrator takes for an inference server. ``model``: the name that it looks for."""

    def __init__(self, client: Client, sender: WeightSender, model: str) -> None:
        self._client = client
        self._sender = sender
        self._model = model
        self._one = asyncio.Lock()

    def app(self) -> web.Application:
        """Its paths."""
        app = web.Application(middlewares=[told])
        app.router.add_get("/health", self.nothing)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/pause", self.nothing)
        app.router.add_post("/resume", self.nothing)
        app.router.add_post("/update_weights", self.update_weights)
        return app

    async def nothing(self, _: web.Request) -> web.Response:
        """The round pauses and resumes engines, and only where that is proven to be right."""
        return web.json_response({"status": "ok"})

    async def models(self, _: web.Request) -> web.Response:
        """The one model there is."""
        return web.json_response({"object": "list", "data": [{"id": self._model, "object": "model"}]})

    async def update_weights(self, request: web.Request) -> web.Response:
        """Publish what lies in ``weight_dir`` as the version that its name says, and sync it."""
        folder = (await request.json()).get("weight_dir") or ""
        step = STEP.search(folder)
        if step is None:
            raise web.HTTPBadRequest(text=f"weight_dir {folder!r} does not end in step_N: use the filesystem broadcast")
        # One at a time. Whoever asks again after a lost answer waits here, and then finds the version committed.
        async with self._one:
            await asyncio.to_thread(self._sync, int(step[1]), Path(folder))
        return web.json_response({"status": "ok"})

    def _sync(self, version: int, folder: Path) -> None:
        state = {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}
        digest = self._sender.publish(version, state).digest
        try:
            self._client.sync(version, sender_incarnation=self._sender.incarnation, manifest_digest=digest, retries=1)
        except RoutingDegraded:
            pass  # the version is in; the operator sees to the engine that could not be reopened


@web.middleware
async def told(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """4xx: asking again does not help, and prime-rl stops. 5xx: it asks again, up to ten times."""
    try:
        return await handler(request)
    except (SyncRefused, SenderError) as e:
        raise web.HTTPConflict(text=str(e)) from e
    except ClientError as e:
        raise web.HTTPServiceUnavailable(text=str(e)) from e


def main() -> None:
    """Serve on loopback, where only this pod's containers come."""
    with (
        Client(os.environ["NAMESPACE"], "demo") as client,
        WeightSender(os.environ["POD_IP"], pod_uid=os.environ["POD_UID"], public_keys=client.public_keys) as sender,
    ):
        admin = Admin(client, sender, os.environ["MODEL"])
        web.run_app(admin.app(), host="127.0.0.1", port=int(os.environ.get("ADMIN_PORT", "8100")), print=None)


if __name__ == "__main__":
    main()
