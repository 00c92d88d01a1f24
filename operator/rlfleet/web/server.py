"""Serves the page, its data, and dry runs for the command line.

Invariants:
- read-only: nothing but GET is routed, and a dry run writes nothing (control.explaining);
- no answer with data without the viewer's token, which the apiserver itself judges at each request (viewer.py), also
  where the answer is one that another viewer's look brought (shared.py);
- static files are those of the package; the content security policy lets the page load and call nothing else.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any, Final

import aiohttp
from aiohttp import web

from rlfleet import __version__
from rlfleet.control.explaining import Wanted
from rlfleet.kube.config import Credentials
from rlfleet.kube.errors import ApiError
from rlfleet.show.facts import document
from rlfleet.show.fleet import fleet
from rlfleet.show.rounds import rounds
from rlfleet.web.shared import Shared
from rlfleet.web.viewer import MAX_TOKEN, Denied, Viewer

log = logging.getLogger(__name__)
Obj = dict[str, Any]

#: Namespace, pipeline, and the sync that is thought of -> what control.explaining.report answers.
Report = Callable[[str, str, Wanted | None], Awaitable[Obj]]

#: What the page shows, as (plural, kind).
_SHOWN: Final = (("rlpipelines", "RLPipeline"), ("enginepools", "EnginePool"), ("syncrounds", "SyncRound"))
#: Rounds that the page gets, newest first.
ROUNDS = 60
#: Dry runs at a time: each asks every gate of a pipeline.
DRY_RUNS = 2
#: Seconds for answers under way when the server stops: nobody's look may hold up the end of the process.
STOP_SECONDS = 0.2
_FILES: Final = {
    "/": ("index.html", "text/html"),
    "/app.js": ("app.js", "text/javascript"),
    "/style.css": ("style.css", "text/css"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
NO_TOKEN = "send a bearer token of yours: kubectl create token SERVICEACCOUNT -n NAMESPACE makes one"


class Standby(Exception):
    """This process does not lead, so it has no keys with which gates would answer. The message names who does."""


class WebServer:
    """Serves on ``host``:``port`` from ``start()`` to ``stop()``, in the running loop."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        where: Callable[[], Awaitable[Credentials]],
        report: Report,
        looks: Shared | None = None,
    ) -> None:
        self._host = host
        self._port = port
        self._find = where
        self._report = report
        self._where: Credentials | None = None
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None
        self._looks = looks or Shared()
        self._dry_runs = asyncio.Semaphore(DRY_RUNS)
        self.port = 0

    async def start(self) -> None:
        """Start serving; OSError where the address is in use."""
        self._where = await self._find()
        # No cookies, no proxies of the environment: as for every other call to the apiserver.
        self._session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), trust_env=False)
        app = web.Application(middlewares=[_guarded])
        for path in _FILES:
            app.router.add_get(path, _static)
        app.router.add_get("/api/fleet", self._fleet)
        app.router.add_get("/api/look", self._look)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=STOP_SECONDS)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stop serving."""
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    def _viewer(self, request: web.Request) -> Viewer:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token or len(token) > MAX_TOKEN or not token.isascii():
            raise Denied(401, NO_TOKEN)
        assert self._session is not None
        assert self._where is not None
        return Viewer(self._session, self._where, token)

    async def _fleet(self, request: web.Request) -> web.Response:
        """The tree and the newest rounds, of one namespace or of all."""
        viewer, namespace = self._viewer(request), _name(request, "namespace")
        try:
            # What somebody else's look showed is theirs only if they could have looked themselves.
            await viewer.may_read([plural for plural, _ in _SHOWN], namespace)
        except Denied as e:
            if e.status == 403 and namespace is None:
                raise Denied(403, f"{e}. Name a namespace that this token may read") from e
            raise

        async def make() -> str:
            lists = await asyncio.gather(*(viewer.list(plural, kind, namespace) for plural, kind in _SHOWN))
            return await asyncio.to_thread(_drawn, *lists)

        text = await self._looks.get(namespace or "", make)
        return web.Response(text=text, content_type="application/json", charset="utf-8")

    async def _look(self, request: web.Request) -> web.Response:
        """What gates and the sender of one pipeline say now; with ``version``, what that sync would do."""
        viewer = self._viewer(request)
        namespace, pipeline = _name(request, "namespace"), _name(request, "pipeline")
        if namespace is None or pipeline is None:
            raise Denied(400, "namespace and pipeline are needed")
        wanted = _wanted(request)
        await viewer.may_see(namespace, pipeline)
        async with self._dry_runs:
            try:
                found = await self._report(namespace, pipeline, wanted)
            except Standby as e:
                raise Denied(503, str(e)) from e
            except ApiError as e:
                raise Denied(502, f"the operator could not look: {e}") from e
        return web.json_response(document(found))


def _drawn(pipelines: list[Obj], pools: list[Obj], listed: list[Obj]) -> str:
    found = {
        "version": __version__,
        "pipelines": fleet(pipelines, pools, listed),
        "rounds": rounds(listed, limit=ROUNDS),
    }
    return json.dumps(document(found))


def _name(request: web.Request, field: str) -> str | None:
    """A parameter that must be a name; None where it is absent or empty."""
    text = request.query.get(field, "")
    if not text:
        return None
    if not _NAME.fullmatch(text):
        raise Denied(400, f"{field} is no name of a Kubernetes object")
    return text


def _wanted(request: web.Request) -> Wanted | None:
    text = request.query.get("version", "")
    if not text:
        return None
    digest = request.query.get("digest") or None
    if not re.fullmatch(r"-1|[0-9]{1,15}", text) or (
        digest is not None and not re.fullmatch(r"[a-z0-9:]{1,128}", digest)
    ):
        raise Denied(400, "version is a whole number from -1, digest that of a manifest")
    return Wanted(int(text), digest, request.query.get("rollback") == "true")


async def _static(request: web.Request) -> web.Response:
    name, kind = _FILES[request.path]
    body = resources.files("rlfleet.web").joinpath("static", name).read_text(encoding="utf-8")
    return web.Response(text=body, content_type=kind, charset="utf-8")


@web.middleware
async def _guarded(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Errors as JSON, the same headers on everything."""
    response: web.StreamResponse
    try:
        response = await handler(request)
    except Denied as e:
        response = web.json_response({"error": str(e)}, status=e.status)
        if e.status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
    except web.HTTPException as e:
        response = web.json_response({"error": e.reason}, status=e.status)
    except Exception:
        log.exception("the web page failed on %s", request.path)
        response = web.json_response({"error": "the operator failed here: see its log"}, status=500)
    response.headers.update(_HEADERS)
    return response
