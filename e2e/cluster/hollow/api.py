"""The hollow kubelet's client of the apiserver: raw JSON, a deadline on every request, list + watch with relist.

While etcd or the apiserver is down a request hangs rather than fails, so no call here is without a timeout. The stream
of a watch may end, or its position may be too old; ``follow`` then lists again and reports what was deleted in between
by comparing, because a deletion missed during a broken watch is never sent again.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import ssl
import tempfile
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiohttp
import yaml

Object = dict[str, Any]

STRATEGIC_MERGE = "application/strategic-merge-patch+json"
MERGE = "application/merge-patch+json"
REQUEST_SECONDS = 15.0
_WATCH_SECONDS = 240
_RETRY_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0)
_LINE_LIMIT = 16 * 1024 * 1024

log = logging.getLogger("hollow.api")


class ApiError(Exception):
    """The apiserver refused a request."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Api:
    """An open client for the identity of one kubeconfig."""

    def __init__(self, kubeconfig: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        self.server: str = cluster["server"]
        self._context = ssl.create_default_context(
            cadata=base64.b64decode(cluster["certificate-authority-data"]).decode()
        )
        with tempfile.TemporaryDirectory() as folder:
            # ssl loads a client certificate from files only.
            names = []
            for key in ("client-certificate-data", "client-key-data"):
                names.append(os.path.join(folder, key))
                Path(names[-1]).write_bytes(base64.b64decode(user[key]))
            self._context.load_cert_chain(*names)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Api:
        connector = aiohttp.TCPConnector(ssl=self._context, limit=64)
        self._session = aiohttp.ClientSession(connector=connector, trust_env=False, read_bufsize=1 << 20)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def request(
        self, method: str, path: str, body: Object | None = None, *, content_type: str = "application/json"
    ) -> Object:
        """One request. Raises ApiError for an answer of 400 and above, OSError/TimeoutError/ClientError for none."""
        assert self._session is not None
        data = None if body is None else json.dumps(body).encode()
        async with self._session.request(
            method,
            self.server + path,
            data=data,
            headers={"Content-Type": content_type, "Accept": "application/json"},
            timeout=aiohttp.ClientTimeout(total=REQUEST_SECONDS),
        ) as response:
            text = await response.text()
            if response.status >= 400:
                raise ApiError(response.status, text[:1000])
            answer: Object = json.loads(text)
            return answer

    async def follow(self, path: str, selector: str = "") -> AsyncGenerator[tuple[str, Object], None]:
        """Yields ("PUT" | "GONE", object) for ever: every object of the collection, then every change."""
        known: dict[str, Object] = {}
        version = ""
        failures = 0
        while True:
            try:
                if not version:
                    listed = await self.request("GET", f"{path}?{selector}")
                    version = listed["metadata"]["resourceVersion"]
                    current = {item["metadata"]["uid"]: item for item in listed["items"]}
                    for uid in [uid for uid in known if uid not in current]:
                        yield "GONE", known.pop(uid)
                    for uid, item in current.items():
                        known[uid] = item
                        yield "PUT", item
                async with aclosing(self._watch(f"{path}?{selector}", version)) as events:
                    async for kind, item in events:
                        failures = 0
                        version = item["metadata"]["resourceVersion"]
                        if kind == "BOOKMARK":
                            continue
                        uid = item["metadata"]["uid"]
                        if kind == "DELETED":
                            known.pop(uid, None)
                            yield "GONE", item
                        else:
                            known[uid] = item
                            yield "PUT", item
            except ApiError as error:
                log.info("watch of %s: %s", path, error)
                version = ""
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                log.info("watch of %s broke: %r", path, error)
            else:
                continue
            await asyncio.sleep(_RETRY_SECONDS[min(failures, len(_RETRY_SECONDS) - 1)])
            failures += 1

    async def _watch(self, path: str, version: str) -> AsyncGenerator[tuple[str, Object], None]:
        assert self._session is not None
        parameters = f"watch=1&allowWatchBookmarks=true&timeoutSeconds={_WATCH_SECONDS}&resourceVersion={version}"
        timeout = aiohttp.ClientTimeout(total=_WATCH_SECONDS + 30, sock_connect=5)
        async with self._session.get(f"{self.server}{path}&{parameters}", timeout=timeout) as response:
            if response.status >= 400:
                raise ApiError(response.status, (await response.text())[:1000])
            buffer = b""
            async for chunk in response.content.iter_any():
                buffer += chunk
                if len(buffer) > _LINE_LIMIT:
                    raise ApiError(413, "an event longer than any object can be")
                *lines, buffer = buffer.split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise ApiError(event["object"].get("code", 410), event["object"].get("message", ""))
                    yield event["type"], event["object"]
