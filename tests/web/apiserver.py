"""An apiserver that answers reads with recorded objects, and judges tokens: who they are, and what they may read."""

from __future__ import annotations

from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from rlfleet.api.labels import GROUP
from tests.cli.fleets import Objects

#: Tokens -> the namespaces that they may read; None: all of them, cluster-wide too.
TOKENS: dict[str, set[str] | None] = {"all": None, "one": {"t-8dbb0a5ba5"}, "none": set()}


def _bears(obj: Any, wanted: list[tuple[str, str, str]]) -> bool:
    """The object carries the labels ``key=value``; ``key`` alone: with any value."""
    labels = obj["metadata"].get("labels") or {}
    return all(key in labels and (not equals or labels[key] == value) for key, equals, value in wanted)


class Apiserver:
    """Serves ``objects``, which may be exchanged.

    ``date``: what it says the time is, if not this machine's.
    ``seen``: (path, Authorization) of every request; ``looks``: paths of those that asked for more than one object.
    """

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self.date: str | None = None
        self.seen: list[tuple[str, str]] = []
        self.looks: list[str] = []
        app = web.Application()
        app.router.add_get("/{path:.*}", self._get)
        app.on_response_prepare.append(self._dated)
        self.server = TestServer(app)

    async def _dated(self, _: web.Request, response: web.StreamResponse) -> None:
        if self.date is not None:
            response.headers["Date"] = self.date

    async def _get(self, request: web.Request) -> web.Response:
        who = request.headers.get("Authorization", "")
        self.seen.append((request.path, who))
        if request.query.get("limit") not in (None, "1"):
            self.looks.append(request.path)
        token = who.removeprefix("Bearer ")
        if token not in TOKENS:
            return web.json_response({"kind": "Status", "message": "Unauthorized"}, status=401)
        parts = request.path.strip("/").split("/")
        namespace = parts[parts.index("namespaces") + 1] if "namespaces" in parts else None
        allowed = TOKENS[token]
        if allowed is not None and namespace not in allowed:
            message = f'{parts[-1]} is forbidden: User "x" cannot list resource in namespace "{namespace}"'
            return web.json_response({"kind": "Status", "message": message}, status=403)
        if parts[-2] in ("rlpipelines", "secrets", "leases"):
            return self._one(parts[-2], parts[-1])
        wanted = [w.partition("=") for w in request.query.get("labelSelector", "").split(",") if w]
        items: list[Any] = [o for o in self.objects.get(parts[-1], []) if _bears(o, wanted)]
        first, size = int(request.query.get("continue") or 0), int(request.query.get("limit") or 500)
        more = {"continue": str(first + size)} if first + size < len(items) else {}
        meta = {"resourceVersion": "1", **more}
        return web.json_response({"metadata": meta, "items": items[first : first + size]})

    def _one(self, kind: str, name: str) -> web.Response:
        found = next((p for p in self.objects.get(kind, []) if p["metadata"]["name"] == name), None)
        if found is None:
            # As an apiserver writes it, which knows the kind.
            group = {"secrets": "", "leases": ".coordination.k8s.io"}.get(kind, f".{GROUP}")
            return web.json_response({"message": f'{kind}{group} "{name}" not found'}, status=404)
        return web.json_response(found)
