"""Reads at the apiserver in the viewer's name.

Invariant: no credential of the operator's goes along, neither token nor certificate; the viewer's token is used for the
one request that brought it, and is neither kept nor logged. Whether they may see something is asked at each request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import aiohttp

from rlfleet.api import labels
from rlfleet.kube.config import Credentials

Obj = dict[str, Any]
OURS = f"/apis/{labels.GROUP}/{labels.VERSION}"
SECONDS = 15.0
PAGE = 500
MAX_TOKEN = 16_384


class Denied(Exception):
    """The apiserver does not answer this viewer with data. ``status``: the HTTP status to pass on."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Viewer:
    """One request's reads. ``where`` holds no credentials: kube.config.load(anonymous=True)."""

    def __init__(self, session: aiohttp.ClientSession, where: Credentials, token: str) -> None:
        self._session = session
        self._where = where
        self._token = token

    async def list(self, plural: str, kind: str, namespace: str | None) -> list[Obj]:
        """All objects of one of our kinds, in one namespace or (None) in all."""
        path = _path(plural, namespace)
        items: list[Obj] = []
        token = ""
        while True:
            params = {"limit": str(PAGE)} | ({"continue": token} if token else {})
            body = await self.get(path, params)
            items += [{"kind": kind, **item} for item in body.get("items") or ()]
            token = (body.get("metadata") or {}).get("continue") or ""
            if not token:
                return items

    async def get(self, path: str, params: dict[str, str] | None = None) -> Obj:
        """One read; Denied for everything but success."""
        try:
            async with self._session.get(
                self._where.server + path,
                params=params,
                headers={"Authorization": f"Bearer {self._token}", "Accept": "application/json"},
                ssl=self._where.tls if self._where.tls is not None else True,
                server_hostname=self._where.tls_server_name,
                proxy=self._where.proxy,
                timeout=aiohttp.ClientTimeout(total=SECONDS),
                allow_redirects=False,
            ) as response:
                raw = await response.read()
                if response.status != 200:
                    raise _denied(response.status, raw)
                found = json.loads(raw)
        except (aiohttp.ClientError, TimeoutError, OSError) as e:
            raise Denied(502, f"the apiserver does not answer ({type(e).__name__})") from e
        except ValueError as e:
            raise Denied(502, "the apiserver answered something else than JSON") from e
        if not isinstance(found, dict):
            raise Denied(502, "the apiserver answered something else than an object")
        return found

    async def may_read(self, plurals: Iterable[str], namespace: str | None) -> None:
        """Denied unless the viewer may list all of these kinds of ours, in one namespace or (None) in all."""
        await asyncio.gather(*(self.get(_path(plural, namespace), {"limit": "1"}) for plural in plurals))

    async def may_see(self, namespace: str, pipeline: str) -> None:
        """Denied unless the viewer can read all that a dry run of this pipeline tells about."""
        home = f"{OURS}/namespaces/{namespace}"
        few = {"limit": "1"}
        await asyncio.gather(
            self.get(f"{home}/rlpipelines/{pipeline}"),
            self.get(f"{home}/enginepools", few),
            self.get(f"{home}/syncrounds", few),
            self.get(f"/api/v1/namespaces/{namespace}/pods", few),
        )

    async def may_list(self, namespace: str | None) -> None:
        """Denied unless the viewer can list pools and pods in one namespace or (None) in all."""
        few = {"limit": "1"}
        path = f"/namespaces/{namespace}" if namespace else ""
        await asyncio.gather(self.get(f"{OURS}{path}/enginepools", few), self.get(f"/api/v1{path}/pods", few))

    async def may_read_pipeline(self, namespace: str, pipeline: str) -> None:
        """Denied unless the viewer can read this RLPipeline, as its trainer can."""
        await self.get(f"{OURS}/namespaces/{namespace}/rlpipelines/{pipeline}")


def _path(plural: str, namespace: str | None) -> str:
    return f"{OURS}/namespaces/{namespace}/{plural}" if namespace else f"{OURS}/{plural}"


def _denied(status: int, raw: bytes) -> Denied:
    try:
        message = str(json.loads(raw).get("message") or "")
    except (ValueError, AttributeError):
        message = ""
    if status == 401:
        return Denied(401, "the apiserver does not accept this token: is it expired, or of another cluster?")
    if status in (403, 404):
        return Denied(status, message or "not found, or not allowed")
    return Denied(502, f"the apiserver answered HTTP {status}: {message}"[:500])
