"""Probes as the pod spec asks for them: httpGet, tcpSocket, exec; periods, thresholds and timeouts included.

A probe has three outcomes for its owner: nothing changed, it crossed its success threshold, it crossed its failure
threshold. A probe that cannot be carried out counts as failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import aiohttp

Object = dict[str, Any]
# (command, timeout) -> whether it exited with 0.
Execute = Callable[[list[str], float], Awaitable[bool]]


class Prober:
    """Carries out probes against one container."""

    def __init__(self, container: Object, pod_ip: str, session: aiohttp.ClientSession, execute: Execute) -> None:
        self._container = container
        self._ip = pod_ip
        self._session = session
        self._execute = execute

    async def verdicts(self, probe: Object) -> AsyncGenerator[bool, None]:
        """Yields True or False whenever the probe's threshold for it is reached (and again with every later result)."""
        await asyncio.sleep(probe.get("initialDelaySeconds", 0))
        streak, last = 0, None
        while True:
            result = await self._once(probe)
            streak = streak + 1 if result == last else 1
            last = result
            threshold = probe.get("successThreshold", 1) if result else probe.get("failureThreshold", 3)
            if streak >= threshold:
                yield result
            await asyncio.sleep(probe.get("periodSeconds", 10))

    async def _once(self, probe: Object) -> bool:
        timeout = float(probe.get("timeoutSeconds", 1))
        try:
            if "httpGet" in probe:
                return await self._http(probe["httpGet"], timeout)
            if "tcpSocket" in probe:
                return await self._tcp(probe["tcpSocket"], timeout)
            if "exec" in probe:
                return await self._execute(probe["exec"]["command"], timeout)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return False
        return False

    async def _http(self, action: Object, timeout: float) -> bool:
        scheme = action.get("scheme", "HTTP").lower()
        url = f"{scheme}://{action.get('host') or self._ip}:{self._port(action['port'])}{action.get('path', '/')}"
        headers = {"User-Agent": "kube-probe/1.34", "Connection": "close"}
        headers.update({header["name"]: header["value"] for header in action.get("httpHeaders", [])})
        async with self._session.get(
            url,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=timeout),
            # As the kubelet: a probe asks whether something answers, not who.
            ssl=False,
            allow_redirects=False,
        ) as response:
            await response.read()
            return 200 <= response.status < 400

    async def _tcp(self, action: Object, timeout: float) -> bool:
        async with asyncio.timeout(timeout):
            _, writer = await asyncio.open_connection(action.get("host") or self._ip, self._port(action["port"]))
        writer.close()
        await writer.wait_closed()
        return True

    def _port(self, port: int | str) -> int:
        if isinstance(port, int):
            return port
        for known in self._container.get("ports", []):
            if known.get("name") == port:
                return int(known["containerPort"])
        return int(port)
