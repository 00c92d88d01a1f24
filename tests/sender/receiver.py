"""A receiver of pushes: a real HTTP server in a thread, with the gate's two paths and scripted misbehaviour."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

import xxhash
from aiohttp import web

from rlfleet.api import wire
from rlfleet.api.manifest import Manifest

_START_SECONDS = 120.0


class Receiver:
    """Keeps what arrives.

    ``refuse``: answer this error; ``die_after``: cut the connection after so many bytes of a bucket; ``freeze``: read
    nothing of buckets until ``thaw``.
    """

    def __init__(
        self, *, refuse: wire.ErrorBody | None = None, die_after: int | None = None, freeze: bool = False
    ) -> None:
        self.refuse = refuse
        self.die_after = die_after
        self.freeze = freeze
        self.manifest: Manifest | None = None
        self.buckets: dict[int, bytes] = {}
        self.tokens: set[str] = set()
        self.operations: set[str] = set()
        self.lengths: list[str | None] = []
        self.reached = threading.Event()
        self.url = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thaw: asyncio.Event | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._started = threading.Event()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(_START_SECONDS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._loop is not None
        assert self._stop is not None
        self.thaw()
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_START_SECONDS)

    def thaw(self) -> None:
        """Read on."""
        assert self._loop is not None
        assert self._thaw is not None
        self._loop.call_soon_threadsafe(self._thaw.set)

    def tensor_hashes(self) -> dict[str, str]:
        """Hash of every received tensor, computed from the received bytes."""
        assert self.manifest is not None
        return {
            t.name: xxhash.xxh3_128_hexdigest(self.buckets[t.bucket][t.offset : t.offset + t.nbytes])
            for t in self.manifest.tensors
        }

    async def _serve(self) -> None:
        self._loop, self._stop, self._thaw = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        app = web.Application(client_max_size=2**30)
        app.router.add_put("/v1/staging/{operation}/manifest", self._manifest)
        app.router.add_put("/v1/staging/{operation}/buckets/{index}", self._bucket, expect_handler=self._expect)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._started.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _expect(self, request: web.Request) -> web.StreamResponse | None:
        if self.refuse is not None:
            return web.json_response(self.refuse.wire(), status=wire.HTTP_STATUS.get(self.refuse.reason, 409))
        assert request.transport is not None
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return None

    def _seen(self, request: web.Request) -> None:
        self.tokens.add(request.headers["Authorization"].removeprefix("Bearer "))
        self.operations.add(request.match_info["operation"])
        self.lengths.append(request.headers.get("Content-Length"))

    async def _manifest(self, request: web.Request) -> web.Response:
        self._seen(request)
        self.manifest = Manifest.model_validate_json(await request.read())
        return web.json_response({})

    async def _bucket(self, request: web.Request) -> web.Response:
        self._seen(request)
        got = bytearray()
        self.reached.set()
        if self.freeze:
            assert self._thaw is not None
            await self._thaw.wait()
        async for chunk in request.content.iter_any():
            got += chunk
            if self.die_after is not None and len(got) >= self.die_after:
                assert request.transport is not None
                request.transport.abort()
                raise web.HTTPBadRequest
        assert str(len(got)) == request.headers["Content-Length"]
        self.buckets[int(request.match_info["index"])] = bytes(got)
        return web.json_response({})


def targets(receivers: dict[str, Receiver], token: Callable[[str], str]) -> tuple[wire.PushTarget, ...]:
    """Push targets for receivers by engine name; the pod UID is the name."""
    return tuple(
        wire.PushTarget(engine=name, url=r.url, pod_uid=name, buckets=True, token=token(name))
        for name, r in receivers.items()
    )
